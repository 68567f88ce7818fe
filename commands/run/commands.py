"""The commands ``demo``, ``controller``, ``aggregator``, ``worker`` and ``parameter-server``: read the settings, run,
print the outcome.

What takes seconds to import (torch) is imported once the settings are known to be right.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradbus.commands.amounts import size
from gradbus.commands.buses import check, place_of
from gradbus.commands.choices import BindMode, LoopName
from gradbus.commands.files import AggregatorFile, ControllerFile, WorkerFile, load
from gradbus.commands.lifecycle import if_stopped, run_loop
from gradbus.commands.rank_environment import RankPlace, find_number, find_place, find_world
from gradbus.commands.report.metrics_server import controller_metrics, rank_metrics
from gradbus.commands.report.run_accuracy import draw_epochs, draw_rounds
from gradbus.commands.report.scalars import open_scalars
from gradbus.commands.report.shown_metrics import MAX_SHOWN_METRICS
from gradbus.commands.run.cluster import Role, find_role
from gradbus.commands.run.console import Screen
from gradbus.commands.run.continuation import command_to_continue
from gradbus.commands.run.cores import as_ranges, bind
from gradbus.commands.run.demo import DemoOptions, plan, run_demo
from gradbus.commands.run.live import (
    Display,
    EpochTable,
    Lines,
    cross_site_table,
    epoch_line,
    progress_line,
    quality,
    round_display,
)
from gradbus.commands.rundir.directory import ControllerDirectory, finished, new_path, open_log
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.launcher_environment import adopt_launcher, launch_name
from gradbus.runtime.logs import get_logger
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.tasks import single_error

if TYPE_CHECKING:
    from gradbus.actors import RoundReport
    from gradbus.actors.data_parallel.report import EpochReport
    from gradbus.commands.run.data_parallel import WorkerOutcome

log = get_logger("cli")


# -- a federated run ---------------------------------------------------------------------------------------------------


class VirtualOptions(NamedTuple):
    """Is given by ``gradbus virtual``, for :class:`.virtual.VirtualClients`."""

    clients: int
    fraction: float | None
    processes: int
    ray: str | None = None
    gpus: float = 0.0
    full_traceback: bool = False

    @property
    def words(self) -> list[object]:
        """Return the options that differ from the defaults, as on a command line."""
        given = {
            "--clients": self.clients, "--fraction": self.fraction, "--processes": self.processes or None,
            "--ray": self.ray, "--gpus": self.gpus or None,
        }  # fmt: skip
        return [word for name, value in given.items() if value is not None for word in (name, value)]


def demo_run(options: DemoOptions, screen: Screen) -> None:
    """``gradbus demo``."""
    screen.configure_logs()
    planned = plan(options)
    check(planned.controller.bus)
    bus = planned.controller.bus
    with (
        open_scalars(planned.controller, planned.run_dir) as scalars,
        controller_metrics(planned.controller.metrics, bus.job, planned.run_dir) as followed,
        ControllerDirectory(planned.run_dir) as run,
    ):
        if_stopped.append(lambda: f"What was done until then is in {run.path}")
        if planned.note:
            screen.say(f"data: {planned.note}")
        screen.say(f"{options.clients} client processes, job {bus.job}, {place_of(bus)}")
        reports = run_loop(lambda: run_demo(planned, run, screen, options, scalars, followed), options.loop)
        _conclude_rounds(screen, run, reports, title=bus.job)


def controller_run(
    config: Path,
    overrides: Sequence[str],
    data_root: Path | None,
    screen: Screen,
    loop: LoopName,
    *,
    virtual: VirtualOptions | None = None,
) -> None:
    """``gradbus controller``, and ``gradbus virtual``, which brings its clients."""
    file = load(ControllerFile, config, overrides=overrides, data_root=data_root)
    check(file.bus)
    clients = choices = None
    if virtual is not None:
        from gradbus.commands.run.virtual import VirtualClients, pool_options

        pool = pool_options(virtual.processes, virtual.ray, virtual.gpus)
        clients = VirtualClients(virtual.clients, virtual.fraction, pool, virtual.full_traceback)
        choices = clients.settle(file)
        file = file.model_copy(update={"federated": choices.config})
    command, options = ("controller", []) if virtual is None else ("virtual", virtual.words)
    is_site = file.upstream.site is not None
    if is_site:
        check(file.upstream.bus)
    from gradbus.actors.virtual.simulation import run_beside
    from gradbus.commands.run.federated import end_again, run_controller

    screen.configure_logs()
    path = file.run_dir or new_path(file.bus.job)
    to_continue = partial(
        command_to_continue, command, config, overrides=overrides, data_root=data_root, options=options
    )
    federated = file.federated
    done = (
        finished(path, federated.checkpoint.dir or path / "state", federated.rounds)
        if federated.checkpoint.resume and not is_site  # of its rounds, another level decides how many there are
        else None
    )
    if done is not None:
        screen.say(
            f"finished: all {done.rounds} rounds of this run are done, and {path} stays as it is. For more rounds: "
            f"{to_continue(path, rounds=2 * done.rounds)}. To begin anew: another --run-dir"
        )
        return run_loop(lambda: end_again(file, done), loop)
    with contextlib.ExitStack() as stack:
        hosted = None
        # First: processes that are forked have none of the threads and sockets of what follows.
        if clients is not None and choices is not None:
            hosted = stack.enter_context(clients.open_pool(file, choices, path / "clients"))
        scalars = followed = None
        if file.has_trackers:
            scalars = stack.enter_context(open_scalars(file, path))
        if file.metrics.port is not None:
            followed = stack.enter_context(controller_metrics(file.metrics, file.bus.job, path))
        run = stack.enter_context(ControllerDirectory(path))
        if_stopped.append(lambda: f"To continue: {to_continue(run.path)}")

        def serve(*shown: Any, **more: Any) -> Coroutine[Any, Any, list[RoundReport]]:
            serving = run_controller(file, run, *shown, scalars=scalars, followed=followed, choices=choices, **more)
            return serving if hosted is None else run_beside(serving, hosted.run())

        if screen.table:
            log_file = screen.log_file(run.log)
            display = round_display(screen, log_file, f"job {file.bus.job}", federated.clients.num or 0)
            with screen.logging_to(log_file):
                reports = run_loop(lambda: serve(display, say=screen.say), loop)
        else:  # each round is a line of the log
            reports = run_loop(serve, loop)
        _conclude_rounds(screen, run, reports, title=file.bus.job)


def _conclude_rounds(screen: Screen, run: ControllerDirectory, reports: Sequence[RoundReport], *, title: str) -> None:
    sums = run.summary
    if not reports:
        screen.say(f"done: this site has counted in no round; run directory {run.path}")
        return
    last = next((report for report in reversed(reports) if report.eval_loss is not None), reports[-1])
    try:
        draw_rounds(run.path, reports, title=title)
    except (OSError, ValueError) as error:  # the run is done, with or without it
        log.warning("picture not drawn", path=str(run.path), error=str(error))
    if run.cross_site is not None:
        width = None if screen.console.is_terminal else max(120, screen.console.width)  # a file has none
        for name in run.cross_site.names()[:MAX_SHOWN_METRICS]:
            screen.say(f"{plain_line(name)} of each model (rows) on the data of each client (columns):")
            screen.console.print(cross_site_table(run.cross_site, name), width=width)
    for one in sums["never_counted"]:
        screen.say(f"never counted: client {one['client']}, {plain_line(one['reason'])}")
    if early := sums.get("ended_early"):
        screen.say(f"ended early: {plain_line(early)}")
    screen.say(
        f"done: {sums['rounds']} rounds, {quality(last)}, "
        f"up {size(sums['bytes_up'])}, down {size(sums['bytes_down'])}; run directory {run.path}"
    )


# -- an aggregator -----------------------------------------------------------------------------------------------------


def aggregator_run(config: Path | None, overrides: Sequence[str], screen: Screen, loop: LoopName) -> None:
    """``gradbus aggregator``."""
    file = load(AggregatorFile, config, overrides=overrides)
    jobs = file.aggregator.jobs or {file.bus.job: file.aggregator.world}
    for world in jobs.values():
        check(file.bus, rank=world + file.aggregator.node)
    screen.configure_logs()
    from gradbus.commands.run.aggregator import run_aggregator

    held = size(4 * file.aggregator.slots * file.aggregator.block_elems)
    names = ", ".join(f"{job} of {world} workers" for job, world in jobs.items())
    which = f", node {file.aggregator.node} of {file.aggregator.nodes}," if file.aggregator.nodes > 1 else ""
    screen.say(f"aggregator{which} with {file.aggregator.slots} slots ({held}) for {names}")
    try:
        run_loop(lambda: run_aggregator(file), loop)
    except ExceptionGroup as group:
        raise single_error(group) from None
    screen.say("done: the workers of all jobs have left")


# -- a rank of a data-parallel run -------------------------------------------------------------------------------------


class PlaceOptions(NamedTuple):
    """Holds what the options say of the place of a process."""

    rank: int | None = None
    world: int | None = None
    job_name: str | None = None
    task_index: int | None = None
    joins: bool = False


def worker_run(
    config: Path,
    place: PlaceOptions,
    overrides: Sequence[str],
    data_root: Path | None,
    screen: Screen,
    loop: LoopName,
    binding: BindMode,
) -> None:
    """``gradbus worker``."""
    adopt_launcher()
    role = None if place.rank is not None else find_role(place.job_name, place.task_index)
    rank, world = place.rank, place.world
    if role is not None:
        rank, world = role.index, world if world is not None else role.workers
        overrides = _with_servers(role, overrides)
    file = load(WorkerFile, config, overrides=overrides, data_root=data_root, defaults=_from_launcher())
    _check_servers(role, file, overrides)
    if role is not None and role.kind == "server":
        return _serve(file, role.index, find_world(world=world, file_world=file.world), screen, loop)
    found = _rank_place(file, rank, world, joins=place.joins)
    leads = found.rank == 0
    check(file.bus, rank=found.rank)
    path = file.run_dir or (new_path(file.bus.job) if leads else None)
    file = file.model_copy(update={"run_dir": path})
    # Rank 0 prints a line for each epoch, and the others their own part: the log need not do so again. Where the others
    # log JSON, that has an event for each epoch, and lines of text would be in the way of its reader.
    is_json = screen.style == "json" or (screen.style == "auto" and not sys.stderr.isatty())
    prints = leads or not is_json
    screen = replace(screen, live=screen.live and leads)
    screen = replace(screen, level=screen.level or ("warning" if prints and not screen.table else "info"))
    screen.configure_logs()
    bound = bind(binding, file.bus.interface)
    log.info("cores", bound=as_ranges(bound.cpus) or "none", why=bound.why)
    from gradbus.commands.run.data_parallel import Output, run_worker
    from gradbus.commands.run.elastic import run_elastic_worker

    run_rank = run_elastic_worker if file.parallel.elastic.is_on else run_worker

    def run(output: Output) -> WorkerOutcome | None:
        try:
            with rank_metrics(file.metrics, file.bus.job, found.rank) as followed:
                return run_loop(lambda: run_rank(file, found, replace(output, followed=followed)), loop)
        except ExceptionGroup as group:
            raise single_error(group) from None

    epochs = file.parallel.epochs
    lines: Display[EpochReport] = Display()
    if prints:
        lines = Lines(
            screen.console,
            lambda report: epoch_line(report, epochs, of_all=leads),
            lambda report: progress_line(report, epochs),
        )
    if path is None or not leads:
        # Started by hand it prints what it waits for, too; under a launcher rank 0 prints that for all.
        by_hand = prints and screen.style == "auto"
        run(Output(say=screen.say, display=lambda _: lines) if by_hand else Output(display=lambda _: lines))
        return
    if_stopped.append(lambda: f"To continue: the same command for all ranks, with --run-dir {path}")
    with open_scalars(file, path) as scalars:
        if screen.table:
            with open_log(path, "rank-0.log") as stream:
                log_file = screen.log_file(stream)
                title = f"job {file.bus.job}"
                with screen.logging_to(log_file):
                    outcome = run(
                        Output(
                            screen.say,
                            lambda worker: EpochTable(screen.console, log_file, title, worker, epochs),
                            scalars,
                        )
                    )
        else:
            outcome = run(Output(screen.say, lambda _: lines, scalars))
    if outcome is not None:
        whom = "process 0 in all its generations" if file.parallel.elastic.is_on else "rank 0"
        _conclude_epochs(screen, outcome, title=file.bus.job, whom=whom)


def _rank_place(file: WorkerFile, rank: int | None, world: int | None, *, joins: bool) -> RankPlace:
    """Rank and world of a process; its world is 0 where it joins an elastic run. Raises ConfigError."""
    is_elastic = file.parallel.elastic.is_on
    if joins and not is_elastic:
        raise ConfigError("--join is for elastic runs: set parallel.elastic.min_world, the ranks that are enough")
    if is_elastic and file.parameter_server.servers:
        raise ConfigError("parallel.elastic is not for parameter servers: set parallel.elastic.min_world=0")
    if joins:
        return RankPlace(find_number(rank=rank, file_rank=file.rank), 0)
    return find_place(rank=rank, world=world, file_rank=file.rank, file_world=file.world)


def server_run(
    config: Path,
    index: int | None,
    world: int | None,
    overrides: Sequence[str],
    data_root: Path | None,
    screen: Screen,
    loop: LoopName,
) -> None:
    """``gradbus parameter-server``. ``index``: None: as TF_CONFIG says. ``world``: number of workers."""
    role = None if index is not None else find_role()
    if index is None:
        if role is None or role.kind != "server":
            raise ConfigError("no index is given. Give --index, or TF_CONFIG with a task of type ps")
        index, world = role.index, world if world is not None else role.workers
        overrides = _with_servers(role, overrides)
    file = load(WorkerFile, config, overrides=overrides, data_root=data_root, defaults=_from_launcher())
    _serve(file, index, find_world(world=world, file_world=file.world), screen, loop)


def _with_servers(role: Role, overrides: Sequence[str]) -> Sequence[str]:
    """The number of servers in TF_CONFIG is stronger than the file, and weaker than an option."""
    return [f"parameter_server.servers={role.servers}", *overrides] if role.servers else overrides


def _check_servers(role: Role | None, file: WorkerFile, overrides: Sequence[str]) -> None:
    """Raises ConfigError: the file has servers, a cluster has none, and no option says which is meant."""
    servers, key = file.parameter_server.servers, "parameter_server.servers"
    if role is not None and role.servers == 0 and servers and not any(one.startswith(f"{key}=") for one in overrides):
        raise ConfigError(
            f"$TF_CONFIG: the cluster has no ps, but {key} is {servers}. List the addresses of the parameter servers "
            f"in cluster.ps, or say how many there are: --set {key}={servers}, or --set {key}=0 for none"
        )


def _serve(file: WorkerFile, index: int, workers: int, screen: Screen, loop: LoopName) -> None:
    servers = file.parameter_server.servers
    if not servers:
        raise ConfigError("parameter_server.servers is 0, so there is no server to start: set it to their number")
    if not 0 <= index < servers:
        raise ConfigError(
            f"the index of a parameter server must be 0 to {servers - 1}, for there are {servers}; got {index}"
        )
    check(file.bus, rank=workers + index)
    screen.configure_logs()
    from gradbus.commands.run.parameter_server import run_server

    try:
        summary = run_loop(lambda: run_server(file, index, workers, screen.say), loop)
    except ExceptionGroup as group:
        raise single_error(group) from None
    if summary is None:
        screen.say("finished: all of this run is done already")
        return
    stale = f", staleness {summary.staleness_mean:.1f} on average, {summary.staleness_max} at most"
    lost = f", without workers {', '.join(map(str, summary.lost))}" if summary.lost else ""
    screen.say(
        f"done: parameter server {index} of {servers}, {summary.steps} steps, {summary.updates} updates of "
        f"{size(summary.held_bytes)}{stale if file.parameter_server.mode == 'asynchronous' else ''}, "
        f"{summary.refused} gradients refused{lost}; received {size(summary.bytes_in)}, sent {size(summary.bytes_out)}"
    )


def _from_launcher() -> dict[str, object]:
    """Two launches at once must not meet: where torchrun or Slurm has a name for a launch, the job gets it."""
    name = launch_name(os.environ)
    return {} if name is None else {"bus": {"job": name}}


def _conclude_epochs(screen: Screen, outcome: WorkerOutcome, *, title: str, whom: str) -> None:
    """Print where the time went, and the last line. ``whom``: has sent and received what that line says."""
    from gradbus.commands.report.profile_table import summary_table

    summary = outcome.summary
    try:
        draw_epochs(outcome.path, outcome.reports, title=title)
    except (OSError, ValueError) as error:  # the run is done, with or without it
        log.warning("picture not drawn", path=str(outcome.path), error=str(error))
    width = None if screen.console.is_terminal else max(120, screen.console.width)  # a file has none
    screen.console.print(summary_table(outcome.profiles), width=width)
    screen.say(
        f"done: {summary.epochs} epochs, {summary.steps} steps, {quality(summary)}, "
        f"sent {size(summary.bytes_out)}, received {size(summary.bytes_in)} by {whom}; run directory {outcome.path}"
    )
