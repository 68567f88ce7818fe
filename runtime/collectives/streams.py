"""One payload on its way in from one rank, frame by frame, in any order and however often each comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from gradbus.runtime.collectives.tensors import Bytes, as_bytes, empty_like_described
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire.frames import CHUNK_BYTES, Frame, chunk_count


class Stream:
    """Takes each frame once. What becomes of its bytes is up to the subclass."""

    def __init__(self, total_bytes: int | None = None) -> None:
        """``total_bytes``: of the payload, where it is known beforehand."""
        self._total_bytes = total_bytes
        self._have: bytearray | None = None
        self._left = 1

    @property
    def complete(self) -> bool:
        return self._left == 0

    def feed(self, frame: Frame, meta: str) -> bool:
        """Take a frame. False: it was here already.

        Complete means that every byte is here. That holds because each chunk is taken once, and only if it has exactly
        the bytes that chunk has: the frame alone does not tell, as the first chunk of a payload says itself how long
        chunks are.

        Raises:
            CollectiveError: it contradicts what is known of the payload, or is not a whole chunk.
        """
        if frame.offset != frame.seq * CHUNK_BYTES or frame.seq_cnt != chunk_count(
            frame.total_bytes, chunk_bytes=CHUNK_BYTES
        ):
            raise CollectiveError(f"sent chunks of {frame.chunk_bytes} bytes where {CHUNK_BYTES} were expected")
        whole = min(CHUNK_BYTES, frame.total_bytes - frame.offset)
        if len(frame.data) != whole:
            raise CollectiveError(
                f"sent {len(frame.data)} bytes as chunk {frame.seq} of {frame.seq_cnt} of a payload of "
                f"{frame.total_bytes} where {whole} were expected"
            )
        if self._have is None:
            if self._total_bytes is not None and frame.total_bytes != self._total_bytes:
                raise CollectiveError(f"sent {frame.total_bytes} bytes where {self._total_bytes} were expected")
            self.begin(frame.total_bytes, meta)
            self._total_bytes = frame.total_bytes
            self._have = bytearray(frame.seq_cnt)
            self._left = frame.seq_cnt
        if len(self._have) != frame.seq_cnt or frame.total_bytes != self._total_bytes:
            raise CollectiveError(
                f"sent frames of two payloads of {self._total_bytes} and {frame.total_bytes} bytes under one name"
            )
        if self._have[frame.seq]:
            return False
        self._have[frame.seq] = 1
        self._left -= 1
        self.chunk(frame.seq, frame.offset, np.frombuffer(frame.data, np.uint8) if len(frame.data) else _NOTHING)
        return True

    def has(self, first: int, count: int) -> bool:
        """Whether ``count`` chunks from number ``first`` on are here, as far as there are so many."""
        return self._have is not None and all(self._have[first : first + count])

    def begin(self, total_bytes: int, meta: str) -> None:
        """The first frame has come. Raises CollectiveError: this payload cannot be taken."""

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        """A new chunk; ``data`` lies in memory of DDS for as long as somebody holds it."""


_NOTHING = np.empty(0, np.uint8)


class IntoMemory(Stream):
    """Into memory that is there."""

    def __init__(self, memory: Bytes, arrived: Callable[[int], None] | None = None) -> None:
        """``arrived``: called with the number of each chunk that is in its place."""
        super().__init__(len(memory))
        self._memory = memory
        self._arrived = arrived

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        self._memory[offset : offset + len(data)] = data
        if self._arrived is not None:
            self._arrived(seq)


class NewPayload(Stream):
    """Bytes or a tensor: the sender decides which, and how large. ``value`` is what came, when it is complete."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._memory: Bytes = _NOTHING
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
            # One copy more: payloads are plain bytes, whatever their size. Who moves much sends tensors.
            self._bytes, self._memory = self._memory.tobytes(), _NOTHING


class Signal(Stream):
    """Nothing but that it came."""

    def __init__(self) -> None:
        super().__init__(0)


class ChunkwiseReduction:
    """Adds up a region that several ranks contribute to, chunk by chunk, each as soon as all contributions are there.

    A chunk waits for its last contribution in the memory of DDS, where it lies anyway. To add up earlier would gain
    nothing: in rank order everything waits for the lowest rank that is late.
    """

    def __init__(
        self, sources: int, region_bytes: int, reduce: Callable[[list[Bytes], slice], None],
        done: Callable[[int], None],
    ) -> None:  # fmt: skip
        """
        Args:
            sources: number of contributions to each chunk.
            reduce: called with the contributions, in order, and the place in the region.
            done: called with the number of each chunk when it is reduced.
        """
        self.chunks = -(-region_bytes // CHUNK_BYTES)
        self.left = self.chunks
        self._region_bytes = region_bytes
        self._parts: list[list[Bytes | None]] = [[None] * sources for _ in range(self.chunks)]
        self._awaited = [sources] * self.chunks
        self._reduce = reduce
        self._done = done

    def offer(self, source: int, seq: int, data: Bytes) -> None:
        """A contribution. ``source``: its place in the order."""
        self._parts[seq][source] = data
        self.one_less(seq)

    def hold(self, seq: int) -> None:
        """Let a chunk wait for one thing more: a call of :meth:`one_less`."""
        self._awaited[seq] += 1

    def one_less(self, seq: int) -> None:
        """One thing that the chunk waits for has come."""
        self._awaited[seq] -= 1
        if self._awaited[seq]:
            return
        operands = [part for part in self._parts[seq] if part is not None]
        self._parts[seq] = []
        start = seq * CHUNK_BYTES
        self._reduce(operands, slice(start, min(start + CHUNK_BYTES, self._region_bytes)))
        self.left -= 1
        self._done(seq)


class Contribution(Stream):
    """What one rank contributes to a reduction."""

    def __init__(self, reduction: ChunkwiseReduction, source: int, region_bytes: int) -> None:
        super().__init__(region_bytes)
        self._reduction = reduction
        self._source = source

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        self._reduction.offer(self._source, seq, data)
