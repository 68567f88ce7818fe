"""What lies in the memory of another process, which this one has started."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r\S+ \S+ \S+ \S+ *(.*)")
_STEP_BYTES = 1 << 22
_NOT_MEMORY = ("[vvar", "[vsyscall]")


def found_in_memory(pid: int, needles: Sequence[bytes]) -> list[int]:
    """Return how often each of these byte strings occurs in what the process can read of its own memory.

    The process may run on meanwhile. What is overwritten or given back by then is not found.
    """
    counts = [0] * len(needles)
    overlap = max(map(len, needles)) - 1
    for piece, new in _pieces(pid, overlap):
        for index, needle in enumerate(needles):
            start = piece.find(needle)
            while start >= 0:
                counts[index] += start + len(needle) > new  # else it was counted in the piece before
                start = piece.find(needle, start + 1)
    return counts


def _pieces(pid: int, overlap: int) -> Iterator[tuple[bytes, int]]:
    """Yield all memory in pieces, each with the end of the piece before in front, and how long that is."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found = _MAPPING.match(line)
            if found is None or found[3].startswith(_NOT_MEMORY):
                continue
            at, end, before = int(found[1], 16), int(found[2], 16), b""
            while at < end:
                try:
                    memory.seek(at)
                    piece = memory.read(min(_STEP_BYTES, end - at))
                except (OSError, ValueError, OverflowError):  # given back meanwhile, or of a device
                    break
                if not piece:
                    break
                yield before + piece, len(before)
                before, at = piece[-overlap:] if overlap else b"", at + len(piece)
