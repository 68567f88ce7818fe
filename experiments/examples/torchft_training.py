"""Replica groups of torchft over the bus: one is killed, the other goes on, and the killed one comes back.

``.venv-integrations/bin/python -m gradbus.experiments.examples.torchft_training`` starts torchft's lighthouse and two
replica groups of one process each. With ``--no-kill --backend gloo --steps 200`` it is a measure of what torchft's
commit takes, without gradbus. A replica prints a line for each step that it has committed, and one at its end: a digest
of its weights, and milliseconds that ``should_commit`` and the quorum before it have taken, as medians.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from gradbus.torch.torchft import ProcessGroupDds

LIMIT = timedelta(seconds=15)
REPLICAS = 2
ALONE_STEPS = 5  # that the first replica commits before the second, which was killed, is started again
ALONE_S = 0.02  # a step of one that is alone takes so long more, and leaves the cores to those that start
ENDS_S = 90.0

# Replicas are forked from a process that has loaded what each of them needs: torch takes seconds. torch._dynamo is
# loaded by the first optimizer of a process.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["gradbus.torch.torchft", "torch._dynamo"])


def replica(name: str, lighthouse: str, backend: str, steps: int, lines: Connection) -> None:
    """A replica group of one process: train until so many steps in a row are committed with all others."""
    os.dup2(2, 1)  # torchft has lines of its own
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    plain = torch.optim.SGD(network.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        network.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": network.state_dict(), "optimizer": plain.state_dict()}

    manager = Manager(
        pg=(ProcessGroupDds if backend == "dds" else ProcessGroupGloo)(timeout=LIMIT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        hostname="127.0.0.1",
    )
    model, optimizer = DistributedDataParallel(manager, network), Optimizer(manager, plain)
    commits_s: list[float] = []
    quorums_s: list[float] = []
    decide = manager.should_commit

    def timed(*arguments: Any, **named: Any) -> bool:
        began_s = time.perf_counter()
        has_committed: bool = decide(*arguments, **named)
        commits_s.append(time.perf_counter() - began_s)
        return has_committed

    manager.should_commit = timed
    inputs = torch.randn(64, 16)
    together = 0
    while together < steps:
        before = manager.current_step()
        began_s = time.perf_counter()
        optimizer.zero_grad()  # asks for the quorum
        manager.wait_quorum()
        quorums_s.append(time.perf_counter() - began_s)
        batch = inputs[torch.randint(64, (8,))]
        torch.autograd.backward(nn.functional.mse_loss(model(batch), batch.square().mean(1, keepdim=True)))
        optimizer.step()
        if manager.current_step() > before:
            lines.send(
                {
                    "replica": name,
                    "step": manager.current_step(),
                    "participants": manager.num_participants(),
                }
            )
        together = together + 1 if manager.num_participants() == REPLICAS else 0
        if not together:
            time.sleep(ALONE_S)
    weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    lines.send(
        {
            "replica": name,
            "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            "commit_ms": 1e3 * statistics.median(commits_s),
            "quorum_ms": 1e3 * statistics.median(quorums_s),
        }
    )
    manager.shutdown(wait=False)


class ReplicaProcesses:
    """The processes of the replica groups, and their lines, as they come."""

    def __init__(self, lighthouse: str, backend: str, steps: int) -> None:
        self._options = (lighthouse, backend, steps)
        self._pipes: list[Connection] = []
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}

    def start(self, name: str) -> None:
        reader, writer = context.Pipe(duplex=False)
        process = self.processes[name] = context.Process(target=replica, args=(name, *self._options, writer))
        process.start()
        writer.close()
        self._pipes.append(reader)

    def next_line(self) -> dict[str, Any]:
        """Raises TimeoutError: no process has said anything for so long."""
        while self._pipes and (ready := wait(self._pipes, ENDS_S)):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    return pipe.recv()  # type: ignore[no-any-return]
                except EOFError:  # the process has ended
                    self._pipes.remove(pipe)
        raise TimeoutError(f"no replica has committed a step for {ENDS_S:g} s, or all have failed; see above")


def run(backend: str, steps: int, *, kills: bool) -> None:
    """Start them all, kill one, start it again, and print what they print."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000, quorum_tick_ms=50
    )
    port = lighthouse.address().rpartition(":")[2]  # the rest is the host's name, which need not be known anywhere
    replicas = ReplicaProcesses(f"http://127.0.0.1:{port}", backend, steps)
    names = [f"replica_{number}" for number in range(REPLICAS)]
    try:
        for name in names:
            replicas.start(name)
        alone = -1  # steps that the other one has committed alone
        ended = 0
        while ended < REPLICAS:
            line = replicas.next_line()
            print(json.dumps(line), flush=True)
            ended += "weights" in line
            if kills and alone < 0 and line["replica"] == names[1] and line.get("participants") == REPLICAS:
                replicas.processes[names[1]].kill()
                replicas.processes[names[1]].join()
                alone = 0
            elif 0 <= alone < ALONE_STEPS and line.get("participants") == 1:
                alone += 1
                if alone == ALONE_STEPS:
                    replicas.start(names[1])
    finally:
        for process in replicas.processes.values():
            process.kill()
            process.join()
        lighthouse.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("dds", "gloo"), default="dds")
    parser.add_argument("--steps", type=int, default=20, help="in a row, with all replicas (%(default)s)")
    parser.add_argument("--no-kill", action="store_true")
    given = parser.parse_args(arguments)
    run(given.backend, given.steps, kills=not given.no_kill)


if __name__ == "__main__":
    main()
