"""Explains what a Flower app imports and this environment does not have: a package, or a name that Flower has moved."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec

MAX_PLACES = 3  # how many modules an error names

# Modules of Flower that apps import and that its newer versions do not have, by the last minor version with them. Names
# of other modules are looked up in the installed version only.
_LAST_WITH = {
    "1.31": (
        "flwr.client.client", "flwr.client.dpfedavg_numpy_client", "flwr.client.numpy_client", "flwr.client.typing",
        "flwr.common.parameter", "flwr.common.recorddict_compat", "flwr.server.serverapp_components",
        "flwr.server.typing",
    ),
    "1.30": ("flwr.common.context", "flwr.common.message", "flwr.common.record", "flwr.server.grid",
             "flwr.server.server_app"),
    "1.22": ("flwr.client.client_app", "flwr.client.clientapp"),
    "1.18": ("flwr.client.app", "flwr.client.supernode"),
    "1.16": ("flwr.common.recordset_compat", "flwr.server.driver"),
}  # fmt: skip


def explain_missing_module(module: str, dependencies: Sequence[str]) -> str:
    """Return why a module that an app imports is not there, and what to do.

    Args:
        module: its full name. dependencies: the requirements in the app's pyproject.toml.
    """
    package = module.partition(".")[0]
    if package == module or find_spec(package) is None:
        return (
            f"the app needs the module {package!r}, which is not installed here. Install it into the environment of "
            f"{sys.executable}: nothing is installed at run time"
        )
    *parents, last = module.split(".")
    found = [name for name in _modules_of(package) if name.endswith(f".{last}")]
    return _moved(f"the module {module!r}", module, dependencies, _nearest(found, parents))


def explain_missing_name(error: ImportError, dependencies: Sequence[str]) -> str | None:
    """Return why ``from flwr... import name`` fails, and what to do; None: it is not a name of Flower."""
    text = re.match(r"cannot import name '(\w+)'", error.msg)  # its attribute name_from came with Python 3.12
    module, name = error.name or "", text[1] if text else ""
    if module.partition(".")[0] != "flwr" or not name:
        return None
    public = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.server", "flwr.common")
    found = [one for one in public if one != module and _has(one, name)]
    return _moved(f"{name!r} from {module!r}", f"{module}.{name}", dependencies, found)


def _moved(what: str, module: str, dependencies: Sequence[str], found: Sequence[str]) -> str:
    package = module.partition(".")[0]
    text = f"the app imports {what}, and {package} {_version(package)}, which is installed here, does not have it"
    last = _last_with(module)
    if last:
        text += f": flwr {last} was the last version with it"
    if found:
        text += f". This version has that name in {' and '.join(found[:MAX_PLACES])}"
    asked = next((one for one in dependencies if re.match(rf"{re.escape(package)}\b", one)), "")
    if asked:
        text += f". The app's pyproject.toml asks for {asked!r}"
    if package == "flwr":
        return f"{text}. gradbus runs apps with flwr {_supported()}, so the import in the app has to change"
    return f"{text}. Install a version of {package} that has it into the environment of {sys.executable}"


def _last_with(module: str) -> str:
    """Return the last minor version of Flower that has a module, or one that holds it; empty: not known."""
    for version, names in _LAST_WITH.items():
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return version
    return ""


def _supported() -> str:
    """Return the range of versions of Flower that gradbus asks for."""
    for requirement in importlib.metadata.requires("gradbus") or ():
        if (asked := re.match(r"flwr\s*([^;]+)", requirement)) is not None:
            return asked[1].strip()
    return "of its extra gradbus[flower]"


def _version(package: str) -> str:
    distribution = importlib.metadata.packages_distributions().get(package, [package])[0]
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _modules_of(package: str) -> list[str]:
    """Return the modules of a package that its files show. Only the package itself is imported."""
    folders = list(getattr(find_spec(package), "submodule_search_locations", None) or ())
    found, pending = list[str](), [(package, folders)]
    while pending:
        prefix, where = pending.pop()
        for module in pkgutil.iter_modules(where):
            name = f"{prefix}.{module.name}"
            found.append(name)
            if module.ispkg and not module.name.startswith("_"):
                pending.append((name, [f"{folder}/{module.name}" for folder in where]))
    return sorted(found)


def _nearest(found: Sequence[str], parents: Sequence[str]) -> list[str]:
    """Order modules by how much their names resemble those of the packages that were looked in."""
    wanted = parents[-1] if parents else ""
    return sorted(
        (name for name in found if name.split(".")[-2].startswith(wanted)),
        key=lambda name: (name.count("."), name),
    )


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


__all__ = ["explain_missing_module", "explain_missing_name"]
