"""Which processes are an elastic group, generation after generation: the agreement, without I/O or a clock of its own.

A generation is a list of members, whose order gives the ranks. The members of one generation decide on the next: each
decision is one instance of Paxos (Lamport, "Paxos made simple", 2001) among the members of the generation before. So
no two processes ever hold different lists for one number, whatever is lost, late or cut off, and of two partitions at
most one goes on. No server is needed for that.

A process tells all others its whole state, a :class:`~gradbus.runtime.wire.control.GroupView`, when that changes and
from time to time: what it has promised, and what it has accepted. A promise is a view with the proposer's ballot; a
proposal is the proposer's view in which it has accepted it; a decision is a ballot that a quorum has accepted. States
only grow, so views may be lost, repeated or overtaken.

A quorum is more than half of the members. Exactly half is one, too, if all the others are certainly dead, which the
kernel tells on one machine: so the last of two goes on alone. It is safe, because any other quorum has one of this half
in it, or consists of the dead alone, who decide nothing any more. Less than half is none, although all others are dead:
those may have decided on a generation with a process that nobody of the rest knows.

A process has no past: one that is started again has another incarnation, and joins like any other. It never makes a
first generation where others have one. The first generation is made by the founder with number 0, once it sees all
founders, and none that knows of a generation; one that is started again before that may join in a founder's place. It
does not wait for one that it has seen and lost since, if enough are left. For one that it has not seen it waits until
its last call is over, if it has one. Nobody else makes a first generation, so a founder that was only cut off, or comes
later, joins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire.control import GroupView

MAX_MEMBERS = 256  # so many fit into a view
_RANK_BITS = 10  # of a ballot: the lower ones say whose it is
TAKEOVER_S = 1.0  # after which the next member in rank order proposes what the first one does not bring about
RETRY_S = 0.4  # after which a ballot that another one has outbid, or that nobody answers, is followed by a higher one


class MemberId(NamedTuple):
    """A process: the number that it was started with, which no other one has at the time, and which start it is."""

    number: int
    incarnation: int


class TwoMemberships(CollectiveError):
    """Two lists of members have the same generation number: two groups of one name were founded."""


class GenerationAgreement:
    """The part of one process in the agreement.

    Times are seconds of one clock that does not go back.

    Attributes:
        group: name. me: this process. generation: the newest known one, 0: none. members: of it, in rank order.
        resting: this member stands between two steps, so that members may join and leave without harm.
        leaving: it wants to leave. ended: its run has come to the end.
        last_call_s: for so long process 0 waits for founders that it has not seen, once ``min_world`` are there.
        host: for the others' messages to people.
    """

    def __init__(
        self,
        group: str,
        me: MemberId,
        *,
        min_world: int,
        max_world: int,
        founders: int = 0,
        traits: Mapping[str, int] | None = None,
        host: str = "",
    ) -> None:
        """
        Args:
            min_world, max_world: members that a generation has at least, and at most.
            founders: number of processes that make the first generation, with the numbers 0 .. founders - 1, of which
                this is one; 0: this one joins others.
            traits: hashes that must be equal on all members.
        """
        self.group = group
        self.me = me
        self.host = host
        self.min_world = min_world
        self.max_world = max_world
        self.generation = 0
        self.members: tuple[MemberId, ...] = ()
        self.resting = False
        self.leaving = False
        self.ended = False
        self.last_call_s = math.inf
        self._founders = founders
        self._enough_s: float | None = None  # since when so many founders are there
        self._lost_founders: set[int] = set()  # numbers of those that were lost before there was a generation
        self._traits = dict(traits or {})
        self._promised = 0
        self._accepted = 0
        self._proposal: tuple[MemberId, ...] = ()
        self._ballot = 0  # of this process, while it proposes
        self._views: dict[MemberId, GroupView] = {}
        self._lost: set[MemberId] = set()  # until they are heard again
        self._suspected: set[MemberId] = set()  # until the generation is over
        self._dead: set[MemberId] = set()
        self._version = 0
        self._wanted_s: float | None = None  # since when another generation is wanted
        self._bid_s = 0.0  # when this process has bid last
        self._bids = 0

    # Input

    def receive(self, sender: MemberId, view: GroupView) -> None:
        """Take the view of another process.

        Raises:
            TwoMemberships: it is of another group with the name of this one.
        """
        known = self._views.get(sender)
        if view.group != self.group or sender == self.me or sender in self._dead:
            return
        if known is not None and view.version < known.version:
            return
        self._lost.discard(sender)
        self._views[sender] = view
        members = _ids(view.numbers, view.incarnations)
        if view.generation > self.generation:
            self._adopt(view.generation, members)
        elif view.generation == self.generation > 0 and members != self.members:
            raise TwoMemberships(
                f"elastic group {self.group!r}: {view.host or sender.number} has other members of generation "
                f"{self.generation} than this process: two groups of this name were founded. Start processes that take "
                f"the place of others as ones that join, and end one of the two groups"
            )
        if view.generation == self.generation and self.is_member and sender in self.members:
            self._vote(view)
            self._advance()

    def lost(self, member: MemberId, *, certain: bool) -> None:
        """A process is not reached any more. ``certain``: it has ended, and never comes back."""
        if member == self.me:
            return
        if member in self._fresh:
            self._lost_founders.add(member.number)
        if certain:
            self._dead.add(member)
            if member not in self.members:
                self._views.pop(member, None)
        self._lost.add(member)
        if self.is_member:
            self._advance()

    def suspect(self, ranks: Collection[int]) -> None:
        """Members of this generation do not answer, though they may live: the next one is to be without them."""
        self._suspected |= {self.members[rank] for rank in ranks if self.members[rank] != self.me}

    def answers(self, sender: MemberId, view: GroupView) -> bool:
        """Whether the view of a process that has just come is answered at once, not at the next repetition.

        Before the first generation everybody answers founder 0, which makes it once it knows all founders. Later the
        first member answers a process that is behind and no member: it is the one that proposes to let it in.
        Asked before :meth:`receive` is called with the same view.
        """
        if sender == self.me or view.group != self.group:
            return False
        if not self.generation:
            return not sender.number and sender not in self._views  # it makes the first generation once it knows all
        is_first = self.is_member and not self._turn
        return is_first and sender not in self.members and view.generation < self.generation

    def tick(self, now_s: float) -> None:
        """Let time pass: found the group, or propose what this process is the one to propose."""
        if not self.generation:
            self._found(now_s)
        if not self.is_member or self._target() is None:
            self._wanted_s = None
            self._ballot = 0
            return
        if self._wanted_s is None:
            self._wanted_s = now_s
            self._bids = 0
            self._bid_s = float("-inf")
        turn_s = self._wanted_s + TAKEOVER_S * self._turn
        pause_s = RETRY_S * (1 + min(self._bids, 8) * (1 + self.members.index(self.me)) / 2)  # so that two do not tie
        if now_s >= turn_s and now_s >= self._bid_s + pause_s:
            self._bid_s = now_s
            self._bids += 1
            # The rank makes it this process's own; numbers would not, should two members have been given the same.
            self._ballot = self._promised = ((self._promised >> _RANK_BITS) + 1 << _RANK_BITS) + self.rank
        self._advance()

    # State

    @property
    def is_member(self) -> bool:
        """Whether this process is in the newest generation that it knows."""
        return self.me in self.members

    @property
    def vote(self) -> tuple[int, int, int]:
        """Return what changes in each phase of a decision: others wait to know it."""
        return self.generation, self._promised, self._accepted

    @property
    def is_bidding(self) -> bool:
        """Whether this process wants another generation to come."""
        return self._wanted_s is not None

    @property
    def rank(self) -> int:
        """Return that of this process in the newest generation."""
        return self.members.index(self.me)

    @property
    def change_is_wanted(self) -> bool:
        """Whether the members should rest between two steps, as somebody wants to join or to leave, and can."""
        target = self._target(at_rest=True)
        return self.is_member and target is not None and target != self.members

    @property
    def ended_generation(self) -> int | None:
        """Return in which generation, this process's own or a newer one, a process has come to the end of the run, the
        oldest of them; None: none has."""
        ended = [view.generation for view in self._views.values() if view.ended and view.generation >= self.generation]
        return min(ended, default=None)

    @property
    def misfit(self) -> str:
        """Return what this process has other than the members that it wants to join; empty: nothing."""
        if self.is_member:
            return ""
        for member in self.members:
            view = self._views.get(member)
            if view is not None and view.traits != self._traits:
                keys = dict.fromkeys([*view.traits, *self._traits])
                return ", ".join(key for key in keys if view.traits.get(key) != self._traits.get(key))
        return ""

    @property
    def unreached(self) -> tuple[int, ...]:
        """Ranks of this generation that are lost or suspected, as far as is known here."""
        return tuple(rank for rank, member in enumerate(self.members) if member in self._gone)

    @property
    def hears_members(self) -> bool:
        """Return whether some other member of this generation has told its view, and is not lost. What other processes
        that wait tell of a generation does not show that any of its members lives."""
        return any(member in self._views and member not in self._gone for member in self.members)

    @property
    def founder_has_died(self) -> bool:
        """Whether the process that makes the first generation has certainly ended, before this one knew of any, and no
        other has come that can make it."""
        has_died = any(not member.number for member in self._dead)
        others = [view for member, view in self._views.items() if not member.number and view.founders]
        return not self.generation and bool(self._founders) and bool(self.me.number) and has_died and not others

    @property
    def waits_for(self) -> str:
        """Return what this process waits for before it is in a generation that goes on, for people; empty: nothing."""
        if not self.generation:
            missing = self._missing_founders
            if self.founder_has_died:
                return (
                    "process 0, which alone makes the first generation and has ended before it did. One that joins "
                    "cannot do that: end the other founders, and start all of them again"
                )
            if self._founders:
                return f"the processes {missing} of {self._founders}" if missing else "the first generation"
            return "a group that it can join"
        if self.misfit:
            return ""  # it is refused, and never gets a place
        if not self.is_member:
            return f"a place in generation {self.generation + 1}, which has at most {self.max_world} members"
        alive = [member for member in self.members if member not in self._gone]
        if not self._is_quorum(alive):
            reached = f"{len(alive)} of the {len(self.members)} members"
            return f"a majority: it reaches {reached} of generation {self.generation}"
        if self.lacks:
            return f"{self.lacks} more to join: at least {self.min_world} members are needed"
        return ""

    @property
    def ready(self) -> int:
        """Number of processes that are there for the generation that this one waits for, itself included if it is one
        of those that make it."""
        if self.generation or not self._founders:
            return len(self.members) - len(self.unreached)
        return len({self.me.number, *(member.number for member in self._fresh)})

    @property
    def needed(self) -> int:
        """Number of processes that have to be there for that."""
        if self.generation or not self._founders:
            return self.min_world
        return self.ready + len(self._missing_founders)

    @property
    def lacks(self) -> int:
        """Number of processes that have to join before there can be another generation, where one is wanted."""
        if not self.is_member or not (self.resting or any(member in self._gone for member in self.members)):
            return 0
        if not self._stay:  # all leave: those that want to join have no state to go on with
            return max(1, self.min_world)
        return max(0, self.min_world - len(self._stay) - len(self._joiners))

    @property
    def waiting(self) -> int:
        """Number of processes that want to join: those of them that find no place are spares."""
        return len(self._joiners)

    def view(self) -> GroupView:
        """The view of this process as it is now, without a version."""
        return GroupView(
            self.group,
            self._version,
            self.generation,
            *_columns(self.members),
            self._promised,
            self._accepted,
            *_columns(self._proposal),
            self._founders,
            self.resting,
            self.generation > 0 and not self.is_member,
            self.leaving,
            self.ended,
            self._traits,
            self.host[:256],
        )

    def next_view(self) -> GroupView:
        """The view to be sent now."""
        self._version = (self._version + 1) & 0xFFFF_FFFF
        return self.view()

    # Inside

    @property
    def _gone(self) -> set[MemberId]:
        return self._lost | self._suspected | self._dead

    @property
    def _fresh(self) -> list[MemberId]:
        """Founders that know of no generation, and processes that take the place of one that was lost so early."""
        return [
            member
            for member, view in self._views.items()
            if not view.generation
            and view.founders in (0, self._founders)
            and member.number < self._founders
            and member not in self._gone
        ]

    @property
    def _missing_founders(self) -> list[int]:
        """Numbers of those that the first generation is not made without before the last call is over."""
        there = {self.me.number, *(member.number for member in self._fresh)}
        missing = [number for number in range(self._founders) if number not in there]
        needed = [number for number in missing if not number or number not in self._lost_founders]  # 0 alone founds
        return needed if self._founders - len(missing) >= self.min_world else missing

    @property
    def _joiners(self) -> list[MemberId]:
        """Processes that fit, and want to join, in the order in which they are let in."""
        return sorted(
            member
            for member, view in self._views.items()
            if member not in self.members
            and member not in self._gone
            and view.joining
            and not view.leaving
            and view.traits == self._traits
        )

    @property
    def _stay(self) -> list[MemberId]:
        """Members of this generation that are to be in the next one."""
        return [member for member in self.members if member not in self._gone and not self._leaves(member)]

    def _leaves(self, member: MemberId) -> bool:
        if member == self.me:
            return self.leaving
        view = self._views.get(member)
        return view is not None and view.leaving

    @property
    def _turn(self) -> int:
        """How many others come before this one, of those that are reached, when a proposal is to be made."""
        return [member for member in self.members if member not in self._gone].index(self.me)

    def _found(self, now_s: float) -> None:
        if not self._founders or self.me.number:
            return
        founders = {member.number: member for member in sorted([self.me, *self._fresh])}  # of two the later start
        if len(founders) < self.min_world:
            self._enough_s = None
        elif self._enough_s is None:
            self._enough_s = now_s
        is_over = self._enough_s is not None and now_s >= self._enough_s + self.last_call_s
        if is_over or not self._missing_founders:
            self._adopt(1, tuple(founders[number] for number in sorted(founders)))

    def _target(self, *, at_rest: bool = False) -> tuple[MemberId, ...] | None:
        """The members of the next generation as this process would have them; None: it would have none, or cannot.

        While members rest there is always a next one: that is how they go on.
        """
        at_rest = at_rest or self.resting
        if not at_rest and not any(member in self._gone for member in self.members):
            return None
        stay = self._stay
        target = (*stay, *self._joiners[: max(0, self.max_world - len(stay))])
        # One that stays has what the others need, and keeps the generation before from going on without it.
        return target if stay and len(target) >= self.min_world else None

    def _vote(self, view: GroupView) -> None:
        """Promise and accept what another member has."""
        if view.accepted > self._accepted and view.accepted >= self._promised:
            self._accepted = view.accepted
            self._proposal = _ids(view.next_numbers, view.next_incarnations)
        self._promised = max(self._promised, view.promised, view.accepted)

    def _advance(self) -> None:
        """Propose if a quorum has promised, and learn what a quorum has accepted."""
        if self._ballot and self._ballot == self._promised and self._accepted != self._ballot:
            promised = self._with_ballot(self._ballot, "promised")
            if self._is_quorum(promised):
                value = self._value(promised)
                if value is not None:
                    self._accepted, self._proposal = self._ballot, value
        counts = Counter(view.accepted for member, view in self._views.items() if self._counts(member, view))
        counts[self._accepted] += 1
        for ballot in counts:
            accepted = self._with_ballot(ballot, "accepted")
            if ballot and self._is_quorum(accepted):
                self._adopt(self.generation + 1, self._proposal_of(ballot))
                return

    def _value(self, promised: Sequence[MemberId]) -> tuple[MemberId, ...] | None:
        """Return what to propose: what may have been decided already, else what this process wants."""
        newest, value = self._accepted, self._proposal
        for member in promised:
            view = self._views.get(member)
            if view is not None and view.accepted > newest:
                newest, value = view.accepted, _ids(view.next_numbers, view.next_incarnations)
        return value if newest else self._target()

    def _counts(self, member: MemberId, view: GroupView) -> bool:
        return member in self.members and view.generation == self.generation

    def _with_ballot(self, ballot: int, what: str) -> list[MemberId]:
        """Members whose newest view has this ballot, this one included. ``what``: promised or accepted."""
        found = [
            member
            for member, view in self._views.items()
            if self._counts(member, view) and getattr(view, what) == ballot
        ]
        own = self._promised if what == "promised" else self._accepted
        return [*found, self.me] if own == ballot else found

    def _proposal_of(self, ballot: int) -> tuple[MemberId, ...]:
        if self._accepted == ballot:
            return self._proposal
        view = next(v for m, v in self._views.items() if self._counts(m, v) and v.accepted == ballot)
        return _ids(view.next_numbers, view.next_incarnations)

    def _is_quorum(self, of: Collection[MemberId]) -> bool:
        """Whether these members of the generation decide for all of it."""
        count = sum(member in of for member in self.members)
        if 2 * count != len(self.members):
            return 2 * count > len(self.members)
        return all(member in of or member in self._dead for member in self.members)

    def _adopt(self, generation: int, members: tuple[MemberId, ...]) -> None:
        self.generation = generation
        self.members = members
        self._promised = self._accepted = self._ballot = 0
        self._proposal = ()
        self.resting = False
        self._suspected.clear()
        self._wanted_s = None
        for member in self._dead:
            if member not in members:
                self._views.pop(member, None)


def _ids(numbers: Sequence[int], incarnations: Sequence[int]) -> tuple[MemberId, ...]:
    return tuple(map(MemberId, numbers, incarnations))


def _columns(members: Sequence[MemberId]) -> tuple[list[int], list[int]]:
    return [member.number for member in members], [member.incarnation for member in members]
