"""DDS between this process and a child: discovery, round trip, throughput, measured as between two machines."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from dataclasses import dataclass

from gradbus.commands.buses import open_bus
from gradbus.commands.doctor.remote_bus import BusPeer, PeerMeasurements
from gradbus.runtime import logs
from gradbus.runtime.config.bus import BusSettings

DEADLINE_S = 20.0  # some seconds are the start of a Python process, where the machine is busy
_LIFETIME_S = 60.0  # of the second process, even where the doctor is killed


@dataclass(slots=True)
class LocalMeasurement:
    """``fast_path``: samples go through libddsc without the GIL. ``peer``: the second process, None: not found.

    ``fault``: the last line of a second process that has ended with an error, else empty.
    """

    fast_path: bool
    peer: BusPeer | None = None
    fault: str = ""


async def measure(settings: BusSettings) -> LocalMeasurement:
    """Measure with these settings, in a job of its own. Raises ConfigError, BusError: the bus cannot be opened."""
    settings = settings.model_copy(update={"job": f"doctor-{secrets.token_hex(4)}"})
    async with open_bus(settings) as bus:
        own = PeerMeasurements(0, "this machine", "")
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "gradbus.commands.doctor.local_bus",
            settings.model_dump_json(),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        running, ended = (asyncio.create_task(wait) for wait in (own.run(bus), child.wait()))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEADLINE_S):
                    while not ended.done() and not any(peer.measured for peer in own.found.values()):
                        await asyncio.wait([running, ended], timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                        if running.done():
                            await running
        finally:
            running.cancel()
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await asyncio.wait([running, ended])
        _, errors = await child.communicate()
    lines = errors.decode(errors="replace").strip().splitlines()
    peer = next(iter(own.found.values()), None)
    return LocalMeasurement(bus.fast_path, peer, lines[-1] if lines and peer is None else "")


async def _serve(settings: BusSettings) -> None:
    """The second process: answers until the doctor ends it."""
    async with asyncio.timeout(_LIFETIME_S), open_bus(settings) as bus:
        await PeerMeasurements(1, "this machine", "").run(bus)


if __name__ == "__main__":
    logs.configure(level="error")  # else its warnings stand in the midst of the doctor's report
    asyncio.run(_serve(BusSettings.model_validate_json(sys.argv[1])))
