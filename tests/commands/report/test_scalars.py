"""Scalars for TensorBoard, read back from the event files of real runs."""

from __future__ import annotations

import asyncio
import builtins
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENT_S

from gradbus.actors import EpochReport, RoundReport
from gradbus.commands.files import ClientFile, ControllerFile, WorkerFile
from gradbus.commands.rank_environment import RankPlace
from gradbus.commands.report import scalars as scalars_module
from gradbus.commands.report.scalars import MAX_WAITING, Scalars, open_scalars
from gradbus.commands.report.trackers import TensorBoard
from gradbus.commands.run.data_parallel import Output, run_worker
from gradbus.commands.run.elastic import run_elastic_worker
from gradbus.commands.run.federated import run_client, run_controller
from gradbus.commands.rundir.directory import ControllerDirectory
from gradbus.runtime.errors import ConfigError

reader = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="tensorboard is not installed: gradbus[tensorboard]",
)

Curve = dict[int, float]


def curves(folder: Path) -> dict[str, Curve]:
    """What TensorBoard would show of a folder: value by step, by name."""
    events = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0})
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names}


def rounded(values: list[float]) -> list[float]:
    return pytest.approx(values, rel=1e-6)  # type: ignore[no-any-return]  # the files hold float32


@pytest.fixture(autouse=True)
def _a_disk_has_all_the_time_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalars_module, "CLOSE_S", 60.0)


@pytest.mark.slow
def test_a_federated_run_leaves_the_numbers_of_its_reports(domain, tmp_path: Path) -> None:
    """A controller as ``gradbus controller`` runs it, and a client, over DDS."""
    bus = {"job": "scalars", "domain": domain}
    data = {"data": "glyphs", "data_options": {"train": 100, "test": 40}, "model": "gradbus.models:mnist_mlp"}
    rules = {"rounds": 2, "clients": {"num": 1, "dead_after_s": PATIENT_S}}
    file = ControllerFile.model_validate({"bus": bus, "task": data, "federated": rules})
    client = ClientFile.model_validate({"bus": bus, "task": data})

    async def scenario(run: ControllerDirectory, scalars: Scalars) -> list[RoundReport]:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(run_client(client, 0))
            return await group.create_task(run_controller(file, run, scalars=scalars))

    with Scalars(TensorBoard(tmp_path / "scalars")) as scalars, ControllerDirectory(tmp_path / "run") as run:
        reports = asyncio.run(scenario(run, scalars))
    shown = curves(tmp_path / "scalars")
    for name, key in {
        "accuracy": "accuracy",
        "loss/train": "loss",
        "loss/eval": "eval_loss",
        "bytes/up": "bytes_up",
        "bytes/down": "bytes_down",
        "seconds/round": "seconds",
        "seconds/train": "train_s",
        "seconds/wire": "wire_s",
    }.items():
        assert list(shown[name]) == [1, 2]
        assert list(shown[name].values()) == rounded([getattr(report, key) for report in reports])


@pytest.mark.slow
@pytest.mark.parametrize("run_rank", [run_worker, run_elastic_worker])
def test_rank_0_leaves_epochs_and_windows_and_goes_on_after_a_resume(run_rank, domain, tmp_path: Path) -> None:
    elastic = {"min_world": int(run_rank is run_elastic_worker)}
    for epochs in (1, 2):
        file = WorkerFile.model_validate(
            {
                "bus": {"domain": domain},
                "run_dir": tmp_path / "run",
                "task": {
                    "model": "gradbus.models:mnist_mlp",
                    "data": "glyphs",
                    "batch_size": 64,
                    "data_options": {"train": 160, "test": 40},
                },
                "parallel": {"epochs": epochs, "profile": {"window_steps": 2}, "elastic": elastic},
            }
        )
        with Scalars(TensorBoard(tmp_path / "scalars")) as scalars:
            asyncio.run(run_rank(file, RankPlace(0, 1), Output(scalars=scalars)))
    epochs_seen = [json.loads(line) for line in (tmp_path / "run" / "epochs.jsonl").read_text().splitlines()]
    shown = curves(tmp_path / "scalars")
    assert list(shown["accuracy"]) == [report["step"] for report in epochs_seen] == [3, 6]
    assert list(shown["loss/train"].values()) == rounded([report["loss"] for report in epochs_seen])
    lines = map(json.loads, (tmp_path / "run" / "profile-rank-0.jsonl").read_text().splitlines())
    windows = [line for line in lines if line["kind"] == "window"]
    assert [window["last_step"] + 1 for window in windows] == list(shown["seconds/step"]) == [2, 3, 5, 6]
    for name, part, key in (
        ("seconds/wait", "mean", "wait_s"),
        ("seconds_max/step", "max", "step_s"),
        ("bytes/out", "mean", "bytes_out"),
    ):
        assert list(shown[name].values()) == pytest.approx([window[part][key] for window in windows], abs=1e-6)


def test_what_an_earlier_start_did_after_the_checkpoint_is_replaced(tmp_path: Path) -> None:
    def epoch(step: int, loss: float) -> EpochReport:
        return EpochReport(epoch=step, step=step, loss=loss)

    with Scalars(TensorBoard(tmp_path)) as first:
        first.begin(0)
        for step in (1, 2, 3):
            first.epoch(epoch(step, 1.0))
    with Scalars(TensorBoard(tmp_path)) as again:
        again.begin(1)
        again.epoch(epoch(2, 0.5))
    assert curves(tmp_path)["loss/train"] == {1: 1.0, 2: 0.5}


def test_the_first_report_brings_the_history_of_a_resumed_run(tmp_path: Path) -> None:
    history = [RoundReport(round_id=number, accuracy=number / 4, loss=float("nan")) for number in range(1, 5)]
    for done in (2, 4):
        with Scalars(TensorBoard(tmp_path / str(done))) as scalars:
            scalars.rounds(history[:done])
            scalars.rounds(history)
            scalars.rounds(history)
        shown = curves(tmp_path / str(done))
        assert shown["accuracy"] == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
        assert "loss/train" not in shown  # NaN
        assert "loss/eval" not in shown  # None


def test_rounds_of_another_run_that_a_site_begins_have_their_points(tmp_path: Path) -> None:
    with Scalars(TensorBoard(tmp_path)) as scalars:
        scalars.rounds([RoundReport(round_id=number, accuracy=0.25) for number in (1, 2)])
        scalars.rounds([RoundReport(round_id=1, accuracy=0.75)])
    assert curves(tmp_path)["accuracy"][1] == 0.75


def test_a_disk_that_hangs_costs_numbers_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, hangs = threading.Event(), threading.Event()

    class Disk:
        def __init__(self, *_: Any, **__: Any) -> None:
            hangs.set()
            goes_on.wait(30)

        def add_scalar(self, *_: Any, **__: Any) -> None: ...

        def close(self) -> None: ...

    board = TensorBoard(tmp_path)
    monkeypatch.setattr(board, "make_writer", Disk)
    scalars = Scalars(board)
    scalars.begin(0)
    assert hangs.wait(10)
    for step in range(MAX_WAITING + 7):
        scalars.epoch(EpochReport(epoch=step, step=step, loss=1.0))
    assert scalars.dropped == 7
    goes_on.set()
    with scalars:
        pass
    assert scalars.dropped == 7


def test_a_disk_that_is_full_costs_one_warning(tmp_path: Path, monkeypatch, capsys) -> None:
    class Disk:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

    board = TensorBoard(tmp_path)
    monkeypatch.setattr(board, "make_writer", Disk)
    with Scalars(board) as scalars:
        for step in range(5):
            scalars.epoch(EpochReport(epoch=step, step=step, loss=1.0))
    assert scalars.dropped == 5
    assert "".join(capsys.readouterr()).count("No space left on device") == 1


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def lacking(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "tensorboard" or name == "torch.utils.tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return whole(name, *arguments, **more)

    with open_scalars(ControllerFile(), tmp_path) as none:
        assert none is None
    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ConfigError, match=r"No module named 'tensorboard'.*-m pip install 'tensorboard>=2\.16\.2'"):
        TensorBoard(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--tensorboard: .*file/scalars cannot be written: Not a directory"):
        TensorBoard(tmp_path / "file" / "scalars")


def test_a_run_without_a_folder_does_not_load_tensorboard() -> None:
    """It is an extra: nobody pays for it who has not asked."""
    code = "import sys; from gradbus.commands.run import commands; print('tensorboard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "False\n"


def test_metrics_of_a_task_have_curves_of_their_own(tmp_path: Path) -> None:
    with Scalars(TensorBoard(tmp_path / "epochs")) as scalars:
        scalars.begin(0)
        scalars.epoch(EpochReport(epoch=0, step=3, loss=1.0, metrics={"rmse": 0.25}, train_metrics={"mae": 0.5}))
    shown = curves(tmp_path / "epochs")
    assert (shown["metrics/rmse"], shown["metrics/train/mae"]) == ({3: 0.25}, {3: 0.5})
    with Scalars(TensorBoard(tmp_path / "rounds")) as scalars:
        scalars.rounds([RoundReport(round_id=1, metrics={"rmse": 0.25})])
    assert curves(tmp_path / "rounds")["metrics/rmse"] == {1: 0.25}
