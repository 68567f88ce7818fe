"""A site of a tree, which is a Controller and a participant at once."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Site":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # This package was a module with that class; the next release drops it.
    warnings.warn(f"take Site from gradbus.actors: {__name__} is a package now", DeprecationWarning, stacklevel=2)
    from gradbus.actors.federated.site.site import Site

    globals()["Site"] = Site  # who asks again is not warned again: an import asks twice
    return Site
