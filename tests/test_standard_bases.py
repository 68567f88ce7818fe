"""Private names of classes that inherit from the standard library: none is one that the base uses itself.

The private names of the standard library change from release to release, and one that stands in both is overwritten
without a word: since Python 3.13 ``threading.Thread`` has a ``_handle`` of its own.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAPPED = {"runtime._front": "", "runtime._torch": "torch"}
LAYERS = ("codecs", "runtime", "models", "actors", "commands", "experiments")
PRIVATE = re.compile(r"_(?!_)\w*[a-zA-Z0-9]\Z")  # _name: not __name, which each class has for itself, nor enum's _name_
# Made to be filled in by those who inherit, or by Python for them: their private names are their own affair.
WITHOUT_STATE = {"abc", "typing", "enum", "builtins", "dataclasses"}


def module_name(path: Path) -> str:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder, name in MAPPED.items():
        if dotted == folder or dotted.startswith(f"{folder}."):
            dotted = f"{name}{dotted.removeprefix(folder)}".strip(".")
    return f"gradbus.{dotted}".rstrip(".")


def inherits_from_the_library(tree: ast.Module) -> bool:
    """Whether a class of this file has a base that an import from the standard library has given its name."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0]
        in sys.stdlib_module_names - WITHOUT_STATE
    }
    bases = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(isinstance(name, ast.Name) and name.id in imported for base in bases for name in ast.walk(base))


def private_names(cls: type) -> set[str]:
    """Private names that the source of a class gives a value: attributes of ``self``, and what stands in its body."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # it is written in C
        return set()
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)  # local variables among them, which are seldom private
    return {name for name in found if PRIVATE.match(name)}


def clashes(cls: type) -> Iterator[str]:
    own = private_names(cls)
    for base in cls.__mro__[1:]:
        if base.__module__.partition(".")[0] in sys.stdlib_module_names - WITHOUT_STATE:
            for name in sorted(own & (private_names(base) | set(vars(base)))):
                yield f"{cls.__module__}.{cls.__qualname__}.{name} is also one of {base.__module__}.{base.__qualname__}"


def modules_with_such_classes() -> Iterator[ModuleType]:
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            if inherits_from_the_library(ast.parse(path.read_text(encoding="utf-8"))):
                with contextlib.suppress(
                    ImportError
                ):  # of an extra that is not installed here, or a torch that is too old
                    yield importlib.import_module(module_name(path))


def test_no_class_shares_a_private_name_with_a_base_from_the_standard_library() -> None:
    checked, found = 0, []
    for module in modules_with_such_classes():
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == module.__name__:
                checked += 1
                found += clashes(cls)
    assert checked > 20
    assert found == []


class _TakesAName(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self._target = "a name of Thread, under each Python"


class _Overrides(threading.Thread):
    def _bootstrap(self) -> None:
        pass


class _HasItsOwn(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self._gradbus_target = "a name that Thread has not"


@pytest.mark.parametrize(("cls", "name"), [(_TakesAName, "_target"), (_Overrides, "_bootstrap"), (_HasItsOwn, "")])
def test_a_shared_name_is_found(cls: type, name: str) -> None:
    assert [found.partition(" ")[0].rpartition(".")[2] for found in clashes(cls)] == ([name] if name else [])
