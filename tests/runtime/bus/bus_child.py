"""The other process of the tests in test_bus_processes.py: ``bus_child.py ROLE JOB DOMAIN LEASE_S [PATH]``.

PATH is ``fast`` or ``binding``. It says one JSON value a line, and acts on lines that it is told.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import resource
import sys
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from bus_helpers import BODIES, CHIEF, CLIENT, CONTROLS, MIB, MODEL, UPDATE, delays_of_the_loop, payload_from, reads

import gradbus
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.security.membership import LivenessChallenge
from gradbus.runtime.transport.channels import ToClients, ToController
from gradbus.runtime.wire.messages import ClientUpdate, ModelBlob, TrainCmd


def say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def told() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


async def talk(bus: Bus) -> None:
    """Tell of one message of each kind, and send one of each."""
    inbox = bus.subscribe(TrainCmd, ClientUpdate, ModelBlob, *CONTROLS)
    say("listening")
    for _ in range(3 + len(BODIES)):
        message = await inbox.get()
        match message:
            case ClientUpdate() | ModelBlob():
                say([type(message).__name__, bytes(message.frame.data).hex()])
            case _:
                say(repr(message))
    await told()
    for kind in (TrainCmd, ClientUpdate, ModelBlob, ToController, ToClients):
        await reads(bus, kind, 2)  # our own reader, and the one of the other process
    inbox.close()
    await bus.publish(CHIEF, TrainCmd(3, 600, 2, 0.05, 11))
    await bus.send_update(UPDATE, 600, b"an update")
    await bus.send_model(MODEL, b"a model")
    for body in BODIES:
        await bus.publish(CLIENT, body)
    await told()


async def receive(bus: Bus) -> None:
    """Take in models, and tell the checksum of each and how late the loop was meanwhile."""
    inbox = bus.subscribe(ModelBlob)
    say("listening")
    while (size := await told()) != "end":
        stop = asyncio.Event()
        delays = asyncio.create_task(delays_of_the_loop(stop))
        payload = await payload_from(inbox, MODEL, int(size))
        stop.set()
        late = await delays
        say([zlib.crc32(payload), late[int(len(late) * 0.99)]])


async def hesitate(bus: Bus) -> None:
    """Subscribe to updates and read them only when told to."""
    inbox = bus.subscribe(ClientUpdate)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    say("listening")
    await told()
    say((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024 / MIB)
    say(zlib.crc32(await payload_from(inbox, UPDATE, 1 << 30)))


async def prove(bus: Bus) -> None:
    """Read updates, but prove only when told to that this process is alive, and then say what has come."""
    inbox = bus.subscribe(ClientUpdate)
    say("listening")
    await told()
    _stop_being_silent()
    say(zlib.crc32(await payload_from(inbox, UPDATE, 1 << 30)))


async def hold(bus: Bus) -> None:
    """Subscribe, and hold the interpreter, so that nothing is taken; then tell how much is left of what was said."""
    inbox = bus.subscribe(ToClients)
    say("listening")
    await told()
    ctypes.PyDLL(None).usleep(8_000_000)
    say("back")
    await inbox.get()
    say("has heard")


async def live(bus: Bus) -> None:
    """Say a word, and then nothing more."""
    await reads(bus, ToController)
    await bus.publish(CLIENT, BODIES[0])
    await told()


_announce_again = LivenessChallenge.announce_again
_silent: list[LivenessChallenge] = []


def _keep_silent() -> None:
    """Until told, this process neither announces its challenge nor answers one."""
    LivenessChallenge.announce_again = lambda self: _silent.append(self)  # type: ignore[method-assign]


def _stop_being_silent() -> None:
    LivenessChallenge.announce_again = _announce_again  # type: ignore[method-assign]
    for challenge in _silent:
        challenge.announce_again()


async def main() -> None:
    role, job, domain, lease_s, path = [*sys.argv[1:], "fast"][:5]
    if role == "prove":
        _keep_silent()
    roles = {"talk": talk, "receive": receive, "hesitate": hesitate, "live": live, "hold": hold, "prove": prove}
    async with (
        asyncio.timeout(60),
        gradbus.connect(job, domain=int(domain), lease_s=float(lease_s), fast=path == "fast", load_actors=False) as bus,
    ):
        await roles[role](bus)


if __name__ == "__main__":
    asyncio.run(main())
