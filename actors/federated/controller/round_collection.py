"""Collecting the updates of a round, in as many attempts as that takes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection
from typing import NamedTuple

from gradbus.actors.aggregation.typical import most_samples
from gradbus.actors.federated.controller.asynchronous import BufferRound
from gradbus.actors.federated.controller.deadline import RoundDeadline
from gradbus.actors.federated.controller.early_stop import RunCallbacks
from gradbus.actors.federated.controller.liveness import MAX_NAMED, tolerate_write_timeout
from gradbus.actors.federated.controller.masked_attempt import AttemptTerms
from gradbus.actors.federated.controller.rounds import Outcome, Round, RoundRules
from gradbus.actors.federated.controller.run_parts import RunParts
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import RepeatedCommand, RoundTerms
from gradbus.runtime.wire.messages import TrainCmd

_PAUSED_ATTEMPTS = 10  # times max_attempts: clients that pause and resume for ever do not keep a round open for ever
_LEAST_WAIT_S = 0.01

log = get_logger("controller")


class CollectedRound(NamedTuple):
    """A round whose updates are in the sum.

    Attributes:
        round: its last attempt. outcome: of that. attempts: so many there were.
        started_s: when the first one began, by ``time.perf_counter``.
    """

    round: Round
    outcome: Outcome
    attempts: int
    started_s: float


class RoundCollector:
    """Commands rounds, and waits until each has enough updates."""

    def __init__(self, parts: RunParts, callbacks: RunCallbacks, deadline: RoundDeadline | None) -> None:
        """``callbacks``: are called for updates. ``deadline``: of the rounds; None: that of the settings."""
        self._parts = parts
        self._context = parts.context
        self._config = parts.context.config
        self._selects_part = parts.selection.is_partial
        self._callbacks = callbacks
        self._deadline = deadline

    async def collect(self, round_id: int, accepted: set[int], *, due_s: float = math.inf) -> CollectedRound:
        """Make attempts at a round, until there are enough updates. Those of one attempt count in the next.

        Args:
            accepted: clients whose updates count already: it grows.
            due_s: no attempt is made after that time by ``time.monotonic``, or takes longer.

        Raises:
            BarrierTimeout, RoundTimeout, TrainingFailed: there are too few updates.
        """
        started_s, parts = time.perf_counter(), self._parts
        parts.losses.clear()
        if parts.strategy.bounds is not None:
            parts.strategy.bounds.open_round(round_id)
        # Of a site, whose attempt at this round was given up as the level above began it anew.
        await parts.terms.let_into_round(round_id)
        named, tries, attempt = parts.book.named(round_id), 0, 0
        if parts.masked is not None:
            parts.masked.begin_round(parts.selection.ready(round_id, named))
        least = self._config.clients.min if named is None else len(named)
        while tries < self._config.round.max_attempts:
            attempt += 1
            if len(accepted.union(parts.selection.ready(round_id, named))) < least:
                timeout_s = min(self._config.clients.start_timeout_s, max(_LEAST_WAIT_S, due_s - time.monotonic()))
                await parts.selection.wait_for_start(round_id, accepted, timeout_s=timeout_s, named=named)
            known = len(self._left_out)
            round_, outcome = await self._attempt(round_id, accepted, attempt, due_s)
            if outcome is not Outcome.TOO_FEW:
                if parts.masked is not None:
                    parts.masked.note_outcome(outcome)
                return CollectedRound(round_, outcome, attempt, started_s)
            # Without some clients it is another one, and their number is finite. One that is paused was asked too soon.
            has_paused = round_.lacks_only_paused and attempt < _PAUSED_ATTEMPTS * self._config.round.max_attempts
            tries += len(self._left_out) == known and not has_paused
            parts.losses.note_attempt(round_)
            (log.info if has_paused else log.warning)(
                "round goes on", round=round_id, updates=len(accepted), needed=round_.minimum, attempt=attempt
            )
            await parts.terms.let_into_round(round_id)
            ready = parts.selection.ready(round_id, named)
            if time.monotonic() >= due_s or (parts.masked is not None and parts.masked.has_too_few_left(ready)):
                break
        raise parts.losses.error(round_, attempt, "" if parts.masked is None else parts.masked.failure)

    @property
    def _left_out(self) -> set[int]:
        """Clients that attempts are made without, with secure aggregation."""
        return set() if self._parts.masked is None else self._parts.masked.left_out

    async def _attempt(self, round_id: int, accepted: set[int], attempt: int, due_s: float) -> tuple[Round, Outcome]:
        """Command the round and receive updates until it is over. ``accepted`` grows, also where this is cancelled; not
        so with secure aggregation, where a sum is of one attempt."""
        parts, receiver, probe = self._parts, self._parts.receiver, self._context.probe
        if parts.masked is not None:
            accepted = set()
        round_ = self._new_round(round_id, self._rules(round_id, attempt, due_s), accepted)
        probe.reached("before_command", round_id)
        masked = None if parts.masked is None else parts.masked.make_attempt(round_, self._attempt_terms())
        try:
            parts.current_round.begin(round_, masked)
            receiver.open_round(round_, parts.publisher.held, masked)
            outcome = await self._until_over(round_, *await self._command(round_))
        finally:
            if masked is not None:
                await masked.stop()
            await receiver.close()
            accepted.update(round_.accepted)
            parts.current_round.end()
        # An update that was being added when the round ended counts, too.
        outcome = round_.verdict(time.monotonic()) or outcome
        if parts.masked is not None and masked is not None:
            outcome = await parts.masked.end(round_, masked, outcome)
        await self._call_on_update()
        if self._selects_part and round_.open and outcome is not Outcome.TOO_FEW:
            with tolerate_write_timeout("terms", round_id):  # what the others make is not needed: they may stop
                await self._publish_terms(self._terms_of(round_id, accepted))
        return round_, outcome

    def _rules(self, round_id: int, attempt: int, due_s: float) -> RoundRules:
        config, least_s = self._config, 0.0
        if (secure := config.secure_aggregation).enabled:
            least_s = secure.exchange_s  # a client that hangs makes them take that long, whatever other rounds took
        deadline_s = config.round.timeout_s
        if self._deadline is not None:
            deadline_s = max(self._deadline.seconds(self._parts.book.find_most_work(round_id), attempt), 1.1 * least_s)
        left_s = max(0.0, due_s - time.monotonic())
        return RoundRules(
            minimum=config.clients.min,
            quorum=config.round.quorum,
            deadline_s=min(config.round.timeout_s, left_s, deadline_s),
            grace_s=config.round.grace_s,
        )

    def _new_round(self, round_id: int, rules: RoundRules, accepted: set[int]) -> Round:
        """An attempt at a round, in which the updates of the clients in ``accepted`` count already."""
        parts, config, left_out = self._parts, self._config, self._left_out
        named = parts.book.named(round_id)
        most = None
        if self._selects_part:  # else nobody is chosen by the samples that are known
            most = most_samples(config.limits, self._context.state.participation.samples().values())
        ready, enough = parts.selection.participants(round_id, accepted, most, named=named, without=left_out)
        rules = dataclasses.replace(rules, enough=enough)
        # Of those that were not asked nobody waits for one that sends again.
        silent = set() if self._selects_part else parts.registry.silent_ids(round_id) - left_out
        silent = silent if named is None else silent.intersection(named)
        if config.mode != "asynchronous":
            return Round(round_id, ready, rules, now_s=time.monotonic(), accepted=accepted, silent=silent)
        last = parts.progress.reports[-1] if parts.progress.reports else None
        buffer = BufferRound(
            round_id, ready, rules, config.asynchronous, now_s=time.monotonic(), accepted=accepted, silent=silent
        )
        if last is not None or accepted:
            buffer.go_on(last, updates=len(parts.receiver.totals.staleness) if accepted else 0)
        return buffer

    async def _command(self, round_: Round) -> tuple[RoundTerms | None, RepeatedCommand]:
        """Send the command of an attempt. Returns its terms, and what repeats it."""
        parts, context, round_id = self._parts, self._context, round_.round_id
        parts.progress.phase, parts.progress.round_id = "training", round_id
        parts.progress.out = context.state.quarantine.excluded(round_id)
        parts.current_round.notify()
        if context.history.on:
            await context.compute.run(self._note_command, round_)
        command = await context.compute.run(parts.book.command, round_id)
        terms = self._terms_of(round_id, round_.expected | round_.silent)
        oldest, proportional = round_id - parts.admission.max_staleness, self._config.asynchronous.proportional_steps
        parts.admission.limit_steps(parts.book.list_work(oldest, round_id), is_proportional=proportional)
        if parts.book.is_unwritten:
            await context.compute.run(parts.book.write, round_id)
        parts.receiver.timing.commanded()
        repeated = _repeated(command, context.run_id, parts.current_round.attempt)
        with tolerate_write_timeout("command", round_id):
            await self._publish_terms(terms)
            await context.bus.publish(context.identity, command)
            if parts.terms.names_commands:
                await context.publish(repeated)
        context.probe.reached("after_command", round_id)
        return terms, repeated

    async def _until_over(self, round_: Round, terms: RoundTerms | None, repeated: RepeatedCommand) -> Outcome:
        """Wait until a commanded round is over. Meanwhile repeat its terms, and its command while a client lacks it."""
        parts, current_round, round_id = self._parts, self._parts.current_round, round_.round_id
        masked = current_round.masked
        reached, repeat_s = round_.ready, self._config.clients.heartbeat_s
        repeat_at_s = time.monotonic() + repeat_s
        if masked is not None:
            masked.start(current_round.notify)
        while True:
            await self._call_on_update()  # before the verdict, which sees what has changed meanwhile
            if (outcome := round_.verdict(time.monotonic())) is not None:
                return outcome
            if masked is not None:
                masked.check()
            if round_.ready > reached:
                reached = round_.ready
                self._context.probe.reached("mid_collect", round_id)
            await current_round.sleep_until(min(round_.next_check_s(), repeat_at_s))
            if time.monotonic() >= repeat_at_s:
                repeat_at_s = time.monotonic() + repeat_s
                with tolerate_write_timeout("terms", round_id):
                    await self._publish_terms(terms)
                    if parts.registry.lacks_command(round_.open, round_id, repeated.attempt):
                        await self._context.publish(repeated)

    async def _call_on_update(self) -> None:
        """Call the callbacks for the updates that count by now."""
        if counted := self._parts.receiver.take_counted():
            await self._callbacks.call(self._callbacks.stop.run_update_callbacks, counted)

    def _attempt_terms(self) -> AttemptTerms:
        """What the clients of an attempt with secure aggregation are told of its sum."""
        strategy = self._parts.strategy
        cap = (self._config.limits.cap_samples or 0) if strategy.weighs_samples else 1
        return AttemptTerms(self._parts.model.dim, cap, strategy.masked_grid)

    def _terms_of(self, round_id: int, participants: Collection[int]) -> RoundTerms | None:
        bounds = self._parts.strategy.bounds
        held, masked = bounds is not None and not bounds.is_settled, self._parts.current_round.masked
        attempt = 0 if masked is None else masked.number
        return self._parts.terms.of_round(round_id, participants, held=held, attempt=attempt)

    async def _publish_terms(self, terms: RoundTerms | None) -> None:
        if terms is not None:
            await self._context.publish(terms)

    def _note_command(self, round_: Round) -> None:
        expected, counted = sorted(round_.expected), sorted(round_.accepted)
        named = self._context.state.names.named(expected[:MAX_NAMED])
        self._context.history.note("commanded", round=round_.round_id, expected=expected, counted=counted, names=named)


def _repeated(command: TrainCmd, run_id: int, attempt: int) -> RepeatedCommand:
    """Return what repeats the command of this attempt at a round."""
    return RepeatedCommand(
        run_id, command.round_id, command.subset_size, command.epochs, command.lr, command.seed, attempt
    )
