"""Debian roots for parts of ``make nightly``: how they are made, and what is printed where they cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE_ROOT = ". tests/tools/roots.sh; make_root made a-suite-of-tomorrow python3 --foreign --arch=arm64; echo made"


def run_in(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in this tree with roots in a folder, and with programs of ``folder/bin`` before others."""
    path = variables.pop("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    environment = {**os.environ, "PATH": path, "GRADBUS_ROOTS": str(folder / "roots"), "part": "tomorrow", **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def debootstrap(tmp_path: Path) -> Path:
    """A debootstrap that writes down its arguments, and fails if there is a file `fail`. Returns where they are."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "roots").mkdir()
    program, arguments = tmp_path / "bin" / "debootstrap", tmp_path / "arguments"
    lines = [
        "#!/bin/sh",
        f"printf '%s\\n' \"$@\" >{arguments}",
        f"mkdir -p {tmp_path}/roots/made",
        f"[ ! -e {tmp_path}/fail ] || {{ echo no such mirror; exit 1; }}",
    ]
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    return arguments


def test_a_suite_that_debootstrap_does_not_know_is_made_as_sid_is(tmp_path: Path, debootstrap: Path) -> None:
    done = run_in(tmp_path, "bash", "-euo", "pipefail", "-c", MAKE_ROOT, DEBIAN_MIRROR="http://mirror.example/debian")
    assert (done.stdout, done.returncode) == ("made\n", 0), done.stderr
    expected = [
        "--variant=minbase", "--foreign", "--arch=arm64", "--include=python3", "a-suite-of-tomorrow",
        str(tmp_path / "roots" / "made"), "http://mirror.example/debian", "/usr/share/debootstrap/scripts/sid",
    ]  # fmt: skip
    assert debootstrap.read_text().split() == expected


def test_a_machine_without_the_older_list_of_sources_has_a_mirror_nevertheless(
    tmp_path: Path, debootstrap: Path
) -> None:
    """Debian 13 has sources.list.d only; then sed, which looks for the mirror in both, ends with 2."""
    (tmp_path / "bin" / "sed").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "bin" / "sed").chmod(0o755)
    done = run_in(tmp_path, "bash", "-euo", "pipefail", "-c", MAKE_ROOT, DEBIAN_MIRROR="")
    assert (done.stdout, done.returncode) == ("made\n", 0), done.stderr
    assert "http://deb.debian.org/debian" in debootstrap.read_text().split()


def test_a_mirror_that_fails_is_said_and_leaves_no_half_of_a_root(tmp_path: Path, debootstrap: Path) -> None:
    (tmp_path / "fail").touch()
    done = run_in(tmp_path, "bash", "-euo", "pipefail", "-c", MAKE_ROOT)
    said = f"NOT RUN: tomorrow, debootstrap could not make the root: see {tmp_path}/roots/made.log"
    assert (done.stdout.splitlines(), done.returncode) == (["no such mirror", said], 0), done.stderr
    assert debootstrap.exists()
    assert not (tmp_path / "roots" / "made").exists()


@pytest.mark.parametrize("part", ["python-3.14", "arm64", "arm64-torch"])
def test_without_debootstrap_or_the_rights_for_it_a_part_is_not_run_and_says_why(part: str, tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    for name in ("bash", "id"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "few" / name).symlink_to(found)
    done = run_in(tmp_path, "bash", "tests/tools/test_part.sh", part, PATH=str(tmp_path / "few"), SPREAD="", BIN="")
    assert done.stdout.startswith(f"NOT RUN: {part}, "), done.stderr
    assert (done.stdout.count("\n"), done.returncode) == (1, 0), done.stderr
