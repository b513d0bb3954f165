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

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
LAYOUTS = f"{DISPATCH} -k layouts_alignments_and_capacities and 3-"
STEPS = f"{DISPATCH} -k many_steps or plans_are_reused"
LATE = f"{DISPATCH} -k overwritten"
INPUT = "tests/multirank/test_bad_input.py"
LOOPBACK = "tests/cpp/test_communicator.cpp"
"""Nodes whose rows come in any order, as late as they may. Over TCP they come before anybody looks."""
NODES = "tests/multirank/test_nodes.py -k 4-2 and (gradients or lanes)"
LAYER = (
    "tests/multirank/test_moe_layer.py tests/multirank/test_data_parallel.py "
    "-k (dense_reference and 3) or (recipe and hand)"
)
ROUTER = "tests/unit/test_router.py"

PLAN, PULL, SUM = (f"csrc/kernels/cpu/{name}.cpp" for name in ("plan", "dispatch", "combine"))
RUNTIME, INTERNODE = "csrc/runtime/communicator.cpp", "csrc/runtime/internode.cpp"

MUTANTS = [
    # -- the plan ------------------------------------------------------------------------------------------
    Mutant(
        "prefix sum of the wrong expert",
        PLAN,
        "row += counts[int64_t{r} * local + e];",
        "row += counts[int64_t{r} * local];",
        LAYOUTS,
    ),
    Mutant("no alignment", PLAN, "end = align_up(row, shape.alignment);", "end = row;", LAYOUTS),
    Mutant(
        "capacity off by one",
        PLAN,
        "plan.row.push_back(row < plan.rows ?",
        "plan.row.push_back(row + 1 < plan.rows ?",
        LAYOUTS,
    ),
    Mutant(
        "offsets past the capacity",
        PLAN,
        "plan.offsets.push_back(static_cast<int32_t>(clamp(end)));",
        "plan.offsets.push_back(static_cast<int32_t>(end));",
        LAYOUTS,
    ),
    Mutant(
        "rows that are needed, without alignment",
        PLAN,
        "needed[e / s.local_experts] += align_up(counts[e], s.alignment);",
        "needed[e / s.local_experts] += counts[e];",
        LAYOUTS,
    ),
    Mutant(
        "order of owners",
        PLAN,
        "    std::sort(plan.owner.begin() + begin, plan.owner.end());\n",
        "",
        LAYOUTS,
    ),
    Mutant(
        "slot among all ranks instead of those of the node",
        PLAN,
        "owners_between(ids, shape.top_k, local, node_first, shape.rank)",
        "owners_between(ids, shape.top_k, local, 0, shape.rank)",
        NODES,
    ),
    # -- rows that arrive ----------------------------------------------------------------------------------
    Mutant(
        "alignment rows are not zeroed",
        "csrc/kernels/cpu/dispatch_receive.cpp",
        "0, (end - begin) * row_bytes);",
        "0, (end - begin - 1) * row_bytes);",
        LAYOUTS,
    ),
    Mutant(
        "rows of another token",
        "csrc/kernels/cpu/dispatch_receive.cpp",
        "+ plan.entry_place[entry] * row_bytes;",
        "+ plan.entry_token[plan.source_begin[0]] * row_bytes;",
        LAYOUTS,
    ),
    Mutant(
        "weights of the token's first choice, and their gradients",
        "csrc/kernels/cpu/dispatch.hpp",
        "visit(source, first + plan.row_k[j], row, -1);",
        "visit(source, first, row, -1);",
        LAYOUTS,
    ),
    Mutant(
        "ids of other ranks as expert 0",
        "csrc/kernels/cpu/dispatch_receive.cpp",
        "std::fill(out_ids, out_ids + places, kNoExpert);",
        "std::fill(out_ids, out_ids + places, 0);",
        LAYOUTS,
    ),
    Mutant(
        "rows that no peer needs are all that is published",
        "csrc/kernels/cpu/dispatch_send.cpp",
        "return id >= 0 && owner != context.rank &&",
        "return id >= 0 && owner == context.rank &&",
        LAYOUTS,
    ),
    Mutant(
        "gradient rows without their weight",
        "csrc/kernels/cpu/dispatch_receive.cpp",
        "verbs.scale(out, row, weight_at(arguments.scales, dtype, place), hidden, stream);",
        "kernels.copy(out, row, row_bytes, stream);",
        LAYOUTS,
    ),
    Mutant(
        "gradient of a weight over too few columns",
        "csrc/kernels/cpu/dispatch_receive.cpp",
        "arguments.other + place * row_bytes, hidden));",
        "arguments.other + place * row_bytes, hidden - 1));",
        LAYOUTS,
    ),
    # -- sums ----------------------------------------------------------------------------------------------
    Mutant(
        "order of a sum",
        "csrc/kernels/cpu/rows_isa.cpp",
        "const Bits* const in = static_cast<const Bits*>(src[i]) + begin;",
        "const Bits* const in = static_cast<const Bits*>(src[n - 1 - i]) + begin;",
        LAYOUTS,
    ),
    Mutant(
        "combine without weights",
        "csrc/kernels/cpu/entry_sum.hpp",
        "scales_[count] = weight_at(arguments_.weights, dtype_, place);",
        "scales_[count] = 1.0;",
        LAYOUTS,
    ),
    Mutant(
        "a token without rows keeps what was there",
        "csrc/kernels/cpu/combine_sum.cpp",
        "    if (count == 0) {\n      std::memset(out, 0, row_bytes_);\n      return;",
        "    if (count == 0) {\n      return;",
        LAYOUTS,
    ),
    Mutant(
        "gradients of weights from one node alone",
        "csrc/kernels/cpu/combine_sum.cpp",
        "sections[nodes.node_of(owner)]",
        "sections[0 * nodes.node_of(owner)]",
        NODES,
    ),
    # -- the runtime ---------------------------------------------------------------------------------------
    Mutant("one id too many", RUNTIME, "id >= num_experts)", "id > num_experts)", INPUT),
    Mutant("ids below -1", RUNTIME, "if (id < -1 ||", "if (id < -2 ||", INPUT),
    Mutant(
        "an expert named twice",
        RUNTIME,
        "if (out[t * top_k + j] == id)",
        "if (false && out[t * top_k + j] == id)",
        INPUT,
    ),
    Mutant(
        "no wait for the records of a dispatch",
        RUNTIME,
        'wait_records(record, "dispatch");',
        "compare_records(record.epoch);",
        STEPS,
    ),
    Mutant(
        "no wait for the records of a combine",
        RUNTIME,
        '      signal(record);\n      wait_records(record, "combine");\n    }\n    if (y',
        "      signal(record);\n    }\n    if (y",
        STEPS,
    ),
    Mutant(
        "a plan is used again although a peer's ids changed",
        RUNTIME,
        "reuse = signals_->record(r, record.epoch).plan == plan->id;",
        "reuse = true;",
        STEPS,
    ),
    Mutant("a plan of another shape", RUNTIME, "plan->shape == shape && ", "", STEPS),
    Mutant(
        "one section of rows for all steps",
        RUNTIME,
        "const int64_t offset = layout_.rows[epoch_ & 1];",
        "const int64_t offset = layout_.rows[0];",
        LATE,
    ),
    Mutant(
        "input in the window is written while peers read",
        RUNTIME,
        '  guarded([&] { signals_->wait_completed(input_epoch_[index], "empty_input"); });\n',
        "",
        LATE,
    ),
    Mutant(
        "a full capacity counts as passed",
        RUNTIME,
        "plan.max_needed <= plan.shape.capacity",
        "plan.max_needed < plan.shape.capacity",
        LAYOUTS,
    ),
    Mutant(
        "alignments that differ",
        RUNTIME,
        "    compare(Disagreement::alignment, first.alignment, other.alignment);\n",
        "",
        INPUT,
    ),
    Mutant(
        "handles that differ",
        RUNTIME,
        "if (first.operation != Operation::dispatch)",
        "if (first.operation == Operation::dispatch)",
        INPUT,
    ),
    Mutant(
        "rows from another node are not waited for",
        INTERNODE,
        "      wait_part(source, chunk, epoch, kRowsPhase);\n",
        "      static_cast<void>(epoch);\n",
        LOOPBACK,
    ),
    Mutant(
        "sums from another node are not waited for",
        INTERNODE,
        '        wait_part(rail(other), chunk, epoch, "sums from another node");\n',
        "        static_cast<void>(epoch);\n",
        LOOPBACK,
    ),
    Mutant(
        "slots share their memory",
        "csrc/layout/window.cpp",
        "s.max_tokens * s.slots() * s.row_bytes());",
        "s.max_tokens * s.row_bytes());",
        f"{DISPATCH} -k several_combines",
    ),
    # -- autograd and checks -------------------------------------------------------------------------------
    Mutant(
        "one token too many",
        "moecomm/arguments.py",
        "    if tokens > max_tokens:\n",
        "    if tokens > max_tokens + 1:\n",
        INPUT,
    ),
    Mutant(
        "weights get no gradient",
        "moecomm/autograd/functions.py",
        "grad_weights if need_weights else None",
        "None",
        LAYOUTS,
    ),
    Mutant(
        "rows' gradient forgets the weights",
        "moecomm/autograd/functions.py",
        "backend.redispatch(plan, grad_y_TH, weights_P, rows_PH, gradients=True)",
        "backend.redispatch(plan, grad_y_TH, None, rows_PH, gradients=True)",
        LAYOUTS,
    ),
    # -- the layer -----------------------------------------------------------------------------------------
    Mutant(
        "router without its factor",
        "moecomm/nn/router.py",
        "return weights_TK * config.scaling_factor",
        "return weights_TK",
        ROUTER,
    ),
    Mutant(
        "router's groups by their best expert alone",
        "moecomm/nn/router.py",
        "best or max(top_k // topk_groups, 1)",
        "best or 1",
        ROUTER,
    ),
    Mutant(
        "router counts its load twice",
        "moecomm/nn/router.py",
        "load_E.scatter_add_(0, choices_N, torch.ones_like(choices_N))",
        "load_E.scatter_add_(0, choices_N, torch.ones_like(choices_N) * 2)",
        ROUTER,
    ),
    Mutant(
        "one token over an expert's limit",
        "moecomm/nn/router.py",
        "place_N < limit",
        "place_N <= limit",
        ROUTER,
    ),
    Mutant("drops the heaviest", "moecomm/nn/router.py", "descending=True", "descending=False", ROUTER),
    Mutant(
        "loss without its scale",
        "moecomm/nn/losses.py",
        "return scale.clone()",
        "return torch.ones_like(scale)",
        "tests/unit/test_layer_habits.py -k loss_scale",
    ),
    Mutant(
        "biases move away from balance",
        "moecomm/train/balance.py",
        "step_E = above_E.sign()",
        "step_E = -above_E.sign()",
        LAYER,
    ),
    Mutant(
        "gradients of experts are not averaged",
        "moecomm/train/gradients.py",
        "            gradient.div_(size)\n",
        "            gradient.div_(size if over is None or over is dist.group.WORLD else 1)\n",
        LAYER,
    ),
    Mutant(
        "groups of rows begin at the first row",
        "moecomm/kernels/grouped_mm.py",
        "list(zip([0, *ends[:-1]], ends, strict=True))",
        "list(zip([0 for _ in ends], ends, strict=True))",
        LAYER,
    ),
    Mutant(
        "shared experts give x no gradient",
        "moecomm/nn/expert_pass.py",
        "        grad_x_TH.add_(grad_shared_x_TH)",
        "        pass",
        LAYER,
    ),
    Mutant(
        "an overflow on one rank alone is not seen by the others",
        "moecomm/graphs/overflow_check.py",
        "            dist.all_reduce(self._on_host, dist.ReduceOp.MAX, group=group)\n",
        "            pass\n",
        "tests/multirank/test_graphed_step.py -k overflow-3",
    ),
    Mutant(
        "a step that runs again goes on from other random numbers",
        "moecomm/graphs/graphed_step.py",
        "        torch.set_rng_state(on_host)\n",
        "",
        "tests/multirank/test_graphed_step.py -k overflow-3",
    ),
]


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
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
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
