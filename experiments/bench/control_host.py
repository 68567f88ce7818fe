"""The robot of control_loop.py, measured without and with training, in a process of its own.

    python -m gradbus.experiments.bench.control_host process --job arms --domain 22

It prints one line of JSON, the fields of :class:`ControlGaps`. Its controller runs elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import gradbus
from gradbus.experiments.examples import control_loop
from gradbus.experiments.examples.control_loop import PERIOD_S, Joint, JointControl, Pace, Seat, SharedMemory
from gradbus.runtime.loop_thread import LoopThread

MODELS = 2  # that have come when training counts as running
STARTS_S = 180.0  # of a child of low priority on a busy machine
_REALTIME = 10

WAYS = {
    "process": "training in a process of its own, nice 10",
    "process-rt": "the same, and real-time control",
    "process-0": "training in a process of its own, nice 0",
    "thread": "training on a thread, nice 10",
    "thread-0": "training on a thread, nice 0",
    "loop": "control on the client's event loop",
}


@dataclass(frozen=True, slots=True)
class ControlGaps:
    """How late ticks were, in seconds: the 99th percentile and the most, before, while the training starts, and during
    it. ``rounds``: that ended while the last one was measured."""

    idle_s: tuple[float, float]
    starting_s: tuple[float, float]
    training_s: tuple[float, float]
    rounds: int


def tail_of(pace: Pace) -> tuple[float, float]:
    """The 99th percentile of how late ticks were, and the most."""
    late = sorted(pace.late_s)
    return late[int(0.99 * (len(late) - 1))], late[-1]


class LowFriction(control_loop.Friction):
    """The task, which gives its thread a low priority."""

    def train(self, model: Any, **command: Any) -> Any:
        """Train, as a thread that others are preferred to."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), control_loop.NICE)
        return super().train(model, **command)


async def _take_part(seat: Seat, shared: SharedMemory, *, low: bool) -> None:
    async with gradbus.connect(seat.job, domain=seat.domain) as bus:
        task = (LowFriction if low else control_loop.Friction)(shared)
        await gradbus.Client(bus, task, name=seat.name).run()


@contextlib.contextmanager
def _training(way: str, seat: Seat, shared: SharedMemory) -> Iterator[None]:
    if way.startswith("process"):
        with control_loop.training_beside(seat, shared):
            yield
        return
    thread = LoopThread(_take_part(seat, shared, low=way == "thread"), "client", daemon=True)
    thread.start()
    yield
    thread.cancel()
    thread.wait(STARTS_S)


def _measure(way: str, seat: Seat, seconds: float) -> ControlGaps:
    """Measure a control loop on this thread."""
    shared = SharedMemory()
    control = JointControl(Joint(0), shared)

    def run(seconds: float) -> Pace:
        return control_loop.run_every(PERIOD_S, seconds, control.tick)

    if way == "process-rt":
        control_loop.make_realtime(_REALTIME)
    idle = run(seconds)
    starting = Pace()
    with _training(way, seat, shared):
        until_s = time.monotonic() + STARTS_S
        while control.models < MODELS and time.monotonic() < until_s:
            starting.late_s += run(0.1).late_s
        if control.models < MODELS:
            raise TimeoutError(f"no training after {STARTS_S:g} s")
        before = control.models
        training = run(seconds)
        return ControlGaps(tail_of(idle), tail_of(starting), tail_of(training), control.models - before)


async def _measure_on_loop(seat: Seat, seconds: float) -> ControlGaps:
    """Measure a control loop that is a task on the client's event loop."""
    shared = SharedMemory()
    control = JointControl(Joint(0), shared)

    async def run(wanted: Callable[[], bool]) -> Pace:
        pace, due_s = Pace(), time.monotonic() + PERIOD_S
        while wanted():
            await asyncio.sleep(due_s - time.monotonic())
            pace.late_s.append(time.monotonic() - due_s)
            control.tick()
            due_s += (max(0, int((time.monotonic() - due_s) / PERIOD_S)) + 1) * PERIOD_S
        return pace

    async def run_for(seconds: float) -> Pace:
        until_s = time.monotonic() + seconds
        return await run(lambda: time.monotonic() < until_s)

    idle = await run_for(seconds)
    client = asyncio.create_task(_take_part(seat, shared, low=False), name="client")
    async with asyncio.timeout(STARTS_S):
        starting = await run(lambda: control.models < MODELS)
    before = control.models
    training = await run_for(seconds)
    client.cancel()
    await asyncio.wait([client])
    return ControlGaps(tail_of(idle), tail_of(starting), tail_of(training), control.models - before)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=list(WAYS))
    parser.add_argument("--job", required=True)
    parser.add_argument("--domain", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (%(default)s)")
    given = parser.parse_args(arguments)
    seat = Seat(given.job, "robot", given.domain, nice=0 if given.way == "process-0" else control_loop.NICE)
    if not given.way.startswith("process"):
        gradbus.preload()
        import torch

        torch.set_num_threads(1)
    if given.way == "loop":
        found = asyncio.run(_measure_on_loop(seat, given.seconds))
    else:
        found = _measure(given.way, seat, given.seconds)
    json.dump(asdict(found), sys.stdout)


if __name__ == "__main__":
    main()
