"""Collectives of plain Python objects, as msgpack: numbers, text, bytes, lists, maps, None. Never pickle.

What comes in is read with limits, and tuples arrive as lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from gradbus.runtime.collectives.data_movement import (
    AllGatherOperation,
    BroadcastOperation,
    Gather,
    Receive,
    Scatter,
    Send,
)
from gradbus.runtime.collectives.handle import CollectiveHandle, TimedOut, collective_timeout
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire import bounded_msgpack

MAX_OBJECT_BYTES = 4 << 20
MAX_OBJECT_MEMORY = 64 * MAX_OBJECT_BYTES  # that an object of so many bytes may take: small maps and texts take most
_LIMITS = bounded_msgpack.Limits(
    MAX_OBJECT_BYTES, text_bytes=MAX_OBJECT_BYTES, binary_bytes=MAX_OBJECT_BYTES, items=MAX_OBJECT_BYTES,
    fields=MAX_OBJECT_BYTES, containers=1 << 18, any_keys=True,
)  # fmt: skip


def pack(value: Any) -> bytes:
    """Bytes of an object. Raises ValueError: it holds something that has no place in msgpack, or is too large."""
    try:
        packed: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"an object is made of numbers, text, bytes, lists, maps, None and bool; this one cannot be sent: {error}"
        ) from None
    if len(packed) > MAX_OBJECT_BYTES:
        raise ValueError(f"an object of {len(packed)} bytes, at most {MAX_OBJECT_BYTES}; send a tensor or bytes")
    if len(packed) > _LIMITS.containers:  # only then can it have more lists and maps: each takes a byte
        try:
            bounded_msgpack.unpack(packed, _LIMITS)
        except bounded_msgpack.PackingError as error:
            raise ValueError(f"nobody would take this object: {error}; send it in parts, or as a tensor") from None
    return packed


def unpack(data: bytes) -> Any:
    """The object. Raises CollectiveError: the bytes are none within the limits."""
    if not isinstance(data, bytes):
        raise CollectiveError("a tensor came where an object was expected")
    try:
        return bounded_msgpack.unpack(data, _LIMITS)
    except bounded_msgpack.PackingError as error:
        raise CollectiveError(f"what came is no object in msgpack within the limits: {error}") from None


def unpack_all(values: Sequence[bytes] | None) -> list[Any] | None:
    """The objects, or None where there are none."""
    return None if values is None else [unpack(value) for value in values]


class ObjectCollectives:
    """The object variants of a group's collectives."""

    rank: int
    world: int

    def _start(
        self, operation: Operation, name: str, round_id: int, timeout_s: float | None,
        timed_out: TimedOut = collective_timeout,
    ) -> CollectiveHandle[Any]:  # fmt: skip
        raise NotImplementedError

    def _check_rank(self, what: str, rank: int) -> None:
        raise NotImplementedError

    def _check_other(self, what: str, rank: int) -> None:
        raise NotImplementedError

    def _start_objects(
        self, operation: Operation, convert: Callable[[Any], Any], name: str, round_id: int, timeout_s: float | None
    ) -> CollectiveHandle[Any]:
        operation.convert = convert
        return self._start(operation, name, round_id, timeout_s)

    def all_gather_object(
        self, name: str, value: Any, *, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[list[Any]]:
        """Everybody's object, in rank order. Raises ValueError: it cannot be sent."""
        operation = AllGatherOperation(pack(value), self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start_objects(operation, unpack_all, name, round_id, timeout_s)

    def broadcast_object(
        self, name: str, value: Any = None, *, root: int = 0, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[Any]:
        """The root's object; what the others give is not looked at. Raises ValueError: it cannot be sent."""
        self._check_rank("root", root)
        payload = pack(value) if self.rank == root else None
        operation = BroadcastOperation(payload, root, self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start_objects(operation, unpack, name, round_id, timeout_s)

    def gather_object(
        self, name: str, value: Any, *, root: int = 0, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[list[Any] | None]:
        """Everybody's object at the root, in rank order; None elsewhere. Raises ValueError: it cannot be sent."""
        self._check_rank("root", root)
        operation = Gather(pack(value), root, self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start_objects(operation, unpack_all, name, round_id, timeout_s)

    def scatter_object(
        self, name: str, values: Sequence[Any] | None = None, *, root: int = 0, round_id: int = 0,
        timeout_s: float | None = None,
    ) -> CollectiveHandle[Any]:  # fmt: skip
        """The own one of the root's objects. Raises ValueError: one cannot be sent, or they are not one for each."""
        self._check_rank("root", root)
        payloads = None if values is None else [pack(value) for value in values]
        operation = Scatter(payloads, root, self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start_objects(operation, unpack, name, round_id, timeout_s)

    def send_object(
        self, name: str, value: Any, *, to: int, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[None]:
        """An object for one rank. Raises ValueError: it cannot be sent."""
        self._check_other("to", to)
        return self._start(Send(pack(value), to, self.rank, self.world), name, round_id, timeout_s)

    def recv_object(
        self, name: str, *, source: int, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[Any]:
        """An object of one rank."""
        self._check_other("source", source)
        operation = Receive(source, self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start_objects(operation, unpack, name, round_id, timeout_s)
