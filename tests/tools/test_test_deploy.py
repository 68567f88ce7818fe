"""``make test-deploy``: what it makes of the exit codes of its parts, and what it prints once more at its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from patience import until

PROGRAM = Path(__file__).resolve().with_name("test_deploy.sh")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a part for each way to end."""
    parts = {
        "green": "[ -d tests/deploy ]",
        "absent": "echo 'NOT RUN: absent, no such tool'; exit 77",
        "partly": "echo 'NOT RUN: partly, one check'; exit 0",
        "broken": "echo a fault; exit 3",
        "silent": "exit 77",
    }
    folder = tmp_path / "tests" / "deploy"
    folder.mkdir(parents=True)
    for name, text in parts.items():
        (folder / f"{name}.sh").write_text(f"#!/bin/sh\n{text}\n")
        (folder / f"{name}.sh").chmod(0o755)
    return tmp_path


def deploy(checkout: Path, *part: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(PROGRAM), *part]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("part", "code", "outcome"),
    [
        ("green", 0, "green"),
        ("absent", 0, "not run"),
        ("partly", 0, "green"),
        ("broken", 1, "failed with exit code 3"),
        ("silent", 1, "failed with exit code 1"),
    ],
)
def test_a_part_is_green_not_run_or_failed_by_its_exit_code(checkout: Path, part: str, code: int, outcome: str) -> None:
    done = deploy(checkout, part)
    assert done.returncode == code, done.stderr
    assert f"== {part}: {outcome}," in done.stdout


def test_one_part_that_fails_leaves_the_others_their_turn_and_what_was_not_run_comes_last(checkout: Path) -> None:
    done = deploy(checkout)
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("== ") and ":" not in line] == [
        "== absent",
        "== broken",
        "== green",
        "== partly",
        "== silent",
    ]
    assert done.stdout.splitlines()[-2:] == ["NOT RUN: absent, no such tool", "NOT RUN: partly, one check"]
    assert "broken: failed with exit code 3" in done.stderr


def test_a_part_ends_with_the_program_that_runs_it(checkout: Path) -> None:
    part = checkout / "tests" / "deploy" / "long.sh"
    part.write_text("#!/bin/sh\necho $$ begins\nexec sleep 60\n")
    part.chmod(0o755)
    with subprocess.Popen(["bash", str(PROGRAM), "long"], cwd=checkout, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        begun = next(line for line in program.stdout if line.endswith("begins\n"))
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 143
    stat = Path("/proc", begun.split()[0], "stat")  # a zombie, where process 1 has not reaped it yet
    until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_what_takes_many_minutes_runs_by_its_name_only(checkout: Path) -> None:
    part = checkout / "tests" / "deploy" / "first-round.sh"
    part.write_text("#!/bin/sh\n")
    part.chmod(0o755)
    assert "first-round" not in deploy(checkout).stdout
    assert "== first-round: green," in deploy(checkout, "first-round").stdout


@pytest.mark.parametrize(
    ("apt", "code", "told"),
    [
        ("", 77, "NOT RUN: x, there is no flute on PATH (Debian: apt-get install woodwind)"),
        ("echo no such mirror >&2; exit 100", 77, "NOT RUN: x, apt-get could not install woodwind: no such mirror"),
        ("exit 0", 0, "begins"),
    ],
)
def test_a_program_that_is_missing_is_installed_or_the_part_is_not_run(
    tmp_path: Path, apt: str, code: int, told: str
) -> None:
    if apt:
        (tmp_path / "apt-get").write_text(f"#!/bin/sh\n{apt}\n")
        (tmp_path / "apt-get").chmod(0o755)
    for name in ("mktemp", "rm", "sh", "tail", "timeout"):
        (tmp_path / name).symlink_to(Path("/usr/bin", name))
    # Only root installs.
    lines = (f". {PROGRAM.with_name('deploy_part.sh')}", "part=x", "needs 'sh flute' woodwind", "echo begins")
    script = "\n".join(("set -euo pipefail", *lines))
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", script],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if os.geteuid() != 0:
        code, told = 77, "NOT RUN: x, there is no flute on PATH (Debian: apt-get install woodwind)"
    assert (done.returncode, done.stdout.strip()) == (code, told), done.stderr


def test_an_unknown_part_is_refused_with_the_names_of_those_there_are(checkout: Path) -> None:
    done = deploy(checkout, "helms")
    assert done.returncode == 2
    assert "no part 'helms'. The parts: absent broken green partly silent" in done.stderr
