"""Brings frames and collectives together: by group, round, name and call, never by the order of the calls.

A frame that comes before the local call is kept, within a bound and for a limited time (MPI calls this the queue of
unexpected messages). The engine knows no event loop and no DDS: frames come in through :meth:`Engine.receive`, on
whatever thread, and go out through a :class:`gradbus.runtime.collectives.operation.PayloadTransport`.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from gradbus.runtime import forks
from gradbus.runtime.collectives.operation import (
    RENDEZVOUS_BYTES,
    Credit,
    Operation,
    OperationKey,
    PayloadTransport,
    channel_of,
)
from gradbus.runtime.errors import CollectiveError, PeerLost
from gradbus.runtime.traffic import Traffic
from gradbus.runtime.wire.frames import Flags, Frame

MAX_PENDING = 65_536  # collectives of one group, on all ranks but one together: that one may keep an RTS for each
MIN_PENDING = 4096  # on one rank, whatever the world
MAX_NAME_BYTES = 120  # signature and meta share the frame's name field
MAX_NAME_BYTES_ON_WIRE = 244  # the most that is 4 beyond a multiple of 16 and fits a frame
MAX_EARLY_FRAMES = 131_072  # half of them, at the default size, may be eager payloads; the others are RTS frames
_MAX_REFUSED = 4096  # keys remembered of which frames were dropped
MAX_COUNTED_NAMES = 65_536  # names whose calls are counted, of what all ranks call
MIN_PAIR_NAMES = 4096  # of messages from one rank to another, whatever the world

_SHARED = int(Flags.SHARED)

_Counts = OrderedDict[tuple[int, str], int]  # calls by round and name


@lru_cache(maxsize=1024)
def wire_name(name: str, signature: str, meta: str) -> str:
    """The name field of a frame: the three parts, separated and padded by NUL.

    Padded to 4 beyond a multiple of 16. Cyclone keeps what is behind the encapsulation at 8 beyond a multiple of 16 in
    memory; behind the length and the header, 84 bytes, a payload that is used there then lies at a multiple of 16,
    where arithmetic is fast.
    """
    text = f"{name}\0{signature}\0{meta}"
    size = len(text.encode())
    if size > MAX_NAME_BYTES_ON_WIRE:
        raise CollectiveError(
            f"{name!r}: name, signature and shape have {size} bytes together, at most {MAX_NAME_BYTES_ON_WIRE} can be "
            f"sent: {signature} {meta}. Use a shorter name, or reshape the tensor to fewer dimensions"
        )
    return text + "\0" * ((4 - size) % 16)


@lru_cache(maxsize=1024)
def parts_of(wire_name: str) -> tuple[str, str, str, str]:
    """Name, signature, meta and channel of a name field. Calls that are repeated have equal ones."""
    name, _, rest = wire_name.partition("\0")
    signature, _, rest = rest.partition("\0")
    return name, signature, rest.partition("\0")[0], channel_of(signature)


class ProgressEngine:
    """How incoming frames are handled while a thread waits for a collective. By default by the threads of the bus
    alone, so there is nothing to do."""

    def poll_inline(self, done: Callable[[], bool], until_s: float) -> None:
        """Handle what comes on this thread, which would only wait, until ``done()`` or that time
        (``time.monotonic``). May return early."""

    def poll_briefly(self, done: Callable[[], bool]) -> None:
        """The same on the thread of an event loop, which must not sleep: for half a millisecond at most."""

    def wake_inline(self) -> None:
        """Wake the thread that waits in :meth:`poll_inline`: something has ended on this thread."""

    def wake_io_thread(self) -> None:
        """Have the threads of the bus handle frames now: something goes on that no thread polls for."""


class _State(enum.Enum):
    """Holds of a collective that was called here where its frames go, and what a rank that leaves means to it."""

    STARTING = enum.auto()  # it cannot take frames yet: they are kept
    FEEDING = enum.auto()  # it gets the early frames; others go straight to it
    RUNNING = enum.auto()  # all early frames were fed: what a rank that has left still has to send will not come


@dataclass(slots=True, eq=False)
class _Call:
    operation: Operation
    state: _State = _State.STARTING


class Engine:
    """The collectives of one group on one rank. Every method may be called from any thread.

    Attributes:
        dropped: frames that were not used, by reason. traffic: payload of its collectives.
        progress: handles frames while a thread waits.
        rendezvous_bytes: payloads of more bytes are not sent before their reader has called.
        resolve_shared: finds the data of a frame that only has descriptors: a frame for each piece that is there.
        on_probe: gets frames without a name, which the forming group sends; on any thread.
        on_change: called, on any thread and with no lock held, when a frame came without a call, a rank is gone, or
            the engine is closed.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        world: int,
        link: PayloadTransport,
        *,
        early_bytes: int,
        early_age_s: float,
        traffic: Traffic | None = None,
    ) -> None:
        """
        Args:
            group: its name, for errors.
            link: the way out.
            early_bytes: payload that is kept at most for collectives that have not been called here yet.
            early_age_s: for how long.
            traffic: of the bus, which includes this group's. None: there is no bus.
        """
        self.group = group
        self.rank = rank
        self.world = world
        self._link = link
        self._lock = threading.Lock()
        self._unexpected = UnexpectedQueue(early_bytes, early_age_s)
        # So that some collectives may be called by all others before they are called here.
        self.rendezvous_bytes = min(RENDEZVOUS_BYTES, early_bytes // (4 * world))
        self.credit = Credit(world, early_bytes)
        self._calls: dict[OperationKey, _Call] = {}
        # By channel, each with a limit of its own: what is forgotten must be the same at both ends of a channel.
        self._counts: dict[str, _Counts] = {}
        self._max_pair_names = max(MIN_PAIR_NAMES, MAX_COUNTED_NAMES // (2 * world))
        self._lost: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._closed: BaseException | None = None
        self._made_in = forks.generation
        self._group_id = 0
        self._incarnations: dict[int, int] = {}
        self.dropped: Counter[str] = Counter()
        self.traffic = Traffic(traffic)
        self.progress = ProgressEngine()
        self.resolve_shared: Callable[[Frame], list[Frame]] = no_shared_memory
        self.on_probe: Callable[[Frame], None] | None = None
        self.on_change: Callable[[], None] | None = None

    def set_members(self, group_id: int, incarnations: Mapping[int, int]) -> None:
        """Take frames of these starts of the ranks from now on, and of no others."""
        with self._lock:
            self._group_id = group_id
            self._incarnations = dict(incarnations)
            self._unexpected.clear()

    @property
    def group_id(self) -> int:
        """Hash over the incarnations of the members, which identifies this forming of the group; 0 until all are
        known."""
        return self._group_id

    @property
    def pending(self) -> int:
        """Number of collectives that have not ended."""
        return len(self._calls)

    @property
    def waiting(self) -> list[Operation]:
        """The collectives that have not ended."""
        with self._lock:
            return [call.operation for call in self._calls.values()]

    @property
    def early_bytes(self) -> int:
        """Bytes of payload that wait for a local call."""
        return self._unexpected.bytes

    @property
    def gone(self) -> dict[int, str]:
        """Ranks that have died or left, and the reason."""
        with self._lock:
            return {**self._left, **self._lost}

    @property
    def dead(self) -> dict[int, str]:
        """Ranks that did not leave gracefully, and the reason."""
        with self._lock:
            return dict(self._lost)

    @property
    def closed(self) -> BaseException | None:
        """The error that ended everything, or None."""
        return self._closed

    def has_come(self, name: str, round_id: int, channel: str = "") -> bool:
        """Whether a frame is here for the next call of this name, round and channel."""
        with self._lock:
            call = self._count_of(round_id, name, channel)
            return OperationKey(round_id, call, name, channel) in self._unexpected

    # Calls

    def check_process(self) -> None:
        """Raises ForkedProcess: this process is a child of the one that is in the group."""
        if self._made_in != forks.generation:
            forks.check(self._made_in, f"group {self.group!r}")

    def start(self, operation: Operation, name: str, round_id: int) -> None:
        """Start a collective. What else prevents it is raised when it is awaited.

        Raises:
            ValueError: name or round cannot be sent.
            ForkedProcess: this process is a child of the one that is in the group.
        """
        self.check_process()
        size = len(name.encode())
        if not 0 < size <= MAX_NAME_BYTES or "\0" in name:
            raise ValueError(f"a name has 1 to {MAX_NAME_BYTES} bytes and no NUL, got {size}: {name[:60]!r}")
        if not 0 <= round_id <= 0xFFFF_FFFF:
            raise ValueError(f"round_id must be within 0 .. 2**32 - 1, got {round_id}")
        operation.rendezvous.limit_bytes = min(operation.rendezvous.limit_bytes, self.rendezvous_bytes)
        operation.rendezvous.credit = self.credit
        operation.traffic = Traffic(self.traffic)
        call = _Call(operation)
        with self._lock:
            error = self._error_for(operation) or self._limit_error()
            key = operation.key = self._next_key(round_id, name, operation.channel)
            if error is None and self._unexpected.is_refused(key):
                self._unexpected.take(key)
                error = _dropped_error(name)
            if error is None:
                self._calls[key] = call
        if error is not None:
            operation.fail(error)
            return
        operation.when_settled(self._remove, first=True)  # before whoever awaits it goes on
        operation.begin(self._link)
        with self._lock:
            refused = self._unexpected.is_refused(key)
            early = self._unexpected.take(key)
            call.state = _State.FEEDING
            if not (early or refused or self._left or self._lost or self._closed):
                call.state = _State.RUNNING
                return
        for message in early:
            operation.feed(message.frame, message.frame.key.part, message.signature, message.meta)
        with self._lock:
            call.state = _State.RUNNING
            left = dict(self._left)
        missing = [rank for rank in operation.missing if rank in left]  # what they had sent is in by now
        with self._lock:  # a rank may have been lost in between
            error = _dropped_error(name) if refused else self._error_for(operation, missing)
        if error is not None:
            operation.fail(error)

    def _error_for(self, operation: Operation, missing: Sequence[int] = ()) -> BaseException | None:
        """The reason why it cannot be done, or None. ``missing``: ranks of which something is outstanding although all
        early frames were fed; of those that have left gracefully nothing more will come."""
        if self._closed is not None:
            return self._closed
        if not self._left and not self._lost:
            return None
        gone = {rank: why for rank, why in self._left.items() if rank in missing}
        gone |= {rank: why for rank, why in self._lost.items() if rank in operation.peers}
        return PeerLost(self.group, gone) if gone else None

    def _limit_error(self) -> BaseException | None:
        most = max(MIN_PENDING, MAX_PENDING // max(1, self.world - 1))
        if len(self._calls) >= most:
            return CollectiveError(
                f"{most} collectives of group {self.group!r} are pending; await some before starting more"
            )
        return None

    def _next_key(self, round_id: int, name: str, channel: str) -> OperationKey:
        counts = self._counts.setdefault(channel, OrderedDict())
        call = counts.pop((round_id, name), 0)
        counts[round_id, name] = call + 1
        if len(counts) > (self._max_pair_names if channel else MAX_COUNTED_NAMES):
            counts.popitem(last=False)
        return OperationKey(round_id, call, name, channel)

    def _count_of(self, round_id: int, name: str, channel: str) -> int:
        counts = self._counts.get(channel)
        return 0 if counts is None else counts.get((round_id, name), 0)

    def _remove(self, operation: Operation) -> None:
        with self._lock:
            self._calls.pop(operation.key, None)
            if operation.repeats:
                self.dropped["repeat"] += operation.repeats

    # Frames

    def receive(self, frame: Frame) -> None:
        """Take a frame that has come in."""
        key = frame.key
        if not key.name:
            if self.on_probe is not None:
                self.on_probe(frame)
            return
        with self._lock:
            if key.job != self._group_id or not self._group_id:
                self.dropped["foreign group"] += 1
                return
            if frame.world != self.world or self._incarnations.get(key.sender) != key.incarnation:
                self.dropped["foreign sender"] += 1
                return
            pieces = [frame]
            if frame.flags & _SHARED:
                pieces = self.resolve_shared(frame)
                if not pieces:
                    self.dropped["shared memory"] += 1
                    return
            name, signature, meta, channel = parts_of(key.name)
            wanted = OperationKey(key.round_id, key.transfer, name, channel)
            call = self._calls.get(wanted)
            if call is None or call.state is _State.STARTING:
                for piece in pieces:
                    self._keep_unexpected(wanted, UnexpectedFrame(piece, signature, meta))
                call = None
        if call is None:
            self._notify()
            return
        while pieces:  # each is let go of, and its place in memory free, before the next one
            call.operation.feed(pieces.pop(0), key.part, signature, meta)

    def _notify(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _keep_unexpected(self, key: OperationKey, message: UnexpectedFrame) -> None:
        if self._closed is not None:
            self.dropped["closed"] += 1
        elif key not in self._calls and key.call < self._count_of(key.round_id, key.name, key.channel):
            self.dropped["stale"] += 1
        else:
            dropped = self._unexpected.keep(key, message)
            if dropped:
                self.dropped["early"] += dropped

    # Ends

    def lose(self, rank: int, why: str) -> None:
        """A rank has died: end the pending collectives that need it, and start none with it."""
        with self._lock:
            self._lost.setdefault(rank, why)
            pending = [call.operation for call in self._calls.values() if rank in call.operation.peers]
            lost = dict(self._lost)
        for operation in pending:
            operation.fail(PeerLost(self.group, lost))
        self._notify()

    def leave(self, rank: int, why: str) -> None:
        """A rank has left gracefully, and all that it has sent is here: end the collectives that miss something."""
        with self._lock:
            self._left.setdefault(rank, why)
            pending = [call.operation for call in self._calls.values() if call.state is _State.RUNNING]
        for operation in pending:
            if rank in operation.missing:
                operation.fail(PeerLost(self.group, {rank: why}))
        self._notify()

    def close(self, error: BaseException) -> None:
        """End everything with this error, and take nothing more."""
        with self._lock:
            self._closed = error
            self._unexpected.clear()
        for operation in self.waiting:
            operation.fail(error)
        self._notify()


def no_shared_memory(frame: Frame) -> list[Frame]:
    """Nothing is where the frame says."""
    return []


def _dropped_error(name: str) -> CollectiveError:
    return CollectiveError(
        f"frames for {name!r} came before this call, when no room was left for such frames, and were dropped. Let the "
        f"ranks wait for each other more often, or raise early_bytes"
    )


@dataclass(slots=True)
class UnexpectedFrame:
    """A frame, with signature and meta of its name field."""

    frame: Frame
    signature: str
    meta: str


@dataclass(slots=True)
class _UnexpectedMessage:
    since_s: float
    frames: list[UnexpectedFrame] = field(default_factory=list)


class UnexpectedQueue:
    """Frames that came before the local call. Not thread-safe: the engine holds its lock.

    Attributes:
        bytes: of payload that is kept.
    """

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        """
        Args:
            max_bytes: of payload, of all frames together.
            max_age_s: what is older is of no use to any rank: its senders have given up.
        """
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._messages: OrderedDict[OperationKey, _UnexpectedMessage] = OrderedDict()
        self._refused: OrderedDict[OperationKey, None] = OrderedDict()
        self._num_frames = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self._num_frames

    def __contains__(self, key: OperationKey) -> bool:
        return key in self._messages

    def keep(self, key: OperationKey, frame: UnexpectedFrame) -> int:
        """Keep a frame, if need be in the place of what has become too old. Returns how many frames were dropped: that
        one, if there is no room, and the old ones."""
        size, dropped = len(frame.frame.data), 0
        if not self._fits(size):
            dropped = self._drop_old()
            if not self._fits(size):
                self._refuse(key)
                return dropped + 1
        message = self._messages.get(key)
        if message is None:
            message = self._messages[key] = _UnexpectedMessage(time.monotonic())
        message.frames.append(frame)
        self.bytes += size
        self._num_frames += 1
        return dropped

    def take(self, key: OperationKey) -> list[UnexpectedFrame]:
        """The frames of a collective, which are then no longer kept."""
        message = self._messages.pop(key, None)
        return [] if message is None else self._remove(message)

    def is_refused(self, key: OperationKey) -> bool:
        """Whether frames of a collective had to be dropped. True once."""
        return bool(self._refused) and self._refused.pop(key, False) is None

    def clear(self) -> None:
        """Drop everything."""
        self._messages.clear()
        self._refused.clear()
        self.bytes = self._num_frames = 0

    def _refuse(self, key: OperationKey) -> None:
        self._refused[key] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def _fits(self, size: int) -> bool:
        return self.bytes + size <= self._max_bytes and self._num_frames < MAX_EARLY_FRAMES

    def _drop_old(self) -> int:
        limit_s, dropped = time.monotonic() - self._max_age_s, 0
        while self._messages and next(iter(self._messages.values())).since_s < limit_s:
            key, message = self._messages.popitem(last=False)
            dropped += len(self._remove(message))
            self._refuse(key)
        return dropped

    def _remove(self, message: _UnexpectedMessage) -> list[UnexpectedFrame]:
        self._num_frames -= len(message.frames)
        self.bytes -= sum(len(kept.frame.data) for kept in message.frames)
        return message.frames
