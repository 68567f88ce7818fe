"""``gradbus report``: the files of a run as one HTML file that opens from the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradbus.commands.amounts import size
from gradbus.commands.report import compare, federated, parallel
from gradbus.commands.report.page import Page, need_extras, write
from gradbus.commands.rundir.directory import check_named
from gradbus.commands.rundir.reading import RunFiles, read_run
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.plain_text import plain_line


def make_report(run_dir: Path | None, compared: Sequence[Path], out: Path | None) -> str:
    """Read the files, draw, and write the page. Returns a line for the user.

    Args:
        run_dir: the run; with ``compared`` one more to compare.
        compared: runs to compare.
        out: where to write; by default beside the run's files.

    Raises:
        ConfigError: a directory holds no run, runs are of different kinds, the file cannot be written, or a package
            that is an extra is not installed.
    """
    need_extras()
    if out is not None:
        check_named(out, "--out")
    paths = [*([run_dir] if run_dir is not None else []), *compared]
    if not paths:
        raise ConfigError("which run? Name its directory: gradbus report RUN_DIR, or --compare A B")
    runs = [read_run(path) for path in paths]
    default = "report.html" if len(runs) == 1 else f"compared-with-{runs[-1].name}.html"
    page, target = page_of(runs), out or paths[0] / default
    written = write(page, target)
    count = len(page.notes)
    missing = f"; {count} {'thing is' if count == 1 else 'things are'} missing, which it names" if count else ""
    return f"written to {plain_line(str(target))} ({size(written)}){missing}"


def page_of(runs: Sequence[RunFiles]) -> Page:
    """The report on one run, or on several side by side. Raises ConfigError: they are of different kinds."""
    if len(runs) > 1:
        return compare.page_of(runs)
    return federated.page_of(runs[0]) if runs[0].kind == "federated" else parallel.page_of(runs[0])
