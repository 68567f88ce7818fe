"""The registry of clients: a pure table, fed with messages and their times.

Death and silence are two things. The kernel or DDS, whose threads need no interpreter, report a dead process; then its
client is removed. A silent one hangs, or a call into C holds its interpreter: it stays a member, but is not waited for
until it sends again. While it reports that it trains, it is waited for even then, until the deadline of the round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from gradbus.runtime.wire.control import PROTOCOL, Hello
from gradbus.runtime.wire.messages import Identity, is_later

MAX_MEMBERS = 65_536  # any process can send a Hello
DOUBT_S = 5.0  # so long a client that may be gone is waited for
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
        seen_s: when it sent last, and ``excused_s``: for how long since then the controller could not receive.
        model_round: the round of the newest model that it is known to have held in this session; -1: none.
        out_until: before this round it must not take part.
        silent: nothing came for longer than ``dead_after_s``, and it does not train: it is not waited for.
        quiet: nothing came for so long, training or not.
        is_doubted: DDS has lost it while the controller itself stood still.
    """

    client_id: int
    incarnation: int
    hello: Hello
    seen_s: float
    from_round: int
    number: int
    model_round: int = -1
    out_until: int = 0
    excused_s: float = 0.0
    silent: bool = False
    quiet: bool = False
    is_doubted: bool = False

    def observe(self, now_s: float) -> None:
        """Something came from it: it is alive."""
        self.seen_s, self.excused_s = now_s, 0.0
        self.silent = self.quiet = self.is_doubted = False

    def silent_for_s(self, now_s: float) -> float:
        """Seconds without a message of it, as far as the controller could receive."""
        return now_s - self.seen_s - self.excused_s

    @property
    def is_busy(self) -> bool:
        """Whether it last reported that it runs the user's own code, and is not suspected dead."""
        return self.hello.phase in BUSY_PHASES and not self.is_doubted


@dataclass(slots=True)
class _Duplicate:
    """A second process with the id of a member."""

    incarnation: int
    since_s: float
    host: str


class ClientRegistry:
    """The clients of a controller.

    A client with another incarnation replaces its older start as soon as that one is known to be gone, or has been
    silent for ``dead_after_s``. While the older one still sends, the newcomer is refused, as two processes must not
    train under one id. In between, the newcomer waits.
    """

    def __init__(
        self, *, dim: int, layout: int, session: int, dead_after_s: float, duplicate_after_s: float, memory: str = "",
        trained_only: bool = False,
    ) -> None:  # fmt: skip
        """An empty table.

        Args:
            dim: size of the model; layout: its hash. Clients that differ are refused.
            session: this start of the controller. Only its Welcome makes a client ready.
            dead_after_s: a client that is silent for so long hangs, unless it reports that it trains.
            duplicate_after_s: how long a second process with an id waits at least for a message of the first one.
            memory: the controller's machine, where it shares memory; else empty.
            trained_only: ``dim`` and ``layout`` are those of the trained part alone.
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
        """The client, if this incarnation of it is a member."""
        member = self._members.get(client_id)
        return member if member is not None and member.incarnation == incarnation else None

    def incarnation_of(self, client_id: int) -> int | None:
        """The incarnation of this client that is a member, if any."""
        member = self._members.get(client_id)
        return None if member is None else member.incarnation

    def last_seen_at_s(self, client_id: int) -> float | None:
        """The time of this client's last message."""
        member = self._members.get(client_id)
        return None if member is None else member.seen_s

    def shares_memory(self, client_id: int) -> bool:
        """Whether this client reads the controller's memory."""
        member = self._members.get(client_id)
        return member is not None and bool(self._memory) and member.hello.memory == self._memory

    @property
    def sharing(self) -> int:
        """Number of clients that read the controller's memory."""
        return sum(map(self.shares_memory, self._members))

    def holds(self, client_id: int, incarnation: int, round_id: int) -> None:
        """A client holds, or has worked from, the model after this round."""
        member = self.get(client_id, incarnation)
        if member is not None and member.hello.session == self._session:
            member.model_round = max(member.model_round, round_id)

    def all_hold(self, round_id: int) -> bool:
        """Whether all clients that read the controller's memory hold the model after this round, or a newer one."""
        return all(member.model_round >= round_id for member in self if self.shares_memory(member.client_id))

    def hello(
        self, sender: Identity, hello: Hello, number: int, *, now_s: float, next_round: int, out_until: int = 0,
        is_stalled: bool = False,
    ) -> tuple[HelloAnswer, str]:  # fmt: skip
        """The answer to a Hello, and the reason of a refusal.

        Args:
            number: of the message. One that a later Hello has overtaken shows that its client is alive, and nothing
                else: it may be from before its Welcome.
            next_round: the first round of a new client, but not before ``out_until``.
            is_stalled: the controller stood still just now: messages of that time may not have been handled yet.
        """
        if hello.protocol != PROTOCOL:
            return (
                HelloAnswer.REFUSE,
                f"it speaks protocol {hello.protocol}, this controller {PROTOCOL}: use one version",
            )
        if (detail := self._mismatch(hello)) is not None:
            return HelloAnswer.REFUSE, f"its model is not the same as the controller's ({detail}): set the same model"
        client_id, incarnation = sender.sender, sender.incarnation
        member = self._members.get(client_id)
        if member is not None and incarnation != member.incarnation:
            # Which of the two is older does not matter, and a clock that was set back would get it wrong.
            answer = self._answer_duplicate(member, _Duplicate(incarnation, now_s, hello.host), is_stalled)
            if answer is not None:
                return answer
            del self._members[client_id]
            member = None
        if member is None:  # new, or back after it was taken for dead: it needs the round from which on it counts
            if len(self._members) >= MAX_MEMBERS:
                return HelloAnswer.REFUSE, f"this run has {MAX_MEMBERS:,} clients already"
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
        """How the client's model differs; None: it is the same."""
        dim, layout = hello.dim, hello.layout
        if self._trained_only and hello.trained_dim:
            dim, layout = hello.trained_dim, hello.trained_layout
        if dim != self._dim:
            return f"{dim:,} values, here {self._dim:,}"
        return None if layout == self._layout else "other names or shapes, or others of its parameters are frozen"

    def _answer_duplicate(
        self, member: ClientRecord, newcomer: _Duplicate, is_stalled: bool
    ) -> tuple[HelloAnswer, str] | None:
        """The answer to a second process with the id of a member; None: it takes the member's place."""
        client_id, now_s = member.client_id, newcomer.since_s
        known = self._duplicates.get(client_id)
        if known is None or known.incarnation != newcomer.incarnation:
            known = self._duplicates[client_id] = newcomer
        if now_s - known.since_s < self._duplicate_after_s:
            return HelloAnswer.NOTHING, ""  # the older one may yet send something
        if member.seen_s > known.since_s + self._duplicate_after_s / 2:
            del self._duplicates[client_id]
            return HelloAnswer.REFUSE, f"client id {client_id} is in use by {member.hello.host}: give each its own id"
        if not (member.silent or member.is_doubted) and member.silent_for_s(now_s) <= self._dead_after_s:
            return HelloAnswer.NOTHING, ""  # nothing shows that it is dead: training may hold its interpreter
        if is_stalled:  # the older one may have sent something: the wait for it begins anew
            self._duplicates[client_id] = newcomer
            return HelloAnswer.NOTHING, ""
        del self._duplicates[client_id]
        return None

    def remove(self, client_id: int, incarnation: int) -> bool:
        """Remove a client that has left, or that is dead. True if it was a member."""
        if self.get(client_id, incarnation) is None:
            return False
        del self._members[client_id]
        self._duplicates.pop(client_id, None)
        return True

    def exclude(self, client_id: int, until: int) -> None:
        """Keep a client out before round ``until``. The Welcome that answers its next Hello names that round."""
        member = self._members.get(client_id)
        if member is not None:
            member.out_until = until
            member.from_round = max(member.from_round, until)

    def admit(self, round_id: int) -> list[ClientRecord]:
        """Let the clients that came during a failed attempt at this round into the next one. Returns them."""
        late = [m for m in self._members.values() if m.from_round > round_id >= m.out_until]
        for member in late:
            member.from_round = round_id
        return late

    def find_silent(self, now_s: float) -> list[ClientRecord]:
        """Mark the clients that have been silent for too long. Returns those that are not waited for from now on:
        neither those that train nor those that were silent before."""
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
        """A client is reported as gone, which may be wrong: from now on it has its full time to send something."""
        member = self.get(client_id, incarnation)
        if member is not None:
            member.excused_s = now_s - member.seen_s
            member.is_doubted = True

    def excuse_silence(self, seconds: float, now_s: float) -> None:
        """The controller stood still for so long: its clients' messages of that time are not handled yet."""
        for member in self._members.values():
            member.excused_s = min(member.excused_s + seconds, now_s - member.seen_s)

    def ready(self, round_id: int) -> list[int]:
        """Ids of the clients that can take part in the round, ascending: neither silent ones, nor those without a
        message since they began to train for an earlier round."""
        return sorted(
            member.client_id
            for member in self._members.values()
            if self._may_take_part(member, round_id)
            and not member.silent
            and not (member.quiet and member.hello.round_id < round_id)
        )

    def taking_part(self, round_id: int) -> set[int]:
        """Ids of the members that were let into this round, and are not silent."""
        return {m.client_id for m in self._members.values() if m.from_round <= round_id and not m.silent}

    def silent_ids(self, round_id: int) -> set[int]:
        """Ids of silent clients that could else take part in this round."""
        return {
            m.client_id for m in self._members.values() if (m.silent or m.quiet) and self._may_take_part(m, round_id)
        }

    def count_live(self) -> int:
        """Number of members that are not silent."""
        return sum(not member.silent for member in self._members.values())

    def _may_take_part(self, member: ClientRecord, round_id: int) -> bool:
        return member.hello.ready and member.hello.session == self._session and member.from_round <= round_id
