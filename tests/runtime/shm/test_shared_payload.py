"""Payloads in sealed memory: nobody changes them, nothing else is read in their place, and nothing of them is left."""

from __future__ import annotations

import ctypes as ct
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_maps import mapped, open_files

from gradbus.runtime.shm import segment
from gradbus.runtime.shm.segment import (
    FREE_FROM,
    SHARED_BYTES,
    PayloadMemory,
    Segment,
    SharedMemoryFault,
    SharedPayload,
    machine,
    read,
)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd"),
    pytest.mark.usefixtures("nothing_is_left"),
]

PAYLOAD = bytes(range(256)) * 100
SIZE = len(PAYLOAD)
HEAD = b"gradbus\x02" + b"t" * 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@pytest.fixture
def forged() -> Iterator[Any]:
    """Makes files as somebody else might, and their places: ``forged(content, seals, size)``."""
    files: list[int] = []

    def make(content: bytes, seals: int = SEALS, size: int = FREE_FROM + SIZE, name: str = "gradbus") -> str:
        file = os.memfd_create(name, os.MFD_ALLOW_SEALING)
        files.append(file)
        os.write(file, content)
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        return f"{machine()} {os.getpid()} {file} {b't'.hex() * 16}"

    yield make
    for file in files:
        os.close(file)


def whole(head: bytes = HEAD) -> bytes:
    return head.ljust(FREE_FROM, b"\0") + PAYLOAD


def test_what_was_put_is_read_where_it_lies() -> None:
    sealed = SharedPayload(PAYLOAD)
    assert read(sealed.place, SIZE) == PAYLOAD == sealed.payload


def test_a_tensor_is_put_as_its_bytes() -> None:
    values = np.arange(5000, dtype=np.float32)
    sealed = SharedPayload(values)
    assert np.array_equal(np.frombuffer(read(sealed.place, 20_000), np.float32), values)


def test_nobody_can_change_it_not_even_its_owner() -> None:
    sealed = SharedPayload(PAYLOAD)
    file = int(sealed.place.split(" ")[2])
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", FREE_FROM)
    with pytest.raises(PermissionError):
        mmap.mmap(file, FREE_FROM + SIZE)
    for size in (FREE_FROM, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, 0)


def test_who_writes_to_what_it_has_read_changes_only_its_own_pages() -> None:
    sealed = SharedPayload(PAYLOAD)
    mine, other = read(sealed.place, SIZE), read(sealed.place, SIZE)
    mine[0] = 77
    sealed.payload[1] = 78
    assert bytes(mine[:2]) == bytes([77, 1])
    assert other == PAYLOAD


def test_another_process_reads_it_and_keeps_it_when_its_owner_is_killed() -> None:
    text = (
        "import sys; from gradbus.runtime.shm.segment import SharedPayload;"
        "s = SharedPayload(bytes([7]) * 25600); print(s.place, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        place = owner.stdout.readline().decode().strip()
        payload = read(place, SIZE)
        owner.kill()
    assert payload == bytes([7]) * SIZE
    with pytest.raises(SharedMemoryFault, match="cannot be opened"):
        read(place, SIZE)


def test_a_view_keeps_it_mapped_and_no_file_open() -> None:
    before = mapped(), open_files()
    sealed = SharedPayload(PAYLOAD)
    end = read(sealed.place, SIZE)[-5:]
    sealed.hide()
    sealed.hide()
    del sealed
    assert (mapped(), open_files()) == (before[0] + 1, before[1])
    assert end == PAYLOAD[-5:]


def test_nobody_finds_what_is_hidden_but_its_owner_has_it() -> None:
    sealed = SharedPayload(PAYLOAD)
    sealed.hide()
    with pytest.raises(SharedMemoryFault):
        read(sealed.place, SIZE)
    assert sealed.payload == PAYLOAD


def test_memory_that_runs_out_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment.os, "write", full)
    with pytest.raises(SharedMemoryFault, match=r"no shared memory of 25600 bytes: .*No space left"):
        SharedPayload(PAYLOAD)


# What others say is not trusted


def test_the_forged_one_is_read_where_nothing_is_wrong_with_it(forged: Any) -> None:
    assert read(forged(whole()), SIZE) == PAYLOAD


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, SEALS])
def test_what_could_still_change_is_refused(forged: Any, missing: int) -> None:
    with pytest.raises(SharedMemoryFault, match="not the segment that was announced"):
        read(forged(whole(), SEALS & ~missing), SIZE)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 1 << 60])
def test_another_size_than_was_said_is_refused(forged: Any, size: int) -> None:
    with pytest.raises(SharedMemoryFault, match="not the segment that was announced"):
        read(forged(whole()), size)


def test_what_was_never_written_is_refused(forged: Any) -> None:
    """It would take memory of whoever looks at it, a thousand times what its owner has spent."""
    size = 64 << 20
    with pytest.raises(SharedMemoryFault, match="never written"):
        read(forged(HEAD, size=FREE_FROM + size), size)


def test_memory_behind_the_end_does_not_make_up_for_what_was_never_written() -> None:
    size = 1 << 20
    file = os.memfd_create("gradbus", os.MFD_ALLOW_SEALING)
    try:
        os.write(file, HEAD)
        os.ftruncate(file, FREE_FROM + size)
        keep_size = 1  # FALLOC_FL_KEEP_SIZE
        fallocate = ct.CDLL(None, use_errno=True).fallocate
        assert fallocate(file, keep_size, ct.c_long(FREE_FROM + size), ct.c_long(2 * size)) == 0
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        with pytest.raises(SharedMemoryFault, match="never written"):
            read(f"{machine()} {os.getpid()} {file} {b't'.hex() * 16}", size)
    finally:
        os.close(file)


@pytest.mark.parametrize("head", [b"gradbus\x02" + b"u" * 16, b"gradbus\x01" + b"t" * 16, bytes(24)])
def test_another_token_or_kind_is_refused(forged: Any, head: bytes) -> None:
    with pytest.raises(SharedMemoryFault, match="another one than meant"):
        read(forged(whole(head)), SIZE)


def test_the_memory_of_a_group_is_no_payload() -> None:
    segment = Segment(FREE_FROM + SIZE)
    with pytest.raises(SharedMemoryFault, match="not the segment that was announced"):
        read(segment.place, SIZE)


def test_memory_of_other_programs_and_files_are_not_even_looked_at(
    forged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at a file whose file system does not answer would hold up the reader."""
    monkeypatch.setattr(os, "stat", None)
    (tmp_path / "file").write_bytes(whole())
    with (tmp_path / "file").open("rb") as file:
        for place in (forged(whole(), name="other"), f"{machine()} {os.getpid()} {file.fileno()} {'74' * 16}"):
            with pytest.raises(SharedMemoryFault, match="not the segment that was announced"):
                read(place, SIZE)


@pytest.mark.parametrize("place", ["", "here", f"elsewhere/b/1 1 3 {'0' * 32}"])
def test_what_is_no_place_of_this_machine_is_refused(place: str) -> None:
    with pytest.raises(SharedMemoryFault):
        read(place, SIZE)


# Of a bus


def test_where_it_is_switched_off_nothing_is_put() -> None:
    memory = PayloadMemory(switched_on=False)
    assert (memory.here, memory.put(PAYLOAD)) == ("", None)


def test_what_is_small_is_not_put() -> None:
    memory = PayloadMemory(switched_on=True)
    assert memory.here == machine()
    assert memory.put(bytes(SHARED_BYTES - 1)) is None
    assert memory.put(bytes(SHARED_BYTES)) is not None


def test_where_there_is_none_that_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **facts: Any) -> None:
            lines.append({"event": event, **facts})

    monkeypatch.setattr(segment, "log", Log())

    def memfd_create(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    memory = PayloadMemory(switched_on=True)
    assert [memory.put(PAYLOAD) for _ in range(3)] == [None] * 3
    (line,) = lines
    assert (line["event"], line["reason"]) == (
        "no shared memory",
        f"no memfd: [Errno {errno.EMFILE}] {os.strerror(errno.EMFILE)}",
    )
