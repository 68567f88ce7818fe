"""Errors of a user's own code: the line of theirs, and a traceback of their lines alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gradbus.codecs import CodecError
from gradbus.runtime import user_errors
from gradbus.runtime.network.addresses import check_interface
from gradbus.runtime.user_errors import readable_traceback, summary_of, traceback_with_place, user_error


def caught(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


def load(path: Path, text: str) -> Any:
    path.write_text(text)
    module = ModuleType(path.stem)
    exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102 - the test's own text
    return module


def test_the_place_is_the_innermost_line_of_the_user_and_not_that_of_a_library(tmp_path: Path) -> None:
    mine = load(tmp_path / "mine.py", "import numpy as np\ndef f():\n    np.reshape(np.zeros(3), (2, 2))\n")
    error = caught(mine.f)
    what = user_error(error)
    assert what.is_own
    assert what.place == f"{tmp_path}/mine.py:3 in f"
    told = readable_traceback(error)
    assert "site-packages" not in told
    assert "site-packages" in readable_traceback(error, full=True)
    assert traceback_with_place(error).splitlines()[-1] == f"{what.kind}: {what.message}, at {what.place}"


def test_a_path_below_the_current_directory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = load(tmp_path / "mine.py", "def f():\n    raise KeyError('x')\n")
    assert str(user_error(caught(mine.f))) == "KeyError: 'x', at mine.py:2 in f"


def test_an_installed_package_of_the_users_is_theirs_where_no_file_of_their_own_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is installed for a test: this folder is where packages are.
    monkeypatch.setattr(user_errors, "_site_folders", lambda: (f"{tmp_path}/",))
    known = user_errors._whose  # noqa: SLF001 - what it remembers of files before, and of these ones after
    known.cache_clear()
    try:
        (tmp_path / "their_package").mkdir()
        (tmp_path / "torch").mkdir()
        theirs = load(tmp_path / "their_package" / "nets.py", "def f(call):\n    call()\n")
        torch = load(tmp_path / "torch" / "nn.py", "def g():\n    raise RuntimeError('shapes')\n")
        error = caught(lambda: theirs.f(torch.g))
        error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]  # without this file
        assert user_error(error).place == f"{tmp_path}/their_package/nets.py:2 in f"
    finally:
        known.cache_clear()


def test_an_error_without_a_line_of_the_user_has_all_lines_and_is_not_theirs() -> None:
    error = caught(lambda: check_interface("nope0"))
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]  # without this file
    what = user_error(error)
    assert not what.is_own
    assert "addresses.py" in what.place
    assert readable_traceback(error) == readable_traceback(error, full=True)


def test_the_summary_of_an_error_of_gradbus_has_a_place_only_if_a_line_of_the_user_led_to_it(tmp_path: Path) -> None:
    error = caught(lambda: check_interface("nope0"))
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]  # without this file
    assert summary_of(error) == f"ConfigError: {error}"
    mine = load(tmp_path / "mine.py", "def f(call):\n    call('nope0')\n")
    assert summary_of(caught(lambda: mine.f(check_interface))).endswith(f", at {tmp_path}/mine.py:2 in f")
    plain = ValueError("of a library")
    assert summary_of(plain) == str(user_error(plain))


def test_an_error_of_gradbus_that_one_of_the_users_has_led_to_is_at_the_line_of_that_one(tmp_path: Path) -> None:
    mine = load(tmp_path / "mine.py", "def f():\n    raise KeyError('x')\n")
    cause = caught(mine.f)
    error = CodecError("its codec failed")
    error.__cause__ = ValueError("of a library")
    error.__cause__.__cause__ = cause
    assert str(user_error(error)) == f"CodecError: its codec failed, at {tmp_path}/mine.py:2 in f"
    error.__cause__ = None
    assert not user_error(error).is_own


def test_causes_are_shortened_too_and_a_message_of_many_lines_is_one_in_the_last_line(tmp_path: Path) -> None:
    mine = load(
        tmp_path / "mine.py",
        "import json\ndef f():\n    try:\n        json.loads('{')\n    except ValueError as error:\n"
        "        raise RuntimeError('bad\\n  file') from error\n",
    )
    told = traceback_with_place(caught(mine.f))
    assert "json/decoder.py" not in told
    assert "The above exception was the direct cause" in told
    assert told.splitlines()[-1] == f"RuntimeError: bad file, at {tmp_path}/mine.py:6 in f"


def test_a_syntax_error_is_at_its_own_line(tmp_path: Path) -> None:
    error = caught(lambda: compile("x = 1\ny = (", str(tmp_path / "mine.py"), "exec"))
    assert str(user_error(error)) == f"SyntaxError: '(' was never closed, at {tmp_path}/mine.py:2"


def test_a_message_has_a_bound() -> None:
    assert len(str(user_error(ValueError("x" * 1_000_000)))) < 1100


@pytest.mark.parametrize(
    ("call", "file"),
    [
        (lambda: np.reshape(np.zeros(3), (2, 2)), "fromnumeric.py"),
        (lambda: check_interface("nope0"), "addresses.py"),
        (lambda: json.loads("{"), "decoder.py"),
    ],
    ids=["a dependency", "gradbus", "Python"],
)
def test_what_gradbus_and_python_bring_is_not_the_users(call: Callable[[], object], file: str) -> None:
    error = caught(call)
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]  # without this file
    what = user_error(error)
    assert file in what.place
    assert not what.is_own
