"""The state of a run on its way from a rank that has it to one that joins, while both go on with what they do.

The sender copies its tensors between two steps, so that what it sends is of one step, and sends the copy in pieces, by
messages between these two ranks. What the ranks exchange in their steps meanwhile takes turns with the pieces. The
copy needs as much memory as the state, until it is sent.

Each piece is followed by its hash: a copy with an error in it is known before anything of it is used.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.data_parallel.replicas import described_tensors, empty_tensors, raw_bytes
from gradbus.runtime.collectives import Group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import CollectiveError

PIECE_BYTES = 8 << 20
"""Bytes of a message: few enough that the gradients of a step do not wait long behind one."""
_HASH_BYTES = 16


class BrokenCopy(CollectiveError):
    """The state that has arrived is not the one that was sent.

    Attributes:
        source: the rank that has sent it.
    """

    def __init__(self, text: str, *, source: int) -> None:
        super().__init__(text)
        self.source = source


@torch.no_grad()
def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, on the CPU and in memory of their own."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


class StateTransfer:
    """State on its way from or to this rank, in the background, on a thread of its own.

    It ends by :meth:`ended`, or by :meth:`close`, which cancels it.
    """

    def __init__(self, group: Group, *, timeout_s: float, max_bytes: int, name: str = "elastic/state") -> None:
        """``timeout_s``: of each piece. ``max_bytes``: of all tensors that this rank receives."""
        self._group = group
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._name = name
        self._thread = ComputeThread("state")
        self._tasks: list[asyncio.Task[Any]] = []

    def send(self, tensors: Mapping[str, Tensor], to: Sequence[int]) -> None:
        """Begin to send these tensors, which nobody changes any more, to these ranks; none waits for another one."""
        for rank in to:
            self._tasks.append(asyncio.create_task(self._send(tensors, rank), name=f"gradbus-state-to-{rank}"))

    def receive(self, source: int) -> asyncio.Task[dict[str, Tensor]]:
        """Begin to receive what ``source`` sends. The task raises BrokenCopy: it is not what was sent."""
        task = asyncio.create_task(self._receive(source), name="gradbus-state-in")
        self._tasks.append(task)
        return task

    async def is_over_within(self, seconds: float) -> bool:
        """Wait so long at most. Returns whether nothing is on its way any more: it is there, or an error is."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        return all(task.done() for task in self._tasks)

    async def ended(self) -> None:
        """Wait until all has been sent and received. Raises what went wrong."""
        for task in self._tasks:
            await asyncio.shield(task)

    async def close(self) -> None:
        """Give up what is on its way."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            self._thread.close()
        for task in tasks:
            if not task.cancelled():
                task.exception()  # it was raised by what waited for it

    async def _send(self, tensors: Mapping[str, Tensor], to: int) -> None:
        await self._group.send_object(
            f"{self._name}/names", described_tensors(tensors), to=to, timeout_s=self._timeout_s
        )
        number = 0
        for tensor in tensors.values():
            for piece in torch.split(raw_bytes(tensor), PIECE_BYTES):
                digest = await self._thread.run(_digest, piece)
                await self._group.send(
                    f"{self._name}/{number}", torch.cat([piece, digest]), to=to, timeout_s=self._timeout_s
                )
                number += 1

    async def _receive(self, source: int) -> dict[str, Tensor]:
        described = await self._group.recv_object(f"{self._name}/names", source=source, timeout_s=self._timeout_s)
        try:
            tensors = empty_tensors(described, max_bytes=self._max_bytes)
        except CollectiveError as error:
            raise BrokenCopy(f"the copy that rank {source} sends: {error}", source=source) from error
        number = 0
        for key, tensor in tensors.items():
            raw = raw_bytes(tensor)
            for piece in torch.split(raw, PIECE_BYTES):
                came = await self._group.recv(
                    f"{self._name}/{number}",
                    source=source,
                    timeout_s=self._timeout_s,
                    max_bytes=PIECE_BYTES + _HASH_BYTES,
                )
                if not await self._thread.run(_fill, piece, came):
                    raise BrokenCopy(
                        f"the copy of {key} from rank {source} has another hash than what was sent", source=source
                    )
                number += 1
        return tensors


def _digest(piece: Tensor) -> Tensor:
    digest = hashlib.blake2b(piece.numpy().data, digest_size=_HASH_BYTES).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _fill(piece: Tensor, came: Tensor) -> bool:
    """Copy what came into its place. Returns whether it is whole."""
    if came.dtype != torch.uint8 or came.numel() != piece.numel() + _HASH_BYTES:
        return False
    piece.copy_(came[:-_HASH_BYTES])
    return bool(torch.equal(_digest(piece), came[-_HASH_BYTES:]))
