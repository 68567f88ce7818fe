"""Evaluation by clients on the controller's side, without a network."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gradbus.actors.federated.controller.client_evaluation import ClientEvaluator
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.wire.control import EvaluationResult

RUN = 7


def test_an_evaluation_ends_at_once_where_the_last_metric_comes_while_the_request_is_sent() -> None:
    async def publish(_: Any) -> None:
        evaluator.on_result(0, EvaluationResult(RUN, 0, 5, {"rmse": 1.0}, "", 0.0))

    async def sleep_until(_: float) -> None:
        raise AssertionError("nothing more is to come that this is to wait for")

    context: Any = SimpleNamespace(
        config=FederatedConfig(), publish=publish, run_id=RUN, state=SimpleNamespace(round_id=0)
    )
    registry: Any = SimpleNamespace(taking_part=lambda _: [0, 1], ready=lambda _: [0, 1], paused_ids=set)
    current_round: Any = SimpleNamespace(sleep_until=sleep_until, notify=lambda: None)
    evaluator = ClientEvaluator(context, registry, current_round)
    found = asyncio.run(evaluator.evaluate_present({"rmse"}))
    assert list(found.results) == [0]
