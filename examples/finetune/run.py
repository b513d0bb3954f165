"""One rank of a run: a model of transformers, the Trainer's loop, and experts' tokens carried by moecomm."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lm.checkpoint import in_one_line
from lm.errors import RunError, UsageError
from lm.metrics import MetricsFile
from lm.stop import StopRequest
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging as transformers_logging

from finetune import demo, report, sizes, text
from finetune.options import Options
from finetune.watch import Watch, peak_memory
from moecomm.nn import load_balancing_loss
from moecomm.transformers import Graphed, Resumable, keep_plans

TAKEN = "windows_taken"
"""The file of a checkpoint with the number of windows that its run has taken."""
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""The attention's matrices, by their names in all of transformers' models."""


class BalancingTrainer(Resumable, Trainer):  # type: ignore[misc]
    """Adds `balance` times the balancing loss of each layer, on average over layers, to the loss of training.

    That of transformers counts the choices of all layers together. It is at its least while each layer sends
    its tokens to a few experts, if these are others in each layer."""

    balance, top_k, max_skipped = 0.0, 1, 10
    windows = (0, 0)  # taken by the steps of earlier runs, and by one step of this run
    skipped = 0  # steps left out in a row, up to the last one
    begun = 0  # steps of earlier runs
    saved: int | None = None  # step of the newest checkpoint, also of one that is resumed

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **options: Any
    ) -> Any:
        if not model.training:
            # Divided by the number of all ranks' targets, losses are shares of the mean over ranks. But if a
            # last batch was filled up with windows seen before, the Trainer keeps the first ranks' alone.
            options.pop("num_items_in_batch", None)
        balanced = self.balance > 0.0 and model.training
        if balanced:
            inputs = {**inputs, "output_router_logits": True}
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        if balanced:
            layers = [logits_TE.float().softmax(-1) for logits_TE in outputs.router_logits]
            losses = [load_balancing_loss(each, each.topk(self.top_k).indices) for each in layers]
            # The passes of a step are summed, as their losses are shares of it already.
            loss = loss + self.balance * torch.stack(losses).mean() / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: Any, *arguments: Any, **options: Any) -> Any:
        norm = super()._get_grad_norm(model, *arguments, **options)
        self.skipped = 0 if math.isfinite(norm) else self.skipped + 1  # the same on all ranks
        if self.skipped:
            model.zero_grad()  # the optimizer leaves parameters without a gradient as they are
            step, what = self.state.global_step + 1, f"the norm of the gradient is {float(norm)}"
            if self.is_world_process_zero():
                print(f"step {step} is left out: {what}", flush=True)
            if self.skipped == self.max_skipped or step == self.state.max_steps:
                self.give_up(f"step {step}: {what}; {self.skipped} steps in a row were left out", step)
        return norm

    def give_up(self, text: str, step: int) -> NoReturn:
        """Raises RunError on all ranks. A checkpoint of the present weights is set aside: no run goes on from
        it, as its steps are left out."""
        if self.saved == step - self.skipped:
            path = Path(self.args.output_dir, f"checkpoint-{self.saved}")
            aside = path.with_name(f"suspect-{self.saved}")
            if self.is_world_process_zero():
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            text += f"; the checkpoint of these weights is now {aside}"
        raise RunError(f"{text}; go on from a checkpoint with --resume and a smaller --lr, or begin anew")

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        if self.skipped:
            return  # the next steps may be left out, too
        step, (before, of_step) = self.state.global_step, self.windows
        with _written(f"the checkpoint of step {step}"):
            if self.is_world_process_zero():
                path = Path(self.args.output_dir, f"checkpoint-{step}", TAKEN)
                path.parent.mkdir(exist_ok=True)
                path.write_text(str(before + (step - self.begun) * of_step))
            super()._save_checkpoint(*arguments, **options)
        self.saved = self.state.global_step

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _loaded(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:  # --lr and --steps may be others than those of the checkpoint
            self.lr_scheduler.base_lrs = [self.args.learning_rate] * len(self.lr_scheduler.base_lrs)
            self.lr_scheduler.last_epoch -= 1
            self.lr_scheduler.step()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _loaded(checkpoint):
            super()._load_rng_state(checkpoint)


class GraphedTrainer(Graphed, BalancingTrainer):
    """Replays each pass from a CUDA graph."""


@contextlib.contextmanager
def _loaded(checkpoint: str | None) -> Iterator[None]:
    """Raises UsageError on all ranks if a file of the checkpoint cannot be loaded on one."""
    if checkpoint is None:
        yield
        return
    found: list[str | None] = [None] * dist.get_world_size()
    own: str | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:
        own = in_one_line(error, dist.get_rank())
    dist.all_gather_object(found, own)
    if (why := next(filter(None, found), None)) is not None:
        raise UsageError(
            f"--resume: {checkpoint} cannot be loaded ({why}); without it an earlier one is taken"
        )


@contextlib.contextmanager
def _written(what: str) -> Iterator[None]:
    """Raises RunError if it cannot be written, as on a full disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        why = in_one_line(error, int(os.environ.get("RANK", 0)))
        raise RunError(f"{what} could not be written: {why}") from error


class Lines(TrainerCallback):  # type: ignore[misc]
    """Prints a line per log entry."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        step = f"step {state.global_step:>5}/{self._steps}"
        if "eval_loss" in logs:
            print(f"{step}  held-out loss {logs['eval_loss']:.3f}", flush=True)
        elif "tokens_per_s" in logs:
            print(
                f"{step}  loss {float(logs['loss']):.3f}  {logs['tokens_per_s']:,.0f} tok/s  "
                f"busiest expert {logs['hot_expert']:.2f} of the mean, rank {logs['hot_rank']:.2f}  "
                f"{logs['memory_gib']:.1f} GiB",
                flush=True,
            )


def run(options: Options, device: torch.device, stop: StopRequest) -> None:
    """Fine-tunes, and writes the model, its metrics and a report to `options.out`. All ranks call it."""
    rank, world, out = dist.get_rank(), dist.get_world_size(), options.folder
    first = rank == 0
    _silence()
    folder, places = _model_and_text(options, first)
    model_size = sizes.Model.of(folder)
    ep = sizes.experts_ranks(model_size, world, options.ep)
    gpu = device.type == "cuda"
    _check_graph(options, world, gpu)
    if options.balance and not model_size.tells_logits:
        raise UsageError(f"--balance: models of type {model_size.kind} do not tell their routers' logits")
    plan = sizes.Plan(
        ranks=world,
        tokens=options.batch * options.seq,
        lora=options.lora,
        recompute=bool(options.recompute),
        expert_columns=options.rank if options.lora_experts else 0,
        gpu=gpu,
    )
    room, held = _room(device)
    if options.recompute is None and not plan.fits(model_size, room):
        plan = dataclasses.replace(plan, recompute=True)
    fits = sizes.check_fits(model_size, plan, room, held)
    graph = _replays(options, model_size, plan)
    tokenizer = _tokenizer(folder)
    step_windows = options.batch * options.accumulate * world
    training, held_out = text.split(text.read_documents(places), tokenizer, options.seq, step_windows)
    checkpoint = _newest_checkpoint(out) if options.resume else None
    if options.resume and checkpoint is None:
        raise UsageError(f"--resume: no checkpoint in {out}")
    begun = 0 if checkpoint is None else int(checkpoint.rpartition("-")[2])
    taken = 0 if checkpoint is None else _windows_taken(Path(checkpoint), begun * step_windows)
    if begun >= options.steps:  # the Trainer would take one more
        raise UsageError(f"--resume: the run in {out} has done {begun} steps: name more than that by --steps")
    if first:
        print(
            f"{Path(folder).name}: {model_size.parameters / 1e6:,.1f} M parameters, "
            f"{model_size.layers} layers, "
            f"{model_size.experts} experts on {ep} of {world} ranks ({device.type})\n"
            f"text: {len(training)} windows of {options.seq} tokens to train on, {len(held_out)} held out\n"
            f"memory: {fits}",
            *filter(None, [model_size.note(options.seq), options.note]),
            sep="\n",
            flush=True,
        )
    set_seed(options.seed)
    model = _load(folder if options.lora or checkpoint is None else checkpoint, options, world, ep, device)
    most = max(int(each.tokens_WS.max()) for each in (training, held_out))
    if most >= model_size.vocabulary:
        known = f"the model {model_size.vocabulary} of them"
        raise UsageError(f"MODEL_FOLDER {folder}: its tokenizer has token {most}, {known}")
    if first:
        if checkpoint is None:
            _set_aside(out)
        options.save()
    if plan.recompute:
        how = {"preserve_rng_state": False} if graph else {"context_fn": keep_plans}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False, **how})
    metrics = None
    if first:
        metrics = MetricsFile(out / "metrics.jsonl", resume_at=begun or None)
    watch = Watch(
        model,
        device,
        experts=model_size.experts,
        ep=ep,
        tokens_per_step=step_windows * options.seq,
        graph=graph,
        stop=stop,
        metrics=metrics,
    )
    trainer = (GraphedTrainer if graph else BalancingTrainer)(
        model=model,
        args=_arguments(options, gpu),
        train_dataset=text.InOrder(training, options.seed, taken, (options.steps - begun) * step_windows),
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,  # a tokenizer's would pad, and many have no token for that
        callbacks=[watch],
    )
    trainer.balance, trainer.top_k = options.balance, model_size.top_k
    trainer.max_skipped, trainer.saved = options.max_skipped, begun or None
    trainer.begun, trainer.windows = begun, (taken, step_windows)
    trainer.remove_callback(PrinterCallback)
    if first:
        trainer.add_callback(Lines(options.steps))
    begin = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds, done = time.perf_counter() - begin, trainer.state.global_step
    if done < options.steps:
        if first:
            left = ""
            if trainer.skipped:
                left = f"; no checkpoint has its last {trainer.skipped} steps, which were left out"
            print(f"stopped after step {done} of {options.steps}{left}; --resume goes on", flush=True)
        return
    facts = {
        "model": folder,
        "parameters": f"{model_size.parameters:,}",
        "ranks": f"{world} ({device.type}), experts over {ep}",
        "time": f"{seconds:.0f} s for this call",
        "memory planned": fits,
    }
    _finish(trainer, held_out, options, metrics, ep, facts)


def _finish(
    trainer: BalancingTrainer,
    held_out: text.Windows,
    options: Options,
    metrics: MetricsFile | None,
    ep: int,
    facts: dict[str, str],
) -> None:
    """Evaluates and saves the model, and writes the report and the line of the result. All ranks call it."""
    out, world, done = options.folder, dist.get_world_size(), trainer.state.global_step
    evaluated = [each for each in trainer.state.log_history if "eval_loss" in each]
    if not evaluated or evaluated[-1]["step"] != done:
        evaluated = [trainer.evaluate()]
    loss = evaluated[-1]["eval_loss"]
    if not math.isfinite(loss):
        trainer.give_up(f"step {done}: the held-out loss is {loss}", done)
    with _written(str(out / "model")):
        trainer.save_model(str(out / "model"))
    sample = _sample(trainer.model, trainer.processing_class, held_out, options)
    memory = [0] * world
    dist.all_gather_object(memory, peak_memory(trainer.args.device))
    if metrics is not None:
        metrics.close()
        report.write(
            out / "report.html",
            metrics.records,
            options=options,
            ep=ep,
            memory=memory,
            facts={**facts, "held-out loss": f"{loss:.4f}"},
            sample=sample,
        )
        rate = next((r["tokens_per_s"] for r in reversed(metrics.records) if "tokens_per_s" in r), 0.0)
        losses = [r["loss"] for r in metrics.records if "loss" in r]
        print(
            f"result: loss {losses[0]:.3f} -> {losses[-1]:.3f}, held-out {loss:.3f}, {done} steps, "
            f"{rate:,.0f} tokens/s on {world} ranks; model in {out / 'model'}, "
            f"report in {out / 'report.html'}",
            flush=True,
        )


CAPTURED = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe"}
CAPTURED |= {"ernie4_5_moe", "dots1", "granitemoe"}
"""Model types whose passes tests/gpu/test_transformers.py replays."""


def _replays(options: Options, model: sizes.Model, plan: sizes.Plan) -> bool:
    """Returns whether passes are replayed from graphs: as --graph says; without it where that was measured to
    be faster, on one GPU that need not compute layers twice."""
    if options.graph is not None:
        return options.graph
    own = options.implementation == "moecomm" and model.kind in CAPTURED
    return plan.gpu and plan.ranks == 1 and own and not plan.recompute


def _check_graph(options: Options, world: int, gpu: bool) -> None:
    """Raises UsageError for --graph where passes cannot be replayed from graphs."""
    if not options.graph:
        return
    if not gpu and GraphedTrainer.recorder is None:
        raise UsageError("--graph: a CPU has no CUDA graphs; leave it out")
    if options.implementation != "moecomm":
        raise UsageError(f"--graph needs --implementation moecomm, not {options.implementation}")
    if options.accumulate > 1 and world > 1:
        raise UsageError(f"--graph on {world} ranks needs --accumulate 1, not {options.accumulate}")


def _silence() -> None:
    """Silences messages of libraries about their own choices."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # transformers' notice to peft, at each model with adapters
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # else accelerate prints a note


def _model_and_text(options: Options, first: bool) -> tuple[str, list[str]]:
    if options.model is not None:
        return options.model, options.text
    model, places = options.folder / "demo-model", options.folder / "demo-text"
    if first and not (model / "config.json").exists():
        demo.write_text(places)
        demo.write_model(model, places, options.seed)
    dist.barrier()
    return str(model), [str(places)]


def _tokenizer(folder: str) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if tokenizer("text")["input_ids"]:
            return tokenizer
        why = "it knows no word"  # where there are no files, transformers makes an empty one
    except (OSError, ValueError, ImportError) as error:
        why = " ".join(str(error).split())
    raise UsageError(
        f"MODEL_FOLDER {folder} has no tokenizer that transformers can load: save the model's there by "
        f"tokenizer.save_pretrained ({why})"
    )


def _newest_checkpoint(out: Path) -> str | None:
    """Returns the newest whole checkpoint. A run that was killed may leave an unfinished one: the Trainer
    writes its own state last."""
    whole = {}
    for path in out.glob("checkpoint-*/trainer_state.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # for example cut off
            step = TrainerState.load_from_json(str(path)).global_step
            if path.parent.name == f"checkpoint-{step}":
                whole[step] = str(path.parent)
    return whole[max(whole)] if whole else None


def _windows_taken(checkpoint: Path, expected: int) -> int:
    """Returns how many windows the steps up to a checkpoint have taken; if it does not tell, `expected`."""
    with contextlib.suppress(OSError, ValueError):
        return int((checkpoint / TAKEN).read_text())
    return expected


def _set_aside(out: Path) -> None:
    """Moves the checkpoints of an earlier run into a separate folder: otherwise `--resume` would take one for
    this run's."""
    old = sorted(out.glob("checkpoint-*"))
    if old:
        aside = next(path for number in range(1, 1 << 30) if not (path := out / f"earlier-{number}").exists())
        aside.mkdir()
        for each in old:
            each.rename(aside / each.name)
        print(f"a new run: the checkpoints of the earlier one are now in {aside}", flush=True)


def _room(device: torch.device) -> tuple[int, str]:
    """Returns the bytes that each rank may use, the least over all ranks, and the kind of memory."""
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
        held = f"the free memory of a {torch.cuda.get_device_name(device)}"
    else:
        room = sizes.available_memory() // int(os.environ["LOCAL_WORLD_SIZE"])
        held = "the free memory of this host for each rank"
    least = torch.tensor(room, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least.item()), held


def _arguments(options: Options, gpu: bool) -> TrainingArguments:
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(options.folder / "tensorboard"))
    return TrainingArguments(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=round(options.warmup * options.steps),
        weight_decay=0.01,
        logging_steps=options.log_every,
        logging_nan_inf_filter=False,  # else such a loss counts as the mean of those before, or as 0
        eval_strategy="steps",
        eval_steps=options.eval_every,
        save_steps=options.save_every,
        save_total_limit=2,
        prediction_loss_only=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",  # the windows are in order already
        ignore_data_skip=True,  # a resumed run begins with the next ones
        seed=options.seed,
        use_cpu=not gpu,
        bf16=gpu and not options.lora and dist.get_world_size() == 1,  # FSDP2 casts on several
        disable_tqdm=True,
        report_to=["tensorboard"],
    )


def _load(source: str, options: Options, world: int, ep: int, device: torch.device) -> Any:
    known = EPImplementationInterface()
    if options.implementation not in known:  # which transformers asks only where ranks share the experts
        raise UsageError(f"--implementation {options.implementation} is none of {', '.join(known)}")
    gpu, own = device.type == "cuda", options.implementation == "moecomm"
    parallel = DistributedConfig(
        fsdp_size=world,
        ep_size=ep,
        ep_implementation=options.implementation,
        fsdp_mixed_precision=gpu and not options.lora,
    )
    dtype = torch.bfloat16 if gpu and options.lora else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            distributed_config=parallel if world > 1 else None,
            experts_implementation="moecomm" if own and ep == 1 else None,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"transformers cannot load {source} on {world} ranks: {error}") from error
    if world == 1:
        model.to(device)
        model.config.distributed_config = parallel
        model._is_distributed_loading_by_transformers = True  # else the Trainer wraps it in DDP
    keep_apart(model)
    if not options.lora:
        return model
    from peft import LoraConfig, get_peft_model

    from moecomm.transformers.adapters import adapt_experts

    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = sorted(names & set(ADAPTED))
    if not targets:
        raise UsageError(f"--lora: {type(model).__name__} has none of {', '.join(ADAPTED)}")
    weights: set[str] = set()
    if options.lora_experts:
        if not own:
            raise UsageError("--lora-experts needs --implementation moecomm")
        places = (name.rpartition(".experts.") for name, each in model.named_parameters() if each.dim() == 3)
        weights = {f"experts.{name}" for _, found, name in places if found}
    config = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=targets,
        target_parameters=sorted(weights) or None,
    )
    model = get_peft_model(model, config)
    return adapt_experts(model) if weights else model


def keep_apart(model: Any) -> None:
    """Separates the attention of documents, which begin at position 0. transformers does so for most models,
    but not for gpt-oss."""

    def add_mask(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        positions = options.get("position_ids")
        if positions is not None and options.get("attention_mask") is None:
            dtype = torch.bfloat16 if positions.is_cuda else torch.float32  # that of the computation
            embeddings = torch.empty(*positions.shape, 1, dtype=dtype, device=positions.device)
            mask = create_masks_for_generate(model.config, embeddings, None, None, positions)
            options = {**options, "attention_mask": mask}
        return arguments, options

    # Not a hook of the whole model: its balancing loss takes a mask for one of padding.
    model.base_model.register_forward_pre_hook(add_mask, with_kwargs=True)


def _sample(model: Any, tokenizer: Any, held_out: text.Windows, options: Options) -> tuple[str, str]:
    """Returns a prompt and the model's continuation. All ranks call it together, with the same prompt."""
    if options.sample < 1:
        return "", ""
    if options.prompt:
        ids = tokenizer(options.prompt, return_tensors="pt")["input_ids"]
    else:
        ids = held_out[0]["input_ids"][: min(32, options.seq // 2)].unsqueeze(0)
    ids = ids.to(model.device)
    with torch.no_grad():
        # The same length on all ranks: a layer's dispatch takes tokens of all of them.
        text_ids = model.eval().generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.sample,
            min_new_tokens=options.sample,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )[0]
    return tokenizer.decode(ids[0]), tokenizer.decode(text_ids[ids.shape[1] :])
