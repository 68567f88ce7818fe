"""A rank of a data-parallel run, from a configuration file to the end."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradbus.actors import EpochReport, Worker, WorkerSummary
from gradbus.actors.data_parallel.rank import Rank
from gradbus.actors.parameter_server.worker import ParameterServerWorker
from gradbus.commands.buses import open_bus, place_of
from gradbus.commands.configured_task import ConfiguredShardTask
from gradbus.commands.files import WorkerFile
from gradbus.commands.lifecycle import off_the_loop
from gradbus.commands.rank_environment import RankPlace
from gradbus.commands.report.followed import FollowedRank
from gradbus.commands.report.scalars import Scalars
from gradbus.commands.run.live import Display
from gradbus.commands.run.parameter_server import PLACE, join_network
from gradbus.commands.rundir.directory import WorkerDirectory
from gradbus.commands.rundir.traces import merge_traces
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.cores import usable_cores, usable_cpus
from gradbus.runtime.errors import BarrierTimeout, ConfigError, PeerLost
from gradbus.runtime.logs import get_logger
from gradbus.runtime.profiling.summary import ProfileSummary

log = get_logger("cli")


@dataclass(frozen=True, slots=True)
class Output:
    """The output for the user: lines, a display for a worker that has not started, scalars on rank 0; who follows."""

    say: Callable[[str], None] = lambda text: None
    display: Callable[[Rank], Display[EpochReport]] = lambda worker: Display()
    scalars: Scalars | None = None
    followed: FollowedRank = field(default_factory=FollowedRank)

    async def train(self, worker: Rank, add: Callable[[EpochReport], object]) -> None:
        """All epochs of a worker, shown to whoever follows them. ``add``: takes their reports, too."""
        self.followed.worker = worker
        with self.display(worker) as shown:
            worker.on_progress = shown.progressed
            async with contextlib.aclosing(worker.epochs()) as epochs:
                async for report in epochs:
                    add(report)
                    if self.scalars is not None:
                        self.scalars.epoch(report)
                    self.followed.epoch(report)
                    shown.done(report)

    def begin(self, worker: Rank) -> None:
        """The worker has begun, or goes on: have its scalars written."""
        if self.scalars is not None:
            worker.profile.on_window = self.scalars.window
            self.scalars.begin(worker.step)


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """The end of a run: its directory, on rank 0 all epochs, the summary of this rank, and the profiles of all."""

    path: Path
    reports: list[EpochReport]
    summary: WorkerSummary
    profiles: list[ProfileSummary]


async def run_worker(file: WorkerFile, place: RankPlace, output: Output) -> WorkerOutcome | None:
    """All epochs that are left. Once they have begun the run directory is complete whatever the end; a start that comes
    to nothing leaves the directory of an earlier run as it was.

    Args:
        file: ``run_dir`` is given for rank 0.

    Returns:
        None: the run in that directory is finished, and stays as it is.

    Raises:
        As :func:`gradbus.join_group` and :meth:`gradbus.Worker.run`; NoData, ConfigError.
    """
    rank, world = place
    directory = None
    if rank == 0:
        assert file.run_dir is not None
        directory = WorkerDirectory(file.run_dir, rank)
    task = ConfiguredShardTask(file.task)
    await off_the_loop(task.load, "load")
    if task.note:
        log.info("data", note=task.note)
        output.say(f"data: {task.note}")
    rules = file.parallel
    run: _Run | None = None
    try:
        async with open_bus(file.bus, rank=rank) as bus:
            if world > 1:
                meeting = place_of(file.bus)
                log.info("waiting for the others", rank=rank, world=world, job=file.bus.job, place=meeting)
                output.say(f"waiting for {world - 1} more of {world} ranks: job {file.bus.job}, {meeting}")
            async with join_group(
                bus,
                rank=rank,
                world=world,
                timeout_s=rules.timeouts.join_s,
                collective_timeout_s=rules.timeouts.collective_s,
            ) as group:
                met = await _meet(group, file, task, directory)
                output.say(met.text)
                async with contextlib.AsyncExitStack() as servers:
                    network = None
                    if file.parameter_server.servers:
                        output.say(f"waiting for {file.parameter_server.servers} parameter servers")
                        network = await servers.enter_async_context(join_network(bus, file, rank, world))
                        told = {"directory": met.directory.invitation(), "is_finished": met.is_finished}
                        await network.broadcast_object(PLACE, told if rank == 0 else None, root=0)
                    if met.is_finished:
                        return None
                    run = _Run(file, group, task, met.directory, output, network)
                    await run.train()
    finally:
        if run is not None:  # when the others know already how it ended: this takes a while
            run.finish()
    return run.outcome


class _Run:
    def __init__(
        self,
        file: WorkerFile,
        group: Group,
        task: ConfiguredShardTask,
        directory: WorkerDirectory,
        output: Output,
        network: Group | None = None,
    ) -> None:
        """``network``: of all workers and parameter servers, where there are any."""
        config = directory.settled(file.parallel)
        self._file = file.model_copy(update={"parallel": config, "run_dir": directory.path, "world": group.world})
        self._group = group
        self._task = task
        self._directory = directory
        self._output = output
        own = config.replaced("profile.dir", config.profile.dir or directory.path)
        self._worker: Rank
        if network is None:
            self._worker = Worker(group, task, own, on_open=self._opened)
        else:
            servers = file.parameter_server
            self._worker = ParameterServerWorker(group, network, task, own, servers, on_open=self._opened)
        self._has_opened = False
        self._is_first = group.rank == 0
        self._started_s = time.perf_counter()
        self._end = "failed"
        self._profiles: list[ProfileSummary] = []

    @property
    def outcome(self) -> WorkerOutcome:
        return WorkerOutcome(self._directory.path, self._directory.reports(), self._worker.summary, self._profiles)

    async def train(self) -> None:
        """All epochs; then find out where the time went, on all ranks."""
        try:
            await self._output.train(self._worker, self._add)
            await off_the_loop(self._write_trace, "trace")
            if isinstance(self._worker, ParameterServerWorker):
                self._profiles = self._worker.profiles
                with contextlib.suppress(PeerLost, BarrierTimeout):  # the run may have gone on without some worker
                    await self._group.barrier("run/traces")
            else:
                profiles = await self._group.all_gather_object("run/profile", self._worker.summary.profile.to_json())
                self._profiles = [ProfileSummary.from_json(values) for values in profiles]
            if self._is_first:  # all have written theirs
                await off_the_loop(self._merge_traces, "trace")
            self._end = "done"
        except asyncio.CancelledError:
            self._end = "stopped"
            raise

    def _add(self, report: EpochReport) -> None:
        if self._is_first:
            self._directory.add(report)

    def _opened(self) -> None:
        """Before that, the directory may hold a run that this one is not allowed to go on with."""
        self._has_opened = True
        if self._is_first:
            self._directory.write_config(self._file)
        self._output.begin(self._worker)

    def _write_trace(self) -> None:
        self._worker.profile.write_trace(self._directory.trace)

    def _merge_traces(self) -> None:
        try:
            merge_traces(self._directory.path, self._group.world)
        except OSError as error:  # the disk is full: the run is done all the same
            log.warning("trace not written", path=str(self._directory.path / "trace.json"), error=str(error))

    def finish(self) -> None:
        """Write what is known, whatever the end; nothing where nothing has begun."""
        if not self._has_opened:
            return
        if self._end != "done":
            self._write_trace()
        if not self._is_first:
            return
        self._directory.finish(
            self._worker.summary,
            outcome=self._end,
            seconds=time.perf_counter() - self._started_s,
            profiles=self._profiles,
            job=self._file.bus.job,
            data=self._task.note,
        )


@dataclass(frozen=True, slots=True)
class _Met:
    directory: WorkerDirectory
    text: str
    is_finished: bool


async def _meet(group: Group, file: WorkerFile, task: ConfiguredShardTask, directory: WorkerDirectory | None) -> _Met:
    """Find out whether the ranks fit together, which cores this one may use, and where it writes."""
    hello = {
        "machine": _machine(), "cpus": usable_cpus(), "facts": task.facts(),
        "directory": None if directory is None else directory.invitation(),
        "is_finished": directory is not None
        and directory.is_finished(file.parallel, "server-0" if file.parameter_server.servers else "rank-0"),
    }  # fmt: skip
    hellos = await group.all_gather_object("run/hello", hello, timeout_s=file.parallel.timeouts.join_s)
    check_equal_facts([hello["facts"] for hello in hellos])
    machines = [hello["machine"] for hello in hellos]
    own = hellos[group.rank]
    sharing = sum(
        hello["machine"] == own["machine"] and not set(hello["cpus"]).isdisjoint(own["cpus"]) for hello in hellos
    )
    if "threads" not in file.task.model_fields_set:
        torch.set_num_threads(max(1, usable_cores() // sharing))
    if directory is None:
        directory = WorkerDirectory.meet(hellos[0]["directory"], file.run_dir, group.rank)
    if hellos[0]["is_finished"]:
        return _Met(
            directory,
            f"finished: all of this run is done, and {directory.path} stays as it is. For more: the same command for "
            f"all ranks, with a larger parallel.epochs ({file.parallel.epochs}) or parallel.max_steps "
            f"({file.parallel.max_steps or 'none'}). To begin anew: another --run-dir",
            is_finished=True,
        )
    many = len(set(machines))
    where = f"on {many} machines" if many > 1 else "on this machine"
    threads = torch.get_num_threads()
    return _Met(
        directory,
        f"{group.world} {'ranks' if group.world > 1 else 'rank'} {where}, here with {threads} "
        f"{'threads' if threads > 1 else 'thread'} each"
        f"{', on cores of its own' if sharing == 1 < machines.count(own['machine']) else ''}; "
        f"run directory {directory.path}",
        is_finished=False,
    )


def check_equal_facts(facts: Sequence[dict[str, Any]]) -> None:
    """Raises ConfigError: a rank has other data or batches than rank 0."""
    for rank, own in enumerate(facts):
        for key, value in own.items():
            if value != facts[0].get(key):
                raise ConfigError(
                    f"{key}: rank {rank} has {value!r}, rank 0 has {facts[0].get(key)!r}. All ranks need the same data "
                    f"and batches: name them in the configuration, with the same task.data_options, instead of 'auto'"
                )


def _machine() -> str:
    """Equal for two processes that share their cores, whatever containers they are in."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return platform.node()
