"""A robot that moves a joint every 10 ms, and learns its friction together with other robots meanwhile.

    python -m gradbus.experiments.examples.control_loop --job arms --controller --robots 2
    python -m gradbus.experiments.examples.control_loop --job arms --name robot-1 --seconds 60
    python -m gradbus.experiments.examples.control_loop --job arms --name robot-2 --seconds 60

The control loop has a process of its own, which never loads torch. gradbus and the training are in a child of lower
priority, so neither Python's lock nor its garbage collector, an import or a crash there holds up a tick. The two share
memory and no lock: a process of low priority that held one would make the loop wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import gradbus

if TYPE_CHECKING:
    from torch import nn

    from gradbus.models import TrainResult

PERIOD_S = 0.01
NICE = 10  # of the training: any thread of the loop that wakes is preferred to it at once
HIDDEN = 32
WEIGHTS = 3 * HIDDEN + 1  # of the model: velocity -> HIDDEN -> torque
SAMPLES = 2048  # newest ones, of which a training takes some
_STOP_S = 5.0  # for a client to leave; one that still loads is killed

Floats = NDArray[np.float32]
_spawn = multiprocessing.get_context("spawn")  # a fork would take over locks that threads of the robot hold


# The control loop


@dataclass(slots=True)
class Pace:
    """How punctual a loop was. ``late_s``: of each tick. ``missed``: ticks that were left out, as one was so late."""

    late_s: list[float] = field(default_factory=list)
    missed: int = 0

    def __str__(self) -> str:
        late = sorted(self.late_s) or [0.0]
        median, p99, most = (1e3 * late[int(share * (len(late) - 1))] for share in (0.5, 0.99, 1.0))
        return f"{len(self.late_s)} ticks, late by {median:.2f} ms (median), {p99:.2f} (p99), {most:.2f} (most)"


def run_every(period_s: float, seconds: float, tick: Callable[[], object]) -> Pace:
    """Call ``tick`` at multiples of a period, on this thread, for so long. Returns how late each call was.

    A tick that is late moves no other one; those whose time has passed are left out.
    """
    pace, due_s = Pace(), time.monotonic() + period_s
    end_s = due_s + seconds
    while due_s < end_s:
        time.sleep(max(0.0, due_s - time.monotonic()))
        pace.late_s.append(time.monotonic() - due_s)
        tick()
        passed = max(0, int((time.monotonic() - due_s) / period_s))
        pace.missed += passed
        due_s += (passed + 1) * period_s
    return pace


def make_realtime(priority: int) -> None:
    """Prefer this thread to all that are not real-time, as long as it needs a core; what it starts is as before.

    Raises:
        PermissionError: the system does not allow it; see ``ulimit -r``, or give the process CAP_SYS_NICE.
    """
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))


class Joint:
    """A joint with friction, simulated: what a robot would ask its motor driver."""

    def __init__(self, seed: int) -> None:
        self.angle = self.velocity = 0.0
        self._stiction = 0.3 + 0.1 * (seed % 5)

    def friction(self, velocity: float) -> float:
        """Torque that the friction takes."""
        return float(0.2 * velocity + self._stiction * np.tanh(8 * velocity))

    def move(self, torque: float, period_s: float) -> None:
        """Let one period pass."""
        self.velocity += (torque - self.friction(self.velocity)) * period_s
        self.angle += self.velocity * period_s


class JointControl:
    """Follows a sine with a joint, by what the newest global model says of its friction, and notes what it measures."""

    def __init__(self, joint: Joint, shared: SharedMemory) -> None:
        self._joint = joint
        self._shared = shared
        self._weights: Floats = np.zeros(WEIGHTS, np.float32)
        self._ticks = 0
        self.models = 0  # that it has taken over
        self.error = 0.0  # of the torque that the model predicts, a running mean

    def tick(self) -> None:
        """Move the joint once."""
        newest = self._shared.newest_model(self._weights)
        if newest is not None:
            self._weights, self.models = newest, self.models + 1
        joint = self._joint
        turn = 2 * math.pi * self._ticks * PERIOD_S
        angle, velocity = math.sin(turn), 2 * math.pi * math.cos(turn)  # that are wanted
        predicted, friction = self._predicted(joint.velocity), joint.friction(joint.velocity)
        self._shared.note(joint.velocity, friction)
        self.error += 0.01 * (abs(predicted - friction) - self.error)
        feedback = 100.0 * (angle - joint.angle) + 20.0 * (velocity - joint.velocity)
        joint.move(feedback - 4 * math.pi**2 * angle + predicted, PERIOD_S)
        self._ticks += 1

    def _predicted(self, velocity: float) -> float:
        """Torque of the friction as the model has it: NumPy, as torch takes ten times as long for so small a net."""
        into, bias, out = self._weights[: 3 * HIDDEN].reshape(3, HIDDEN)
        return float(np.tanh(into * velocity + bias) @ out + self._weights[-1])


class SharedMemory:
    """What the control loop and the training have in common: newest samples one way, the newest model the other.

    No side waits for the other. A model that is read while it is written does not have its checksum: the loop keeps the
    one before, and looks again at its next tick.

    Attributes:
        model: weights, float32, shape (WEIGHTS,).
    """

    def __init__(self) -> None:
        self._samples = _spawn.RawArray("f", 2 * SAMPLES)
        self._noted = _spawn.RawValue("Q", 0)
        self.model = _spawn.RawArray("f", WEIGHTS)
        self._checksum = _spawn.RawValue("L", 0)

    def note(self, velocity: float, torque: float) -> None:
        """Add a sample; the oldest one goes."""
        at = 2 * (self._noted.value % SAMPLES)
        self._samples[at : at + 2] = [velocity, torque]
        self._noted.value += 1

    def newest_samples(self) -> Floats:
        """Velocity and torque of the newest samples, shape (N, 2); one that is just being written may be mixed."""
        rows = np.array(self._samples, np.float32).reshape(SAMPLES, 2)
        return rows[: min(SAMPLES, self._noted.value)]

    def publish_model(self, weights: Floats) -> None:
        """Hand the weights of the global model, shape (WEIGHTS,), to the control loop."""
        self._checksum.value = 0
        self.model[:] = weights.tolist()
        self._checksum.value = zlib.crc32(weights.tobytes())

    def newest_model(self, known: Floats) -> Floats | None:
        """Return the newest whole model; None where it is the ``known`` one, or is just being written."""
        found = np.frombuffer(self.model, np.float32).copy()
        is_new = not np.array_equal(found, known)
        return found if is_new and zlib.crc32(found.tobytes()) == self._checksum.value else None


# The training


class Friction:
    """The task: from the velocity of a joint to the torque that friction takes. A robot gives ``shared``."""

    def __init__(self, shared: SharedMemory | None = None) -> None:
        self._shared = shared

    def build_model(self) -> nn.Module:
        """Build the network, the same weights at every call."""
        import torch  # here: the control loop has no use for it

        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(1, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1))

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Do nothing: samples come while the robot moves."""

    def train(self, model: nn.Module, *, client_id: int, **command: Any) -> TrainResult:
        """Train on the newest samples, after the global model was handed to the control loop."""
        import torch

        from gradbus.models import TrainResult, local_sgd

        assert self._shared is not None, "the controller does not train"
        self._shared.publish_model(torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy())
        samples = torch.from_numpy(self._shared.newest_samples())
        if not len(samples):
            return TrainResult.nothing()
        velocity, torque = samples[:, :1], samples[:, 1:]
        return local_sgd(
            model,
            torch.arange(len(samples)),
            lambda rows: torch.nn.functional.mse_loss(model(velocity[rows]), torque[rows]),
            client_id=client_id,
            **command,
        )

    def evaluate(self, model: nn.Module) -> None:
        """Return None: each robot knows the error of its own torque."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where the training takes part. ``nice``: of its process. ``cores``: those it may use; empty: all."""

    job: str
    name: str
    domain: int = 0
    nice: int = NICE
    cores: frozenset[int] = frozenset()


@contextmanager
def training_beside(seat: Seat, shared: SharedMemory) -> Iterator[multiprocessing.process.BaseProcess]:
    """Train in a child process while the block runs. The child also ends where this process dies."""
    far, near = _spawn.Pipe(duplex=False)
    child = _spawn.Process(target=train, args=(seat, shared, far), name=f"training-{seat.name}", daemon=True)
    child.start()
    far.close()
    try:
        yield child
    finally:
        near.close()
        child.join(_STOP_S)
        if child.is_alive():
            child.kill()


def train(seat: Seat, shared: SharedMemory, until: Connection) -> None:
    """The whole life of the child, until the pipe has ended."""
    os.nice(seat.nice)  # before anything starts a thread: threads have the priority of the one that starts them
    if seat.cores:
        os.sched_setaffinity(0, seat.cores)
    gradbus.preload()
    import torch

    torch.set_num_threads(1)
    asyncio.run(_train(seat, shared, until))


async def _train(seat: Seat, shared: SharedMemory, until: Connection) -> None:
    async with gradbus.connect(seat.job, domain=seat.domain) as bus:
        client = gradbus.Client(bus, Friction(shared), name=seat.name)
        running = asyncio.create_task(client.run(), name="client")
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.remove_reader(until.fileno())  # the end of a pipe stays readable
            running.cancel()

        loop.add_reader(until.fileno(), stop)
        with contextlib.suppress(asyncio.CancelledError):
            await running
        loop.remove_reader(until.fileno())


def rules(robots: int, rounds: int = 1_000_000) -> gradbus.FederatedConfig:
    """Return the rules of the controller."""
    return gradbus.FederatedConfig(
        rounds=rounds, clients={"num": robots}, training={"epochs": 5, "lr": 0.05}, eval_every=0
    )


async def control_run(job: str, robots: int, rounds: int, **bus: Any) -> list[gradbus.RoundReport]:
    """Be the controller of the run."""
    async with gradbus.connect(job, **bus) as joined:
        return await gradbus.Controller(joined, Friction(), rules(robots, rounds)).run()


def main(arguments: Sequence[str] | None = None) -> None:
    """One robot, or the controller of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="arms")
    parser.add_argument("--domain", type=int, default=0)
    parser.add_argument("--name", default="robot-1", help="of the robot, one for each (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which the robot moves (%(default)s)")
    parser.add_argument("--nice", type=int, default=NICE, help="of the training (%(default)s)")
    parser.add_argument("--cores", type=int, nargs="*", default=[], help="that the training may use; all")
    parser.add_argument("--realtime", type=int, metavar="PRIORITY", help="of the control loop, 1 to 99, if allowed")
    parser.add_argument("--controller", action="store_true", help="be the controller of all robots")
    parser.add_argument("--robots", type=int, default=1, help="that the first round waits for (%(default)s)")
    parser.add_argument("--rounds", type=int, default=100, help="of the controller (%(default)s)")
    given = parser.parse_args(arguments)
    if given.controller:
        gradbus.preload()
        asyncio.run(control_run(given.job, given.robots, given.rounds, domain=given.domain))
        return
    shared = SharedMemory()
    control = JointControl(Joint(zlib.crc32(given.name.encode())), shared)
    seat = Seat(given.job, given.name, given.domain, given.nice, frozenset(given.cores))
    if given.realtime is not None:
        make_realtime(given.realtime)
    with training_beside(seat, shared):
        pace = run_every(PERIOD_S, given.seconds, control.tick)
    print(f"{given.name}: {pace}; {control.models} models, error of the torque {control.error:.3f}")


if __name__ == "__main__":
    main()
