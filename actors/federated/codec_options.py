"""From settings to the options of a codec."""

from __future__ import annotations

from typing import Any, Protocol


class _Settings(Protocol):
    @property
    def density(self) -> float: ...
    @property
    def chunk_elems(self) -> int: ...


def codec_options(name: str, settings: _Settings) -> dict[str, Any]:
    """Those of the settings that the codec of this name knows."""
    options: dict[str, Any] = {}
    if name in ("s4", "sq8"):
        options["density"] = settings.density
    if name in ("q8", "sq8"):
        options["chunk_elems"] = settings.chunk_elems
    return options
