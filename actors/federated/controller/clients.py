"""The registry of clients: a pure table, fed with messages and their times.

Death and silence are two things. The kernel or DDS, whose threads need no interpreter, report a dead process; then its
client is removed. A silent one hangs, or a call into C holds its interpreter: it stays a member, but is not waited for
until it sends again. While it reports that it trains, it is waited for even then, until the deadline of the round. One
whose host has closed its connection is dead as a rule, and back in a moment otherwise: it counts as silent at once,
training or not, and is removed when the lease is over.

A host (``actors/virtual/``) speaks for many clients. It has one record, with one session and one heartbeat, whose life
and silence are those of its clients; of each client of its own there is only what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from gradbus.actors.federated.controller.participation import FOR_GOOD
from gradbus.runtime.wire.control import FETCHING_PHASE, PAUSED_PHASE, PROTOCOL, Hello
from gradbus.runtime.wire.frames import UNASSIGNED, is_later
from gradbus.runtime.wire.id_ranges import parse_ids
from gradbus.runtime.wire.messages import Identity

Compared = Literal["all", "trained", "shared"]
MAX_MEMBERS = 65_536  # any process can send a Hello
MAX_NEWCOMERS = 8  # processes with the id of one member that wait at the same time, each for an answer of its own
# No client has such an id: a host has the lowest one of its clients, above this; see UNASSIGNED.
FIRST_HOST = 0x8000_0000
_RELEASES = {3: ", as gradbus 0.1 does"}  # by the protocol that they speak
DOUBT_S = 5.0  # so long a client that may be gone is waited for
IDLE = "idle"
BUSY_PHASES = frozenset(
    {"preparing", "training", "evaluating"}
)  # the user's own code runs, which may hold the interpreter


def duplicate_after_s(heartbeat_s: float) -> float:
    """Seconds in which a client that lives sends something: its heartbeat, also where one is lost."""
    return 2.4 * heartbeat_s


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
        silent: nothing came for longer than ``dead_after_s``, and it does not train, or it has disconnected: it is not
            waited for.
        quiet: nothing came for so long, training or not.
        is_doubted: DDS has lost it while the controller itself stood still.
        is_disconnected: its host has closed its connection, and it has not dialled again.
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
    is_disconnected: bool = False

    def observe(self, now_s: float) -> None:
        """Something came from it: it is alive."""
        self.seen_s, self.excused_s = now_s, 0.0
        self.silent = self.quiet = self.is_doubted = self.is_disconnected = False

    def silent_for_s(self, now_s: float) -> float:
        """Seconds without a message of it, as far as the controller could receive."""
        return now_s - self.seen_s - self.excused_s

    @property
    def is_paused(self) -> bool:
        """Whether it last reported that it takes part in no round for now."""
        return self.hello.phase == PAUSED_PHASE

    @property
    def may_return(self) -> bool:
        """Whether it is here, or has only just disconnected: at the end of a run it is waited for."""
        return not self.silent or self.is_disconnected

    @property
    def is_busy(self) -> bool:
        """Whether it last reported that it runs the user's own code, and is not suspected dead."""
        return self.hello.phase in BUSY_PHASES and not self.is_doubted


@dataclass(slots=True)
class HostedClient:
    """One of the clients that a host speaks for.

    Attributes:
        host: the record of the host: what it says of itself holds for all of its clients.
        from_round, out_until: as of a :class:`ClientRecord`.
    """

    client_id: int
    host: ClientRecord
    from_round: int
    out_until: int = 0

    @property
    def incarnation(self) -> int:
        """Return that of the host."""
        return self.host.incarnation

    @property
    def hello(self) -> Hello:
        """The newest one of the host."""
        return self.host.hello

    @property
    def seen_s(self) -> float:
        """When the host sent last, for itself or for one of its clients."""
        return self.host.seen_s

    @property
    def silent(self) -> bool:
        """Whether its host is silent."""
        return self.host.silent

    @property
    def quiet(self) -> bool:
        """Whether its host is quiet."""
        return self.host.quiet

    @property
    def may_return(self) -> bool:
        """Whether its host is here, or has only just disconnected."""
        return self.host.may_return

    @property
    def is_paused(self) -> bool:
        """Return False: virtual clients are not paused."""
        return False

    def observe(self, now_s: float) -> None:
        """Something came from it, and so from its host."""
        self.host.observe(now_s)

    def silent_for_s(self, now_s: float) -> float:
        """Seconds without a message of the host."""
        return self.host.silent_for_s(now_s)


Member = ClientRecord | HostedClient


@dataclass(slots=True)
class _Newcomer:
    """A further process with the id of a member. ``since_s``: when its wait began; ``seen_s``: when it sent last."""

    since_s: float
    seen_s: float


class ExpectedModel(NamedTuple):
    """Holds by what a client's model is compared with the controller's.

    Attributes:
        dim: size of the model. layout: its hash.
        compares: what of a client's model both are of: all of it, the trained part alone, or what the patterns of a
            Welcome name, which a client knows only once it is welcomed.
    """

    dim: int
    layout: int
    compares: Compared = "all"


class ClientRegistry:
    """The clients of a controller.

    A client with another incarnation replaces its older start as soon as that one is known to be gone, or has been
    silent for ``dead_after_s``. While the older one still sends, the newcomer is refused, as two processes must not
    train under one id. In between, the newcomer waits, and each of several newcomers for itself.
    """

    def __init__(
        self,
        model: ExpectedModel,
        *,
        session: int,
        dead_after_s: float,
        duplicate_after_s: float,
        memory: str = "",
        max_members: int = MAX_MEMBERS,
    ) -> None:
        """An empty table.

        Args:
            model: clients whose model differs are refused.
            session: this start of the controller. Only its Welcome makes a client ready.
            dead_after_s: a client that is silent for so long hangs, unless it reports that it trains.
            duplicate_after_s: how long a second process with an id waits at least for a message of the first one.
            memory: the controller's machine, where it shares memory; else empty.
            max_members: further clients are refused.
        """
        self._max_members = max_members
        self._model = model
        self._session = session
        self._dead_after_s = dead_after_s
        self._duplicate_after_s = duplicate_after_s
        self._memory = memory
        self._members: dict[int, Member] = {}
        self._hosts: dict[int, ClientRecord] = {}
        self._newcomers: dict[int, dict[int, _Newcomer]] = {}  # by the id that they would take, and by incarnation

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    @property
    def has_hosts(self) -> bool:
        """Whether some process speaks for several clients."""
        return bool(self._hosts)

    def _records(self) -> list[ClientRecord]:
        """One for each process: of clients, and of hosts."""
        return [*(m for m in self._members.values() if isinstance(m, ClientRecord)), *self._hosts.values()]

    def get(self, client_id: int, incarnation: int) -> Member | None:
        """The client or the host, if this incarnation of it is here."""
        member = self._hosts.get(client_id) or self._members.get(client_id)
        return member if member is not None and member.incarnation == incarnation else None

    def incarnation_of(self, client_id: int) -> int | None:
        """The incarnation of this client or host that is here, if any."""
        member = self._hosts.get(client_id) or self._members.get(client_id)
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

    def note_model(self, client_id: int, incarnation: int, round_id: int) -> None:
        """Note that a client holds, or has worked from, the model after this round."""
        member = self.get(client_id, incarnation)
        if member is not None and member.hello.session == self._session:
            record = _record(member)
            record.model_round = max(record.model_round, round_id)

    def all_hold(self, round_id: int) -> bool:
        """Whether all clients that read the controller's memory hold the model after this round, or a newer one."""
        return all(_record(m).model_round >= round_id for m in self if self.shares_memory(m.client_id))

    def answer_hello(
        self,
        sender: Identity,
        hello: Hello,
        number: int,
        *,
        now_s: float,
        next_round: int,
        out_until: int = 0,
        is_stalled: bool = False,
    ) -> tuple[HelloAnswer, str]:
        """Register a client, or what it reports. Returns the answer to its Hello, and the reason of a refusal.

        Args:
            number: of the message. One that a later Hello has overtaken shows that its client is alive, and nothing
                else: it may be from before its Welcome.
            next_round: the first round of a new client, but not before ``out_until``.
            is_stalled: the controller stood still just now: messages of that time may not have been handled yet.
        """
        if (why := self._unusable(hello)) is not None:
            return HelloAnswer.REFUSE, why
        client_id, incarnation = sender.sender, sender.incarnation
        member = self._members.get(client_id)
        if isinstance(member, HostedClient) or (member is not None and incarnation != member.incarnation):
            # Which of the two is older does not matter, and a clock that was set back would get it wrong.
            answer = self._answer_newcomer(_record(member), sender, now_s, is_stalled)
            if answer is not None:
                return answer
            del self._members[client_id]
            self._newcomers.pop(client_id, None)
            member = None
        if member is None:  # new, or back after it was taken for dead: it needs the round from which on it counts
            if len(self._members) >= self._max_members:
                return HelloAnswer.REFUSE, f"this run has {self._max_members:,} clients already, as many as it can have"
            from_round = max(next_round, out_until)
            self._members[client_id] = ClientRecord(
                client_id, incarnation, hello, now_s, from_round, number, out_until=out_until
            )
            return HelloAnswer.WELCOME, ""
        return self._known(member, hello, number, now_s)

    def _known(self, member: ClientRecord, hello: Hello, number: int, now_s: float) -> tuple[HelloAnswer, str]:
        """The answer to another Hello of one that is here."""
        member.observe(now_s)
        if not is_later(number, member.number):
            return HelloAnswer.NOTHING, ""
        member.hello, member.number = hello, number
        self.note_model(member.client_id, member.incarnation, hello.model_round)
        knows = hello.session == self._session and hello.next_round in (-1, member.from_round)
        return (HelloAnswer.NOTHING if knows else HelloAnswer.WELCOME), ""

    def answer_host_hello(
        self,
        sender: Identity,
        hello: Hello,
        number: int,
        *,
        now_s: float,
        next_round: int,
        out_until: Callable[[int], int],
        is_stalled: bool = False,
    ) -> tuple[HelloAnswer, str]:
        """Register a host with all of its clients, or what it reports; else as :meth:`answer_hello`.

        Args:
            out_until: of a client id: the first round in which it may take part.
        """
        if (why := self._unusable(hello)) is not None:
            return HelloAnswer.REFUSE, why
        ranges, host = parse_ids(hello.ids), self._hosts.get(sender.sender)
        number_of_host = FIRST_HOST | ranges[0].start
        if sender.sender != number_of_host or sender.sender >= UNASSIGNED:
            why = f"the host of clients {hello.ids[:40]} is number {sender.sender}: expected {number_of_host}"
            return HelloAnswer.REFUSE, why
        if host is not None and host.incarnation == sender.incarnation:
            if host.hello.ids != hello.ids:
                return HelloAnswer.REFUSE, f"it spoke for clients {host.hello.ids[:40]} before: start it anew"
            return self._known(host, hello, number, now_s)
        is_fit = sum(map(len, ranges)) <= MAX_MEMBERS  # before there is a list of them
        ids = [client_id for each in ranges for client_id in each] if is_fit else []
        if not is_fit or len(self._members.keys() | ids) > MAX_MEMBERS:  # an earlier start of it may hold some
            return HelloAnswer.REFUSE, f"this run takes {MAX_MEMBERS:,} clients, and has {len(self._members):,} already"
        holders = {
            _record(self._members[one]).client_id: _record(self._members[one]) for one in ids if one in self._members
        }
        for holder in holders.values():
            newcomer = Identity(holder.client_id, sender.incarnation)
            answer = self._answer_newcomer(holder, newcomer, now_s, is_stalled)
            if answer is not None:
                return answer
        for holder in holders.values():
            self.remove(holder.client_id, holder.incarnation)
        host = ClientRecord(sender.sender, sender.incarnation, hello, now_s, next_round, number)
        self._hosts[sender.sender] = host
        for client_id in ids:
            if (until := out_until(client_id)) != FOR_GOOD:
                self._members[client_id] = HostedClient(client_id, host, max(next_round, until), until)
        return HelloAnswer.WELCOME, ""

    def _unusable(self, hello: Hello) -> str | None:
        """Why a process that says this cannot take part; None: it can."""
        if hello.protocol != PROTOCOL:
            known = _RELEASES.get(hello.protocol, "")
            return (
                f"it speaks protocol {hello.protocol}{known}, this controller {PROTOCOL}: use one version of gradbus "
                f"on all nodes"
            )
        if (detail := self._mismatch(hello)) is not None:
            return f"its model is not the same as the controller's ({detail}): set the same model"
        return None

    def _mismatch(self, hello: Hello) -> str | None:
        """Return how the client's model differs; None: it is the same."""
        expected, dim, layout = self._model, hello.dim, hello.layout
        if expected.compares == "shared":
            if hello.session != self._session:
                return None
            dim, layout = hello.shared_dim, hello.shared_layout
            if not layout:
                return "it has ignored which tensors are shared, as an older version does"
        elif expected.compares == "trained" and hello.trained_dim:
            dim, layout = hello.trained_dim, hello.trained_layout
        if dim != expected.dim:
            shared = "shares " if expected.compares == "shared" else ""
            return f"{shared}{dim:,} values, here {expected.dim:,}"
        return None if layout == expected.layout else "other names or shapes, or others of its parameters are frozen"

    def _answer_newcomer(
        self, member: ClientRecord, newcomer: Identity, now_s: float, is_stalled: bool
    ) -> tuple[HelloAnswer, str] | None:
        """The answer to a further process with the id of a member; None: it takes the member's place."""
        waiting = self._newcomers.setdefault(newcomer.sender, {})
        if newcomer.incarnation not in waiting and len(waiting) >= MAX_NEWCOMERS:
            for gone in [one for one, its in waiting.items() if now_s - its.seen_s > self._dead_after_s]:
                del waiting[gone]
            if len(waiting) >= MAX_NEWCOMERS:
                return HelloAnswer.NOTHING, ""  # its wait begins once another one has its answer
        known = waiting.setdefault(newcomer.incarnation, _Newcomer(now_s, now_s))
        known.seen_s = now_s
        if now_s - known.since_s < self._duplicate_after_s:
            return HelloAnswer.NOTHING, ""  # the older one may yet send something
        if member.seen_s > known.since_s + self._duplicate_after_s / 2:
            del waiting[newcomer.incarnation]
            shown, name, host = newcomer.sender & ~FIRST_HOST, member.hello.name, member.hello.host
            if name and newcomer.sender < FIRST_HOST:
                return HelloAnswer.REFUSE, f"the name {name!r} is in use by {host} (client {shown}): give each its own"
            return HelloAnswer.REFUSE, f"client id {shown} is in use by {host}: give each its own id"
        if not (member.silent or member.is_doubted) and member.silent_for_s(now_s) <= self._dead_after_s:
            return HelloAnswer.NOTHING, ""  # nothing shows that it is dead: training may hold its interpreter
        if is_stalled:  # the older one may have sent something: the wait for it begins anew
            known.since_s = now_s
            return HelloAnswer.NOTHING, ""
        return None

    def remove(self, client_id: int, incarnation: int) -> bool:
        """Remove a client that has left, or that is dead, or a host with its clients. True if it was here."""
        if self.get(client_id, incarnation) is None:
            return False
        of_host = self.clients_of(client_id, incarnation)
        self._newcomers.pop(client_id, None)
        if self._hosts.pop(client_id, None) is None:
            del self._members[client_id]
        else:
            for one in of_host:
                del self._members[one]
                self._newcomers.pop(one, None)
        return True

    def clients_of(self, host_id: int, incarnation: int) -> list[int]:
        """Ids of the clients that this start of a host speaks for, as far as they may take part."""
        host = self._hosts.get(host_id)
        if host is None or host.incarnation != incarnation:
            return []
        return [client_id for client_id, member in self._members.items() if _record(member) is host]

    def exclude(self, client_id: int, until: int) -> None:
        """Keep a client out before round ``until``. The Welcome that answers its next Hello names that round."""
        member = self._members.get(client_id)
        if member is not None:
            member.out_until = until
            member.from_round = max(member.from_round, until)

    def let_into(self, round_id: int) -> list[ClientRecord]:
        """Let the clients that came during a failed attempt at this round into the next one. Returns those to welcome
        anew: of the clients of a host, the host."""
        late = [m for m in (*self._members.values(), *self._hosts.values()) if m.from_round > round_id >= m.out_until]
        for member in late:
            member.from_round = round_id
        return [member for member in late if isinstance(member, ClientRecord)]

    def mark_silent(self, now_s: float) -> list[ClientRecord]:
        """Mark the clients that have been silent for too long. Returns those that are not waited for from now on:
        neither those that train nor those that were silent before."""
        found = []
        for member in self._records():
            limit_s = min(self._dead_after_s, DOUBT_S) if member.is_doubted else self._dead_after_s
            if member.silent or member.silent_for_s(now_s) <= limit_s:
                continue
            member.quiet, member.silent = True, not member.is_busy
            if member.silent:
                found.append(member)
        return found

    def put_in_doubt(self, client_id: int, incarnation: int, now_s: float) -> None:
        """Note that a client is reported as gone, which may be wrong: from now on it has its full time to send."""
        member = self.get(client_id, incarnation)
        if isinstance(member, ClientRecord):
            member.excused_s = now_s - member.seen_s
            member.is_doubted = True

    def stop_waiting_for(self, client_id: int, incarnation: int) -> bool:
        """Note that the host of a client has closed its connection: it is not waited for until it sends again. Returns
        whether that is news."""
        member = self.get(client_id, incarnation)
        if not isinstance(member, ClientRecord) or member.is_disconnected:
            return False
        was_silent, member.silent, member.is_disconnected = member.silent, True, True
        return not was_silent

    def excuse_silence(self, seconds: float, now_s: float) -> None:
        """The controller stood still for so long: its clients' messages of that time are not handled yet."""
        for member in self._records():
            member.excused_s = min(member.excused_s + seconds, now_s - member.seen_s)

    def ready(self, round_id: int) -> list[int]:
        """Ids of the clients that can take part in the round, ascending: neither silent ones, nor paused ones, nor
        those without a message since they began to train for an earlier round."""
        return sorted(
            member.client_id
            for member in self._members.values()
            if self._may_take_part(member, round_id)
            and not (member.silent or member.is_paused)
            and not (member.quiet and member.hello.round_id < round_id)
        )

    def taking_part(self, round_id: int) -> set[int]:
        """Ids of the members that were let into this round, and are neither silent nor paused."""
        members = self._members.values()
        return {m.client_id for m in members if m.from_round <= round_id and not (m.silent or m.is_paused)}

    def paused_ids(self) -> set[int]:
        """Ids of the clients that are here and take part in no round for now."""
        return {m.client_id for m in self._members.values() if m.is_paused}

    def lacks_command(self, ids: Iterable[int], round_id: int, attempt: int) -> bool:
        """Return whether one of these clients has not received the command of this attempt at a round, as its newest
        Hello shows: it works on another round, or, in a further attempt, on nothing."""
        lacking = {
            record.client_id
            for record in self._records()
            if record.hello.session == self._session
            and (record.hello.round_id != round_id or (attempt > 1 and record.hello.phase == IDLE))
        }
        # Of a host there is one record, however many clients it has: as a rule none lacks the command.
        return bool(lacking) and any(
            _record(self._members[one]).client_id in lacking for one in ids if one in self._members
        )

    def silent_ids(self, round_id: int) -> set[int]:
        """Ids of silent clients that could else take part in this round."""
        return {
            m.client_id for m in self._members.values() if (m.silent or m.quiet) and self._may_take_part(m, round_id)
        }

    @property
    def has_fetching(self) -> bool:
        """Whether a client that is not silent waits for a model."""
        return any(m.hello.phase == FETCHING_PHASE and not m.silent for m in self._members.values())

    def live_seen_s(self) -> Iterator[tuple[int, float]]:
        """Yield the ids of the members that are here, or may return, and when each sent last."""
        return ((client_id, member.seen_s) for client_id, member in self._members.items() if member.may_return)

    def count_live(self) -> int:
        """Number of members that are here, or may return."""
        return sum(member.may_return for member in self._members.values())

    def _may_take_part(self, member: Member, round_id: int) -> bool:
        return member.hello.ready and member.hello.session == self._session and member.from_round <= round_id


def _record(member: Member) -> ClientRecord:
    """Return what is known of the process of a client."""
    return member.host if isinstance(member, HostedClient) else member
