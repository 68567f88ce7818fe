"""Choices by name: a class that a package has under this name, or one of the user's as ``package.module:Name``.

A built-in choice is a class with a ``choice`` of its own, in any module of the package: it is found by looking, so that
a new one is a new file, and nothing else is edited. Error texts, help and documents come from the same table.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from gradbus.runtime.errors import ConfigError

T = TypeVar("T")


class NoOptions(BaseModel):
    """The options of a choice that has none of its own. A choice's ``Options`` are such a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Choices(Generic[T]):
    """What one setting may name."""

    def __init__(self, package: str, *, key: str, what: str, options_key: str = "") -> None:
        """
        Args:
            package: whose modules have the built-in classes.
            key: of the setting, as in ``federated.strategy``.
            what: what a choice is, in a few words.
            options_key: the setting with its options; by default ``key`` with ``_options``.
        """
        self._package = package
        self._options_key = options_key or f"{key}_options"
        self.key = key
        self.what = what

    @cached_property
    def table(self) -> Mapping[str, type[T]]:
        """The built-in classes by name, in the order of their names."""
        found: dict[str, Any] = {}
        for info in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
            module = importlib.import_module(f"{self._package}.{info.name}")
            for kind in vars(module).values():
                if inspect.isclass(kind) and kind.__module__ == module.__name__ and vars(kind).get("choice"):
                    found[vars(kind)["choice"]] = kind
        return dict(sorted(found.items()))

    def help(self) -> dict[str, str]:
        """The first sentence of each built-in class's docstring, by name."""
        texts = {name: " ".join((inspect.getdoc(kind) or "").split()) for name, kind in self.table.items()}
        return {name: text.partition(". ")[0].rstrip(".") for name, text in texts.items()}

    def find(self, name: str) -> type[T]:
        """The class of this name, or of ``package.module:Name``, which is imported.

        Raises:
            ConfigError: there is none; it names the nearest one.
        """
        if ":" not in name:
            if (kind := self.table.get(name)) is not None:
                return kind
            near = difflib.get_close_matches(name, self.table, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{self.key}: there is no {self.what} {name[:100]!r}; {hint}Known here: {', '.join(self.table)}, or "
                f"your own as package.module:Name"
            )
        found: Any = import_object(name, key=self.key)
        if not inspect.isclass(found):
            raise ConfigError(f"{self.key}: {name[:200]!r} is a {type(found).__name__}, expected a class")
        return cast("type[T]", found)

    def options(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a choice as keyword arguments, checked by its ``Options``, with their defaults.

        Raises:
            ConfigError: one is not known, or has another type or range.
        """
        model: type[BaseModel] = getattr(self.find(name), "Options", NoOptions)
        try:
            checked = model(**values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join([self._options_key, *map(str, first["loc"])])
            known = ", ".join(model.model_fields) or "none"
            raise ConfigError(f"{where}: {first['msg']}; the options of {name!r} are: {known}") from None
        return {field: getattr(checked, field) for field in model.model_fields}


def import_object(spec: str, *, key: str) -> Any:
    """Import the object that ``package.module:attribute`` names.

    Args:
        key: the setting that names it, for the error.

    Raises:
        ConfigError: there is no such module or attribute, or importing the module fails.
    """
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{key} {spec!r}: expected package.module:attribute, for example gradbus.models:mnist_cnn")
    target: Any = _import(module_name, spec, key)
    for name in attribute.split("."):
        if not hasattr(target, name):
            known = [known for known in dir(target) if not known.startswith("_")]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known[:12]) or 'nothing'}"
            raise ConfigError(f"{key} {spec!r}: module {module_name!r} has no {name!r}; {hint}")
        target = getattr(target, name)
    return target


def _import(module_name: str, spec: str, key: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key} {spec!r}: module {module_name!r} needs {error.name!r}: install that") from None
        raise ConfigError(
            f"{key} {spec!r}: there is no module {error.name!r}. Install it, or start in the folder that holds it"
        ) from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key} {spec!r}: importing {module_name!r} failed: {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno})"
        ) from None
