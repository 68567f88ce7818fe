"""Clients of a run as tasks of a Ray cluster, which is started for this test and listens on loopback."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import gradbus
from gradbus.actors.virtual.ray_pool import LOCAL, RayCluster
from gradbus.experiments.examples.ray_clients import train

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gradbus[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,  # most of a minute; test_ray_pool.py runs clients on Ray each time
    pytest.mark.timeout(480),
    # On a busy machine Ray does not wait until the processes of a cluster that is shut down have ended.
    pytest.mark.filterwarnings("ignore:subprocess [0-9]+ is still running:ResourceWarning"),
]


@pytest.fixture
def ray() -> Iterator[Any]:
    cluster = RayCluster(LOCAL, cpus=2, model_bytes=0)
    yield cluster.ray
    cluster.close()


def tasks() -> set[psutil.Process]:
    """Return the processes in which Ray runs clients."""
    return {one for one in psutil.Process().children(recursive=True) if runs_client(one)}


def runs_client(process: psutil.Process) -> bool:
    try:
        return "take_part" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended meanwhile; psutil says so of a zombie, too
        return False


def test_a_process_may_start_a_second_cluster_after_its_first() -> None:
    for _ in range(2):
        cluster = RayCluster(LOCAL, cpus=1, model_bytes=0)
        assert cluster.ray.is_initialized()
        cluster.close()
    gc.collect()  # so that Python's warning about their processes comes here, where it is ignored


def test_clients_train_as_tasks_of_ray_and_one_whose_process_dies_comes_back_by_its_name(ray: Any, domain: int) -> None:
    rules = gradbus.FederatedConfig(
        rounds=3,
        clients={"num": 2, "min": 2, "start_timeout_s": 240.0},
        training={"subset_size": 32},
        eval_every=0,
        round={"timeout_s": 60.0},
    )
    reports: list[gradbus.RoundReport] = []
    seen: list[set[psutil.Process]] = []

    def on_round(report: gradbus.RoundReport) -> None:
        reports.append(report)
        seen.append(tasks())
        if len(reports) == 1:
            next(iter(seen[0])).kill()

    asyncio.run(train(ray, f"ray-{domain}", rules, {"domain": domain}, on_round))
    assert [(one.round_id, sorted(one.clients)) for one in reports] == [(n, [0, 1]) for n in range(1, 4)]
    assert [len(one) for one in (seen[0], seen[-1])] == [2, 2]
    assert len(seen[0] & seen[-1]) == 1
