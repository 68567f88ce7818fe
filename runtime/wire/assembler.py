"""Puts frames together again. Bytes in, a verdict out: no I/O, no clock, no tasks.

Who owns the assembler says which transfers it wants (:meth:`Assembler.expect`); frames of any other are refused before
a byte is allocated. So its memory is what its owner has granted, whatever comes in from the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gradbus.runtime.errors import FrameError
from gradbus.runtime.wire.frames import Frame, FrameKey


class Verdict(Enum):
    """Holds what became of a frame."""

    STORED = "stored"
    REPEATED = "repeated"
    COMPLETE = "complete"


@dataclass(slots=True)
class _Transfer:
    """One payload on its way in."""

    max_bytes: int
    buffer: np.ndarray | None = None  # uint8, shape (total_bytes,); made at the first frame
    have: np.ndarray | None = None  # bool, shape (seq_cnt,)
    left: int = 0
    chunk_bytes: int = 0
    flags: int = 0

    @property
    def complete(self) -> bool:
        return self.have is not None and self.left == 0


class Assembler:
    """Collects the frames of expected transfers, in any order and however often each comes; the first copy wins."""

    def __init__(self) -> None:
        self._transfers: dict[FrameKey, _Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def __contains__(self, key: FrameKey) -> bool:
        return key in self._transfers

    def expect(self, key: FrameKey, *, max_bytes: int) -> None:
        """Accept frames of this transfer, of a payload of at most ``max_bytes``."""
        self._transfers.setdefault(key, _Transfer(max_bytes))

    def forget(self, key: FrameKey) -> None:
        """Drop a transfer and its memory; its later frames are refused."""
        self._transfers.pop(key, None)

    def feed(self, frame: Frame) -> Verdict:
        """Take one checked frame.

        Raises:
            FrameError: ``unexpected`` (nobody waits for it), ``oversized`` (more than was granted), ``mismatch`` (it
                contradicts earlier frames of the same transfer). The transfer itself is left as it was.
        """
        transfer = self._transfers.get(frame.key)
        if transfer is None:
            raise FrameError("unexpected", f"frame {frame.seq} of {frame.seq_cnt}: nobody waits for {frame.key}")
        if frame.total_bytes > transfer.max_bytes:
            raise FrameError(
                "oversized",
                f"payload of {frame.total_bytes} bytes from sender {frame.key.sender}, "
                f"at most {transfer.max_bytes} are accepted",
            )
        if transfer.buffer is None or transfer.have is None:
            transfer.buffer = np.empty(frame.total_bytes, np.uint8)
            transfer.have = np.zeros(frame.seq_cnt, np.bool_)
            transfer.left = frame.seq_cnt
            transfer.chunk_bytes = frame.chunk_bytes
            transfer.flags = frame.flags
        buffer, have = transfer.buffer, transfer.have
        # With one size of chunks the place of a frame follows from its number (``frames.parse`` has checked that), so
        # frames that are all there cover every byte exactly once.
        if (frame.total_bytes, frame.seq_cnt, frame.chunk_bytes) != (buffer.nbytes, have.size, transfer.chunk_bytes):
            raise FrameError(
                "mismatch",
                f"frame says {frame.total_bytes} bytes in {frame.seq_cnt} chunks of {frame.chunk_bytes}, "
                f"earlier ones said {buffer.nbytes} in {have.size} of {transfer.chunk_bytes}",
            )
        if have[frame.seq]:
            return Verdict.REPEATED
        buffer[frame.offset : frame.offset + len(frame.data)] = np.frombuffer(frame.data, np.uint8)
        have[frame.seq] = True
        transfer.left -= 1
        return Verdict.STORED if transfer.left else Verdict.COMPLETE

    def missing(self, key: FrameKey, limit: int = 256) -> Sequence[int] | None:
        """Numbers of the first missing frames; None if not one frame has come yet, so that their number is unknown."""
        transfer = self._transfers.get(key)
        if transfer is None or transfer.have is None:
            return None
        return [int(seq) for seq in np.flatnonzero(~transfer.have)[:limit]]

    def take(self, key: FrameKey) -> memoryview:
        """The payload of a complete transfer, which is forgotten.

        Raises:
            KeyError: it is not complete, or not known.
        """
        transfer = self._transfers.get(key)
        if transfer is None or transfer.buffer is None or not transfer.complete:
            raise KeyError(key)
        del self._transfers[key]
        return transfer.buffer.data
