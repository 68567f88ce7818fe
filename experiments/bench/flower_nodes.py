"""Many nodes of a Flower app in one process, each with a bus of its own, and so a session of its own on a relay.

    python -P -m gradbus.experiments.bench.flower_nodes APP_DIR --config FILE --first 0 --count 25 --of 200

A user's node is a process, as ``gradbus flower node`` starts it; two hundred of them on one machine would measure its
start of Python. At its end this one prints a line of JSON: how many messages its nodes have answered, and whether torch
was imported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from gradbus.actors.flower.apps import load_client_app
from gradbus.actors.flower.node import NodeSummary
from gradbus.actors.flower.protocol import NodePlace
from gradbus.commands.run.flower import FlowerFile, open_app, read_flower_file, run_node
from gradbus.runtime import logs
from gradbus.runtime.tasks import TaskGroup

START_S = 0.25  # from one node to the next: hundreds of TLS handshakes at once would each take longer than they may


async def run_nodes(file: FlowerFile, folder: Path, partitions: range, of: int) -> int:
    """Run a node for each partition until the run has ended. Return how many messages they have answered.

    Raises:
        As :meth:`.MessageNode.run`.
    """
    app = open_app(folder)
    client_app = load_client_app(app)

    async def run_later(partition: int) -> NodeSummary:
        await asyncio.sleep(START_S * (partition - partitions.start))
        return await run_node(file, app, client_app, NodePlace.of_partition(partition, of), {})

    async with TaskGroup() as group:
        nodes = [group.create_task(run_later(one), name=f"node-{one}") for one in partitions]
    return sum(node.result().answered for node in nodes)


def main() -> None:
    """Run the nodes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app_dir", type=Path)
    parser.add_argument("--config", type=Path, required=True, help="Settings: sections bus and flower.")
    parser.add_argument("--first", type=int, required=True, help="First partition.")
    parser.add_argument("--count", type=int, required=True, help="Number of nodes.")
    parser.add_argument("--of", type=int, required=True, help="Number of partitions of all processes.")
    asked = parser.parse_args()
    logs.configure(level="warning", style="json")
    partitions = range(asked.first, asked.first + asked.count)
    answered = asyncio.run(run_nodes(read_flower_file(asked.config, ()), asked.app_dir, partitions, asked.of))
    print(json.dumps({"answered": answered, "torch": "torch" in sys.modules}), flush=True)


if __name__ == "__main__":
    main()
