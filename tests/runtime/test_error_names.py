"""Every error that a program can catch is a name of gradbus, or gradbus says where it is."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradbus
from gradbus.runtime import errors

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("codecs", "runtime", "models", "actors")
ROOTS = {"GradbusError", "CodecError"}


def classes() -> Iterator[tuple[str, set[str], str]]:
    """Name, names of the bases, and module of each public class of the layers that programs import."""
    for layer in LAYERS:
        for file in sorted((ROOT / layer).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = parts[1:] if parts[0] == "runtime" and parts[1] in ("_torch", "_front") else parts
            module = ".".join(["gradbus", *(part.removeprefix("_") for part in parts)])
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    yield node.name, {ast.unparse(base).split(".")[-1] for base in node.bases}, module


def errors_of_gradbus() -> dict[str, str]:
    """Those that derive from an error of gradbus, with their modules."""
    known, found = list(classes()), dict.fromkeys(ROOTS, "")
    while more := {name: module for name, bases, module in known if bases & found.keys() and name not in found}:
        found |= more
    return {name: module for name, module in found.items() if module}


@pytest.mark.parametrize(("name", "module"), sorted(errors_of_gradbus().items()))
def test_an_error_is_a_name_of_gradbus_or_gradbus_says_where_it_is(name: str, module: str) -> None:
    if name in gradbus.__all__:
        assert getattr(gradbus, name) is getattr(importlib.import_module(module), name)
        return
    with pytest.raises(AttributeError, match=f"gradbus has no '{name}'") as caught:
        getattr(gradbus, name)
    text = str(caught.value)
    if "import it from " not in text:  # a package exports it
        place = text.partition("it is ")[2].partition(f".{name}")[0]
        module = place if "torch" not in place else module  # which needs a newer torch than the rest
    else:
        assert text.endswith(f"import it from {module}")
    assert hasattr(importlib.import_module(module), name)


def test_all_errors_of_the_runtime_are_names_of_gradbus() -> None:
    own = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert len(own) > 20
    assert own <= set(gradbus.__all__)


def test_errors_that_packages_export_are_found_from_gradbus() -> None:
    for name in ("DataMissing", "TrainingStopped"):
        with pytest.raises(AttributeError, match=rf"it is gradbus\.models\.{name}"):
            getattr(gradbus, name)
    with pytest.raises(AttributeError, match=r"it is gradbus\.torch\.elastic\.MembersChanged"):
        _ = gradbus.MembersChanged
