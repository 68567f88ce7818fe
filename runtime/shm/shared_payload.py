"""Payloads that processes of one machine hand to each other in memory: written once, and sealed against any change.

The bytes of an update or a model lie in a memfd (see :mod:`.segment`) that the kernel lets no process write to any
more, its owner included. So they need no copy and no checksum: what a reader has checked is what it uses, and a payload
that can be opened is all there, for it was sealed before it was announced. Over DDS goes only where it lies.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from typing import Any

from gradbus.runtime import fast_paths
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import (
    FREE_FROM,
    TOKEN_BYTES,
    MemoryFile,
    SharedMemoryFault,
    check_token,
    machine,
    make_file,
    map_file,
    opened,
    place_of,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SHARED_BYTES = 16 * 1024  # what is smaller travels in the frames themselves
_MAGIC = b"gradbus\x02"

log = get_logger("bus")


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
            head = (_MAGIC + token).ljust(FREE_FROM, b"\0")
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
        check_token(file, _MAGIC, token)
        return _payload(file, size)


class PayloadMemory:
    """Holds what one bus passes on in memory. :meth:`put` may be called from any thread.

    Attributes:
        here: the machine, where this bus may share memory with the other processes of it; empty: it may not. Two that
            say the same may read each other's payloads, as far as the system lets them.
        read_bytes: of payloads that were read from others, by topic. Written by the loop.
    """

    def __init__(self, *, switched_on: bool) -> None:
        self.here = machine() if switched_on and fast_paths.has_memfd() else ""
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
