"""What a DDS writer asks of the envelopes that it puts samples into, so that it need not know of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Envelope(Protocol):
    """What a sample is put into on its way out: a header before it, and something behind it.

    Attributes:
        header, tail: the tail is not yet what it will be. plain: what goes between them. size: octets of all that.
    """

    header: bytes
    tail: bytes
    plain: tuple[Any, ...]
    size: int

    def close(self, octets: memoryview) -> None:
        """Seal header, plain and tail in place."""

    def octets(self) -> bytes:
        """The same, sealed, in memory of its own."""

    def written(self) -> None:
        """DDS has taken it."""


Seals = Callable[[tuple[Any, ...], tuple[Any, ...]], Envelope]  # the fields of a sample, and the parts of its octets
