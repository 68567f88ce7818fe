"""One collective on one rank: what it waits for, what it sends, how it ends. It knows neither DDS nor the event loop.

Any thread may start it, feed it and end it: its state is behind one lock, which is held while a chunk is put in its
place (some hundred microseconds for 1 MiB) and what follows from that is sent (10 ms, if DDS is slow to take it). It
ends when everything it waits for has come *and* everything it sends has been written, so whoever awaits it may use the
buffers again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradbus.runtime.collectives.streams import Signal, Stream
from gradbus.runtime.collectives.tensors import Bytes
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire.frames import CHUNK_BYTES, Frame, chunk_count

# Parts of empty messages about the payloads of a collective.
ACK = 0xFFFF  # your payload is here, whole
CTS = 0xFFFE  # I have called this collective, too: send
RTS = 0xFFFD  # I have something large for you

# What is larger waits until its receiver has made the call, who else would have to keep it without a place for it. That
# costs one round trip, a small part of the time that so many bytes take.
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
    """The channel of an operation with this signature: that of ``send FROM TO`` says which."""
    return signature if signature.startswith("send ") else ""


class Sending(Protocol):
    """A payload on its way out."""

    def cancel(self) -> None:
        """Send no more of it. When this returns, its memory is no longer read."""


Finished = Callable[[int | Exception], None]


class Transport(Protocol):
    """The way out to the other ranks."""

    def send(
        self, key: OperationKey, to: int | None, part: int, payload: Bytes, *, signature: str, meta: str = "",
        only: Sequence[int] | None = None, written: Callable[[int], None] | None = None, finished: Finished,
    ) -> Sending | None:  # fmt: skip
        """Send a payload to one rank, or (``to`` None) to all others.

        Args:
            part: number of the payload within the collective.
            only: numbers of the chunks to send; None: all.
            written: called with the number of each chunk when its memory is no longer needed.
            finished: called once, on any thread and perhaps before this returns, with the bytes or the error.

        Returns:
            What is still to be sent, or None if that is nothing.
        """


class Credit:
    """Bytes that one rank may send ahead of the calls of the others: flow control of the eager protocol. Thread-safe.

    A receiver keeps what arrives before its call, within a bound. Each sender has a share of half of that bound, and
    counts what it has there: from a message on until the receiver is known to have made the call. When the share is
    used up, messages of any size are announced first and sent when they are requested (rendezvous), so nothing is ever
    dropped for want of room. The other half is for these requests, which have no payload, and for ranks that count
    otherwise.
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


class Operation:
    """Base of all collectives. Subclasses say in :meth:`set_up` what they expect and send.

    Attributes:
        key: set by the engine. signature: what all ranks must agree on, in words.
        called: ranks that have made the call, too, as far as anything of theirs for it has come.
        peers: ranks that it cannot do without.
        started_s, finished_s: ``time.perf_counter``. sent_bytes, received_bytes: of payload.
    """

    # What most never set.
    finished_s: float | None = None
    sent_bytes = 0
    received_bytes = 0
    repeats = 0
    rendezvous_bytes = RENDEZVOUS_BYTES  # what is larger waits for its receivers; the engine may set less
    credit: Credit | None = None  # what may be sent ahead of ranks that have not called; the engine has it
    value: Any = None
    convert: Callable[[Any], Any] | None = None  # from what the operation makes to what the caller gets
    error: BaseException | None = None
    _link: Transport | None = None
    _numbers = 0
    _ended = False
    _is_calling_back = False
    settled = False  # it has ended, and those that were to be called at the end have been
    _missing: tuple[int, ...] = ()  # of one that has failed

    def __init__(self, signature: str, rank: int, world: int, *, peers: Sequence[int] | None = None) -> None:
        self.signature = signature
        self.channel = channel_of(signature)
        self.rank = rank
        self.world = world
        self.peers = _all_but(rank, world) if peers is None else tuple(other for other in peers if other != rank)
        self.key = OperationKey(0, 0, "")
        self.started_s = time.perf_counter()
        self.on_end: list[Callable[[Operation], None]] = []  # called once, on the thread that ends it
        self._lock = threading.RLock()  # an inline write may finish, and call back, before it returns
        self._streams: dict[tuple[int, int], Stream] = {}
        self._sendings: dict[int, Sending | None] = {}
        self.called: set[int] = set()
        self._cts: set[int] = set()  # ranks that have made the call, as far as they were asked
        self._rts_sent: set[int | None] = set()
        self._eager_bytes: dict[int, int] = {}  # credit used, by rank that has not called yet
        self._awaiting_cts: list[tuple[int | None, Callable[[], None]]] = []  # until receivers have called
        self._incomplete = 1  # streams and sendings to come, and one for set_up

    # For subclasses

    def set_up(self) -> None:
        """Say what is expected and send what can be sent at once."""
        raise NotImplementedError

    def result(self) -> Any:
        """The value, made when all is there."""
        return None

    def release(self) -> None:
        """Let go of the caller's memory: it has ended, and its handle may live on."""

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks, from the next one on: so that not all send to rank 0 first."""
        return _from_the_next_on(self.rank, self.world)

    def expect(self, sender: int, part: int, stream: Stream) -> None:
        """Wait for a payload."""
        with self._lock:
            self._streams[sender, part] = stream
            self._incomplete += 1

    def send(
        self, to: int | None, part: int, payload: Bytes, *, meta: str = "", only: Sequence[int] | None = None,
        written: Callable[[int], None] | None = None, is_ready: bool = False,
    ) -> None:  # fmt: skip
        """Send a payload to a rank, or to all others.

        Args:
            is_ready: the receivers are known to have made the call.
        """
        with self._lock:
            if self._ended:
                return
            number = self._numbers = self._numbers + 1
            self._incomplete += 1
            self._sendings[number] = None
            must_wait = not is_ready and self._needs_rendezvous(to, payload, only)
            if must_wait:
                self._awaiting_cts.append((to, partial(self._send_now, number, to, part, payload, meta, only, written)))
                send_rts = to not in self._rts_sent
                self._rts_sent.add(to)
        if not must_wait:
            self._send_now(number, to, part, payload, meta, only, written)
        elif send_rts:
            self.send(to, RTS, _EMPTY)

    def _send_now(
        self, number: int, to: int | None, part: int, payload: Bytes, meta: str, only: Sequence[int] | None,
        written: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        if self._link is None or self._ended:
            return

        def on_written(seq: int) -> None:
            self._guarded(written, seq)

        def finished(outcome: int | Exception) -> None:
            if isinstance(outcome, Exception):
                self.fail(outcome)
                return
            with self._lock:
                self._sendings.pop(number, None)
                self.sent_bytes += outcome
                self._complete_one()
            self._call_back_if_done()

        sending = self._link.send(
            self.key, to, part, payload, signature=self.signature, meta=meta, only=only,
            written=None if written is None else on_written, finished=finished,
        )  # fmt: skip
        cancel = None
        with self._lock:
            if number in self._sendings and sending is not None:
                self._sendings[number] = sending
            if self._failed():
                cancel = sending
        if cancel is not None:  # it failed meanwhile
            cancel.cancel()

    def _needs_rendezvous(self, to: int | None, payload: Bytes, only: Sequence[int] | None) -> bool:
        """Whether a payload waits until its receivers have called: it is large, or so much is there already that they
        keep for calls to come. With the lock held."""
        size = len(payload)
        if not size or self._has_cts(to):
            return False
        if size > self.rendezvous_bytes or to in self._rts_sent:
            return True
        credit, called = self.credit, self.called
        ranks = [rank for rank in (self.others if to is None else (to,)) if rank not in called]
        if credit is None or not ranks:
            return False
        chunks = chunk_count(size) if only is None else len(only)
        cost = min(size, chunks * CHUNK_BYTES) + chunks * FRAME_BYTES
        if not credit.take(ranks, cost):
            return True
        for rank in ranks:
            self._eager_bytes[rank] = self._eager_bytes.get(rank, 0) + cost
        return False

    def _note_called(self, sender: int) -> None:
        """A rank has made the call. With the lock held."""
        self.called.add(sender)
        self._restore_credit(sender)

    def _restore_credit(self, rank: int) -> None:
        """Nothing that this rank has sent ahead of another one is kept there any more, or it will not be used."""
        ahead = self._eager_bytes.pop(rank, 0)
        if ahead and self.credit is not None:
            self.credit.restore(rank, ahead)

    def _has_cts(self, to: int | None) -> bool:
        return to in self._cts if to is not None else len(self._cts) == self.world - 1

    def _on_cts(self, sender: int) -> None:
        """A rank has made the call. With the lock held."""
        self._cts.add(sender)
        waiting, self._awaiting_cts = self._awaiting_cts, []
        self._awaiting_cts = [(to, go) for to, go in waiting if not self._has_cts(to)]
        for to, go in waiting:
            if self._has_cts(to):
                go()

    def acknowledge(self, sender: int) -> None:
        """Tell a rank that all of its payload is here."""
        self.send(sender, ACK, _EMPTY)

    def await_acks(self, ranks: Sequence[int]) -> None:
        """Wait until these ranks have acknowledged."""
        for rank in ranks:
            self.expect(rank, ACK, Signal())

    def stream_done(self, sender: int, part: int) -> None:
        """A payload is complete. Called with the lock held."""

    # For the engine and the handle

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which something is still outstanding."""
        with self._lock:
            outstanding = {sender for (sender, _), stream in self._streams.items() if not stream.complete}
            for to, _ in self._awaiting_cts:  # they have not confirmed their call
                outstanding |= {*(self.others if to is None else [to])} - self._cts
            return tuple(sorted(outstanding)) or self._missing

    def begin(self, link: Transport) -> None:
        """Set up and send."""
        self._link = link
        try:
            with self._lock:  # who lets it fail meanwhile waits for what is sent at once
                self.set_up()
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
                if sender not in self.called:
                    self._note_called(sender)
                if part == RTS:
                    self.send(sender, CTS, _EMPTY)
                    return
                if part == CTS:
                    self._on_cts(sender)
                    return
                stream = self._streams.get((sender, part))
                if stream is None:
                    raise CollectiveError(f"sent part {part}, which nobody expects of it in {self.signature!r}")
                new = not stream.complete and stream.feed(frame, meta)
                if not new:
                    self.repeats += 1
                    return
                self.received_bytes += len(frame.data)
                if stream.complete:
                    self.stream_done(sender, part)
                    self._complete_one()
        except CollectiveError as error:
            self.fail(CollectiveError(f"collective {self.key.name!r}: rank {sender} {error}"))
        except Exception as error:
            self.fail(error)
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
            sending.cancel()
        self._call_back()

    def _guarded(self, function: Callable[[int], None] | None, seq: int) -> None:
        if function is None:
            return
        try:
            with self._lock:
                if not self._ended:
                    function(seq)
        except Exception as error:
            self.fail(error)

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

    def _failed(self) -> bool:
        return self.error is not None

    def _end(self) -> None:
        self._ended = True
        self.finished_s = time.perf_counter()
        self.release()
        for rank in tuple(self._eager_bytes):
            self._restore_credit(rank)
        self._streams, self._sendings, self._awaiting_cts = {}, {}, []  # and all buffers

    def _call_back_if_done(self) -> None:
        if self.done:
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

    def when_settled(self, callback: Callable[[Operation], None]) -> None:
        """Call it when this has ended, after all that were given before: on the thread that ends it, or here if it has
        ended already."""
        with self._lock:
            if not self.settled:
                self.on_end.append(callback)
                return
        callback(self)

    @property
    def is_sent(self) -> bool:
        """Whether all that it sends, as far as it can know by now, has left."""
        return not self._sendings


@lru_cache(maxsize=1024)
def _all_but(rank: int, world: int) -> tuple[int, ...]:
    return tuple(other for other in range(world) if other != rank)


@lru_cache(maxsize=1024)
def _from_the_next_on(rank: int, world: int) -> tuple[int, ...]:
    return tuple((rank + step) % world for step in range(1, world))


_EMPTY: Bytes = np.empty(0, np.uint8)
