"""What a DDS writer asks of the envelopes that it puts samples into, so that it need not know of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Envelope(Protocol):
    """What a sample is put into on its way out: a header, and the sealed sample behind it.

    Attributes:
        header: in clear. size: octets of both.
    """

    header: bytes
    size: int

    def seal_into(self, room: memoryview) -> None:
        """Put the sealed sample there; ``room`` has its size, and nothing in it yet."""

    def octets(self) -> bytes:
        """Header and sealed sample, in memory of their own."""

    def written(self) -> None:
        """DDS has taken it."""


Seals = Callable[[tuple[Any, ...], tuple[Any, ...]], Envelope]  # the fields of a sample, and the parts of its octets
