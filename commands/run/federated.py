"""A controller, and a client, from a configuration file to the end of the run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gradbus.actors import Client, ClientSummary, Controller, Progress, RoundReport, Site
from gradbus.actors.federated.client_names import json_rows
from gradbus.actors.federated.controller.combinations import CheckedChoices, check_choices, check_combination
from gradbus.actors.federated.controller.liveness import MAX_NAMED, announce_run_ended
from gradbus.actors.federated.site.site_rules import check_site, not_its_own
from gradbus.commands.buses import open_bus
from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.files import ClientFile, ControllerFile
from gradbus.commands.lifecycle import off_the_loop
from gradbus.commands.report.metrics_server import client_metrics
from gradbus.commands.rundir.directory import ControllerDirectory, FinishedRun
from gradbus.runtime.config.federated import TRUST_MEANS, FederatedConfig
from gradbus.runtime.errors import ConfigError, ControllerReplaced
from gradbus.runtime.logs import get_logger

if TYPE_CHECKING:
    from gradbus.commands.report.followed import FollowedJob
    from gradbus.commands.report.scalars import Scalars
    from gradbus.commands.run.live import Display

    MakeDisplay = Callable[[Controller | Site], AbstractContextManager[Display[RoundReport] | None]]

log = get_logger("cli")


async def run_controller(
    file: ControllerFile,
    run: ControllerDirectory,
    display: MakeDisplay = lambda controller: contextlib.nullcontext(),
    *,
    say: Callable[[str], None] = lambda text: None,
    scalars: Scalars | None = None,
    followed: FollowedJob | None = None,
    choices: CheckedChoices | None = None,
) -> list[RoundReport]:
    """All rounds that are left, also at a site. Once the run has begun its directory is complete whatever the end; a
    start that fails before leaves the files of an earlier one as they were.

    Args:
        display: makes that of a controller which has not started; by default there is none. say: prints lines for the
            user. scalars, followed: take reports.
        choices: what the rules name, where they are checked by now; None: they are checked here.

    Raises:
        As :meth:`gradbus.Controller.run`, or of :class:`gradbus.actors.Site`; NoData, ConfigError.
    """
    started_s = time.perf_counter()
    choices = checked_choices(file, run, choices)
    config = choices.config
    outcome, progress, task = "failed", Progress(), ConfiguredTask(file.task)
    is_ours = not (run.path / "config.json").exists()  # else it may be a run that this one is not allowed to go on with

    def opened() -> None:
        nonlocal is_ours
        is_ours = True
        in_force = file.model_copy(update={"federated": config, "run_dir": run.path})
        exclude = {} if file.upstream.site is None else {"federated": not_its_own(config)}
        run.write_config(in_force.model_dump(mode="json", exclude=exclude))

    if is_ours:
        opened()
    _tell_trust(file.bus.job, config, say)
    try:
        await off_the_loop(task.load, "load")
        _tell_data(task.note, say)
        async with contextlib.AsyncExitStack() as buses:
            bus = await buses.enter_async_context(open_bus(file.bus))
            controller: Controller | Site
            if file.upstream.site is None:
                controller = Controller(bus, task, choices, on_open=opened)
            else:
                above = await buses.enter_async_context(open_bus(file.upstream.bus))
                controller = Site(above, bus, task, choices, file.upstream, on_open=opened)
            progress = controller.progress
            if followed is not None:
                followed.follow(progress, bus)
            with display(controller) as shown:
                async with contextlib.aclosing(controller.rounds()) as rounds:
                    async for report in rounds:
                        run.add(progress.reports)
                        run.write_names(progress.names)
                        if scalars is not None:
                            scalars.rounds(progress.reports)
                        if shown is not None:
                            shown.done(report)
        outcome = "done"
    except asyncio.CancelledError:
        outcome = "stopped"
        raise
    except ControllerReplaced:
        is_ours, progress = False, Progress()  # by now the run directory is that of the controller in its place
        raise
    finally:
        if followed is not None:
            followed.end(failed=outcome == "failed")
        _write_end(
            run,
            progress,
            is_ours=is_ours,
            outcome=outcome,
            seconds=time.perf_counter() - started_s,
            job=file.bus.job,
            data=task.note,
        )
    return progress.reports


def _write_end(
    run: ControllerDirectory, progress: Progress, *, is_ours: bool, outcome: str, seconds: float, job: str, data: str
) -> None:
    """Write what is known at the end of a run. ``is_ours``: the directory has this run, and no other one."""
    if progress.reports:  # else nothing is known, and what an earlier start wrote stays
        run.add(progress.reports)
    if is_ours and progress.cross_site is not None:
        run.write_cross_site(progress.cross_site)
    if is_ours:
        run.write_names(progress.names)
        run.finish(
            progress.reports,
            outcome=outcome,
            seconds=seconds,
            job=job,
            data=data,
            never_counted=_named(progress),
            client_names=json_rows(progress.names),
            ended_early=progress.ended_early,
        )


def _tell_trust(job: str, config: FederatedConfig, say: Callable[[str], None]) -> None:
    """Tell whom the run trusts, as its first line."""
    trust = config.limits.trust
    say(f"job {job}: trust is {trust}, so {TRUST_MEANS[trust]}")


def _tell_data(note: str, say: Callable[[str], None]) -> None:
    """Tell what has to be known of the data, if anything has."""
    if note:
        log.info("data", note=note)
        say(note)


def checked_choices(
    file: ControllerFile, run: ControllerDirectory, choices: CheckedChoices | None = None
) -> CheckedChoices:
    """Check the rules, with the directories of this run, and make what they name.

    Args:
        choices: of :func:`check_combination`, where that was called; None: it was not.

    Raises:
        ConfigError: such a run cannot be, of whatever data.
    """
    config = file.federated
    if choices is None:
        choices = check_combination(config) if file.upstream.site is None else check_choices(config)
    if config.evaluation.is_on and file.task.task is None and not file.task.validation_share:
        raise ConfigError(
            "federated.evaluation: clients evaluate on samples that they do not train on, and task.validation_share is "
            "0. Set it, as to 0.2, for the controller and its clients"
        )
    choices = replace(choices, config=run.settled(config))
    if file.upstream.site is not None:
        check_site(choices.config, file.upstream)
    return choices


def _named(progress: Progress) -> list[dict[str, Any]]:
    never = list(progress.never_counted.items())[:MAX_NAMED]
    return [{**progress.names.facts(client_id), "reason": reason} for client_id, reason in never]


async def end_again(file: ControllerFile, done: FinishedRun) -> None:
    """The run is finished and stays as it is: end clients that still wait for its controller.

    Raises:
        JobInUse: another controller commands this job by now. BusError: there is no bus.
    """
    async with open_bus(file.bus) as bus:
        await announce_run_ended(
            bus, done.run_id, after=done.incarnation, heartbeat_s=file.federated.clients.heartbeat_s
        )


async def run_client(file: ClientFile, client_id: int | None, name: str = "") -> ClientSummary:
    """Take part until all rounds are done. ``client_id``: None: the controller assigns one to the name.

    Raises:
        As :meth:`gradbus.Client.run`; NoData, ConfigError.
    """
    task = ConfiguredTask(file.task)
    await off_the_loop(task.load, "load")
    given = {"client": client_id, "name": name}
    facts = {key: value for key, value in given.items() if value not in (None, "")}
    log.info("client starts", **facts, job=file.bus.job, data=task.note or None)
    with client_metrics(file.metrics, file.bus.job, client_id, name) as followed:
        async with open_bus(file.bus) as bus:
            client = Client(bus, task, client_id=client_id, name=name, config=file.client)
            followed.client = client
            summary = await client.run()
    facts = {"client": client.client_id, **({"name": client.name} if client.name else {})}
    log.info(
        "client done",
        **facts,
        rounds=summary.rounds,
        refused=summary.refused,
        bytes_up=summary.bytes_up,
        train_s=round(summary.train_s, 3),
    )
    return summary
