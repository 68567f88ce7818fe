"""Ranks of a data-parallel run: processes of their own that say what happens. See :mod:`ranks`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ranks import Ranks
from settings import nested

import gradbus
from gradbus.actors import Worker
from gradbus.models import ClassificationTask, glyphs, mnist_cnn, mnist_mlp
from gradbus.runtime import logs
from gradbus.runtime.collectives import join_group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import GradbusError
from gradbus.runtime.tasks import single_error

Say = Callable[[dict[str, Any]], None]


def ddp_ranks(world: int, *, samples: int = 256, batch_size: int = 16, lease_s: float = 1.0, **config: Any) -> Ranks:
    """``lease_s``: who is silent for so long is taken for dead."""
    return Ranks(run_forked, world, samples=samples, batch_size=batch_size, lease_s=lease_s, config=config)


class Task(ClassificationTask):
    """Says when it starts a batch; dies in the midst of one if it is told to."""

    def __init__(self, spec: dict[str, Any], say: Say) -> None:
        model = mnist_cnn if spec.get("model") == "cnn" else mnist_mlp
        super().__init__(model, lambda: glyphs(train=spec["samples"], test=50), batch_size=spec["batch_size"])
        self._say = say
        self._die_at = spec.get("die_at")
        self._number = -1

    def batches(self, **where: Any) -> Iterator[Any]:
        for batch in super().batches(**where):
            self._number += 1
            self._say({"event": "batch", "number": self._number, "epoch": where["epoch"]})
            if self._number == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


class Steps:
    """A callback that says each step. ``ends_with`` of the spec: it ends the run five steps after these worlds."""

    def __init__(self, spec: dict[str, Any], say: Say) -> None:
        self._say = say
        self._ends_with = spec.get("ends_with")
        self._worlds: list[int] = []
        self._left = 5

    def on_step(self, report: Any) -> bool:
        self._say({"event": "step", "step": report.step, "world": report.world, "at_s": time.monotonic()})
        if report.world not in self._worlds[-1:]:
            self._worlds.append(report.world)
        self._left -= self._worlds == self._ends_with
        return self._left <= 0


async def _work_elastically(spec: dict[str, Any], say: Say) -> None:
    config = DataParallelConfig(**nested(spec["config"]))
    async with gradbus.connect(**spec["place"], lease_s=spec["lease_s"]) as bus:
        place = gradbus.ElasticPlace(bus=bus, number=spec["rank"], founders=spec.get("founders", spec["world"]))
        worker = gradbus.ElasticWorker(place, Task(spec, say), config, callbacks=[Steps(spec, say)])
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.leave)
        say({"event": "started"})
        try:
            summary = await worker.run()
        except GradbusError as error:
            say({"event": "failed", "kind": type(error).__name__, "text": str(error), "at_s": time.monotonic()})
            raise
        say({"event": "done", "params_hash": summary.params_hash, "steps": summary.steps, "left": worker.has_left})


async def _work(spec: dict[str, Any], say: Say) -> None:
    if "elastic__min_world" in spec["config"]:
        return await _work_elastically(spec, say)
    config = DataParallelConfig(**nested(spec["config"]))
    network = gradbus.NetworkConfig(lease_s=spec["lease_s"])
    async with (
        gradbus.connect(**spec["place"], network=network) as bus,
        join_group(bus, rank=spec["rank"], world=spec["world"], timeout_s=30.0, collective_timeout_s=30.0) as group,
    ):
        worker = Worker(group, Task(spec, say), config, fail_at=spec.get("fail_at", ""))
        say({"event": "started"})
        try:
            summary = await worker.run()
        except GradbusError as error:
            say({"event": "failed", "kind": type(error).__name__, "text": str(error), "at_s": time.monotonic()})
            raise
        say(
            {
                "event": "done",
                "params_hash": summary.params_hash,
                "accuracy": summary.accuracy,
                "steps": summary.steps,
                "loss": summary.loss,
            }
        )
    return None


def run_forked(spec: dict[str, Any], pipe: Any) -> None:
    """Entry of a forked process: events go into the pipe."""
    logs.configure(level=os.environ.get("TEST_LOG", "warning"))
    torch.set_num_threads(1)
    code = 0
    try:
        asyncio.run(_work(spec, pipe.send))
    except* GradbusError as group:
        pipe.send({"event": "error", "kind": type(single_error(group)).__name__})
        code = 3
    sys.exit(code)
