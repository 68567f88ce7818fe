"""From the sum of the updates of a round to the next model: computed, durable, published and evaluated."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from gradbus.actors.federated.controller.deadline import RoundDeadline
from gradbus.actors.federated.controller.early_stop import RunCallbacks
from gradbus.actors.federated.controller.liveness import tolerate_write_timeout
from gradbus.actors.federated.controller.report import RoundReport, round_report
from gradbus.actors.federated.controller.round_collection import CollectedRound
from gradbus.actors.federated.controller.rounds import Outcome
from gradbus.actors.federated.controller.run_parts import RunParts
from gradbus.runtime.logs import get_logger

log = get_logger("controller")


class RoundCommitter:
    """Commits one round after the other."""

    def __init__(self, parts: RunParts, callbacks: RunCallbacks, deadline: RoundDeadline | None) -> None:
        """``callbacks``: are called for new models. ``deadline``: learns from each round; None: there is none."""
        self._parts = parts
        self._context = parts.context
        self._state = parts.context.state
        self._callbacks = callbacks
        self._deadline = deadline
        self._selects_part = parts.selection.is_partial
        self._calls_on_aggregate = callbacks.have("on_aggregate")
        self._rejected_before: Counter[str] = Counter()

    async def commit(
        self, collected: CollectedRound, *, marks: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    ) -> RoundReport:
        """Make the next model of the sum of the updates, durable and published. Returns the report of the round.

        Args:
            marks: what the report is to say beside the marks of the strategy.

        Raises:
            CheckpointError: it could not be written. ControllerReplaced: a later start has taken the place of this one.
        """
        parts, state, probe = self._parts, self._state, self._context.probe
        round_, outcome, attempts, started_s = collected
        round_id = round_.round_id
        collected_s = time.perf_counter()
        parts.progress.phase = "aggregating"
        await parts.publisher.quiesce()
        probe.reached("after_collect_before_aggregate", round_id)
        await self._aggregate(collected)
        # A report that somebody gets before the model is published has the checksum; else clients do not wait for it.
        is_told = state.is_durable or self._context.history.on or self._calls_on_aggregate
        crc32 = await self._context.compute.run(self.weights_crc32) if is_told else 0
        aggregated_s = time.perf_counter()
        probe.reached("after_aggregate_before_commit", round_id)
        totals = parts.receiver.totals
        report = round_report(
            round_,
            totals,
            parts.receiver.timing,
            (started_s, collected_s, aggregated_s),
            attempt=attempts,
            outcome=outcome.value,
            dropped=self._take_dropped(),
            weights_crc32=crc32,
            strikes=state.quarantine.take_new(),
            marks={**parts.strategy.marks(), **marks},
            epsilon=parts.strategy.epsilon,
            order=parts.book.reported(round_id),
        )
        if self._calls_on_aggregate:
            await self._callbacks.call(self._callbacks.stop.call_on_aggregate, report)
        state.participation.commit(round_id, totals.samples, parts.losses.of(round_), totals.loss_of)
        if self._deadline is not None and attempts == 1:  # in another one some updates were there when it began
            self._deadline.note_round(round_.answered_s, parts.book.find_most_work(round_id))
        parts.losses.clear()
        # The message is made before the commit: what the clients will hold is part of the state.
        size = await parts.publisher.prepare(round_id)
        asked = round_.asked if self._selects_part else None
        # Known before the commit, so that a resume does not lack it; what of it is shared only the sending tells.
        report = dataclasses.replace(report, bytes_down=parts.publisher.bytes_down(size, asked)["bytes_down"])
        if state.is_durable or self._context.history.on:
            await self._context.compute.run(self._make_durable, report)
        else:
            self._make_durable(report)
        committed_s = time.perf_counter()
        probe.reached("after_commit_before_publish", round_id)
        with tolerate_write_timeout("model", round_id):
            await parts.publisher.publish()
        published_s = time.perf_counter()
        if not is_told:
            report = dataclasses.replace(report, weights_crc32=await self._context.compute.run(self.weights_crc32))
        checked_s = time.perf_counter()
        probe.reached("after_publish", round_id)
        if self._context.config.asynchronous.proportional_steps:
            await parts.terms.adapt_steps(totals.speeds)
        evaluation = await parts.evaluation.evaluate_round(round_id)
        report = state.amend(
            report,
            **parts.publisher.bytes_down(size, asked),
            downlink_residual_norm=parts.publisher.residual_norm,
            checkpoint_s=committed_s - aggregated_s,
            publish_s=published_s - committed_s,
            eval_s=time.perf_counter() - checked_s,
            seconds=published_s - started_s,
            **evaluation,
        )
        parts.progress.add(report)
        log.info(
            "round done",
            round=round_id,
            accuracy=report.accuracy,
            metrics=dict(report.metrics) or None,
            loss=report.loss,
            clients=list(report.clients),
            outcome=report.outcome,
            seconds=round(report.seconds, 3),
            bytes_shared=report.bytes_shared,
        )
        return report

    async def _aggregate(self, collected: CollectedRound) -> None:
        """Make the next model of the sum of the updates; without any, the model stays as it is."""
        round_, outcome = collected.round, collected.outcome
        if outcome in (Outcome.NOTHING, Outcome.GIVEN_UP):
            log.info("model unchanged", round=round_.round_id, reason=outcome.value, clients=len(round_.failed))
        else:
            await self._context.compute.run(self.finish_round)

    def finish_round(self) -> None:
        """Set weights and merged buffers to those of the next model, on the compute thread."""
        self._parts.strategy.finish(self._state.weights)
        if (buffers := self._parts.update_sum.buffers) is not None:
            self._state.replace_buffers(buffers.finish())

    def _take_dropped(self) -> dict[str, int]:
        """Updates, frames and invalid samples that did not count since the last report, by reason."""
        rejected, dropped = self._context.bus.rejected, self._context.dropped
        found = dict(dropped + (rejected - self._rejected_before))
        self._rejected_before = rejected
        dropped.clear()
        return found

    def weights_crc32(self) -> int:
        """Return the CRC-32 of the weights, on the compute thread."""
        return zlib.crc32(self._state.weights.numpy().data)

    def _make_durable(self, report: RoundReport) -> None:
        self._state.commit(report, self._parts.publisher.held_apart)
        self._context.probe.reached("after_commit_before_note", report.round_id)
        self._parts.publisher.note_commit(report)
