"""DDS, measured between this process and a child: discovery, round trip, throughput. A few seconds in all."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import sys
import time
from dataclasses import dataclass

from gradbus.experiments.buses import open_bus
from gradbus.experiments.peer_link import END, GOT, HERE, PEER, PING, ROOT, Arrivals, Link
from gradbus.runtime.config.federated import BusSettings
from gradbus.runtime.errors import BusError
from gradbus.runtime.wire.messages import Control, ModelBlob

MET_WITHIN_S = 15.0  # of it some seconds are the start of a Python process, where the machine is busy
_PING_BYTES = 64
_TRIPS = 200
_TRANSFER_BYTES = 32 << 20
_MEASURE_S = 1.5
_STEP_S = 2.5  # deadline of a single answer
_PEER_LIFETIME_S = 20.0  # even where the doctor is killed


@dataclass(slots=True)
class LocalMeasurement:
    """The measurement with a second process of this machine; None: it ended before that.

    Attributes:
        fast_path: samples go through libddsc without the GIL.
        discovery_s: from the moment that the second process opens its bus until its first sample arrives.
        round_trip_s: of 64 bytes, median. throughput: bytes per second, in frames of 1 MiB.
        fault: the error, as text.
    """

    fast_path: bool | None = None
    discovery_s: float | None = None
    round_trip_s: float | None = None
    throughput: float | None = None
    fault: str | None = None
    met: bool = False


async def measure(settings: BusSettings) -> LocalMeasurement:
    """Measure with these settings, in a job of its own.

    Raises:
        ConfigError, BusError: the bus cannot be opened.
    """
    settings = settings.model_copy(update={"job": f"doctor-{secrets.token_hex(4)}"})
    found = LocalMeasurement()
    async with open_bus(settings) as bus:
        found.fast_path = bus.fast_path
        with bus.subscribe(Control) as inbox:
            link = Link(bus, ROOT, inbox)
            peer = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "gradbus.experiments.doctor.local_bus", settings.model_dump_json(),
                stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                await _talk(link, found)
            except (TimeoutError, BusError) as error:
                found.fault = str(error) or "no answer in time"
            finally:
                await _end(peer, found)
    return found


async def _talk(link: Link, found: LocalMeasurement) -> None:
    async with asyncio.timeout(MET_WITHIN_S):
        word = await link.meet(HERE)
    found.met = True
    found.discovery_s = (time.monotonic_ns() - int(word.split()[1])) / 1e9
    ping, trips = PING.ljust(_PING_BYTES, "."), []
    for _ in range(_TRIPS):
        started_s = time.perf_counter()
        await link.say(ping)
        await _expect(link, ping)
        trips.append(time.perf_counter() - started_s)
    found.round_trip_s = statistics.median(trips)
    payload = bytes(_TRANSFER_BYTES)
    until_s = time.perf_counter() + _MEASURE_S
    rates: list[float] = []
    while len(rates) < 2 or time.perf_counter() < until_s:
        started_s = time.perf_counter()
        async with asyncio.timeout(_STEP_S):
            transfer = await link.send_model(payload)
        await _expect(link, f"{GOT} {transfer}")
        rates.append(_TRANSFER_BYTES / (time.perf_counter() - started_s))
    found.throughput = statistics.median(rates[1:])  # the first one fills the caches
    await link.say(END)


async def _expect(link: Link, wanted: str) -> None:
    async with asyncio.timeout(_STEP_S):
        while (await link.hear())[1] != wanted:
            pass


async def _end(peer: asyncio.subprocess.Process, found: LocalMeasurement) -> None:
    """Wait for the peer where the measurement was complete, else kill it; keep its last line as the fault."""
    try:
        async with asyncio.timeout(1.0 if found.throughput is not None else 0.0):
            await peer.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            peer.kill()
    _, errors = await peer.communicate()
    if not found.met and errors.strip():
        found.fault = f"the second process ended with: {errors.decode(errors='replace').strip().splitlines()[-1]}"


async def serve(settings: BusSettings) -> None:
    """The second process: echo words and acknowledge transfers until the doctor ends it."""
    opened_ns = time.monotonic_ns()  # the same clock for all processes of a machine
    async with open_bus(settings) as bus:
        with bus.subscribe(Control, ModelBlob) as inbox:
            link = Link(bus, PEER, inbox)
            answers: asyncio.Queue[str] = asyncio.Queue()  # bounded by the doctor, which waits for each
            arrivals = Arrivals(lambda last: answers.put_nowait(f"{GOT} {last.frame.key.transfer}"))

            async def answer() -> None:
                while True:
                    await link.say(await answers.get())

            answering = asyncio.create_task(answer(), name="answer")
            try:
                word = await link.meet(f"{HERE} {opened_ns}")
                while word != END:
                    if word != HERE:
                        await link.say(word)
                    _, word = await link.hear(arrivals)
            finally:
                answering.cancel()


async def _peer(settings: BusSettings) -> None:
    async with asyncio.timeout(_PEER_LIFETIME_S):
        await serve(settings)


if __name__ == "__main__":
    asyncio.run(_peer(BusSettings.model_validate_json(sys.argv[1])))
