"""A rank of an elastic run inside a web service: it joins and leaves while the service serves requests.

    python -m gradbus.experiments.examples.embed_elastic --job digits --number 7 --port 8080

``POST /join`` has the rank join the run of that job, ``POST /leave`` has it leave after the step that it is in, and
``GET /rank`` says where it is. The founders are processes of their own, as docs/elastic.md starts them. It needs an
application whose ``cleanup_ctx`` has :func:`rank_context`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import torch
from aiohttp import web

import gradbus
from gradbus import models
from gradbus.actors import DataParallelTask
from gradbus.runtime.logs import get_logger

log = get_logger("service")


class EmbeddedRank:
    """One rank on the event loop of its host. What it computes is on threads, and its host goes on if it fails.

    Attributes:
        outcome: absent, running, left, done or failed. times: how often it has joined.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[gradbus.Bus]],
        number: int,
        task: DataParallelTask,
        config: gradbus.DataParallelConfig,
    ) -> None:
        """``connect``: a bus of the run's job. ``number``: of this process, which no other one of the run has."""
        self.outcome = "absent"
        self.times = 0
        self._connect = connect
        self._number = number
        self._task = task
        self._config = config
        self._worker: gradbus.ElasticWorker | None = None
        self._running: asyncio.Task[None] | None = None

    def join(self) -> bool:
        """Begin to join. False: it has done so already."""
        if self._running is not None and not self._running.done():
            return False
        self.outcome = "running"
        self.times += 1
        self._running = asyncio.create_task(self._run(), name=f"rank-{self._number}")
        return True

    async def leave(self) -> None:
        """Leave after the step under way, without loss to the others; a rank that has not come so far is cancelled."""
        running = self._running
        if running is None:
            return
        if self._worker is not None:
            self._worker.leave()
            await asyncio.wait([running], timeout=self._config.elastic.wait_s)
        running.cancel()
        await asyncio.wait([running])

    @property
    def status(self) -> dict[str, Any]:
        """As a JSON object."""
        worker = self._worker
        return {
            "outcome": self.outcome,
            "step": 0 if worker is None else worker.step,
            "progress": "" if worker is None else worker.progress,
        }

    async def _run(self) -> None:
        try:
            async with self._connect() as bus:
                place = gradbus.ElasticPlace(bus=bus, number=self._number)
                worker = self._worker = gradbus.ElasticWorker(place, self._task, self._config)
                async with aclosing(worker.epochs()) as epochs:
                    async for report in epochs:
                        log.info("epoch", epoch=report.epoch)
                self.outcome = "left" if worker.has_left else "done"
        except asyncio.CancelledError:
            self.outcome = "left"
            raise
        except Exception:
            self.outcome = "failed"
            log.exception("rank failed", number=self._number)
        finally:
            self._worker = None


RANK = web.AppKey("rank", EmbeddedRank)


async def rank_context(app: web.Application) -> AsyncIterator[None]:
    """For ``app.cleanup_ctx``: the rank leaves when the application ends."""
    yield
    await app[RANK].leave()


def make_app(rank: EmbeddedRank) -> web.Application:
    """A web application around the rank, to be run alone or as a part of another one (``app.add_subapp``)."""
    app = web.Application()
    app[RANK] = rank
    app.cleanup_ctx.append(rank_context)
    app.router.add_get("/rank", _status)
    app.router.add_post("/join", _join)
    app.router.add_post("/leave", _leave)
    return app


async def _status(request: web.Request) -> web.Response:
    return web.json_response(request.app[RANK].status)


async def _join(request: web.Request) -> web.Response:
    return web.json_response({"begins": request.app[RANK].join()}, status=202)


async def _leave(request: web.Request) -> web.Response:
    await request.app[RANK].leave()
    return web.json_response(request.app[RANK].status)


def example_task() -> DataParallelTask:
    """A small network on images that need no download."""
    return models.ClassificationTask(models.mnist_mlp, lambda: models.glyphs(train=1024, test=50), batch_size=32)


def example_config(**options: Any) -> gradbus.DataParallelConfig:
    """Return the settings of a run that goes on while one rank is left."""
    elastic = {"min_world": 1, "max_world": 4}
    return gradbus.DataParallelConfig(epochs=1_000_000, eval_every_epochs=0, elastic=elastic, **options)


def main(arguments: Sequence[str] | None = None) -> None:
    """The service as a program of its own; with ``--founder`` the first process of the run, without a service."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="embedded")
    parser.add_argument("--number", type=int, default=1, help="of this process in the run (%(default)s)")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--founder", action="store_true")
    given = parser.parse_args(arguments)
    if given.founder:
        asyncio.run(found(given.job))
        return
    gradbus.preload()
    torch.set_num_threads(1)
    rank = EmbeddedRank(lambda: gradbus.connect(given.job), given.number, example_task(), example_config())
    web.run_app(make_app(rank), host="127.0.0.1", port=given.port)


async def found(job: str, **place: Any) -> None:
    """Process 0, which begins the run alone. ``place``: of the bus, as for :func:`gradbus.connect`."""
    async with gradbus.connect(job, **place) as bus:
        seat = gradbus.ElasticPlace(bus=bus, number=0, founders=1)
        await gradbus.ElasticWorker(seat, example_task(), example_config()).run()


if __name__ == "__main__":
    main()
