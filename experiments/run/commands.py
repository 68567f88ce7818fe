"""The commands ``demo`` and ``controller``: plan, run, and say what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradbus.experiments.amounts import percent, size
from gradbus.experiments.buses import check
from gradbus.experiments.cli.choices import LogLevel, LogStyle, LoopName
from gradbus.experiments.figures.run_accuracy import draw_accuracy
from gradbus.experiments.files import ControllerFile, load
from gradbus.experiments.report.scalars import open_scalars
from gradbus.experiments.run.demo import DemoOptions, plan, run_demo
from gradbus.experiments.run.lifecycle import run_loop
from gradbus.experiments.run.screen import Screen
from gradbus.experiments.rundir.directory import RunDirectory, finished, new_path
from gradbus.runtime.plain_text import plain_line

if TYPE_CHECKING:
    from gradbus.actors import RoundReport


def demo_run(options: DemoOptions, *, live: bool, loop: LoopName, hint: list[str]) -> None:
    """``gradbus demo``. ``hint`` gets what is left if it is stopped."""
    screen = Screen(live=live, level=LogLevel(options.level))
    screen.configure_logs()
    planned = plan(options)
    check(planned.controller.bus)
    with open_scalars(planned.controller.tensorboard) as scalars, RunDirectory(planned.run_dir) as run:
        hint.append(f"What was done until then is in {run.path}")
        bus = planned.controller.bus
        if planned.note:
            screen.say(f"data: {planned.note}")
        screen.say(f"{options.clients} client processes, job {bus.job}, DDS domain {bus.domain} on {bus.interface}")
        reports = run_loop(lambda: run_demo(planned, run, screen, options, scalars), loop)
        _conclude(screen, run, reports, title=bus.job)


def controller_run(
    config: Path, *, run_dir: Path | None, overrides: Sequence[str], data_root: Path | None, live: bool,
    level: LogLevel, style: LogStyle, loop: LoopName, hint: list[str],
) -> None:  # fmt: skip
    """``gradbus controller``. ``hint`` gets how the run can be continued, once that is known."""
    file = load(ControllerFile, config, overrides=overrides, data_root=data_root)
    check(file.bus)
    from gradbus.experiments.run.federated import run_controller  # loads torch

    # Who asks for a style of log lines wants to see them.
    screen = Screen(live=live and style is LogStyle.AUTO, level=level, style=style)
    screen.configure_logs()
    path = run_dir or file.run_dir or new_path(file.bus.job)
    federated = file.federated
    done = finished(path, federated.state_dir or path / "state", federated.rounds) if federated.resume else None
    if done is not None:
        screen.say(
            f"finished: all {done.rounds} rounds of this run are done, and {path} stays as it is. For more rounds: "
            f"gradbus controller {config} --run-dir {path} --set federated.rounds={2 * done.rounds}. "
            f"To begin anew: another --run-dir"
        )
        from gradbus.experiments.run.federated import end_again

        return run_loop(lambda: end_again(file, done.run_id), loop)
    with open_scalars(file.tensorboard) as scalars, RunDirectory(path) as run:
        hint.append(f"To continue: gradbus controller {config} --run-dir {run.path}")
        if screen.table:
            log_file = screen.log_file(run)
            display = screen.display(log_file, file)
            with screen.logging(log_file):
                reports = run_loop(lambda: run_controller(file, run, display, say=screen.say, scalars=scalars), loop)
        else:
            reports = run_loop(lambda: run_controller(file, run, screen.silent(), scalars=scalars), loop)
        _conclude(screen, run, reports, title=file.bus.job)


def _conclude(screen: Screen, run: RunDirectory, reports: Sequence[RoundReport], *, title: str) -> None:
    sums = run.summary
    draw_accuracy(run.path / "accuracy.png", reports, title=title)
    for one in sums["never_counted"]:
        screen.say(f"never counted: client {one['client']}, {plain_line(one['reason'])}")
    screen.say(
        f"done: {sums['rounds']} rounds, accuracy {percent(sums['accuracy'])}, "
        f"up {size(sums['bytes_up'])}, down {size(sums['bytes_down'])}; run directory {run.path}"
    )
