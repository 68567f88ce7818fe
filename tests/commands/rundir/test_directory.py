"""What a run writes into its directory, and what it keeps of an earlier start."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradbus.actors import EpochReport, RoundReport, WorkerSummary
from gradbus.actors.data_parallel.joint_checkpoints import JointCheckpoints
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.controller.best_model import BestModel
from gradbus.actors.federated.controller.report import ClientTimeline
from gradbus.actors.federated.controller.update_admission import Strike
from gradbus.commands.files import WorkerFile, load
from gradbus.commands.report.build import make_report
from gradbus.commands.rundir.directory import ControllerDirectory, WorkerDirectory, check_named, write_json
from gradbus.commands.rundir.export import export
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.federated import InitialCheckpointSettings
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.profiling.summary import ProfileSummary
from gradbus.runtime.testing.journal import History


def test_a_run_directory_is_written_anew_after_a_resume_and_then_appended_to(tmp_path: Path) -> None:
    reports = [RoundReport(round_id=i) for i in range(1, 5)]
    (tmp_path / "rounds.jsonl").write_text('{"round_id": 1}\n{"round_id": 2}\n{"round_id": 3, "cut off')
    with ControllerDirectory(tmp_path) as run:
        run.add(reports[:3])
        run.add(reports)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round_id"] for line in lines] == [1, 2, 3, 4]


def test_a_resume_keeps_the_timelines_of_rounds_that_stand(tmp_path: Path) -> None:
    """The controller that goes on does not know them: they are in no checkpoint."""
    timeline = (ClientTimeline(client_id=3, counted_s=1.5),)
    reports = [RoundReport(round_id=i, weights_crc32=10 + i, timeline=timeline) for i in (1, 2, 3)]
    with ControllerDirectory(tmp_path) as run:
        run.add(reports)
    again = [reports[0].without_timeline(), replace(reports[1], weights_crc32=99, timeline=())]
    with ControllerDirectory(tmp_path) as run:
        run.add(again)  # round 2 was done again, and round 3 is still to come
        run.add([*again, replace(reports[2], loss=math.nan)])
    entries = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [[client["counted_s"] for client in entry["timeline"]] for entry in entries] == [[1.5], [], [1.5]]
    assert entries[2]["loss"] is None


def test_a_resume_keeps_who_took_part_and_the_rounds_that_no_checkpoint_has_any_more(tmp_path: Path) -> None:
    marks = {"clipped": (3,)}
    strike = Strike(3, 2, "non-finite", "nan", 1)
    reports = [
        RoundReport(round_id=i, weights_crc32=10 + i, clients=(1, 3), expected=3, marks=marks, strikes=(strike,))
        for i in (1, 2, 3, 4)
    ]
    with ControllerDirectory(tmp_path) as run:
        run.add(reports)
    before = (tmp_path / "rounds.jsonl").read_text().splitlines()
    with ControllerDirectory(tmp_path) as run:  # the checkpoint has forgotten round 1, and round 3 was done again
        run.add([reports[1].without_clients(), replace(reports[2], weights_crc32=99).without_clients(), reports[3]])
    after = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [after[0], after[1], after[3]] == [before[0], before[1], before[3]]
    again = json.loads(after[2])
    assert (again["clients"], again["updates"], again["strikes"], again["marks"]) == ([], 2, [], {})


def test_the_first_round_of_another_run_that_a_site_begins_takes_the_place_of_the_former(tmp_path: Path) -> None:
    with ControllerDirectory(tmp_path) as run:
        for crc32 in (7, 8):
            run.add([RoundReport(round_id=1, weights_crc32=crc32)])
    (line,) = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert json.loads(line)["weights_crc32"] == 8


def test_a_rank_that_sees_the_directory_of_rank_0_shares_it(tmp_path: Path) -> None:
    first = WorkerDirectory(Path("runs/one"), 0)
    assert WorkerDirectory.meet(first.invitation(), Path("mine"), 1).path == tmp_path / "runs" / "one"


@pytest.mark.parametrize(("own", "path"), [(Path("mine"), "mine"), (None, "runs/one")])
def test_a_rank_on_another_machine_has_a_directory_of_its_own(own: Path | None, path: str, tmp_path: Path) -> None:
    """There may be one at that very path: left by another run, or by an earlier start of this one."""
    told = WorkerDirectory(tmp_path / "there" / "one", 0).invitation()
    WorkerDirectory(tmp_path / "there" / "one", 0)
    assert WorkerDirectory.meet(told, own, 1).path == Path(path)


def test_what_was_done_after_the_checkpoint_of_a_resume_is_taken_out_of_the_reports(tmp_path: Path) -> None:
    reports = [EpochReport(epoch=epoch, step=10 * epoch, loss=1.0) for epoch in range(4)]
    before = [*(json.dumps(report.to_json()) for report in reports[:3]), '{"epoch": 3, "cut off']
    (tmp_path / "epochs.jsonl").write_text("\n".join(before))
    directory = WorkerDirectory(tmp_path, 0)
    directory.add(reports[2])
    directory.add(reports[3])
    lines = (tmp_path / "epochs.jsonl").read_text().splitlines()
    assert [EpochReport.from_json(json.loads(line)) for line in lines] == reports


def test_the_best_accuracy_of_a_run_is_that_of_all_its_epochs_also_after_a_resume(tmp_path: Path) -> None:
    for epoch, accuracy in enumerate((0.8, 0.9, None, 0.7)):
        started_again = WorkerDirectory(tmp_path, 0)
        started_again.add(EpochReport(epoch=epoch, step=10, loss=1.0, accuracy=accuracy))
    summary = WorkerSummary(
        rank=0,
        world=1,
        epochs=4,
        steps=40,
        accuracy=0.7,
        loss=1.0,
        params_hash=0,
        skipped_steps=0,
        bytes_out=0,
        bytes_in=0,
        seconds=1.0,
        profile=ProfileSummary(rank=0),
    )
    started_again.finish(summary, outcome="done", seconds=1.0)
    assert json.loads((tmp_path / "summary.json").read_text())["best_accuracy"] == 0.9
    assert [report.accuracy for report in started_again.reports()] == [0.8, 0.9, None, 0.7]


def test_reports_that_a_full_disk_has_cut_off_are_written_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(directory: WorkerDirectory, lines: list[str], *, anew: bool) -> None:
        assert not anew
        with (directory.path / "epochs.jsonl").open("a") as file:
            file.write("".join(lines)[:-20])
        raise OSError(errno.ENOSPC, "No space left on device")

    directory = WorkerDirectory(tmp_path, 0)
    directory.add(EpochReport(epoch=0, step=10, loss=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(WorkerDirectory, "write_reports", cut_off)
        directory.add(EpochReport(epoch=1, step=20, loss=1.0))
    directory.add(EpochReport(epoch=2, step=30, loss=1.0))
    directory.add(EpochReport(epoch=3, step=40, loss=1.0))
    lines = (tmp_path / "epochs.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 30, 40]


def test_the_configuration_that_is_kept_can_be_read_again(configs: Path, tmp_path: Path) -> None:
    overrides = ["rank=0", "world=2", "run_dir=runs/x", "task.batch_size=7"]
    file = load(WorkerFile, configs / "ddp-dgc.conf.json", overrides=overrides)
    WorkerDirectory(tmp_path, 0).write_config(file)
    again = load(WorkerFile, tmp_path / "config.json")
    assert again == file.model_copy(update={"rank": None})
    for key in ("optimizer", "schedule"):  # one that is not named may be the task's
        assert (key in again.parallel.model_fields_set) == (key in file.parallel.model_fields_set)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="run directory file/run cannot be written: Not a directory"):
        WorkerDirectory(Path("file/run"), 0)


def damaged(path: Path, lines: list[str]) -> None:
    """The first line, what a loss of power leaves, then the others: half a line, a hole, zeros, many empty lines."""
    with path.open("wb") as file:
        file.write(f"{lines[0]}\n{lines[0][:5]}".encode())
        file.seek(40 << 30, os.SEEK_CUR)
        file.write(f"{lines[1]}\n".encode() + b"\0" * 5000 + b"\n" * 2000 + f"{lines[2]}\n".encode())


def test_a_run_that_goes_on_keeps_its_reports_behind_a_hole(tmp_path: Path) -> None:
    timeline = (ClientTimeline(client_id=3, counted_s=1.5),)
    reports = [RoundReport(round_id=i, weights_crc32=10 + i, timeline=timeline) for i in (1, 2, 3)]
    damaged(tmp_path / "rounds.jsonl", [json.dumps(report.to_json()) for report in reports])
    with ControllerDirectory(tmp_path) as run:
        run.add([report.without_timeline() for report in reports[1:]])
    entries = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [(entry["round_id"], len(entry["timeline"])) for entry in entries] == [(1, 1), (2, 1), (3, 1)]


def test_a_rank_that_goes_on_keeps_its_epochs_behind_a_hole(tmp_path: Path) -> None:
    rank = WorkerDirectory(tmp_path, 0)
    for epoch in (1, 2, 3):
        rank.add(EpochReport(epoch=epoch, step=epoch, loss=1.0))
    damaged(tmp_path / "epochs.jsonl", (tmp_path / "epochs.jsonl").read_text().splitlines())
    again = WorkerDirectory(tmp_path, 0)
    again.add(EpochReport(epoch=4, step=4, loss=1.0))
    assert [report.epoch for report in again.reports()] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["rounds.jsonl.tmp", "summary.json.tmp", "state/round-000001.json.tmp"])
def test_a_run_that_goes_on_writes_through_no_link(tmp_path: Path, name: str) -> None:
    """Somebody else may have sent the directory."""
    run, secret = tmp_path / "run", tmp_path / "secret"
    secret.write_text("secret")
    (run / "state").mkdir(parents=True)
    (run / name).symlink_to(secret)
    with ControllerDirectory(run) as directory, CheckpointStore(run / "state") as store:
        directory.add([RoundReport(round_id=1)])
        directory.finish([RoundReport(round_id=1)], outcome="done", seconds=1.0)
        store.save(Checkpoint(1, {}, {}))
    assert secret.read_text() == "secret"
    assert not (run / name).is_symlink()


@pytest.mark.parametrize(("name", "setting"), [("state", "checkpoint.dir"), ("history", "history.dir")])
@pytest.mark.parametrize("begin", [ControllerDirectory, lambda run: WorkerDirectory(run, 1)])
def test_a_run_does_not_go_on_where_a_folder_is_a_link(
    tmp_path: Path, name: str, setting: str, begin: Callable[[Path], object]
) -> None:
    for folder in ("run", "victim"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run" / name).symlink_to("../victim")
    with pytest.raises(ConfigError, match=f"run/{name} is a link, and a run writes through no link.*in {setting}"):
        begin(tmp_path / "run")


def open_rank(place: Path) -> JointCheckpoints:
    return JointCheckpoints(DataParallelConfig().replaced("checkpoint.dir", place), "rank-0")


def open_best(place: Path) -> BestModel:
    not_asked: Any = None
    return BestModel(InitialCheckpointSettings(dir=place, keep_best="accuracy"), not_asked)


def open_releases(place: Path) -> None:
    store = ClientStateStore(place / "clients", 3)
    store.start_run(1, 2)
    store.release(1, torch.zeros(2))


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("rank-0", open_rank),
        ("best", open_best),
        ("client-3", lambda place: ClientStateStore(place, 3)),
        ("clients/client-3/released-0000000000000001", open_releases),
    ],
)
def test_checkpoints_are_not_kept_behind_a_link_that_the_user_has_not_named(
    tmp_path: Path, name: str, begin: Callable[[Path], object]
) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "state" / name).parent.mkdir(parents=True)
    (tmp_path / "state" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match="cannot be written: is a link"):
        begin(tmp_path / "state")
    assert list((tmp_path / "victim").iterdir()) == []


def test_payloads_of_a_history_are_not_kept_behind_a_link(tmp_path: Path) -> None:
    for folder in ("history", "victim"):
        (tmp_path / folder).mkdir()
    (tmp_path / "history" / "payloads").symlink_to("../victim")
    history = History(tmp_path / "history", "controller", payloads=True)
    history.keep("update.bin", b"bytes")
    assert not history.on
    assert list((tmp_path / "victim").iterdir()) == []


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda path: export(path.parent / "run", path), id="--to"),
        pytest.param(lambda path: make_report(path.parent / "run", (), path), id="--out"),
    ],
)
@pytest.mark.parametrize(("name", "kind"), [("pipe", "a pipe"), ("null", "a device"), ("folder", "a folder")])
def test_a_file_takes_the_place_of_no_device_pipe_or_folder_that_the_user_names(
    tmp_path: Path, write: Callable[[Path], object], name: str, kind: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=rf"/{name} cannot be written: is {kind}, expected a regular file.*\(--"):
        write(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "null", "pipe"]
    assert (tmp_path / "null").is_symlink()


def test_the_output_of_a_command_that_goes_to_a_file_is_a_device_still() -> None:
    code = (
        "from gradbus.runtime.foreign_files import check_replaceable as c; c(__import__('pathlib').Path('/dev/stdout'))"
    )
    with tempfile.TemporaryFile() as file:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=file, stderr=subprocess.PIPE, check=False, text=True
        )
    assert "FileRefused: /dev/stdout: is a device" in ended.stderr


def test_a_file_takes_the_place_of_a_file_and_of_a_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("not-there")
    for name in ("file", "link", "nowhere", "new"):
        check_named(tmp_path / name, "--to")


def test_a_folder_with_the_name_of_a_temporary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.json.tmp").mkdir()
    with pytest.raises(OSError, match=r"model.json.tmp, the name of its temporary file, is that of a folder: move it"):
        write_json(tmp_path / "model.json", {})


def test_a_rank_that_goes_on_writes_its_mark_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".rank-0").symlink_to(tmp_path / "secret")
    WorkerDirectory(tmp_path / "run", 0)
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize(("name", "error"), [("controller.log", ConfigError), ("state/.lock", CheckpointError)])
def test_what_a_run_appends_to_must_be_a_file(tmp_path: Path, name: str, error: type[Exception], kind: str) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    (run / "state").mkdir(parents=True)
    secret.write_text("secret")
    if kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(secret)
    with pytest.raises(error, match=f"cannot be written: is a {kind}"), ControllerDirectory(run):
        CheckpointStore(run / "state")
    assert secret.read_text() == "secret"
