"""Files that others may have made: only regular ones, inside of their directory, within a size; none is waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradbus.runtime import foreign_files
from gradbus.runtime.foreign_files import (
    FileRefused,
    check_not_sparse,
    is_there,
    lines_inside,
    names_inside,
    open_inside,
    open_named,
    open_to_append,
    own_lines,
    text_inside,
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A directory with one file of each kind, next to a secret that is not in it."""
    found = tmp_path / "run"
    (found / "inner").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (found / "file").write_text("größe\n")
    (found / "inner" / "file").write_text("inner\n")
    os.mkfifo(found / "pipe")
    (found / "link").symlink_to(tmp_path / "secret")
    (found / "link-inside").symlink_to("file")
    (found / "folder-link").symlink_to(tmp_path)
    (found / "loop").symlink_to("loop")
    (found / "device").symlink_to("/dev/zero")
    with (found / "sparse").open("wb") as file:
        file.truncate(40 << 30)
    server = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(found)  # the name of a socket may have 107 characters
    server.bind("socket")
    os.chdir(here)
    yield found
    server.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pipe", "run/pipe: is a pipe, expected a regular file"),
        ("socket", "is a socket, expected"),
        ("inner", "is a folder, expected"),
        ("link", "is a link, and links in a run directory are not followed: put a regular file there in place of it"),
        ("link-inside", "is a link"),
        ("loop", "is a link"),
        ("device", "is a link"),
        ("folder-link/secret", "run/folder-link: is a link.*put a folder there"),
        ("file/more", "run/file: is a file, expected a folder"),
        ("pipe/more", "run/pipe: is a pipe, expected a folder"),
        ("../secret", "is no name inside of the directory"),
        ("inner/../../secret", "is no name inside"),
        ("/etc/passwd", "is no name inside"),
        ("", "is no name inside"),
        ("sparse", "has 42,949,672,960 bytes, at most 1,000 are read"),
    ],
)
def test_what_is_no_regular_file_inside_is_refused_with_the_reason(folder: Path, name: str, why: str) -> None:
    with pytest.raises(FileRefused, match=why) as caught:
        text_inside(folder, name, 1000)
    assert caught.value.strerror in str(caught.value)  # what callers show behind a path of their own


def test_a_device_is_refused_also_where_it_is_named_by_the_user() -> None:
    with pytest.raises(FileRefused, match="/dev/zero: is a device, expected a regular file"):
        open_named(Path("/dev/zero"))


def test_files_are_read_through_a_directory_that_is_a_link_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(folder)
    assert text_inside(tmp_path / "latest", "file", 7 + 1) == "größe\n"
    assert text_inside(tmp_path / "latest", Path("inner", "file"), 100) == "inner\n"
    with open_named(folder / "link") as file:  # the user's own link
        assert file.read() == b"secret"


def test_a_file_that_is_missing_is_named_with_its_whole_path(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{folder}/inner/none"):
        open_inside(folder, "inner/none")
    assert not is_there(folder, "none")
    assert is_there(folder, "loop")


def test_a_file_that_becomes_another_one_between_look_and_opening_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def swap(path: object, flags: int, *rest: object, **more: object) -> int:
        if path == "file":
            (folder / "file").unlink()
            os.mkfifo(folder / "file")
        return really(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", swap)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(FileRefused, match="is a pipe"):
        open_inside(folder, "file")
    assert len(os.listdir("/dev/fd")) == before


def test_no_descriptor_is_left_open(folder: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    for name in ("pipe", "link", "folder-link/secret", "inner/none", "none", "file/more", "sparse"):
        with pytest.raises(OSError):  # noqa: PT011 - of which kind is not the question
            open_inside(folder, name, max_bytes=10)
    open_inside(folder, "inner/file").close()
    assert list(lines_inside(folder, "file"))
    assert names_inside(folder, "f*", below="inner") == ["file"]
    assert len(os.listdir("/dev/fd")) == before


def test_lines_come_whole_and_what_is_left_out_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "MAX_LINE_BYTES", 1 << 20)
    (folder / "lines").write_bytes(b'{"a": 1}\n' + b"[" * (5 << 20) + b"\n\xff\n\n{}")
    notes: list[str] = []
    assert list(lines_inside(folder, "lines", notes.append)) == ['{"a": 1}\n', "[" * 40 + "…\n", "\ufffd\n", "\n", "{}"]
    assert notes == ["lines, line 2 has more than 1 MiB."]


def test_of_a_file_with_very_many_lines_the_first_are_read(folder: Path) -> None:
    (folder / "lines").write_text("1\n" * 1000)
    notes: list[str] = []
    assert list(lines_inside(folder, "lines", notes.append, max_bytes=100)) == ["1\n"] * 50
    assert notes == ["lines has 2,000 bytes, of which 100 are read: nothing behind is shown."]


def test_lines_end_at_the_first_hole(folder: Path) -> None:
    with (folder / "lines").open("wb") as file:
        file.write(b"{}\n" + b" " * 65533)  # a whole number of blocks
        file.truncate(40 << 30)
    notes: list[str] = []
    first, rest = lines_inside(folder, "lines", notes.append)
    assert first == "{}\n"
    assert not rest.strip()
    assert notes == ["lines has a hole from byte 65,536 on: nothing behind is shown."]
    assert list(lines_inside(folder, "sparse", notes.append)) == []


@pytest.mark.parametrize("max_line_bytes", [4, 16 << 20])
def test_lines_of_our_own_come_from_behind_holes_and_zeros(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_line_bytes: int
) -> None:
    monkeypatch.setattr(foreign_files, "MAX_LINE_BYTES", max_line_bytes)
    with (folder / "lines").open("wb") as file:
        file.write(b"one\n\0\0two\n\0cu\0\0")
        file.seek(1 << 30)
        file.write(b"ab\n\0" * 2 + b"end")
        file.truncate(2 << 30)
    with open_inside(folder, "lines") as opened:
        found = list(own_lines(opened))
        assert [line for _, line in found] == [b"one\n", b"two\n", b"cu", b"ab\n", b"ab\n", b"end"]
        for place, line in found:
            opened.seek(place)
            assert opened.read(len(line)) == line


def test_a_file_of_which_nearly_nothing_is_on_the_disk_is_sparse(folder: Path) -> None:
    with open_inside(folder, "sparse") as file, pytest.raises(FileRefused, match="is sparse: it claims 42,949,672,960"):
        check_not_sparse(file, folder / "sparse")
    with open_inside(folder, "file") as file:
        check_not_sparse(file, folder / "file")


def test_a_folder_with_more_entries_than_any_run_makes_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names_inside(folder, "link*") == ["link", "link-inside"]
    monkeypatch.setattr(foreign_files, "MAX_ENTRIES", 5)
    with pytest.raises(FileRefused, match="has more than 5 entries, which no run makes"):
        names_inside(folder, "*")
    with pytest.raises(FileRefused, match="folder-link: is a link"):
        names_inside(folder, "*", below="folder-link")


def test_what_is_appended_goes_to_a_file_and_not_through_a_link_or_pipe(folder: Path, tmp_path: Path) -> None:
    for name in ("link", "pipe", "link-inside", "loop"):
        with pytest.raises(OSError):  # noqa: PT011 - a link that leads nowhere is another error than a pipe
            open_to_append(folder / name)
    for name in ("file", "new"):
        descriptor = open_to_append(folder / name, 0o600)
        os.write(descriptor, b"more\n")
        os.close(descriptor)
        assert (folder / name).read_text().endswith("more\n")
    assert (folder / "new").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "secret").read_text() == "secret"
