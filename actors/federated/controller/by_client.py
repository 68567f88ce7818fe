"""A mapping by the keys of uploads that finds those of one client without a look at all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, ValuesView
from typing import TypeVar

from gradbus.runtime.wire.frames import FrameKey

V = TypeVar("V")


class ByClient(MutableMapping[FrameKey, V]):
    """Values by key, in order of insertion, and of each client by itself.

    Where clients may lie, the updates of all of them are held until the last one is announced. A scan of all for each
    message would then take time in proportion to the square of their number.

    Attributes:
        num_bytes: sum of the sizes of all values.
    """

    def __init__(self, size_of: Callable[[V], int]) -> None:
        """Begin empty. ``size_of``: bytes of a value, which do not change while it is here."""
        self._size_of = size_of
        self._all: dict[FrameKey, V] = {}
        self._of: dict[int, dict[FrameKey, V]] = {}
        self.num_bytes = 0

    def of(self, client_id: int) -> list[V]:
        """Return the values of one client, in order of insertion."""
        return list(self._of.get(client_id, {}).values())

    def __getitem__(self, key: FrameKey) -> V:
        return self._all[key]

    def __setitem__(self, key: FrameKey, value: V) -> None:
        if (before := self._all.get(key)) is not None:
            self.num_bytes -= self._size_of(before)
        self._all[key] = self._of.setdefault(key.sender, {})[key] = value
        self.num_bytes += self._size_of(value)

    def __delitem__(self, key: FrameKey) -> None:
        self.num_bytes -= self._size_of(self._all.pop(key))
        own = self._of[key.sender]
        del own[key]
        if not own:
            del self._of[key.sender]

    def values(self) -> ValuesView[V]:
        """Return a view of all values."""
        return self._all.values()

    def __iter__(self) -> Iterator[FrameKey]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
