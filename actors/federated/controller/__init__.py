"""The Controller: rounds, clients, sums and checkpoints."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Controller":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # This package was a module with that class; the next release drops it.
    warnings.warn(f"take Controller from gradbus: {__name__} is a package now", DeprecationWarning, stacklevel=2)
    from gradbus.actors.federated.controller.controller import Controller

    globals()["Controller"] = Controller  # who asks again is not warned again: an import asks twice
    return Controller
