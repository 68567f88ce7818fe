"""Keys of nodes and the list of those that may take part: strict to read, whole to write."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.security.identity import allow_list
from gradbus.runtime.security.identity.allow_list import (
    AllowList,
    AllowListWatcher,
    Entry,
    changing,
    load_allow_list,
    parse_allow_list,
    parse_ids,
    with_entry,
    without,
    write_allow_list,
)
from gradbus.runtime.security.identity.key import (
    load_node_key,
    new_node_key,
    parse_public,
    public_text,
    verified,
)
from gradbus.runtime.security.job_key import new_job_key, write_secret_file

ONE, TWO = new_node_key("robot-1"), new_node_key("robot-2")
LINE = f"robot-1 client {public_text(ONE.public)} 0-3,7"


def test_a_key_is_read_from_its_file_and_signs_what_its_public_half_verifies(tmp_path: Path) -> None:
    write_secret_file(tmp_path / "key", ONE.text)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    key = load_node_key(tmp_path / "key")
    assert (key.name, key.public) == (ONE.name, ONE.public)
    assert verified(ONE.public, key.sign(b"x"), b"x")
    assert not verified(ONE.public, key.sign(b"x"), b"y")
    assert not verified(TWO.public, key.sign(b"x"), b"x")
    assert parse_public(public_text(key.public), "here") == key.public
    private = key.private.private_bytes_raw().hex()
    assert private not in repr(key)


def test_a_key_file_that_is_open_to_others_or_holds_no_such_key_is_refused_in_words(tmp_path: Path) -> None:
    write_secret_file(tmp_path / "key", ONE.text)
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640.*chmod 600"):
        load_node_key(tmp_path / "key")
    write_secret_file(tmp_path / "job", new_job_key().text)
    with pytest.raises(ConfigError, match=r"no key of a node.*gradbus keys new --identity") as caught:
        load_node_key(tmp_path / "job")
    assert (tmp_path / "job").read_text().split()[1] not in str(caught.value)
    with pytest.raises(ConfigError, match=r"bus.key_file or GRADBUS_KEY_FILE"):
        load_node_key(None)
    with pytest.raises(ConfigError, match=r"expected a public key.*got 'ed25519:12'"):
        parse_public("ed25519:12", "bus.controller_key")
    with pytest.raises(ConfigError, match="expected 1 to 64 of"):
        new_node_key("a b")


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    allowed = with_entry(AllowList(), Entry("robot-1", "client", ONE.public, ((0, 3), (7, 7))))
    allowed = with_entry(allowed, Entry("desk", "observer", TWO.public))
    write_allow_list(path, allowed)
    assert path.stat().st_mode & 0o077 == 0
    again = load_allow_list(path)
    assert again.entries == allowed.entries
    assert [again.owner_of(client_id) for client_id in (0, 3, 4, 7, 8)] == ["robot-1", "robot-1", None, "robot-1", None]
    write_allow_list(path, without(again, "robot-1"))
    assert [entry.name for entry in load_allow_list(path).entries] == ["desk"]
    assert os.listdir(tmp_path) == ["allow"]
    with pytest.raises(ConfigError, match="'robot-1' is not on the list, which has: desk"):
        without(load_allow_list(path), "robot-1")


def test_a_list_that_is_changed_keeps_its_mode_and_the_link_to_it(tmp_path: Path) -> None:
    path, link = tmp_path / "folder" / "real.list", tmp_path / "allow.list"
    path.parent.mkdir()
    write_allow_list(path, AllowList())
    link.symlink_to(path)
    for before, after in ((0o600, 0o600), (0o644, 0o644), (0o664, 0o644)):
        path.chmod(before)
        with changing(link):
            write_allow_list(link, AllowList((Entry("desk", "observer", TWO.public),)))
        assert stat.S_IMODE(path.stat().st_mode) == after
    assert link.is_symlink()
    assert load_allow_list(path).get("desk") is not None
    assert sorted(os.listdir(tmp_path)) == ["allow.list", "folder"]
    assert sorted(os.listdir(path.parent)) == [".real.list.lock", "real.list"], "who names the file has the same lock"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write for another user")
def test_a_list_that_root_changes_stays_that_of_the_user_who_reads_it(tmp_path: Path) -> None:
    path, user, group = tmp_path / "allow.list", 12345, 12346
    write_allow_list(path, AllowList())
    os.chown(path, user, group)
    with changing(path):
        write_allow_list(path, AllowList((Entry("desk", "observer", TWO.public),)))
    for file in (path, tmp_path / ".allow.list.lock"):
        status = file.stat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (user, group, 0o600)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("robot-1", "line 1: expected NAME ROLE KEY"),
        (f"{LINE} more", "line 1: expected NAME ROLE KEY.*5 words"),
        (f"\n{LINE.replace('client', 'boss')}", "line 2: role 'boss': expected one of client"),
        (LINE.replace("0-3,7", ""), "line 1: client robot-1: expected the ids"),
        (LINE.replace("client", "observer"), "observer robot-1: expected no ids"),
        (LINE.replace("0-3", "3-0"), "ids '3-0,7'"),
        (LINE.replace("0-3", "0-2147483647"), "up to 2\\^31 - 2"),
        (LINE.replace("ed25519:", "rsa:"), "expected a public key"),
        (LINE.replace("robot-1", "-x"), "line 1: name '-x'"),
        (f"{LINE}\n{LINE}", "the name or the key of robot-1 is there twice"),
        (f"{LINE}\n{LINE.replace('robot-1', 'two')}", "the name or the key of two is there twice"),
        (f"{LINE}\nrobot-2 client {public_text(TWO.public)} 3", "robot-1 and robot-2 may both use client id 3"),
    ],
    ids=lambda text: re.sub("[0-9a-f]{64}", "key", text),  # a new one each time, and a test has one name
)
def test_a_list_that_is_wrong_is_refused_with_its_line_and_what_was_expected(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_allow_list(text, "allow list x")


def test_a_list_that_others_can_write_or_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "allow"
    path.write_text(f"# us\n{LINE}  # the one at the door\n")
    path.chmod(0o644)
    assert load_allow_list(path).get("robot-1") is not None
    path.chmod(0o664)
    with pytest.raises(ConfigError, match="can be changed by others: mode 0664"):
        load_allow_list(path)
    path.chmod(0o600)
    monkeypatch.setattr(allow_list, "MAX_LIST_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        load_allow_list(path)
    monkeypatch.setattr(allow_list, "MAX_ENTRIES", 0)
    with pytest.raises(ConfigError, match="more than 0 nodes"):
        parse_allow_list(LINE, "x")


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("0123456789-,a \n#"), max_size=40), st.text(max_size=100))
def test_any_text_is_a_list_or_an_error_in_words(ids: str, text: str) -> None:
    for wrong in (LINE.replace("0-3,7", ids), text):
        with contextlib.suppress(ConfigError):
            assert parse_allow_list(parse_allow_list(wrong, "x").text, "y").text
    with contextlib.suppress(ConfigError):
        assert all(first <= last for first, last in parse_ids(ids, "x"))


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for load in (load_allow_list, load_node_key):
        with pytest.raises(ConfigError, match="expected a regular file"):
            load(tmp_path / "pipe")


def test_a_list_that_changes_while_it_is_read_is_read_again_and_a_bad_one_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "allow.list"
    both, one = (AllowList(tuple(Entry(k.name, "observer", k.public) for k in keys)) for keys in ((ONE, TWO), (ONE,)))
    write_allow_list(path, both)

    def load(path: Path) -> AllowList:
        allowed = load_allow_list(path)
        write_allow_list(path, one)
        return allowed

    with monkeypatch.context() as patched:
        patched.setattr(allow_list, "load_allow_list", load)
        file = AllowListWatcher(path)
        assert file.allowed.entries == both.entries
    assert file.news() is None
    news = file.news()
    assert news is not None
    assert news.entries == one.entries
    assert file.news() is None
    path.write_text("nonsense")
    assert file.news() is None
    with pytest.raises(ConfigError, match="line 1"):
        file.news()
    assert file.news() is None
    assert file.allowed is news


@pytest.mark.parametrize("reason", [errno.EMFILE, errno.EIO])
def test_a_list_that_cannot_be_read_for_a_while_is_read_when_it_can_be_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    path = tmp_path / "allow.list"
    write_allow_list(path, AllowList((Entry(ONE.name, "observer", ONE.public),)))
    file = AllowListWatcher(path)
    write_allow_list(path, AllowList())

    def fail(path: Path, limit_bytes: int) -> None:
        raise OSError(reason, os.strerror(reason))

    with monkeypatch.context() as patched:
        patched.setattr(allow_list, "read_beginning", fail)
        assert file.news() is None
        with pytest.raises(ConfigError, match=f"cannot be read: {os.strerror(reason)}"):
            file.news()
        assert [file.news() for _ in range(3)] == [None] * 3, "the same failure is told of once"
        assert not file.is_changing, "nobody looks more often for it"
    news = file.news()
    assert news is not None
    assert not news.entries
    assert file.news() is None


def test_a_list_that_is_gone_is_told_of_once_and_read_when_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "allow.list"
    write_allow_list(path, AllowList())
    file = AllowListWatcher(path)
    path.unlink()
    assert file.news() is None
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        file.news()
    assert file.news() is None
    write_allow_list(path, AllowList((Entry(ONE.name, "observer", ONE.public),)))
    assert file.news() is None
    assert file.is_changing
    news = file.news()
    assert news is not None
    assert len(news.entries) == 1


def test_a_list_that_is_being_written_by_hand_is_used_when_it_does_not_change_any_more(tmp_path: Path) -> None:
    path = tmp_path / "allow.list"
    lines = [Entry(key.name, "observer", key.public).text for key in (ONE, TWO)]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    file = AllowListWatcher(path)
    before = file.allowed
    with path.open("w") as by_hand:  # nothing is in it now
        assert file.news() is None
        assert file.is_changing
        by_hand.write(f"{lines[1]}\n")
        by_hand.flush()
        assert file.news() is None
        by_hand.write(f"{lines[0]}\n")
    assert file.news() is None
    assert file.allowed is before
    news = file.news()
    assert news is not None
    assert [entry.name for entry in news.entries] == [TWO.name, ONE.name]
    assert not file.is_changing


def test_a_list_of_no_bytes_removes_nobody(tmp_path: Path) -> None:
    path = tmp_path / "allow.list"
    write_allow_list(path, AllowList((Entry(ONE.name, "observer", ONE.public),)))
    file = AllowListWatcher(path)
    path.write_text("")
    assert file.news() is None
    with pytest.raises(ConfigError, match=r"is empty\. A list of nobody has a comment"):
        file.news()
    assert len(file.allowed.entries) == 1
    with pytest.raises(ConfigError, match="is empty"):
        AllowListWatcher(path)
    write_allow_list(path, AllowList())
    assert file.news() is None
    news = file.news()
    assert news is not None
    assert not news.entries


def test_a_change_that_keeps_size_and_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "allow.list"
    lines = [Entry(key.name, "observer", key.public).text for key in (ONE, TWO)]
    assert len(lines[0]) == len(lines[1])
    path.write_text(lines[0])
    path.chmod(0o600)
    file, before = AllowListWatcher(path), path.stat()
    while time.time_ns() - before.st_ctime_ns < 50_000_000:  # the clock of files ticks in some milliseconds
        pass
    with path.open("r+") as in_place:
        in_place.write(lines[1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size, after.st_ino) == (before.st_mtime_ns, before.st_size, before.st_ino)
    assert file.news() is None
    news = file.news()
    assert news is not None
    assert [entry.name for entry in news.entries] == [TWO.name]
