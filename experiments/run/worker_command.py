"""The command ``worker``: read what it is told, run, and say what came of it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gradbus.experiments.amounts import percent, size
from gradbus.experiments.buses import check
from gradbus.experiments.cli.choices import LogLevel, LogStyle, LoopName
from gradbus.experiments.figures.run_accuracy import draw_epochs
from gradbus.experiments.files import WorkerFile, load
from gradbus.experiments.report.scalars import open_scalars
from gradbus.experiments.run.lifecycle import run_loop
from gradbus.experiments.run.logfile import LogFile
from gradbus.experiments.run.rank_environment import Place, find_place
from gradbus.experiments.run.screen import Screen
from gradbus.experiments.run.worker_live import EpochLines, EpochTable, NoDisplay, RankLines
from gradbus.experiments.rundir.directory import new_path, open_log
from gradbus.runtime.logs import get_logger
from gradbus.runtime.tasks import single_error

if TYPE_CHECKING:
    from gradbus.actors import Worker
    from gradbus.experiments.run.data_parallel import Outcome, Telling

log = get_logger("cli")


def worker_run(
    config: Path, *, rank: int | None, world: int | None, run_dir: Path | None, overrides: Sequence[str],
    data_root: Path | None, live: bool, level: LogLevel | None, style: LogStyle, loop: LoopName, hint: list[str],
) -> None:  # fmt: skip
    """``gradbus worker``. ``hint`` gets how the run can be continued, once that is known."""
    file = load(WorkerFile, config, overrides=overrides, data_root=data_root, defaults=_from_torchrun())
    place = find_place(rank=rank, world=world, file_rank=file.rank, file_world=file.world)
    check(file.bus, rank=place.rank)
    run_dir = run_dir or file.run_dir
    if place.rank == 0 and run_dir is None:
        run_dir = new_path(file.bus.job)
    _Command(file.model_copy(update={"run_dir": run_dir}), place, live, level, style, hint).run(loop)


def _from_torchrun() -> dict[str, object]:
    """Two launches at once must not meet: where torchrun has a name for a launch, the job gets it."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return {} if name == "none" else {"bus": {"job": re.sub(r"[^A-Za-z0-9._-]", "-", f"torchrun-{name}")[:64]}}


class _Command:
    def __init__(
        self, file: WorkerFile, place: Place, live: bool, level: LogLevel | None, style: LogStyle, hint: list[str]
    ) -> None:
        self._file = file
        self._place = place
        self._hint = hint
        # Rank 0 tells its user of each epoch, and the others of their own part: the log need not do so again. Where the
        # others log JSON, that has an event for each epoch, and lines of text would be in the way of who reads it.
        is_json = style is LogStyle.JSON or (style is LogStyle.AUTO and not sys.stderr.isatty())
        self._tells = place.rank == 0 or not is_json
        table = Screen(live=live and place.rank == 0 and style is LogStyle.AUTO).table
        usual = LogLevel.WARNING if self._tells and not table else LogLevel.INFO
        self._screen = Screen(live=table, level=level or usual, style=style)

    def run(self, loop: LoopName) -> None:
        screen = self._screen
        screen.configure_logs()
        from gradbus.experiments.run.data_parallel import Telling  # loads torch

        if self._place.rank != 0:
            shown = RankLines(screen.console, self._file.worker.epochs) if self._tells else NoDisplay()
            # Started by hand it says what it waits for, too; among the lines of all ranks rank 0 says that for all.
            says = self._tells and screen.style is LogStyle.AUTO
            quiet = Telling(display=lambda worker: shown)
            self._run(replace(quiet, say=screen.say) if says else quiet, loop)
            return
        self._hint.append(f"To continue: the same command for all ranks, with --run-dir {self._file.run_dir}")
        with open_scalars(self._file.tensorboard) as scalars:
            if screen.table:
                assert self._file.run_dir is not None
                with open_log(self._file.run_dir, "rank-0.log") as file:
                    log = LogFile(file)
                    with screen.logging(log):
                        outcome = self._run(Telling(screen.say, partial(self._table, log), scalars), loop)
            else:
                lines = EpochLines(screen.console, self._file.worker.epochs)
                outcome = self._run(Telling(screen.say, lambda worker: lines, scalars), loop)
        if outcome is not None:
            self._conclude(outcome)

    def _run(self, telling: Telling, loop: LoopName) -> Outcome | None:
        from gradbus.experiments.run.data_parallel import run_worker

        try:
            return run_loop(lambda: run_worker(self._file, self._place, telling), loop)
        except ExceptionGroup as group:
            raise single_error(group) from None

    def _table(self, log: LogFile, worker: Worker) -> EpochTable:
        return EpochTable(
            self._screen.console, worker, log, f"job {self._file.bus.job}", self._file.worker.epochs
        )  # fmt: skip

    def _conclude(self, outcome: Outcome) -> None:
        from gradbus.experiments.report.profile_table import summary_table

        summary, screen = outcome.summary, self._screen
        picture = outcome.path / "accuracy.png"
        try:
            draw_epochs(picture, outcome.reports, title=self._file.bus.job)
        except (OSError, ValueError) as error:  # the run is done, with or without it
            log.warning("picture not drawn", path=str(picture), error=str(error))
        width = None if screen.console.is_terminal else max(120, screen.console.width)  # a file has none
        screen.console.print(summary_table(outcome.profiles), width=width)
        screen.say(
            f"done: {summary.epochs} epochs, {summary.steps} steps, accuracy {percent(summary.accuracy)}, "
            f"sent {size(summary.bytes_out)}, received {size(summary.bytes_in)} by rank 0; run directory "
            f"{outcome.path}"
        )
