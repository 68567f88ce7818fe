"""Whole runs with differential privacy over real DDS, with all actors on one loop."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from other_payloads import send_instead
from torch import nn

import gradbus
from gradbus import codecs
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.privacy.accountant import epsilon_of
from gradbus.models.task import TrainResult
from gradbus.runtime.errors import CheckpointError, ConfigError, GradbusError, JoinRefused
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.messages import Identity, TrainCmd

pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")

_jobs = itertools.count()


class Moving:
    """Training that moves each weight by one, or ``by``."""

    def __init__(self, module: Any = nn.Linear, by: float = 1.0) -> None:
        self.module = module
        self.by = by

    def build_model(self) -> nn.Module:
        model: nn.Module = self.module(20, 1)
        with torch.no_grad():
            for one in model.parameters():
                one.zero_()
        return model

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, **_: Any) -> TrainResult:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for one in model.parameters():
            one.grad = -self.by * torch.ones_like(one)
        optimizer.step()
        return TrainResult(7, 1.25)

    def evaluate(self, model: Any) -> None:
        return None


def run(clients: int, *, task: Any = None, client: dict[str, Any] | None = None, **settings: Any) -> gradbus.Controller:
    """A whole run, with so many clients."""
    job, domain = f"private-{os.getpid()}-{next(_jobs)}", new_domain()
    config = gradbus.FederatedConfig(
        **{"clients": {"num": clients or 1, "dead_after_s": 30.0}, "eval_every": 0, **settings}
    )

    async def one(client_id: int) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            own = gradbus.ClientConfig(**(client or {}))
            await gradbus.Client(bus, task or Moving(), client_id=client_id, config=own).run()

    async def main() -> gradbus.Controller:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            controller = gradbus.Controller(bus, task or Moving(), config)
            tasks = [group.create_task(one(client_id)) for client_id in range(clients)]
            try:
                await controller.run()
            except BaseException:
                for each in tasks:
                    each.cancel()
                raise
        return controller

    try:
        return asyncio.run(main())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def test_a_spent_budget_ends_the_run_with_its_model_kept_and_a_resume_goes_on_only_with_more(tmp_path: Path) -> None:
    settings = {"rounds": 5, "checkpoint": {"dir": tmp_path}}

    def private(epsilon: float) -> dict[str, Any]:
        return {"name": "central", "noise_multiplier": 4.0, "epsilon": epsilon, "target_quantile": 0.5}

    first = run(2, privacy=private(1.8), **settings)
    epsilons = [report.epsilon for report in first.progress.reports]
    assert first.progress.phase == "done"
    assert 1 <= len(epsilons) < 5
    assert first.progress.ended_early.startswith("the privacy budget is spent")
    assert all(epsilon is not None and epsilon <= 1.8 for epsilon in epsilons)
    again = run(0, privacy=private(1.8), **settings)  # waits for no clients
    assert [report.epsilon for report in again.progress.reports] == epsilons
    assert torch.equal(again.weights, first.weights)
    more = run(2, privacy=private(2.5), **settings)
    assert [report.epsilon for report in more.progress.reports][: len(epsilons)] == epsilons
    assert len(more.progress.reports) > len(epsilons)
    with pytest.raises(CheckpointError, match="rounds without it would undo"):
        run(0, **settings)


def test_a_round_whose_checkpoint_is_damaged_was_released_and_is_spent_twice(tmp_path: Path) -> None:
    privacy = {"name": "central", "noise_multiplier": 4.0}
    first = run(1, rounds=3, privacy=privacy, checkpoint={"dir": tmp_path})
    (tmp_path / "round-000003.safetensors").write_bytes(b"damaged")
    again = run(1, rounds=4, privacy=privacy, checkpoint={"dir": tmp_path})
    assert [report.round_id for report in again.progress.reports] == [1, 2, 3, 4]
    assert again.weights.shape == first.weights.shape
    assert again.progress.reports[-1].epsilon == pytest.approx(epsilon_of([(4.0, 5)], 1e-5))


def test_a_client_that_lies_about_its_norm_is_struck_and_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = codecs.get("fp32").encode(torch.ones(21))  # not clipped
    send_instead(monkeypatch, lambda key, honest: bytes(trained) if key.sender == 1 else honest)
    privacy = {"name": "central", "noise_multiplier": 0.01, "clip_norm": 0.1}
    controller = run(2, rounds=1, privacy=privacy)
    (report,) = controller.progress.reports
    assert report.clients == (0,)
    assert [(one.client_id, one.reason) for one in report.strikes] == [(1, "refused")]
    assert float(controller.weights.norm()) < 0.2  # and not the length of what was sent, sqrt(21)


def test_a_local_update_tells_nothing_beside_the_noisy_model() -> None:
    controller = run(2, rounds=2, privacy={"name": "local", "noise_multiplier": 1.0}, client={"least_noise": 1.0})
    reports = controller.progress.reports
    assert [(report.num_samples, report.loss) for report in reports] == [(2, None)] * 2
    assert reports[1].epsilon is not None
    assert reports[0].epsilon is not None
    assert reports[1].epsilon > reports[0].epsilon
    assert 0.5 < float(controller.weights.std()) < 8  # of two means of two, each of standard deviation 2: near 2


def local_update(
    store: ClientStateStore, round_id: int, *, run_id: int = 7, rule: str = "plain", by: float = 1.0
) -> bytes:
    """The payload of a client with local privacy, which begins with this store. ``by``: what training adds."""
    training = LocalTraining(
        Moving(by=by), Identity(0, 1), FlatModel(Moving().build_model()), store, PayloadMemory(switched_on=False)
    )
    terms = {"privacy.name": "local", "privacy.clip_norm": 1.0, "privacy.noise_multiplier": 1.0}
    welcome = dataclasses.replace(Welcome(0, 1, run_id, 1, "fp32", "{}", 1, 0.5), options=terms, rule=rule)
    inputs = RoundInputs(
        welcome=welcome, command=TrainCmd(round_id, 0, 1, 0.1, 0), base=torch.zeros(21), broadcast=torch.zeros(21)
    )
    try:
        return bytes(training.train(inputs, 1, lambda: False).payload)
    finally:
        training.close()


def test_a_round_that_is_done_again_gives_what_it_gave_before_and_nothing_without_noise() -> None:
    store = ClientStateStore(None, 0)
    first = local_update(store, 1)
    assert local_update(store, 1) == first
    assert local_update(store, 2) != first
    with pytest.raises(ConfigError, match="sends control without noise"):
        local_update(store, 3, rule="scaffold")


def test_a_client_that_was_started_anew_releases_what_it_has_released_whatever_it_has_trained_since(
    tmp_path: Path,
) -> None:
    def update(round_id: int, run_id: int = 7, by: float = 1.0) -> bytes:
        return local_update(ClientStateStore(tmp_path, 0), round_id, run_id=run_id, by=by)

    first, second = update(1), update(2)
    assert first != second
    assert [update(1, by=5.0), update(2, by=5.0)] == [first, second]
    (kept,) = tmp_path.glob("client-0/released-*")
    assert all(len(path.read_bytes()) < 2000 for path in kept.iterdir())  # what was sent, and no key of its noise
    assert update(1, run_id=8) != first
    assert [path.name for path in tmp_path.glob("client-0/released-*")] == [f"released-{8:016x}"]
    next((tmp_path / "client-0").glob("released-*/round-000001.safetensors")).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        update(1, run_id=8)


def test_a_controller_that_goes_back_gets_what_later_rounds_have_released_before(tmp_path: Path) -> None:
    def update(round_id: int) -> bytes:
        return local_update(ClientStateStore(tmp_path, 0), round_id)

    before = {round_id: update(round_id) for round_id in (1, 3, 4)}  # it was not asked in round 2
    assert update(2) == update(2)
    assert [update(3), update(4)] == [before[3], before[4]]
    first = update(1)  # there is no room for four: this one is anew, and stays until it counts
    assert first != before[1]
    assert update(1) == first


def test_virtual_clients_keep_what_they_release_in_their_folders(tmp_path: Path) -> None:
    privacy = {"name": "local", "noise_multiplier": 1.0}
    result = gradbus.simulate(
        Moving(),
        3,
        config=gradbus.FederatedConfig(rounds=2, eval_every=0, privacy=privacy),
        options=gradbus.SimulationOptions(processes=1, state_dir=tmp_path, domain=new_domain()),
    )
    assert [report.updates for report in result.rounds] == [3, 3]
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("client-*/released-*/*.safetensors"))
    assert [(path[:8], path[-18:]) for path in kept] == [
        (f"client-{client}", f"00000{number}.safetensors") for client in range(3) for number in (1, 2)
    ]


def test_a_client_that_insists_on_noise_sends_nothing_to_a_controller_that_asks_for_none() -> None:
    with pytest.raises(JoinRefused, match=r"client.least_noise is 1: nothing is sent"):
        run(1, rounds=1, client={"least_noise": 1.0})


def test_buffers_that_noise_would_spoil_are_refused_at_the_start() -> None:
    class Normed(nn.Sequential):
        def __init__(self, width: int, out: int) -> None:
            super().__init__(nn.Linear(width, out), nn.BatchNorm1d(out))

    with pytest.raises(GradbusError, match=r"exchanges the buffers 1\.running_mean, 1\.running_var"):
        run(0, task=Moving(Normed), privacy={"name": "central", "noise_multiplier": 1.0})
