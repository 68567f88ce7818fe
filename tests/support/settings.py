"""Settings as keywords: those of a group are written with two underscores, as in the environment."""

from collections.abc import Mapping
from typing import Any


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"clients__num": 2, "codec": "sq8", "codec__density": 0.1}`` as groups and choices have it."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split("__")
        here = found
        for step in path:
            inner = here.get(step, {})
            here[step] = inner = {"name": inner} if isinstance(inner, str) else dict(inner)
            here = inner
        here[name] = value
    return found
