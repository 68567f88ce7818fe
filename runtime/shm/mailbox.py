"""Frames from rank to rank through shared memory, for ranks that are waiting: no DDS, no change of threads.

DDS takes a small frame through the kernel's network and three threads, while on one machine the rank that waits could
look for itself. So every rank has, in its segment, a ring of letters for each other rank. A letter is a frame as it
would go over DDS. A rank that waits for a collective looks into the rings of all others (:meth:`Letters.visit`): first
again and again for a short time, then it sleeps on a futex in its own segment, which a sender wakes. A rank where
nobody looks is *away*: what is for it goes over DDS, whose threads always listen. In between, for some milliseconds
after a visit, it is *back soon*: its letters may wait for the next visit, or for the receive thread, which looks after
them until then.

Written and read without locks between processes: one side alone writes each word. That is right where stores become
visible in the order they were made (x86-64, and the locks taken in between keep a load from overtaking a store). Other
processors do without letters: :data:`AVAILABLE`.
"""

from __future__ import annotations

import ctypes as ct
import os
import platform
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gradbus.runtime.errors import FrameError
from gradbus.runtime.shm.layout import LETTER_RING_BYTES, Layout
from gradbus.runtime.shm.segment import Bytes
from gradbus.runtime.wire.frames import Frame, parse

AVAILABLE = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 1 << 32
MAX_LETTER_BYTES = LETTER_RING_BYTES // 4
SPIN_S = 100e-6  # a sleep and a wake-up take about as long
NAP_S = 1e-3  # the first sleep; each one after that is twice as long
SLEEP_S = 0.2  # signals are handled in between
FINISH_S = 1.0  # how long to wait for a thread that reads: it puts some chunks in their places
WORK_S = 50e-6  # with work that waits for others: they do not wake anybody for it
_AWAY, _LOOKING, _ASLEEP, _BACK_SOON = range(4)
_SKIP = 0xFFFF_FFFF  # the rest of the ring is not used, the next letter stands at its beginning
_MASK = 0xFFFF_FFFF
_WORD = 8  # letters stand at multiples of it, behind their length

_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1


class _TimeSpec(ct.Structure):
    _fields_ = (("seconds", ct.c_long), ("nanoseconds", ct.c_long))


def _futex() -> Callable[..., int]:
    call = ct.CDLL(None, use_errno=True).syscall
    call.restype = ct.c_long
    call.argtypes = (ct.c_long, ct.c_void_p, ct.c_int, ct.c_uint32, ct.c_void_p, ct.c_void_p, ct.c_uint32)
    return call


_syscall = _futex() if AVAILABLE else None


class _Box:
    """The letters of one other rank, both ways."""

    __slots__ = ("attention", "attention_at", "broken", "heads", "incoming", "outgoing", "tails")

    def __init__(self, rank: int, mine: Bytes, theirs: Bytes, layout: Layout, me: int) -> None:
        self.incoming = layout.ring(theirs, me).data
        self.outgoing = layout.ring(mine, rank).data
        self.tails = layout.tails(theirs)
        self.heads = layout.heads(theirs)
        self.attention = layout.attention(theirs)
        self.attention_at = theirs.ctypes.data + layout.attention_at
        self.broken = False


class Work(Protocol):
    """What a thread can do while it waits for letters."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""

    def push(self) -> bool:
        """Do what can be done now. False: nothing could."""


class Letters:
    """The letters of one rank of a group. Any thread may write; one at a time reads."""

    def __init__(self, rank: int, mine: Bytes, layout: Layout, take: Callable[[Frame], None]) -> None:
        """
        Args:
            mine: the own segment.
            take: gets every frame that comes, on the thread that looks; it must not wait or raise.
        """
        self._rank = rank
        self._mine = mine
        self._layout = layout
        self._take = take
        self._tails = layout.tails(mine)
        self._heads = layout.heads(mine)
        self._attention = layout.attention(mine)
        self._attention_at = mine.ctypes.data + layout.attention_at
        self._boxes: dict[int, _Box] = {}
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._look_again = False
        self._visiting = threading.Lock()
        self._leaving = threading.RLock()  # signal handlers may nudge
        self._visitor = 0
        self.visits = 0
        self.sent = 0
        self.rejected = 0

    def open(self, others: dict[int, Bytes]) -> None:
        """Letters go to these ranks, and come from them. The values are their segments."""
        self._boxes = {
            rank: _Box(rank, self._mine, memory, self._layout, self._rank) for rank, memory in others.items()
        }

    # Out

    def put(self, readers: Sequence[int], parts: Sequence[bytes | memoryview]) -> bool:
        """Write a frame for some ranks. False: one of them is away, or has no room; nobody has got it.

        When True, whoever went away in the meantime has been told by ``ring``, see :meth:`away`.
        """
        size = sum(len(part) for part in parts)
        if size > MAX_LETTER_BYTES:
            return False
        need = _WORD + -(-size // _WORD) * _WORD
        with self._writing:
            places = []
            for reader in readers:
                box = self._boxes.get(reader)
                if box is None or box.attention[0] == _AWAY:
                    return False
                tail = self._tails[reader]
                left = LETTER_RING_BYTES - ((tail - box.heads[self._rank]) & _MASK)
                at = tail % LETTER_RING_BYTES
                to_end = LETTER_RING_BYTES - at
                skip = to_end if need > to_end else 0
                if need + skip > left:
                    return False
                places.append((reader, box, tail, at, skip))
            for reader, box, tail, at, skip in places:
                ring = box.outgoing
                if skip:
                    ring[at : at + 4] = _SKIP.to_bytes(4, "little")
                    at = 0
                start = at + _WORD
                for part in parts:
                    ring[start : start + len(part)] = part
                    start += len(part)
                ring[at : at + 4] = size.to_bytes(4, "little")
                self._tails[reader] = (tail + skip + need) & _MASK
        self.sent += 1
        return True

    def call(self, readers: Sequence[int]) -> list[int]:
        """Wake those of the readers that sleep. Returns those that have gone away since: they must be told over DDS."""
        away = []
        for reader in readers:  # a lock was released since the letter was written: its store is out
            box = self._boxes[reader]
            attention = box.attention[0]
            if attention == _ASLEEP:
                assert _syscall is not None
                _syscall(_SYS_FUTEX, box.attention_at, _FUTEX_WAKE, 1, None, None, 0)
            elif attention == _AWAY:
                away.append(reader)
        return away

    # In

    def poll(self) -> bool:
        """Take the letters that are here. False: there are none, or another thread is at it, which then looks again."""
        found = False
        self._look_again = True
        while self._look_again and self._reading.acquire(blocking=False):
            try:
                found |= self._read_all()
            finally:
                self._reading.release()
        return found

    def finish(self) -> None:
        """Take the letters that are here; if another thread is at it, wait for that. Not from within ``take``."""
        if self._reading.acquire(timeout=FINISH_S):
            try:
                self._read_all()
            finally:
                self._reading.release()
        self.poll()

    def _read_all(self) -> bool:
        found = self._look_again = False
        for sender, box in self._boxes.items():
            tail = box.tails[self._rank]
            if tail != self._heads[sender] and not box.broken:
                found = True
                self._read(sender, box, tail)
        return found

    def _read(self, sender: int, box: _Box, tail: int) -> None:
        head = self._heads[sender]
        left = (tail - head) & _MASK
        if left > LETTER_RING_BYTES:
            self._refuse(box)
            return
        while left:
            at = head % LETTER_RING_BYTES
            (size,) = struct.unpack_from("<I", box.incoming, at)
            skips = size == _SKIP
            need = LETTER_RING_BYTES - at if skips else _WORD + -(-size // _WORD) * _WORD
            if need > min(left, LETTER_RING_BYTES - at) or (skips and at == 0):
                self._refuse(box)
                return
            letter = b"" if skips else bytes(box.incoming[at + _WORD : at + _WORD + size])  # its place is free at once
            head, left = (head + need) & _MASK, left - need
            self._heads[sender] = head
            if skips:
                continue
            try:
                frame = parse(letter)
            except FrameError:
                self.rejected += 1
                continue
            if frame.key.sender != sender:
                self.rejected += 1
                continue
            self._take(frame)

    def _refuse(self, box: _Box) -> None:
        """What is there is not what this program writes: nothing more is read of it."""
        box.broken = True
        self.rejected += 1

    # Attention

    @property
    def has_visitor(self) -> bool:
        """Whether some thread looks for letters."""
        return self._visitor != 0

    def visit(
        self, done: Callable[[], bool], until_s: float, work: Work, on_return: Callable[[], None] | None = None
    ) -> bool:
        """Take letters until ``done()`` is true or ``time.monotonic`` has reached ``until_s``.

        Args:
            work: what else there is to do meanwhile.
            on_return: called if this rank was away.

        Returns:
            False: another thread is visiting, nothing was done.
        """
        if not self._visiting.acquire(blocking=False):
            return False
        try:
            self._visitor = threading.get_ident()
            was_away = self.is_away
            self._attention[0] = _LOOKING
            if was_away and on_return is not None:
                on_return()
            self.visits += 1
            spin_until_s = time.monotonic() + SPIN_S
            nap_s = NAP_S
            while not done():
                found = self.poll() | work.push()
                now_s = time.monotonic()
                if now_s >= until_s:
                    break
                if found:
                    spin_until_s = now_s + SPIN_S
                    nap_s = NAP_S
                    continue
                if now_s < spin_until_s:
                    os.sched_yield()
                    continue
                self._sleep(done, min(nap_s if work.idle else WORK_S, until_s - now_s))
                nap_s = min(2 * nap_s, SLEEP_S)
        finally:
            try:
                with self._leaving:
                    self._visitor = 0
                    self._attention[0] = _BACK_SOON
            finally:
                self._visiting.release()
        return True

    def _sleep(self, done: Callable[[], bool], timeout_s: float) -> None:
        """A sender cannot write here: who calls after the last look, but before the futex is reached, wakes nobody.
        That is why a sleep is about as long as the time that was waited before."""
        assert _syscall is not None
        self._attention[0] = _ASLEEP
        if not self.poll() and not done():  # it takes a lock: what was written before the store above is seen
            timeout = _TimeSpec(0, int(timeout_s * 1e9))
            _syscall(_SYS_FUTEX, self._attention_at, _FUTEX_WAIT, _ASLEEP, ct.byref(timeout), None, 0)
        self._attention[0] = _LOOKING

    def nudge(self) -> None:
        """Something that the visitor may wait for has happened on this thread."""
        if self._visitor and self._visitor != threading.get_ident():
            assert _syscall is not None
            with self._leaving:  # it may have gone away meanwhile
                if self._visitor:
                    self._attention[0] = _LOOKING  # so that it does not fall asleep now
            _syscall(_SYS_FUTEX, self._attention_at, _FUTEX_WAKE, 1, None, None, 0)

    def away(self) -> bool:
        """Nobody looks any more: what comes from now on comes over DDS. False: there is a visitor."""
        if not self._visiting.acquire(blocking=False):
            return False
        try:
            self._attention[0] = _AWAY
        finally:
            self._visiting.release()
        self.poll()  # it takes a lock: what was written before the store above is seen
        return True

    @property
    def is_away(self) -> bool:
        """Whether letters are refused."""
        return self._attention[0] == _AWAY
