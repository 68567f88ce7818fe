"""A process of an elastic data-parallel run, from a configuration file to the end: see docs/elastic.md."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gradbus.actors import ElasticPlace, ElasticWorker, EpochReport
from gradbus.actors.data_parallel.joint_checkpoints import is_held
from gradbus.commands.buses import elastic_bus, open_bus
from gradbus.commands.configured_task import ConfiguredShardTask
from gradbus.commands.files import WorkerFile
from gradbus.commands.lifecycle import Interrupted, off_the_loop, stopping
from gradbus.commands.rank_environment import RankPlace
from gradbus.commands.run.data_parallel import Output, WorkerOutcome
from gradbus.commands.rundir.directory import WorkerDirectory, job_in
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.cores import usable_cores
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger

log = get_logger("cli")

LOOK_S = 1.0
"""Between two looks of a process that waits at whether the run in its directory is finished."""


async def run_elastic_worker(file: WorkerFile, place: RankPlace, output: Output) -> WorkerOutcome | None:
    """Train until the run has ended, or until SIGTERM asks this process to leave, which it does after its step.

    Args:
        file: with ``run_dir``, the same one for all processes.
        place: the number of this process, and that of the founders; 0: it joins.

    Returns:
        None: the run in that directory is finished, and stays as it is.

    Raises:
        As :class:`gradbus.ElasticWorker`; NoData, ConfigError.
    """
    number, founders = place
    if file.run_dir is None:
        raise ConfigError("an elastic run needs run_dir, the same for all processes: set it, or use 'gradbus run'")
    if file.bus.security == "identity":
        raise ConfigError("ranks cannot come and go with bus.security 'identity': use psk, or elastic.min_world=0")
    task = ConfiguredShardTask(file.task)
    await off_the_loop(task.load, "load")
    if "threads" not in file.task.model_fields_set:
        torch.set_num_threads(max(1, usable_cores() // max(founders, file.parallel.elastic.min_world)))
    directory = WorkerDirectory(file.run_dir, number)
    config = directory.settled(file.parallel)
    if directory.is_finished(config):
        output.say(f"finished: all of this run is done, and {directory.path} stays as it is")
        return None
    if founders and number == 0 and goes_on(directory, file.bus.job, config):
        output.say("process 0 joins its run, which goes on: other processes hold its checkpoints")
        founders = 0
    run = _ElasticRun(file.model_copy(update={"parallel": config}), directory, output)
    own = config.replaced("profile.dir", config.profile.dir or directory.path)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(run.write_trace)  # when the others know already how it ended: this takes a while
        bus = await stack.enter_async_context(open_bus(elastic_bus(file.bus), rank=number))
        worker = ElasticWorker(
            ElasticPlace(bus=bus, number=number, founders=founders),
            task,
            own,
            on_open=lambda: run.opened(worker),
        )
        whom = f"with {founders} founders" if founders else "joins"
        output.say(f"process {number}, {whom}: job {file.bus.job}, run directory {directory.path}")
        with leaves_at_sigterm(worker):
            ends = asyncio.create_task(leave_when_finished(worker, directory, config), name="gradbus-finished")
            try:
                await run.train(worker)
            finally:
                ends.cancel()
                await asyncio.wait([ends])
                if not ends.cancelled() and (fault := ends.exception()) is not None:  # the training is worth more
                    log.error("no look at whether the run is finished", path=str(directory.path), error=repr(fault))
    return run.outcome(worker)


def goes_on(directory: WorkerDirectory, job: str, config: DataParallelConfig) -> bool:
    """Whether other processes of this job train in this directory: a supervisor has started process 0 again, with the
    command of its first start. The other founders join by themselves, as they make no first generation."""
    return job_in(directory.path) == job and is_held(config.checkpoint.dir or directory.state)


async def leave_when_finished(worker: ElasticWorker, directory: WorkerDirectory, config: DataParallelConfig) -> None:
    """A process that waits for others would do so in vain, once they have come to the end: it may have come to join too
    late, or been cut off or stopped as they said so."""
    while True:
        await asyncio.sleep(LOOK_S)
        found = worker.generations
        if (found is None or not found.number or found.waits_for) and directory.is_finished(config):
            worker.leave()
            return


class _ElasticRun:
    """Holds what a run leaves in its directory, which the rank 0 of each generation writes."""

    def __init__(self, file: WorkerFile, directory: WorkerDirectory, output: Output) -> None:
        self._file = file
        self._directory = directory
        self._output = output
        self._reports: list[EpochReport] = []
        self._worker: ElasticWorker | None = None  # once it is a rank of a generation
        self._started_s = time.perf_counter()

    def opened(self, worker: ElasticWorker) -> None:
        """This process is a rank of its first generation."""
        self._worker = worker
        if worker.summary.rank == 0:
            try:
                self._directory.write_config(self._file)
            except OSError as error:
                log.warning("settings not written", path=str(self._directory.path), error=error.strerror)
        self._output.begin(worker)

    async def train(self, worker: ElasticWorker) -> None:
        """All epochs, shown and written down."""

        def add(report: EpochReport) -> None:
            self._reports.append(report)
            if worker.summary.rank == 0:
                self._directory.add(report)

        await self._output.train(worker, add)
        # Who was rank 0, and was cut off while others came to the end, must not write over what they have written.
        is_ours = worker.has_ended or not self._directory.is_finished(self._file.parallel)
        if worker.summary.rank == 0 and self._reports and is_ours:
            self._finish(worker)

    def _finish(self, worker: ElasticWorker) -> None:
        generations = worker.generations
        self._directory.finish(
            worker.summary,
            outcome="left" if worker.has_left else "done",
            seconds=time.perf_counter() - self._started_s,
            job=self._file.bus.job,
            generations=0 if generations is None else generations.number,
        )

    def write_trace(self) -> None:
        """Write the timeline of this process, whatever the end; nothing where nothing has begun. Nobody puts those of
        all together: processes end at different times."""
        if self._worker is not None:
            self._worker.profile.write_trace(self._directory.trace)

    def outcome(self, worker: ElasticWorker) -> WorkerOutcome:
        """As it is at the end."""
        return WorkerOutcome(Path(self._directory.path), self._reports, worker.summary, [worker.summary.profile])


@contextlib.contextmanager
def leaves_at_sigterm(worker: ElasticWorker) -> Iterator[None]:
    """The first SIGTERM has this process leave after its step; the second one stops it like Ctrl-C.

    Raises:
        Interrupted: there was a second one.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked: list[bool] = []

    def on_term() -> None:
        if asked:
            task.cancel()
            loop.call_later(0.05, stopping.set)  # as for Ctrl-C, once the cancellation has reached who waits
        asked.append(True)
        log.info("leaving", step=worker.step)
        worker.leave()

    loop.add_signal_handler(signal.SIGTERM, on_term)
    try:
        yield
    except asyncio.CancelledError:
        if len(asked) > 1:
            raise Interrupted(signal.SIGTERM) from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
