"""An elastic training script under both launchers: ranks are killed and join, and the bits are those of a replay."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_support import require_torch_backend
from forked_commands import Forked, torchrun
from patience import until
from ports import kept_ports
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(300)]

MODULE = "gradbus.experiments.examples.elastic_script"
ENDS_S = 100.0
LONG = ["--until-groups", "3", "--steps", "20"]


def script() -> Any:
    require_torch_backend()
    return importlib.import_module(MODULE)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"\{\"event\".*?\}", text)]


def replayed(steps: Iterable[Mapping[str, Any]]) -> str:
    """The weights that one process gets from the steps that were made: the mean over the ranks of each, as
    DistributedDataParallel makes it, added in rank order."""
    example = script()
    torch.set_num_threads(1)  # as the ranks have it: the last bits depend on it
    # A step that was lost is made again, later, and by other ranks.
    newest = {one["step"]: one for one in sorted(steps, key=lambda one: float(one["at_s"]))}
    assert list(range(len(newest))) == sorted(newest)
    model, data = example.make_model(), example.make_data()
    optimizer = example.make_optimizer(model)
    sampler = example.elastic.ElasticSampler(data)
    for number in sorted(newest):
        step = newest[number]
        assert step["weights"] == example.digest(list(model.parameters())), step
        sampler.load_state_dict({"epoch": step["epoch"], "processed": step["processed"]})
        means = [torch.zeros_like(one) for one in model.parameters()]
        for rank in range(step["world"]):
            indices = indices_of(sampler, rank, step["world"])[: example.BATCH_SIZE]
            points, sides = data[indices]
            model.zero_grad()
            nn.functional.cross_entropy(model(points), sides).backward()
            for mean, one in zip(means, model.parameters(), strict=True):
                part = one.grad * (1.0 / step["world"])
                mean.copy_(part) if rank == 0 else mean.add_(part)
        for mean, one in zip(means, model.parameters(), strict=True):
            one.grad = mean
        optimizer.step()
    return example.digest(list(model.parameters()))


def indices_of(sampler: Any, rank: int, world: int) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradbus.torch.elastic.sampler._place", lambda: (rank, world))
        return list(sampler)


def test_ranks_go_on_when_one_is_killed_and_it_joins_and_all_have_the_bits_of_a_replay(
    tmp_path: Path, domain: int
) -> None:
    script()
    environment = {**os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "OMP_NUM_THREADS": "1"}
    arguments = ["run", "--elastic", "1:3", "--", "-m", MODULE, "--kill", "2:12", *LONG]
    launcher = Forked(arguments, tmp_path, environment)
    try:
        out, err = launcher.communicate(ENDS_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, err
    told = lines_of(out)
    steps, ends = ([one for one in told if one["event"] == event] for event in ("step", "end"))
    assert [one["worlds"] for one in ends] == [[3, 2, 3]] * 3, out[-2000:]
    assert {one["world"] for one in steps if one["step"] >= ends[0]["step"] - 8} == {3}
    assert {one["step"] for one in ends} == {max(one["step"] for one in steps) + 1}
    assert {one["weights"] for one in ends} == {replayed(steps)}
    assert "starting it again" in err


def agent(node: int, port: int, domain: int, folder: Path, *more: str) -> Forked:
    """torchrun's agent of one machine of one to two, with one rank."""
    # An agent that is lost is missed after three intervals, and the other then waits for the last call alone.
    rendezvous = "last_call_timeout=5,keep_alive_interval=2"
    arguments = [
        "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=elastic", f"--rdzv-conf={rendezvous},is_host={'true' if node == 0 else 'false'}",
        "--max-restarts=3", "--monitor-interval=0.2", "-m", MODULE, "--checkpoint", str(folder / "state.pt"), *more,
    ]  # fmt: skip
    environment = {
        **os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": "",
        # Without it, the agents of torch 2.15 wait for each other for ever when a machine comes, whatever the script.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    return torchrun(arguments, folder, environment)


def worlds_in(checkpoint: Path) -> list[int]:
    """The numbers of ranks that have trained so far, as the checkpoint has them."""
    if not checkpoint.exists():
        return []
    return list(torch.load(checkpoint, weights_only=True)["values"]["worlds"])


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_torchruns_ranks_go_on_from_the_checkpoint_when_a_machine_comes_and_when_it_is_lost(
    tmp_path: Path, domain: int
) -> None:
    script()
    checkpoint = tmp_path / "state.pt"
    agents: list[Forked] = []
    with kept_ports(1) as (port,):
        try:
            agents.append(agent(0, port, domain, tmp_path, *LONG))
            until(lambda: worlds_in(checkpoint) == [1], 60.0)
            agents.append(agent(1, port, domain, tmp_path, *LONG))
            until(lambda: worlds_in(checkpoint) == [1, 2], 60.0)
            for pid in [agents[1].pid, *children_of(agents[1].pid)]:  # the machine is lost
                os.kill(pid, signal.SIGKILL)
            out, err = agents[0].communicate(ENDS_S)
        finally:
            for one in agents:
                one.kill()
                one.stdout.close()
                one.stderr.close()
    assert agents[0].returncode == 0, err
    told = lines_of(out)
    (end,) = [one for one in told if one["event"] == "end"]
    assert end["worlds"] == [1, 2, 1], err
    assert end["weights"] == replayed(one for one in told if one["event"] == "step")
