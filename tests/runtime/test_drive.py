"""All work of a bus off the loop goes through the drive, so another driver than threads can do it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from gradbus import connect
from gradbus.runtime import drive
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import Control, Identity

WAIT_S = 20.0


class Turns:
    """Runs workers one step after the other on the event loop, and deferred functions with the next step."""

    def __init__(self) -> None:
        self.workers: list[OnLoop] = []
        self.names: list[str] = []

    def driver(self, worker: drive.SteppedWork, run: Callable[[], object], name: str) -> drive.Driver:
        self.names.append(name)
        self.workers.append(OnLoop(worker))
        return self.workers[-1]

    def later(self, function: Callable[[], object], name: str) -> drive.Deferred:
        self.names.append(name)
        function()
        return Done()

    def executor(self, name: str) -> Executor:
        self.names.append(name)
        return Inline()

    async def run(self) -> None:
        while True:
            for worker in self.workers:
                worker.turn()
            await asyncio.sleep(0.001)


class OnLoop:
    """The driver of one worker."""

    ident: int | None = None

    def __init__(self, worker: drive.SteppedWork) -> None:
        self.worker, self.state, self.due = worker, "new", 0

    def start(self) -> None:
        self.state = "alive"

    def step_due(self) -> None:
        self.due += 1

    def turn(self) -> None:
        if self.state == "alive" and not self.worker.stopping:
            self.worker.step()

    def join(self, timeout_s: float) -> None:
        if self.state == "alive":
            self.state = "finished"
            self.worker.drop_rest()

    def is_alive(self) -> bool:
        return self.state == "alive"


class Done:
    def join(self, timeout_s: float | None = None) -> None:
        pass

    def is_running(self) -> bool:
        return False


class Inline(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    made = Turns()
    for name in ("driver", "later", "executor"):
        monkeypatch.setattr(drive, name, getattr(made, name))
    return made


def test_a_bus_works_without_a_thread_where_something_else_drives_it(turns: Turns, domain: int) -> None:
    async def main() -> tuple[str, list[str], list[bool]]:
        turning = asyncio.create_task(turns.run())
        async with connect("drive", domain=domain, security="none") as bus:
            with bus.subscribe(ToController) as inbox:
                bus.open_writer(ToController)
                await bus.matched(lambda: bus.matched_readers(ToController) > 0, timeout_s=WAIT_S)
                await bus.publish(Identity(3, 1), Leave("the test"))
                async with asyncio.timeout(WAIT_S):
                    message = await inbox.get()
            names = [thread.name for thread in threading.enumerate() if thread.name.startswith("gradbus-")]
        turning.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await turning
        assert isinstance(message, Control)
        return message.body.reason, names, [worker.is_alive() for worker in turns.workers]

    reason, names, alive = asyncio.run(main())
    assert reason == "the test"
    assert not {"gradbus-receive", "gradbus-write", "gradbus-close"} & set(names)
    assert {"gradbus-receive", "gradbus-write", "gradbus-close"} <= set(turns.names)
    assert alive == [False, False]  # both have been finished by the one who closed the bus


def test_what_actors_compute_runs_where_the_drive_says(turns: Turns) -> None:
    async def main() -> int:
        with ComputeThread("test") as compute:
            return await compute.run(threading.get_ident)

    assert asyncio.run(main()) == threading.get_ident()
    assert turns.names == ["gradbus-test"]


def test_what_is_sent_stopped_or_woken_makes_a_step_due_at_once(turns: Turns) -> None:
    from gradbus.runtime.bus.sender import Sender

    sender = Sender()
    sender.wake()
    sender.stop()
    assert turns.workers[0].due == 2
