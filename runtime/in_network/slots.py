"""Memory of an aggregator: slots of one block each, of which a group needs as many as it has blocks, in a row."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from gradbus.runtime.in_network.packets import Block

Allocation: TypeAlias = Literal["scan", "hash"]


class Slots:
    """A fixed number of slots, and which of them are free.

    Attributes:
        free: how many are. memory: int32, shape (count, E), of all.
    """

    def __init__(self, count: int, block_elems: int, allocation: Allocation = "scan") -> None:
        """
        Args:
            count: of slots. block_elems: entries of each.
            allocation: ``scan`` takes the first free slots in a row. ``hash`` looks at one place, which the key gives,
                as a switch does that cannot search; a group whose place is taken gets none.
        """
        self.memory = np.zeros((count, block_elems), dtype=np.int32)
        self._is_taken = np.zeros(count, dtype=bool)
        self._allocation = allocation
        self.free = count

    def allocate(self, key: tuple[int, ...], count: int) -> int | None:
        """Take ``count`` slots in a row, which keep what they had. Returns the first one's number; None: none are.

        Raises:
            ValueError: ``count`` is below 1.
        """
        if count < 1:
            raise ValueError(f"slots: expected at least 1, got {count}")
        base = self._scan(count) if self._allocation == "scan" else self._place(key, count)
        if base is not None:
            self._is_taken[base : base + count] = True
            self.free -= count
        return base

    def release(self, base: int, count: int) -> None:
        """Give them back."""
        assert self._is_taken[base : base + count].all()
        self._is_taken[base : base + count] = False
        self.free += count

    def __getitem__(self, slot: int) -> Block:
        """The memory of a slot: int32, shape (E,)."""
        values: Block = self.memory[slot]
        return values

    def _scan(self, count: int) -> int | None:
        if self.free < count:
            return None
        taken = np.flatnonzero(np.concatenate(([True], self._is_taken, [True])))  # with a border on both sides
        runs = np.diff(taken) - 1
        fits = np.flatnonzero(runs >= count)
        return int(taken[fits[0]]) if fits.size else None

    def _place(self, key: tuple[int, ...], count: int) -> int | None:
        lanes = len(self._is_taken) // count
        if not lanes:
            return None
        base = hash(key) % lanes * count
        return None if self._is_taken[base : base + count].any() else base
