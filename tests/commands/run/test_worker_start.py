"""A rank of its own, in this process: what a start leaves in the run directory, and what of it can go wrong."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from report_runs import parallel_run

from gradbus.actors import EpochReport
from gradbus.commands.buses import lease_of
from gradbus.commands.configured_task import ConfiguredShardTask
from gradbus.commands.files import TaskSettings, WorkerFile
from gradbus.commands.lifecycle import Interrupted
from gradbus.commands.rank_environment import RankPlace
from gradbus.commands.run import commands, elastic
from gradbus.commands.run.data_parallel import Output
from gradbus.commands.rundir.directory import WorkerDirectory, write_json
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import ConfigError

TASK = """
import torch
from torch import nn

class Task:
    def __init__(self, width=1, fault="none"):
        if fault == "factory":
            raise ValueError("the user's own mistake")
        self.width, self.fault = width, fault

    def build_model(self):
        return nn.Linear(1, self.width)

    def prepare_shard(self, rank, world):
        if self.fault == "shard":
            raise ValueError("the user's own mistake")

    def num_batches(self, *, rank, world, epoch):
        return 2

    def batches(self, *, rank, world, epoch, seed):
        return iter(torch.ones(2, 8, 1))

    def loss(self, model, batch):
        return model(batch).square().mean()

    def evaluate_shard(self, model, *, rank, world):
        return None

def data():
    raise ValueError("the user's own mistake")
"""


@pytest.fixture
def run(invoke, domain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the only rank of a job in ``run``; options of its task by name."""
    (tmp_path / "starts.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "starts.json").write_text(json.dumps({"bus": {"domain": domain}, "task": {"task": "starts:Task"}}))

    def run(*arguments: str, **options: object):
        own = ("--set", f"task.task_options={json.dumps(options)}")
        return invoke("worker", "starts.json", "--rank", 0, "--world", 1, "--run-dir", "run", *own, *arguments)

    return run


def left(path: Path) -> dict[str, bytes]:
    """What an earlier run has left, but the mark of the newest start."""
    names = ("config.json", "epochs.jsonl", "summary.json", "trace.json", "trace-rank-0.json")
    return {name: (path / name).read_bytes() for name in names}


def test_a_start_that_is_refused_leaves_the_run_that_is_there_as_it_was(run, tmp_path: Path) -> None:
    first = run()
    assert first.code == 0, first.err
    before = left(tmp_path / "run")
    assert json.loads(before["summary.json"])["outcome"] == "done"
    refused = run("--set", "parallel.epochs=2", width=2)  # with as many epochs it is finished, whatever else is set
    assert refused.code == 6, refused.err
    assert left(tmp_path / "run") == before
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_trace_or_a_picture_that_cannot_be_written_ends_no_run(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commands, "draw_epochs", full)
    (tmp_path / "run" / "trace.json").mkdir(parents=True)
    ended = run()
    assert ended.code == 0, ended.err
    assert "done: 1 epochs, 2 steps" in ended.out
    assert ended.err.count("trace not written") == 1
    assert ended.err.count("picture not drawn") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "done"


@pytest.mark.parametrize("fault", ["factory", "shard"])
def test_a_value_error_of_ones_own_task_keeps_its_traceback(run, fault: str) -> None:
    ended = run(fault=fault)
    assert ended.code == 13
    assert ended.err.startswith("Traceback")
    assert "gradbus worker: ValueError: " in ended.err.splitlines()[-1]
    assert "starts.py:" in ended.err.splitlines()[-1]


def test_a_value_error_of_ones_own_data_stays_what_it_is(run) -> None:
    task = ConfiguredShardTask(TaskSettings(data="starts:data"))
    with pytest.raises(ValueError, match="own mistake") as caught:
        task.load()
    assert not isinstance(caught.value, ConfigError)
    with pytest.raises(ConfigError, match="partition: no kind"):
        ConfiguredShardTask(TaskSettings(partition="nonsense"))


def test_what_is_not_a_number_is_null_for_other_programs(tmp_path: Path) -> None:
    WorkerDirectory(tmp_path, 0).add(EpochReport(epoch=0, step=1, loss=float("nan")))
    write_json(tmp_path / "summary.json", {"loss": float("inf"), "profiles": [{"mean": (1.0, float("nan"))}]})
    assert '"loss": null' in (tmp_path / "epochs.jsonl").read_text()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None, "profiles": [{"mean": [1.0, None]}]}


def test_a_finished_run_that_is_started_again_stays_as_it_is_and_goes_on_for_more_epochs(
    tmp_path: Path, domain
) -> None:
    run = tmp_path / "run"

    def files() -> dict[str, bytes]:
        own = {path for path in run.rglob("*") if path.is_file() and path.name != ".rank-0"}  # a mark of each start
        return {str(path): path.read_bytes() for path in sorted(own)}

    parallel_run(run, domain=domain, epochs=1)
    before = files()
    parallel_run(run, domain=domain, epochs=1)
    assert files() == before
    parallel_run(run, domain=domain, epochs=2)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], summary["epochs"]) == ("done", 2)
    assert len((run / "epochs.jsonl").read_text().splitlines()) == 2


# -- a process of an elastic run ---------------------------------------------------------------------------------------


@dataclass
class Standing:
    """What is asked of a worker, and its generations, of which it waits for the next one or trains in the newest."""

    number: int
    waits_for: str
    has_left: bool = False
    step: int = 0

    @property
    def generations(self) -> Standing:
        return self

    def leave(self) -> None:
        self.has_left = True


@pytest.mark.parametrize(
    ("number", "waits_for", "leaves"),
    [
        (0, "a group that it can join", True),
        (3, "a majority: it reaches 1 of the 3 members of generation 3", True),
        (3, "", False),
    ],
    ids=["joins", "was cut off", "trains"],
)
def test_a_process_that_waits_leaves_when_the_run_in_its_directory_is_finished(
    number: int, waits_for: str, leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        looks = asyncio.create_task(
            elastic.leave_when_finished(worker, WorkerDirectory(tmp_path, 1), DataParallelConfig())  # type: ignore[arg-type]
        )
        for _ in range(20):
            await asyncio.sleep(0)
        assert worker.has_left == leaves
        assert looks.done() == leaves
        looks.cancel()

    worker = Standing(number, waits_for)
    monkeypatch.setattr(elastic, "LOOK_S", 0.0)
    monkeypatch.setattr(WorkerDirectory, "is_finished", lambda *_: True)
    asyncio.run(main())


def test_the_second_sigterm_stops_a_process_and_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with elastic.leaves_at_sigterm(worker):  # type: ignore[arg-type]
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
            try:
                await asyncio.sleep(30.0)
            finally:
                assert await asyncio.to_thread(stopping.wait, 10.0)  # as the thread that evaluates does

    stopping, worker = threading.Event(), Standing(3, "")
    monkeypatch.setattr(elastic, "stopping", stopping)
    with pytest.raises(Interrupted) as caught:
        asyncio.run(asyncio.wait_for(main(), 20.0))
    assert caught.value.signum == signal.SIGTERM


ELASTIC = ("--set", "parallel.elastic.min_world=1")


def test_a_process_that_the_end_has_passed_by_leaves_the_summary_of_those_who_made_it(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(*ELASTIC)
    assert first.code == 0, first.err
    before = (tmp_path / "run" / "summary.json").read_bytes()
    add, asked = WorkerDirectory.add, False

    def leave_after(directory: WorkerDirectory, report: EpochReport) -> None:
        nonlocal asked
        add(directory, report)
        if not asked:
            os.kill(os.getpid(), signal.SIGTERM)
        asked = True

    monkeypatch.setattr(WorkerDirectory, "add", leave_after)
    # The others come to the end once this process has begun, and it looks at its own end alone.
    monkeypatch.setattr(WorkerDirectory, "is_finished", lambda *_: asked)
    monkeypatch.setattr(elastic, "LOOK_S", 100.0)
    second = run(*ELASTIC, "--set", "parallel.epochs=1000")
    assert second.code == 0, second.err
    assert asked
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


@pytest.mark.parametrize("world", ["fixed", "elastic"])
def test_epochs_and_a_summary_that_a_full_disk_does_not_take_end_no_run(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: str
) -> None:
    options = ELASTIC if world == "elastic" else ()
    write, fulls = WorkerDirectory.write_reports, [True, False]

    def full_at_first(directory: WorkerDirectory, lines: Iterable[str], *, anew: bool) -> None:
        if fulls and fulls.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(directory, lines, anew=anew)

    monkeypatch.setattr(WorkerDirectory, "write_reports", full_at_first)
    ended = run(*options, "--set", "parallel.epochs=2")
    assert ended.code == 0, ended.err
    assert ended.err.count('"what": "report"') == 1
    assert "No space left on device" in ended.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "done"
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "run" / "epochs.jsonl").read_text().splitlines()]
    assert epochs == [0, 1]  # what was not written comes with the next one

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WorkerDirectory, "write_summary", full)
    ended = run(*options, "--set", "parallel.epochs=3")
    assert ended.code == 0, ended.err
    assert ended.err.count('"what": "summary"') == 1


def test_an_elastic_run_leaves_its_profile_and_the_settings_of_its_newest_start(run, tmp_path: Path) -> None:
    for epochs in (1, 2):
        ended = run(*ELASTIC, "--set", f"parallel.epochs={epochs}")
        assert ended.code == 0, ended.err
        assert json.loads((tmp_path / "run" / "config.json").read_text())["parallel"]["epochs"] == epochs
    profile = (tmp_path / "run" / "profile-rank-0.jsonl").read_text().splitlines()
    assert [line["last_step"] for line in map(json.loads, profile) if line["kind"] == "window"] == [1, 3]
    spans = json.loads((tmp_path / "run" / "trace-rank-0.json").read_text())["traceEvents"]
    assert {span["name"] for span in spans if span["ph"] == "X"} >= {"step 2", "step 3"}


@pytest.mark.parametrize(("more", "lease_s"), [({}, 4.0), ({"lease_s": 9.0}, 9.0)])
@pytest.mark.usefixtures("network_by_document")
def test_a_rank_of_an_elastic_run_opens_its_bus_with_a_lease_of_4_s_unless_another_is_set(
    more: dict[str, float], lease_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened(Exception):
        """With these settings."""

    def open_bus(settings: BusSettings, **_: object) -> None:
        raise Opened(lease_of(settings))

    monkeypatch.setattr(elastic, "open_bus", open_bus)
    file = WorkerFile.model_validate(
        {
            "bus": {"network": "network", **more},
            "run_dir": tmp_path / "run",
            "task": {"model": "gradbus.models:mnist_mlp", "data": "glyphs", "data_options": {"train": 16, "test": 8}},
            "parallel": {"elastic": {"min_world": 1}},
        }
    )
    with pytest.raises(Opened, match=str(lease_s)):
        asyncio.run(elastic.run_elastic_worker(file, RankPlace(0, 1), Output()))
