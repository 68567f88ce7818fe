"""What a disk has kept when the power fails: what was synced, and of the rest anything."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_simulation.disk import Disk
from fault_simulation.kernel import CLOCK, START_S, VirtualProcess


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> VirtualProcess:
    monkeypatch.setattr(CLOCK, "now_s", START_S)
    world: Any = SimpleNamespace(seed=0)
    return VirtualProcess(world, "controller", 1, machine=0, pid=1001)


def write(
    folder: Path, disk: Disk, process: VirtualProcess, text: str, *, syncs_file: bool, syncs_folder: bool
) -> None:
    """Replace ``folder/model`` as a checkpoint does, with or without the syncs."""
    temporary = folder / "model.tmp"
    temporary.write_text(text)
    for path, wanted in ((temporary, syncs_file), (folder, syncs_folder)):
        if path == folder:
            disk.replace(process, temporary, folder / "model")
        if wanted:
            file = os.open(path, os.O_RDONLY)
            disk.sync(process, file)
            os.close(file)


def outcomes(tmp_path: Path, process: VirtualProcess, *, syncs_file: bool, syncs_folder: bool) -> set[str]:
    """What is in the file after the power has failed, over many seeds."""
    found = set()
    for seed in range(60):
        root = tmp_path / str(seed)
        folder = root / "state"
        folder.mkdir(parents=True)
        disk = Disk(root, random.Random(seed), lambda process, when: None)
        write(folder, disk, process, "the first", syncs_file=True, syncs_folder=True)
        write(folder, disk, process, "the second one", syncs_file=syncs_file, syncs_folder=syncs_folder)
        disk.lose_power("controller")
        found.add((folder / "model").read_text())
    return found


def test_what_was_synced_is_there_after_the_power_has_failed(tmp_path: Path, process: VirtualProcess) -> None:
    assert outcomes(tmp_path, process, syncs_file=True, syncs_folder=True) == {"the second one"}


def test_a_rename_without_a_sync_of_the_folder_may_not_have_happened(tmp_path: Path, process: VirtualProcess) -> None:
    found = outcomes(tmp_path, process, syncs_file=True, syncs_folder=False)
    assert found == {"the first", "the second one"}


def test_a_file_without_a_sync_may_be_cut_short(tmp_path: Path, process: VirtualProcess) -> None:
    found = outcomes(tmp_path, process, syncs_file=False, syncs_folder=True)
    assert {"", "the second one"} < found
    assert all("the second one".startswith(text) for text in found)


def test_a_file_that_was_renamed_and_removed_without_a_sync_of_the_folder_may_be_gone(
    tmp_path: Path, process: VirtualProcess
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    for seed in range(10):
        disk = Disk(tmp_path, random.Random(seed), lambda process, when: None)
        write(folder, disk, process, "the only one", syncs_file=True, syncs_folder=False)
        (folder / "model").unlink()
        disk.lose_power("controller")
        assert not (folder / "model").exists()


def test_a_removal_without_a_sync_of_the_folder_may_not_have_happened(tmp_path: Path, process: VirtualProcess) -> None:
    found = []
    for seed in range(20):
        folder = tmp_path / str(seed) / "state"
        folder.mkdir(parents=True)
        disk = Disk(folder.parent, random.Random(seed), lambda process, when: None)
        write(folder, disk, process, "the first", syncs_file=True, syncs_folder=True)
        disk.remove(process, folder / "model")
        assert not (folder / "model").exists()
        lost = disk.lose_power("controller")
        found.append((folder / "model").exists())
        assert lost == (["the removal of model"] if found[-1] else [])
    assert set(found) == {True, False}


def test_a_removal_is_kept_once_the_folder_is_synced_or_the_file_made_anew(
    tmp_path: Path, process: VirtualProcess
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    for seed in range(10):
        disk = Disk(tmp_path, random.Random(seed), lambda process, when: None)
        write(folder, disk, process, "the first", syncs_file=True, syncs_folder=True)
        disk.remove(process, folder / "model")
        write(folder, disk, process, "the second one", syncs_file=True, syncs_folder=True)
        assert disk.lose_power("controller") == []
        assert (folder / "model").read_text() == "the second one"
        disk.remove(process, folder / "model")
        file = os.open(folder, os.O_RDONLY)
        disk.sync(process, file)
        os.close(file)
        assert disk.lose_power("controller") == []
        assert not (folder / "model").exists()


def test_a_copy_of_the_state_is_on_the_disk_and_apart_from_what_it_was_copied_from(
    tmp_path: Path, process: VirtualProcess
) -> None:
    (tmp_path / "state").mkdir()
    disk = Disk(tmp_path, random.Random(0), lambda process, when: None)
    write(tmp_path / "state", disk, process, "the first", syncs_file=True, syncs_folder=True)
    disk.copy_folder("controller")
    copy = disk.folder_of("controller")
    write(tmp_path / "state", disk, process, "the second one", syncs_file=True, syncs_folder=True)
    assert disk.lose_power("controller") == []
    assert (copy / "model").read_text() == "the first"
    disk.copy_folder("controller")
    assert disk.folder_of("controller") not in (copy, tmp_path / "state")


def test_a_full_disk_syncs_nothing_until_there_is_room(tmp_path: Path, process: VirtualProcess) -> None:
    disk = Disk(tmp_path, random.Random(0), lambda process, when: None)
    file = os.open(tmp_path, os.O_RDONLY)
    disk.fill("controller", 5.0)
    with pytest.raises(OSError, match="No space left"):
        disk.sync(process, file)
    CLOCK.now_s = START_S + 6.0
    disk.sync(process, file)
    os.close(file)
    assert disk.refused_s == {"controller": START_S}
