"""What a run leaves is its owner's alone, and folders that somebody has made stay as he has made them."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from gradbus.commands.rundir.directory import ControllerDirectory, WorkerDirectory
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.foreign_files import FileRefused
from gradbus.runtime.private_folder import keep_private, make_private, scratch_folder
from gradbus.runtime.profiling.summary import LineFile
from gradbus.runtime.testing.journal import History


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_of_runs_states_and_histories_are_closed_to_others(tmp_path: Path) -> None:
    for number, make in enumerate(
        (lambda path: ControllerDirectory(path).log.close(), lambda path: WorkerDirectory(path, 0))
    ):
        run = tmp_path / "runs" / f"mnist-{number}"
        make(run)
        CheckpointStore(run / "state").close()
        history = History(run / "history", "controller", payloads=True)
        history.note("started")
        history.keep("model.bin", b"weights")
        history.close()
        folders = [run, run / "state", run / "history", run / "history" / "payloads"]
        assert [oct(mode(folder)) for folder in folders] == ["0o700"] * 4
    profile = LineFile(tmp_path / "profiles" / "rank-0.jsonl")
    profile.append([{"kind": "start"}])
    assert mode(tmp_path / "profiles") == 0o700


def test_folders_above_that_are_made_as_well_are_closed_to_others(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "runs" / "one" / "state" / "rank-0").close()
    history = History(tmp_path / "clients" / "history", "client-3", payloads=True)
    history.keep("update.bin", b"weights")  # before the first event
    history.close()
    made = [folder for folder in tmp_path.rglob("*") if folder.is_dir()]
    assert [folder.name for folder in made if mode(folder) != 0o700] == []
    assert len(made) == 7


def test_state_and_history_of_a_run_that_are_open_are_closed_when_it_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("state", "history"):
        (run / name).mkdir(parents=True)
        (run / name).chmod(0o755)
    with structlog.testing.capture_logs() as lines:
        ControllerDirectory(run).log.close()
    assert [mode(run / name) for name in ("state", "history")] == [0o700] * 2
    assert mode(run) == 0o755  # the user's own
    (line,) = lines
    assert (line["event"], line["do"]) == ("folder is open to other users", f"chmod 700 {run}")


def test_a_folder_that_was_there_or_is_a_link_keeps_its_rights(tmp_path: Path) -> None:
    shared = tmp_path / "team"
    shared.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(shared)
    keep_private(tmp_path / "link")
    make_private(tmp_path / "link")  # named by the user
    make_private(shared)
    CheckpointStore(shared).close()
    assert mode(shared) == 0o755
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(FileExistsError):
        make_private(file)


@pytest.mark.parametrize("name", ["link", "link/below", "nowhere"])
def test_below_the_folder_that_the_user_has_named_nothing_is_made_behind_a_link(tmp_path: Path, name: str) -> None:
    for folder in ("named", "victim"):
        (tmp_path / folder).mkdir()
    (tmp_path / "by-link").symlink_to("named")
    (tmp_path / "named" / "link").symlink_to("../victim")
    (tmp_path / "named" / "nowhere").symlink_to("../not-there")
    with pytest.raises(FileRefused, match="is a link"):
        make_private(tmp_path / "by-link" / name, inside=tmp_path / "by-link")
    make_private(tmp_path / "by-link" / "one" / "two", inside=tmp_path / "by-link")
    assert mode(tmp_path / "named" / "one" / "two") == 0o700
    assert list((tmp_path / "victim").iterdir()) == []


def killed_with_a_scratch_folder() -> Path:
    """A process makes a scratch folder and is killed: the folder."""
    read, write = os.pipe()
    if not (child := os.fork()):
        with scratch_folder("gb-test-") as made:
            os.write(write, bytes(made))
            while True:
                signal.pause()
    found = Path(os.fsdecode(os.read(read, 4096)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    return found


def test_a_scratch_folder_of_a_killed_process_goes_with_the_next_one_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "gb-test-of-somebody-else").mkdir()
    with scratch_folder("gb-test-") as first:
        left = killed_with_a_scratch_folder()
        assert left.is_dir()
        with scratch_folder("gb-test-") as second:
            assert not left.exists()
            assert {first, second, tmp_path / "gb-test-of-somebody-else"} == set(tmp_path.iterdir())
            assert mode(second) == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["gb-test-of-somebody-else"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="has no file system that makes no folders")
def test_a_folder_that_a_file_system_does_not_make_is_an_error_at_once() -> None:
    with pytest.raises(FileNotFoundError, match="/proc/nowhere"):
        make_private(Path("/proc/nowhere/below"))
