"""``package.module:attribute``: how a configuration names a user's own code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from typing import Any

from gradbus.runtime.errors import ConfigError


def add_current_directory_to_path() -> None:
    """Put the current directory on the import path, behind everything that is installed.

    Never in front, where ``python -m`` puts it: a folder ``codecs`` or ``models`` in it would hide modules that others
    mean.
    """
    here = os.getcwd()
    sys.path[:] = [entry for entry in sys.path if entry not in ("", here)] + [here]


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
