"""Robust strategies in whole runs: hostile clients over DDS, a controller that dies, and a run that cannot begin."""

from __future__ import annotations

import asyncio
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import federation
import pytest
import torch
from dds_domains import new_domain
from settings import nested

import gradbus
from gradbus import codecs
from gradbus.actors.aggregation.clipping import within_limits
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.models import NoopTask
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.errors import ConfigError

DIM = 20_000


class Hostile(NoopTask):
    """Sends 1,000 times what it should, the other way round."""

    def train(self, model: Any, **arguments: Any) -> Any:
        with torch.no_grad():
            before = model.vector.clone()
            outcome = super().train(model, **arguments)
            model.vector.sub_(1001 * (model.vector - before))
        return outcome


async def run(strategy: str, hostile: set[int]) -> tuple[torch.Tensor, list[gradbus.RoundReport]]:
    job, domain = f"robust-{os.getpid()}", new_domain()
    config = gradbus.FederatedConfig(
        rounds=2,
        clients={"num": 5, "min": 5, "dead_after_s": 30.0},
        strategy=strategy,
        eval_every=0,  # type: ignore[arg-type]
    )

    async def client(client_id: int) -> None:
        task = (Hostile if client_id in hostile else NoopTask)(DIM, delta="seeded")
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, task, client_id=client_id).run()

    async with asyncio.timeout(40), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
        for client_id in range(5):
            group.create_task(client(client_id))
        controller = gradbus.Controller(bus, NoopTask(DIM), config)
        reports = await controller.run()
        return controller.weights, reports


@pytest.mark.parametrize("strategy", ["fedavg", "median", "trimmed_mean", "krum", "multi_krum"])
def test_one_hostile_client_of_five_spoils_the_mean_and_nothing_else(strategy: str) -> None:
    weights, reports = asyncio.run(run(strategy, {3}))
    assert [report.clients for report in reports] == [(0, 1, 2, 3, 4)] * 2
    length = weights.norm().item() / (1e-3 * DIM**0.5)  # in updates of an honest client
    if strategy == "fedavg":
        assert length > 100
        return
    assert length < 2
    if "krum" in strategy:
        assert all(3 in report.marks["left out"] for report in reports)


def test_a_run_that_its_rules_do_not_allow_does_not_begin() -> None:
    async def main() -> None:
        config = gradbus.FederatedConfig(strategy="krum", clients={"min": 4, "num": 10})
        async with gradbus.connect(job=f"rules-{os.getpid()}", domain=new_domain()) as bus:
            await gradbus.Controller(bus, NoopTask(DIM), config).run()

    with pytest.raises(ConfigError, match=r"2 f \+ 3 = 5 updates in every round"):
        asyncio.run(main())


RULES: dict[str, Any] = {
    "rounds": 3,
    "clients__num": 3,
    "clients__min": 3,
    "strategy": "trimmed_mean",
    "limits__clip_norm": 0.01,
}


def without_a_network() -> list[int]:
    """CRC-32 of the weights after each round of these rules, by the strategy alone."""
    config, task = gradbus.FederatedConfig(**nested(RULES)), NoopTask(federation.DIM, delta="seeded")
    strategy = within_limits(STRATEGIES.make(config.strategy, federation.DIM), config)
    model, found = task.build_model(), []
    weights = model.vector.data.clone()
    for round_id in range(1, config.rounds + 1):
        base = weights.clone()
        strategy.begin(round_id, base)
        for client_id in range(3):
            model.vector.data.copy_(base)
            arguments = {
                "epochs": 1,
                "lr": 0.1,
                "seed": 0,
                "subset_size": 0,
                "should_stop": lambda: False,
            }
            task.train(model, client_id=client_id, round_id=round_id, **arguments)  # type: ignore[arg-type]
            payload = codecs.get("fp32").encode(model.vector.data - base)
            strategy.add(
                Update(codecs.parse(payload, expected_dim=federation.DIM)), Facts(client_id=client_id, num_samples=1)
            )
        strategy.finish(weights)
        found.append(zlib.crc32(weights.numpy().data))
    return found


@pytest.mark.slow
def test_killed_in_mid_round_the_run_ends_with_the_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    with federation.Federation(domain=new_domain(), silence_s=federation.NOBODY_DIES_S) as nodes:
        clients = [nodes.client(client_id) for client_id in range(3)]
        state = str(tmp_path / "state")
        first = nodes.controller(**RULES, checkpoint__dir=state, fail_at="mid_collect:2", network={"lease_s": 1.0})
        assert first.wait(60.0) == -signal.SIGKILL
        done = nodes.controller(**RULES, checkpoint__dir=state).wait_for("done", timeout_s=60.0)
        assert [client.wait() for client in clients] == [0, 0, 0]
    assert [report["weights_crc32"] for report in done["reports"]] == without_a_network()
    assert [report["marks"] for report in done["reports"]] == [{"clipped": [0, 1, 2]}] * 3
