"""Collectives that only move data: all_gather, broadcast, gather, scatter, all_to_all, send and recv, barrier.

A payload is a tensor or bytes. Where only one side gets something (broadcast, gather, scatter, send), the other one
ends when that side has acknowledged all of it: a rank cannot run ahead of the others without noticing, and a payload
that no rank took is an error where it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbus.runtime.collectives.operation import IntoMemory, Operation, Stream
from gradbus.runtime.collectives.staging import copier, host_tensor
from gradbus.runtime.collectives.tensors import (
    NOTHING,
    Bytes,
    as_bytes,
    check_sendable,
    describe,
    empty_like_described,
    is_plain,
    payload_bytes,
    plain,
)
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire.frames import CHUNK_BYTES


class OutgoingPayload:
    """A payload on its way out.

    Attributes:
        memory: its bytes. kind: ``tensor`` or ``bytes``. meta: dtype and shape of a tensor.
    """

    def __init__(self, payload: Any) -> None:
        """Raises ValueError: neither a tensor nor bytes."""
        if isinstance(payload, Tensor):
            check_sendable(payload)
            self.kind, self.meta = "tensor", describe(payload)
            self.memory: Bytes = as_bytes(plain(payload))
        else:
            self.kind, self.meta = "bytes", ""
            self.memory = payload_bytes(payload)
        self._payload = payload

    def release(self) -> None:
        """Let go of the caller's memory."""
        self.memory, self._payload = NOTHING, None

    def localize(self, value: Any) -> Any:
        """A payload of another rank, on the device of this one."""
        if self.kind == "tensor" and isinstance(value, Tensor) and value.device != self._payload.device:
            return value.to(self._payload.device)
        return value

    def copy(self) -> Any:
        """The same payload with memory of its own, which is there when this returns: what its sender gets of itself."""
        if self.kind != "tensor":
            return self.memory.tobytes()
        source = self._payload.detach()
        if source.is_cpu:
            return source.clone()
        copied = torch.empty_like(source)
        copier(copied, source)()  # clone() only queues, on a stream of this thread that the caller does not wait for
        return copied


class NewPayload(Stream):
    """Bytes or a tensor in new memory: the sender decides which, and how large, up to ``max_bytes``.

    Attributes:
        value: the payload, when it is complete.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._memory: Bytes = NOTHING
        self._tensor: Tensor | None = None
        self._bytes = b""

    @property
    def value(self) -> Any:
        return self._bytes if self._tensor is None else self._tensor

    def begin(self, total_bytes: int, meta: str) -> None:
        if total_bytes > self._max_bytes:
            raise CollectiveError(f"sent {total_bytes} bytes; {self._max_bytes} are accepted (max_payload_bytes)")
        if meta:
            self._tensor = empty_like_described(meta, self._max_bytes)
            self._memory = as_bytes(self._tensor)
            if len(self._memory) != total_bytes:
                raise CollectiveError(f"sent {total_bytes} bytes for a tensor {meta!r} of {len(self._memory)}")
        elif total_bytes > CHUNK_BYTES:
            self._memory = np.empty(total_bytes, np.uint8)

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        if self._tensor is not None or len(self._memory):
            self._memory[offset : offset + len(data)] = data
        else:
            self._bytes = data.tobytes()
        if self.complete and self._tensor is None and len(self._memory):
            # One copy more: payloads are plain bytes, whatever their size. Programs that move much send tensors.
            self._bytes, self._memory = self._memory.tobytes(), NOTHING


class DataMovement(Operation):
    """Base: payloads of the caller, and new memory for those of others. Both are let go of at the end: a collective
    that has failed may have half of its payloads, and its handle may live on.

    Attributes:
        is_acknowledged: receivers confirm their payload, and senders wait for that.
    """

    is_acknowledged: ClassVar[bool] = False

    def __init__(
        self,
        signature: str,
        rank: int,
        world: int,
        outgoing: Mapping[int | None, OutgoingPayload],
        *,
        sources: Sequence[int] | None = (),
        max_bytes: int = 0,
        peers: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            outgoing: payloads by receiver; None: for all others.
            sources: ranks that send one to this rank; None: all others. max_bytes: of each of them.
        """
        super().__init__(signature, rank, world, peers=peers)
        self._outgoing = outgoing
        self._sources = self.others if sources is None else sources
        self._max_bytes = max_bytes
        self._arrivals: dict[int, NewPayload] = {}  # by sender

    def post(self) -> None:
        for source in self._sources:
            self._arrivals[source] = NewPayload(self._max_bytes)
            self.expect(source, 0, self._arrivals[source])
        receivers = [rank for rank in self.others if rank in self._outgoing]
        if self.is_acknowledged:
            self.await_acks(receivers)
        if None in self._outgoing and self.others:
            self.send(None, 0, self._outgoing[None].memory, meta=self._outgoing[None].meta)
        for rank in receivers:
            self.send(rank, 0, self._outgoing[rank].memory, meta=self._outgoing[rank].meta)

    def stream_done(self, sender: int, part: int) -> None:
        if part == 0 and self.is_acknowledged:
            self.acknowledge(sender)

    def in_rank_order(self, own: OutgoingPayload) -> list[Any]:
        """The payloads of all ranks; ``own``: of this one."""
        return [
            own.copy() if rank == self.rank else own.localize(self._arrivals[rank].value) for rank in range(self.world)
        ]

    def release(self) -> None:
        for payload in self._outgoing.values():
            payload.release()
        self._arrivals.clear()


class AllGatherOperation(DataMovement):
    """All payloads on all ranks, in rank order."""

    def __init__(self, payload: Any, rank: int, world: int, max_bytes: int) -> None:
        self._own = OutgoingPayload(payload)
        super().__init__(
            f"all_gather {self._own.kind}", rank, world, {None: self._own}, sources=None, max_bytes=max_bytes
        )

    def result(self) -> list[Any]:
        return self.in_rank_order(self._own)


class Gather(DataMovement):
    """All payloads at one rank, in rank order; the others get None."""

    is_acknowledged = True

    def __init__(self, payload: Any, root: int, rank: int, world: int, max_bytes: int) -> None:
        self._own = OutgoingPayload(payload)
        self._root = root
        super().__init__(
            f"gather {root} {self._own.kind}",
            rank,
            world,
            {root: self._own},
            sources=None if rank == root else (),
            max_bytes=max_bytes,
        )

    def result(self) -> list[Any] | None:
        return self.in_rank_order(self._own) if self.rank == self._root else None


class Scatter(DataMovement):
    """One rank gives each rank its own payload."""

    is_acknowledged = True

    def __init__(self, payloads: Sequence[Any] | None, root: int, rank: int, world: int, max_bytes: int) -> None:
        if (payloads is not None) != (rank == root):
            raise ValueError(f"scatter: rank {root} is the root and gives the payloads, all others give None")
        if payloads is not None and len(payloads) != world:
            raise ValueError(f"scatter: expected {world} payloads, one for each rank, got {len(payloads)}")
        super().__init__(
            f"scatter {root}",
            rank,
            world,
            {} if payloads is None else _by_receiver(payloads),
            sources=() if rank == root else [root],
            max_bytes=max_bytes,
        )
        self._root = root

    def result(self) -> Any:
        return self._outgoing[self.rank].copy() if self.rank == self._root else self._arrivals[self._root].value


class AllToAll(DataMovement):
    """Each rank gives each rank its own payload. The value: the payloads for this rank, by sender."""

    def __init__(self, payloads: Sequence[Any], rank: int, world: int, max_bytes: int) -> None:
        if len(payloads) != world:
            raise ValueError(f"all_to_all: expected {world} payloads, one for each rank, got {len(payloads)}")
        outgoing = _by_receiver(payloads)
        super().__init__(f"all_to_all {outgoing[0].kind}", rank, world, outgoing, sources=None, max_bytes=max_bytes)

    def result(self) -> list[Any]:
        return self.in_rank_order(self._outgoing[self.rank])


class Send(DataMovement):
    """A payload for one rank."""

    is_acknowledged = True

    def __init__(self, payload: Any, to: int, rank: int, world: int) -> None:
        super().__init__(f"send {rank} {to}", rank, world, {to: OutgoingPayload(payload)}, peers=[to])


class Receive(DataMovement):
    """A payload of one rank. Its sender decides whether it is a tensor or bytes."""

    is_acknowledged = True

    def __init__(self, source: int, rank: int, world: int, max_bytes: int) -> None:
        super().__init__(
            f"send {source} {rank}",
            rank,
            world,
            {},
            sources=[source],
            max_bytes=max_bytes,
            peers=[source],
        )
        self._source = source

    def result(self) -> Any:
        return self._arrivals[self._source].value


class Barrier(Operation):
    """All ranks wait for all. The value: the ranks that have called."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__("barrier", rank, world)

    def post(self) -> None:
        for other in self.others:
            self.expect(other, 0, Stream(0))
        if self.others:
            self.send(None, 0, NOTHING)

    def result(self) -> tuple[int, ...]:
        return tuple(range(self.world))


class BroadcastOperation(Operation):
    """One payload for all. A tensor goes into the memory of the receivers' tensor; bytes are new."""

    def __init__(self, payload: Any, root: int, rank: int, world: int, max_bytes: int) -> None:
        self._root = root
        self._payload = payload
        self._max_bytes = max_bytes
        self._new: NewPayload | None = None
        self._target: Tensor | None = None
        self._copy: Callable[[], object] | None = None
        if isinstance(payload, Tensor):
            check_sendable(payload)
            what = f"tensor {describe(payload)}"
        elif payload is None and rank == root:
            raise ValueError(f"broadcast: rank {rank} is the root and must give a payload")
        elif payload is not None and rank != root:
            raise ValueError(f"broadcast: rank {rank} gets the payload of rank {root}; give None, or a tensor to fill")
        else:
            what = "bytes"
        super().__init__(f"broadcast {root} {what}", rank, world)

    def post(self) -> None:
        if self.rank == self._root:
            if self.others:
                self.await_acks(self.others)
                self.send(None, 0, OutgoingPayload(self._payload).memory)
        elif isinstance(self._payload, Tensor):
            tensor = self._payload.detach()
            self._target = tensor if is_plain(tensor) else host_tensor(tensor.shape, tensor.dtype, tensor.device)
            self._copy = None if self._target is tensor else copier(tensor, self._target)
            self.expect(self._root, 0, IntoMemory(as_bytes(self._target)))
        else:
            self._new = NewPayload(self._max_bytes)
            self.expect(self._root, 0, self._new)

    def stream_done(self, sender: int, part: int) -> None:
        if part == 0:
            self.acknowledge(self._root)

    def release(self) -> None:
        self._payload = self._target = self._new = self._copy = None

    def result(self) -> Any:
        if not isinstance(self._payload, Tensor):
            return self._new.value if self._new is not None else payload_bytes(self._payload).tobytes()
        if self._copy is not None:
            self._copy()
        return self._payload


def _by_receiver(payloads: Sequence[Any]) -> dict[int | None, OutgoingPayload]:
    """The payloads, by rank. Raises ValueError: tensors and bytes are mixed."""
    outgoing: dict[int | None, OutgoingPayload] = {rank: OutgoingPayload(one) for rank, one in enumerate(payloads)}
    if len({payload.kind for payload in outgoing.values()}) > 1:
        raise ValueError("payloads must be all tensors or all bytes, not mixed")
    return outgoing


__all__ = ["AllGatherOperation", "AllToAll", "Barrier", "BroadcastOperation", "Gather", "Receive", "Scatter", "Send"]
