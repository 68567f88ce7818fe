"""Open files that others may have made: the one way to read from a run directory.

People send run directories to each other, so nothing that lies in one is trusted to be what its name says. A pipe makes
its reader wait for ever, a device may do something when it is opened, a sparse file of 40 GB fits on any disk, and a
link leads to whatever the reader may read. Three rules hold for every file that is opened here:

1. It is a regular file. It is looked at before it is opened, and again once it is open.
2. It lies inside: each folder between the run directory and the file is opened by itself, and none of them, nor the
   file, is a link. Only the run directory, which the user has named, may be one. A link that stays inside is refused,
   too: gradbus makes none, it can be changed between a check and its use, and "no links" is a rule that the kernel
   keeps (``O_NOFOLLOW``) and that a user can remember.
3. It is bounded: a larger file is refused by its size, before a byte of it is read; of lines there is a limit for each
   and for all together, and reading ends at the first hole of a sparse file, as programs that append leave none.

Hard links cannot be told from files and are read. A file system whose server does not answer is not handled here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from io import BufferedReader, FileIO
from pathlib import Path, PurePath
from typing import BinaryIO

MAX_LINE_BYTES = 16 << 20  # a round with ten thousand clients has some 3 MB
MAX_LINES_BYTES = 4 << 30  # of one file of lines
MAX_LINES = 4_000_000  # the same
MAX_EMPTY_LINES = 1000  # the same: each takes a byte, and some time
MAX_ENTRIES = 100_000  # of a folder, that are looked at
_SHOWN_CHARS = 40  # of a line that is too long
_BUFFER_BYTES = 1 << 16
_STEP_BYTES = 1 << 20
_PASS = getattr(os, "O_PATH", os.O_RDONLY)  # opens a folder to go through it, which needs no right to list it
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_ZEROS = re.compile(rb"[^\0]+")
_MAY_BE_SPARSE_BYTES = 64 << 20
_KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


class FileRefused(OSError):
    """A file is not opened, or not read to its end, because of what it is. ``strerror`` is a clause: what is wrong."""

    def __init__(self, path: PurePath, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_inside(folder: Path, name: str | PurePath, *, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file below a folder for reading, in binary; the caller closes it.

    Args:
        folder: as the user has named it; it may be a link.
        name: relative to the folder, as ``history/controller.jsonl``.
        max_bytes: a larger file is refused.

    Raises:
        FileRefused: it is not a regular file, it is larger, or a part of the name is a link.
        OSError: it is not there, or may not be read.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise FileRefused(path, "is no name inside of the directory")
    with _named(folder / path), _opened_folder(folder, path.parent) as parent:
        _check_kind(os.stat(path.name, dir_fd=parent, follow_symlinks=False), folder / path)
        descriptor = os.open(path.name, _FILE, dir_fd=parent)
    return _checked(descriptor, folder / path, max_bytes)


def open_to_append(path: Path, permissions: int = 0o666) -> int:
    """Open a file for appending, and for reading, or make it; the caller closes the descriptor. It must be no link.

    Raises:
        FileRefused: it is there, and not a regular file. OSError: it cannot be written.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_kind(path.lstat(), path)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _FILE, permissions)
    try:
        _check_kind(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_no_link(folder: Path) -> None:
    """Raise FileRefused if there is a link in the place of a folder that is to be written to; nothing there is fine."""
    if folder.is_symlink():
        raise FileRefused(folder, _why(stat.S_IFLNK, "a folder"))


def clear_way(path: Path) -> None:
    """Remove what has the name of a temporary file that is to be written: a link would lead the writer elsewhere, and a
    pipe hold it up.

    Raises:
        FileRefused: it is a folder. OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            raise FileRefused(path, f"{path.name}, the name of its temporary file, is that of a folder: move it away")
        path.unlink()


def check_replaceable(path: Path) -> None:
    """Check that a file may take the place of what has a name that the user has given. What a link leads to counts:
    ``/dev/stdout`` is one. Raises FileRefused: it is a device, a pipe, a socket or a folder."""
    try:
        status = path.stat()
    except OSError:  # there is nothing, or a link that leads to nothing: the link is replaced
        return
    _check_kind(status, path)
    if os.path.dirname(os.path.abspath(path)) == "/dev":  # stdout of a command whose output goes to a file
        raise FileRefused(path, "is a device, expected a regular file")


def open_named(path: Path, *, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file that the user has named, which may be a link; the caller closes it. Raises as
    :func:`open_inside`."""
    _check_kind(path.stat(), path)
    return _checked(os.open(path, _FILE & ~os.O_NOFOLLOW), path, max_bytes)


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


def text_inside(folder: Path, name: str | PurePath, max_bytes: int) -> str:
    """Return the UTF-8 text of a file. Raises as :func:`open_inside`, and ValueError: it is not UTF-8."""
    data = bytearray()
    with open_inside(folder, name, max_bytes=max_bytes) as file:
        while some := file.read(_STEP_BYTES):
            data += some
            if len(data) > max_bytes:  # it has grown meanwhile
                raise _too_large(folder / name, len(data), max_bytes)
    return data.decode("utf-8")


def lines_inside(
    folder: Path,
    name: str | PurePath,
    note: Callable[[str], object] = lambda sentence: None,
    *,
    max_bytes: int = MAX_LINES_BYTES,
    max_lines: int = MAX_LINES,
) -> Iterator[str]:
    """Yield the lines of a text file with their ends. Of a line that is longer than any of our own the beginning comes,
    marked as cut, so that it is no JSON.

    Args:
        note: takes a sentence on what is left out.
        max_bytes, max_lines: at most so many bytes and lines are read.

    Raises:
        OSError: as :func:`open_inside`, when the first line is asked for.
    """
    with open_inside(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        end = min(size, _first_hole(file, size), max_bytes)
        number = empty = 0
        while (left := end - file.tell()) > 0 and (line := file.readline(min(MAX_LINE_BYTES, left))):
            number, empty = number + 1, empty + line.isspace()
            if number > max_lines or empty > MAX_EMPTY_LINES:
                many = f"{MAX_EMPTY_LINES:,} empty" if number <= max_lines else f"{max_lines:,}"
                note(f"{name} has more than {many} lines: nothing behind is shown.")
                return
            if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
                yield line.decode("utf-8", errors="replace")
                continue
            beginning = line[:_SHOWN_CHARS].decode("utf-8", errors="replace")
            note(f"{name}, line {number} has more than {MAX_LINE_BYTES >> 20} MiB.")
            while line and not line.endswith(b"\n") and (left := end - file.tell()) > 0:
                line = file.readline(min(MAX_LINE_BYTES, left))
            yield f"{beginning}…\n"
        if end < size:
            what = f"{size:,} bytes, of which {end:,} are read" if end == max_bytes else f"a hole from byte {end:,} on"
            note(f"{name} has {what}: nothing behind is shown.")


def own_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that processes of this run have written, each with its place: all of them.

    A machine that loses its power may leave zeros, or a hole, and the next start appends behind: what a writer is going
    to write again must not end there. So there is no limit on lines, and a run of zeros ends a line.
    """
    while line := file.readline(MAX_LINE_BYTES):
        start, found = file.tell() - len(line), False
        for piece in _NO_ZEROS.finditer(line):
            found = True
            if piece.start() and piece.end() == len(line) and not line.endswith(b"\n"):
                file.seek(start + piece.start())  # its end is not in what was read
                break
            yield start + piece.start(), piece[0]
        if not found:
            _skip_hole(file)


def names_inside(folder: Path, pattern: str, *, below: str | PurePath = "", most: int | None = None) -> list[str]:
    """Return the names in a folder that fit a pattern such as ``profile-rank-*.jsonl``, sorted.

    Args:
        below: which folder inside of ``folder``; by default that itself.
        most: entries that the folder may have; by default :data:`MAX_ENTRIES`.

    Raises:
        FileRefused: it has more entries, or a part of ``below`` is a link.
        OSError: it is not there, or may not be listed.
    """
    found, limit = [], MAX_ENTRIES if most is None else most
    with (
        _named(folder / below),
        _opened_folder(folder, PurePath(below), to_list=True) as descriptor,
        os.scandir(descriptor) as entries,
    ):
        for number, entry in enumerate(entries):
            if number == limit:
                raise FileRefused(folder / below, f"has more than {limit:,} entries, which no run makes")
            if fnmatchcase(entry.name, pattern):
                found.append(entry.name)
    return sorted(found)


def is_there(folder: Path, name: str | PurePath) -> bool:
    """Return whether there is anything of this name, also what would be refused: opening it says why."""
    return os.path.lexists(folder / name)


def check_not_sparse(file: BufferedReader, path: PurePath) -> None:
    """Raise FileRefused if nearly all of a large file is holes: it was made to look large, and reading it takes long.

    Files of weights may have some holes, where a backup has turned zeros into them.
    """
    status = os.fstat(file.fileno())
    if status.st_size > _MAY_BE_SPARSE_BYTES and status.st_blocks * 512 < status.st_size // 8:
        raise FileRefused(
            path, f"is sparse: it claims {status.st_size:,} bytes, and has {status.st_blocks * 512:,} on the disk"
        )


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have an error of the system name the whole path, where it was called with a part of it."""
    try:
        yield
    except FileRefused:
        raise
    except OSError as error:
        error.filename = str(path)
        raise


@contextlib.contextmanager
def _opened_folder(folder: Path, below: PurePath, *, to_list: bool = False) -> Iterator[int]:
    """A descriptor of a folder below another one, which is reached without following a link."""
    last = os.O_RDONLY if to_list else _PASS
    descriptor = os.open(folder, _FOLDER | (_PASS if below.parts else last))
    try:
        where = folder
        for index, part in enumerate(below.parts):
            where /= part
            how = _PASS if index < len(below.parts) - 1 else last
            try:
                inner = os.open(part, how | _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    mode = os.stat(part, dir_fd=descriptor, follow_symlinks=False).st_mode
                    raise FileRefused(where, _why(mode, "a folder")) from None
                raise
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _check_kind(status: os.stat_result, path: PurePath) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileRefused(path, _why(status.st_mode, "a regular file"))


def _why(mode: int, expected: str) -> str:
    kind = _KINDS.get(stat.S_IFMT(mode), "a file")
    if stat.S_ISLNK(mode):
        return f"is a link, and links in a run directory are not followed: put {expected} there in place of it"
    return f"is {kind}, expected {expected}"


def _checked(descriptor: int, path: PurePath, max_bytes: int | None) -> BufferedReader:
    """The open file, if it is what it must be. It may have become another one since it was looked at."""
    try:
        status = os.fstat(descriptor)
        _check_kind(status, path)
        if max_bytes is not None and status.st_size > max_bytes:
            raise _too_large(path, status.st_size, max_bytes)
        return BufferedReader(FileIO(descriptor), _BUFFER_BYTES)
    except BaseException:
        os.close(descriptor)
        raise


def _too_large(path: PurePath, num_bytes: int, max_bytes: int) -> FileRefused:
    return FileRefused(path, f"has {num_bytes:,} bytes, at most {max_bytes:,} are read: no run leaves so many there")


def _skip_hole(file: BinaryIO) -> None:
    """Go on with the next data, if a file is in a hole and its file system tells."""
    with contextlib.suppress(AttributeError, OSError):  # there is none behind: reading zeros ends, too
        place, reading_at = file.tell(), os.lseek(file.fileno(), 0, os.SEEK_CUR)
        try:
            data = os.lseek(file.fileno(), place, os.SEEK_DATA)
        except OSError as error:
            data = os.fstat(file.fileno()).st_size if error.errno == errno.ENXIO else place
        os.lseek(file.fileno(), reading_at, os.SEEK_SET)  # as its buffer knows it
        file.seek(data)


def _first_hole(file: BufferedReader, size: int) -> int:
    """Where a file has its first hole; its size, if it has none or its file system does not tell."""
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE) if size else 0
    except (AttributeError, OSError):
        return size
    finally:
        file.seek(0)
