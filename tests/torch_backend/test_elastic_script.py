"""`gradbus run` for scripts: elastic ones, with what belongs to a process group, and others."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from doc_pages import python_blocks, section
from forked_commands import Forked

from gradbus.commands.launch.command import ElasticLaunch
from gradbus.commands.launch.script import is_script, plan_script
from gradbus.runtime.errors import ConfigError

ENDS_S = 150.0


@dataclass(frozen=True, slots=True)
class Ended:
    """What a launch left."""

    returncode: int | None
    stdout: str
    stderr: str


def launched(domain: int, folder: Path, *arguments: str) -> Ended:
    """Run ``gradbus run`` in a folder to its end. It and its ranks are forked, with torch loaded."""
    environment = {**os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "OMP_NUM_THREADS": "1"}
    launcher = Forked(["run", *arguments], folder, environment)
    try:
        out, err = launcher.communicate(ENDS_S)
    finally:
        launcher.kill()
    return Ended(launcher.returncode, out, err)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(200)
@pytest.mark.parametrize("dies_before", ["backward", "step"])
def test_algorithms_and_distributed_optimizers_go_on_in_the_next_generation(
    dies_before: str, tmp_path: Path, domain: int
) -> None:
    script = Path(__file__).with_name("elastic_ways.py")
    ended = launched(domain, tmp_path, "--elastic", "1:2", "--", str(script), dies_before)
    assert ended.returncode == 0, ended.stderr
    ends = [line.partition("END ")[2] for line in ended.stdout.splitlines() if "END " in line]
    assert len(ends) == 2, ended.stderr
    assert len({end.split()[0] for end in ends}) == 1
    assert {end.split(" ", 2)[1] for end in ends} == {"True"}
    assert sorted(end.split(" ", 2)[2] for end in ends) == ["[2, 1, 2] [1, 2]", "[2, 1, 2] []"]


LEAVES = """
import os, torch
from torch import nn
from gradbus.torch import elastic

model = nn.Linear(2, 1)
state = elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), worlds=[], step=0)


@elastic.run
def train(state):
    ddp = nn.parallel.DistributedDataParallel(model)
    state.worlds = [*state.worlds, torch.distributed.get_world_size()]
    while state.step < 10 or len(state.worlds) < 2:
        ddp(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.step += 1
        if state.step == 4 and os.environ["RANK"] == "1":
            elastic.leave()
        state.commit()


train(state)
print("END", state.worlds, state.commits == state.step)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_that_leaves_ends_well_and_the_other_goes_on_without_a_lost_step(tmp_path: Path, domain: int) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    ended = launched(domain, tmp_path, "--elastic", "1:2", "--", "leaves.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("END") == ended.stdout.count("[rank 0] END [2, 1] True") == 1, ended.stdout
    assert "this process has left" in ended.stderr
    assert "generation lost" not in ended.stderr
    assert "starting it again" not in ended.stderr


OTHER_MODEL = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from gradbus.torch import elastic

joins = "GRADBUS_ELASTIC__JOIN" in os.environ
model = nn.Linear(2, 3 if joins else 1)
state = elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), worlds=[], step=0)
refused = Path("refused")
if joins:
    Path("joiner").write_text(str(os.getpid()))


def is_over():  # once the refused process has exited: a failure after all others have ended is one of the run
    return refused.exists() and not Path("/proc", Path("joiner").read_text()).exists()


@elastic.run
def train(state):
    ddp = nn.parallel.DistributedDataParallel(model)
    state.worlds = [*state.worlds, torch.distributed.get_world_size()]
    while not is_over():
        ddp(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.step += 1
        if state.step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
        time.sleep(0.02 if state.step < 10 else 0.1)  # a process that starts meanwhile needs the cores


try:
    train(state)
except Exception as error:
    refused.write_text(f"{type(error).__name__}: {error}")
    raise
print("END", state.worlds)
"""


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(200)
def test_a_joining_rank_with_another_model_is_refused_and_the_others_go_on(tmp_path: Path, domain: int) -> None:
    (tmp_path / "other.py").write_text(OTHER_MODEL)
    ended = launched(domain, tmp_path, "--elastic", "1:2", "--", "other.py")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "refused").read_text().startswith("ConfigError: process 1 cannot join generation "), ended.stderr
    assert "its state differs from that of the members" in (tmp_path / "refused").read_text()
    assert ended.stdout.count("END") == ended.stdout.count("[rank 0] END [2, 1]") == 1, ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_script_of_the_page_trains(root: Path, tmp_path: Path, domain: int) -> None:
    page = (root / "docs" / "elastic.md").read_text(encoding="utf-8")
    (block,) = python_blocks(section(page, "A script of your own"))
    assert "range(10)" not in block
    (tmp_path / "train.py").write_text(block.replace("< 10:", "< 1:") + "print('commits', state.commits)\n")
    ended = launched(domain, tmp_path, "--elastic", "2:2", "--", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("commits 32") == 2  # of 16 samples on each of 2 ranks, of 1000


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_script_of_torch_distributed_finds_its_ranks_and_a_failure_is_that_of_the_launch(
    tmp_path: Path, domain: int
) -> None:
    (tmp_path / "sums.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('dds')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "import gradbus.torch.hooks\n"
        "print('total', total.item(), sys.argv[1:], 'torch._dynamo' in sys.modules)\n"
        "dist.destroy_process_group()\n"
        "sys.exit(4 if dist.is_initialized() else 0)\n"
    )
    (tmp_path / "fails.py").write_text("import sys\nsys.exit(3)\n")
    # Not forked, as the others are here: torch finds the backend by itself, in ranks that nobody has prepared.
    command = [sys.executable, "-m", "gradbus", "run", "-n", "2", "--", "sums.py", "--lr", "0.1"]
    environment = {**os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, timeout=ENDS_S, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    # No compiler, which takes longer to load than torch itself: these ranks compile nothing.
    assert ended.stdout.count("total 2.0 ['--lr', '0.1'] False") == 2
    assert launched(domain, tmp_path, "-n", "2", "--", "fails.py").returncode == 3


def test_ranks_of_a_script_get_what_torchrun_gives_and_those_started_again_join() -> None:
    assert is_script(["train.py"])
    assert is_script(["-m", "package.train"])
    assert is_script(["python", "train.py"])  # which is refused with a sentence
    assert not is_script(["job.json"])
    assert not is_script(["python.json"])
    plan = plan_script(["train.py", "--lr", "1"], ranks=2, grace_s=1.0, elastic=None, variables={})
    environment = plan.environment(1)
    assert {environment[name] for name in ("RANK", "LOCAL_RANK")} == {"1"}
    assert {environment[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {"2"}
    assert (environment["MASTER_ADDR"], environment["GROUP_RANK"]) == ("127.0.0.1", "0")
    assert "GRADBUS_ELASTIC__MIN_WORLD" not in environment
    assert plan.command(1, False) == [sys.executable, "train.py", "--lr", "1"]
    assert not plan.goes_on_without({1: -9})

    bounds = ElasticLaunch.parse("1:3", restarts=2)
    plan = plan_script(["-m", "train"], ranks=None, grace_s=1.0, elastic=bounds, variables={"GRADBUS_BUS__JOB": "mine"})
    assert (plan.world, plan.restarts) == (3, 2)
    environment = plan.environment(2)
    assert environment["GRADBUS_ELASTIC__MIN_WORLD"] == "1"
    assert environment["GRADBUS_ELASTIC__JOIN"] is None
    assert "GRADBUS_BUS__JOB" not in environment
    plan.command(2, True)
    assert plan.environment(2)["GRADBUS_ELASTIC__JOIN"] == "true"
    assert plan.environment(1)["GRADBUS_ELASTIC__JOIN"] is None
    assert plan.goes_on_without({1: -9, 2: 1})
    assert not plan.goes_on_without({0: 1, 1: -9, 2: 1})


@pytest.mark.parametrize(
    ("arguments", "ranks", "elastic", "text"),
    [
        (["train.py"], None, None, "use -n N, or --elastic"),
        (["-m"], 2, None, "the name of a module is missing"),
        (["train.py"], 4, "1:3", "-n must be 1 to 3, got 4"),
        (
            ["/usr/bin/python3.11", "train.py", "--lr", "1"],
            2,
            None,
            "name the script only, as in: .* -- train.py --lr 1",
        ),
    ],
)
def test_a_script_that_cannot_be_launched_is_refused(
    arguments: list[str], ranks: int | None, elastic: str | None, text: str
) -> None:
    bounds = None if elastic is None else ElasticLaunch.parse(elastic, restarts=1)
    with pytest.raises(ConfigError, match=text):
        plan_script(arguments, ranks=ranks, grace_s=1.0, elastic=bounds, variables={})
