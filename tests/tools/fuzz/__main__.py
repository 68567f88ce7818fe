"""``make fuzz SECONDS=300``: fuzz all targets one after the other, then print a table of inputs, crashes and memory.

``PYTHONPATH=tests/tools python -P -m fuzz --seconds 300 [TARGET ...]``. The exit code is 1 if an input broke a parser,
or took more than twice the memory that the parser states; 2 if nothing could be fuzzed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fuzz.catalogue import BROKEN, NAMES, TARGETS
from fuzz.target import RESIDENT_SLACK_BYTES
from gradbus.commands.amounts import size
from gradbus.runtime.needs import how_to_install

TOOLS = Path(__file__).resolve().parents[1]  # where a child finds this package
_START_S = 120.0  # on top of the time given: imports, seeds, and the corpus of an earlier run
_KEPT_LINES = 40
# Of glibc: memory of some size comes from the kernel, and returns to it at once, so that it can be measured.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "32768", "MALLOC_ARENA_MAX": "1"}


@dataclass(slots=True)
class FuzzOutcome:
    """The result of one target.

    Attributes:
        executions: inputs that were read. corpus: of them, those that are kept because they reached new code.
        peak_bytes: memory of one input at most, of Python and NumPy. resident_bytes: growth of the process by one input
            at most, torch's memory included, to a MiB or so. worst, swollen: the files with these inputs.
        process_mb: the whole process, with libFuzzer's own memory.
        crashes: files with inputs that broke the parser. why: the last output of a process that ended badly.
    """

    name: str
    executions: int = 0
    seconds: float = 0.0
    corpus: int = 0
    peak_bytes: int = 0
    resident_bytes: int = 0
    process_mb: int = 0
    worst: str = ""
    swollen: str = ""
    crashes: list[Path] = field(default_factory=list)
    why: str = ""

    @property
    def limit_bytes(self) -> int:
        return TARGETS.get(self.name, BROKEN).limit_bytes

    @property
    def too_much(self) -> str:
        """The input that took more memory than it may; empty: none did."""
        if self.peak_bytes > 2 * self.limit_bytes:
            return self.worst
        return self.swollen if self.resident_bytes > 2 * self.limit_bytes + RESIDENT_SLACK_BYTES else ""

    @property
    def ok(self) -> bool:
        return not self.crashes and not self.why and not self.too_much


def run(name: str, folder: Path, seconds: int) -> FuzzOutcome:
    """Fuzz one target in a process of its own, then measure the memory of its corpus in another."""
    outcome = FuzzOutcome(name)
    corpus, crashes = folder / name, folder / "crashes" / name
    for path in (corpus, crashes):
        path.mkdir(parents=True, exist_ok=True)
    known = set(crashes.iterdir())
    with tempfile.TemporaryDirectory(
        prefix="gradbus-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as scratch:
        started_s = time.monotonic()
        code, text = _child(["fuzz", name, str(corpus), str(crashes), str(seconds)], seconds + _START_S, scratch)
        outcome.seconds = time.monotonic() - started_s
        outcome.executions, outcome.process_mb = (
            _stat(text, key) for key in ("number_of_executed_units", "peak_rss_mb")
        )
        outcome.crashes = sorted(set(crashes.iterdir()) - known)
        if code == 0 and not outcome.crashes:
            outcome.corpus = len(list(corpus.iterdir()))
            code, text = _child(["measure", name, str(corpus)], _START_S + seconds, scratch, GIVES_BACK)
            with contextlib.suppress(ValueError, IndexError, KeyError, TypeError):
                facts: dict[str, Any] = json.loads(text.splitlines()[-1])
                outcome.peak_bytes, outcome.worst = facts["peak_bytes"], facts["worst"]
                outcome.resident_bytes, outcome.swollen = facts["resident_bytes"], facts["swollen"]
                return outcome
    outcome.why = "\n".join(text.splitlines()[-_KEPT_LINES:]) or f"exit code {code}"
    return outcome


def _child(
    arguments: Sequence[str], limit_s: float, scratch: str, more: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and output of a child. ``scratch``: for its files, which libFuzzer gives it no time to remove."""
    command = [sys.executable, "-P", "-m", "fuzz.child", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS), "TMPDIR": scratch, "OMP_NUM_THREADS": "1", **(more or {})}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=limit_s,
            env=environment,
        )
    except subprocess.TimeoutExpired as expired:
        return 1, f"{_text(expired.stdout)}\nit went on for more than {limit_s:g} s and was ended"
    return done.returncode, _text(done.stdout)


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")


def _stat(text: str, name: str) -> int:
    found = re.findall(rf"^stat::{name}: +(\d+)", text, re.M)
    return int(found[-1]) if found else 0


def table_of(outcomes: Sequence[FuzzOutcome]) -> Table:
    """A line for each target, and the sums."""
    table = Table("target", title="Parsers, fuzzed", title_justify="left")
    for column in ("executions", "per second", "corpus", "crashes", "memory", "with torch", "stated", "process"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            f"{outcome.executions:,}",
            f"{outcome.executions / max(1e-9, outcome.seconds):,.0f}",
            f"{outcome.corpus:,}",
            str(len(outcome.crashes)),
            size(outcome.peak_bytes),
            size(outcome.resident_bytes),
            size(outcome.limit_bytes),
            f"{outcome.process_mb:,} MiB",
        )
    table.add_section()
    executions, crashes = (sum(each) for each in zip(*((o.executions, len(o.crashes)) for o in outcomes), strict=True))
    table.add_row("all", f"{executions:,}", "", "", str(crashes))
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make fuzz", description="Give parsers millions of inputs, guided by the code that they reach."
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"all by default: {', '.join(NAMES)}")
    parser.add_argument("--seconds", type=int, default=300, help="for all targets together (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="corpus and crashes (%(default)s)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.targets if name not in (*NAMES, "broken")]
    if unknown:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(NAMES)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    console = Console(width=max(110, Console().width))
    if importlib.util.find_spec("atheris") is None:
        print(
            "make fuzz: needs atheris, which is not installed (Linux; it has no wheels for the newest Python). "
            f"{how_to_install('atheris')}, or in this repository: make setup-fuzz",
            file=sys.stderr,
        )
        return 2
    names = options.targets or NAMES
    outcomes: list[FuzzOutcome] = []
    with contextlib.suppress(KeyboardInterrupt):
        for name in names:
            outcome = run(name, options.folder, max(1, options.seconds // len(names)))
            outcomes.append(outcome)
            if not outcome.ok:
                console.print(f"{name}: {outcome.why or 'too much memory: ' + outcome.too_much}", markup=False)
                for path in outcome.crashes:
                    console.print(f"{name}: broken by {path}", markup=False)
    if outcomes:
        console.print(table_of(outcomes))
    return 0 if outcomes and all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
