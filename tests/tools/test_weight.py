"""The program that counts the lines of a wheel: which folders a wheel holds, and what a range of commits added."""

from __future__ import annotations

from pathlib import Path

import pytest
from weight import lines_by_folder, main, net_lines, wheel_folders

PROJECT = {
    "tool": {
        "setuptools": {
            "packages": ["gradbus", "gradbus.actors", "gradbus.actors.trees", "gradbus.torch.store"],
            "package-dir": {"gradbus": "runtime/_front", "gradbus.actors": "actors", "gradbus.torch": "runtime/_torch"},
        }
    }
}


def test_packages_are_found_in_the_folder_that_the_nearest_mapped_name_has() -> None:
    assert wheel_folders(PROJECT) == {"runtime/_front", "actors", "actors/trees", "runtime/_torch/store"}


def test_lines_of_a_folder_are_those_of_its_python_files_without_those_of_folders_in_it(tmp_path: Path) -> None:
    (tmp_path / "actors" / "trees").mkdir(parents=True)
    (tmp_path / "actors" / "one.py").write_text("a\n\nb\n")
    (tmp_path / "actors" / "page.html").write_text("c\n")
    (tmp_path / "actors" / "trees" / "two.py").write_text("d\n")

    assert lines_by_folder(tmp_path, tmp_path.rglob("*.*")) == {"actors": 3, "actors/trees": 1}


def test_both_wheels_are_printed_and_hold_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    first, *rows, totals, both = (line.split() for line in capsys.readouterr().out.splitlines())
    assert first == ["gradbus-core", "gradbus"]
    sums = [sum(int(row[column].replace(",", "")) for row in rows) for column in (0, 1)]
    assert [f"{lines:,}" for lines in sums] == totals[:2]
    assert both[0] == f"{sum(sums):,}"


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("10\t4\tactors/trees/two.py", 6),
        ("10\t4\t{experiments => actors}/run.py", 6),  # moved into the wheel: what changed counts
        ("10\t4\tactors/{ => trees}/two.py", 6),
        ("10\t4\texperiments/one.py => actors/other.py", 6),
        ("10\t4\t{actors => experiments}/run.py", 0),
        ("10\t4\ttests/actors/test_two.py", 0),
        ("10\t4\tactors/gradbus.idl", 0),
    ],
)
def test_lines_that_commits_added_are_those_of_files_that_a_wheel_holds_now(line: str, lines: int) -> None:
    assert net_lines(line, wheel_folders(PROJECT)) == lines
