"""Modules that have moved: an old name works for one release more, with a DeprecationWarning that has the new one.

:data:`MOVED` is the table. Its finder stands last in ``sys.meta_path``, so a name that still exists is found before it.
Under an old name a module is the new module itself: a class is one class, whichever name a program imports it by. A
package is an empty one, whose path leads nowhere: with the new path, Python would load its modules a second time.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

MOVED = {
    "gradbus.actors.federated.report": "gradbus.actors.federated.controller.report",
    "gradbus.actors.federated.rules": "gradbus.actors.federated.client.rules",
    "gradbus.actors.federated.selectors": "gradbus.actors.federated.controller.selectors",
    "gradbus.experiments.amounts": "gradbus.commands.amounts",
    "gradbus.experiments.buses": "gradbus.commands.buses",
    "gradbus.experiments.cli": "gradbus.commands.cli",
    "gradbus.experiments.cli.choices": "gradbus.commands.choices",
    "gradbus.experiments.cli.exit_codes": "gradbus.commands.exit_codes",
    "gradbus.experiments.communication_table": "gradbus.experiments.studies.communication_table",
    "gradbus.experiments.dashboard": "gradbus.commands.dashboard",
    "gradbus.experiments.doctor": "gradbus.commands.doctor",
    "gradbus.experiments.figures.run_accuracy": "gradbus.commands.report.run_accuracy",
    "gradbus.experiments.files": "gradbus.commands.files",
    "gradbus.experiments.history": "gradbus.commands.history",
    "gradbus.experiments.lab": "gradbus.commands.lab",
    "gradbus.experiments.launch": "gradbus.commands.launch",
    "gradbus.experiments.matrix": "gradbus.commands.matrix",
    "gradbus.experiments.namespaces": "gradbus.commands.lab.namespaces",
    "gradbus.experiments.peer_link": "gradbus.commands.peer_link",
    "gradbus.experiments.report": "gradbus.commands.report",
    "gradbus.experiments.run": "gradbus.commands.run",
    "gradbus.experiments.run.configured_task": "gradbus.commands.configured_task",
    "gradbus.experiments.run.lifecycle": "gradbus.commands.lifecycle",
    "gradbus.experiments.run.rank_environment": "gradbus.commands.rank_environment",
    "gradbus.experiments.run.sample_ids": "gradbus.commands.sample_ids",
    "gradbus.experiments.rundir": "gradbus.commands.rundir",
    "gradbus.experiments.settings_reference": "gradbus.commands.settings_reference",
    "gradbus.experiments.simulate": "gradbus.commands.simulate",
    "gradbus.experiments.simulate.claims": "gradbus.experiments.studies.claims",
    "gradbus.experiments.simulate.lockstep": "gradbus.experiments.bench.lockstep",
    "gradbus.experiments.simulate.printed_forms": "gradbus.experiments.studies.printed_forms",
    "gradbus.models.client_text": "gradbus.experiments.examples.client_text",
    "gradbus.models.text": "gradbus.experiments.examples.text",
}
"""Old name: new name, of a module, or of a package and all below it. The longest old name that fits counts."""

CHECKOUT_ONLY = "gradbus.experiments"
"""A package that a checkout of the repository has and an installed gradbus has not."""


def new_name_of(name: str, moved: Mapping[str, str] = MOVED) -> str | None:
    """Return the new name of a module that is in the table, or below a package that is; None: it has not moved."""
    head, tail = name, ""
    while head:
        if head in moved:
            return moved[head] + tail
        head, dot, last = head.rpartition(".")
        tail = f"{dot}{last}{tail}"
    return None


class MovedModuleFinder:
    """Find modules by the names that they had before. Names that never were are left to fail as usual."""

    def __init__(self, moved: Mapping[str, str], checkout_only: str = CHECKOUT_ONLY) -> None:
        """``moved``: as :data:`MOVED`. ``checkout_only``: as :data:`CHECKOUT_ONLY`."""
        self._moved = dict(moved)
        self._checkout_only = checkout_only

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the spec of a moved module or package; None: it is neither.

        Raises:
            ImportError: only a checkout has it, and this is an installed gradbus.
        """
        new_name = new_name_of(fullname, self._moved)
        if new_name is not None:
            return _spec_of_moved(fullname, new_name)
        if fullname == self._checkout_only:  # nothing has found it before: there is no checkout
            return ModuleSpec(fullname, _EmptyPackage(), is_package=True)
        # The path of the package that stands in is empty, also for who looks for a module without an import of it.
        if fullname.startswith(f"{self._checkout_only}.") and path is not None and not path:
            raise ImportError(
                f"{fullname} is not part of an installed gradbus: benchmarks, figures, studies, examples and their "
                "configurations are in a checkout of the repository. Clone it, run 'make setup' there, and use its "
                ".venv",
                name=fullname,
            )
        return None


class _EmptyPackage(Loader):
    """Stands in for a package that is not installed, so that what has moved out of it can be imported."""

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


class _MovedModule(Loader):
    """Puts the new module where the import system looks for the old one."""

    def __init__(self, old_name: str, new_name: str) -> None:
        self._old_name = old_name
        self._new_name = new_name

    def exec_module(self, module: ModuleType) -> None:
        """Import the new module, and put it in the place of ``module``."""
        _warn(self._old_name, self._new_name)
        sys.modules[self._old_name] = importlib.import_module(self._new_name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the new module: ``python -m`` runs it."""
        warnings.warn_explicit(  # as of the program's own: Python shows no other by default
            _text(self._old_name, self._new_name), DeprecationWarning, fullname, 1, module="__main__"
        )
        spec = importlib.util.find_spec(self._new_name)
        return None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]


class _MovedPackage(Loader):
    """Makes a package without modules, whose names are those of the new one."""

    def __init__(self, old_name: str, new_name: str) -> None:
        self._old_name = old_name
        self._new_name = new_name

    def exec_module(self, module: ModuleType) -> None:
        """Have ``module`` look for names in the new package."""
        module.__getattr__ = self._named  # type: ignore[method-assign]

    def _named(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self._old_name!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(self._new_name), name)
        _warn(self._old_name, self._new_name)
        return found


def _spec_of_moved(old_name: str, new_name: str) -> ModuleSpec | None:
    new = importlib.util.find_spec(new_name)
    if new is None:
        return None
    if new.submodule_search_locations is not None:
        return ModuleSpec(old_name, _MovedPackage(old_name, new_name), is_package=True)
    return ModuleSpec(old_name, _MovedModule(old_name, new_name), origin=new.origin)


def _warn(old_name: str, new_name: str) -> None:
    warnings.warn(_text(old_name, new_name), DeprecationWarning, stacklevel=3)


def _text(old_name: str, new_name: str) -> str:
    return f"{old_name} has moved to {new_name}. The next release drops the old name"


def install_finder() -> None:
    """Have Python look in :data:`MOVED` for modules that it finds nowhere else."""
    sys.meta_path.append(MovedModuleFinder(MOVED))
