"""The table of platforms: it says what the nightly page, .ci/run and the requirements say, and is up to date."""

from __future__ import annotations

import shutil
from pathlib import Path

import platforms
import pytest

FACTS = ("pyproject.toml", ".ci/run", "docs/nightly.md", "tests/tools/test_part.sh")


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    """A folder with what the table is made from."""
    for name in FACTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(platforms.ROOT / name, tmp_path / name)
    return tmp_path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def states(root: Path, *, by: str = "", system: str = "") -> list[tuple[str, str, str]]:
    return [
        (row.python, row.transport, row.state) for row in platforms.rows(root) if by in row.by and system in row.system
    ]


def test_the_page_is_what_make_docs_would_write_now() -> None:
    assert platforms.PAGE.read_text(encoding="utf-8") == platforms.page(), "run: make docs"


def test_a_nightly_part_that_has_failed_or_was_never_run_makes_no_platform_one_that_was_run(facts: Path) -> None:
    page, part = facts / "docs" / "nightly.md", "PART=python-3.14`"
    line = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| python-3.14 "))
    *cells, outcome = line.strip("| ").split(" | ")
    for now, state in (("green", "run"), ("failed: exit code 2", "failed")):
        change(page, f"{' | '.join(cells)} | {outcome}", f"{' | '.join(cells)} | {now}")
        assert states(facts, by=part) == [("3.14", "Zenoh", state)]
        outcome = now
    change(page, f"{' | '.join(cells)} | {outcome}", f"{' | '.join(cells[:2])} |  | never |  | ")
    assert states(facts, by=part) == [("3.14", "Zenoh", "never tried")]


def test_what_each_change_runs_follows_from_the_program_that_starts_it(facts: Path) -> None:
    assert ("3.13", "DDS", "run") in states(facts, by=".ci/run")
    change(facts / ".ci" / "run", "PYTHON=3.13", "PYTHON=3.15")
    assert [python for python, _, _ in states(facts, by=".ci/run")] == ["the machine's, at least 3.11", "3.11", "3.15"]


def test_a_platform_without_a_wheel_of_a_transport_was_never_tried_with_it(facts: Path) -> None:
    assert states(facts, system="macOS")[:2] == [("3.11 to 3.13", "DDS", "built"), ("3.14", "DDS", "never tried")]
    change(facts / "pyproject.toml", "sys_platform == 'darwin' or ", "")
    assert states(facts, system="macOS")[0] == ("3.11 to 3.14", "DDS", "never tried")
