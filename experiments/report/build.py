"""``gradbus report``: what a run has left, as one HTML file that opens from the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradbus.experiments.report import compare as report_compare
from gradbus.experiments.report import federated as report_federated
from gradbus.experiments.report import parallel as report_parallel
from gradbus.experiments.report.page import Page, need_extras, write
from gradbus.experiments.run.live import size
from gradbus.experiments.rundir.reading import Run, read_run
from gradbus.runtime.errors import ConfigError


def make_report(run_dir: Path | None, compared: Sequence[Path], out: Path | None) -> str:
    """Read, draw and write. Returns a line for the user.

    Args:
        run_dir: the run; with ``compared`` one more to compare.
        compared: runs to compare.
        out: where to write; by default beside the run's files.

    Raises:
        ConfigError: a directory holds no run, runs are of different kinds, the file cannot be written, or a package
            that is an extra is not installed.
    """
    need_extras()
    paths = [*([run_dir] if run_dir is not None else []), *compared]
    if not paths:
        raise ConfigError("which run? Name its directory: gradbus report RUN_DIR, or --compare A B")
    runs = [read_run(path) for path in paths]
    if len(runs) == 1:
        page, default = page_of(runs[0]), paths[0] / "report.html"
    else:
        page, default = report_compare.page_of(runs), paths[0] / f"compared-with-{runs[-1].name}.html"
    target = out or default
    written = write(page, target)
    missing = f"; {len(page.notes)} things are missing, it names them" if page.notes else ""
    return f"written to {target} ({size(written)}){missing}"


def page_of(run: Run) -> Page:
    """The report on one run."""
    return report_federated.page_of(run) if run.kind == "federated" else report_parallel.page_of(run)
