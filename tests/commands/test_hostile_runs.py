"""A run directory is data: whatever lies in one, each command that reads it ends soon, runs nothing of it, writes
nothing outside of it, and says what is wrong."""

from __future__ import annotations

import http.client
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from hostile_runs import HOSTILE, MODULE, Hostile, make

from gradbus.commands.dashboard.server import serving
from gradbus.commands.exit_codes import ExitCode
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.errors import CheckpointError

MAX_CPU_S = 5.0
"""Of one command. The processor's time, as others use the machine, too; what hangs is ended by pytest's timeout."""
SECRET = "the secret of somebody else"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that no command may read or change."""
    folder = tmp_path / "outside"
    for part in ("state", "history"):
        (folder / part).mkdir(parents=True)
    (folder / "history" / "controller.jsonl").write_text('{"event": "started"}\n')
    (folder / "secret").write_text(SECRET)
    return folder


@pytest.fixture
def run_of(tmp_path: Path, outside: Path) -> Iterator[Callable[[Hostile], Path]]:
    """Make the directory, and check at the end that nothing of it has run, and that nothing outside has changed."""

    def build(hostile: Hostile) -> Path:
        run = tmp_path / "runs" / "sent"
        make(run, hostile.kind)
        hostile.change(run, outside)
        return run

    before = {path: path.lstat().st_mtime_ns for path in outside.rglob("*")}
    yield build
    assert MODULE not in sys.modules
    assert {path: path.lstat().st_mtime_ns for path in outside.rglob("*")} == before
    assert (outside / "secret").read_text() == SECRET


def asked(run: Path, *, figures: bool) -> str:
    """What the dashboard serves of a run and of the folder that it is in."""
    pages = ["", f"runs/{quote(run.name)}/", *([f"runs/{quote(run.name)}/figures/learning"] if figures else [])]
    found = []
    for folder in (run, run.parent):
        with serving(folder) as dashboard:
            address = urlsplit(dashboard.url)
            for page in pages:
                connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=30)
                connection.request("GET", address.path + page, headers={"Host": "localhost"})
                answer = connection.getresponse()
                found.append(answer.read().decode("utf-8", errors="replace"))
                connection.close()
                assert answer.status in (200, 404), found[-1]
    return "\n".join(found)


def show_profile(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["profile_table", str(run)])
    monkeypatch.delitem(sys.modules, "gradbus.commands.report.profile_table", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gradbus.commands.report.profile_table", run_name="__main__")
    assert ended.value.code in (0, 2)
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.fixture
def commands(
    invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_one_theme: None
) -> dict[str, Callable[[Path], str]]:
    """Each command that takes a run directory, by its name: what it says, of a report with its page."""
    sound = tmp_path / "sound"
    page = tmp_path / "page.html"

    def gradbus(*arguments: object) -> str:
        ended = invoke(*arguments)
        assert ended.code in (ExitCode.OK, ExitCode.CONFIG, ExitCode.CHECKPOINT, ExitCode.HISTORY), ended.err
        assert "Traceback" not in ended.err
        assert not {char for char in ended.out + ended.err if not char.isprintable()} - {"\n"}
        return ended.out + ended.err

    def report(*arguments: object) -> str:
        page.unlink(missing_ok=True)
        said = gradbus("report", *arguments, "--out", page)
        html = page.read_text() if page.exists() else ""
        assert not {char for char in html if not char.isprintable()} - {"\n"}
        assert "<script" not in html
        return said + html

    def compare(run: Path) -> str:
        if not sound.exists():
            make(sound, "parallel" if (run / "epochs.jsonl").exists() else "federated")
        return report("--compare", run, sound)

    def beside(run: Path) -> str:
        return gradbus("report", run)

    return {
        "report": report,
        "report beside the files": beside,
        "compare": compare,
        "check": lambda run: gradbus("check", run),
        "profile": lambda run: show_profile(run, monkeypatch, capsys),
        "dashboard": lambda run: asked(run, figures=False),
        "export": lambda run: gradbus("export", run),
    }


def check_each(names: list[str], commands: dict[str, Callable[[Path], str]], run: Path, hostile: Hostile) -> None:
    for name in names:
        before_s = time.process_time()
        said = commands[name](run)
        spent_s = time.process_time() - before_s
        assert spent_s < MAX_CPU_S, name
        assert SECRET not in said, name
        if name in hostile.says:
            assert re.search(hostile.says[name], " ".join(said.split())), f"{name}: {said[:3000]}"


@pytest.mark.parametrize("name", HOSTILE)
def test_commands_end_soon_run_nothing_and_say_what_is_wrong(
    name: str,
    run_of: Callable[[Hostile], Path],
    commands: dict[str, Callable[[Path], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostile = HOSTILE[name]
    if not hostile.draws:  # that takes most of the time of a report
        monkeypatch.setattr("gradbus.commands.report.page.images_of", lambda figure: None)
    run = run_of(hostile)
    monkeypatch.syspath_prepend(str(run))  # as if the command was started in it
    check_each([name for name in commands if name != "export"], commands, run, hostile)
    if hostile.draws:
        asked(run, figures=True)


@pytest.mark.parametrize("name", [name for name in HOSTILE if re.search("state|checkpoint|weights|header", name)])
def test_checkpoints_that_are_something_else_are_named(name: str, run_of: Callable[[Hostile], Path]) -> None:
    hostile = HOSTILE[name]
    run = run_of(hostile)
    before_s = time.process_time()
    with pytest.raises(CheckpointError, match=hostile.says["export"]):
        CheckpointStore.to_read(run / "state", inside=run).load_newest()
    assert time.process_time() - before_s < MAX_CPU_S


@pytest.mark.parametrize("name", HOSTILE)
def test_export_ends_soon_runs_nothing_and_says_what_is_wrong(
    name: str,
    run_of: Callable[[Hostile], Path],
    commands: dict[str, Callable[[Path], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(HOSTILE[name])
    monkeypatch.syspath_prepend(str(run))
    check_each(["export"], commands, run, HOSTILE[name])
