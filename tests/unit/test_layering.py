"""Dependencies run one way, in Python and in C++; read from the sources, nothing is imported."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moecomm"

# A folder or module may import what stands above it in this list, never what stands below: so there is no
# cycle of folders.
PYTHON_LAYERS = [
    *("_C", "errors", "env", "types", "compiled", "arguments", "device", "setup", "backends", "kernels"),
    *("autograd", "communicator", "shared", "overlap", "parallel", "nn", "train", "graphs"),
    *("transformers", "torchtitan", "megatron", "__main__"),
]
NATIVE_LAYERS = ["common", "layout", "ptx", "device", "transport", "kernels", "runtime", "bindings"]


def _imports(path: Path, *, everywhere: bool) -> Iterator[str]:
    """Dotted names that a file imports: anywhere in it, or only when it is loaded."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from moecomm import ops` names the module ops, or a name of moecomm/__init__.py.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _part(dotted: str) -> str | None:
    """The part of the package that a dotted name lies in; None for another package, "" for the package
    itself.
    """
    words = dotted.split(".")
    if words[0] != "moecomm":
        return None
    name = words[1] if len(words) > 1 else ""
    known = name == "_C" or (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
    return name if known else ""


def _layer(part: str) -> int:
    assert part in PYTHON_LAYERS, f"moecomm.{part} stands in no layer: give it one in this test"
    return PYTHON_LAYERS.index(part)


def _python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_python_imports_run_down() -> None:
    for path in _python_files("moecomm"):
        own = _part(_module(path))
        if path in (PACKAGE / "__init__.py", PACKAGE / "nn" / "__init__.py"):
            continue  # gathers public names, that of nn those of train and graphs for type checkers
        for name in _imports(path, everywhere=True):
            part = _part(name)
            if part is None or part == own:
                continue
            if part == "":
                assert own in ("nn", "train", "graphs", "__main__"), (
                    f"{path} imports the package that it is a part of ({name})"
                )
                continue
            assert _layer(part) < _layer(own), f"{path} imports {name}, which stands above it"


def test_python_imports_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    names = {_module(path): path for path in _python_files("moecomm")}
    for module, path in names.items():
        found = set()
        for name in _imports(path, everywhere=False):
            while name and name not in names:
                name = name.rpartition(".")[0]
            # A submodule's import of its own package's __init__ would show as the package.
            if name and name not in ("moecomm", module):
                found.add(name)
        graph[module] = found
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("folder", ["bench", "examples"])
def test_programs_use_public_names_only(folder: str) -> None:
    public = {"moecomm": set(_all(PACKAGE / "__init__.py"))}
    for name in ("nn", "train", "graphs", "overlap", "parallel", "transformers", "megatron"):
        public[f"moecomm.{name}"] = set(_all(PACKAGE / name / "__init__.py"))
    public["moecomm.transformers.adapters"] = set(_all(PACKAGE / "transformers" / "adapters.py"))
    for path in _python_files(folder):
        if path.name == "quack_tiles.py":
            continue  # fills a table within the product
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    assert not alias.name.startswith("moecomm.") or alias.name in public, (
                        f"{path}: {alias.name}"
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "moecomm":
                assert node.module in public, f"{path} imports from {node.module}"
                for alias in node.names:
                    allowed = alias.name in public[node.module] or f"{node.module}.{alias.name}" in public
                    assert allowed, f"{path} imports {node.module}.{alias.name}, which is not public"
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "moecomm"
            ):
                allowed = node.attr in public["moecomm"] or node.attr == "nn"
                assert allowed, f"{path}:{node.lineno} uses moecomm.{node.attr}, which is not public"


def test_nothing_imports_programs_or_tests() -> None:
    for path in _python_files("moecomm"):
        for name in _imports(path, everywhere=True):
            assert name.split(".")[0] not in ("bench", "examples", "tests", "docs"), f"{path} imports {name}"


def _all(path: Path) -> list[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{path} has no __all__")


# -- C++ -----------------------------------------------------------------------------------------------------

SUFFIXES = {".hpp", ".cpp", ".h", ".cu", ".cuh", ".inl"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


NATIVE_FILES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in SUFFIXES)


def _code(path: Path) -> str:
    """The text without comments and strings, `#include` lines excepted."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return "\n".join(
        line if line.lstrip().startswith("#") else re.sub(r'"(\\.|[^"\\])*"', '""', line)
        for line in text.split("\n")
    )


def test_no_test_stands_within_another_function() -> None:
    """pytest would not find it, and nobody miss it."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    hidden = [
        f"{path.relative_to(ROOT)}:{inner.lineno} {inner.name}"
        for path in (ROOT / "tests").rglob("*.py")
        for outer in ast.walk(ast.parse(path.read_text()))
        if isinstance(outer, functions)
        for inner in ast.walk(outer)
        if inner is not outer and isinstance(inner, functions) and inner.name.startswith("test_")
    ]
    assert hidden == []


def _includes() -> Iterator[tuple[Path, list[str], str, list[str]]]:
    """Each `#include` of csrc: its file and the parts of that path, the quote, and the parts of the name."""
    for path in NATIVE_FILES:
        parts = list(path.relative_to(ROOT / "csrc").parts)
        for quote, name in INCLUDE.findall(_code(path)):
            yield path, parts, quote, name.split("/")


def test_includes_run_down() -> None:
    order = {name: number for number, name in enumerate(NATIVE_LAYERS)}
    assert {path.relative_to(ROOT / "csrc").parts[0] for path in NATIVE_FILES} <= order.keys()
    for path, (own, *_), quote, words in _includes():
        if quote == "<":
            continue
        part, said = words[0], f"{path} includes {'/'.join(words)}"
        assert (ROOT / "csrc").joinpath(*words).exists(), f"{said}: say it from csrc/"
        assert order[part] <= order[own], f"{said}, which stands above it"
        # layout and ptx are siblings, and so are device and transport: kernels reach other ranks through
        # the device side alone.
        assert {own, part} not in ({"layout", "ptx"}, {"device", "transport"}), said
        assert not (own == "kernels" and part == "transport"), said


@pytest.mark.parametrize("room", ["kernels", "transport"])
def test_folders_of_one_layer_do_not_know_each_other(room: str) -> None:
    """Kernels for the CPU, between GPUs and for experts stand side by side, and so do transports; what lies
    in kernels/ or transport/ itself serves them all."""
    for path, parts, _, words in _includes():
        if parts[0] == words[0] == room and len(words) > 2:
            serves_all = room == "transport" and len(parts) < 3
            assert serves_all or (len(parts) > 2 and words[1] == parts[1]), f"{path} includes {words}"


GPU_KERNELS = ROOT / "csrc" / "kernels" / "gpu"


def _room(path: Path) -> str:
    parts = path.relative_to(GPU_KERNELS).parts
    assert len(parts) == 2, f"{path} lies in no room of {GPU_KERNELS}"
    return parts[0]


def _included_kernels(path: Path) -> set[Path]:
    """What a file of kernels includes of kernels/gpu, itself or by another of these files."""
    found: set[Path] = set()
    new = [path]
    while new:
        for _, name in INCLUDE.findall(_code(new.pop())):
            each = ROOT / "csrc" / name
            if name.startswith("kernels/gpu/") and each not in found:
                found.add(each)
                new.append(each)
    return found


def test_rooms_of_gpu_kernels_include_what_is_common() -> None:
    """An operation's room knows no other operation's; nothing that is common knows a room. A kernel is read
    with few headers of its own room."""
    below = {"common": set(), "internode": {"common"}}
    assert any(path.suffix == ".cu" for path in NATIVE_FILES if GPU_KERNELS in path.parents)
    for path in NATIVE_FILES:
        if GPU_KERNELS in path.parents:
            own, included = _room(path), _included_kernels(path)
            allowed = {own} | below.get(own, {"common", "internode"})
            assert {_room(each) for each in included} <= allowed, f"{path} includes {included}"
            near = sorted(each.name for each in included if _room(each) == own)
            assert path.suffix != ".cu" or len(near) <= 6, f"{path} includes {near}"


def test_what_native_code_includes() -> None:
    """Never torch. Nor streams: a build that links libstdc++ statically (some toolchains do) would have a
    second copy of the locale's facets beside torch's, and the first number read from a stream would crash."""
    refused = {"torch", "ATen", "c10", "caffe2", "iostream", "fstream", "sstream", "iomanip", "regex"}
    for path, parts, _, words in _includes():
        assert words[0] not in refused, f"{path} includes {words}"
        if words[0] in ("pybind11", "Python.h"):
            assert "bindings" in parts, f"{path} includes {words}: Python stays in csrc/bindings"


def test_assembly_stands_in_ptx_only_and_nothing_ends_the_process() -> None:
    ends = re.compile(r"\b(std::)?(abort|_?exit|quick_exit|terminate)\s*\(|__trap\s*\(")
    for path in NATIVE_FILES:
        code = _code(path)
        in_ptx = path.relative_to(ROOT / "csrc").parts[0] == "ptx"
        assert in_ptx or not re.search(r"\b(__)?asm(__)?\b", code), f"{path} spells asm"
        assert not (found := ends.search(code)), f"{path} calls {found[0]}"


@pytest.mark.parametrize("name", ["reference", "moe_reference"])
def test_the_references_share_nothing(name: str) -> None:
    found = {each.split(".")[0] for each in _imports(ROOT / "tests" / f"{name}.py", everywhere=True)}
    assert found <= {"__future__", "collections", "dataclasses", "math", "typing", "numpy", "torch"}, found


def test_blocks_and_warps_hear_one_answer_about_a_failure() -> None:
    """Threads that read the word of a failure at different times would take different ways, with different
    barriers on them: hardware answers that with an illegal instruction, or waits without end."""
    asking = [path.name for path in (ROOT / "csrc").rglob("*.cu*") if "already_failed(" in path.read_text()]
    assert asking == ["wait.cuh"]
