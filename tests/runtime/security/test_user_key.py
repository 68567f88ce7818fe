"""The key of a user: one, whoever makes it and from wherever it is looked for, and nobody else's."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.security import job_key
from gradbus.runtime.security.job_key import load_user_key, new_job_key, places_of_user
from gradbus.runtime.security.settings import Security, level_in_force

NOBODY = 65534
_AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
_HERE, _ELSEWHERE = False, True  # whether the bus is exposed


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_it_is_made_at_first_use_for_its_user_alone_and_found_from_then_on(home: Path) -> None:
    key, origin = load_user_key()
    assert origin == str(home / ".config" / "gradbus" / "user.key")
    modes = [stat.S_IMODE(Path(path).stat().st_mode) for path in (origin, home / ".config" / "gradbus")]
    assert modes == [0o600, 0o700]
    assert load_user_key() == (key, origin)
    assert os.listdir(home / ".config" / "gradbus") == ["user.key"]


@pytest.mark.parametrize("name", ["XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"])
def test_it_is_the_same_in_a_shell_over_ssh_and_in_cron(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    key = load_user_key()
    monkeypatch.setenv(name, str(home / "other"))
    assert load_user_key() == key


def test_a_home_of_somebody_else_is_not_this_users(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``sudo -E`` leaves it: the home of the user that called it."""
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 12345)
    user = os.geteuid()
    assert places_of_user() == (Path(f"/run/user/{user}/gradbus"), Path(f"/dev/shm/gradbus-{user}"))


@pytest.mark.parametrize("home", ["", "relative", "/nowhere/at/all"])
def test_without_a_home_in_the_environment_it_is_that_of_the_password_database(
    monkeypatch: pytest.MonkeyPatch, home: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", home)
    entry = job_key.pwd.getpwuid(os.geteuid())
    monkeypatch.setattr(job_key.pwd, "getpwuid", lambda _: type(entry)((*entry[:5], str(tmp_path), entry[6])))
    assert places_of_user()[0] == tmp_path / ".config" / "gradbus"


def test_where_there_is_no_home_it_lies_elsewhere_and_stays_there_when_the_home_is_back(tmp_path: Path) -> None:
    places = tmp_path / "home" / ".config" / "gradbus", tmp_path / "run" / "gradbus"
    places[1].parent.mkdir()
    key, origin = load_user_key(places)
    assert origin == str(places[1] / "user.key")
    places[0].parent.parent.mkdir()
    assert load_user_key(places) == (key, origin)


def test_with_no_place_at_all_the_error_says_which_were_tried_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can be made nowhere: .*/a \(No such .*/b \(No such .*GRADBUS_KEY_FILE"):
        load_user_key((tmp_path / "no" / "a", tmp_path / "no" / "b"))


def _link_to(folder: Path, path: Path) -> None:
    path.rename(folder / "moved")
    path.symlink_to(folder / "moved")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda _, file: file.chmod(0o640), "has mode 0640: others on this machine can use it"),
        (lambda _, file: file.parent.chmod(0o770), "has mode 0770: others on this machine can change what is in it"),
        (lambda _, file: file.write_text("x"), "holds no job key"),
        (_link_to, "is a link: expected a file"),
        (lambda folder, file: _link_to(folder, file.parent), "is a link: expected a folder"),
        (lambda _, file: (file.unlink(), file.mkdir()), "expected a regular file"),
        pytest.param(lambda _, file: os.chown(file, NOBODY, -1), f"belongs to user {NOBODY}", marks=_AS_ROOT),
        pytest.param(lambda _, file: os.chown(file.parent, NOBODY, -1), f"belongs to user {NOBODY}", marks=_AS_ROOT),
    ],
)
def test_what_another_user_may_have_put_there_is_refused(
    tmp_path: Path, spoil: Callable[[Path, Path], object], why: str
) -> None:
    places = (tmp_path / "gradbus",)
    file = Path(load_user_key(places).origin)
    spoil(tmp_path, file)
    with pytest.raises(ConfigError, match=why):
        load_user_key(places)


@_AS_ROOT
@pytest.mark.parametrize("occupy", [Path.mkdir, Path.touch, lambda path: path.symlink_to("/nowhere")])
def test_somebody_who_occupies_a_place_that_is_everybodys_keeps_nobody_from_having_a_key(
    tmp_path: Path, occupy: Callable[[Path], object]
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    occupied = shared / "gradbus-0"
    occupy(occupied)
    os.chown(occupied, NOBODY, -1, follow_symlinks=False)
    with pytest.raises(ConfigError, match=rf"can be made nowhere: .*gradbus-0 \(it belongs to user {NOBODY}\)"):
        load_user_key((occupied,))
    key, origin = load_user_key((tmp_path / "gradbus", occupied))
    assert origin == str(tmp_path / "gradbus" / "user.key")
    assert load_user_key((occupied, tmp_path / "gradbus")).key == key


_LOADS = """
import pathlib, sys
from gradbus.runtime.security.job_key import load_user_key
print("ready", flush=True)
sys.stdin.read(1)
print(load_user_key((pathlib.Path(sys.argv[1]),)).key.id.hex())
"""


def test_processes_that_begin_at_once_end_with_the_same_key(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LOADS, str(tmp_path / "gradbus")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(command, text=True, **pipes)) for _ in range(4)]
        for process in started:
            assert process.stdout.readline() == "ready\n"
        ids = {process.communicate(".", timeout=30)[0] for process in started}
    assert len(ids) == 1
    assert os.listdir(tmp_path / "gradbus") == ["user.key"]


def test_a_key_that_another_process_has_made_meanwhile_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gradbus"
    other = new_job_key()
    link = os.link

    def second(*arguments: object, **options: object) -> None:
        (folder / "user.key").write_text(other.text)
        (folder / "user.key").chmod(0o600)
        link(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", second)
    assert load_user_key((folder,)).key == other


def test_a_key_that_is_given_comes_before_that_of_the_user_and_none_leaves_the_machine_unless_it_is_given() -> None:
    named = {"GRADBUS_KEY_FILE": "some.key"}
    assert level_in_force(Security(), _HERE, {}) == "user"
    assert level_in_force(Security(), _HERE, named) == "psk"
    assert level_in_force(Security(key_file=Path("some.key")), _ELSEWHERE, {}) == "psk"
    assert level_in_force(Security(), _ELSEWHERE, named) == "psk"
    assert level_in_force(Security(insecure=True), _HERE, {}) == "user"
    assert level_in_force(Security(insecure=True), _ELSEWHERE, {}) == "none"
    assert level_in_force(Security(level="none"), _HERE, {}) == "none"
    for level in ("user", "none"):
        with pytest.raises(ConfigError, match="the key of this user is for this machine alone"):
            level_in_force(Security(level=level), _ELSEWHERE, {})
