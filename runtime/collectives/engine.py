"""Brings frames and collectives together: by group, round, name and call, never by the order of the calls.

The engine knows no event loop and no DDS: frames come in through :meth:`Engine.receive`, on whatever thread, and go out
through a :class:`gradbus.runtime.collectives.operation.Transport`.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from gradbus.runtime import forks
from gradbus.runtime.collectives.operation import (
    RENDEZVOUS_BYTES,
    Credit,
    Operation,
    OperationKey,
    Transport,
    channel_of,
)
from gradbus.runtime.collectives.unexpected import UnexpectedFrame, UnexpectedQueue
from gradbus.runtime.errors import CollectiveError, PeerLost
from gradbus.runtime.wire.frames import Flags, Frame

MAX_PENDING = 65_536  # collectives of one group, on all ranks but one together: that one may keep an offer for each
MIN_PENDING = 4096  # on one rank, whatever the world
MAX_NAME_BYTES = 120  # signature and meta share the frame's name field
MAX_NAME_BYTES_ON_WIRE = 244  # the most that is 4 beyond a multiple of 16 and fits a frame
_MAX_NAMES = 65_536  # names whose calls are counted

_SHARED = int(Flags.SHARED)

_Call = tuple[int, str, str]  # round, name, channel


@lru_cache(maxsize=1024)
def wire_name(name: str, signature: str, meta: str) -> str:
    """What a frame carries as its name: the three parts, separated and padded by NUL.

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
def _parts_of(wire_name: str) -> tuple[str, str, str, str]:
    """Name, signature, meta and channel, from what :func:`wire_name` made. Calls that are repeated say the same."""
    name, _, rest = wire_name.partition("\0")
    signature, _, rest = rest.partition("\0")
    return name, signature, rest.partition("\0")[0], channel_of(signature)


class ProgressEngine(Protocol):
    """How what comes in is dealt with while somebody waits."""

    def pump(self, done: Callable[[], bool], until_s: float) -> None:
        """On a thread that would only wait: deal with what comes, until ``done()`` or that time (``time.monotonic``).
        May return early."""

    def spin(self, done: Callable[[], bool]) -> None:
        """The same on the thread of an event loop, which must not sleep: for half a millisecond at most."""

    def nudge(self) -> None:
        """Something has ended, on this thread; another one may be waiting for it in :meth:`pump`."""

    def resume(self) -> None:
        """Something goes on that nobody waits for in :meth:`pump`: the threads of the bus are needed now."""


class _NoProgress:
    def pump(self, done: Callable[[], bool], until_s: float) -> None:
        pass

    def spin(self, done: Callable[[], bool]) -> None:
        pass

    def nudge(self) -> None:
        pass

    def resume(self) -> None:
        pass


class Engine:
    """The collectives of one group on one rank. Every method may be called from any thread."""

    def __init__(
        self, group: str, rank: int, world: int, link: Transport, *, early_bytes: int, early_age_s: float
    ) -> None:
        """
        Args:
            group: its name, for errors.
            link: the way out.
            early_bytes: payload that is kept at most for collectives that have not been called here yet.
            early_age_s: for how long.
        """
        self.group = group
        self.rank = rank
        self.world = world
        self._link = link
        self._lock = threading.Lock()
        self._unexpected = UnexpectedQueue(early_bytes, early_age_s)
        # So that some collectives may be called by all others before they are called here.
        self._rendezvous_bytes = min(RENDEZVOUS_BYTES, early_bytes // (4 * world))
        self.credit = Credit(world, early_bytes)
        self._pending: dict[OperationKey, Operation] = {}
        self._starting: set[OperationKey] = set()  # called, but not yet able to take frames
        self._feeding: set[OperationKey] = set()  # getting what came early
        self._calls: OrderedDict[_Call, int] = OrderedDict()  # how often each round and name was called
        self._lost: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._closed: BaseException | None = None
        self._made_in = forks.generation
        self._group_id = 0
        self._incarnations: dict[int, int] = {}
        self.dropped: Counter[str] = Counter()
        self.bytes_in = 0
        self.bytes_out = 0
        self.progress: ProgressEngine = _NoProgress()
        # Finds the data of a frame that only says where it lies: a frame for each piece that is there.
        self.resolve_shared: Callable[[Frame], list[Frame]] = no_shared_memory
        # Called, on any thread and with no lock held, when something came that nobody has called for, a rank is gone,
        # or the engine is closed.
        self.on_change: Callable[[], None] | None = None

    def admit(self, group_id: int, incarnations: Mapping[int, int]) -> None:
        """Take frames of these starts of the ranks from now on, and of no others."""
        with self._lock:
            self._group_id = group_id
            self._incarnations = dict(incarnations)
            self._unexpected.clear()

    @property
    def group_id(self) -> int:
        """Which forming of the group: a hash over its members' incarnations, 0 until all are known."""
        return self._group_id

    @property
    def pending(self) -> int:
        """Collectives that have not ended."""
        return len(self._pending)

    @property
    def waiting(self) -> list[Operation]:
        """Those themselves."""
        with self._lock:
            return list(self._pending.values())

    @property
    def early_bytes(self) -> int:
        """Payload that waits for a local call."""
        return self._unexpected.bytes

    @property
    def gone(self) -> dict[int, str]:
        """Ranks that have died or left, and why."""
        with self._lock:
            return {**self._left, **self._lost}

    @property
    def dead(self) -> dict[int, str]:
        """Those of them that did not leave in order."""
        with self._lock:
            return dict(self._lost)

    @property
    def closed(self) -> BaseException | None:
        """Why nothing can be done any more."""
        return self._closed

    def has_come(self, name: str, round_id: int, channel: str = "") -> bool:
        """Whether something is here for the next call of this name, round and channel."""
        with self._lock:
            call = self._calls.get((round_id, name, channel), 0)
            return OperationKey(round_id, call, name, channel) in self._unexpected

    # Calls

    def check_process(self) -> None:
        """Raises ForkedProcess: this process is a child of the one that is in the group."""
        forks.check(self._made_in, f"group {self.group!r}")

    def start(self, operation: Operation, name: str, round_id: int) -> None:
        """Start a collective. What is wrong with it beyond its arguments it says when it is awaited.

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
        operation.rendezvous_bytes = min(operation.rendezvous_bytes, self._rendezvous_bytes)
        operation.credit = self.credit
        with self._lock:
            error = self._error_for(operation) or self._limit_error()
            call = self._count((round_id, name, operation.channel))
            key = operation.key = OperationKey(round_id, call, name, operation.channel)
            if error is None and self._unexpected.was_refused(key):
                self._unexpected.take(key)
                error = _dropped_error(name)
            if error is None:
                self._starting.add(key)
        if error is not None:
            operation.fail(error)
            return
        operation.on_end.insert(0, self._remove)  # before whoever awaits it goes on
        operation.begin(self._link)
        with self._lock:
            self._starting.discard(key)  # until now its frames were put aside
            if not operation.done:
                self._pending[key] = operation
            refused = self._unexpected.was_refused(key)
            early = self._unexpected.take(key)
            if not (early or refused or self._left or self._lost or self._closed):
                return
            self._feeding.add(key)
        for message in early:
            operation.feed(message.frame, message.frame.key.part, message.signature, message.meta)
        with self._lock:
            self._feeding.discard(key)
            left = dict(self._left)
        missing = [rank for rank in operation.missing if rank in left]  # what they had sent is in by now
        with self._lock:  # somebody may have been lost in between
            error = _dropped_error(name) if refused else self._error_for(operation, missing)
        if error is not None:
            operation.fail(error)

    def _error_for(self, operation: Operation, missing: Sequence[int] = ()) -> BaseException | None:
        """Why it cannot be done. ``missing``: what is owed now that all early frames were fed; of a rank that has left
        in order, nothing more will come."""
        if self._closed is not None:
            return self._closed
        if not self._left and not self._lost:
            return None
        gone = {rank: why for rank, why in self._left.items() if rank in missing}
        gone |= {rank: why for rank, why in self._lost.items() if rank in operation.peers}
        return PeerLost(self.group, gone) if gone else None

    def _limit_error(self) -> BaseException | None:
        most = max_pending(self.world)
        if len(self._pending) >= most:
            return CollectiveError(
                f"{most} collectives of group {self.group!r} are pending; await some before starting more"
            )
        return None

    def _count(self, call_of: _Call) -> int:
        call = self._calls.pop(call_of, 0)
        self._calls[call_of] = call + 1
        if len(self._calls) > _MAX_NAMES:
            self._calls.popitem(last=False)
        return call

    def _remove(self, operation: Operation) -> None:
        with self._lock:
            if self._pending.get(operation.key) is operation:
                del self._pending[operation.key]
            self.bytes_out += operation.sent_bytes
            self.bytes_in += operation.received_bytes
            if operation.repeats:
                self.dropped["repeat"] += operation.repeats

    # Frames

    def receive(self, frame: Frame) -> None:
        """Take a frame that has come in."""
        key = frame.key
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
            name, signature, meta, channel = _parts_of(key.name)
            wanted = OperationKey(key.round_id, key.transfer, name, channel)
            operation = self._pending.get(wanted)
            if operation is None:
                for piece in pieces:
                    self._keep_unexpected(wanted, UnexpectedFrame(piece, signature, meta))
        if operation is None:
            self._notify()
            return
        while pieces:  # each is let go of, and its place in memory free, before the next one
            operation.feed(pieces.pop(0), key.part, signature, meta)

    def _notify(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _keep_unexpected(self, key: OperationKey, message: UnexpectedFrame) -> None:
        if self._closed is not None:
            self.dropped["closed"] += 1
        elif key.call < self._calls.get((key.round_id, key.name, key.channel), 0) and key not in self._starting:
            self.dropped["stale"] += 1
        else:
            too_old = self._unexpected.too_old
            kept = self._unexpected.keep(key, message)
            if dropped := (not kept) + self._unexpected.too_old - too_old:
                self.dropped["early"] += dropped

    # Ends

    def lose(self, rank: int, why: str) -> None:
        """A rank has died: nothing that is pending is waited for any more, and nothing with it is begun."""
        with self._lock:
            self._lost.setdefault(rank, why)
            pending = [operation for operation in self._pending.values() if rank in operation.peers]
            lost = dict(self._lost)
        for operation in pending:
            operation.fail(PeerLost(self.group, lost))
        self._notify()

    def leave(self, rank: int, why: str) -> None:
        """A rank has left in order, and all that it has sent is here: who still misses something will not get it."""
        with self._lock:
            self._left.setdefault(rank, why)
            pending = [one for key, one in self._pending.items() if key not in self._feeding]
        for operation in pending:
            if rank in operation.missing:
                operation.fail(PeerLost(self.group, {rank: why}))
        self._notify()

    def close(self, error: BaseException) -> None:
        """End everything with this error, and take nothing more."""
        with self._lock:
            self._closed = error
            pending = list(self._pending.values())
            self._unexpected.clear()
        for operation in pending:
            operation.fail(error)
        self._notify()


def max_pending(world: int) -> int:
    """How many collectives of a group of so many ranks may be pending on one of them."""
    return max(MIN_PENDING, MAX_PENDING // max(1, world - 1))


def no_shared_memory(frame: Frame) -> list[Frame]:
    """Nothing is where the frame says."""
    return []


def _dropped_error(name: str) -> CollectiveError:
    return CollectiveError(
        f"frames for {name!r} came before this call, when no room was left for such frames, and were dropped. Let the "
        f"ranks wait for each other more often, or raise early_bytes"
    )
