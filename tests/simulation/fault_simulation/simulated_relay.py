"""A relay and its sessions in virtual time, for what outlets and inlets on Zenoh say to each other.

Messages of one urgency keep their order while a link stands. A seed decides how late each is, whether it is lost, and
when links that are broken stand again.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from gradbus.runtime.transport.schedule import NetworkSchedule

SIDE_LINKS = 2  # in name only: all keeps its order
RECONNECT_S = (0.05, 0.5)  # from the break of a link until it stands again
TOKENS, DATA, URGENT = 0, 1, 2

Step: TypeAlias = Callable[[], None]


def matches(expression: str, key: str) -> bool:
    """Return whether an expression, in which ``*`` stands for one part, matches a key."""
    parts, of_key = expression.split("/"), key.split("/")
    return len(parts) == len(of_key) and all(one in ("*", other) for one, other in zip(parts, of_key, strict=True))


class RelayedProcess(Protocol):
    """A process, as its sessions see it."""

    @property
    def paused(self) -> bool:
        """Return whether it stands still."""

    @property
    def dead(self) -> bool:
        """Return whether it has ended."""


@dataclass(eq=False)
class SimulatedProcess:
    """A process that exists in name only, and its own view of time: nothing of it runs while it stands still."""

    schedule: NetworkSchedule
    paused: bool = False
    dead: bool = False
    held: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock, self.now_s = self.schedule.lock, self.schedule.now_s
        self.wait, self.check, self.notify = self.schedule.wait, self.schedule.check, self.schedule.notify

    def at(self, when_s: float, function: Callable[..., object], *arguments: Any) -> None:
        self.schedule.at(when_s, self._run, lambda: function(*arguments))

    def _run(self, step: Step) -> None:
        if self.paused:
            self.held.append(step)
        elif not self.dead:
            step()

    def resume(self) -> None:
        self.paused = False
        held, self.held = self.held, []
        for step in held:
            self.schedule.at(self.now_s(), self._run, step)

    def close(self) -> None:
        """Do nothing: the schedule is of all."""


class SimulatedRelay:
    """Passes messages on between its sessions.

    Attributes:
        base_s, jitter_s: delay from a session to the relay, and back.
    """

    def __init__(self, schedule: NetworkSchedule, seed: int | str = 1) -> None:
        self.schedule = schedule
        self.rng = random.Random(seed)
        self.base_s, self.jitter_s = 1e-4, 2e-3
        self.sessions: list[SimulatedSession] = []
        self.tokens: dict[str, SimulatedSession] = {}

    def session(self, process: RelayedProcess, lease_s: float, loss: float = 0.0) -> SimulatedSession:
        """Open a session. ``loss``: share of its messages that get lost, each way."""
        made = SimulatedSession(self, process, lease_s, loss)
        self.sessions.append(made)
        return made

    def at(self, delay_s: float, step: Step) -> None:
        self.schedule.at(self.schedule.now_s() + delay_s, step)

    def restart(self) -> None:
        """Break all links, as a relay does that is killed."""
        for one in self.sessions:
            one.break_link()

    def pass_on(self, source: SimulatedSession, key: str, message: bytes, urgency: int) -> None:
        """Hand a message to the other sessions that have subscribed to it."""
        for one in self.sessions:
            if one is not source and any(matches(expression, key) for expression, _ in one.subscribed):
                one.deliver(urgency, lambda one=one: one.receive(key, message))  # type: ignore[misc]

    def change_token(self, key: str, source: SimulatedSession, is_there: bool) -> None:
        """Take note of a token, and have all know that watch for it."""
        if is_there:
            self.tokens[key] = source
        elif self.tokens.pop(key, None) is None:
            return
        for one in self.sessions:
            if one.is_linked:
                one.deliver(TOKENS, lambda one=one: one.note_token(key, is_there))  # type: ignore[misc]


class _Declared:
    def __init__(self, undeclare: Step) -> None:
        self.undeclare = undeclare


class SimulatedSession:
    """One session: see :class:`gradbus.runtime.transport.zenoh.session_api.LinkSession`."""

    def __init__(self, relay: SimulatedRelay, process: RelayedProcess, lease_s: float, loss: float) -> None:
        self.relay = relay
        self.process = process
        self.lease_s = lease_s
        self.loss = loss
        self.is_linked = True
        self.is_closed = self.is_silent = self.is_refused = False
        self.subscribed: list[tuple[str, Callable[[str, bytes], None]]] = []
        self.published = 0
        self.congested: set[bool] = set()  # the urgencies of which too much waits to leave
        self._watches: dict[int, tuple[str, Callable[[str, bool], None]]] = {}  # by their number
        self._watch_numbers = itertools.count()
        self._tokens: list[str] = []
        self._known: set[tuple[int, str]] = set()  # tokens that a watch was told of
        self._link = 0  # raised with each break
        self._silence = 0  # raised with each one, and when it is over
        self._free_s: dict[tuple[bool, int], float] = {}
        self._held: deque[Step] = deque()  # while nothing passes
        self._link_changed: Callable[[bool], None] | None = None

    # As outlets and inlets see it

    def start(self, link_changed: Callable[[bool], None], room_made: Step) -> None:
        self._link_changed = link_changed

    @property
    def side_links(self) -> int:
        return SIDE_LINKS

    def request_side_links(self, link: int) -> None:
        """All stand from the beginning."""

    def is_congested(self, *, urgent: bool) -> bool:
        return urgent in self.congested

    def publish(self, key: str, message: bytes | bytearray, *, urgent: bool, apart: bool = False) -> bool:
        content, urgency = bytes(message), URGENT if urgent else DATA
        self.published += 1
        for expression, received in self.subscribed:
            if matches(expression, key):
                received(key, content)
        if self.is_linked and not self._is_lost():
            self._send(urgency, lambda: self.relay.pass_on(self, key, content, urgency))
        return True

    def subscribe(self, expression: str, received: Callable[[str, bytes], None], *, link: int = 0) -> _Declared:
        one = (expression, received)
        self.subscribed.append(one)
        return _Declared(lambda: self.subscribed.remove(one))

    def declare_token(self, key: str) -> _Declared:
        self._tokens.append(key)
        self._send(TOKENS, lambda: self.relay.change_token(key, self, True))

        def undeclare() -> None:
            self._tokens.remove(key)
            self._send(TOKENS, lambda: self.relay.change_token(key, self, False))

        return _Declared(undeclare)

    def watch_tokens(self, expression: str, changed: Callable[[str, bool], None]) -> _Declared:
        number = next(self._watch_numbers)
        self._watches[number] = (expression, changed)
        self._send(TOKENS, self._tell_tokens)

        def undeclare() -> None:
            del self._watches[number]
            self._known = {one for one in self._known if one[0] != number}

        return _Declared(undeclare)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            for key in list(self._tokens):
                self._send(TOKENS, lambda key=key: self.relay.change_token(key, self, False))  # type: ignore[misc]
            self._tokens.clear()

    # The link

    def _is_lost(self) -> bool:
        return self.loss > 0.0 and self.relay.rng.random() < self.loss

    def _send(self, urgency: int, step: Step) -> None:
        self._travel(True, urgency, step)

    def deliver(self, urgency: int, step: Step) -> None:
        """Have a step happen at this session after the delay of its link."""
        if urgency == TOKENS or not self._is_lost():
            self._travel(False, urgency, step)

    def _travel(self, is_up: bool, urgency: int, step: Step) -> None:
        relay, link = self.relay, self._link
        arrives_s = relay.schedule.now_s() + relay.base_s + relay.rng.random() * relay.jitter_s
        arrives_s = self._free_s[is_up, urgency] = max(arrives_s, self._free_s.get((is_up, urgency), 0.0))

        def arrive() -> None:
            if link != self._link or not self.is_linked:
                return
            if self.is_silent or self.process.paused:
                self._held.append(arrive)
            else:
                step()

        relay.schedule.at(arrives_s, arrive)

    def receive(self, key: str, message: bytes) -> None:
        """Hand over a message."""
        if self.is_closed or self.process.dead:
            return
        for expression, received in list(self.subscribed):
            if matches(expression, key):
                received(key, message)

    def note_token(self, key: str, is_there: bool) -> None:
        """Report a token to those that watch for it, once."""
        for number, (expression, changed) in list(self._watches.items()):
            if matches(expression, key) and ((number, key) in self._known) != is_there:
                (self._known.add if is_there else self._known.discard)((number, key))
                changed(key, is_there)

    def _tell_tokens(self) -> None:
        for key in list(self.relay.tokens):
            self.deliver(TOKENS, lambda key=key: self.note_token(key, True))  # type: ignore[misc]

    # Faults

    def break_link(self) -> None:
        """Break the link, and dial again until it stands."""
        if not self.is_linked:
            return
        self.is_linked = False
        self._link += 1
        self._free_s.clear()
        self._held.clear()
        relay = self.relay
        for key in [key for key, one in relay.tokens.items() if one is self]:
            relay.change_token(key, self, False)
        if self.process.dead or self.is_closed:
            return
        reports: list[Step] = [lambda: self._report_link(False), self._forget_tokens]
        if relay.rng.random() < 0.5:
            reports.reverse()  # their order is not defined
        for number, report in enumerate(reports):
            relay.at(0.01 * number, report)
        relay.at(relay.rng.uniform(*RECONNECT_S), self._reconnect)

    def _report_link(self, is_linked: bool) -> None:
        if self._link_changed is not None:
            self._link_changed(is_linked)

    def _forget_tokens(self) -> None:
        for key in sorted({key for _, key in self._known}):
            self.note_token(key, False)

    def _reconnect(self) -> None:
        relay = self.relay
        if self.is_linked or self.process.dead or self.is_closed:
            return
        if self.is_silent or self.process.paused or self.is_refused:
            relay.at(RECONNECT_S[1], self._reconnect)
            return
        self.is_linked = True
        self._report_link(True)
        for key in self._tokens:
            self._send(TOKENS, lambda key=key: relay.change_token(key, self, True))  # type: ignore[misc]
        self._send(TOKENS, self._tell_tokens)

    def fall_silent(self) -> None:
        """Let nothing pass. After the lease the relay breaks the link, and so does the session."""
        self._silence += 1
        link, silence = self._link, self._silence
        self.is_silent = True

        def give_up() -> None:
            if link == self._link and silence == self._silence:
                self.break_link()

        self.relay.at(self.lease_s, give_up)

    def speak_again(self) -> None:
        """Let everything pass that was held."""
        self.is_silent = False
        self._silence += 1
        held, self._held = self._held, deque()
        for step in held:
            self.relay.at(0.0, step)
