"""Sums within a host, before and after the aggregators: a chain of its ranks, in pieces.

    first rank -> ... -> last rank -> aggregators -> last rank -> ... -> first rank

Each rank adds its own blocks to those of the ranks before it, and sends the sum on; the last one has the sum of the
host. Pieces follow one another: while one is added, the piece before is on its way to the next rank, and the first ones
are at the aggregators. Source: the "ring-reduce" of n ranks and k blocks, in (n + k - 2) steps, of the proposal of CINA
that ``docs/aggregation.md`` follows. A ring has one link more, from the last rank to the first, which is not used.

The sums are of int32, so the order changes no bit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gradbus.runtime.collectives.group import Group
from gradbus.runtime.collectives.handle import CollectiveHandle
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.in_network.packets import add_checked

PIECE_BYTES = 1 << 20
MAX_IN_FLIGHT = 4  # pieces that a rank has sent and the next one has not taken


class HostChain:
    """The ranks of a host, for one sum. All of them make the same calls.

    Attributes:
        ranks: of the workers' group, in the order of the sum, this one among them.
        sent_bytes, received_bytes: of pieces, so far.
    """

    def __init__(self, workers: Group, ranks: Sequence[int]) -> None:
        self._workers = workers
        self.ranks = tuple(ranks)
        at = self.ranks.index(workers.rank)
        self._before = self.ranks[at - 1] if at else None
        self._after = self.ranks[at + 1] if at + 1 < len(self.ranks) else None
        self.sent_bytes = 0
        self.received_bytes = 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the one that sends the host's sums to the aggregators."""
        return self._after is None

    async def reduce(self, blocks: Tensor, take: Callable[[int, Tensor], None]) -> bool:
        """Add up the blocks of the ranks, towards the last one.

        Args:
            blocks: of this rank: int32, shape (groups, N, E), not to be changed before this ends.
            take: gets the sums of the host on its last rank, piece by piece: the number of the first group, and the
                sums, which are the receiver's to keep.

        Returns:
            Whether an entry has left int32 here. Other ranks do not learn it from this.

        Raises:
            PeerLost, CollectiveTimeout, CollectiveError: as of any collective of the workers.
        """
        overflowed = False

        async def handle(start: int, came: Tensor | None) -> Tensor:
            nonlocal overflowed
            own = blocks[start : start + _groups_of_piece(blocks)]
            sums, left = (own, False) if came is None else await asyncio.to_thread(_added, came, own)
            overflowed |= left
            if self._after is None:
                take(start, sums)
            return sums

        await self._pass_along("in_network/within_host", blocks, self._before, self._after, handle)
        return overflowed

    async def spread(self, total: Tensor) -> None:
        """Send the sums of the last rank to the others, into ``total``: int32, shape (groups, N, E). Raises as
        :meth:`reduce`."""

        async def handle(start: int, came: Tensor | None) -> Tensor:
            part = total[start : start + _groups_of_piece(total)]
            return part if came is None else await asyncio.to_thread(part.copy_, came)

        await self._pass_along("in_network/to_host", total, self._after, self._before, handle)

    async def _pass_along(
        self,
        name: str,
        blocks: Tensor,
        source: int | None,
        to: int | None,
        handle: Callable[[int, Tensor | None], Awaitable[Tensor]],
    ) -> None:
        """Take each piece from a rank, handle it, and send on what comes of it."""
        coming: deque[CollectiveHandle[Any]] = deque()
        leaving: deque[CollectiveHandle[None]] = deque()
        announced = _pieces(blocks)
        try:
            for start, shape in _pieces(blocks):
                came = None
                if source is not None:
                    for _, next_shape in islice(announced, MAX_IN_FLIGHT - len(coming)):
                        coming.append(self._workers.recv(name, source=source, max_bytes=4 * next_shape.numel()))
                    came = await self._received(coming, name, shape)
                piece = await handle(start, came)
                if to is not None:
                    if len(leaving) == MAX_IN_FLIGHT:
                        await self._sent(leaving)
                    leaving.append(self._workers.send(name, piece, to=to))
            while leaving:
                await self._sent(leaving)
        finally:
            for one in (*coming, *leaving):
                one.cancel()

    async def _received(self, coming: deque[CollectiveHandle[Any]], name: str, shape: torch.Size) -> Tensor:
        source = coming[0]
        came = await source
        coming.popleft()
        self.received_bytes += source.received_bytes
        if not isinstance(came, Tensor) or (came.dtype, came.shape) != (torch.int32, shape):
            what = f"{came.dtype} {tuple(came.shape)}" if isinstance(came, Tensor) else type(came).__name__
            raise CollectiveError(f"{name}: expected int32 {tuple(shape)} from a rank of this host, got {what}")
        return came

    async def _sent(self, leaving: deque[CollectiveHandle[None]]) -> None:
        await leaving[0]
        self.sent_bytes += leaving.popleft().sent_bytes


def _added(came: Tensor, own: Tensor) -> tuple[Tensor, bool]:
    """Return the sum in new memory, for what came may be memory that the next piece needs; and whether it overflows."""
    sums = came.clone()
    return sums, add_checked(sums.numpy(), own.numpy())


def _groups_of_piece(blocks: Tensor) -> int:
    return max(1, PIECE_BYTES // max(1, blocks[:1].nbytes))


def _pieces(blocks: Tensor) -> Iterator[tuple[int, torch.Size]]:
    """The first group of each piece, and its shape; cut at the same places on all ranks."""
    size = _groups_of_piece(blocks)
    for start in range(0, len(blocks), size):
        yield start, blocks[start : start + size].shape
