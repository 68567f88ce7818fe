"""Clients of a federated run as tasks of Ray: Ray places them and starts them again, the bus carries their models.

    python -m gradbus.experiments.examples.ray_clients --ray local
    python -m gradbus.experiments.examples.ray_clients --ray auto --connect tls/relay.example.org:443 --tls-ca ca.pem

Each task is an ordinary client, with a name, under which it comes back to its run. docs/clusters.md says what each
machine of a cluster needs.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import gradbus
from gradbus import models
from gradbus.actors.virtual.ray_pool import RayCluster

RETRIES = 3  # of one task whose process or machine is lost


def take_part(job: str, name: str, connection: dict[str, Any]) -> None:
    """Be one client until the run ends, in a process of Ray's."""

    async def run() -> None:
        async with gradbus.connect(job, **connection) as bus:
            await gradbus.Client(bus, example_task(), name=name).run()

    asyncio.run(run())


async def train(
    ray: Any,
    job: str,
    rules: gradbus.FederatedConfig,
    connection: dict[str, Any],
    on_round: Callable[[gradbus.RoundReport], None],
) -> None:
    """Run a controller here and its clients on the cluster, until all have ended.

    Args:
        ray: the module, connected. rules: of the run; clients.num is how many tasks there are.
        connection: how members reach each other, as for :func:`gradbus.connect`.

        on_round: called with each report.

    Raises:
        ExceptionGroup: a client has failed, or the controller has.
    """
    client = ray.remote(num_cpus=1, max_retries=RETRIES)(take_part)
    async with gradbus.connect(job, **connection) as bus, asyncio.TaskGroup() as group:
        for number in range(rules.clients.num or 1):
            group.create_task(_until_ended(ray, client.remote(job, f"site-{number}", connection)))
        async for report in gradbus.Controller(bus, example_task(), rules).rounds():
            on_round(report)


async def _until_ended(ray: Any, task: Any) -> None:
    try:
        await task
    except asyncio.CancelledError:  # the controller has failed: its clients would wait for another one
        ray.cancel(task, force=True)
        raise


def example_task() -> models.ClassificationTask:
    """Return a small network on images that need no download."""
    return models.ClassificationTask(models.mnist_mlp, lambda: models.glyphs(train=1024, test=100), partition="iid")


def show(report: gradbus.RoundReport) -> None:
    """Print one line about a round."""
    print(f"round {report.round_id}: clients {list(report.clients)}, accuracy {report.accuracy}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The run as a program of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", default="local", help="address of a cluster; auto; local: one for this run")
    parser.add_argument("--job", default="on-ray")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connect", action="append", help="endpoint of a relay; without it, DDS on this machine")
    parser.add_argument("--tls-ca", help="authority of the relay, as a path that all machines have")
    given = parser.parse_args(arguments)
    connection = {"connect": given.connect, "tls_ca": given.tls_ca, "security": "psk"} if given.connect else {}
    rules = gradbus.FederatedConfig(rounds=given.rounds, clients={"num": given.clients, "min": given.clients})
    cluster = RayCluster(given.ray, cpus=given.clients, model_bytes=0)
    try:
        asyncio.run(train(cluster.ray, given.job, rules, connection, show))
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
