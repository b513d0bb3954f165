"""Mutants of the core: small mistakes, made one at a time in a copy of the repository; tests must notice.

    python tests/mutants.py                       # all of them: tens of builds and test runs
    python tests/mutants.py order router          # those whose names contain one of the words
    python tests/mutants.py --check               # only: does each still apply to the sources?
    python tests/mutants.py --folder build/mutants # keeps the copy and its build for the next time

A mutant names a file, a text that occurs there once, what is put in its place, and the tests that look at
it: arguments of pytest, or the file of a C++ test, which is built and run. First every selection has to pass
on the unchanged copy. Then each mutant is put in, built where it is C++, tested, and taken out. "killed" is
what one hopes for: a test failed, or the process died or ran into its time limit. Exits with 1 if a mutant
survives, does not apply or does not build.

Needs what `make build` needs: CMake, Ninja, a C++ compiler and pybind11. No GPU: kernels of GPUs are not
mutated.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
TEST_LIMIT_S, LIMIT_S = 120, 1200.0
"""Time limits of one test and of one selection of tests: a mutant may well cause a hang."""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str

    def apply(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} holds its text {text.count(self.old)} times, not once"
            )
        return text.replace(self.old, self.new)


DISPATCH = "tests/multirank/test_dispatch_combine.py"
SELECTIONS = {
    "LAYOUTS": f"{DISPATCH} -k layouts_alignments_and_capacities and 3-",
    "STEPS": f"{DISPATCH} -k many_steps or plans_are_reused",
    "LATE": f"{DISPATCH} -k overwritten",
    "INPUT": "tests/multirank/test_bad_input.py",
    # Nodes whose rows come in any order, as late as they may. Over TCP they come before anybody looks.
    "LOOPBACK": "tests/cpp/test_communicator.cpp",
    "NODES": "tests/multirank/test_nodes.py -k 4-2 and (gradients or lanes)",
    "LAYER": "tests/multirank/test_moe_layer.py tests/multirank/test_data_parallel.py "
    "-k (dense_reference and 3) or (recipe and hand)",
    "ROUTER": "tests/unit/test_router.py",
}


def read(table: str) -> list[Mutant]:
    """The mutants of a table: "@ file: tests", and of each below it "= name", and as in a diff lines with "-"
    before them that are taken out and lines with "+" that come in their place."""
    found = []
    file = tests = ""
    for line in table.splitlines():
        kind, text = line[:1], line[2:]
        if kind == "@":
            file, tests = text.split(": ")
        elif kind == "=":
            found.append(Mutant(text, file, "", "", SELECTIONS.get(tests, tests)))
        elif kind in ("-", "+"):
            field = "old" if kind == "-" else "new"
            before = getattr(found[-1], field)
            found[-1] = replace(found[-1], **{field: f"{before}\n{text}" if before else text})
    return found


MUTANTS = read("""
# the plan
@ csrc/kernels/cpu/plan.cpp: LAYOUTS
= prefix sum of the wrong expert
- row += counts[int64_t{r} * local + e];
+ row += counts[int64_t{r} * local];
= no alignment
- end = begin + shape.group_rows(row - begin);
+ end = row;
= the index of the rank layout with groups of one size
- shape.positions = -1;
+ shape.positions = plan.shape.positions;
= capacity off by one
- plan.row.push_back(row < plan.rows ?
+ plan.row.push_back(row + 1 < plan.rows ?
= offsets past the capacity
- plan.offsets.push_back(static_cast<int32_t>(clamp(end)));
+ plan.offsets.push_back(static_cast<int32_t>(end));
= rows that are needed, without alignment
- needed[e / s.local_experts] += s.group_rows(counts[e]);
+ needed[e / s.local_experts] += counts[e];
= order of owners
-     std::sort(plan.owner.begin() + begin, plan.owner.end());
@ csrc/kernels/cpu/plan.cpp: NODES
= slot among all ranks instead of those of the node
- owners_between(ids, shape.top_k, local, node_first, shape.rank)
+ owners_between(ids, shape.top_k, local, 0, shape.rank)

# rows that arrive
@ csrc/kernels/cpu/dispatch.cpp: LAYOUTS
= alignment rows are not zeroed
- 0, (end - begin) * row_bytes);
+ 0, (end - begin - 1) * row_bytes);
= rows of another token
- + plan.entry_place[entry] * row_bytes;
+ + plan.entry_token[plan.source_begin[0]] * row_bytes;
@ csrc/kernels/cpu/dispatch.hpp: LAYOUTS
= weights of the token's first choice, and their gradients
- visit(source, first + plan.row_k[j], row, -1);
+ visit(source, first, row, -1);
@ csrc/kernels/cpu/dispatch.cpp: LAYOUTS
= ids of other ranks as expert 0
- std::fill(out_ids, out_ids + places, kNoExpert);
+ std::fill(out_ids, out_ids + places, 0);
@ csrc/kernels/cpu/dispatch.cpp: LAYOUTS
= rows that no peer needs are all that is published
- return id >= 0 && owner != context.rank &&
+ return id >= 0 && owner == context.rank &&
@ csrc/kernels/cpu/dispatch.cpp: LAYOUTS
= gradient rows without their weight
- verbs.scale(out, row, weight_at(arguments.scales, dtype, place), hidden, stream);
+ kernels.copy(out, row, row_bytes, stream);
= gradient of a weight over too few columns
- arguments.other + place * row_bytes, hidden));
+ arguments.other + place * row_bytes, hidden - 1));

# sums
@ csrc/kernels/cpu/rows_isa.cpp: LAYOUTS
= order of a sum
- const Bits* const in = static_cast<const Bits*>(src[i]) + begin;
+ const Bits* const in = static_cast<const Bits*>(src[n - 1 - i]) + begin;
@ csrc/kernels/cpu/combine.cpp: LAYOUTS
= combine without weights
- scales_[count] = weight_at(arguments_.weights, shape_.dtype, place);
+ scales_[count] = 1.0;
= a token without rows keeps what was there
-   if (count == 0)
-     std::memset(out, 0, shape.row_bytes());
+   if (count == 0)
+     return;
@ csrc/kernels/cpu/combine.cpp: NODES
= gradients of weights from one node alone
- sections[nodes.node_of(owner)]
+ sections[0 * nodes.node_of(owner)]

# the runtime
@ csrc/runtime/communicator.cpp: INPUT
= one id too many
- id >= num_experts)
+ id > num_experts)
= ids below -1
- if (id < -1 ||
+ if (id < -2 ||
= an expert named twice
- if (out[t * top_k + j] == id)
+ if (false && out[t * top_k + j] == id)
@ csrc/runtime/communicator.cpp: STEPS
= no wait for the records of a dispatch
- wait_records(record, "dispatch");
+ compare_records(record.epoch);
= no wait for the records of a combine
-       signal(record);
-       wait_records(record, "combine");
-     }
-     if (y
+       signal(record);
+     }
+     if (y
= a plan is used again although a peer's ids changed
- reuse = signals_->record(r, record.epoch).plan == plan->id;
+ reuse = true;
= a plan of another shape
- plan->shape == shape && plan->tokens
+ plan->tokens
@ csrc/runtime/communicator.cpp: LATE
= one section of rows for all steps
- const int64_t offset = layout_.rows[epoch_ & 1];
+ const int64_t offset = layout_.rows[0];
= input in the window is written while peers read
-   guarded([&] { signals_->wait_completed(input_epoch_[index], "empty_input"); });
@ csrc/runtime/communicator.cpp: LAYOUTS
= a full capacity counts as passed
- plan.max_needed <= plan.shape.capacity
+ plan.max_needed < plan.shape.capacity
@ csrc/runtime/communicator.cpp: INPUT
= alignments that differ
-     compare(Disagreement::alignment, first.alignment, other.alignment);
= handles that differ
- if (first.operation != Operation::dispatch)
+ if (first.operation == Operation::dispatch)
@ csrc/runtime/internode.cpp: LOOPBACK
= rows from another node are not waited for
-       wait_part(source, chunk, epoch, kRowsPhase);
+       static_cast<void>(epoch);
= sums from another node are not waited for
-         wait_part(rail(other), chunk, epoch, "sums from another node");
+         static_cast<void>(epoch);
@ csrc/layout/window.cpp: tests/multirank/test_dispatch_combine.py -k several_combines
= slots share their memory
- s.max_tokens * s.slots() * s.row_bytes());
+ s.max_tokens * s.row_bytes());

# autograd and checks
@ moecomm/arguments.py: INPUT
= one token too many
-     if tokens > max_tokens:
+     if tokens > max_tokens + 1:
@ moecomm/autograd/functions.py: LAYOUTS
= weights get no gradient
- grad_weights if need_weights else None
+ None
= rows' gradient forgets the weights
- backend.redispatch(plan, grad_y_TH, weights_P, rows_PH, gradients=True)
+ backend.redispatch(plan, grad_y_TH, None, rows_PH, gradients=True)

# the layer
@ moecomm/kernels/choices.py: ROUTER
= router without its factor
- return weights_TK * rule.scale
+ return weights_TK
= router counts its load twice
- counts_E.scatter_add_(0, ids_N, torch.ones_like(ids_N))
+ counts_E.scatter_add_(0, ids_N, torch.ones_like(ids_N) * 2)
= router's groups by their best expert alone
- best or max(top_k // topk_groups, 1)
+ best or 1
= one token over an expert's limit
- place_N < limit
+ place_N <= limit
= drops the heaviest
- descending=True
+ descending=False
@ moecomm/autograd/attached_loss.py: tests/unit/test_layer_habits.py -k loss_scale
= loss without its scale
- return scale.clone()
+ return torch.ones_like(scale)
@ moecomm/train/balance.py: LAYER
= biases move away from balance
- step_RE = above_RE.sign()
+ step_RE = -above_RE.sign()
@ moecomm/train/gradients.py: LAYER
= gradients of experts are not averaged
-                 torch._foreach_div_(alike, size)
+                 torch._foreach_div_(alike, size if over is dist.group.WORLD else 1)
@ moecomm/kernels/grouped_mm.py: LAYER
= groups of rows begin at the first row
- list(zip([0, *ends[:-1]], ends, strict=True))
+ list(zip([0 for _ in ends], ends, strict=True))
@ moecomm/kernels/routing.py: tests/unit/test_routing_kernel.py
= a router computed again chooses anew
- if given_TK is None:
+ if True:
= losses of a router give its logits no gradient
- grad_scores_TE, grad_logits_TE)
+ grad_scores_TE, None)
@ moecomm/nn/expert_pass.py: LAYER
= shared experts give x no gradient
-         grad_x_TH.add_(grad_shared_x_TH)
+         pass
@ moecomm/graphs/overflow_check.py: tests/multirank/test_graphed_step.py -k overflow-3
= an overflow on one rank alone is not seen by the others
-             dist.all_reduce(self._on_host, dist.ReduceOp.MAX, group=group)
+             pass
@ moecomm/graphs/graphed_step.py: tests/multirank/test_graphed_step.py -k overflow-3
= a step that runs again goes on from other random numbers
-         torch.set_rng_state(on_host)
""")


class Copy:
    """A copy of the repository with a build of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.build_folder = folder / "build" / "mutants"
        ignored = shutil.ignore_patterns(".git", "build", "__pycache__", "*.so", ".hypothesis", "runs")
        shutil.copytree(REPOSITORY, folder, ignore=ignored, dirs_exist_ok=True)
        # An editable installation would be imported in the copy's place. Python runs this file as it starts.
        (folder / "sitecustomize.py").write_text(
            "import sys\n"
            "sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        )

    def configure(self) -> None:
        pybind = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True).strip()
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_INTERPROCEDURAL_OPTIMIZATION": "OFF",  # links in a moment
            "MOECOMM_CUDA": "OFF",
            "MOECOMM_TESTS": "ON",
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind,
        }
        given = [f"-D{name}={value}" for name, value in settings.items()]
        command = ["cmake", "-S", self.folder, "-B", self.build_folder, "-G", "Ninja", *given]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def build(self, target: str = "_C") -> str:
        """Builds the extension, or another target; returns what the compiler says if it fails, else ""."""
        command = ["cmake", "--build", self.build_folder, "--target", target]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return done.stdout[-2000:] or "failed"
        for path in self.build_folder.glob("_C.*.so"):
            shutil.copy2(path, self.folder / "moecomm")
        return ""

    def passes(self, tests: str) -> bool:
        files, _, words = tests.partition(" -k ")
        if files.endswith(".cpp"):
            program = Path(files).stem
            if said := self.build(program):
                raise RuntimeError(f"{files}: {said}")
            command = [str(self.build_folder / "tests" / "cpp" / program)]
        else:
            options = ["-x", "-q", "-p", "no:cacheprovider", "--seed", "1", f"--timeout={TEST_LIMIT_S}"]
            options += ["-k", words] if words else []
            command = [sys.executable, "-m", "pytest", *options, *files.split()]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with contextlib.suppress(subprocess.TimeoutExpired):
            how: dict[str, Any] = {"cwd": self.folder, "env": environment, "timeout": LIMIT_S}
            done = subprocess.run(command, capture_output=True, text=True, **how)
            if done.returncode > 1:  # nothing collected, bad arguments
                raise RuntimeError(f"{tests}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            return done.returncode == 0
        return False

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        path = self.folder / mutant.file
        text = path.read_text()
        path.write_text(mutant.apply(text))
        try:
            yield
        finally:
            path.write_text(text)


def verdict(copy: Copy, mutant: Mutant) -> str:
    native = mutant.file.startswith("csrc/")
    with copy.mutated(mutant):
        if native and (said := copy.build()):
            return f"does not build: {said}"
        return "SURVIVED" if copy.passes(mutant.tests) else "killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the names of mutants (default: all)")
    parser.add_argument("--check", action="store_true", help="only look whether each mutant applies")
    parser.add_argument("--folder", type=Path, help="of the copy (default: a temporary one)")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    for mutant in chosen:
        mutant.apply((REPOSITORY / mutant.file).read_text())
    print(f"{len(chosen)} mutants apply", flush=True)
    if options.check:
        return 0
    with tempfile.TemporaryDirectory(prefix="moecomm-mutants-") as temporary:
        copy = Copy((options.folder or Path(temporary) / "copy").resolve())
        copy.configure()
        if said := copy.build():
            print(f"the unchanged copy does not build: {said}")
            return 1
        for tests in sorted({mutant.tests for mutant in chosen}):
            if not copy.passes(tests):
                print(f"fails without any mutant: {tests}")
                return 1
        found = []
        changed = False  # the extension in the copy is that of a mutant
        for mutant in chosen:
            started = time.monotonic()
            native = mutant.file.startswith("csrc/")
            if changed and not native:
                copy.build()
            changed = native
            found.append(verdict(copy, mutant))
            print(f"{found[-1]:9} {time.monotonic() - started:5.0f} s  {mutant.name}", flush=True)
    print(f"{found.count('killed')} of {len(found)} killed")
    return 0 if found.count("killed") == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
