"""A client's session with its controller, the heartbeat that it sends, and what else its parts share."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gradbus.actors.federated.protocol import REPEAT_AFTER_S
from gradbus.runtime.bus.bus import Bus, Subscription
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import BarrierTimeout, BusClosed, BusError, GradbusError, JoinRefused, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.testing.journal import Probe
from gradbus.runtime.transport.channels import ToClients, ToController
from gradbus.runtime.transport.wait_log import WaitLog
from gradbus.runtime.wire.control import (
    PAUSED_PHASE,
    Body,
    EvaluationRequest,
    Hello,
    Leave,
    LocalModelRequest,
    RepeatedCommand,
    RoundTerms,
    RunEnded,
    TrainingFailure,
    Welcome,
)
from gradbus.runtime.wire.id_ranges import has_id, parse_ids
from gradbus.runtime.wire.messages import ClientUpdate, Identity, Message, ModelBlob, TrainCmd

if TYPE_CHECKING:  # they load torch, which the nodes of an app without it are spared
    from gradbus.actors.federated.client.failures import ClientFailures
    from gradbus.actors.federated.client.run_terms import RunChoices

OLD_SESSION_S = 3.0  # a controller with a lower incarnation is accepted when the known one is silent for so long
LISTENED_S = 2.0  # between two turns of this process: longer than a heartbeat is apart, with some delay
LAST_ANSWERS_S = 2.0  # after the end of the run; shorter than the controller waits for its clients to leave
OVERTAKEN_S = 3.0  # a command of an earlier round that comes later than this after a newer one is not an overtaken one

log = get_logger("client")


async def listen(inbox: Subscription, handle: Callable[[Message], None]) -> None:
    """Handle messages until this is cancelled. One that cannot be handled is logged.

    Raises:
        JoinRefused, TrainingFailed: ``handle`` has: this client's run has ended. BusClosed: the bus was.
    """
    while True:
        try:
            message = await inbox.get()
        except BusClosed:
            if inbox.fault:
                raise
            raise BusClosed("the bus was closed under a running client: stop the client first") from None
        try:
            handle(message)
        except (JoinRefused, TrainingFailed):
            raise
        except GradbusError as error:
            log.warning("message not handled", kind=type(message).__name__, reason=str(error))


class ControllerStart(NamedTuple):
    """Names one start of the controller of a run; by default none."""

    run_id: int = 0
    incarnation: int = 0

    def is_after(self, session: int, body: Body) -> bool:
        """Return whether this message is of an earlier start of the same run."""
        return session < self.incarnation and getattr(body, "run_id", None) == self.run_id


NO_START = ControllerStart()


class ControllerSession:
    """The newest Welcome and the newest command, and the state of the latter.

    Attributes:
        welcome: of the current controller; None: this client needs one.
        command: the newest one. commanded_s: when it came, by ``time.perf_counter``.
        failure: of the command; sent with each heartbeat, until the next command.
        ended: the controller's last message, when all rounds are done.
        incarnation: of the controller that has welcomed this client last. run_id: of its run.
        names_commands: a TrainCmd does not count, as it may be of an earlier start of that controller.
        terms: the newest RoundTerms of this session.
        evaluation: the newest request to evaluate, until it is answered. model_request: the same for the local model.
        evaluation_until_s: its deadline, by ``time.monotonic``. evaluated_round: the newest round, in this session, of
            which a model is to be evaluated, here or elsewhere: it is over.
        counted_round: the last round in which an update of this client counted, in this session.
        controller_timeout_s: without a message of a controller for so long, this client gives up.
        newest: the newest start that was heard of the run that is followed.
        name: that the newest Welcome has given this client, with identities the allow list's; empty: none.
    """

    def __init__(self, controller_timeout_s: float, newest: ControllerStart = NO_START) -> None:
        """``newest``: of the session before this one."""
        self.controller_timeout_s = controller_timeout_s
        self.newest = newest
        self._handled = False  # the command has been answered, without success
        self._attempt = 0  # at the round of the command, as far as this client can count
        self._is_early = False  # a repetition has come before the command itself, which is not another attempt
        self._session_seen_s = 0.0
        self._other_run = 0  # incarnation of an earlier controller that was heard and is of another run
        self._refused_s = -math.inf  # when an earlier start of this run was heard last
        self._turn_s = LISTENED_S
        self._seen_s = self._listened_s = time.monotonic()
        self.welcome: Welcome | None = None
        self.name = ""
        self.command: TrainCmd | None = None
        self.terms: RoundTerms | None = None
        self.evaluation: EvaluationRequest | None = None
        self.evaluation_until_s = 0.0
        self.evaluated_round = -1
        self.model_request: LocalModelRequest | None = None
        self.commanded_s = 0.0
        self.failure: TrainingFailure | None = None
        self.ended: RunEnded | None = None
        self._ended_s = 0.0
        self.incarnation = 0
        self.run_id = 0
        self.names_commands = False
        self.counted_round = 0

    @property
    def attempt(self) -> int:
        """Return the number of the attempt at the round of the command, as far as this client can count."""
        return self._attempt

    @property
    def repeats(self) -> bool | None:
        """Return for asynchronous rounds, where a newer command does not end training, whether to train again from the
        same model; None: rounds are synchronous."""
        repeats = None if self.welcome is None else self.welcome.options.get("training.repeats")
        return None if repeats is None else bool(repeats)

    @property
    def from_round(self) -> int | None:
        """The first round that this client takes part in; None before it is welcomed."""
        return None if self.welcome is None else self.welcome.next_round

    def begin(self) -> None:
        """Start to wait for the controller."""
        self._seen_s = self._listened_s = time.monotonic()

    def note_turn(self, again_within_s: float | None = None) -> None:
        """Note that this process runs, and will again within ``again_within_s``, by default as before. If it is late,
        it was stopped, or its interpreter held: that time is not counted as the controller's silence."""
        now_s = time.monotonic()
        late_s = max(0.0, now_s - self._listened_s - self._turn_s)
        self._turn_s = self._turn_s if again_within_s is None else again_within_s
        self._listened_s = now_s
        self._seen_s += late_s
        self._session_seen_s += late_s

    def accepts_session(self, session: int, body: Body) -> bool:
        """Whether a message of this controller counts.

        Never one of an earlier start of the run that is followed: it was paused or cut off, has been replaced, and may
        not know. An earlier controller of another run, as where a clock was set back, counts once the known one has
        been silent for OLD_SESSION_S; of which run it is, some of its messages say.
        """
        now_s, run_id = time.monotonic(), getattr(body, "run_id", None)
        if session < self.newest.incarnation:
            if run_id not in (None, self.newest.run_id):
                self._other_run = session
            elif session != self._other_run:
                self._refused_s = now_s
            if session != self._other_run or now_s - self._session_seen_s < OLD_SESSION_S:
                return False
        elif run_id == self.newest.run_id:
            self.newest = ControllerStart(run_id, session)
        self._seen_s = now_s
        if session == self.incarnation:
            self._session_seen_s = now_s
        return True

    @property
    def replaced(self) -> str:
        """Why a controller that is heard does not count; empty: none is heard."""
        if time.monotonic() - self._refused_s >= OLD_SESSION_S:
            return ""
        return (
            "a controller of this run is heard, but it started before the one that this client has followed, which is "
            "silent. Start that one again, or stop this client and start it again: then it follows any"
        )

    def start_session(self, session: int, welcome: Welcome) -> None:
        """Follow another controller, or another start of it. It may repeat a round that the one before has not
        committed."""
        if session != self.incarnation:  # else its command still holds: it is not repeated
            self.command, self.counted_round, self.failure, self.terms = None, 0, None, None
            self.evaluation = self.model_request = None
            self.evaluated_round = -1
        self.incarnation, self._session_seen_s, self.run_id = session, time.monotonic(), welcome.run_id
        self.newest, self.names_commands = ControllerStart(welcome.run_id, session), welcome.named_commands

    def accept(self, welcome: Welcome) -> None:
        """Take a Welcome of the controller that is followed."""
        self.welcome = welcome
        self.name = welcome.name or self.name

    def await_welcome(self) -> None:
        """Note that another start of the controller has to welcome this client first."""
        self.welcome = None

    def end(self, ended: RunEnded) -> None:
        """Note that all rounds are done."""
        if self.ended is None:
            self._ended_s = time.monotonic()
        self.ended = ended

    @property
    def is_open(self) -> bool:
        """Whether answers about updates of the run may still come: there is no order between channels, so the end of
        the run may overtake the receipt of an update that counts."""
        return self.ended is None or time.monotonic() < self._ended_s + LAST_ANSWERS_S

    def report(self, failure: TrainingFailure) -> None:
        """Send this with each heartbeat, until the next command."""
        self.failure = failure

    def withdraw(self, reason: str) -> None:
        """Send a failure no longer, if that is its reason."""
        if self.failure is not None and self.failure.reason == reason:
            self.failure = None

    def take_terms(self, terms: RoundTerms) -> bool:
        """Take the terms of a round. Returns whether they count: there are no newer ones."""
        newest = self.terms
        if newest is not None and (terms.round_id, terms.attempt) < (newest.round_id, newest.attempt):
            return False
        self.terms = terms
        return True

    def take_model_request(self, request: LocalModelRequest) -> None:
        """Take a request for the local model."""
        self.model_request = request

    def drop(self, request: EvaluationRequest | LocalModelRequest) -> None:
        """Drop a request that is answered, unless it has come again meanwhile."""
        if self.evaluation is request:
            self.evaluation = None
        if self.model_request is request:
            self.model_request = None

    def take(self, command: TrainCmd) -> bool:
        """Take a command. Whether it is another one than before, so that training for that one stops. One of an earlier
        round is ignored, but for some seconds only: commands do not name their controller, so the newer one may be the
        last of a controller that hung until another had taken its place.
        """
        is_earlier = self.command is not None and command.round_id < self.command.round_id
        if is_earlier and time.perf_counter() - self.commanded_s < OVERTAKEN_S:
            return False
        other = command != self.command
        if self._is_early and not other:
            self._is_early = False
            return False
        self._attempt, self._is_early = 1 if other else self._attempt + 1, False
        if other or self._handled:
            self.commanded_s = time.perf_counter()
        self.command, self._handled, self.failure = command, False, None
        if self.evaluation is not None and self.evaluation.round_id < command.round_id:
            self.evaluation = None  # its round is over
        return other

    def take_repeated(self, repeated: RepeatedCommand) -> bool:
        """Take the command that its controller repeats because some client lacks it, as :meth:`take`. One that is here
        changes nothing, unless this client has answered it in an earlier attempt: then it is given again."""
        command = TrainCmd(repeated.round_id, repeated.subset_size, repeated.epochs, repeated.lr, repeated.seed)
        is_known = command == self.command
        if is_known and repeated.attempt <= self._attempt:
            return False
        self._is_early = False
        is_other = self.take(command)
        if is_known or is_other:  # else it is of an earlier round
            self._attempt, self._is_early = repeated.attempt, True
        return is_other

    def is_wanted(self, welcome: Welcome, command: TrainCmd) -> bool:
        """Whether to train: DDS may repeat a command, and the controller may give one again."""
        is_next = command.round_id > self.counted_round or self.repeats is True
        is_open = not self._handled and not self._is_over(command)
        return is_open and is_next and command.round_id >= welcome.next_round

    def is_older(self, command: TrainCmd) -> bool:
        """Whether there is a newer command, or none is followed any more."""
        return self.command != command or self.is_superseded(command)

    @property
    def fetches_models(self) -> bool:
        """Whether models come only while one is fetched."""
        return self.welcome is not None and self.welcome.fetch_models

    def is_for(self, client_id: int, welcome: Welcome, command: TrainCmd) -> bool:
        """Whether a client is to train for this command now."""
        return self.is_wanted(welcome, command) and self.has_terms and self.may_take_part(client_id, command)

    def may_take_part(self, client_id: int, command: TrainCmd) -> bool:
        """Whether a client is asked to take part in the round of this command, as far as the terms say."""
        terms = self.terms
        if terms is None or terms.round_id != command.round_id or not terms.participants:
            return True
        return has_id(parse_ids(terms.participants), client_id)

    @property
    def has_terms(self) -> bool:
        """Whether all is known of the newest command."""
        if self.welcome is None or self.command is None or not self.welcome.has_terms:
            return True
        return self.terms is not None and self.terms.round_id == self.command.round_id

    def is_held(self, command: TrainCmd) -> bool:
        """Whether no update of the round of this command is added before all are announced."""
        return self.terms is not None and self.terms.held and self.terms.round_id == command.round_id

    def evaluates(self, client_id: int, request: EvaluationRequest) -> bool:
        """Whether a client is asked to evaluate."""
        return has_id(parse_ids(request.participants), client_id)

    def take_evaluation(self, client_id: int, request: EvaluationRequest) -> bool:
        """Take a request to evaluate. Whether it is the first one that tells that the round of the newest command is
        over, whoever is asked: what is computed now is no longer wanted."""
        newest = -1 if self.command is None else self.command.round_id
        if request.round_id < newest:
            return False
        if self.evaluates(client_id, request):
            self.evaluation, self.evaluation_until_s = request, time.monotonic() + request.remaining_s
        is_new = request.round_id > self.evaluated_round
        self.evaluated_round = max(self.evaluated_round, request.round_id)
        return is_new

    def wants_result(self, request: EvaluationRequest, session: int) -> bool:
        """Whether the results of this request, or of a repetition of it, are still of use. Called on any thread."""
        newest = self.evaluation
        is_asked = newest is not None and newest.round_id == request.round_id
        return is_asked and time.monotonic() < self.evaluation_until_s and self.is_current(session)

    def _is_over(self, command: TrainCmd) -> bool:
        """Whether the model after the round of a command is there, as it is evaluated."""
        return self.evaluated_round >= command.round_id and self.repeats is None

    def is_superseded(self, command: TrainCmd) -> bool:
        """Whether the result of this command is no longer wanted."""
        is_newer = self.command != command and self.repeats is None
        return is_newer or self.ended is not None or self.welcome is None or self._is_over(command)

    def count(self, round_id: int, session: int) -> None:
        """Note that an update of this client counts with this start of the controller. Another one may repeat that
        round."""
        if session == self.incarnation:
            self.counted_round = round_id

    def mark_handled(self, command: TrainCmd) -> None:
        """Nothing more is to be done for this command, unless it is repeated."""
        if self.command is command:  # and not an equal one that came later
            self._handled = True

    def is_current(self, session: int) -> bool:
        """Whether the controller is still this one, and not at its end."""
        return self.incarnation == session and self.welcome is not None and self.ended is None

    @property
    def seen_s(self) -> float:
        """When a controller's message came last, by ``time.monotonic``; before that, when the wait began."""
        return self._seen_s

    def limit_silence(self, controller_timeout_s: float) -> None:
        """Give up after another time without a message of a controller."""
        self.controller_timeout_s = controller_timeout_s

    def check_controller(self, misconfiguration: Callable[[], str] = str, advice: Callable[[], str] = str) -> None:
        """Raises BarrierTimeout: no controller for too long. ``misconfiguration``, ``advice``: return the likely
        reason, and what to do, for its text; to find that out takes a while."""
        self.note_turn()
        limit_s = self.controller_timeout_s
        if time.monotonic() - self._seen_s > limit_s:
            raise BarrierTimeout(
                "controller",
                missing=(),
                ready=0,
                needed=1,
                timeout_s=limit_s,
                misconfiguration=misconfiguration() or self.replaced,
                hint=advice(),
            )


class ClientStatus:
    """The phase that the heartbeat reports: idle, preparing, fetching or training, or that of an upload; or paused.

    Attributes:
        is_paused: the program that this client is part of wants no training for now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_paused = False
        self._is_delivering = False  # an update is made and its receipt has not come: that is done before a pause
        self._called_off: TrainCmd | None = None  # the command whose training a pause has called off
        self._clock = clock
        self._name = "idle"
        self._reported = ""
        self._since_s = clock()

    def set(self, name: str) -> None:
        """Set the phase."""
        self._name = name
        self._note(name)

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        """Note that an update is being sent in this block: it still is, if the client pauses."""
        self._is_delivering = True
        try:
            yield
        finally:
            self._is_delivering = False

    def pause(self, command: TrainCmd | None) -> bool:
        """Pause. Returns whether that calls off the training for the newest ``command``: an update that is made is sent
        first."""
        self.is_paused = True
        if not self._is_delivering:
            self._called_off = command
        return not self._is_delivering

    def resume(self) -> None:
        """Go on with the next command."""
        self.is_paused = False

    def has_called_off(self, command: TrainCmd | None) -> bool:
        """Whether a pause has called off the training for this command, also one that is over."""
        return command is not None and command is self._called_off

    def holds_back(self, command: TrainCmd | None) -> bool:
        """Whether a pause keeps this client from training for a command."""
        return self.is_paused or self.has_called_off(command)

    def sit_out(self) -> None:
        """Note that the command that was called off is answered: it has no update of this client."""
        self._called_off = None

    def report(self, upload: str) -> tuple[str, float]:
        """Return the phase to report, and the seconds since it began. ``upload``: the phase of the update sender."""
        name = self._name if upload == "idle" else upload
        self._note(PAUSED_PHASE if self.is_paused and not self._is_delivering else name)
        return self._reported, self._clock() - self._since_s

    def _note(self, name: str) -> None:
        if name != self._reported:
            self._reported, self._since_s = name, self._clock()


class ClientHeartbeat:
    """Publishes a client's Hello, as its heartbeat and on every change; at the end its Leave."""

    def __init__(
        self, bus: Bus, identity: Identity, session: ControllerSession, describe: Callable[[bool], Hello]
    ) -> None:
        """``describe`` gives the Hello; its argument: whether the bus is matched with the controller both ways."""
        self._bus = bus
        self._identity = identity
        self._session = session
        self._describe = describe
        self._left = False  # Leave was sent, or is about to be

    def make_hello(self) -> Hello:
        """Return the client's state as of now."""
        matched = self._bus.matched_readers(ClientUpdate) > 0
        kinds = (TrainCmd, ToClients) if self._session.fetches_models else (TrainCmd, ToClients, ModelBlob)
        return self._describe(matched and min(map(self._bus.matched_writers, kinds)) > 0)

    async def send_hello(self) -> None:
        """Send it now."""
        if self._left:
            return  # the controller would take it for a client that has come back
        hello = self.make_hello()
        with contextlib.suppress(BusError):  # sent again with the next heartbeat
            await self._bus.publish(self._identity, hello)
            if self._session.failure is not None:
                await self._bus.publish(self._identity, self._session.failure)

    async def run(self) -> None:
        """Send it again and again, at once when something about the matching changes. Runs until cancelled."""
        while True:
            await self.send_hello()
            welcome = self._session.welcome
            heartbeat_s = welcome.heartbeat_s if welcome is not None else REPEAT_AFTER_S
            self._session.note_turn(max(LISTENED_S, 2 * heartbeat_s))
            seen = self._matching()
            with contextlib.suppress(BarrierTimeout):
                await self._bus.matched(lambda: self._matching() != seen, timeout_s=heartbeat_s)  # noqa: B023 - awaited here

    def _matching(self) -> tuple[int, ...]:
        bus = self._bus
        kinds = (TrainCmd, ToClients) if self._session.fetches_models else (TrainCmd, ToClients, ModelBlob)
        return *map(bus.matched_readers, (ClientUpdate, ToController)), *map(bus.matched_writers, kinds)

    async def leave(self, reason: str) -> None:
        """Send the client's last message."""
        self._left = True
        with contextlib.suppress(BusError):
            await self._bus.publish(self._identity, Leave(reason))


def client_facts(client_id: int, name: str) -> dict[str, Any]:
    """Return id and name of a client for a log event. ``client_id``: -1: it has none. ``name``: empty: likewise."""
    own: dict[str, Any] = {} if client_id < 0 else {"client": client_id}
    return {**own, "name": name} if name else own


def check_waiting(bus: Bus, session: ControllerSession, waiting: WaitLog) -> None:
    """Log that the controller is waited for, if that takes long. Raises BarrierTimeout: no controller for too long."""
    session.check_controller(lambda: bus.misconfiguration, partial(bus.reach.advice, one=True))
    waiting.look(f"the controller of job {bus.job!r}", began_s=session.seen_s, misconfiguration=bus.misconfiguration)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ClientContext:
    """The objects that all parts of a running client share.

    Attributes:
        client_id: its own; of a host, the first one of its clients. name: its own; empty: it has none, or that of the
            session. identity: under which it sends.
        changed: set when a message, or a part of this client, has changed what its next action follows from.
        compute: its thread for tensors and files.
        choices: reads what a controller has chosen. group: of all tasks of the run.
    """

    client_id: int
    name: str
    bus: Bus
    identity: Identity
    config: ClientConfig
    session: ControllerSession
    status: ClientStatus
    heartbeat: ClientHeartbeat
    changed: asyncio.Event
    compute: ComputeThread
    probe: Probe
    choices: RunChoices
    failures: ClientFailures
    group: asyncio.TaskGroup

    @property
    def own_name(self) -> str:
        """Return the name of this client as of now; empty: it has none."""
        return self.session.name or self.name

    def facts(self) -> dict[str, Any]:
        """Return id and name of this client, for a log event."""
        return client_facts(self.client_id, self.own_name)

    async def publish(self, body: Body) -> None:
        """Send a control message as this client. Raises BusError: it could not be sent."""
        await self.bus.publish(self.identity, body)

    def is_same_session(self, session: int) -> bool:
        """Whether the controller is still this one. Raises BarrierTimeout: there has been none for too long."""
        self._check_controller()
        return self.session.is_current(session)

    def awaits_answers_of(self, session: int) -> bool:
        """Whether answers about updates may come from this start of the controller. Raises BarrierTimeout: as
        :meth:`is_same_run`."""
        self._check_controller()
        return self.session.incarnation == session and self.session.is_open

    def is_same_run(self, run_id: int) -> bool:
        """Whether answers about updates of this run may come, from this start of the controller or another one. Raises
        BarrierTimeout: there has been none for too long."""
        self._check_controller()
        return self.session.run_id == run_id and self.session.is_open

    def _check_controller(self) -> None:
        bus = self.bus
        self.session.check_controller(lambda: bus.misconfiguration, partial(bus.reach.advice, one=True))
