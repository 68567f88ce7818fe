"""Segments of shared memory: found by those who may, refused where something is wrong, gone with their last user."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from memory_maps import mapped, open_files
from patience import until

from gradbus.runtime.shm import segment as module
from gradbus.runtime.shm import segment as segment_module
from gradbus.runtime.shm import unmapping
from gradbus.runtime.shm.segment import FREE_FROM, MAX_BYTES, Segment, SharedMemoryFault, attach, is_here, machine

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd"),
    pytest.mark.usefixtures("nothing_is_left"),
]

SIZE = 64 * 1024


def changed(place: str, part: int, value: str) -> str:
    """The place with another host, process, file or token."""
    parts = place.split(" ")
    parts[part] = value
    return " ".join(parts)


def test_what_the_owner_writes_is_seen_by_who_is_attached() -> None:
    segment = Segment(SIZE)
    seen = attach(segment.place, SIZE)
    segment.memory[FREE_FROM] = 5
    assert len(seen) == SIZE
    assert seen[FREE_FROM] == 5
    assert is_here(segment.place)


def test_another_process_attaches_and_keeps_it_when_its_owner_is_gone() -> None:
    text = (
        "import sys; from gradbus.runtime.shm.segment import Segment; s = Segment(65536); s.memory[4096:] = 7;"
        "print(s.place, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        place = owner.stdout.readline().decode().strip()
        seen = attach(place, SIZE)
        owner.kill()
    assert bool((seen[FREE_FROM:] == 7).all())
    with pytest.raises(SharedMemoryFault, match="cannot be opened"):
        attach(place, SIZE)


def test_a_view_keeps_it_mapped_and_no_file_stays_open() -> None:
    before = mapped(), open_files()
    segment = Segment(SIZE)
    seen = attach(segment.place, SIZE)
    segment.memory[SIZE - 1] = 9
    assert open_files() == before[1] + 1  # a group of many ranks would need many otherwise
    segment.hide()
    assert open_files() == before[1]
    end = seen[SIZE - 10 :].data[5:]
    del seen, segment
    assert (mapped(), end[-1]) == (before[0] + 1, 9)
    del end
    assert mapped() == before[0]


def test_a_segment_that_is_dropped_is_gone() -> None:
    before = mapped(), open_files()
    segment = Segment(SIZE)
    place = segment.place
    del segment
    assert (mapped(), open_files()) == before
    with pytest.raises(SharedMemoryFault):
        attach(place, SIZE)


def test_nobody_attaches_to_what_is_hidden() -> None:
    segment = Segment(SIZE)
    seen = attach(segment.place, SIZE)
    segment.hide()
    segment.hide()
    with pytest.raises(SharedMemoryFault):
        attach(segment.place, SIZE)
    segment.memory[FREE_FROM] = 3
    assert seen[FREE_FROM] == 3


def test_who_is_attached_cannot_write() -> None:
    segment = Segment(SIZE)
    seen = attach(segment.place, SIZE)
    with pytest.raises(ValueError, match="read-only"):
        seen[FREE_FROM] = 1
    assert seen.data.readonly


def can_be_written(path: str) -> list[str]:
    """In how many ways a process of the same user can write to a segment that it finds."""
    ways = []
    file = os.open(path, os.O_RDWR)
    try:
        with contextlib.suppress(OSError):
            os.pwrite(file, b"forged", FREE_FROM)
            ways.append("write")
        with contextlib.suppress(OSError):
            mmap.mmap(file, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()
            ways.append("map")
        libc = ctypes.CDLL(None, use_errno=True)
        punch_hole = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h
        if libc.fallocate(file, punch_hole, ctypes.c_long(FREE_FROM), ctypes.c_long(4096)) == 0:
            ways.append("punch a hole")
    finally:
        os.close(file)
    return ways


def test_another_process_cannot_open_it_for_writing_and_its_owner_goes_on() -> None:
    segment = Segment(SIZE)
    seen = attach(segment.place, SIZE)
    segment.memory[FREE_FROM] = 5
    _, process, number, _ = segment.place.split(" ")
    assert can_be_written(f"/proc/{process}/fd/{number}") == []
    segment.memory[FREE_FROM + 1] = 6
    assert seen[FREE_FROM : FREE_FROM + 2].tolist() == [5, 6]


def test_a_kernel_that_cannot_seal_it_for_others_keeps_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "F_SEAL_FUTURE_WRITE", 1 << 20)  # unknown to every kernel, as 5.0 has it
    segment = Segment(SIZE)
    segment.memory[FREE_FROM] = 5
    assert attach(segment.place, SIZE)[FREE_FROM] == 5


def test_it_does_not_change_its_size() -> None:
    segment = Segment(SIZE)
    _, _, number, _ = segment.place.split(" ")
    for size in (SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(int(number), size)


@pytest.mark.parametrize("size", [0, -1, MAX_BYTES + 1])
def test_there_is_none_of_such_a_size(size: int) -> None:
    with pytest.raises(SharedMemoryFault, match="at most"):
        Segment(size)


def test_a_system_without_memfd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAS_MEMFD", False)
    with pytest.raises(SharedMemoryFault, match="no memfd"):
        Segment(SIZE)


def test_memory_that_cannot_be_mapped_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "F_SEAL_SEAL", 1 << 20)  # unknown to the kernel
    with pytest.raises(SharedMemoryFault, match="no shared memory of 65536 bytes"):
        Segment(SIZE)


# What others say is not trusted


@pytest.mark.parametrize(
    "place", ["", "here", "a/b/c 1 2", f"a/b/c 1 2 {'0' * 33}", f"a/b/c -1 2 {'0' * 32}", f"a/b/c 1 2 {'g' * 32}"]
)
def test_what_is_no_place_is_refused(place: str) -> None:
    assert not is_here(place)
    with pytest.raises(SharedMemoryFault):
        attach(place, SIZE)


def test_a_place_on_another_machine_is_not_here() -> None:
    segment = Segment(SIZE)
    place = changed(segment.place, 0, machine() + "0")
    assert not is_here(place)
    with pytest.raises(SharedMemoryFault, match="another machine"):
        attach(place, SIZE)


@pytest.mark.parametrize(("part", "value"), [(1, "4194304"), (2, "9999999"), (3, "0" * 32)])
def test_another_process_file_or_token_is_refused(part: int, value: str) -> None:
    segment = Segment(SIZE)
    with pytest.raises(SharedMemoryFault):
        attach(changed(segment.place, part, value), SIZE)


@pytest.mark.parametrize("size", [SIZE // 2, SIZE - 1, 2 * SIZE])
def test_another_size_than_expected_is_refused(size: int) -> None:
    segment = Segment(SIZE)
    with pytest.raises(SharedMemoryFault, match="not the segment that was announced"):
        attach(segment.place, size)


def test_what_could_be_cut_short_is_refused() -> None:
    """To read behind the end of such a file would end this process."""
    segment = Segment(SIZE)
    file = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, SIZE)
        with mmap.mmap(file, SIZE) as other:
            other[:24] = segment.memory[:24].tobytes()
        with pytest.raises(SharedMemoryFault, match="not the segment that was announced"):
            attach(changed(segment.place, 2, str(file)), SIZE)
    finally:
        os.close(file)


def test_files_pipes_and_devices_are_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place names any open file of any process of this user: opening one may have effects."""
    opened: list[str] = []
    really = os.open

    def watched(path: str, *arguments: int) -> int:
        opened.append(path)
        return really(path, *arguments)

    monkeypatch.setattr(segment_module.os, "open", watched)
    segment = Segment(SIZE)
    (tmp_path / "file").write_bytes(bytes(SIZE - 1))
    with (tmp_path / "file").open("rb") as file, Path("/dev/null").open("rb") as device:
        ends = os.pipe()
        try:
            for number in (file.fileno(), device.fileno(), *ends):
                with pytest.raises(SharedMemoryFault, match="not the segment that was announced"):
                    attach(changed(segment.place, 2, str(number)), SIZE)
        finally:
            os.close(ends[0])
            os.close(ends[1])
    assert opened == []


def test_a_file_on_disk_is_refused(tmp_path: Path) -> None:
    segment = Segment(SIZE)
    (tmp_path / "file").write_bytes(segment.memory.tobytes())
    with (tmp_path / "file").open("rb") as file, pytest.raises(SharedMemoryFault):
        attach(changed(segment.place, 2, str(file.fileno())), SIZE)


def test_a_forked_child_keeps_nothing_open() -> None:
    segment = Segment(SIZE)
    text = "import sys; sys.path[:0] = [sys.argv[1]]; import memory_maps; print(memory_maps.open_files())"
    support = str(Path(__file__).parents[2] / "support")
    ran = subprocess.run([sys.executable, "-c", text, support], capture_output=True, check=True, close_fds=False)
    assert ran.stdout.split() == [b"0"]
    assert np.count_nonzero(segment.memory[FREE_FROM:]) == 0


def test_large_memory_is_given_back_on_a_thread_whoever_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    later = unmapping.unmap_later
    gone, threads = threading.Event(), list[str]()

    def noted(unmap: Callable[[], object]) -> None:
        def call() -> None:
            unmap()
            threads.append(threading.current_thread().name)
            gone.set()

        later(call)

    monkeypatch.setattr(unmapping, "unmap_later", noted)
    large, small = Segment(unmapping.LARGE_BYTES), Segment(unmapping.LARGE_BYTES - 1)
    del small
    assert threads == [], "less is given back at once"
    del large
    assert gone.wait(30)
    assert threads == ["gradbus-unmap"]


def test_memory_that_waits_to_be_given_back_is_bounded() -> None:
    unmapping.start()
    may_go_on, here, done = threading.Event(), threading.get_ident(), list[int]()
    try:
        unmapping.unmap_later(lambda: may_go_on.wait(30))
        for _ in range(unmapping.MAX_WAITING + 3):
            unmapping.unmap_later(lambda: done.append(threading.get_ident()))
        assert len(done) >= 2, "more than wait is given back at once"
        assert set(done) == {here}
    finally:
        may_go_on.set()
    until(lambda: len(done) == unmapping.MAX_WAITING + 3)
    assert set(done) != {here}


def test_large_memory_is_made_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(unmapping, "_thread", None)
    monkeypatch.setattr(threading.Thread, "start", none_left)
    large = Segment(unmapping.LARGE_BYTES)
    assert len(large.memory) == unmapping.LARGE_BYTES
    del large


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_by_fork_gives_large_memory_back_itself() -> None:
    program = """
import os
from gradbus.runtime.shm.segment import Segment
from gradbus.runtime.shm.unmapping import LARGE_BYTES
from memory_maps import mapped
mine = Segment(LARGE_BYTES)
child = os.fork()
if child == 0:
    del mine
    os._exit(mapped())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    support = Path(__file__).resolve().parents[2] / "support"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(support)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")
