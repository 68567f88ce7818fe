"""One collective on one rank: what it waits for, what it sends, how it ends. It knows neither DDS nor the event loop.

Any thread may start it, feed it and end it: its state is behind one lock, which is held while a chunk is put in its
place (some hundred microseconds for 1 MiB) and what follows from that is sent (10 ms, if DDS is slow to take it). It
ends when everything it waits for has come *and* everything it sends has been written, so its caller may use the buffers
again.

A payload leaves at once (eager), or waits until its receivers have called (rendezvous). A receiver keeps what comes
before its call, within a bound. So a payload that is large, or more than a receiver has room for, is announced with an
RTS; the receiver answers with a CTS when it has made the call, and then the payload leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradbus.runtime.collectives.tensors import NOTHING, Bytes
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.traffic import Traffic
from gradbus.runtime.wire.frames import CHUNK_BYTES, Frame, chunk_count

# Parts of empty messages about the payloads of a collective.
ACK = 0xFFFF  # all of the payload has arrived
CTS = 0xFFFE  # clear to send: the receiver has made the call
RTS = 0xFFFD  # request to send: a payload waits for the receiver's call

# What is larger waits for its receiver's call, as that would have to keep it without a place for it. That costs one
# round trip, a small part of the time that so many bytes take.
RENDEZVOUS_BYTES = 8 << 20
# What a kept frame counts for beside its payload: its header, its fields and its place in the table take half as much.
FRAME_BYTES = 2048


class OperationKey(NamedTuple):
    """Which collective of a group: the same on all ranks. ``call`` counts the calls with this round, name and channel.

    Attributes:
        channel: empty for what all ranks call. For a message from one rank to another it names these two: the others
            call nothing then, and must not count it.
    """

    round_id: int
    call: int
    name: str
    channel: str = ""


def channel_of(signature: str) -> str:
    """The channel of an operation with this signature: ``send FROM TO`` is a channel, all else is called by all."""
    return signature if signature.startswith("send ") else ""


class Sending(Protocol):
    """A payload on its way out."""

    def cancel(self) -> int:
        """Send no more of it. When this returns, its memory is no longer read. Returns the bytes that were sent."""


Finished = Callable[[int | Exception], None]


class OutgoingPart(NamedTuple):
    """A payload that a collective sends.

    Attributes:
        to: the receiver; None: all others. part: number of the payload within the collective.
        payload: its bytes. signature: of the collective. meta: dtype and shape of a tensor.
        only: numbers of the chunks to send; None: all.
        written: called with the number of each chunk when its memory is no longer needed.
    """

    to: int | None
    part: int
    payload: Bytes
    signature: str
    meta: str = ""
    only: Sequence[int] | None = None
    written: Callable[[int], None] | None = None


class PayloadTransport(Protocol):
    """The way out to the other ranks."""

    def send(self, key: OperationKey, outgoing: OutgoingPart, finished: Finished) -> Sending | None:
        """Send a payload. ``finished`` is called once, on any thread and perhaps before this returns, with the bytes or
        the error. Returns what is still to be sent, or None if that is nothing."""


class Stream:
    """One payload on its way in from one rank, frame by frame, in any order and however often each comes. Subclasses
    say where its bytes go."""

    def __init__(self, total_bytes: int | None = None) -> None:
        """``total_bytes``: of the payload, where it is known beforehand."""
        self._total_bytes = total_bytes
        self._have: bytearray | None = None
        self._left = 1

    @property
    def complete(self) -> bool:
        """Whether every byte is here. That holds because each chunk is taken once, and only if it has exactly the bytes
        that chunk has: the frame alone does not tell, as the first chunk of a payload says itself how long chunks
        are."""
        return self._left == 0

    def feed(self, frame: Frame, meta: str) -> bool:
        """Take a frame. False: it was here already.

        Raises:
            CollectiveError: it contradicts what is known of the payload, or is not a whole chunk.
        """
        if frame.offset != frame.seq * CHUNK_BYTES or frame.seq_cnt != chunk_count(frame.total_bytes, CHUNK_BYTES):
            raise CollectiveError(f"sent chunks of {frame.chunk_bytes} bytes where {CHUNK_BYTES} were expected")
        whole = min(CHUNK_BYTES, frame.total_bytes - frame.offset)
        if len(frame.data) != whole:
            raise CollectiveError(
                f"sent {len(frame.data)} bytes as chunk {frame.seq} of {frame.seq_cnt} of a payload of "
                f"{frame.total_bytes} where {whole} were expected"
            )
        if self._have is None:
            if self._total_bytes is not None and frame.total_bytes != self._total_bytes:
                raise CollectiveError(f"sent {frame.total_bytes} bytes where {self._total_bytes} were expected")
            self.begin(frame.total_bytes, meta)
            self._total_bytes = frame.total_bytes
            self._have = bytearray(frame.seq_cnt)
            self._left = frame.seq_cnt
        if len(self._have) != frame.seq_cnt or frame.total_bytes != self._total_bytes:
            raise CollectiveError(
                f"sent frames of two payloads of {self._total_bytes} and {frame.total_bytes} bytes under one name"
            )
        if self._have[frame.seq]:
            return False
        self._have[frame.seq] = 1
        self._left -= 1
        self.chunk(frame.seq, frame.offset, np.frombuffer(frame.data, np.uint8) if len(frame.data) else NOTHING)
        return True

    def has(self, first: int, count: int) -> bool:
        """Whether ``count`` chunks from number ``first`` on are here, as far as there are so many."""
        return self._have is not None and all(self._have[first : first + count])

    def begin(self, total_bytes: int, meta: str) -> None:
        """The first frame has come. Raises CollectiveError: this payload cannot be taken."""

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        """A new chunk; ``data`` lies in memory of DDS, or shared memory, until the last view on it is gone."""


class IntoMemory(Stream):
    """A payload that goes into memory of its size."""

    def __init__(self, memory: Bytes, arrived: Callable[[int], None] | None = None) -> None:
        """``arrived``: called with the number of each chunk that is in its place."""
        super().__init__(len(memory))
        self._memory = memory
        self._arrived = arrived

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        self._memory[offset : offset + len(data)] = data
        if self._arrived is not None:
            self._arrived(seq)


class Operation:
    """Base of all collectives. Subclasses say in :meth:`post` what they expect and send.

    Attributes:
        key: set by the engine. signature: text that is equal on all ranks which call the same.
        peers: ranks that it cannot do without. others: the other ranks, from the next one on, so that not all send to
            rank 0 first.
        rendezvous: decides which payloads wait for their receivers; the engine sets its limits.
        convert: makes the caller's value of the operation's result.
        settled: it has ended, and the functions to be called at the end have been.
        started_s, finished_s: ``time.perf_counter``.
        traffic: its payload; the engine gives it one that is part of the group's.
    """

    # Values that most never set.
    finished_s: float | None = None
    traffic = Traffic()  # of those that were never started, which send nothing
    repeats = 0
    value: Any = None
    convert: Callable[[Any], Any] | None = None
    error: BaseException | None = None
    settled = False
    label = ""  # for the log, where the name is none for people
    _link: PayloadTransport | None = None
    _numbers = 0
    _ended = False
    _is_calling_back = False
    _missing: tuple[int, ...] = ()  # of one that has failed

    def __init__(self, signature: str, rank: int, world: int, *, peers: Sequence[int] | None = None) -> None:
        self.signature = signature
        self.channel = channel_of(signature)
        self.rank = rank
        self.world = world
        self.others = _from_the_next_on(rank, world)
        self.peers = self.others if peers is None else tuple(other for other in peers if other != rank)
        self.rendezvous = RendezvousProtocol(self.others)
        self.key = OperationKey(0, 0, "")
        self.started_s = time.perf_counter()
        self.on_end: list[Callable[[Operation], None]] = []  # called once, on the thread that ends it
        self._lock = threading.RLock()  # an inline write may finish, and call back, before it returns
        self._streams: dict[tuple[int, int], Stream] = {}
        self._sendings: dict[int, Sending | None] = {}
        self._incomplete = 1  # streams and sendings to come, and one for post

    # For subclasses

    def post(self) -> None:
        """Say what is expected and send what can be sent at once."""
        raise NotImplementedError

    def result(self) -> Any:
        """The value, made when all is there."""
        return None

    def release(self) -> None:
        """Let go of the caller's memory: it has ended, and its handle may live on."""

    def expect(self, sender: int, part: int, stream: Stream) -> None:
        """Wait for a payload."""
        with self._lock:
            self._streams[sender, part] = stream
            self._incomplete += 1

    def send(
        self,
        to: int | None,
        part: int,
        payload: Bytes,
        *,
        meta: str = "",
        only: Sequence[int] | None = None,
        written: Callable[[int], None] | None = None,
        is_ready: bool = False,
    ) -> None:
        """Send a payload to a rank, or to all others.

        Args:
            is_ready: the receivers are known to have made the call.
        """
        outgoing = OutgoingPart(to, part, payload, self.signature, meta, only, written)
        send_rts = must_wait = False
        with self._lock:
            if self._ended:
                return
            number = self._numbers = self._numbers + 1
            self._incomplete += 1
            self._sendings[number] = None
            if not is_ready and self.rendezvous.must_wait(to, len(payload), only):
                must_wait = True
                send_rts = self.rendezvous.wait(to, partial(self._send_now, number, outgoing))
        if not must_wait:
            self._send_now(number, outgoing)
        elif send_rts:
            self.send(to, RTS, NOTHING)

    def _send_now(self, number: int, outgoing: OutgoingPart) -> None:
        if self._link is None or self._ended:
            return
        written = outgoing.written

        def on_written(seq: int) -> None:
            try:
                with self._lock:
                    if not self._ended and written is not None:
                        written(seq)
            except Exception as error:
                self.fail(error)

        def finished(outcome: int | Exception) -> None:
            if isinstance(outcome, Exception):
                self.fail(outcome)
                return
            with self._lock:
                if number in self._sendings:  # else :meth:`fail` has counted it
                    del self._sendings[number]
                    self.traffic.count_sent(outcome)
                self._complete_one()
            self._call_back_if_done()

        if written is not None:
            outgoing = outgoing._replace(written=on_written)
        sending = self._link.send(self.key, outgoing, finished)
        if sending is None:
            return
        with self._lock:
            if number in self._sendings:
                self._sendings[number] = sending
            has_failed = self.error is not None
        if has_failed:  # meanwhile
            self.traffic.count_sent(sending.cancel())

    def acknowledge(self, sender: int) -> None:
        """Confirm to a rank that all of its payload is here."""
        self.send(sender, ACK, NOTHING)

    def await_acks(self, ranks: Sequence[int]) -> None:
        """Wait until these ranks have acknowledged."""
        for rank in ranks:
            self.expect(rank, ACK, Stream(0))

    def stream_done(self, sender: int, part: int) -> None:
        """A payload is complete. Called with the lock held."""

    # For the engine and the handle

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    @property
    def called(self) -> set[int]:
        """Other ranks that have made the call, as far as anything of theirs for it has come."""
        return self.rendezvous.called

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which something is still outstanding."""
        with self._lock:
            outstanding = {sender for (sender, _), stream in self._streams.items() if not stream.complete}
            return tuple(sorted(outstanding.union(self.rendezvous.awaited))) or self._missing

    @property
    def is_sent(self) -> bool:
        """Whether all that it sends, as far as it can know by now, has left."""
        return not self._sendings

    def begin(self, link: PayloadTransport) -> None:
        """Set up and send, unless it has ended already."""
        self._link = link
        try:
            with self._lock:  # a thread that lets it fail meanwhile waits for what is sent at once
                if self._ended:  # before it was started: its buffers are the caller's again
                    return
                self.post()
                self._complete_one()
        except Exception as error:
            self.fail(error)
            return
        self._call_back_if_done()

    def feed(self, frame: Frame, part: int, signature: str, meta: str) -> None:
        """Take a frame that belongs to this collective. Frames that are not needed (any more) are counted only."""
        sender = frame.key.sender
        try:
            with self._lock:
                if self._ended:
                    return
                if signature != self.signature:
                    raise CollectiveError(f"calls {signature!r} where this rank calls {self.signature!r}")
                if sender not in self.rendezvous.called:
                    self.rendezvous.note_called(sender)
                if part == RTS:
                    self.send(sender, CTS, NOTHING)
                    return
                if part == CTS:
                    self.rendezvous.on_cts(sender)
                    return
                stream = self._streams.get((sender, part))
                if stream is None:
                    raise CollectiveError(f"sent part {part}, which {self.signature!r} does not have")
                new = not stream.complete and stream.feed(frame, meta)
                if not new:
                    self.repeats += 1
                    return
                self.traffic.count_received(len(frame.data))
                if stream.complete:
                    self.stream_done(sender, part)
                    self._complete_one()
        except CollectiveError as error:
            self.fail(CollectiveError(f"collective {self.key.name!r}: rank {sender} {error}"))
        except Exception as error:
            self.fail(error)
        except BaseException as error:  # a signal: what it has interrupted is not done again
            kind = type(error).__name__
            self.fail(CollectiveError(f"collective {self.key.name!r}: {kind} came while a frame was put in its place"))
            raise
        self._call_back_if_done()

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended. When this returns, its buffers are neither read nor written."""
        with self._lock:
            if self._ended:
                return
            self._missing = self.missing
            sendings = [sending for sending in self._sendings.values() if sending is not None]
            self.error = error
            self._end()
        for sending in sendings:  # without the lock: a write in progress may be about to report a chunk
            self.traffic.count_sent(sending.cancel())
        self._call_back()

    def _complete_one(self) -> None:
        """Count one stream or sending as complete, and end after the last one. With the lock held."""
        self._incomplete -= 1
        if self._incomplete == 0 and not self._ended:
            try:
                value = self.result()
                self.value = value if self.convert is None else self.convert(value)
            except Exception as error:
                self.error = error
            self._end()

    def _end(self) -> None:
        self._ended = True
        self.finished_s = time.perf_counter()
        self.release()
        self.rendezvous.end()
        self._streams, self._sendings = {}, {}  # and all buffers

    def _call_back_if_done(self) -> None:
        if self._ended:
            self._call_back()

    def _call_back(self) -> None:
        with self._lock:
            if self._is_calling_back:
                return
            self._is_calling_back = True
        while True:
            with self._lock:
                if not self.on_end:
                    self.settled = True
                    return
                callback = self.on_end.pop(0)
            callback(self)

    def when_settled(self, callback: Callable[[Operation], None], *, first: bool = False) -> None:
        """Call a function when this has ended, after all that were given before, or ``first``: on the thread that ends
        it, or here if it has ended already."""
        with self._lock:
            if not self.settled:
                self.on_end.insert(0 if first else len(self.on_end), callback)
                return
        callback(self)


class Credit:
    """Bytes that one rank may send ahead of the calls of the others: flow control of eager payloads. Thread-safe.

    Each sender has a share of half of what a receiver keeps, and counts what it has there: from a message on until the
    receiver is known to have made the call. When the share is used up, payloads of any size are announced first, so
    nothing is ever dropped for want of room. The other half is for these RTS frames, which have no payload, and for
    ranks that count otherwise.
    """

    def __init__(self, world: int, early_bytes: int) -> None:
        """``early_bytes``: what each rank keeps for calls that it has not made yet, from all others together."""
        self.share_bytes = early_bytes // (2 * max(1, world - 1))
        self._used = [0] * world
        self._lock = threading.Lock()

    def take(self, ranks: Sequence[int], size: int) -> bool:
        """Whether so many bytes may go to these ranks, all of them; then they count as used there."""
        used, room = self._used, self.share_bytes - size
        with self._lock:
            for rank in ranks:  # no any(): this is in the way of every small collective
                if used[rank] > room:
                    return False
            for rank in ranks:
                used[rank] += size
            return True

    def restore(self, rank: int, size: int) -> None:
        """Count bytes as unused again: the rank has made their call, or gets no more for it."""
        with self._lock:
            self._used[rank] -= size

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """Bytes in use, by rank."""
        return tuple(self._used)


class RendezvousProtocol:
    """The handshakes of one collective on one rank. Its operation holds its lock.

    Attributes:
        limit_bytes: payloads that are larger wait. credit: what may be sent ahead of ranks that have not called.
        called: ranks that have made the call, as far as anything of theirs for it has come.
    """

    __slots__ = ("_ahead", "_announced", "_cts", "_others", "_waiting", "called", "credit", "limit_bytes")

    def __init__(self, others: tuple[int, ...]) -> None:
        self._others = others
        self.limit_bytes = RENDEZVOUS_BYTES
        self.credit: Credit | None = None
        self.called: set[int] = set()
        self._cts: set[int] = set()  # ranks that have confirmed their call
        self._announced: set[int | None] = set()  # receivers that have an RTS
        self._ahead: dict[int, int] = {}  # credit used, by rank that has not called yet
        self._waiting: list[tuple[int | None, Callable[[], None]]] = []

    def must_wait(self, to: int | None, size: int, only: Sequence[int] | None) -> bool:
        """Whether a payload waits for the call of its receivers. If not, it counts as sent.

        Args:
            to: the receiver, None: all others. size: of the payload, bytes. only: numbers of its chunks, None: all.
        """
        if not size or self._is_clear(to):
            return False
        if size > self.limit_bytes or to in self._announced:
            return True
        credit, called = self.credit, self.called
        ranks = [rank for rank in (self._others if to is None else (to,)) if rank not in called]
        if credit is None or not ranks:
            return False
        chunks = chunk_count(size) if only is None else len(only)
        cost = min(size, chunks * CHUNK_BYTES) + chunks * FRAME_BYTES
        if not credit.take(ranks, cost):
            return True
        for rank in ranks:
            self._ahead[rank] = self._ahead.get(rank, 0) + cost
        return False

    def wait(self, to: int | None, send: Callable[[], None]) -> bool:
        """Have ``send`` called when all receivers are ready. Returns whether they need an RTS."""
        self._waiting.append((to, send))
        is_new = to not in self._announced
        self._announced.add(to)
        return is_new

    def note_called(self, rank: int) -> None:
        """A rank has made the call: it keeps nothing of this one any more that it was sent ahead."""
        self.called.add(rank)
        ahead = self._ahead.pop(rank, 0)
        if ahead and self.credit is not None:
            self.credit.restore(rank, ahead)

    def on_cts(self, rank: int) -> None:
        """A rank is ready: send what has waited for it last."""
        self._cts.add(rank)
        waiting, self._waiting = self._waiting, []
        self._waiting = [(to, send) for to, send in waiting if not self._is_clear(to)]
        for to, send in waiting:
            if self._is_clear(to):
                send()

    @property
    def awaited(self) -> Iterable[int]:
        """Ranks that a payload waits for."""
        return {rank for to, _ in self._waiting for rank in (self._others if to is None else (to,))} - self._cts

    def end(self) -> None:
        """The collective has ended: nothing waits any more, and nothing of it is used that was sent ahead."""
        self._waiting = []
        for rank in tuple(self._ahead):
            self.note_called(rank)

    def _is_clear(self, to: int | None) -> bool:
        return to in self._cts if to is not None else len(self._cts) == len(self._others)


@lru_cache(maxsize=1024)
def _from_the_next_on(rank: int, world: int) -> tuple[int, ...]:
    return tuple((rank + step) % world for step in range(1, world))
