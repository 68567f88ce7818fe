"""Virtual clients as Ray actors, on a cluster of two cores, which all tests share, as its start takes seconds."""

from __future__ import annotations

import asyncio
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
from torch import nn

import gradbus
from gradbus.actors.federated.local_training import RoundInputs
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.ray_pool import LOCAL, RayCluster, RayPool
from gradbus.models import NoopTask, TrainingStopped
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import Welcome
from gradbus.runtime.wire.messages import Identity, TrainCmd

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gradbus[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DIM = 20_000  # updates lie in shared memory


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
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


def virtual(task: Any, pool: Any, tmp_path: Path) -> gradbus.SimulationResult:
    config = gradbus.FederatedConfig(
        rounds=3, eval_every=0, clients={"dead_after_s": 30.0}, codec="sq8", round={"timeout_s": 90.0},
        selection={"name": "uniform", "fraction": 0.5},
    )  # fmt: skip
    options = gradbus.SimulationOptions(domain=new_domain(), processes=2, pool=pool, state_dir=tmp_path / pool)
    return gradbus.simulate(task, 6, config=config, options=options)


def test_actors_make_the_models_of_processes_and_one_that_is_killed_is_replaced(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """With residuals, which travel with each training, as the actors have no disk in common with the host."""
    (tmp_path / "dies").touch()

    class DiesOnce(NoopTask):
        def train(self, model: nn.Module, **arguments: Any) -> Any:
            if arguments["round_id"] == 2 and (tmp_path / "dies").exists():
                (tmp_path / "dies").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train(model, **arguments)

    on_ray = virtual(DiesOnce(DIM, delta="seeded"), "ray", tmp_path)
    here = virtual(NoopTask(DIM, delta="seeded"), "processes", tmp_path)
    assert on_ray.replaced == 1
    assert not (tmp_path / "dies").exists()
    assert [report.clients for report in on_ray.rounds] == [report.clients for report in here.rounds]
    assert [report.weights_crc32 for report in on_ray.rounds] == [report.weights_crc32 for report in here.rounds]
    assert {path.name for path in (tmp_path / "ray").iterdir()} == {
        path.name for path in (tmp_path / "processes").iterdir()
    }


def test_an_actor_that_trains_hears_that_its_work_is_no_longer_wanted(cluster: RayCluster, tmp_path: Path) -> None:
    began = tmp_path / "began"
    os.mkfifo(began)

    class TrainsUntilStopped(NoopTask):
        def train(self, model: nn.Module, **arguments: Any) -> Any:
            began.write_text("now")
            while not arguments["should_stop"]():
                time.sleep(0.01)
            raise TrainingStopped(0)

    async def main() -> None:
        pool = RayPool(TrainsUntilStopped(DIM), PoolSettings(state_dir=tmp_path), size=1)
        try:
            await pool.open(0, 2)
            inputs = RoundInputs(
                welcome=Welcome(0, 1, 7, 1, "fp32", 1.0, 1, 2, 2, 0.5), command=TrainCmd(1, 0, 1, 0.1, 0),
                base=torch.zeros(DIM),
            )  # fmt: skip
            work = pool.new_work(inputs)
            async with asyncio.timeout(30), pool.borrow() as process:
                training = asyncio.create_task(process.train(work, Identity(0, 1), 1))
                assert await asyncio.to_thread(began.read_text) == "now"
                assert not training.done()
                pool.stop(work)
                assert await training is None
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
