"""Excludes foreign readers, those of DDS participants of no member, when writers wait for them.

A reliable writer waits for all readers that DDS matches, and DDS matches every announced reader: also one without the
key, which takes nothing and acknowledges nothing, so that writes wait and members seem to be late. JobMembers announce
their participants in encrypted messages; all others are foreign. As long as they delay nothing they may stay: they can
be nodes that wait for admission, or a ``gradbus status`` with another key. But when writes wait for readers, and some
of those are foreign, or when there are many foreign ones, they are excluded from this process's DDS for a while,
longer each time.

A participant that was excluded by mistake, as it announced itself late while writes waited, is readmitted when that
while is over, or as soon as its announcement is read. Not for the level ``none``, where everybody is a member.

The I/O thread checks, and deletion threads exclude late readers before they delete writers: a lock keeps them apart,
which is not held while a deletion waits for acknowledgements.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gradbus.runtime import forks
from gradbus.runtime.logs import get_logger
from gradbus.runtime.token_buckets import TokenBucket
from gradbus.runtime.transport.api import IoThread, JobMembers, PeerId, Periodic
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.dds.discovery import Claim
from gradbus.runtime.transport.dds.exclusion import Exclusion, describe
from gradbus.runtime.transport.dds.libddsc import MatchedReader

IDLE_S = 1.0  # interval of checks while no writer has foreign readers
CHECK_S, QUIET_CHECK_S = 0.05, 0.25  # the same of writers that have some; the latter while none is delayed
WINDOW_S = 0.2  # over which the waiting time of writes is measured
ACKS_S = 0.05  # for readers to take the last samples of all writers that are deleted together
LEAST_ACKS_S = 0.005  # for those of one writer, when readers of others have used that up; one that takes needs 1 ms
DELAYED_SHARE = 0.25  # of that window; readers that take all samples cost less
# A member announces itself within milliseconds of being found, or later when its process or machine is busy. Once
# foreign readers have delayed writes, later ones get less time; and none when writes have waited for STRAIN_S for
# foreign readers that come and go.
GRACE_S, SHORT_GRACE_S, ALERT_S = 1.5, 0.5, 60.0
STRAIN_S = 1.5
PAUSE_S = IDLE_S + 0.5  # a receive thread without a turn for longer: this process stood still
COUNTED_S = 0.5  # of such a pause
MAX_FOREIGN, SETTLED_S = 8, 10.0  # of more that have been there for so long, each costs a copy of all samples
EXCLUDED_S, LONGEST_EXCLUDED_S = 10.0, 600.0
MAX_KNOWN = 4096  # excluded participants that are remembered
PLACING_S = 0.1  # DDS has dropped a participant after a few milliseconds
LINES_PER_S, LINES_AT_ONCE = 0.5, 5  # log events

log = get_logger("bus")


class WatchedWriter(Protocol):
    """A writer, as far as it is watched.

    Attributes:
        readers: those that are matched, by handle.
    """

    channel: Channel
    readers: Mapping[int, MatchedReader]

    @property
    def throttled_s(self) -> float:
        """Return how long writes have waited for readers, all together."""

    @property
    def awaited_since_s(self) -> float:
        """Return since when a caller waits for the acknowledgements of all readers; 0: none does."""

    @property
    def refused_since_s(self) -> float:
        """Return since when no write was accepted; 0: the last one was."""

    @property
    def is_acknowledged(self) -> bool:
        """Return whether all readers have acknowledged all that was written."""

    def wait_for_acks(self, timeout_s: float) -> bool:
        """Return whether they have within so long."""


class WatchedParticipant(Protocol):
    """The DDS participant of a bus, whose writers are watched."""

    @property
    def writers(self) -> Sequence[WatchedWriter]:
        """Return all that are open now."""

    def own_prefixes(self) -> set[PeerId]:
        """Return those of the participants of this process."""

    def claims(self) -> dict[PeerId, Claim]:
        """Return what discovery says of each participant."""

    def exclusion(self) -> Exclusion:
        """Return what excludes participants. Raises OSError, ValueError: that cannot be done."""


@dataclass(slots=True)
class _Exclusion:
    """A participant that is or was excluded.

    Attributes:
        times: how often. until_s: end of the exclusion. placed_until_s: time until which its placeholder is put in.
    """

    times: int = 0
    until_s: float = 0.0
    placed_until_s: float = 0.0
    is_out: bool = False


@dataclass(slots=True, eq=False)
class _Watched:
    """A writer, and how long it has waited for its readers.

    Attributes:
        throttled_s: total waiting time at ``since_s``; negative: it was not measured yet.
    """

    writer: WatchedWriter
    since_s: float = 0.0
    throttled_s: float = -1.0

    def prefixes(self, *, reliable: bool) -> set[PeerId]:
        """Return the readers' participants. ``reliable``: only of those that the writer waits for."""
        return {one.participant for one in self.writer.readers.values() if one.is_reliable or not reliable}

    def is_delayed(self, now_s: float, window_s: float) -> bool:
        """Whether writes have waited for a good part of the time since the last call, at least ``window_s``; or a
        caller has waited that long for the acknowledgements of all readers; or no write was accepted for so long."""
        if self.throttled_s >= 0 and now_s - self.since_s < window_s:
            return False
        before_s, self.throttled_s = self.throttled_s, self.writer.throttled_s
        elapsed_s, self.since_s = now_s - self.since_s, now_s
        if before_s >= 0 and self.throttled_s - before_s > DELAYED_SHARE * elapsed_s:
            return True
        awaited_since_s = self.writer.awaited_since_s
        if awaited_since_s and now_s - awaited_since_s > window_s:
            return True
        refused_since_s = self.writer.refused_since_s  # a writer that gives up soon and retries later hardly waits
        return bool(refused_since_s) and now_s - refused_since_s > window_s and not self.writer.is_acknowledged


class ForeignReaders:
    """Watches the readers of one participant's writers, on the I/O thread of its bus."""

    _all: ClassVar[weakref.WeakSet[ForeignReaders]] = weakref.WeakSet()  # of this process: each has its own members
    _all_lock: ClassVar[forks.ForkLock] = forks.ForkLock()  # each has a thread of its own

    def __init__(self, node: WatchedParticipant, thread: IoThread, members: JobMembers) -> None:
        """Start to watch. ``members``: of the job. If they know all, many foreign readers are too many, and an excluded
        one is no member."""
        self._node = node
        self._thread = thread
        self.members = members
        self._lock = threading.Lock()
        self._watched: dict[WatchedWriter, _Watched] = {}
        self._foreign: dict[PeerId, float] = {}  # time of the first check that has found it
        self._excluded: dict[PeerId, _Exclusion] = {}
        self._alert_until_s = self._strict_until_s = 0.0
        self._strain_s = self._strained_s = 0.0  # waiting time of writes, and when it was updated
        self._has_new = True
        self._checked_s = time.monotonic()
        self._lines, self._unnamed = TokenBucket(LINES_PER_S, LINES_AT_ONCE), 0
        self._is_placing = False
        self._cannot = False
        with ForeignReaders._all_lock:
            ForeignReaders._all.add(self)
        self._periodic = Periodic(self.check, IDLE_S)
        thread.add_periodic(self._periodic)

    def note_new_readers(self) -> None:
        """Check soon: the matched readers of a writer have changed. Only the I/O thread calls this."""
        self._has_new = True
        self._thread.call_within(self._periodic, CHECK_S)

    def check(self) -> bool:
        """Check whether writes wait for foreign readers, and set the time of the next check."""
        with self._lock:
            self._check()
        return True

    def _check(self) -> None:
        now_s = time.monotonic()
        pause_s, self._checked_s = now_s - self._checked_s, now_s
        if pause_s > PAUSE_S:
            # This process stood still, and announcements of this time are yet to be read: little of it counts. Some
            # does, or a process that is always late would exclude none.
            shift_s = pause_s - COUNTED_S
            self._foreign = {prefix: min(now_s, since_s + shift_s) for prefix, since_s in self._foreign.items()}
        is_new, self._has_new = self._has_new, False
        if is_new or self._foreign or self._excluded:
            self._watched = {writer: self._watched.get(writer) or _Watched(writer) for writer in self._node.writers}
            self._periodic.every_s = self._judge(now_s)
        else:
            self._watched = {}
            self._periodic.every_s = IDLE_S

    def exclude_late(self, writers: Sequence[WatchedWriter]) -> None:
        """Exclude foreign readers that have not taken all samples of writers that are about to be deleted: that takes
        up to a second while a reader has not. Any thread but the event loop's may call this.

        A process that does not know all members logs nothing of that: mostly these are members that end at the same
        time, and nothing of this process waits for them any more.
        """
        members = self.members.known()
        if members is None or not self._foreign:
            return
        known = self._node.own_prefixes() | set(members)
        now_s = time.monotonic()
        until_s = now_s + ACKS_S  # of all writers together
        for writer in writers:
            foreign = self._lasting(writer, known, now_s)
            if foreign and not writer.wait_for_acks(max(LEAST_ACKS_S, until_s - time.monotonic())):
                with self._lock:
                    late = {prefix: writer.channel.name for prefix in foreign if not self._is_out(prefix)}
                    self._exclude(late, now_s, is_logged=self.members.knows_all)

    def _lasting(self, writer: WatchedWriter, known: set[PeerId], now_s: float) -> set[PeerId]:
        """Return the foreign participants that a writer waits for and that are past their time of grace."""
        with self._lock:
            found = _Watched(writer).prefixes(reliable=True) - known
            return {one for one in found if not self._is_out(one) and now_s - self._foreign.get(one, now_s) > GRACE_S}

    def _is_out(self, prefix: PeerId) -> bool:
        known = self._excluded.get(prefix)
        return known is not None and known.is_out

    def _judge(self, now_s: float) -> float:
        """Exclude participants and readmit others; returns the interval to the next check."""
        members = self.members.known()
        if members is None:
            self._has_new = True  # those that are there now are looked at once this process is a member
            return IDLE_S
        known = self._node.own_prefixes() | set(members)
        present: set[PeerId] = set()
        suspects: list[tuple[_Watched, set[PeerId]]] = []
        for watched in self._watched.values():
            present |= watched.prefixes(reliable=False) - known
            if foreign := watched.prefixes(reliable=True) - known:
                suspects.append((watched, foreign))
        self._foreign = {prefix: self._foreign.get(prefix, now_s) for prefix in present}
        out = self._delaying(suspects, now_s)
        settled = [one for one, since_s in self._foreign.items() if now_s - since_s > SETTLED_S]
        if len(settled) > MAX_FOREIGN and self.members.knows_all:
            out.update(dict.fromkeys(settled, ""))
        for prefix in present:
            if self._is_out(prefix):  # it was faster than its placeholder
                out.setdefault(prefix, "")
        self._exclude(out, now_s)
        self._readmit(known, now_s)
        if not self._foreign:
            return IDLE_S
        return CHECK_S if self._strain_s > 0 or now_s < self._strict_until_s else QUIET_CHECK_S

    def _delaying(self, suspects: list[tuple[_Watched, set[PeerId]]], now_s: float) -> dict[PeerId, str]:
        """Return the foreign participants that writes wait for, past their time of grace, and the topic."""
        is_strict = now_s < self._strict_until_s
        grace_s = 0.0 if is_strict else SHORT_GRACE_S if now_s < self._alert_until_s else GRACE_S
        out: dict[PeerId, str] = {}
        is_delayed = False
        for watched, foreign in suspects:
            if watched.is_delayed(now_s, CHECK_S if is_strict else WINDOW_S):
                is_delayed = True
                for prefix in foreign:  # one that is back may be a member that had no time to announce itself
                    allowed_s = min(grace_s, SHORT_GRACE_S) if prefix in self._excluded else grace_s
                    if now_s - self._foreign[prefix] > allowed_s:
                        out[prefix] = watched.writer.channel.name
        elapsed_s, self._strained_s = min(WINDOW_S, now_s - self._strained_s), now_s
        self._strain_s = max(0.0, self._strain_s + (WINDOW_S if is_delayed else -elapsed_s / 10))
        if self._strain_s > STRAIN_S:
            self._strain_s, self._strict_until_s = STRAIN_S, now_s + ALERT_S
        return out

    def _exclude(self, out: dict[PeerId, str], now_s: float, *, is_logged: bool = True) -> None:
        with ForeignReaders._all_lock:
            elsewhere = [other for other in ForeignReaders._all if other is not self]
        chosen = [
            prefix
            for prefix in out
            if not any(
                prefix in (other.members.known() or ()) or other.is_excluding(prefix, now_s) for other in elsewhere
            )
        ]
        exclusion = self._exclusion() if chosen else None
        if exclusion is None:
            return
        self._alert_until_s = now_s + ALERT_S
        fresh = [prefix for prefix in chosen if not self._is_out(prefix)]
        claims: dict[PeerId, Claim] = {}
        if fresh:
            with contextlib.suppress(Exception):  # what others announce may be anything
                claims = self._node.claims()
        if is_logged:
            self._log(fresh, claims, out, now_s)
        own = self._node.own_prefixes()
        for prefix in chosen:
            known = self._excluded.pop(prefix, None) or _Exclusion()
            self._excluded[prefix] = known  # the newest last
            if not known.is_out:
                known.until_s = now_s + min(LONGEST_EXCLUDED_S, EXCLUDED_S * 2.0 ** min(known.times, 8))
                known.times += 1
                self._thread.rejected["foreign reader"] += 1
            known.is_out = True
            known.placed_until_s = now_s + PLACING_S
            exclusion.end(prefix)
            if prefix in claims:
                exclusion.leave(prefix, claims[prefix].addresses, own)
        while len(self._excluded) > MAX_KNOWN:
            del self._excluded[next(iter(self._excluded))]
        if not self._is_placing:
            self._is_placing = True
            self._thread.add_periodic(Periodic(self._place))

    def is_excluding(self, prefix: PeerId, now_s: float) -> bool:
        """Whether this bus is excluding a participant right now, which does so for all buses of this process: DDS does
        not know any more then which participant it was."""
        known = self._excluded.get(prefix)
        return known is not None and known.is_out and now_s < known.placed_until_s + PLACING_S

    def _place(self) -> bool:
        """Put placeholders where participants were, until DDS has taken them; returns whether to continue."""
        with self._lock:
            return self._place_all(time.monotonic())

    def _place_all(self, now_s: float) -> bool:
        exclusion = self._exclusion()
        due = [prefix for prefix, known in self._excluded.items() if known.is_out and now_s < known.placed_until_s]
        if exclusion is not None:
            for prefix in due:
                exclusion.place(prefix)
        self._is_placing = bool(due)
        return self._is_placing

    def _readmit(self, known: set[PeerId], now_s: float) -> None:
        """Readmit participants whose time is over, and members at once."""
        back = [
            prefix for prefix, one in self._excluded.items() if one.is_out and (now_s > one.until_s or prefix in known)
        ]
        exclusion = self._exclusion() if back else None
        for prefix in back:
            self._excluded[prefix].is_out = False
            self._excluded[prefix].placed_until_s = now_s
            if exclusion is not None:
                exclusion.end(prefix)  # the placeholder

    def _exclusion(self) -> Exclusion | None:
        if self._cannot:
            return None
        try:
            return self._node.exclusion()
        except (OSError, ValueError) as error:
            self._cannot = True
            _warn(
                "foreign readers cannot be excluded",
                reason=str(error),
                effect="they can hold up this job; keep them off the network by a firewall",
            )
            return None

    def _log(
        self, prefixes: list[PeerId], claims: Mapping[PeerId, Claim], topics: Mapping[PeerId, str], now_s: float
    ) -> None:
        """Write a log event for each process, at a limited rate."""
        processes: dict[Claim, list[PeerId]] = {}
        for prefix in prefixes:
            processes.setdefault(claims.get(prefix, Claim()), []).append(prefix)
        for claim, of in processes.items():
            if not self._lines.take(now_s):
                self._unnamed += len(of)
                continue
            facts: dict[str, object] = {}
            with contextlib.suppress(OSError, ValueError):
                facts = describe(claim)
            topic = topics[of[0]]
            _warn(
                "foreign readers excluded" if self.members.knows_all else "slow readers excluded",
                why=f"writes of {topic} waited for them" if topic else "there are many, and each costs a copy",
                **facts,
                participants=len(of),
                first=of[0].hex(),
                not_named_before=self._unnamed,
                do="stop that process, or give it the key" if self.members.knows_all else "see why it takes nothing",
            )
            self._unnamed = 0


def _warn(event: str, **facts: object) -> None:
    """Write a log event. A handler of the host application that fails must not end the receive thread."""
    with contextlib.suppress(Exception):
        log.warning(event, **facts)
