"""Another user of the machine, who knows the name of a job and has none of its keys: processes that attack it.

Where the tests run as root it is a user of its own; else the same user with another home, and so with another key. Both
ways of an attacker are gone: with his own key, as everything of his is by default, and with no protection at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import warm
from federation import Node

import gradbus
from gradbus.models import NoopTask
from gradbus.models.task import TrainResult
from gradbus.runtime.security import Level
from gradbus.runtime.transport.channels import ToClients, ToController
from gradbus.runtime.wire.control import Leave, Receipt, Refused, RunEnded, UploadRequest
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, ModelBlob, TrainCmd

_NOBODY = 65534
_LIES = 1 << 50  # his incarnation
_PAUSE_S = 0.02
_LATE = (
    "encodings.ascii", "encodings.idna", "encodings.latin_1", "gradbus.actors.federated.client.client",
    "gradbus.runtime.security.membership", "gradbus.runtime.security.job_key", "gradbus.torch.register",
)  # fmt: skip
WAYS: tuple[Level, ...] = ("user", "none")


@contextlib.contextmanager
def home_of_another_user() -> Iterator[str]:
    """A folder that he owns, not below one that he may not enter."""
    folder = tempfile.mkdtemp(prefix="gradbus-other-user-", dir="/tmp")
    if os.geteuid() == 0:
        os.chown(folder, _NOBODY, _NOBODY)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def start(attack: str, home: str, **spec: Any) -> Node:
    """A process that plays one of the functions below."""
    process, _, events = warm.fork_that_tells(_play, {**spec, "attack": attack, "home": home})
    return Node(process, events)


def _play(spec: dict[str, Any], pipe: Any) -> None:
    if os.geteuid() == 0:
        for name in _LATE:  # from folders that he may not be able to look into
            importlib.import_module(name)
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    os.environ["HOME"] = spec["home"]
    os.environ["GRADBUS_BUS__LEASE_S"] = "30"
    for name in [name for name in os.environ if name.startswith("GRADBUS_KEY")]:
        del os.environ[name]

    def say(event: str, **facts: Any) -> None:
        pipe.send({"event": event, **facts})

    try:
        _ATTACKS[spec["attack"]](spec, say)
    except BaseException:
        say("failed", text=traceback.format_exc())
        raise


def _over(spec: dict[str, Any]) -> bool:
    return os.path.exists(spec["until"])


class _Poison(NoopTask):
    """An update of which almost all samples are: the mean is what he says."""

    def __init__(self, dim: int, found: Counter[str]) -> None:
        super().__init__(dim, delta="constant", scale=1.0)
        self._found = found

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        self._found["rounds trained"] += 1
        super().train(model, **arguments)
        return TrainResult(num_samples=1 << 30, loss=0.0)


def _federated(spec: dict[str, Any], say: Any) -> None:  # noqa: C901 - one step of a run after the other
    """Read, join as a client of his own and as one that is there, end the run, refuse clients, lie about updates."""
    found: Counter[str] = Counter()

    async def take_part(bus: gradbus.Bus, client_id: int) -> None:
        with contextlib.suppress(gradbus.GradbusError):
            await gradbus.Client(bus, _Poison(spec["dim"], found), client_id=client_id).run()

    async def listen(bus: gradbus.Bus) -> None:
        with bus.subscribe(TrainCmd, ModelBlob, ClientUpdate, ToController, ToClients) as inbox:
            async for message in inbox:
                of_controller = isinstance(message, Control) and message.sender == CONTROLLER
                if not isinstance(message, Control) or (of_controller and message.incarnation != _LIES):
                    found[f"{type(message).__name__} read"] += 1

    async def lie(bus: gradbus.Bus) -> None:
        chief, victim = Identity(CONTROLLER, _LIES), Identity(0, _LIES)
        while True:
            for run_id in (0, 1, _LIES):
                await bus.publish(chief, RunEnded(run_id, True, "all rounds are done"))
                await bus.publish(chief, Receipt(0, _LIES, run_id, 1, 1, False, "no"))
                await bus.publish(victim, UploadRequest(run_id, 1, 1, 4 * spec["dim"], 1 << 30, 0.0, 1.0, 1.0))
            await bus.publish(chief, Refused(0, _LIES, "you are not wanted"))
            await bus.publish(victim, Leave("done"))
            await asyncio.sleep(_PAUSE_S)

    async def attack(level: Level, tasks: asyncio.TaskGroup) -> None:
        place = {"job": spec["job"], "domain": spec["domain"], "lease_s": 30.0, "security": level}
        for client_id in spec["client_ids"]:
            bus = await opened.enter_async_context(gradbus.connect(**place))
            running.append(tasks.create_task(take_part(bus, client_id)))
        bus = await opened.enter_async_context(gradbus.connect(**place))
        running.append(tasks.create_task(listen(bus)))
        if spec["lies"]:
            running.append(tasks.create_task(lie(bus)))

    running: list[asyncio.Task[None]] = []
    opened = contextlib.AsyncExitStack()

    async def main() -> None:
        async with opened, asyncio.TaskGroup() as tasks:
            for level in WAYS:
                await attack(level, tasks)
            say("attacking")
            while not _over(spec):  # noqa: ASYNC110  # of another process
                await asyncio.sleep(_PAUSE_S)
            for task in running:
                task.cancel()

    asyncio.run(main())
    say("done", found=dict(found))


class _Bomb:
    """What does something when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self._path),)


def _ranks(spec: dict[str, Any], say: Any) -> None:
    """Take a rank of a store that is not full, and have the others unpickle what he likes."""
    os.environ["GRADBUS_BUS__SECURITY"] = spec["level"]
    tries = 0
    while not _over(spec):
        try:
            dist.init_process_group(
                "dds", init_method=spec["url"], rank=1, world_size=2, timeout=timedelta(seconds=spec["timeout_s"])
            )
            say("has a rank")
            for source in (0, 1):
                dist.broadcast_object_list([_Bomb(spec["bomb"])], src=source)
        except dist.DistError as error:
            tries += 1
            say("refused", text=str(error))
    say("done", tries=tries)


_ATTACKS = {"federated": _federated, "ranks": _ranks}
