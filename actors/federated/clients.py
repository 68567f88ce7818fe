"""Who takes part: a pure table of clients, fed with messages and their times.

Death and silence are two things. That a process is dead is reported by the kernel or by DDS, whose threads need no
interpreter; then its client is removed. One that merely says nothing hangs, or its interpreter is held by a call into
C: it stays a member, but is not waited for, until it sends again. And while it reports that it trains, not even that:
training may hold the interpreter for as long as it likes, and the deadline of the round bounds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from gradbus.runtime.wire.control import PROTOCOL, Hello
from gradbus.runtime.wire.messages import is_later

MAX_MEMBERS = 65_536  # whoever can send a Hello cannot make the table grow without end
DOUBT_S = 5.0  # who may be gone has so long to say something, before it is no longer waited for
BUSY_PHASES = frozenset({"preparing", "training"})  # the user's own code runs, which may hold the interpreter


class HelloAnswer(Enum):
    """The answer to a Hello."""

    NOTHING = "nothing"
    WELCOME = "welcome"
    REFUSE = "refuse"


@dataclass(slots=True)
class ClientRecord:
    """One client, as it reported last.

    Attributes:
        hello: its newest Hello, and ``number``: of that message.
        from_round: the first round it takes part in.
        heard_s: when it sent last, and ``excused_s``: for how long since then the controller could not receive.
        model_round: the round of the newest model that it is known to have held in this session; -1: none.
        out_until: before this round it must not take part, whoever is missing.
        silent: nothing came for longer than ``dead_after_s``, and it does not train: it is not waited for.
        quiet: the same of one that trains. is_doubted: DDS has lost it while the controller itself stood still.
    """

    client_id: int
    incarnation: int
    hello: Hello
    heard_s: float
    from_round: int
    number: int
    model_round: int = -1
    out_until: int = 0
    excused_s: float = 0.0
    silent: bool = False
    quiet: bool = False
    is_doubted: bool = False

    def observe(self, now_s: float) -> None:
        """It lives."""
        self.heard_s, self.excused_s = now_s, 0.0
        self.silent = self.quiet = self.is_doubted = False

    def silent_for_s(self, now_s: float) -> float:
        """For how long nothing came from it, as far as the controller could receive."""
        return now_s - self.heard_s - self.excused_s

    @property
    def is_busy(self) -> bool:
        """Whether the client last reported that it runs the user's own code, and is not suspected dead."""
        return self.hello.phase in BUSY_PHASES and not self.is_doubted


@dataclass(slots=True)
class _Duplicate:
    """A second process that uses an id which is taken."""

    incarnation: int
    since_s: float
    host: str


class ClientRegistry:
    """The clients of a controller.

    A client that comes again with a higher incarnation replaces its older start as soon as that one is known to be
    gone, or has been silent for ``dead_after_s``. While the older one still sends, the newcomer is refused: the id is
    taken: two processes must not train under one id. In between, where the older one lives and says nothing, the
    newcomer waits.
    """

    def __init__(
        self, *, dim: int, layout: int, session: int, dead_after_s: float, duplicate_after_s: float, memory: str = "",
        trained_only: bool = False,
    ) -> None:  # fmt: skip
        """An empty table.

        Args:
            dim: size of the model; layout: its hash. Clients that differ are refused.
            session: this start of the controller. A client is ready only once it has been welcomed by it: then it
                has forgotten what an earlier start sent.
            dead_after_s: a client that is silent for so long hangs, unless it says that it trains.
            duplicate_after_s: when an id is used twice, how long after the newcomer's first word it is decided at the
                earliest whether the older one still talks.
            memory: the controller's machine, where it shares memory; else empty.
            trained_only: ``dim`` and ``layout`` are those of what is trained alone.
        """
        self._trained_only = trained_only
        self._dim = dim
        self._layout = layout
        self._session = session
        self._dead_after_s = dead_after_s
        self._duplicate_after_s = duplicate_after_s
        self._memory = memory
        self._members: dict[int, ClientRecord] = {}
        self._duplicates: dict[int, _Duplicate] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[ClientRecord]:
        return iter(self._members.values())

    def get(self, client_id: int, incarnation: int) -> ClientRecord | None:
        """This start of this client, if it is a member."""
        member = self._members.get(client_id)
        return member if member is not None and member.incarnation == incarnation else None

    def incarnation_of(self, client_id: int) -> int | None:
        """Which start of this client is a member, if any."""
        member = self._members.get(client_id)
        return None if member is None else member.incarnation

    def last_seen_at_s(self, client_id: int) -> float | None:
        """When this client sent last."""
        member = self._members.get(client_id)
        return None if member is None else member.heard_s

    def shares_memory(self, client_id: int) -> bool:
        """Whether this client says that it reads the controller's memory."""
        member = self._members.get(client_id)
        return member is not None and bool(self._memory) and member.hello.memory == self._memory

    @property
    def sharing(self) -> int:
        """How many clients do."""
        return sum(map(self.shares_memory, self._members))

    def holds(self, client_id: int, incarnation: int, round_id: int) -> None:
        """A client says that it holds, or has worked from, the model after this round."""
        member = self.get(client_id, incarnation)
        if member is not None and member.hello.session == self._session:
            member.model_round = max(member.model_round, round_id)

    def all_hold(self, round_id: int) -> bool:
        """Whether all clients that read the controller's memory hold the model after this round, or a newer one."""
        return all(member.model_round >= round_id for member in self if self.shares_memory(member.client_id))

    def heard(self, client_id: int, incarnation: int, now_s: float) -> ClientRecord | None:
        """Something came from it: it lives."""
        member = self.get(client_id, incarnation)
        if member is not None:
            member.observe(now_s)
        return member

    def hello(
        self, client_id: int, incarnation: int, hello: Hello, *, now_s: float, next_round: int, number: int,
        out_until: int = 0, is_stalled: bool = False,
    ) -> tuple[HelloAnswer, str]:  # fmt: skip
        """A client says Hello: what to answer, and why where it is refused.

        Args:
            number: of the message. What a later one has overtaken shows that its client lives, and nothing else: it may
                say of one that has been welcomed since that it is not ready.
            next_round: the first round that whoever is new takes part in, and ``out_until`` this client.
            is_stalled: the controller stood still just now: what others sent meanwhile may be yet to come.
        """
        if hello.protocol != PROTOCOL:
            return (
                HelloAnswer.REFUSE,
                f"it speaks protocol {hello.protocol}, this controller {PROTOCOL}: use one version",
            )
        if (detail := self._mismatch(hello)) is not None:
            return HelloAnswer.REFUSE, f"its model is not the same as the controller's ({detail}): set the same model"
        member = self._members.get(client_id)
        if member is None and len(self._members) >= MAX_MEMBERS:
            return HelloAnswer.REFUSE, f"this run has {MAX_MEMBERS:,} clients already"
        if member is not None and incarnation != member.incarnation:
            # Which of the two is older does not matter, and a clock that was set back would get it wrong.
            return self._resolve_duplicate(member, incarnation, hello, now_s, next_round, number, out_until, is_stalled)
        if member is None:  # new, or back after it was taken for dead: it has to hear from which round on it counts
            from_round = max(next_round, out_until)
            self._members[client_id] = ClientRecord(
                client_id, incarnation, hello, now_s, from_round, number, out_until=out_until
            )
            return HelloAnswer.WELCOME, ""
        member.observe(now_s)
        if not is_later(number, member.number):
            return HelloAnswer.NOTHING, ""
        member.hello, member.number = hello, number
        self.holds(client_id, incarnation, hello.model_round)
        knows = hello.session == self._session and hello.next_round in (-1, member.from_round)
        return (HelloAnswer.NOTHING if knows else HelloAnswer.WELCOME), ""

    def _mismatch(self, hello: Hello) -> str | None:
        """What is different about the client's model; None: it is the same."""
        dim, layout = hello.dim, hello.layout
        if self._trained_only and hello.trained_dim:
            dim, layout = hello.trained_dim, hello.trained_layout
        if dim != self._dim:
            return f"{dim:,} values, here {self._dim:,}"
        return None if layout == self._layout else "other names or shapes, or others of its parameters are frozen"

    def _resolve_duplicate(
        self, member: ClientRecord, incarnation: int, hello: Hello, now_s: float, next_round: int, number: int,
        out_until: int, is_stalled: bool,
    ) -> tuple[HelloAnswer, str]:  # fmt: skip
        duplicate = self._duplicates.get(member.client_id)
        if duplicate is None or duplicate.incarnation != incarnation:
            duplicate = self._duplicates[member.client_id] = _Duplicate(incarnation, now_s, hello.host)
        if now_s - duplicate.since_s < self._duplicate_after_s:
            return HelloAnswer.NOTHING, ""  # wait and see whether the older one is still there
        if member.heard_s > duplicate.since_s + self._duplicate_after_s / 2:
            del self._duplicates[member.client_id]
            return (
                HelloAnswer.REFUSE,
                f"client id {member.client_id} is in use by {member.hello.host}: give each its own id",
            )
        if not (member.silent or member.is_doubted) and member.silent_for_s(now_s) <= self._dead_after_s:
            return HelloAnswer.NOTHING, ""  # nobody says that it is dead: its interpreter may be held by its training
        del self._duplicates[member.client_id]
        if is_stalled:  # the older one may have talked: the wait for its word begins anew
            self._duplicates[member.client_id] = _Duplicate(incarnation, now_s, hello.host)
            return HelloAnswer.NOTHING, ""
        del self._members[member.client_id]
        return self.hello(
            member.client_id, incarnation, hello, now_s=now_s, next_round=next_round, number=number, out_until=out_until
        )

    def remove(self, client_id: int, incarnation: int) -> bool:
        """It has left, or DDS has lost it. True if it was a member."""
        if self.get(client_id, incarnation) is None:
            return False
        del self._members[client_id]
        self._duplicates.pop(client_id, None)
        return True

    def exclude(self, client_id: int, until: int) -> None:
        """It must not take part before round ``until``. Its next Hello is answered with a Welcome that says so."""
        member = self._members.get(client_id)
        if member is not None:
            member.out_until = until
            member.from_round = max(member.from_round, until)

    def admit(self, round_id: int) -> list[ClientRecord]:
        """Let those in who came while an attempt at this round failed: the next one needs them. Returns them."""
        late = [m for m in self._members.values() if m.from_round > round_id >= m.out_until]
        for member in late:
            member.from_round = round_id
        return late

    def find_silent(self, now_s: float) -> list[ClientRecord]:
        """Mark those that have been silent for too long, as far as the controller could hear. Returns those that are
        not waited for from now on: not who trains, and who was silent before."""
        found = []
        for member in self._members.values():
            limit_s = min(self._dead_after_s, DOUBT_S) if member.is_doubted else self._dead_after_s
            if member.silent or member.silent_for_s(now_s) <= limit_s:
                continue
            member.quiet, member.silent = True, not member.is_busy
            if member.silent:
                found.append(member)
        return found

    def wait_for(self, client_id: int, incarnation: int, now_s: float) -> None:
        """It is reported as gone, which may not be so: from now on it has its full time to send something."""
        member = self.get(client_id, incarnation)
        if member is not None:
            member.excused_s = now_s - member.heard_s
            member.is_doubted = True

    def excuse_silence(self, seconds: float, now_s: float) -> None:
        """The controller stood still: what its clients sent meanwhile is yet to come. Who is waited for has
        been given that time already."""
        for member in self._members.values():
            member.excused_s = min(member.excused_s + seconds, now_s - member.heard_s)

    def ready(self, round_id: int) -> list[int]:
        """Ids of the clients that can take part in the round, ascending. Not those that are silent, nor those that have
        sent nothing since they began to train for a round before: as soon as such a one sends, it takes part."""
        return sorted(
            member.client_id
            for member in self._members.values()
            if self._may_take_part(member, round_id)
            and not member.silent
            and not (member.quiet and member.hello.round_id < round_id)
        )

    def taking_part(self, round_id: int) -> set[int]:
        """Ids of those members that were let into this round, and are not silent."""
        return {m.client_id for m in self._members.values() if m.from_round <= round_id and not m.silent}

    def silent_ids(self, round_id: int) -> set[int]:
        """Ids of those that could take part in this round if only they sent something."""
        return {
            m.client_id for m in self._members.values() if (m.silent or m.quiet) and self._may_take_part(m, round_id)
        }

    def count_live(self) -> int:
        """How many members there are that are not silent."""
        return sum(not member.silent for member in self._members.values())

    def _may_take_part(self, member: ClientRecord, round_id: int) -> bool:
        return member.hello.ready and member.hello.session == self._session and member.from_round <= round_id
