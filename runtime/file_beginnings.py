"""Files whose size and kind are not trusted: read up to a limit, and looked at while they are open."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_beginning(path: Path, limit_bytes: int, *, folder: int | None = None) -> tuple[os.stat_result, bytes]:
    """Return the status of a file and its first bytes, none unless it is a regular file. Never blocks on a pipe.

    Args:
        folder: descriptor of the folder that the path is relative to; the file must then be no link.

    Raises:
        OSError: it cannot be opened or read.
    """
    links = 0 if folder is None else os.O_NOFOLLOW
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links, dir_fd=folder)
    try:
        mode = os.fstat(handle)
        if not stat.S_ISREG(mode.st_mode):
            return mode, b""
        with open(handle, "rb", closefd=False) as file:
            return mode, file.read(limit_bytes)
    finally:
        os.close(handle)
