"""The Client: training, and what it sends and keeps."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # This package was a module with that class; the next release drops it.
    warnings.warn(f"take Client from gradbus: {__name__} is a package now", DeprecationWarning, stacklevel=2)
    from gradbus.actors.federated.client.client import Client

    globals()["Client"] = Client  # who asks again is not warned again: an import asks twice
    return Client
