"""Virtual clients as Ray actors, on a cluster of two cores, which all tests share, as its start takes seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from dds_domains import new_domain
from safetensors.torch import load_file
from torch import nn

import gradbus
from gradbus.actors.federated.client.local_training import RoundInputs
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.virtual import pool as pool_module
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.pool import ClientFailed, ProcessDied, RoundWork
from gradbus.actors.virtual.ray_pool import LOCAL, RayCluster, RayPool
from gradbus.models import NoopTask, TrainingStopped
from gradbus.models.task import EvalResult, TrainResult
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.messages import Identity, TrainCmd

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gradbus[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DIM = 20_000  # updates lie in shared memory


def virtual(task: Any, pool: Any, tmp_path: Path) -> gradbus.SimulationResult:
    config = gradbus.FederatedConfig(
        rounds=3,
        eval_every=0,
        clients={"dead_after_s": 30.0},
        codec="sq8",
        round={"timeout_s": 90.0},
        selection={"name": "uniform", "fraction": 0.5},
    )
    options = gradbus.SimulationOptions(domain=new_domain(), processes=2, pool=pool, state_dir=tmp_path / pool)
    return gradbus.simulate(task, 6, config=config, options=options)


def heads() -> Any:
    """A task of a class that travels to Ray's processes with it."""

    class Heads:
        """Each client has other samples, and layers of its own; the residual of the codec travels with these."""

        def build_model(self) -> nn.Module:
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
            generator = torch.Generator().manual_seed(3)  # of its own: controller and host build models side by side
            with torch.no_grad():
                for layer in (model[0], model[3]):
                    layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
                    layer.bias.zero_()
            return model

        def prepare(self, client_id: int, num_clients: int) -> None:
            generator = torch.Generator().manual_seed(client_id)
            self.x, self.y = torch.randn(8, 3, generator=generator) + client_id, torch.arange(8) % 2

        def train(self, model: Any, *, lr: float, **_: Any) -> TrainResult:
            loss = nn.functional.cross_entropy(model(self.x), self.y)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return TrainResult(8, float(loss.detach()))

        def evaluate(self, model: Any) -> None:
            return None

        def evaluate_local(self, model: Any, *, client_id: int) -> EvalResult:
            model.eval()
            loss = float(nn.functional.cross_entropy(model(self.x), self.y))
            model.train()
            return EvalResult(None, loss, 8)

    return Heads()


def personal(pool: Any, folder: Path) -> list[Any]:
    """A run whose clients have layers of their own, a residual, and evaluate: checksums and what they have found."""
    config = gradbus.FederatedConfig(
        rounds=3,
        eval_every=0,
        clients={"dead_after_s": 30.0},
        codec="sq8",
        round={"timeout_s": 90.0},
        share={"exclude": ["1.*", "3.*"]},
        evaluation={"every": 1, "timeout_s": 60.0},
        training={"lr": 0.1},
    )
    options = gradbus.SimulationOptions(domain=new_domain(), processes=2, pool=pool, state_dir=folder / pool)
    result = gradbus.simulate(heads(), 4, config=config, options=options)
    assert [report.by_clients.answered for report in result.rounds] == [4, 4, 4]
    losses = [report.by_clients.metrics["loss"] for report in result.rounds]
    return [[report.weights_crc32, loss.mean, loss.std] for report, loss in zip(result.rounds, losses, strict=True)]


def files(folder: Path) -> dict[str, bytes]:
    """The tensors that clients keep, as bytes, by file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs to compare with, in processes of this machine: before the cluster is there, as threads of gRPC, which
    Ray has here, may stop for good where a process is forked."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "personal.json").write_text(json.dumps(personal("processes", folder)))
    found = virtual(NoopTask(DIM, delta="seeded"), "processes", folder / "plain")
    (folder / "plain.json").write_text(json.dumps([[one.weights_crc32, *one.clients] for one in found.rounds]))
    return folder


@pytest.fixture(scope="module")
def cluster(here: Path) -> Iterator[RayCluster]:
    before = set(psutil.Process().children(recursive=True))
    made = RayCluster(LOCAL, cpus=2, model_bytes=4 * DIM)
    started = set(psutil.Process().children(recursive=True)) - before
    assert started
    listening = [
        one.laddr.ip for process in started for one in process.net_connections(kind="inet") if one.status == "LISTEN"
    ]
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    folder = Path(made.folder)
    yield made
    made.close()
    assert not folder.exists()
    _, alive = psutil.wait_procs(started, timeout=10.0)
    assert not alive


def test_actors_make_the_models_of_processes_and_one_that_is_killed_is_replaced(
    cluster: RayCluster, here: Path, tmp_path: Path
) -> None:
    """With residuals, which travel with each training, as the actors have no disk in common with the host."""
    (tmp_path / "dies").touch()

    class DiesOnce(NoopTask):
        def train(self, model: nn.Module, **arguments: Any) -> Any:
            if arguments["round_id"] == 2:
                with contextlib.suppress(FileNotFoundError):  # several train at the same time, and one of them dies
                    (tmp_path / "dies").unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().train(model, **arguments)

    on_ray = virtual(DiesOnce(DIM, delta="seeded"), "ray", tmp_path)
    assert on_ray.replaced == 1
    assert not (tmp_path / "dies").exists()
    assert [[one.weights_crc32, *one.clients] for one in on_ray.rounds] == json.loads((here / "plain.json").read_text())
    assert {path.name for path in (tmp_path / "ray").iterdir()} == {
        path.name for path in (here / "plain" / "processes").iterdir()
    }


def test_personal_layers_and_evaluation_come_to_the_same_bits_and_files(cluster: RayCluster, here: Path) -> None:
    on_ray = personal("ray", here)
    assert on_ray == json.loads((here / "personal.json").read_text())
    assert files(here / "ray") == files(here / "processes")
    assert {name.split("/")[0] for name in files(here / "ray")} == {f"client-{number}" for number in range(4)}


def test_what_leaves_a_client_with_local_privacy_is_in_its_folder_first_and_is_given_again(
    cluster: RayCluster, tmp_path: Path
) -> None:
    pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")
    welcome = Welcome(
        0,
        1,
        7,
        1,
        "fp32",
        "{}",
        2,
        0.5,
        options={"privacy.name": "local", "privacy.clip_norm": 1.0, "privacy.noise_multiplier": 1.0},
    )

    def released(client_id: int, round_id: int) -> torch.Tensor:
        (path,) = tmp_path.glob(f"client-{client_id}/released-*/round-{round_id:06d}.safetensors")
        return load_file(path)["released"]

    async def main() -> list[bytes]:
        pool = RayPool(NoopTask(50, delta="seeded"), PoolSettings(state_dir=tmp_path), size=1)
        try:
            await pool.open(0, 2)
            found = []
            async with asyncio.timeout(60):
                for round_id in (1, 1, 2):
                    command = TrainCmd(round_id, 0, 1, 0.1, 0)
                    work = pool.new_work(RoundInputs(welcome=welcome, command=command, base=torch.zeros(50)))
                    async with pool.borrow(work) as process:
                        update = await process.train(work, Identity(1, 1), round_id)
                    assert update is not None
                    assert released(1, round_id).numpy().tobytes() in bytes(update.payload)
                    found.append(bytes(update.payload))
                (tmp_path / "client-0").write_text("no folder")
                async with pool.borrow(work) as process:
                    with pytest.raises(ClientFailed, match="client-0"):
                        await process.train(work, Identity(0, 1), 4)
            return found
        finally:
            await pool.close()

    first, again, other = asyncio.run(main())
    assert first == again != other


def test_an_actor_hears_that_its_work_is_no_longer_wanted_and_is_killed_and_replaced_if_it_does_not_stop(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    os.mkfifo(began)

    class StopsOrHangs(NoopTask):
        def train(self, model: nn.Module, **arguments: Any) -> Any:
            if (arguments["round_id"], arguments["client_id"]) != (2, 1):  # which is not wanted before it begins
                began.write_text("now")
            while arguments["client_id"] == 0 or not arguments["should_stop"]():
                time.sleep(0.01)
            raise TrainingStopped(0)

    async def main() -> None:
        pool = RayPool(StopsOrHangs(DIM), PoolSettings(state_dir=tmp_path), size=1)

        def new_work(round_id: int) -> RoundWork:
            welcome, command = Welcome(0, 1, 7, 1, "fp32", "{}", 2, 0.5), TrainCmd(round_id, 0, 1, 0.1, 0)
            return pool.new_work(RoundInputs(welcome=welcome, command=command, base=torch.zeros(DIM)))

        async def train(work: RoundWork, client_id: int) -> EncodedUpdate | None:
            async with pool.borrow(work) as process:
                return await process.train(work, Identity(client_id, 1), 1)

        try:
            await pool.open(0, 2)
            async with asyncio.timeout(30):
                work = new_work(1)
                training = asyncio.create_task(train(work, 1))
                assert await asyncio.to_thread(began.read_text) == "now"
                assert not training.done()
                pool.stop(work)
                assert await training is None
            assert pool.replaced == 0
            monkeypatch.setattr(pool_module, "STUCK_AFTER_S", 0.1)
            async with asyncio.timeout(110):  # an actor that is started in its place loads torch
                work = new_work(2)
                training = asyncio.create_task(train(work, 0))
                assert await asyncio.to_thread(began.read_text) == "now"
                pool.stop(work)
                with pytest.raises(ProcessDied):
                    await training
                assert await train(work, 1) is None, "the new one has heard it, too"
            assert pool.replaced == 1
        finally:
            await pool.close()

    asyncio.run(main())


def test_a_task_that_cannot_be_sent_is_refused_before_anything_starts(cluster: RayCluster, tmp_path: Path) -> None:
    class HasAFile(NoopTask):
        def __init__(self) -> None:
            super().__init__(3)
            self.file = (tmp_path / "log").open("w")

    task = HasAFile()
    with task.file, pytest.raises(ConfigError, match="HasAFile cannot be sent"):
        gradbus.simulate(task, 2, options=gradbus.SimulationOptions(pool="ray"))


def test_more_processes_than_the_cluster_has_room_for_are_refused(cluster: RayCluster) -> None:
    with pytest.raises(ConfigError, match="has room for 2"):
        gradbus.simulate(NoopTask(3), 2, options=gradbus.SimulationOptions(pool="ray", processes=3))
    with pytest.raises(ConfigError, match="1 CPU and 1 GPU each, the cluster has room for 0"):
        gradbus.simulate(NoopTask(3), 2, options=gradbus.SimulationOptions(pool="ray", gpus=1.0))


def test_a_process_that_is_connected_to_ray_is_not_forked(cluster: RayCluster) -> None:
    with pytest.raises(ConfigError, match=r"ray\.shutdown\(\) first, or set pool=ray"):
        gradbus.simulate(NoopTask(3), 2, options=gradbus.SimulationOptions(processes=1))
