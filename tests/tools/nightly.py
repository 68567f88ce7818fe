"""Runs the parts that take longer than `.ci/run` may: ``python -m nightly``, or ``make nightly PART=...``.

A part that is green at this commit is not run again unless it is named, so a run that was broken off goes on where it
was. What came of each part goes into docs/nightly.md: commit, date, minutes, outcome. Nothing starts this by itself:
whoever changes what a part covers runs it and commits its line.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

NOT_RUN = "NOT RUN: "  # how a program says that it lacks what a part needs; it ends with 0 then
STALE_DAYS = 14
GREEN = "green"
_GRACE_S = 30.0  # from the request to end to the kill
_TICK_S = 0.05
_LAST_LINES = 30  # of a part that failed
_PAGE = Path("docs", "nightly.md")
_OWN = re.compile(
    r"(?<!\S)(?:PART|ARGS)=(?:\\.|[^\\\s])*", re.DOTALL
)  # in what make hands down; a space is behind a backslash
_HEADER = ("| part | covers | commit | date | minutes | outcome |", "|---|---|---|---|---|---|")


class Platform(NamedTuple):
    """A platform that a part runs gradbus on, in the words of docs/platforms.md."""

    python: str
    transport: str
    processor: str = "x86-64"
    gpu: str = "no"
    system: str = "Linux"


class Part(NamedTuple):
    """One part: a command line, which ends within ``limit_s``.

    ``needs``: a program that it cannot do without. ``platform``: the platform that it shows to work, if it does.
    """

    name: str
    covers: str
    command: str
    limit_s: int
    needs: str = "make"
    platform: Platform | None = None


PARTS = (
    Part(
        "python-3.12", "demo, run-ddp and the fast tests under Python 3.12, with the locked versions",
        "make test PART=python PYTHON=3.12 LOCKED=1 SLICE='-m \"not slow\"'", 45 * 60,
        platform=Platform("3.12", "DDS, Zenoh"),
    ),
    Part(
        "debian-trixie", "the same as `make test PART=python`, and what depends on libc, on Debian 13 (glibc 2.41)",
        "make test PART=debian", 30 * 60, platform=Platform("3.13", "DDS", system="Linux (Debian 13)"),
    ),
    Part(
        "python-3.14", "the wheels without Cyclone DDS: imports, a session over a relay, two rounds with torch",
        "make test PART=python-3.14", 30 * 60, platform=Platform("3.14", "Zenoh"),
    ),
    Part(
        "arm64", "gradbus-core on an emulated processor: imports; a Flower node in rounds of a controller on x86-64",
        "make test PART=arm64", 60 * 60, platform=Platform("3.13", "Zenoh", "ARM64, emulated"),
    ),
    Part(
        "arm64-torch", "torch on an emulated processor: `gradbus client` trains in a round of a controller on x86-64",
        "make test PART=arm64-torch", 90 * 60, platform=Platform("3.13", "Zenoh", "ARM64, emulated"),
    ),
    Part(
        "soak", "controller, clients and ranks for 30 minutes while something breaks every few seconds", "make soak",
        45 * 60,
    ),
    Part(
        "soak-zenoh", "the same over a relay with TLS, which is killed as well, for 20 minutes",
        "make soak TRANSPORT=zenoh MINUTES=20", 35 * 60,
    ),
    Part(
        "relay-kills",
        "the relay is killed 50 times, under federated runs and under a transport alone; a link is down for 30 s",
        "RELAY_KILLS=50 LINK_DOWN_S=30 make test "
        "ARGS='tests/faults/test_relays.py tests/runtime/transport/zenoh/test_relay_faults.py'",
        20 * 60,
    ),
    Part(
        "long-tests",
        "what `make test` leaves out: benchmarks, figures, all pairs of choices, Cyclone DDS by itself, two machines",
        "make test WORKERS=3 ARGS='-m nightly'", 60 * 60,
    ),
    Part(
        "conformance", "PyTorch's own tests of torch.distributed: dds passes what gloo passes", "make conformance",
        60 * 60,
    ),
    Part(
        "conformance-zenoh", "the same over a relay with TLS", "make conformance TRANSPORT=zenoh", 60 * 60,
    ),
    Part("fuzz", "each parser gets inputs for 5 minutes", "make setup-fuzz && make fuzz", 3 * 3600),
    Part(
        "simulated-faults", "10,000 seeds of the day with 3 clients and 6 rounds, and 500 with 5 clients and 20 rounds",
        "make simulate-faults SEEDS=10000 ARGS='--first today' && "
        "make simulate-faults SEEDS=500 SIZE=5x20 ARGS='--first today'",
        90 * 60,
    ),
    Part(
        "simulated-relay", "1,000 seeds of the day over a simulated relay",
        "make simulate-faults SEEDS=1000 TRANSPORT=zenoh ARGS='--first today'", 30 * 60,
    ),
    Part(
        "planted-faults", "each fault that is planted in the product is found, by one of 2,000 seeds or by its test",
        "make simulate-faults PLANT=all SEEDS=2000 ARGS='--first 0'", 120 * 60,
    ),
    Part(
        "deploy", "what deploy/ has, run for real: images, Compose, the chart, Slurm, MPI, units of systemd, alerts",
        "make test-deploy", 60 * 60,
    ),
    Part(
        "gpu", "the tests that need a CUDA device", "make test PART=gpu", 15 * 60, "nvidia-smi",
        Platform("as installed", "DDS", gpu="CUDA"),
    ),
)  # fmt: skip


class Line(NamedTuple):
    """What came of a part when it was run last."""

    commit: str
    date: str
    minutes: str
    outcome: str


class Page:
    """docs/nightly.md: prose, and a table with a line for each part."""

    def __init__(self, path: Path, parts: Sequence[Part]) -> None:
        self._path = path
        self._parts = parts

    def read(self) -> dict[str, Line]:
        """Return the line of each part that has been run, by name."""
        found = {}
        for line in self._path.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("| ") and len(cells) == 6 and cells[2] not in ("", "commit"):
                found[cells[0]] = Line(*cells[2:])
        return found

    def write(self, lines: Mapping[str, Line]) -> None:
        """Put these lines into the table; the prose stays."""
        prose = self._path.read_text(encoding="utf-8").split(_HEADER[0])[0]
        rows = [
            f"| {part.name} | {part.covers} | {' | '.join(lines.get(part.name, Line('', 'never', '', '')))} |"
            for part in self._parts
        ]
        self._path.write_text(prose + "\n".join((*_HEADER, *rows)) + "\n", encoding="utf-8")


def git(*arguments: str) -> str:
    """Return what git prints. Raises CalledProcessError, FileNotFoundError."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def is_unchanged(commit: str) -> bool:
    """Return whether nothing but the page is different from that commit, and git knows every file."""
    others = [".", f":!{_PAGE.as_posix()}"]
    changed = ["git", "diff", "--quiet", commit, "--", *others]
    if not commit or subprocess.run(changed, capture_output=True, check=False).returncode:
        return False
    return not git("ls-files", "--others", "--exclude-standard", "--", *others)


def run_part(part: Part, log: Path) -> tuple[str, str]:
    """Run a part for ``limit_s`` at most, with what it starts in its session. Returns its outcome and its output."""
    if shutil.which(part.needs) is None:
        return f"{NOT_RUN}{part.name}, there is no {part.needs} on PATH", ""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["/bin/sh", "-c", part.command],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)
    output = log.read_text(encoding="utf-8", errors="replace")
    said = re.findall(rf"^{re.escape(NOT_RUN)}.*$", output, re.MULTILINE)
    if code is None:
        return f"failed: not at its end after {part.limit_s / 60:g} minutes", output
    if code:
        return f"failed: exit code {code}", output
    return said[-1] if said else GREEN, output


def environment() -> dict[str, str]:
    """Return the environment of parts: this one without the PART and ARGS of ``make nightly``, which a make in a part
    would take for its own."""
    handed_down = {name: value for name, value in os.environ.items() if name not in ("PART", "ARGS")}
    if flags := handed_down.get("MAKEFLAGS"):
        handed_down["MAKEFLAGS"] = _OWN.sub("", flags)
    return handed_down


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part: its processes are asked first, then killed."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, where all have ended
        os.killpg(process.pid, signal.SIGTERM)
        until_s = time.monotonic() + _GRACE_S
        while time.monotonic() < until_s:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(_TICK_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stale(lines: Mapping[str, Line], parts: Sequence[Part], today: datetime.date) -> Iterator[str]:
    """Yield a sentence on each part that was not green within ``STALE_DAYS``."""
    for part in parts:
        line = lines.get(part.name)
        if line is None or not line.commit:
            yield f"make nightly PART={part.name}: never run ({part.covers})"
        elif line.outcome != GREEN:
            yield f"make nightly PART={part.name}: {line.outcome}, on {line.date}"
        elif (age := today - datetime.date.fromisoformat(line.date)).days > STALE_DAYS:
            yield f"make nightly PART={part.name}: last run {age.days} days ago"


def run_all(parts: Sequence[Part], page: Page, logs: Path, *, again: bool) -> int:
    """Run parts and write their lines. Returns the exit code: 1 if one of them failed.

    Args:
        again: run also what is green at this commit.
    """
    if not is_unchanged("HEAD"):
        sys.exit("make nightly: there are changes that are not committed, and a line of the page names a commit")
    commit, failed, not_run = git("rev-parse", "--short=10", "HEAD"), False, []
    for part in parts:
        line = page.read().get(part.name)
        if not again and line is not None and line.outcome == GREEN and is_unchanged(line.commit):
            print(f"{part.name}: green at {line.commit}, and nothing has changed since", flush=True)
            continue
        print(f"{part.name}: {part.command}, {part.limit_s // 60} minutes at most", flush=True)
        began_s = time.monotonic()
        outcome, output = run_part(part, logs / f"{part.name}.log")
        if outcome.startswith(NOT_RUN):
            not_run.append(outcome)
            print(outcome, flush=True)
            continue
        minutes = f"{(time.monotonic() - began_s) / 60:.1f}"
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        page.write(page.read() | {part.name: Line(commit, today, minutes, outcome)})
        if outcome != GREEN:
            failed = True
            print("\n".join(output.splitlines()[-_LAST_LINES:]))
        print(
            f"{part.name}: {outcome} after {minutes} minutes; all its output is in {logs / part.name}.log", flush=True
        )
    print(*not_run, sep="\n", end="\n" if not_run else "")
    return int(failed)


def check_release(lines: Mapping[str, Line], parts: Sequence[Part]) -> int:
    """Say which parts are not green at this commit. Returns the exit code: 1 if there is one."""
    missing = [
        part.name
        for part in parts
        if (line := lines.get(part.name)) is None or line.outcome != GREEN or not is_unchanged(line.commit)
    ]
    for name in missing:
        print(f"make nightly PART={name}: not green at this commit, which a release asks of every part")
    return int(bool(missing))


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run parts, or say how old their lines are."""
    parser = argparse.ArgumentParser(prog="make nightly", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(part.name for part in parts)}; else all")
    parser.add_argument("--stale", action="store_true", help=f"only list what was not green within {STALE_DAYS} days")
    parser.add_argument("--release", action="store_true", help="only check that every part is green at this commit")
    options = parser.parse_args(arguments)
    known = {part.name: part for part in parts}
    if unknown := [name for name in options.parts if name not in known]:
        parser.error(f"there is no part {unknown[0]!r}. Name some of: {', '.join(known)}")
    page = Page(_PAGE, parts)
    if options.stale:
        for sentence in stale(page.read(), parts, datetime.datetime.now(datetime.UTC).date()):
            print(sentence)
        return 0
    if options.release:
        return check_release(page.read(), parts)
    chosen = [known[name] for name in options.parts] or parts
    return run_all(chosen, page, Path("build", "nightly"), again=bool(options.parts))


if __name__ == "__main__":
    sys.exit(main())
