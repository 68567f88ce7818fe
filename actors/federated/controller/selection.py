"""The start condition of a round, and its participants: of the clients that are matched both ways, welcomed, and not in
quarantine, those that a selector selects."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from gradbus.actors.federated.controller.clients import MAX_MEMBERS, ClientRegistry
from gradbus.actors.federated.controller.current_round import CurrentRound
from gradbus.actors.federated.controller.report import Progress
from gradbus.actors.federated.controller.selectors.base import ClientFacts, Draw, Selector, selected
from gradbus.actors.federated.controller.state import RunContext
from gradbus.runtime.choices import SELECTORS
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import BarrierTimeout, ConfigError, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.transport.wait_log import WaitLog
from gradbus.runtime.wire.control import FAILED
from gradbus.runtime.wire.id_ranges import MAX_CHARS, format_ids
from gradbus.runtime.wire.messages import ClientUpdate, TrainCmd

_SHOWN = 20  # clients that a line names
_MAX_UNPREPARED = 1024  # clients whose failure is remembered: any process can make up ids
_MAX_GONE = 1024  # clients whose end is remembered, for the same reason
_MEND = "Mend it there and start the client again"

log = get_logger("controller")


class ClientDeparture(NamedTuple):
    """Tells why and when a client went: ``why`` in words, ``at_s`` by ``time.monotonic``."""

    why: str
    at_s: float

    def __str__(self) -> str:
        return f"was here until {max(0.0, time.monotonic() - self.at_s):.0f} s ago, and {self.why}"

    @property
    def remedy(self) -> str:
        """Return what to do about it, a sentence without its full stop."""
        return _MEND if f": {FAILED}" in self.why else "Start it again"


class StartTrouble(NamedTuple):
    """What the error says of a round that cannot start.

    Attributes:
        what: cannot start. misconfiguration: the likely reason. hint: what to do. label: returns what is shown for an
            id.
    """

    what: str
    misconfiguration: str = ""
    hint: str = ""
    label: Callable[[int], str] = str


class StartCondition:
    """Allows the start at once when all expected clients are ready, with at least ``minimum`` of them ``grace_s``
    later, and gives up ``timeout_s`` after ``now_s``. A pure decision."""

    def __init__(
        self,
        *,
        minimum: int,
        expected: Collection[int],
        now_s: float,
        timeout_s: float,
        grace_s: float,
        excused: Collection[int] = (),
        describe: Callable[[], StartTrouble] = lambda: StartTrouble("start"),
    ) -> None:
        """Begin to wait.

        Args:
            minimum: clients that suffice after the grace. expected: ids of those that are waited for at most.
            excused: ids of expected clients that are not waited for.
            describe: returns what the error says.
        """
        self._minimum = minimum
        self._expected = expected
        self._excused = excused
        self._wanted = max(len(self._expected) - self._count(excused), minimum)
        self._timeout_s = timeout_s
        self._deadline_at_s = now_s + timeout_s
        self._grace_s = grace_s
        self._grace_until_s: float | None = None
        self._describe = describe

    def may_start(self, ready: Sequence[int], now_s: float, paused: Collection[int] = ()) -> bool:
        """Whether to start with these clients now. ``paused``: ids of clients that are here and not waited for.

        Raises:
            BarrierTimeout: the deadline has passed with fewer than ``minimum``; it names the missing clients.
        """
        if len(ready) >= max(self._minimum, self._wanted - self._count(paused)):
            return True
        if len(ready) >= self._minimum:
            if self._grace_until_s is None:
                self._grace_until_s = now_s + self._grace_s
            return now_s >= self._grace_until_s
        self._grace_until_s = None
        if now_s >= self._deadline_at_s:
            found = self._describe()
            raise BarrierTimeout(
                found.what,
                missing={one: found.label(one) for one in self.missing(ready)},
                ready=len(ready),
                needed=self._minimum,
                timeout_s=self._timeout_s,
                misconfiguration=found.misconfiguration,
                hint=found.hint,
            )
        return False

    def _count(self, clients: Collection[int]) -> int:
        """How many of these are expected."""
        return sum(one in self._expected for one in clients)

    def missing(self, ready: Sequence[int]) -> list[int]:
        """Ids of expected clients that are not among these."""
        here = {*ready, *self._excused}
        return sorted(number for number in self._expected if number not in here)

    def next_check_s(self) -> float:
        """The time at which the answer may change without an event."""
        return self._deadline_at_s if self._grace_until_s is None else self._grace_until_s


class Participants(NamedTuple):
    """Tells who is asked to take part in a round.

    Attributes:
        asked: their ids, ascending. enough: updates that end the round at once; None: all that were asked are waited
            for.
    """

    asked: list[int]
    enough: int | None


def check_selection(config: FederatedConfig, selector: Selector) -> None:
    """Raises ConfigError: a part of the clients cannot take part in the rounds of such a run."""
    if not selector.partial:
        return
    what = f"federated.selection ({config.selection.name}) asks a part of the clients"
    if config.mode == "asynchronous":
        raise ConfigError(
            f"{what}, and in federated.mode=asynchronous each takes the newest model when it is free. Use "
            f"mode=synchronous, or leave selection out and set asynchronous.buffer"
        )
    if config.clients.kind == "sites":
        raise ConfigError(
            f"{what}, and with federated.clients.kind=sites these are sites, each with the sum of all its clients, "
            f"which do not hear who is asked. Leave selection out in trees"
        )
    if config.downlink_codec.name != "fp32":
        raise ConfigError(
            f"{what}, and federated.downlink_codec={config.downlink_codec.name} sends differences from one round to "
            f"the next, which whoever sat out a round cannot use. Set it to fp32"
        )
    if selector.wanted(MAX_MEMBERS) < config.clients.min:
        raise ConfigError(
            f"{what}, {selector.wanted(MAX_MEMBERS)} at most, and federated.clients.min is {config.clients.min}, the "
            f"least number of updates that make a round. Raise selection.count, or lower clients.min"
        )


def _have_reported(missing: Collection[int], failed: Mapping[int | str, str]) -> bool:
    """Whether all of these clients may be among those that have failed. One that has failed before it had an id may be
    any of them."""
    return bool(failed) and len({*missing} - failed.keys()) <= sum(isinstance(one, str) for one in failed)


class ParticipantSelection:
    """Waits for clients, and selects those of a round."""

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        progress: Progress,
        selector: Selector,
        current_round: CurrentRound,
    ) -> None:
        """``selector``: decides who takes part. ``current_round``: wakes whoever waits for clients."""
        self._selector = selector
        self._context = context
        self._registry = registry
        self._progress = progress
        self._current_round = current_round
        # Clients that could not get ready, by their ids, or by the names of those without one, and why.
        self._unprepared: dict[int | str, str] = {}
        self._gone: dict[int, ClientDeparture] = {}  # clients that were here, the newest one last

    @property
    def is_partial(self) -> bool:
        """Whether not all ready clients may take part in a round."""
        return self._selector.partial

    async def wait_for_start(
        self, round_id: int, accepted: Collection[int] = (), *, timeout_s: float, named: Collection[int] | None = None
    ) -> None:
        """Wait until enough clients are matched both ways and welcomed: of those that are ``named``; None: of all.
        Those in ``accepted`` need not be there, as their updates count already.

        Raises:
            BarrierTimeout: they were not, for so long. TrainingFailed: and those that are missing have reported why
                they cannot get ready.
        """
        config, bus, out = self._context.config, self._context.bus, self._context.state.quarantine.excluded(round_id)
        names = self._context.state.names
        self._progress.phase = "waiting"
        expected = range(config.clients.num or 0) if named is None else named
        kept_out = f" (kept out: {', '.join(map(names.label, list(out)[:20]))})" if out else ""
        failed = self._failed
        condition = StartCondition(
            minimum=config.clients.min,
            expected=expected,
            now_s=time.monotonic(),
            timeout_s=timeout_s,
            grace_s=config.clients.start_grace_s,
            excused=out,
            describe=lambda: StartTrouble(
                f"round {round_id} cannot start{kept_out}: clients",
                bus.misconfiguration,
                self._advice(condition.missing(self.ready(round_id, named))),
                names.label,
            ),
        )
        waiting = WaitLog(log, bus.reach, job=bus.job, round=round_id)
        while not self._may_start(condition, ready := sorted({*accepted, *self.ready(round_id, named)}), round_id):
            missing = condition.missing(ready)
            hint = _MEND if _have_reported(missing, failed()) else ""
            waiting.look(self._absent(missing), misconfiguration=bus.misconfiguration, hint=hint)
            # There is no event for the matching of this side, which may come after the client's last message.
            await self._current_round.sleep_until(
                min(condition.next_check_s(), time.monotonic() + config.clients.heartbeat_s)
            )
        if len(ready) < len(expected) - sum(one in expected for one in {*out, *self._registry.paused_ids()}):
            log.warning("starting without all clients", ready=ready, expected=len(expected))

    def _may_start(self, condition: StartCondition, ready: Sequence[int], round_id: int) -> bool:
        """Whether to start with these clients now.

        Raises:
            BarrierTimeout: too few were ready in time. TrainingFailed: and only because the others have failed.
        """
        for client_id in ready:
            self._unprepared.pop(client_id, None)
            self._unprepared.pop(self._context.state.names.own_name_of(client_id), None)
        try:
            return condition.may_start(ready, time.monotonic(), self._registry.paused_ids())
        except BarrierTimeout as error:
            failed = self._failed()
            would_do = len({*ready, *failed}) >= error.needed
            if not would_do or not _have_reported(error.missing, failed):
                raise
            raise TrainingFailed(
                f"round {round_id} cannot start, as {error.ready} of {error.needed} clients are ready: "
                f"{'; '.join(failed.values())}. {_MEND}, and then the controller",
                [client for client in failed if isinstance(client, int)],
            ) from error

    def remember_departure(self, client_id: int, why: str) -> None:
        """Note that a client that was here has gone. It may come back. ``why``: as of a :class:`ClientDeparture`."""
        self._gone.pop(client_id, None)
        self._gone[client_id] = ClientDeparture(why, time.monotonic())
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def _departed(self) -> dict[int, ClientDeparture]:
        """Clients that were here, are not any more, and have not said before their first round why."""
        here, failed = {client.client_id for client in self._registry}, self._failed()
        gone = [one for one in self._gone if one not in here and one not in failed]
        return {one: self._gone[one] for one in sorted(gone[-_SHOWN:])}

    def _advice(self, missing: Collection[int]) -> str:
        """What to do about clients that are missing: for an error."""
        label, failed, gone = self._context.state.names.label, self._failed(), self._departed()
        here = {one.client_id: one for one in self._registry if one.client_id in missing}
        known = [f"{text}. {_MEND}." for text in failed.values()]
        known += [f"Client {label(one)} {gone[one]}. {gone[one].remedy}." for one in gone]
        known += [
            f"Client {label(one)} is here and paused: it takes part again once its program calls resume()."
            if here[one].is_paused
            else f"Client {label(one)} is here and not ready, in phase {here[one].hello.phase!r}: see its log."
            for one in sorted(here)[:_SHOWN]
        ]
        is_all = bool(missing) and {*missing} <= {*failed, *gone, *here}
        text = " ".join([*known, *([] if is_all else [self._context.bus.reach.advice()])])
        return text.removesuffix(".")

    def note_unprepared(self, client: int | str, why: str) -> None:
        """Note that a client, by its id or its name, could not get ready, and leaves. It may come back."""
        self._unprepared[client] = why
        if len(self._unprepared) > _MAX_UNPREPARED:
            del self._unprepared[next(iter(self._unprepared))]
        if isinstance(client, int):
            self._context.state.participation.note_unprepared(client, why)

    def _failed(self) -> dict[int | str, str]:
        """Why clients that are not here could not get ready, in words, by id, and by name where they have no id."""
        names = self._context.state.names
        here = {one for client in self._registry for one in (client.client_id, names.own_name_of(client.client_id))}
        gone = sorted((one for one in self._unprepared if one not in here), key=lambda one: (isinstance(one, str), one))
        gone = gone[:_SHOWN]
        label = self._context.state.names.label
        return {one: f"client {label(one)} failed before its first round: {self._unprepared[one]}" for one in gone}

    def _absent(self, missing: Collection[int]) -> list[str]:
        """Names of missing clients, for the log."""
        here, failed = {client.client_id for client in self._registry}, self._failed()
        paused, label = self._registry.paused_ids(), self._context.state.names.label
        states = {**dict.fromkeys(here, " (is here, not ready yet)"), **dict.fromkeys(paused, " (paused)")}
        states |= {one: f" ({departure})" for one, departure in self._departed().items()}
        named = [failed.get(number, f"client {label(number)}{states.get(number, '')}") for number in missing]
        named += [text for number, text in failed.items() if number not in missing]
        return named[:_SHOWN] or ["some client"]

    def ready(self, round_id: int, named: Collection[int] | None = None) -> list[int]:
        """Clients that are ready, of those that are ``named`` or of all, as far as this side is matched as well."""
        ready, bus = self._registry.ready(round_id), self._context.bus
        if named is not None:
            ready = sorted({*ready}.intersection(named))
        # Several clients may share a process and so a reader: this holds back only while DDS sees nobody at all.
        return ready if bus.matched_readers(TrainCmd) and bus.matched_writers(ClientUpdate) else []

    def participants(
        self,
        round_id: int,
        accepted: Collection[int],
        most: int | None,
        *,
        named: Collection[int] | None = None,
        without: Collection[int] = (),
    ) -> Participants:
        """Return who of the ready clients takes part in a round. Those in ``accepted`` do: their updates count already.

        Args:
            most: samples that a client counts as at most; None: there is no limit.
            named: ids of the clients that the round is ordered from; None: the selector decides.
            without: clients that do not.

        Raises:
            ConfigError: the selector is the user's, and selects others than it may; or there is no room in a message to
                say who is selected.
        """
        ready = [client_id for client_id in self.ready(round_id, named) if client_id not in without]
        selector, config = self._selector, self._context.config
        if named is not None or not selector.partial:
            return Participants(ready, None)
        facts = [self._facts(client_id, most) for client_id in sorted({*ready, *accepted})]
        wanted = selector.wanted(len(facts), config.clients.min)
        count = selector.asked(len(facts), wanted)
        asked = selected(selector, facts, count, Draw(config.seed, round_id))
        if len(format_ids({*asked, *accepted})) > MAX_CHARS:
            raise ConfigError(
                f"{SELECTORS.key}: the ids of {count} of {len(facts)} clients take more than the {MAX_CHARS} "
                f"characters of a message. Ask fewer, or give the clients consecutive ids"
            )
        return Participants(asked, wanted if count > wanted else None)

    def _facts(self, client_id: int, most: int | None) -> ClientFacts:
        known = self._context.state.participation.of(client_id)
        samples = known.num_samples if most is None else min(known.num_samples, most)
        return ClientFacts(
            client_id=client_id,
            num_samples=samples,
            loss=known.loss,
            rounds=known.counted + known.missed,
        )
