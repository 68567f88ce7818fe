"""Both paradigms and ``torch.distributed`` on a system without fast paths, as ``GRADBUS_PORTABLE=1`` makes any."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from forked_commands import Forked
from patience import PATIENT
from ports import kept_ports

import gradbus.__main__
from gradbus.runtime import fast_paths

pytestmark = pytest.mark.slow

FEW = 'task.data_options={"train": 1000, "test": 100}'
LEASE_S = 5.0  # nothing but its lease tells that a process has ended

# Sums whose bits depend on the order of the ranks, small and large, and two steps of DistributedDataParallel.
SCRIPT = """
import hashlib, os, pathlib, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if os.environ["RANK"] == sys.argv[2]:
    os.environ["GRADBUS_PORTABLE"] = "1"
dist.init_process_group("dds")
rank, hashed = dist.get_rank(), hashlib.sha256()
for count in (16, 1 << 20):
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(values)
    hashed.update(values.numpy().tobytes())
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    model(torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
    optimizer.step()
hashed.update(model.module.weight.detach().numpy().tobytes())
if sys.argv[3] == "dies":
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
from gradbus.runtime import fast_paths
shown = [path.name for path in fast_paths.fast_paths() if path.is_used]
pathlib.Path(sys.argv[1], f"{rank}.txt").write_text(hashed.hexdigest() + " " + " ".join(shown))
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _portable(monkeypatch: pytest.MonkeyPatch, domain: int) -> None:
    monkeypatch.setenv(fast_paths.SWITCH, "1")
    monkeypatch.setenv("GRADBUS_BUS__LEASE_S", str(LEASE_S))
    monkeypatch.setenv("GRADBUS_BUS__DOMAIN", str(domain))


def run_script(folder: Path, *, portable_rank: str = "", ends: str = "well", portable: bool = True) -> Any:
    """Two ranks of the script. Returns the exit code and the error output of each, and each rank's line."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with kept_ports(1) as (port,), contextlib.ExitStack() as started:
        place = {
            "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            fast_paths.SWITCH: "1" if portable else "",
        }  # fmt: skip
        ranks = [
            Forked(
                [str(folder), portable_rank, ends], folder, {**os.environ, **place, "RANK": str(rank)}, program=script
            )
            for rank in range(2)
        ]
        for process in ranks:
            started.callback(process.communicate)
            started.callback(process.kill)
        texts = [process.communicate(timeout=90.0)[1] for process in ranks]
    lines = [path.read_text().split() for path in sorted(folder.glob("?.txt"))]
    return [process.returncode for process in ranks], texts, lines


def command(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Run a command of ``gradbus``, which imports it anew. Returns its exit code, stdout and stderr."""
    process = Forked(arguments, folder, PATIENT | os.environ, program=Path(gradbus.__main__.__file__))
    try:
        out, err = process.communicate(timeout=90.0)
        return process.returncode, out, err
    finally:
        process.kill()


def test_a_federated_run_ends_well_although_a_client_is_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GRADBUS_FAIL_AT", "client-1/before_training:2")
    monkeypatch.setenv("GRADBUS_FEDERATED__CLIENTS__DEAD_AFTER_S", str(LEASE_S))
    options = ("--data", "glyphs", "--set", FEW, "--samples", "200", "--no-live", "--rounds", "3", "--run-dir", "run")
    code, out, err = command(tmp_path, "demo", *options)
    assert code == 0, err
    ends = {line.partition(":")[0]: line for line in out.splitlines() if line.startswith("round ")}
    assert "clients 2/2" in ends["round 1/3"]
    assert "clients 1/1" in ends["round 3/3"]


def test_data_parallel_ranks_train_to_the_end_with_equal_models(configs: Path, tmp_path: Path) -> None:
    settings = ("task.data=glyphs", FEW, "parallel.max_steps=12", "parallel.hash_every=4")
    code, out, err = command(
        tmp_path,
        "run",
        "-n",
        "2",
        "--",
        str(configs / "ddp.conf.json"),
        "--run-dir",
        "run",
        *(part for setting in settings for part in ("--set", setting)),
    )
    assert code == 0, out + err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("done", 12)


def test_torch_distributed_computes_equal_bits_where_no_rank_or_one_rank_has_fast_paths(tmp_path: Path) -> None:
    found = {}
    for name in ("without", "mixed"):
        is_mixed = name == "mixed"
        codes, texts, lines = run_script(tmp_path / name, portable_rank="1" if is_mixed else "", portable=not is_mixed)
        assert codes == [0, 0], texts
        found[name] = lines
    hashes = {line[0] for lines in found.values() for line in lines}
    assert len(hashes) == 1, found
    assert all(len(line) == 1 for line in found["without"])  # no fast path
    assert [len(line) > 1 for line in found["mixed"]] == [True, False]


def test_a_rank_that_is_killed_is_named_when_its_lease_has_ended(tmp_path: Path) -> None:
    codes, texts, lines = run_script(tmp_path / "dies", ends="dies")
    assert codes == [1, -signal.SIGKILL]
    assert not lines
    assert re.search(r"barrier failed: .*has lost rank 1", texts[0]), texts[0]  # a line of the log may follow it


def test_the_doctor_names_the_fast_paths_and_what_happens_without(invoke, domain: int) -> None:
    shown = invoke("doctor", "--domain", domain)
    assert shown.code == 0, shown.out
    (line,) = [line for line in shown.out.splitlines() if line.split()[:2] == ["fast", "paths"]]
    used = [path.name for path in fast_paths.fast_paths() if path.is_used]
    assert all(name in line for name in used)
