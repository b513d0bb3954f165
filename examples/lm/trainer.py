"""The training loop, for any folding of the ranks; all layers share one communicator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lm import checkpoint, data, evaluate, parallel, plots, precision
from lm.build import (
    build_graphed_step,
    build_model,
    build_optimizer,
    count_parameters,
    fits_graph,
    learning_rate,
    make_communicator,
    model_vocab,
)
from lm.corpus import Corpus
from lm.errors import RunError, UsageError
from lm.fitting import captures, compiles
from lm.metrics import (
    MetricsFile,
    Record,
    StepTotals,
    Totals,
    forget_load,
    last_load,
    measure_layers,
    moe_layers,
    on_host,
    reduce_step,
    travel_seconds,
)
from lm.options import Options
from lm.pipeline import Pipeline, PipelineStep, lay_out
from lm.progress import StepProgress
from lm.ranks import Ranks, describe
from lm.recompute import save_memory
from lm.sharding import Sharding
from lm.speed import measure_speed
from lm.stop import StopRequest
from moecomm.graphs import GraphedStep
from moecomm.nn import backward_weights, clip_grad_norm, set_loss_scale, sync_gradients, update_expert_bias


class Trainer:
    def __init__(self, options: Options, ranks: Ranks, stop: StopRequest | bool) -> None:
        """stop: becomes true when the run is asked to stop."""
        self.options, self.ranks, self.stop = options, ranks, stop
        self.out = Path(options.out)
        self.corpus = Corpus(options)
        self._require_same_text()
        self.local_batch = options.batch // ranks.folding.dp
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        vocab = model_vocab(options, self.corpus.tokenizer.vocab)
        folding = ranks.folding
        # Windows that a rank computes at a time, also outside of training.
        self.eval_batch = self.local_batch // options.microbatches
        tokens = self.eval_batch * options.seq // (folding.tp * folding.cp)
        self.comm = make_communicator(options, folding, tokens, ranks.device)
        torch.manual_seed(options.seed)
        layout = lay_out(options, ranks.place.pp)
        self.model = build_model(options, vocab, self.comm, folding, layout.holds, ranks.device)
        self.layers = moe_layers(self.model)
        mesh = parallel.split_attention(self.model, folding, ranks.device)
        save_memory(self.model, options)
        if compiles(options, ranks.device.type):
            self.model.compile_blocks()
        self.places_S = parallel.own_places(options.seq, folding, ranks.place, ranks.device)
        self.parameters = self._count_parameters()
        self.sharding = Sharding(self.model, options, folding, ranks.device, mesh) if options.fsdp else None
        self.optimizer = build_optimizer(self.model, options)
        self.run_state = checkpoint.RunState(step=0, data_fingerprint=self.corpus.fingerprint)
        self.saver = checkpoint.Saver(self.out / "checkpoints", ranks)
        if options.resume:
            checkpoint.load(self.saver.folder, self.model, self.optimizer, self.run_state, ranks)
            if self.run_state.step > options.steps:
                raise UsageError(
                    f"--resume: the run in {self.out} is at step {self.run_state.step} already, beyond "
                    f"--steps {options.steps}"
                )
        self.skipped = 0  # steps skipped in a row, up to the last one
        set_loss_scale(self.model, 1 / options.microbatches)
        self.speed = measure_speed(options, self.parameters[1], vocab, ranks.world, ranks.device)
        self.totals = Totals()
        self.batches: dict[int, torch.Tensor] = {}  # by step: the one that is made ahead
        self.graphed: GraphedStep | None = None
        if options.graph:
            self._capture()
        # Without --graph the first step shows what memory a step takes.
        self.may_capture = options.graph is None and captures(options, ranks.device.type)
        self.bytes_before = torch.cuda.memory_allocated() if self.may_capture else 0
        self.pipeline = self.piped = None
        if folding.pp > 1:
            self.pipeline = Pipeline(self.model, layout, ranks)
            self.piped = PipelineStep(self.pipeline, options, self.eval_batch, self.places_S)

    def _capture(self) -> None:
        self.graphed = build_graphed_step(self._forward_backward, self.model, self.comm)

    def _whole_step(self) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Returns `_forward_backward`, from the second step on as a graph, on all ranks, where every rank's
        memory has room for it."""
        if self.may_capture:
            self.may_capture = False
            fits = torch.tensor(fits_graph(self.ranks.device, self.bytes_before))
            dist.all_reduce(fits, dist.ReduceOp.MIN)
            if fits:
                self._capture()
        return self.graphed or self._forward_backward

    def _require_same_text(self) -> None:
        """Raises UsageError on all ranks if they have read different texts, for example on several hosts."""
        found: list[int] = [0] * self.ranks.world
        dist.all_gather_object(found, self.corpus.fingerprint)
        for rank, fingerprint in enumerate(found):
            if fingerprint != found[0]:
                raise UsageError(f"--data: ranks 0 and {rank} have read different texts")

    def _count_parameters(self) -> tuple[int, int]:
        """Returns `count_parameters` of all stages."""
        folding = self.ranks.folding
        found = count_parameters(self.model, self.options, self.comm.num_local_experts, folding.etp)
        if folding.pp == 1:
            return found
        total = torch.tensor(found)
        dist.all_reduce(total, group=folding.group("pp"))
        every, active = total.tolist()
        return every, active

    def run(self) -> None:
        options, start = self.options, self.run_state.step
        self._begin_output_alike()
        progress = StepProgress(
            start=start, steps=options.steps, log_every=options.log_every, shown=self.ranks.first
        )
        last, stopped, val_loss = max(start, options.steps), False, math.nan
        try:
            for step in range(start + 1, options.steps + 1):
                record, stopped = self.step(step)
                if self.ranks.first:
                    self.metrics.write(record)
                progress.step(record)
                if self.skipped:
                    norm = f"the norm of the gradient is {record['grad_norm']}"
                    progress.note(f"step {step} is left out: {norm}")
                    if self.skipped == options.max_skipped or (step == last and not stopped):
                        self._give_up(f"{norm}; {self.skipped} steps in a row were left out")
                elif stopped or step % options.save_every == 0 or step == last:
                    self.saver.begin(self.model, self.optimizer, self.run_state)
                if stopped:
                    break
                if step % options.eval_every == 0 or step == last:
                    val_loss = self._validate(progress)
            if start >= options.steps:
                val_loss = self._validate(progress)
            if not stopped and not math.isfinite(val_loss):
                self._give_up(f"the validation loss is {val_loss}")
        finally:
            progress.close()
        self.saver.finish()
        if stopped:
            found = f"the checkpoint is in {self.out}"
            if self.skipped:
                found = f"no checkpoint has its last {self.skipped} steps, which were left out"
            self._say(f"stopped at step {self.run_state.step}; {found}; go on with --resume")
        sample = self._sample() if options.sample and not stopped else None
        if self.ranks.first:
            try:
                if sample is not None:
                    (self.out / "sample.txt").write_text(sample + "\n", encoding="utf-8")
                plots.draw_loss(self.metrics.records, self.out / "loss.png")
                plots.draw_expert_load(self.metrics.records, self.out / "expert_load.png")
            except OSError as error:  # a full disk takes no result from a run that has ended well
                self._say(f"--out {self.out}: {error}")
            self.metrics.close()
        if self.graphed is not None:
            self._say(self.graphed.report())
        if options.note:
            self._say(options.note)
        if not stopped:
            totals = self.totals
            speed = f"tokens_per_s={totals.tokens_per_second:.0f} exposed_comm={totals.exposed_share:.4f}"
            for name, value in (self.speed.of(totals.tokens_per_second) if self.speed else {}).items():
                speed += f" {name}={value:.4g}"
            self._say(
                f"result: val_loss={val_loss:.4f} unigram={self.corpus.unigram:.4f} "
                + (speed if totals.steps else "(no step was left to run)")
            )

    def _give_up(self, reason: str) -> NoReturn:
        """Ends the run with RunError, on all ranks, since its weights give numbers that are not finite. They
        are those of the last step that was not skipped; training went on well from every saved checkpoint."""
        aside = self.saver.put_aside(self.run_state.step - self.skipped)
        text = f"step {self.run_state.step}: {reason}"
        if aside is not None:
            text += f"; the checkpoint of these weights is now {aside}"
        before = checkpoint.finished(self.saver.folder)
        go_on = f"go on from {before[-1].name} with --resume" if before else "begin anew"
        raise RunError(f"{text}; {go_on}, with a smaller --lr or --clip")

    def step(self, step: int) -> tuple[Record, bool]:
        """Makes an optimizer step, or skips it on all ranks if the norm of the gradient is not finite.
        Returns its record, and whether the run was asked to stop; both are the same on all ranks."""
        options = self.options
        began = time.perf_counter()
        measured = self.piped is None  # under a pipeline's schedule stages of a layer cannot be measured
        measured &= step in (1, options.steps) or step % options.log_every == 0
        measure_layers(self.layers, measured)
        self.comm.reset_stats()
        tokens_BS = self.batches.pop(step) if step in self.batches else self._batch(step)
        with self.sharding.step() if self.sharding else nullcontext():
            loss_now, load_AE, travelled = self._accumulate(tokens_BS, measured)
        sync_gradients(self.model, folding=self.ranks.folding)
        pp_group = None if self.pipeline is None else self.pipeline.group
        norm_now = clip_grad_norm(self.model, options.clip or math.inf, pp_group=pp_group)
        if step < options.steps:  # the host would only wait now
            self.batches = {step + 1: self._batch(step + 1)}
        loss, norm, load_AE = on_host(loss_now, norm_now, load_AE)
        self.skipped = 0 if math.isfinite(norm) else self.skipped + 1
        rate = learning_rate(step, options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.skipped:
            forget_load(self.layers)
        else:
            self.optimizer.step()
            update_expert_bias(self.model)
        self.optimizer.zero_grad()
        totals = reduce_step(
            load_AE,
            loss=loss * self.ranks.folding.pp,  # only the last of so many stages has a loss
            seconds=time.perf_counter() - began,
            stats=self.comm.stats(),
            members=[0] if self.comm.group is None else dist.get_process_group_ranks(self.comm.group),
            travelled=travelled if measured else None,
            stop=bool(self.stop) or self.saver.failed,
        )
        self.run_state.step = step
        seconds = time.perf_counter() - began
        self.totals.add(totals, tokens=options.batch * options.seq, wall_seconds=seconds)
        return self._record(step, totals, rate=rate, norm=norm, seconds=seconds), totals.stop

    def _batch(self, step: int) -> torch.Tensor:
        """Returns this rank's windows of a step, (B, S + 1) int64 on its device."""
        options, first = self.options, self.ranks.place.dp * self.local_batch
        tokens_BS = data.training_batch(
            self.corpus.training_N,
            seed=options.seed,
            step=step,
            batch=options.batch,
            seq=options.seq,
            part=slice(first, first + self.local_batch),
        )
        if self.ranks.device.type == "cuda":  # from pinned memory, for whose copy the host does not wait
            tokens_BS = tokens_BS.pin_memory().to(self.ranks.device, non_blocking=True)
        return tokens_BS

    def _forward_backward(
        self, tokens_BS: torch.Tensor, times: list[tuple[float, float]] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accumulates the gradients of the step's microbatches. Returns loss and load, and adds each
        microbatch's `travel_seconds` to `times`: a layer keeps those of its last forward and backward."""
        losses, loads, count = [], [], self.options.microbatches
        for number, part_BS in enumerate(tokens_BS.chunk(count), 1):
            if self.sharding is not None:
                self.sharding.begin(last=number == count)
            loss = self._cross_entropy(part_BS) / count
            loss.backward()
            losses.append(loss.detach())
            loads.append(last_load(self.layers))
            if times is not None:
                times.append(travel_seconds(self.layers))
        backward_weights(self.model)  # those that --delay-wgrad has put off
        return torch.stack(losses).sum(), torch.stack(loads).sum(0)

    def _accumulate(
        self, tokens_BS: torch.Tensor, measured: bool
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[float, float]]:
        """Makes the step's gradients. Returns loss, load and, if measured, the total `travel_seconds`. Stages
        of a layer cannot be measured in a graph."""
        if (piped := self.piped) is not None:
            loss = precision.compute(piped, self.dtype, tokens_BS).detach()
            backward_weights(self.model)
            return loss, piped.load_AE, (0.0, 0.0)
        if not measured:
            return *self._whole_step()(tokens_BS), (0.0, 0.0)
        times: list[tuple[float, float]] = []
        loss, load_AE = self._forward_backward(tokens_BS, times)
        return loss, load_AE, (sum(each for each, _ in times), sum(each for _, each in times))

    def _cross_entropy(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return precision.compute(self.model, self.dtype, *data.inputs_and_targets(tokens_BS, self.places_S))

    def _record(self, step: int, totals: StepTotals, *, rate: float, norm: float, seconds: float) -> Record:
        record: Record = {
            "step": step,
            "loss": totals.loss,
            "lr": rate,
            "grad_norm": norm,
            "seconds": seconds,
            "tokens_per_s": self.options.batch * self.options.seq / seconds,
            "comm_share": totals.comm_seconds / totals.seconds,
            "wait_share": totals.wait_seconds / totals.seconds,
            "balance": totals.balance,
        }
        if self.speed is not None:
            record |= self.speed.of(record["tokens_per_s"])
        if self.ranks.world > 1:
            record["late_rank"] = totals.slowest
            record["late_share"] = totals.late_R[totals.slowest] / totals.seconds
        if not math.isnan(totals.exposed_seconds):
            record["exposed_share"] = totals.exposed_seconds / totals.seconds
        if step == 1 or step % self.options.log_every == 0:
            record["load"] = totals.load_AE.tolist()
        return record

    def _validate(self, progress: StepProgress) -> float:
        with self.sharding.evaluation() if self.sharding else nullcontext():
            value = evaluate.validation_loss(
                self.pipeline or self.model,
                self.corpus.validation_N,
                windows=self.options.eval_windows,
                batch=self.eval_batch,
                seq=self.options.seq,
                dtype=self.dtype,
                ranks=self.ranks,
                places_S=self.places_S,
            )
        step = self.run_state.step
        if self.ranks.first:
            self.metrics.write({"step": step, "val_loss": value})
        progress.note(f"validation at step {step}: {value:.4f} nats (unigram {self.corpus.unigram:.4f})")
        return value

    def _sample(self) -> str:
        tokenizer = self.corpus.tokenizer
        prompt = tokenizer.encode(self.options.prompt.encode()).tolist() or [tokenizer.end_of_text]
        with self.sharding.evaluation() if self.sharding else nullcontext():
            tokens = evaluate.sample(
                self.model,
                prompt,
                count=self.options.sample,
                seed=self.options.seed,
                dtype=self.dtype,
                device=self.ranks.device,
            )
        text = tokenizer.decode(tokens)
        self._say(f"sample:\n{text}")
        return text

    def _begin_output_alike(self) -> None:
        """Creates the run's files in the first rank. Raises RunError on all ranks if that fails."""
        problem: list[str | None] = [None]
        if self.ranks.first:
            try:
                self._begin_output()
            except (OSError, RunError) as error:
                problem[0] = f"--out {self.out}: {error}"
        dist.broadcast_object_list(problem, device=torch.device("cpu"))
        if problem[0] is not None:
            raise RunError(problem[0])

    def _begin_output(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        checkpoint.forget_older(self.saver.folder)
        resume_at = self.run_state.step if self.options.resume else None
        self.metrics = MetricsFile(self.out / "metrics.jsonl", resume_at=resume_at)
        total, active = self.parameters
        products = f", products by {self.layers[0].experts.products.name}" if self.layers else ""
        changed = self.options.save(self.out)
        if changed:
            self.metrics.write({"step": self.run_state.step, "changed": changed})
        if not self.options.resume:
            facts = {
                "unigram": self.corpus.unigram,
                "vocab": self.corpus.tokenizer.vocab,
                "parameters": total,
            }
            self.metrics.write({"step": 0, **facts})
        note = ""
        if (self.comm.wire, self.comm.combine_wire, self.comm.gradient_wire) != (None, None, None):
            note = f", rows sent as {self.options.wire}, their sums as {self.options.combine_wire}"
            note += f", gradients as {self.options.gradient_wire}"
        if self.options.note:
            self._say(self.options.note)
        self._say(self.corpus.describe())
        self._say(
            f"model: {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active per token; "
            f"{self.options.layers} layers of {self.options.experts} experts, top {self.options.top_k}, "
            f"width {self.options.dim}, {self.options.dtype}{note}{products}"
        )
        if self.speed is not None:
            self._say(self.speed.describe())
        self._say(
            f"training: {self.options.steps} steps of {self.options.batch} windows of {self.options.seq} "
            f"tokens, {self.options.steps * self.options.batch * self.options.seq:,} in all"
        )
        stages = ""
        if self.options.pp > 1:
            stages = f"; {self.options.stages} stages, {self.options.schedule or '1f1b'}"
        self._say(
            f"ranks: {describe(self.ranks.folding)}{stages}, on {self.ranks.device.type}; window of "
            f"{self.comm.memory.total_bytes / 1e6:.1f} MB a rank"
        )
        if self.options.resume:
            now = "".join(f", with --{name.replace('_', '-')} {value}" for name, value in changed.items())
            self._say(f"resumed at step {self.run_state.step} of {self.options.steps}{now}")
            self._say_rates(changed)

    def _say_rates(self, changed: dict[str, Any]) -> None:
        """Reports how far the learning rate jumps, where the options of a resumed run change its curve."""
        before, step = [each["lr"] for each in self.metrics.records if "lr" in each], self.run_state.step
        if before and step < self.options.steps and {"steps", "warmup", "lr"} & changed.keys():
            after = learning_rate(step + 1, self.options)
            self._say(
                f"learning rate: {before[-1]:.3g} at step {step}, {after:.3g} at step {step + 1}, as its "
                f"curve is now over {self.options.steps} steps, without another warm-up; --lr scales it"
            )

    def _say(self, text: str) -> None:
        if self.ranks.first:
            print(text, flush=True)


def train(options: Options, ranks: Ranks, stop: StopRequest) -> None:
    trainer = Trainer(options, ranks, stop)
    trainer.run()
    dist.barrier()  # no rank leaves while another still needs it
    trainer.comm.close()
