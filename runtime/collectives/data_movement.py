"""Collectives that only move data: all_gather, broadcast, gather, scatter, all_to_all, send and recv, barrier.

A payload is a tensor or bytes. Where only one side gets something (broadcast, gather, scatter, send), the other one
ends when that side has said that it has everything: a rank cannot run ahead of the others without noticing, and a
payload that nobody took is an error where it was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.streams import IntoMemory, NewPayload, Signal
from gradbus.runtime.collectives.tensors import (
    Bytes,
    as_bytes,
    check_sendable,
    describe,
    is_plain,
    payload_bytes,
    plain,
)


class OutgoingPayload:
    """A payload on its way out: its memory, what it is (``tensor`` or ``bytes``), and how a tensor looks."""

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
        self.memory, self._payload = payload_bytes(b""), None

    def localize(self, value: Any) -> Any:
        """What came from another rank, on the device of this payload."""
        if self.kind == "tensor" and isinstance(value, Tensor) and value.device != self._payload.device:
            return value.to(self._payload.device)
        return value

    def copy(self) -> Any:
        """The same payload with memory of its own: what its sender gets of itself."""
        return self._payload.detach().clone() if self.kind == "tensor" else self.memory.tobytes()


class DataMovement(Operation):
    """Base: payloads of the caller's, and memory for those of others. Both are let go of at the end: one that has
    failed may have half of what it wanted, and its handle may live on."""

    _own: Sequence[OutgoingPayload] = ()

    def __init__(
        self, signature: str, rank: int, world: int, max_bytes: int = 0, *, peers: Sequence[int] | None = None
    ) -> None:
        """``max_bytes``: of one payload of another rank."""
        super().__init__(signature, rank, world, peers=peers)
        self._max_bytes = max_bytes
        self._arrivals: dict[int, NewPayload] = {}  # by sender

    def expect_payload(self, sender: int) -> None:
        """Wait for a payload of whatever kind and size."""
        self._arrivals[sender] = NewPayload(self._max_bytes)
        self.expect(sender, 0, self._arrivals[sender])

    def release(self) -> None:
        for payload in self._own:
            payload.release()
        self._arrivals.clear()


class AllGather(DataMovement):
    """Everybody gets everybody's payload, in rank order."""

    def __init__(self, payload: Any, rank: int, world: int, max_bytes: int) -> None:
        self._outgoing = OutgoingPayload(payload)
        self._own = [self._outgoing]
        super().__init__(f"all_gather {self._outgoing.kind}", rank, world, max_bytes)

    def set_up(self) -> None:
        for other in self.others:
            self.expect_payload(other)
        if self.world > 1:
            self.send(None, 0, self._outgoing.memory, meta=self._outgoing.meta)

    def result(self) -> list[Any]:
        own = self._outgoing
        return [
            own.copy() if rank == self.rank else own.localize(self._arrivals[rank].value) for rank in range(self.world)
        ]


class Barrier(Operation):
    """Everybody knows that everybody is here. The value: the ranks that were seen."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__("barrier", rank, world)

    def set_up(self) -> None:
        for other in self.others:
            self.expect(other, 0, Signal())
        if self.world > 1:
            self.send(None, 0, payload_bytes(b""))

    def result(self) -> tuple[int, ...]:
        return tuple(range(self.world))


class Broadcast(Operation):
    """One payload for all. A tensor goes into the memory of the receivers' tensor; bytes are new."""

    def __init__(self, payload: Any, root: int, rank: int, world: int, max_bytes: int) -> None:
        self._root = root
        self._payload = payload
        self._max_bytes = max_bytes
        self._new: NewPayload | None = None
        self._target: Tensor | None = None
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

    def set_up(self) -> None:
        if self.rank == self._root:
            if self.world > 1:
                self.await_acks(self.others)
                self.send(None, 0, OutgoingPayload(self._payload).memory)
        elif isinstance(self._payload, Tensor):
            tensor = self._payload.detach()
            self._target = tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)
            self.expect(self._root, 0, IntoMemory(as_bytes(self._target)))
        else:
            self._new = NewPayload(self._max_bytes)
            self.expect(self._root, 0, self._new)

    def stream_done(self, sender: int, part: int) -> None:
        if part == 0:
            self.acknowledge(self._root)

    def release(self) -> None:
        self._payload = self._target = self._new = None

    def result(self) -> Any:
        if not isinstance(self._payload, Tensor):
            return self._new.value if self._new is not None else payload_bytes(self._payload).tobytes()
        if self._target is not None and not is_plain(self._payload):
            self._payload.detach().copy_(self._target)
        return self._payload


class Gather(DataMovement):
    """One rank gets everybody's payload, in rank order; the others get None."""

    def __init__(self, payload: Any, root: int, rank: int, world: int, max_bytes: int) -> None:
        self._outgoing = OutgoingPayload(payload)
        self._own = [self._outgoing]
        super().__init__(f"gather {root} {self._outgoing.kind}", rank, world, max_bytes)
        self._root = root

    def set_up(self) -> None:
        if self.rank != self._root:
            self.await_acks([self._root])
            self.send(self._root, 0, self._outgoing.memory, meta=self._outgoing.meta)
            return
        for other in self.others:
            self.expect_payload(other)

    def stream_done(self, sender: int, part: int) -> None:
        if part == 0:
            self.acknowledge(sender)

    def result(self) -> list[Any] | None:
        if self.rank != self._root:
            return None
        own = self._outgoing
        return [
            own.copy() if rank == self.rank else own.localize(self._arrivals[rank].value) for rank in range(self.world)
        ]


class Scatter(DataMovement):
    """One rank gives each rank its own payload."""

    def __init__(self, payloads: Sequence[Any] | None, root: int, rank: int, world: int, max_bytes: int) -> None:
        if (payloads is not None) != (rank == root):
            raise ValueError(f"scatter: rank {root} is the root and gives the payloads, all others give None")
        if payloads is not None and len(payloads) != world:
            raise ValueError(f"scatter: expected {world} payloads, one for each rank, got {len(payloads)}")
        self._outgoing = None if payloads is None else same_kind([OutgoingPayload(payload) for payload in payloads])
        self._own = self._outgoing or ()
        super().__init__(f"scatter {root}", rank, world, max_bytes)
        self._root = root

    def set_up(self) -> None:
        if self._outgoing is None:
            self.expect_payload(self._root)
            return
        self.await_acks(self.others)
        for other in self.others:
            self.send(other, 0, self._outgoing[other].memory, meta=self._outgoing[other].meta)

    def stream_done(self, sender: int, part: int) -> None:
        if part == 0:
            self.acknowledge(sender)

    def result(self) -> Any:
        return self._arrivals[self._root].value if self._outgoing is None else self._outgoing[self.rank].copy()


class AllToAll(DataMovement):
    """Everybody gives each rank its own payload. The value: what came, by sender."""

    def __init__(self, payloads: Sequence[Any], rank: int, world: int, max_bytes: int) -> None:
        if len(payloads) != world:
            raise ValueError(f"all_to_all: expected {world} payloads, one for each rank, got {len(payloads)}")
        self._own = self._outgoing = same_kind([OutgoingPayload(payload) for payload in payloads])
        super().__init__(f"all_to_all {self._outgoing[0].kind}", rank, world, max_bytes)

    def set_up(self) -> None:
        for other in self.others:
            self.expect_payload(other)
        for other in self.others:
            self.send(other, 0, self._outgoing[other].memory, meta=self._outgoing[other].meta)

    def result(self) -> list[Any]:
        return [
            self._outgoing[rank].copy() if rank == self.rank else self._outgoing[0].localize(self._arrivals[rank].value)
            for rank in range(self.world)
        ]


class Send(DataMovement):
    """A payload for one rank."""

    def __init__(self, payload: Any, to: int, rank: int, world: int) -> None:
        self._outgoing = OutgoingPayload(payload)
        self._own = [self._outgoing]
        super().__init__(f"send {rank} {to}", rank, world, peers=[to])
        self._to = to

    def set_up(self) -> None:
        self.await_acks([self._to])
        self.send(self._to, 0, self._outgoing.memory, meta=self._outgoing.meta)


class Receive(DataMovement):
    """A payload of one rank, whether tensor or bytes: that its sender decides."""

    def __init__(self, source: int, rank: int, world: int, max_bytes: int) -> None:
        super().__init__(f"send {source} {rank}", rank, world, max_bytes, peers=[source])
        self._source = source

    def set_up(self) -> None:
        self.expect_payload(self._source)

    def stream_done(self, sender: int, part: int) -> None:
        self.acknowledge(sender)

    def result(self) -> Any:
        return self._arrivals[self._source].value


def same_kind(payloads: list[OutgoingPayload]) -> list[OutgoingPayload]:
    """The payloads. Raises ValueError: tensors and bytes are mixed."""
    if len({payload.kind for payload in payloads}) > 1:
        raise ValueError("payloads must be all tensors or all bytes, not mixed")
    return payloads


__all__ = ["AllGather", "AllToAll", "Barrier", "Broadcast", "Gather", "Receive", "Scatter", "Send"]
