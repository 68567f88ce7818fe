"""Controllers inside another asyncio service, here a web service: it shows how the rounds go, and outlives them.

    python -m gradbus.experiments.examples.embed_aiohttp --config controller.conf.json --job mnist --port 8080

``GET /status`` is the state of each job in JSON, ``/metrics`` the same for Prometheus, and ``/healthz`` answers 503
when a controller has failed. It needs an application whose ``cleanup_ctx`` has :func:`controller_context`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

import gradbus
from gradbus.actors import FederatedTask, Progress
from gradbus.commands.buses import check, open_bus
from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.files import ControllerFile, load
from gradbus.commands.lifecycle import guard, say
from gradbus.metrics import JobCollector, Totals
from gradbus.runtime import logs
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import json_text

log = logs.get_logger("service")


class ControllerJob:
    """One job: a bus, a controller on it, and their state, also when they have ended.

    ``outcome``: running, done, stopped or failed. ``error``: why it failed, else None.
    """

    def __init__(
        self,
        name: str,
        task: FederatedTask,
        config: gradbus.FederatedConfig,
        connection: AbstractAsyncContextManager[gradbus.Bus],
    ) -> None:
        self.name = name
        self.progress = Progress(rounds=config.rounds, minimum=config.clients.min)
        self.outcome = "running"
        self.error: BaseException | None = None
        self._task = task
        self._config = config
        self._connection = connection
        self._bus: gradbus.Bus | None = None
        self._totals = Totals()

    async def run(self) -> None:
        """All rounds. Whatever goes wrong is kept here: the host of the controller goes on."""
        try:
            async with self._connection as bus:
                self._bus = bus
                controller = gradbus.Controller(bus, self._task, self._config)
                self.progress = controller.progress
                await controller.run()
            self.outcome = "done"
        except asyncio.CancelledError:
            self.outcome = "stopped"
            raise
        except Exception as error:
            self.outcome, self.error = "failed", error
            log.exception("controller failed", job=self.name)

    @property
    def phase(self) -> str:
        """The controller's phase while it runs; ``ending`` while it takes its leave; then how it ended."""
        if not self.running:
            return self.outcome
        return "ending" if self.progress.phase in ("done", "failed") else self.progress.phase

    @property
    def running(self) -> bool:
        return self.outcome == "running"

    @property
    def failed(self) -> bool:
        return self.outcome == "failed"

    @property
    def reason(self) -> str | None:
        """Why it failed, in one line; None if it did not."""
        return None if self.error is None else f"{type(self.error).__name__}: {self.error}"

    @property
    def totals(self) -> Totals:
        return self._totals.follow(self.progress.reports)

    @property
    def rejected(self) -> Mapping[str, int]:
        return {} if self._bus is None else self._bus.rejected

    def status(self) -> dict[str, Any]:
        """As a JSON object."""
        progress = self.progress
        return {
            "phase": self.phase,
            "round": progress.round_id,
            "rounds": progress.rounds,
            "ready": progress.ready,
            "expected": progress.expected,
            "min": progress.minimum,
            "clients": list(progress.clients) if self.running else [],
            "last_report": progress.reports[-1].to_json() if progress.reports else None,
            "dropped": dict(self.totals.dropped),
            "rejected": dict(self.rejected),
            "error": self.reason,
        }


class FederatedService:
    """Any number of jobs on one event loop, for as long as their host lives; those that have ended stay.

    ``registry``: their metrics, apart from those of the process.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, ControllerJob] = {}
        self.registry = CollectorRegistry()
        self.registry.register(JobCollector(self.jobs))
        self._group: asyncio.TaskGroup | None = None

    def add_job(
        self,
        name: str,
        task: FederatedTask,
        config: gradbus.FederatedConfig,
        connection: AbstractAsyncContextManager[gradbus.Bus] | None = None,
    ) -> ControllerJob:
        """Run a controller for this job: now, or as soon as the service runs.

        Args:
            connection: how it reaches the others, as by ``gradbus.connect(name, ...)``. None: on this machine alone.

        Raises:
            ValueError: there is a job of this name that has not ended.
        """
        if name in self.jobs and self.jobs[name].running:
            raise ValueError(f"job {name!r} is there already; add it again when it has ended, or choose another name")
        job = self.jobs[name] = ControllerJob(name, task, config, connection or gradbus.connect(name))
        if self._group is not None:
            self._group.create_task(job.run(), name=f"job-{name}")
        return job

    async def run(self) -> None:
        """Run the jobs until this is cancelled; then each controller takes its leave and closes its bus."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name, job in self.jobs.items():
                if job.running:
                    group.create_task(job.run(), name=f"job-{name}")
            try:
                await asyncio.get_running_loop().create_future()  # a job may be added at any time
            finally:
                self._group = None


SERVICE = web.AppKey("service", FederatedService)


async def controller_context(app: web.Application) -> AsyncIterator[None]:
    """For ``app.cleanup_ctx``: the controllers start and end with the application."""
    # A task of its own, not a group around the yield: the host may start and end an application in different tasks.
    running = asyncio.create_task(app[SERVICE].run(), name="federated-service")
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()  # it ended by itself: a broken invariant, which should be seen


def make_app(service: FederatedService) -> web.Application:
    """A web application around the service, to be run alone or as a part of another one (``app.add_subapp``)."""
    app = web.Application()
    app[SERVICE] = service
    app.cleanup_ctx.append(controller_context)
    app.router.add_get("/status", _status)
    app.router.add_get("/status/{job}", _job_status)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/healthz", _health)
    return app


async def _status(request: web.Request) -> web.Response:
    return _json({"jobs": {name: job.status() for name, job in request.app[SERVICE].jobs.items()}})


async def _job_status(request: web.Request) -> web.Response:
    jobs, name = request.app[SERVICE].jobs, request.match_info["job"]
    if name not in jobs:
        return _json({"error": f"no job {name!r}", "jobs": list(jobs)}, status=404)
    return _json(jobs[name].status())


async def _metrics(request: web.Request) -> web.Response:
    # On the loop, which owns the numbers: some microseconds a job.
    text = generate_latest(request.app[SERVICE].registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _health(request: web.Request) -> web.Response:
    failed = {name: job.reason for name, job in request.app[SERVICE].jobs.items() if job.failed}
    return _json({"ok": not failed, "failed": failed}, status=503 if failed else 200)


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.json_response(value, status=status, dumps=json_text)  # the loss of a run that diverges is no JSON number


def main(arguments: Sequence[str] | None = None) -> int:
    """The service as a program of its own. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gradbus.experiments.examples.embed_aiohttp", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--config", type=Path, action="append", help="a controller's file; repeat it for several jobs")
    parser.add_argument("--job", help="name of the job, in place of the file's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s: this machine alone)")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--set", action="append", metavar="SECTION.KEY=VALUE", help="set one key in each file")
    options = parser.parse_args(arguments)
    return guard("service", lambda: _serve(options))


def _serve(options: argparse.Namespace) -> None:
    logs.configure()
    paths: list[Path | None] = options.config or [None]
    if options.job is not None and len(paths) > 1:
        raise ConfigError(f"--job names one job, but there are {len(paths)} configurations: name each in its own file")
    overrides = list(options.set or ())
    if options.job is not None:
        overrides.append(f"bus.job={json_text(options.job)}")
    service = FederatedService()
    for path in paths:
        file = load(ControllerFile, path, overrides=overrides)
        if file.bus.job in service.jobs:
            raise ConfigError(f"{path}: job {file.bus.job!r} is there already; give each file a bus.job of its own")
        check(file.bus)
        task = ConfiguredTask(file.task)
        task.load()  # before the first request: it may take a while
        service.add_job(file.bus.job, task, file.federated, open_bus(file.bus))
    gradbus.preload()
    try:
        web.run_app(
            make_app(service),
            host=options.host,
            port=options.port,
            shutdown_timeout=1.0,
            access_log=None,
            print=lambda text: say(text.splitlines()[0]),
        )
    except OSError as error:
        where = f"{options.host}:{options.port}"
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}; choose another place with --port or --host"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
