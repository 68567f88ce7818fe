"""Folders for what a run leaves: its owner's alone. Models, updates and histories tell of the data they come from."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradbus.runtime.logs import get_logger

MODE = 0o700
_OTHERS = 0o077

log = get_logger("files")


def make_private(folder: Path, *, tell: bool = False) -> None:
    """Make a folder if need be, which is then this user's alone, and those above it as the system makes them.

    One that is there already stays as it is: whoever made it may want others to read it. ``tell``: the log says so if
    they can.

    Raises:
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(mode=MODE, parents=True)  # the mode of the last one; those above follow the umask
    except FileExistsError:
        if not folder.is_dir():
            raise
        mode = stat.S_IMODE(folder.stat().st_mode)
        if tell and mode & _OTHERS:
            log.info("folder is open to other users", folder=str(folder), mode=f"{mode:04o}", do=f"chmod 700 {folder}")


def keep_private(folder: Path) -> None:
    """Make a folder private that is there already and whose name is of our choosing, such as ``state`` in the directory
    of a run; where it is not, or belongs to somebody else, nothing happens."""
    try:
        status = folder.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & _OTHERS:
            folder.chmod(MODE)
    except OSError:
        pass  # what cannot be used says so where it is used
