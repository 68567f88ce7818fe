"""Folders for what a run leaves: its owner's alone. Models, updates and histories tell of the data they come from."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gradbus.runtime.foreign_files import check_no_link
from gradbus.runtime.logs import get_logger

MODE = 0o700
_OTHERS = 0o077
_LOCK = ".in-use"  # in a scratch folder: locked for as long as the process that has made it lives

log = get_logger("files")


def make_private(folder: Path, *, tell: bool = False, inside: Path | None = None) -> None:
    """Make a folder, and those above it, if need be. All that are made are this user's alone.

    One that is there already stays as it is: whoever made it may want others to read it.

    Args:
        tell: the log says so if others can read it.
        inside: the folder that the user has named, which may be a link. Below it names are of our choosing, and a link
            there leads to where the user has not asked to write.

    Raises:
        FileRefused: a link lies between ``inside`` and the folder, or is in its place. OSError: it cannot be made.
    """
    if inside is not None:
        make_private(inside)
        for part in folder.relative_to(inside).parts:
            inside /= part
            check_no_link(inside)
            make_private(inside)
        return
    try:
        folder.mkdir(mode=MODE)
    except FileNotFoundError:  # there is none above it: those get the same mode, as mkdir(parents=True) has no mode
        if folder.parent == folder:
            raise
        make_private(folder.parent)
        folder.mkdir(mode=MODE, exist_ok=True)  # also fails where a file system makes no folders, such as /proc
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


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder for temporary files, which goes with the block. What processes that were killed have left under the
    same prefix goes first: the kernel has released the locks that they held.

    Raises:
        OSError: it cannot be made.
    """
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{prefix}*"):
        _remove_unused(left)
    # Under another name until it is locked, or another process that starts now could take it for one that is left.
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = made.rename(made.with_name(made.name.removeprefix(".")))
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def _remove_unused(folder: Path) -> None:
    """Remove a scratch folder of this user's that no process holds. Whatever else has such a name stays."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # it is in use
    else:
        log.info("temporary folder removed", folder=str(folder), reason="the process that has made it was killed")
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
