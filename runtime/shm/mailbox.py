"""Frames from rank to rank through shared memory, for ranks that are waiting: no DDS, no change of threads.

DDS takes a small frame through the kernel's network and three threads, and may have to encrypt it, while on one machine
the rank that waits could look for itself. So every rank has, in its segment, a ring of messages for each other rank. A
message is a frame as it would go over DDS.

Two kinds of threads read the messages of a rank. A thread that waits for a collective polls
(:meth:`Mailbox.poll_until`): it looks into the rings again and again for a short time, then it sleeps until a sender
wakes it. When no thread polls, the thread of the mailbox (:class:`MailboxThread`) sleeps in the same way. For some
milliseconds after a poll it leaves the messages to the next poll, which usually comes soon: to wake a thread takes
longer than a small collective.

The attention word of a rank says whether a sender has to wake a thread:

| attention | meaning |
|---|---|
| CLOSED | no thread reads messages: frames go over DDS |
| LOOKING | a thread looks, or will in some milliseconds |
| ASLEEP | a thread sleeps: wake it |

:data:`AFTER` names the steps that change it. Whatever the order of the steps of sender, poller, thread and close, no
message is left while its readers sleep: ``tests/runtime/shm/test_mailbox_model.py`` tries all of them.

A sleeper waits for the counters of bytes in the senders' segments to change (``futex_waitv``, Linux 5.16), so a message
that is written just before the sleep ends it at once. On an older kernel it waits for its own attention word, which a
sender cannot write, and may miss a call: there a sleep is about as long as the time that was waited before.

Written and read without locks between processes: one side alone writes each word. The order of its writes holds for the
other side, too, where :func:`gradbus.runtime.fast_paths.memory_fence` stands between them: between a message and its
counter, between a look at a counter and the message, between the last look at a message and giving back its place, and
between a write and a look at what the other side writes meanwhile (message and attention word, attention word and
counters). Where there is no fence there is no mailbox: :data:`AVAILABLE`.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from gradbus.runtime import fast_paths, forks
from gradbus.runtime.errors import FrameError
from gradbus.runtime.shm import futex
from gradbus.runtime.shm.layout import RING_BYTES, Layout
from gradbus.runtime.shm.segment import Bytes
from gradbus.runtime.spinning import SPINNING
from gradbus.runtime.wire.frames import Frame, parse

_fence = fast_paths.memory_fence() or fast_paths.no_fence
AVAILABLE = futex.AVAILABLE and fast_paths.memory_fence() is not None
MAX_MESSAGE_BYTES = RING_BYTES // 4
SPIN_S = 100e-6  # a sleep and a wake-up take about as long
NAP_S = 1e-3  # without futex_waitv: the first sleep; each one after that is twice as long
SLEEP_S = 0.2  # the longest sleep of a poller: signals are handled in between
IDLE_S = 1.0  # the longest sleep of the thread
WORK_S = 50e-6  # with work that waits for others: they do not wake anybody for it
PARKED_S = 0.003  # how often the thread looks whether polls go on
LONG_PARKED_S = 0.012  # the same when pollers have come again and again: each look takes their core, and the GIL
CLOSED, LOOKING, ASLEEP = range(3)
# The attention word after each step that changes it. Steps of a poll and of the thread may overlap: both sleep on the
# same word, so a poll that ends, or that begins, wakes the thread, which then finds out whose turn it is.
AFTER = {
    "open": LOOKING,
    "begin duty": ASLEEP,  # the thread, unless there is a poller
    "end duty": LOOKING,  # the thread, unless there is a poller
    "begin poll": LOOKING,
    "sleep": ASLEEP,  # a poller
    "wake up": LOOKING,  # a poller
    "end poll": LOOKING,
    "wake poller": LOOKING,  # a thread that has ended what a poller waits for
    "stop": LOOKING,  # whoever closes; the thread, or the last poller, then ends it all
    "end": CLOSED,
}
_SKIP = 0xFFFF_FFFF  # the rest of the ring is not used, the next message stands at its beginning
_MASK = 0xFFFF_FFFF
_WORD = 8  # messages stand at multiples of it, behind their length


class _PeerRings:
    """The messages of one other rank, both ways.

    Attributes:
        call_at: address of the word that the other rank waits for when it sleeps.
        tail_at: address of its counter of bytes for this rank.
    """

    __slots__ = ("attention", "broken", "call_at", "heads", "incoming", "outgoing", "tail_at", "tails")

    def __init__(self, rank: int, mine: Bytes, theirs: Bytes, layout: Layout, me: int) -> None:
        self.incoming = layout.ring(theirs, me).data
        self.outgoing = layout.ring(mine, rank).data
        self.tails = layout.tails(theirs)
        self.heads = layout.heads(theirs)
        self.attention = layout.attention(theirs)
        self.tail_at = theirs.ctypes.data + layout.tail_at(me)
        waits_for_tails = futex.HAS_WAITV and layout.world <= futex.MAX_WORDS
        self.call_at = (
            mine.ctypes.data + layout.tail_at(rank) if waits_for_tails else theirs.ctypes.data + layout.attention_at
        )
        self.broken = False


class Work(Protocol):
    """Holds what a thread can do while it waits for messages."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""

    def push(self) -> bool:
        """Do what can be done now. False: nothing could."""


class Mailbox:
    """The messages of one rank of a group. Any thread may write; one at a time reads."""

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
        self._peers: dict[int, _PeerRings] = {}
        self._writing = threading.Lock()
        # The thread that reads and the one that polls. Entered and left in one step: a signal that comes just when a
        # lock was taken would leave it taken.
        self._threads: dict[str, int] = {}
        self._look_again = False
        self._afterwards: deque[Callable[[], None]] = deque()
        self._attending = threading.RLock()  # guards changes of the attention word. Signal handlers may wake the poller
        self._made_in = forks.generation  # in a child by fork these messages are its parent's: they are left alone
        self._pushes = False
        self._thread: MailboxThread | None = None
        self._sleeper = self.sleeper()  # of the poller
        self.polls = 0
        self.sent = 0
        self.rejected = 0

    def open(self, others: dict[int, Bytes], name: str = "gradbus-mailbox") -> None:
        """Take messages of these ranks from now on, and write messages for them.

        Args:
            others: their segments, by rank.
            name: of the thread.
        """
        self._peers = {
            rank: _PeerRings(rank, self._mine, memory, self._layout, self._rank) for rank, memory in others.items()
        }
        self._sleeper = self.sleeper()
        self._thread = MailboxThread(self, name)
        self._attention[0] = AFTER["open"]
        self._thread.thread.start()

    def close(self) -> threading.Thread | None:
        """Take no more messages. Returns the thread, which ends soon."""
        if self._made_in != forks.generation:
            return None
        with self._attending:  # so that what the thread writes at its end comes after this
            thread, self._thread = self._thread, None
            if thread is None:
                return None
            thread.stop()
            self._attention[0] = AFTER["stop"]
        futex.wake(self._attention_at)
        return thread.thread

    # Out

    def put(self, readers: Sequence[int], parts: Sequence[bytes | memoryview]) -> bool:
        """Write a frame for some ranks. False: one of them takes none, or has no room; no rank has got it."""
        size = sum(len(part) for part in parts)
        if size > MAX_MESSAGE_BYTES or self._made_in != forks.generation:
            return False
        need = _WORD + -(-size // _WORD) * _WORD
        with self._writing:
            places = []
            for reader in readers:
                peer = self._peers.get(reader)
                if peer is None or peer.attention[0] == CLOSED:
                    return False
                tail = self._tails[reader]
                left = RING_BYTES - ((tail - peer.heads[self._rank]) & _MASK)
                at = tail % RING_BYTES
                to_end = RING_BYTES - at
                skip = to_end if need > to_end else 0
                if need + skip > left:
                    return False
                places.append((reader, peer, tail, at, skip))
            for _, peer, _, at, skip in places:
                ring = peer.outgoing
                if skip:
                    ring[at : at + 4] = _SKIP.to_bytes(4, "little")
                    at = 0
                start = at + _WORD
                for part in parts:
                    ring[start : start + len(part)] = part
                    start += len(part)
                ring[at : at + 4] = size.to_bytes(4, "little")
            _fence()
            for reader, _, tail, _, skip in places:
                self._tails[reader] = (tail + skip + need) & _MASK
        self.sent += 1
        return True

    def call(self, readers: Sequence[int]) -> None:
        """Wake those of the readers that sleep."""
        _fence()  # the messages are seen by whoever falls asleep after this look
        for reader in readers:
            peer = self._peers[reader]
            if peer.attention[0] == ASLEEP:
                futex.wake(peer.call_at)

    # In

    def poll(self) -> bool:
        """Take the messages that are here. False: there are none, or another thread takes them."""
        found, reader = False, threading.get_ident()
        if self._made_in != forks.generation or self._threads.get("reader") == reader:  # from within ``take``
            return False
        self._look_again = True
        try:
            while self._look_again and self._threads.setdefault("reader", reader) == reader:
                known = len(self._afterwards)
                try:
                    found |= self._read_all()
                    for _ in range(known):  # here, so that they are called in their order
                        self._afterwards.popleft()()
                finally:
                    self._threads.pop("reader", None)
        finally:
            if self._threads.get("reader") == reader:
                del self._threads["reader"]
        return found

    def after_messages(self, then: Callable[[], None]) -> None:
        """Call a function when the messages that are here now have been taken: on this thread, or on another one that
        takes them."""
        if self._made_in != forks.generation:
            then()
            return
        self._afterwards.append(then)
        self.poll()

    def _read_all(self) -> bool:
        found = self._look_again = False
        tails = [(sender, peer, peer.tails[self._rank]) for sender, peer in self._peers.items()]
        _fence()
        for sender, peer, tail in tails:
            if tail != self._heads[sender] and not peer.broken:
                found = True
                self._read(sender, peer, tail)
        return found

    def _read(self, sender: int, peer: _PeerRings, tail: int) -> None:
        head = self._heads[sender]
        left = (tail - head) & _MASK
        if left > RING_BYTES:
            self._refuse(peer)
            return
        while left:
            at = head % RING_BYTES
            (size,) = struct.unpack_from("<I", peer.incoming, at)
            skips = size == _SKIP
            need = RING_BYTES - at if skips else _WORD + -(-size // _WORD) * _WORD
            if need > min(left, RING_BYTES - at) or (skips and at == 0):
                self._refuse(peer)
                return
            head, left = (head + need) & _MASK, left - need
            try:
                if not skips:
                    self._take_message(sender, bytes(peer.incoming[at + _WORD : at + _WORD + size]))
            except Exception:
                _fence()
                self._heads[sender] = head  # the message is lost, those behind it are not
                raise
            _fence()
            self._heads[sender] = head  # not before: one that a signal has interrupted is taken again

    def _take_message(self, sender: int, message: bytes) -> None:
        try:
            frame = parse(message)
        except FrameError:
            self.rejected += 1
            return
        if frame.key.sender == sender:
            self._take(frame)
        else:
            self.rejected += 1

    def _refuse(self, peer: _PeerRings) -> None:
        """Read nothing more of it: what is there is not what this program writes."""
        peer.broken = True
        self.rejected += 1

    # Attention

    @property
    def is_polled(self) -> bool:
        """Whether some thread looks for messages."""
        return "poller" in self._threads

    @property
    def has_working_poller(self) -> bool:
        """Whether it also sends what waits for slots."""
        return self._pushes and "poller" in self._threads

    def poll_until(
        self, done: Callable[[], bool], until_s: float, work: Work | None, *, may_sleep: bool = True
    ) -> bool:
        """Take messages until ``done()`` is true or ``time.monotonic`` has reached ``until_s``.

        Args:
            work: what else there is to do meanwhile.
            may_sleep: False: return where this thread would sleep.

        Returns:
            False: another thread is polling, nothing was done.
        """
        poller, thread = threading.get_ident(), self._thread
        if self._made_in != forks.generation or "poller" in self._threads:
            return False
        try:
            if not self._begin_poll(poller, work):
                return False
            if thread is not None and thread.on_duty:
                futex.wake(self._attention_at)  # it leaves the messages to this poll and the next ones
            sleeper = self._sleeper
            sleeper.nap_s = NAP_S
            now_s = time.monotonic()
            spin_until_s = now_s + SPINNING.budget_s(now_s, SPIN_S)
            while not done():
                found = self.poll()
                if work is not None:
                    found |= work.push()
                now_s = time.monotonic()
                if now_s >= until_s:
                    break
                if found:
                    spin_until_s = now_s + SPINNING.budget_s(now_s, SPIN_S)
                    sleeper.nap_s = NAP_S
                    continue
                if now_s < spin_until_s:
                    if not SPINNING.yield_core():
                        spin_until_s = 0.0
                    continue
                if not may_sleep:
                    break
                self._sleep(sleeper, done, min(SLEEP_S if work is None or work.idle else WORK_S, until_s - now_s))
        finally:
            self._end_poll(poller)
            if thread is not None and thread.on_duty:
                futex.wake(self._attention_at)  # it may have fallen asleep beside this poll: no other thread wakes it
        return True

    def _begin_poll(self, poller: int, work: Work | None) -> bool:
        with self._attending:
            if self._threads.setdefault("poller", poller) != poller:
                return False
            self._pushes = work is not None
            self._attention[0] = AFTER["begin poll"]
            self.polls += 1
            return True

    def _end_poll(self, poller: int) -> None:
        with self._attending:
            if self._threads.get("poller") == poller:
                del self._threads["poller"]
                self._attention[0] = AFTER["end poll" if self._thread is not None else "end"]

    def _sleep(self, sleeper: Sleeper, done: Callable[[], bool], timeout_s: float) -> None:
        sleeper.remember()  # first: whatever comes after it keeps this thread awake
        with self._attending:  # a lock between the store and the next look, as memory_fence asks on x86-64
            self._attention[0] = AFTER["sleep"]
        _fence()  # a sender that has not seen the store above has written what the next look finds
        if not self.poll() and not done():
            sleeper.sleep(timeout_s)
        self._attention[0] = AFTER["wake up"]

    def wake_poller(self) -> None:
        """Wake the thread that polls: something that it may wait for has happened on this thread."""
        poller = self._threads.get("poller")
        if poller is not None and poller != threading.get_ident() and self._made_in == forks.generation:
            with self._attending:  # it may have gone away meanwhile
                if self.is_polled:
                    self._attention[0] = AFTER["wake poller"]  # so that it does not fall asleep now
            futex.wake(self._attention_at)

    def wake_thread(self) -> None:
        """Have the mailbox's thread read now: something goes on that no poller waits for."""
        thread = self._thread
        if thread is not None:
            thread.go_on_duty()

    def begin_duty(self, sleeper: Sleeper) -> bool:
        """On the thread: announce that it sleeps next. False: there is a poller, which changes the word."""
        with self._attending:
            if self.is_polled:
                return False
            sleeper.remember()
            self._attention[0] = AFTER["begin duty"]
            _fence()  # as before the sleep of a poller
            return True

    def end_duty(self, *, closes: bool = False) -> None:
        """On the thread: it is awake, or it ends."""
        with self._attending:
            if not self.is_polled:
                self._attention[0] = AFTER["end" if closes else "end duty"]

    def sleeper(self) -> Sleeper:
        """A place to sleep, for one thread."""
        return Sleeper(self._attention_at, list(self._peers.values()), self._rank)


class Sleeper:
    """Where one thread of a rank sleeps until a message comes, or its attention word has changed.

    Attributes:
        nap_s: without futex_waitv, the longest sleep next time.
    """

    __slots__ = ("_attention_at", "_peers", "_rank", "_words", "nap_s")

    def __init__(self, attention_at: int, peers: list[_PeerRings], rank: int) -> None:
        self._attention_at = attention_at
        self._rank = rank
        self._peers = peers
        self._words: futex.WaitWords | None = None
        if futex.HAS_WAITV and len(peers) < futex.MAX_WORDS:
            self._words = futex.WaitWords([attention_at, *(peer.tail_at for peer in peers)])
            self._words.expect(0, ASLEEP)
        self.nap_s = NAP_S

    def remember(self) -> None:
        """Note how much has been written so far."""
        if self._words is not None:
            for number, peer in enumerate(self._peers, start=1):
                self._words.expect(number, peer.tails[self._rank])

    def sleep(self, timeout_s: float) -> None:
        """Sleep unless more has been written since, or the attention word has changed."""
        if self._words is not None:
            self._words.wait(timeout_s)
            return
        futex.wait(self._attention_at, ASLEEP, min(timeout_s, self.nap_s))
        self.nap_s = min(2 * self.nap_s, SLEEP_S)


class MailboxThread:
    """Reads the messages of a rank while no thread polls, on a thread that it holds.

    Attributes:
        thread: that thread; :meth:`Mailbox.open` starts it.
        on_duty: whether it reads, or sleeps until there is something to read.
    """

    def __init__(self, mailbox: Mailbox, name: str) -> None:
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._mailbox = mailbox
        self._wanted = threading.Event()
        self._stop_flag = False
        self._polls = 0  # those that it knows of
        self.on_duty = False

    def stop(self) -> None:
        """End soon, and sleep no more: the caller wakes it."""
        self._stop_flag = True
        self._wanted.set()

    def go_on_duty(self) -> None:
        """Go on duty as soon as no thread polls, unless it is."""
        if not self.on_duty or self._polls != self._mailbox.polls:
            self._wanted.set()

    def _run(self) -> None:
        mailbox, sleeper = self._mailbox, self._mailbox.sleeper()
        while not self._stop_flag:
            self.on_duty = True
            while mailbox.polls == self._polls and not self._stop_flag and mailbox.begin_duty(sleeper):
                found = self._poll()
                if not found and not self._stop_flag:  # it may have been set before the attention word was
                    sleeper.sleep(IDLE_S)
                mailbox.end_duty()
                if found:
                    sleeper.nap_s = NAP_S
            self.on_duty = False
            self._park()
        mailbox.end_duty(closes=True)
        self._poll()

    def _park(self) -> None:
        """Wait until the polls are over, or this thread is wanted. In the midst of calls that wait for what they
        start, the next poller comes soon."""
        mailbox, parked_s = self._mailbox, PARKED_S
        while not self._stop_flag and (mailbox.is_polled or self._polls != mailbox.polls):
            self._polls = mailbox.polls
            if self._wanted.wait(parked_s):
                self._wanted.clear()
                self._polls, parked_s = mailbox.polls, PARKED_S
            else:
                parked_s = min(2 * parked_s, LONG_PARKED_S)

    def _poll(self) -> bool:
        try:
            return self._mailbox.poll()
        except Exception:  # of whoever takes frames: the message is lost, and those behind it are not
            self._mailbox.rejected += 1
            return True
