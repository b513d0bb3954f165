"""Tests that help() describes every public name, and that docs/api.md is what its script makes of them."""

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("moecomm", "moecomm.nn", "moecomm.overlap", "moecomm.parallel")
NAMES = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]


def own_attributes(kind: type) -> set[str]:
    """Public fields of a class, and what its __init__ sets on self."""
    found: set[str] = set()
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            found |= {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
    return {name for name in found if not name.startswith("_")}


def is_described(name: str, text: str) -> bool:
    """An entry such as "name: ..." or "other, name: ..."."""
    return re.search(rf"^ *(?:\w+, )*{re.escape(name)}(?:, \w+)*: ", text, re.MULTILINE) is not None


def missing(package: Any, name: str) -> Iterator[str]:
    value = getattr(package, name)
    text = value.__doc__ or ""
    if not inspect.isclass(value) and not hasattr(value, "__wrapped__") and not inspect.isfunction(value):
        if not is_described(name, package.__doc__):
            yield f"{name}, in the docstring of {package.__name__}"
        return
    if len(text.split()) < 3 or text.startswith(f"{name}("):  # that of a dataclass without one
        yield name
    if not inspect.isclass(value):
        return
    whole = "\n".join(base.__doc__ or "" for base in value.__mro__ if base.__module__.startswith("moecomm"))
    yield from (f"{name}.{each}" for each in sorted(own_attributes(value)) if not is_described(each, whole))
    for member, each in vars(value).items():
        is_method = isinstance(each, (staticmethod, classmethod, property)) or inspect.isfunction(each)
        if is_method and not member.startswith("_") and not inspect.getdoc(getattr(value, member)):
            yield f"{name}.{member}()"


@pytest.mark.parametrize(("package", "name"), NAMES, ids=str)
def test_help_describes(package: str, name: str) -> None:
    assert list(missing(importlib.import_module(package), name)) == []


def test_types_are_shipped() -> None:
    assert (ROOT / "moecomm" / "py.typed").exists()


def test_the_reference_is_up_to_date() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("peft")
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None and spec.loader is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    assert make_api.PAGE.read_text() == make_api.page(), "run python docs/make_api.py"
