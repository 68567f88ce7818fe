"""Nightly parts: what a run writes into its page, what it does not run again, and what it lists."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import nightly
import pytest
from nightly import NOT_RUN, PARTS, Line, Page, Part

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs", "nightly.md")
Run = Callable[..., int]


def part(name: str, command: str, limit_s: int = 60, needs: str = "sh") -> Part:
    return Part(name, f"covers {name}", command, limit_s, needs)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `make nightly` in a repository of its own with the page of this one."""
    monkeypatch.chdir(tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "test")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "test@localhost")
    PAGE.parent.mkdir()
    shutil.copy(ROOT / PAGE, PAGE)
    Path(".gitignore").write_text("build/\n")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], check=True, capture_output=True)

    def main(parts: Sequence[Part], *arguments: str) -> int:
        return nightly.main(arguments, parts)

    return main


def commit() -> None:
    subprocess.run(["git", "commit", "-qam", "next"], check=True)


def outcome(parts: Sequence[Part], name: str) -> str:
    return Page(PAGE, parts).read()[name].outcome


def test_a_part_that_ends_well_has_its_commit_and_date_in_the_page_and_is_not_run_again_until_something_changes(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = tmp_path / "build" / "count"
    parts = [part("counts", f"mkdir -p build && echo run >> {count}")]
    assert run(parts) == 0
    line = Page(PAGE, parts).read()["counts"]
    assert (line.commit, line.outcome) == (nightly.git("rev-parse", "--short=10", "HEAD"), "green")
    assert line.date == datetime.datetime.now(datetime.UTC).date().isoformat()
    commit()  # of the page alone
    assert run(parts) == 0
    assert count.read_text() == "run\n"
    assert "nothing has changed since" in capsys.readouterr().out
    assert run(parts, "counts") == 0  # it was named
    assert count.read_text() == "run\nrun\n"
    Path("code.py").write_text("changed = True\n")
    subprocess.run(["git", "add", "code.py"], check=True)
    commit()
    assert run(parts) == 0
    assert count.read_text() == "run\nrun\nrun\n"


def test_a_part_that_fails_is_written_down_with_its_last_lines_and_the_others_are_run(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [part("fails", "echo what went wrong; exit 3"), part("goes on", "true")]
    assert run(parts) == 1
    assert (outcome(parts, "fails"), outcome(parts, "goes on")) == ("failed: exit code 3", "green")
    assert "what went wrong" in capsys.readouterr().out
    commit()
    assert run([parts[0]._replace(command="true"), parts[1]]) == 0  # the one that had failed, and no other
    assert outcome(parts, "fails") == "green"


def test_a_part_that_does_not_end_is_ended_with_what_it_has_started(run: Run, tmp_path: Path) -> None:
    parts = [part("hangs", f"sleep 600 & echo $! > {tmp_path}/build/child; wait", limit_s=1)]
    (tmp_path / "build").mkdir()
    assert run(parts) == 1
    assert outcome(parts, "hangs").startswith("failed: not at its end after")
    child = int((tmp_path / "build" / "child").read_text())
    with pytest.raises(ProcessLookupError):  # a run waits until its processes are gone
        os.kill(child, 0)


def test_what_cannot_be_run_here_is_said_again_at_the_end_and_keeps_its_line(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        part("no tool", "true", needs="a-tool-that-is-not-there"),
        part("no disk", f"echo '{NOT_RUN}no disk, less than 20 GB'"),
        part("good", "true"),
    ]
    assert run(parts) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"{NOT_RUN}no tool, there is no a-tool-that-is-not-there on PATH",
        f"{NOT_RUN}no disk, less than 20 GB",
    ]
    assert list(Page(PAGE, parts).read()) == ["good"]


def test_a_part_that_runs_make_gets_other_variables_than_the_part_that_was_asked_for(run: Run, tmp_path: Path) -> None:
    """`make nightly PART=relay-kills` runs `make test`, which has a PART as well."""
    seen = tmp_path / "build" / "seen"
    Path("inner.mk").write_text(f"all:\n\t@echo '[$(PART)] [$(ARGS)] [$(KEPT)]' >{seen}\n")
    program = (
        "import nightly; nightly.run_part(nightly.Part('x', '', 'make -f inner.mk', 60), nightly.Path('build/log'))"
    )
    Path("Makefile").write_text(f'all:\n\t@"{sys.executable}" -P -c "{program}"\n')
    subprocess.run(
        ["make", "PART=x", "ARGS=--two 'words' PART=y", "KEPT=yes"],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "tools")},
    )
    assert seen.read_text() == "[] [] [yes]\n"


def test_changes_that_are_not_committed_are_refused(run: Run) -> None:
    Path(".gitignore").write_text("")
    with pytest.raises(SystemExit, match="not committed"):
        run([part("good", "true")])


def test_a_file_that_git_does_not_know_is_refused_too(run: Run) -> None:
    Path("conftest.py").write_text("")
    with pytest.raises(SystemExit, match="not committed"):
        run([part("good", "true")])


def test_an_unknown_part_is_answered_with_the_names_of_all(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([part("good", "true")], "god")
    assert "there is no part 'god'. Name some of: good" in capsys.readouterr().err


def test_parts_that_were_never_run_have_failed_or_are_old_are_listed() -> None:
    parts = [part(name, "true") for name in ("never", "failed", "old", "fresh")]
    lines = {
        "failed": Line("abc", "2026-01-30", "1.0", "failed: exit code 1"),
        "old": Line("abc", "2026-01-15", "1.0", "green"),
        "fresh": Line("abc", "2026-01-17", "1.0", "green"),
    }
    assert [text.partition(" (")[0] for text in nightly.stale(lines, parts, datetime.date(2026, 1, 31))] == [
        "make nightly PART=never: never run",
        "make nightly PART=failed: failed: exit code 1, on 2026-01-30",
        "make nightly PART=old: last run 16 days ago",
    ]


def test_a_release_asks_that_every_part_is_green_at_its_commit(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part("a", "true"), part("b", "true")]
    assert run(parts, "a") == 0
    commit()
    assert run(parts, "--release") == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("make nightly PART=b: not green")
    assert run(parts) == 0
    commit()
    assert run(parts, "--release") == 0


def test_the_page_of_this_repository_has_a_line_for_each_part() -> None:
    rows = [line.split("|")[1].strip() for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == [part.name for part in PARTS]
    assert set(Page(ROOT / PAGE, PARTS).read()) <= set(rows)
