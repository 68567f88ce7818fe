"""What a process has of our shared memory, as the kernel says."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

GONE_S = 5.0  # a thread that is about to end may still hold something


def mapped() -> int:
    """Segments that are mapped here: one's own, and those of others."""
    return sum("memfd:gradbus" in line for line in Path("/proc/self/maps").read_text().splitlines())


def open_files() -> int:
    """Files of segments that are open here."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            count += "memfd:gradbus" in os.readlink(f"/proc/self/fd/{name}")
    return count


def left_over(mapped_before: int = 0, open_before: int = 0) -> tuple[int, int]:
    """Segments and files beyond those, once a thread has given large ones back to the system."""
    until_s = time.monotonic() + GONE_S
    while mapped() > mapped_before or open_files() > open_before:
        if time.monotonic() > until_s:
            break
        time.sleep(0.01)
    return mapped() - mapped_before, open_files() - open_before


@contextlib.contextmanager
def nothing_more_at_the_end() -> Iterator[None]:
    """Whatever is done inside, nothing more is mapped or open afterwards, without any help of the garbage collector."""
    gc.disable()  # what others have left for it stays as it is, and counts before and after
    before = mapped(), open_files()
    try:
        yield
        until_s = time.monotonic() + GONE_S
        while mapped() > before[0] or open_files() > before[1]:
            assert time.monotonic() < until_s, (mapped(), open_files(), before)
            time.sleep(0.01)
    finally:
        gc.enable()
