"""Memory that processes of one machine share, without a name that could be left behind: segments, into which their
owner writes, and payloads, which are written once and frozen.

A segment is a memfd: an open file that lies in no file system. Others open it through ``/proc/PID/fd/N`` of its owner,
and the kernel frees it with the last process that has it, however that ends: after kill -9 nothing is left to clean up,
no tracker is needed, and ``/dev/shm`` may be as small as it likes. Only the owner writes; others map it for reading,
and cannot do otherwise: the kernel refuses them a file to write to.

Opening it needs the same user (or root) and the same PID namespace. Where that is not so, or where there is no memfd
(Linux has it), an error says why, and the data goes over DDS.

The bytes of an update or a model lie in a memfd that the kernel lets no process write to any more, its owner included.
So they need no copy and no checksum: what a reader has checked is what it uses, and a payload that can be opened is all
there, for it was frozen before it was announced. Over DDS goes only where it lies.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import errno
import functools
import mmap
import os
import re
import secrets
import socket
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradbus.runtime import fast_paths
from gradbus.runtime.errors import GradbusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm import unmapping

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Bytes = NDArray[np.uint8]  # shape (bytes,)

MAX_BYTES = 1 << 30  # of one segment
F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python has no name for it before 3.13
_NAME = "gradbus"
HAS_MEMFD = fast_paths.has_memfd()  # of this process, which does not change
_MAGIC = b"gradbus\x01"
TOKEN_BYTES = 16
_HEAD_BYTES = len(_MAGIC) + TOKEN_BYTES
SHARED_BYTES = 16 * 1024  # what is smaller travels in the frames themselves
_PAYLOAD_MAGIC = b"gradbus\x02"
_PLACE = re.compile(r"([^ ]{1,160}) (\d{1,10}) (\d{1,7}) ([0-9a-f]{32})")

log = get_logger("bus")


class SharedMemoryFault(GradbusError):
    """Shared memory cannot be used here; the text says why."""


class _Mapping:
    """Unmaps memory when the last view on it is gone. The module ``mmap`` would keep a file open for each of them."""

    __slots__ = ("_address", "_size", "_unmap")

    def __init__(self, address: int, size: int, unmap: Any) -> None:
        self._address = address
        self._size = size
        self._unmap = unmap

    def __del__(self) -> None:
        if self._size < unmapping.LARGE_BYTES:
            self._unmap(self._address, self._size)
        else:
            unmapping.unmap_later(partial(self._unmap, self._address, self._size))


@functools.cache
def _library() -> tuple[Any, Any]:
    library = ct.CDLL(None, use_errno=True)
    library.mmap.restype = ct.c_void_p
    library.mmap.argtypes = (ct.c_void_p, ct.c_size_t, ct.c_int, ct.c_int, ct.c_int, ct.c_long)
    library.munmap.restype = ct.c_int
    library.munmap.argtypes = (ct.c_void_p, ct.c_size_t)
    return library.mmap, library.munmap


def map_file(file: int, size: int, *, writable: bool, private: bool = False) -> Bytes:
    """All of an open file, for as long as the array or a view of it exists.

    Args:
        private: what is written stays in this process: its pages are copied then.

    Raises:
        OSError: it cannot be mapped.
    """
    map_, unmap = _library()
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = map_(None, size, access, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, file, 0)
    if address is None or address == ct.c_void_p(-1).value:
        number = ct.get_errno()
        raise OSError(number, os.strerror(number))
    if size >= unmapping.LARGE_BYTES:
        unmapping.start()
    mapping = _Mapping(address, size, unmap)
    array: Any = (ct.c_uint8 * size).from_address(address)
    array.mapping = mapping
    memory: Bytes = np.frombuffer(array, np.uint8)
    memory.flags.writeable = writable
    return memory


class MemoryFile:
    """A memfd of this process, which others can find for as long as it is open."""

    _file: int | None = None

    def hide(self) -> None:
        """No other process can find it any more; one that has opened it keeps it."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.hide()


class Segment(MemoryFile):
    """Memory of this process that others of this machine may read.

    Attributes:
        memory: all of it. The first bytes say what it is; :data:`FREE_FROM` is where the user's part begins.
        place: where others find it, for :func:`attach`.
    """

    def __init__(self, size: int) -> None:
        """Raises SharedMemoryFault: this system has none, or has no more."""
        if not 0 < size <= MAX_BYTES:
            raise SharedMemoryFault(f"a segment of {size} bytes, at most {MAX_BYTES}")
        self._file = make_file()
        try:
            os.ftruncate(self._file, size)
            self.memory = map_file(self._file, size, writable=True)
            _seal_for_others(self._file)  # from here on this mapping alone can write
        except OSError as error:
            self.hide()
            raise SharedMemoryFault(f"no shared memory of {size} bytes: {error}") from None
        token = secrets.token_bytes(TOKEN_BYTES)
        self.memory[:_HEAD_BYTES] = np.frombuffer(_MAGIC + token, np.uint8)
        self.place = place_of(self._file, token)


FREE_FROM = 4096


def _seal_for_others(file: int) -> None:
    """Whoever maps it may rely on its size: reading past the end of a file that was cut short ends the process. And
    no process can write that has not mapped it for that already, where the kernel can see to it (Linux from 5.1 on): a
    process of the same user could otherwise open it through ``/proc`` for writing. Raises OSError."""
    size_stays = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, size_stays | F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, size_stays)


def make_file() -> int:
    """A new memfd, empty and not sealed yet. Raises SharedMemoryFault: this system has none, or has no more."""
    if not HAS_MEMFD:
        raise SharedMemoryFault("this system has no memfd")
    try:
        return os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise SharedMemoryFault(f"no memfd: {error}") from None


def place_of(file: int, token: bytes) -> str:
    """Where others find an open file of this process that has this token in it."""
    return f"{machine()} {os.getpid()} {file} {token.hex()}"


def is_here(place: str) -> bool:
    """Whether this is the place of a segment of this machine, as far as its text says."""
    found = _PLACE.fullmatch(place)
    return found is not None and found[1] == machine()


def attach(place: str, size: int) -> Bytes:
    """Map another process's segment for reading. It stays mapped for as long as the array or a view of it exists.

    Args:
        place: :attr:`Segment.place`, as the other process says. Nothing of it is trusted: what is found there must be
            a sealed memfd of just this size with the token in it.
        size: of the segment, bytes.

    Raises:
        SharedMemoryFault: it is not on this machine, or cannot be opened from here.
    """
    with opened(place, size, seals=0) as (file, token):
        check_token(file, _MAGIC, token)
        return map_file(file, size, writable=False)


@contextlib.contextmanager
def opened(place: str, size: int, *, seals: int) -> Iterator[tuple[int, bytes]]:
    """Another process's segment as an open file, with the token that it must begin with (:func:`check_token`).

    Nothing of the place is trusted: it names any file of any process. What is found there must be a memfd of just this
    size that cannot shrink, and nothing else is even opened.

    Args:
        seals: that it must have besides.

    Raises:
        SharedMemoryFault: there is no such thing, or it cannot be opened or mapped from here.
    """
    found = _PLACE.fullmatch(place)
    if found is None or not HAS_MEMFD:
        raise SharedMemoryFault("the other process has none")
    host, process, number, token = found.groups()
    if host != machine():
        raise SharedMemoryFault("it is on another machine, or in another container")
    path = f"/proc/{process}/fd/{number}"
    unlike = f"file {number} of process {process} is not the segment that was announced"
    try:
        # First: to open a pipe or a device might do something to it, and to look at a file may take for ever where its
        # file system does not answer. Its name is the kernel's own.
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise SharedMemoryFault(unlike)
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise SharedMemoryFault(unlike)
        # It may have become another one since. Then this neither waits, nor makes a terminal that of this process.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise SharedMemoryFault(f"the memory of process {process} cannot be opened: {error.strerror}") from None
    try:
        # The seals fail for all but a memfd. With them its size stays as it is: so they come first.
        needed = seals | fcntl.F_SEAL_SHRINK
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & needed != needed or os.fstat(file).st_size != size:
            raise SharedMemoryFault(unlike)
        yield file, bytes.fromhex(token)
    except OSError as error:
        raise SharedMemoryFault(f"the memory of process {process} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(file)


def check_token(file: int, magic: bytes, token: bytes) -> None:
    """Raises SharedMemoryFault: it is another segment than meant."""
    if os.pread(file, len(magic) + TOKEN_BYTES, 0) != magic + token:
        raise SharedMemoryFault("it is another one than meant: its owner has closed that")


@functools.cache
def machine() -> str:
    """Return what two processes must agree on to share memory: host name, boot, and namespace of process numbers."""
    boot, space = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = str(os.stat("/proc/self/ns/pid").st_ino)
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    return f"{host}/{boot}/{space}"


class SharedPayload(MemoryFile):
    """A payload in memory that others may read and no process can change, until this object is hidden or gone. A
    process that has read it keeps it, as does a holder of :attr:`payload`.

    Attributes:
        place: where others find it, for :func:`read`.
        payload: its bytes, where they lie.
    """

    def __init__(self, *parts: Any) -> None:
        """Copy contiguous bytes-like objects, one behind the other. Takes its time, and lets other threads run
        meanwhile.

        Raises:
            SharedMemoryFault: this system has no such memory, or has no more.
        """
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(map(len, views))
        token = secrets.token_bytes(TOKEN_BYTES)
        self._file = make_file()
        try:
            head = (_PAYLOAD_MAGIC + token).ljust(FREE_FROM, b"\0")
            _write(self._file, memoryview(head))
            for view in views:
                _write(self._file, view)  # not through a mapping: that would fill each page with zeros first
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _seals() | fcntl.F_SEAL_SEAL)
            self.payload = _payload(self._file, size)
        except OSError as error:
            self.hide()
            raise SharedMemoryFault(f"no shared memory of {size} bytes: {error}") from None
        self.place = place_of(self._file, token)


def read(place: str, size: int) -> memoryview:
    """The payload of another process of this machine, where it lies. It stays for as long as a view of it exists.

    Whoever writes to the view gets pages of its own: what others see does not change, and nothing of theirs ever
    changes this.

    Args:
        place: :attr:`SharedPayload.place` of the other process. Nothing of it is trusted: what is found there must be
            a memfd that no process can write to or resize, of just this size, in memory as a whole, with the token in
            it.
        size: of the payload, bytes. The caller has checked that it accepts so much.

    Raises:
        SharedMemoryFault: it is not there, or cannot be opened from here.
    """
    with opened(place, FREE_FROM + size, seals=_seals()) as (file, token):
        # A hole would be filled when it is looked at: with memory of the reader's, and with a signal if there is none.
        # To count blocks does not tell: there may be some behind the end.
        if os.lseek(file, 0, os.SEEK_HOLE) < FREE_FROM + size:
            raise SharedMemoryFault("a part of it was never written")
        check_token(file, _PAYLOAD_MAGIC, token)
        return _payload(file, size)


class PayloadMemory:
    """Holds what one bus passes on in memory. :meth:`put` may be called from any thread.

    Attributes:
        here: the machine, where this bus may share memory with the other processes of it; empty: it may not. Two that
            say the same may read each other's payloads, as far as the system lets them.
        read_bytes: of payloads that were read from others, by topic. Written by the loop.
    """

    def __init__(self, *, switched_on: bool) -> None:
        self.here = machine() if switched_on and HAS_MEMFD else ""
        self.read_bytes: Counter[str] = Counter()
        self._gives = bool(self.here)
        self._lock = threading.Lock()

    def put(self, *parts: Any) -> SharedPayload | None:
        """Put a payload, in one or more parts, where others find it; None: there is no such memory, or it is too small
        to be worth it."""
        if not self._gives or sum(memoryview(part).nbytes for part in parts) < SHARED_BYTES:
            return None
        try:
            return SharedPayload(*parts)
        except SharedMemoryFault as error:
            with self._lock:
                first, self._gives = self._gives, False
            if first:
                log.warning("no shared memory", reason=str(error), effect="what is sent goes over DDS")
            return None


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _payload(file: int, size: int) -> memoryview:
    # Private and writable: a mapping that cannot be written would end the process of a user who writes to a tensor.
    return map_file(file, FREE_FROM + size, writable=True, private=True)[FREE_FROM:].data
