"""Readers of participants that belong to no member of the job, and hold up its writers: they are named and shut out.

A reliable writer waits for all readers that DDS matches, and DDS matches whoever announces a reader: also one without
the key, which takes nothing and acknowledges nothing, so that writes wait and members seem to be late. Which
participants are members', members say themselves, in sealed messages. All others are guests. As long as they do no harm
they may stay: they can be nodes that wait to be let in, or a ``gradbus status`` with another key. But when writes wait
for readers, and some of those are guests', or when there are many guests, they are shut out of this process's DDS for a
while, longer each time.

Who is shut out wrongly, as he was slow to show that he is a member while writes waited, is found again when that while
is over, or as soon as what he had said is read. Not for the level ``none``, where everybody is a member.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from gradbus.runtime import forks
from gradbus.runtime.dds.discovery import Claim
from gradbus.runtime.dds.exclusion import Exclusion, describe
from gradbus.runtime.dds.libddsc import MatchedReader
from gradbus.runtime.dds.participant import IoThread, Participant, Periodic, Writer
from gradbus.runtime.dds.spdp import PREFIX_BYTES
from gradbus.runtime.logs import get_logger

IDLE_S = 1.0  # between two looks while no writer has guests
LOOK_S, QUIET_LOOK_S = 0.05, 0.25  # between two looks at writers that have guests; the latter while none is held up
WINDOW_S = 0.2  # over which is measured how long writes have waited
ACKS_S = 0.05  # for readers to take over the last samples of a writer
HELD_UP = 0.25  # of that time; less is what readers cost that do their best
# A member shows itself within milliseconds of being found, or later when its process or machine is busy. Once guests
# have done harm, later ones get less time; and none when writes have waited for so long for guests that come and go.
GRACE_S, SHORT_GRACE_S, ALERT_S = 1.5, 0.5, 60.0
STRAIN_S = 1.5
PAUSE_S = IDLE_S + 0.5  # a receive thread that had no turn for longer: this process stood still
COUNTED_S = 0.5  # of such a pause
MAX_GUESTS, GUEST_S = 8, 10.0  # of more that have been there for so long, each costs a copy of all that is sent
SHUT_OUT_S, LONGEST_SHUT_OUT_S = 10.0, 600.0
MAX_KNOWN = 4096  # participants that are remembered, because they were shut out
PLACING_S = 0.1  # DDS has forgotten a participant after a few milliseconds
LINES, LINE_S = 5, 10.0  # so many processes are named in such a time

log = get_logger("bus")


@dataclass(slots=True)
class _Shut:
    """A participant that is shut out, or was."""

    times: int = 0
    until_s: float = 0.0
    placed_until_s: float = 0.0
    is_out: bool = False


@dataclass(slots=True, eq=False)
class _Watched:
    """A writer: the participants of its readers, and how long it has waited for them."""

    writer: Writer
    readers: dict[int, MatchedReader] = field(default_factory=dict)  # by handle
    since_s: float = 0.0
    throttled_s: float = -1.0  # at ``since_s``; negative: it was not looked at

    def prefixes(self, *, reliable: bool) -> set[bytes]:
        """Of their participants. ``reliable``: of those alone that the writer waits for."""
        found = [one.participant for one in self.readers.values() if one.is_reliable or not reliable]
        return {guid[:PREFIX_BYTES] for guid in found}

    def is_held_up(self, now_s: float, window_s: float) -> bool:
        """Whether its writes have waited for a good part of the time since this was asked, at least ``window_s``; or
        somebody has, for so long, until its readers have taken over all; or none was taken for so long."""
        if self.throttled_s >= 0 and now_s - self.since_s < window_s:
            return False
        throttled_s = self.writer.throttled_s
        before_s, self.throttled_s = self.throttled_s, throttled_s
        elapsed_s, self.since_s = now_s - self.since_s, now_s
        if before_s >= 0 and throttled_s - before_s > HELD_UP * elapsed_s:
            return True
        awaited_since_s = self.writer.awaited_since_s
        if awaited_since_s and now_s - awaited_since_s > window_s:
            return True
        refused_since_s = self.writer.refused_since_s  # who gives up soon and tries again later has hardly waited
        return bool(refused_since_s) and now_s - refused_since_s > window_s and not self.writer.is_acknowledged


class Members(Protocol):
    """Returns the DDS participants of the members."""

    def __call__(self) -> Collection[bytes] | None:
        """Prefixes of their GUIDs; None: this process is no member itself yet, and cannot tell."""


class ForeignReaders:
    """Watches the readers matched with one bus, on its receive thread."""

    _all: ClassVar[weakref.WeakSet[ForeignReaders]] = (
        weakref.WeakSet()
    )  # of this process: a guest here may be a member there
    _all_lock: ClassVar[Any] = forks.new_lock()  # each has a thread of its own

    def __init__(self, node: Participant, thread: IoThread, members: Members, *, knows_all: bool = True) -> None:
        """Begin to look, on the receive thread. ``knows_all``: this process knows all members, so that many guests are
        too many, and who is shut out is none of them."""
        self._node = node
        self._thread = thread
        self.members = members
        self._knows_all = knows_all
        self._watched: dict[Writer, _Watched] = {}
        self._guests: dict[bytes, float] = {}  # since when they are known
        self._shut: dict[bytes, _Shut] = {}
        self._alert_until_s = self._strict_until_s = 0.0
        self._strain_s = self._strained_s = 0.0  # how long writes have waited, and when that was looked at
        self._has_new = True
        self._looked_s = time.monotonic()
        self._lines, self._line_s, self._unnamed = LINES, 0.0, 0
        self._is_placing = False
        self._cannot = False
        with ForeignReaders._all_lock:
            ForeignReaders._all.add(self)
        self._periodic = Periodic(self.look, IDLE_S)
        thread.on_new_readers = self._on_new_readers
        thread.before_deletion = self.dismiss
        thread.add_periodic(self._periodic)

    def _on_new_readers(self) -> None:
        self._has_new = True
        self._thread.call_within(self._periodic, LOOK_S)

    def look(self) -> bool:
        """Look whether writes wait for guests; how soon again depends on what there is."""
        now_s = time.monotonic()
        before_s, self._looked_s = self._looked_s, now_s
        if now_s - before_s > PAUSE_S:
            self._forgive(now_s - before_s, now_s)
        is_new, self._has_new = self._has_new, False
        if is_new:
            self._find_readers()
        self._periodic.every_s = self._judge(now_s) if is_new or self._guests or self._shut else IDLE_S
        return True

    def _forgive(self, pause_s: float, now_s: float) -> None:
        """This process stood still. What guests have sent meanwhile is yet to be read, so little of that time counts
        as theirs to show that they are members; some does, or a process that is always late would find nobody."""
        shift_s = pause_s - COUNTED_S
        self._guests = {prefix: min(now_s, since_s + shift_s) for prefix, since_s in self._guests.items()}

    def dismiss(self, writers: Sequence[Writer]) -> None:
        """Shut out guests that have not taken over what these writers have written: to delete a writer takes up to a
        second while a reader has not."""
        members = self.members()
        if members is None or not self._guests:
            return
        known = self._node.own_prefixes() | set(members)
        now_s = time.monotonic()
        for watched in [self._watched[writer] for writer in writers if writer in self._watched]:
            guests = {one for one in watched.prefixes(reliable=True) - known if self._may_be_dismissed(one, now_s)}
            if guests and not watched.writer.wait_for_acks(ACKS_S):
                self._shut_out(dict.fromkeys(guests, watched.writer.topic.name), now_s)

    def _may_be_dismissed(self, prefix: bytes, now_s: float) -> bool:
        shut = self._shut.get(prefix)
        is_out = shut is not None and shut.is_out
        return not is_out and now_s - self._guests.get(prefix, now_s) > GRACE_S

    def _find_readers(self) -> None:
        writers = self._thread.writers
        self._watched = {writer: self._watched.get(writer) or _Watched(writer) for writer in writers}
        for writer, watched in self._watched.items():
            if writer.has_new_readers:
                writer.has_new_readers = False
                watched.readers = writer.readers(watched.readers)

    def _judge(self, now_s: float) -> float:
        members = self.members()
        if members is None:
            return IDLE_S
        known = self._node.own_prefixes() | set(members)
        present: set[bytes] = set()
        suspects: list[tuple[_Watched, set[bytes]]] = []
        for watched in self._watched.values():
            present |= watched.prefixes(reliable=False) - known
            if guests := watched.prefixes(reliable=True) - known:
                suspects.append((watched, guests))
        self._guests = {prefix: self._guests.get(prefix, now_s) for prefix in present}
        out = self._harmful(suspects, now_s)
        settled = [one for one, since_s in self._guests.items() if now_s - since_s > GUEST_S]
        if len(settled) > MAX_GUESTS and self._knows_all:
            out.update(dict.fromkeys(settled, ""))
        for prefix, shut in self._shut.items():
            if shut.is_out and prefix in present:  # it was faster than its placeholder
                out.setdefault(prefix, "")
        self._shut_out(out, now_s)
        self._let_back(known, now_s)
        if not self._guests:
            return IDLE_S
        return LOOK_S if self._strain_s > 0 or now_s < self._strict_until_s else QUIET_LOOK_S

    def _harmful(self, suspects: list[tuple[_Watched, set[bytes]]], now_s: float) -> dict[bytes, str]:
        """Guests for which writes wait, and the topic."""
        is_strict = now_s < self._strict_until_s
        grace_s = 0.0 if is_strict else SHORT_GRACE_S if now_s < self._alert_until_s else GRACE_S
        out: dict[bytes, str] = {}
        is_held_up = False
        for watched, guests in suspects:
            if watched.is_held_up(now_s, LOOK_S if is_strict else WINDOW_S):
                is_held_up = True
                ripe = [one for one in guests if self._is_ripe(one, now_s, grace_s)]
                out.update(dict.fromkeys(ripe, watched.writer.topic.name))
        elapsed_s, self._strained_s = min(WINDOW_S, now_s - self._strained_s), now_s
        self._strain_s = max(0.0, self._strain_s + (WINDOW_S if is_held_up else -elapsed_s / 10))
        if self._strain_s > STRAIN_S:
            self._strain_s, self._strict_until_s = STRAIN_S, now_s + ALERT_S
        return out

    def _is_ripe(self, prefix: bytes, now_s: float, grace_s: float) -> bool:
        if prefix in self._shut:  # who is back may be a member that had no time to say so
            grace_s = min(grace_s, SHORT_GRACE_S)
        return now_s - self._guests[prefix] > grace_s

    def _shut_out(self, out: dict[bytes, str], now_s: float) -> None:
        with ForeignReaders._all_lock:
            elsewhere = [other for other in ForeignReaders._all if other is not self]
        chosen = [
            prefix for prefix in out
            if not any(prefix in (other.members() or ()) or other.has_just_shut(prefix, now_s) for other in elsewhere)
        ]  # fmt: skip
        exclusion = self._exclusion() if chosen else None
        if exclusion is None:
            return
        self._alert_until_s = now_s + ALERT_S
        fresh = [prefix for prefix in chosen if prefix not in self._shut or not self._shut[prefix].is_out]
        claims: dict[bytes, Claim] = {}
        if fresh:
            with contextlib.suppress(Exception):  # what others announce may be anything
                claims = self._node.claims()
        self._name(fresh, claims, out, now_s)
        own = self._node.own_prefixes()
        for prefix in chosen:
            shut = self._shut.pop(prefix, None) or _Shut()
            self._shut[prefix] = shut  # the newest last
            if not shut.is_out:
                shut.until_s = now_s + min(LONGEST_SHUT_OUT_S, SHUT_OUT_S * 2.0 ** min(shut.times, 8))
                shut.times += 1
                self._thread.rejected["foreign reader"] += 1
            shut.is_out = True
            shut.placed_until_s = now_s + PLACING_S
            exclusion.end(prefix)
            if prefix in claims:
                exclusion.leave(prefix, claims[prefix].addresses, own)
        while len(self._shut) > MAX_KNOWN:
            del self._shut[next(iter(self._shut))]
        if not self._is_placing:
            self._is_placing = True
            self._thread.add_periodic(Periodic(self._place))

    def has_just_shut(self, prefix: bytes, now_s: float) -> bool:
        """Whether this bus is shutting a participant out right now, which does so for all buses of this process. DDS
        has forgotten then who it was."""
        shut = self._shut.get(prefix)
        return shut is not None and shut.is_out and now_s < shut.placed_until_s + PLACING_S

    def _place(self) -> bool:
        """Put placeholders where participants were, until DDS has taken them. Whether to go on."""
        now_s = time.monotonic()
        exclusion = self._exclusion()
        due = [prefix for prefix, shut in self._shut.items() if shut.is_out and now_s < shut.placed_until_s]
        if exclusion is not None:
            for prefix in due:
                exclusion.place(prefix)
        self._is_placing = bool(due)
        return self._is_placing

    def _let_back(self, known: set[bytes], now_s: float) -> None:
        """Those whose time is over, and at once members: what they had said before they were shut out is read now."""
        back = [
            prefix for prefix, shut in self._shut.items() if shut.is_out and (now_s > shut.until_s or prefix in known)
        ]
        exclusion = self._exclusion() if back else None
        for prefix in back:
            self._shut[prefix].is_out = False
            self._shut[prefix].placed_until_s = now_s
            if exclusion is not None:
                exclusion.end(prefix)  # the placeholder

    def _exclusion(self) -> Exclusion | None:
        if self._cannot:
            return None
        try:
            return self._node.exclusion()
        except (OSError, ValueError) as error:
            self._cannot = True
            _tell(
                "readers of no member cannot be shut out",
                reason=str(error),
                effect="they can hold up this job; keep them off the network by a firewall",
            )  # fmt: skip
            return None

    def _name(
        self, prefixes: list[bytes], claims: Mapping[bytes, Claim], why: Mapping[bytes, str], now_s: float
    ) -> None:
        """A line in the log for each process, but no flood."""
        if now_s > self._line_s + LINE_S:
            self._lines, self._line_s = LINES, now_s
        processes: dict[Claim, list[bytes]] = {}
        for prefix in prefixes:
            processes.setdefault(claims.get(prefix, Claim()), []).append(prefix)
        for claim, of in processes.items():
            if not self._lines:
                self._unnamed += len(of)
                continue
            self._lines -= 1
            facts: dict[str, object] = {}
            with contextlib.suppress(OSError, ValueError):
                facts = describe(claim)
            topic = why[of[0]]
            _tell(
                "readers of no member are shut out" if self._knows_all else "readers of others are shut out",
                why=f"writes of {topic} waited for them" if topic else "there are many, and each costs a copy",
                **facts, participants=len(of), first=of[0].hex(), not_named_before=self._unnamed,
                do="stop that process, or give it the key" if self._knows_all else "see why it takes nothing",
            )  # fmt: skip
            self._unnamed = 0


def _tell(event: str, **facts: object) -> None:
    """Write a log event. A handler of the host application that fails must not end the receive thread."""
    with contextlib.suppress(Exception):
        log.warning(event, **facts)


__all__ = ["ForeignReaders", "Members"]
