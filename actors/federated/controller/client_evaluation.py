"""Evaluation by clients, on the controller's side: asks them, and takes their results until a deadline.

A request is repeated with the heartbeat and names those whose result is missing: a lost message costs half a second,
and nothing is acknowledged. A client that dies is not awaited, and one that hangs costs each
evaluation its deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence, Set

from gradbus.actors.federated.controller.clients import ClientRegistry
from gradbus.actors.federated.controller.current_round import CurrentRound
from gradbus.actors.federated.controller.evaluation import ClientEvaluation, OpenEvaluation
from gradbus.actors.federated.controller.selectors.base import ClientFacts, Draw, Selector
from gradbus.actors.federated.controller.selectors.uniform import Uniform
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.protocol import PAUSED
from gradbus.runtime.config.federated import EvaluationSettings
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import EvaluationRequest, EvaluationResult
from gradbus.runtime.wire.id_ranges import MAX_CHARS, format_ids

_OTHER_DRAW = 0x4000_0000  # added to the round: else those evaluate that have just trained
_LONGEST_ID = 11  # characters, with the comma

log = get_logger("controller")


class ClientEvaluator:
    """Has clients evaluate models, one at a time."""

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        current_round: CurrentRound,
    ) -> None:
        """``current_round``: wakes whoever waits."""
        self._context = context
        self._registry = registry
        self._current_round = current_round
        self._open: OpenEvaluation | None = None
        self._selector = selector_of(context.config.evaluation)

    def is_due(self, round_id: int) -> bool:
        """Whether the model after this round is to be evaluated."""
        every, last = self._context.config.evaluation.every, self._context.config.rounds
        return bool(every) and (round_id % every == 0 or round_id == last)

    def ready(self) -> list[int]:
        """Clients that can evaluate, ascending."""
        return self._registry.ready(self._context.state.round_id + 1)

    async def evaluate_round(self, round_id: int) -> ClientEvaluation:
        """Have those clients that are drawn for it evaluate the model after this round."""
        config = self._context.config
        found = await self.evaluate(round_id, self._drawn(round_id))
        summary = await self._context.compute.run(
            found.summary, config.limits, config.evaluation.maximize, now_s=time.monotonic()
        )
        if summary.missing.keys() - {PAUSED}:
            log.warning(
                "evaluation without some clients",
                round=round_id,
                answered=summary.answered,
                asked=summary.asked,
                missing=dict(summary.missing),
            )
        return summary

    async def evaluate_present(self, names: Set[str]) -> OpenEvaluation:
        """Have all clients that are ready evaluate the present model, until all these metrics are found."""
        return await self.evaluate(self._context.state.round_id, self.ready(), lambda found: names <= found.names)

    def _drawn(self, round_id: int) -> Sequence[int]:
        ready = self.ready()
        facts = [ClientFacts(client_id=client_id) for client_id in ready]
        draw = Draw(self._context.config.seed, round_id + _OTHER_DRAW)
        return self._selector.select(facts, self._selector.wanted(len(ready)), draw)

    async def evaluate(
        self, round_id: int, asked: Iterable[int], is_enough: Callable[[OpenEvaluation], bool] = lambda found: False
    ) -> OpenEvaluation:
        """Have these clients evaluate the model of this round. Returns when nothing more is awaited, or ``is_enough``
        is true of the results so far."""
        config = self._context.config
        now_s = time.monotonic()
        found = self._open = OpenEvaluation(
            round_id,
            asked,
            now_s=now_s,
            timeout_s=config.evaluation.timeout_s,
            max_samples=config.limits.max_samples,
        )
        repeat_at_s = now_s
        try:
            self.follow_registry()
            while not (found.is_over(now_s := time.monotonic()) or is_enough(found)):
                if now_s >= repeat_at_s:
                    repeat_at_s = now_s + config.clients.heartbeat_s
                    await self._request(found, found.deadline_at_s - now_s)
                if not (found.is_over(time.monotonic()) or is_enough(found)):  # results may have come meanwhile
                    await self._current_round.sleep_until(min(repeat_at_s, found.deadline_at_s))
        finally:
            self._open = None
            found.close()
        return found

    async def _request(self, found: OpenEvaluation, remaining_s: float) -> None:
        named = format_ids(found.open)
        if len(named) > MAX_CHARS:  # the others are named once these have answered
            named = format_ids(sorted(found.open)[: MAX_CHARS // _LONGEST_ID])
        request = EvaluationRequest(self._context.run_id, found.round_id, named, max(0.0, remaining_s))
        with contextlib.suppress(BusError):  # it is repeated
            await self._context.publish(request)

    def on_result(self, client_id: int, result: EvaluationResult) -> None:
        """A result has come."""
        if result.run_id == self._context.run_id and self._open is not None and self._open.add(client_id, result):
            self._current_round.notify()

    def follow_registry(self) -> None:
        """Wait no longer for clients that are gone, silent or paused."""
        if self._open is None:
            return
        here = self._registry.taking_part(self._context.state.round_id + 1)
        for client_id in self._open.follow_clients(here, self._registry.paused_ids()):
            log.warning(
                "client lost to the evaluation", **self._context.client_facts(client_id), round=self._open.round_id
            )


def selector_of(settings: EvaluationSettings) -> Selector:
    """Draws those that evaluate."""
    return Uniform(fraction=settings.fraction, count=settings.count)
