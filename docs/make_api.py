"""Writes docs/api.md, the reference of the public names, from their signatures and docstrings.

    python docs/make_api.py

Run it after a change of either, with transformers and peft installed; a test compares the page with what
this makes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, ForwardRef

PAGE = Path(__file__).with_name("api.md")
PACKAGES = (
    *("moecomm", "moecomm.nn", "moecomm.train", "moecomm.graphs", "moecomm.overlap", "moecomm.parallel"),
    *("moecomm.transformers", "moecomm.transformers.adapters"),
)
WIDTH = 100
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:")
HEAD = """\
# API reference

Signatures and docstrings of all public names, as `help()` shows them, written by `docs/make_api.py`. Shape
letters: T tokens of this rank, H hidden, K top-k, E experts, R ranks, L local experts (E / R), P rows of a
dispatch's output, F an expert's inner width.
"""


def page() -> str:
    """The whole text of docs/api.md."""
    parts = [HEAD]
    for package in PACKAGES:
        module = importlib.import_module(package)
        parts += [f"## {package}", markdown(inspect.getdoc(module) or "")]
        for name in module.__all__:
            value = getattr(module, name)
            home = getattr(value, "__module__", package)
            others = (f"{other}." for other in PACKAGES[1:] if package not in (other, home))
            if home.startswith(tuple(others)):
                continue  # of another of these packages, and named here too
            if inspect.isclass(value):
                parts += class_entry(name, value)
            elif callable(value) and inspect.getdoc(value) and hasattr(value, "__module__"):
                parts += entry(f"### {name}", "", name, value)
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def class_entry(name: str, kind: type) -> list[str]:
    """A class, and its public methods and properties as they are defined, those of private bases last."""
    found = entry(f"### {name}", "class ", name, kind)
    bases = [base.__name__ for base in kind.__mro__[1:] if not base.__name__.startswith("_")]
    if bases[0] not in ("object", "tuple", "Generic"):
        found.insert(2, f"A subclass of `{bases[0]}`.")
    private = [base for base in kind.__mro__[1:] if base.__name__.startswith("_")]
    members = [item for each in (kind, *private) for item in vars(each).items()]
    for member, value in members:
        function = value.__func__ if isinstance(value, staticmethod) else value
        if member.startswith("_") or not getattr(function, "__doc__", None):
            continue
        title = f"#### {name}.{member}"
        if isinstance(function, property):
            found += [title, "A property.", markdown(inspect.getdoc(function) or "")]
        elif inspect.isfunction(function):
            found += entry(title, "", member, function)
    return found


def entry(title: str, keyword: str, name: str, value: Any) -> list[str]:
    """A title, a signature and a docstring."""
    code = f"```python\n{keyword}{name}{signature(value)}\n```"
    return [title, code, markdown(inspect.getdoc(value) or "")]


def signature(value: Any) -> str:
    """The public arguments and the result, on one line or one a line; nothing where Python knows none."""
    try:
        found = inspect.signature(value)
    except ValueError:
        return ""
    texts, kinds = [], inspect.Parameter
    has_star = False
    for name, each in found.parameters.items():
        if name.startswith("_") or name == "self":
            continue
        if each.kind is kinds.KEYWORD_ONLY and not has_star:
            texts.append("*")
        has_star = has_star or each.kind in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL)
        text = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(each.kind.name, "") + name
        if each.annotation is not each.empty:
            text += f": {type_text(each.annotation)}"
        if each.default is not each.empty:
            text += f" = {default_text(each.default)}"
        texts.append(text)
    result = "" if inspect.isclass(value) or found.return_annotation is found.empty else " -> "
    if result:
        result += type_text(found.return_annotation)
    one_line = f"({', '.join(texts)}){result}"
    if len(one_line) <= WIDTH - 20:
        return one_line
    return "(\n" + "".join(f"    {text},\n" for text in texts) + f"){result}"


def type_text(annotation: Any) -> str:
    """An annotation as it stands in the source."""
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def default_text(value: Any) -> str:
    """A default value without addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def markdown(doc: str) -> str:
    """A docstring: its sections become lists, other indented blocks code."""
    found: list[str] = []
    section = False
    for block in blocks(doc):
        first = block[0]
        if first in SECTIONS:
            section = True
            found.append(f"**{first.rstrip(':')}**")
            found.append(items(block[1:]))
        elif first.startswith("    "):
            # Of a section, as of the one before, or code.
            found.append(items(block) if section else "```text\n" + "\n".join(dedent(block)) + "\n```")
        else:
            section = False
            found.append("\n".join(prose(line) for line in block))
    return "\n\n".join(part for part in found if part)


def blocks(doc: str) -> list[list[str]]:
    """Lines between empty ones, also apart where their indentation begins or ends; the title of a section
    stays with its lines."""
    found: list[list[str]] = [[]]
    in_section = False
    for line in doc.splitlines():
        indented = line.startswith("    ")
        current = found[-1]
        starts_section = line in SECTIONS
        changes = bool(current) and current[-1].startswith("    ") != indented and not in_section
        ends_section = in_section and bool(line) and not indented
        if not line or starts_section or changes or ends_section:
            found.append([])
        in_section = starts_section or (in_section and (indented or not line))
        if line:
            found[-1].append(line)
    return [block for block in found if block]


def dedent(lines: list[str]) -> list[str]:
    """Without the indentation that all lines have; a line of code less indented keeps none."""
    least = min(len(line) - len(line.lstrip()) for line in lines)
    return [line[least:] for line in lines]


def items(lines: list[str]) -> str:
    """A list with an item for each line that is not indented further; one without a name is a paragraph."""
    found: list[str] = []
    for line in dedent(lines) if lines else []:
        named = re.match(r"([\w, *]+): (.*)", line)
        if line.startswith(" ") and found:
            found[-1] += f"\n  {prose(line.strip())}"
        elif named:
            names = ", ".join(f"`{name}`" for name in named[1].split(", "))
            found.append(f"- {names}: {prose(named[2])}")
        else:
            found.append(prose(line))
    return "\n".join(found)


def prose(line: str) -> str:
    """A line of text in which nothing looks like HTML or emphasis."""
    pieces = line.split("`")
    pieces[::2] = [re.sub(r"(?<=\S)\*|\*(?=\S)", r"\\*", piece.replace("<", "&lt;")) for piece in pieces[::2]]
    return "`".join(pieces)


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
