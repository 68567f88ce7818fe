"""Whole runs with clients that are believed, and with clients that may lie."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dds_domains import new_domain
from federation import NOBODY_DIES_S, Federation
from torch import nn

import gradbus
from gradbus.actors import Client, Controller
from gradbus.models import NoopTask, TrainResult

DIM = 100

pytestmark = pytest.mark.slow


class Shares(NoopTask):
    """Each client moves all parameters by a vector of its own, and says how many samples it has."""

    def __init__(self, samples: int, delta: torch.Tensor) -> None:
        super().__init__(DIM)
        self._samples, self._delta = samples, delta

    def train(self, model: nn.Module, **arguments: Any) -> TrainResult:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(self._delta)
        return TrainResult(num_samples=self._samples, loss=0.5)


def run(
    *shares: tuple[int, torch.Tensor], rounds: int = 1, shared_memory: bool = True, **rules: Any
) -> tuple[torch.Tensor, list[gradbus.RoundReport]]:
    """The model after these rounds of clients with these samples and vectors."""

    async def main() -> tuple[torch.Tensor, list[gradbus.RoundReport]]:
        place: dict[str, Any] = {
            "job": f"trust-{os.getpid()}",
            "domain": new_domain(),
            "shared_memory": shared_memory,
        }
        clients = {"num": len(shares), "min": len(shares)}
        config = gradbus.FederatedConfig(**{"rounds": rounds, "clients": clients, "eval_every": 0, **rules})
        async with asyncio.timeout(60), gradbus.connect(**place) as bus, gradbus.connect(**place) as others:
            controller = Controller(bus, NoopTask(DIM), config)
            async with asyncio.TaskGroup() as group:
                for client_id, share in enumerate(shares):
                    group.create_task(Client(others, Shares(*share), client_id=client_id).run())
                reports = await controller.run()
            return controller.weights, reports

    return asyncio.run(main())


def vectors(count: int) -> list[torch.Tensor]:
    return [torch.randn(DIM, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def test_where_clients_cooperate_fedavg_is_the_weighted_mean_to_the_bit() -> None:
    samples, deltas = (1000, 10, 10), vectors(3)
    found, reports = run(*zip(samples, deltas, strict=True))
    total = sum(
        np.rint(delta.numpy().astype(np.float64) * (count * 2.0**30)).astype(np.int64)
        for count, delta in zip(samples, deltas, strict=True)
    )
    oracle = (total * (1 / (sum(samples) * 2.0**30))).astype(np.float32)
    assert found.numpy().tobytes() == oracle.tobytes()
    mean = sum(count / 1020 * delta.double() for count, delta in zip(samples, deltas, strict=True))
    torch.testing.assert_close(found.double(), mean, rtol=0, atol=1e-6)
    assert (reports[0].marks, reports[0].num_samples) == ({}, 1020)


def test_a_client_that_lies_about_its_samples_has_four_votes_and_no_strike() -> None:
    still, moved = torch.zeros(DIM), torch.full((DIM,), 0.11)
    honest = [(600, still)] * 5
    found, reports = run(*honest, (1 << 30, moved), limits={"trust": "adversarial", "clip_norm": 100.0})
    assert found.tolist() == pytest.approx([0.11 * 4 / 9] * DIM)
    assert (reports[0].marks, reports[0].strikes) == ({"weight bounded": (5,)}, ())
    found, reports = run(*honest, (1 << 30, moved))
    assert found.tolist() == pytest.approx([0.11] * DIM, rel=1e-4)


def test_a_client_that_sends_a_thousand_times_its_update_is_bounded_from_the_first_round_on() -> None:
    deltas = vectors(4)
    shares = [(100, delta) for delta in deltas[:3]]
    found, reports = run(*shares, (100, 1000 * deltas[3]), rounds=3, limits={"trust": "adversarial"})
    assert [report.marks for report in reports] == [{"norm bounded": (3,)}] * 3
    assert float(found.norm()) < 3 * (4 + 3) * max(float(delta.norm()) for delta in deltas) / 4


@pytest.mark.parametrize("budget_bytes", [1, 1 << 20])
def test_a_first_round_with_room_for_one_update_has_the_bits_of_one_with_room_for_all(budget_bytes: int) -> None:
    shares = [(100 + client_id, delta * 10.0**client_id) for client_id, delta in enumerate(vectors(4))]
    limits = {"trust": "adversarial", "receive_budget_bytes": budget_bytes}
    found, reports = run(*shares, rounds=2, limits=limits, shared_memory=False)
    expected, _ = run(*shares, rounds=2, limits={"trust": "adversarial"})
    assert torch.equal(found, expected)
    assert [report.marks for report in reports] == [{"norm bounded": (2, 3)}] * 2
    assert [report.attempt for report in reports] == [1, 1]


def test_asynchronous_rounds_are_bounded_by_the_buffer_before() -> None:
    deltas = vectors(4)
    shares = [(100, delta) for delta in deltas[:3]]
    found, reports = run(
        *shares,
        (1 << 16, 1000 * deltas[3]),
        rounds=3,
        limits={"trust": "adversarial"},
        mode="asynchronous",
        asynchronous={"buffer": 4, "repeats": False},
    )
    assert [report.updates for report in reports] == [4, 4, 4]
    assert [report.marks for report in reports] == [{"weight bounded": (3,), "norm bounded": (3,)}] * 3
    assert float(found.norm()) < 3 * 16 * max(float(delta.norm()) for delta in deltas)


RULES = {
    "rounds": 4, "clients__num": 3, "clients__min": 3, "limits__trust": "adversarial", "limits__cap_times_median": 1.0,
    "strategy": "fedavgm", "codec": "sq8", "history__payloads": True,
}  # fmt: skip


@pytest.mark.faults
def test_a_resumed_run_has_the_bounds_and_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    crcs, marks = {}, {}
    for fail_at in ("", "mid_collect:2", "after_commit_before_publish:2"):
        with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S) as federation:
            state = str(tmp_path / (fail_at or "whole"))
            controller = federation.controller(fail_at=fail_at, checkpoint__dir=state, **RULES)
            clients = [federation.client(one) for one in range(3)]
            if fail_at:
                assert controller.wait(60.0) == -signal.SIGKILL
                controller = federation.controller(checkpoint__dir=state, **RULES)
            reports = controller.wait_for("done", timeout_s=60.0)["reports"]
            assert [client.wait() for client in clients] == [0, 0, 0]
            assert federation.findings()["I3"].checked == 4, "every round was computed again"
        crcs[fail_at] = [report["weights_crc32"] for report in reports]
        marks[fail_at] = [report["marks"] for report in reports]
    assert len({str(one) for one in crcs.values()}) == 1
    assert all(one == marks[""] for one in marks.values())
    assert any(marks[""]), "something was bounded"
