"""The bus: round trips and streams between two processes against bare TCP, one writer to many readers, the event loop.

This process writes; each reader is a process with one bus for each way that is measured, and answers on each what it is
sent. The ways are DDS by unicast, DDS by multicast, and a relay of this machine, to which all dial over TLS.

    make bench PART=bus
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gradbus
from gradbus.commands.peer_link import END, GOT, HERE, PING, ROOT, Link
from gradbus.experiments.bench.bare_dds import DdsEcho
from gradbus.experiments.bench.command import Benchmark, Part, add_effort
from gradbus.experiments.bench.processes import LEASE_S, Processes
from gradbus.experiments.bench.relay import RelayPlace, TlsFolder, relay_process
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.tcp import Echo
from gradbus.experiments.bench.ticker import loop_gaps
from gradbus.experiments.bench.timing import KIB, MIB, in_turns, percentile, size_text
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.security.job_key import new_job_key, write_secret_file
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Control, Message, ModelBlob

UNICAST, MULTICAST, RELAY = "unicast", "multicast", "relay"
_DOMAINS = {UNICAST: 23, MULTICAST: 24}  # a domain has one network configuration in a process
_WATCH, _LATE = "watch", "late"
_ECHO = "echo"  # name of a transfer that is to come back
_ANSWER_S = 20.0
_MEET_S = 120.0  # eight processes start, and the machine may be busy
_LIFETIME_S = 300.0  # of a reader, whatever becomes of the writer
_PING_BYTES, _LARGE_BYTES = 64, 64 * KIB
_BARE_TRIPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BusPlan:
    """``blocks``: of each figure. ``trips``: round trips of one. ``stream_bytes``: of a stream in one. ``fan_bytes``:
    of what goes to all ``readers``, ``fans`` times in a block."""

    blocks: int
    trips: int
    streams: Sequence[int] = (MIB, 4 * MIB)
    stream_bytes: int = 32 * MIB
    readers: Sequence[int] = (2, 4, 8)
    fan_bytes: int = 16 * MIB
    fans: int = 3


PLANS = {
    "tiny": BusPlan(blocks=2, trips=5, streams=(MIB,), stream_bytes=2 * MIB, readers=(), fans=1),
    "quick": BusPlan(blocks=7, trips=100),
    "full": BusPlan(blocks=15, trips=300, stream_bytes=64 * MIB),
}


def measure(chosen: argparse.Namespace) -> list[Measurement]:
    """All figures of the bus over DDS."""
    return asyncio.run(_measure(PLANS[chosen.effort]))


async def _measure(plan: BusPlan) -> list[Measurement]:
    async with _Writer.open([UNICAST], 1) as writer:
        figures = [*await _pair_figures(writer, plan), *await _gap_figures(writer, plan, UNICAST)]
    for count in plan.readers:
        async with _Writer.open([UNICAST, MULTICAST], count) as writer:
            figures += await _fan_figures(writer, plan, count, MULTICAST)
    return figures


def measure_relay(chosen: argparse.Namespace) -> list[Measurement]:
    """Return the same figures over a relay, with those of DDS from the same processes, by turns."""
    with tempfile.TemporaryDirectory(prefix="gradbus-bus-") as folder:
        files, key = TlsFolder(Path(folder) / "tls"), Path(folder) / "job.key"
        write_secret_file(key, new_job_key().text)
        with relay_process(files) as (_, port):
            return asyncio.run(_measure_relay(PLANS[chosen.effort], RelayPlace(port, files.ca, key)))


async def _measure_relay(plan: BusPlan, relay: RelayPlace) -> list[Measurement]:
    async with _Writer.open([UNICAST, RELAY], 1, relay) as writer:
        figures = [*await _relayed_pair_figures(writer, plan), *await _gap_figures(writer, plan, RELAY)]
    for count in plan.readers:
        async with _Writer.open([UNICAST, RELAY], count, relay) as writer:
            figures += await _fan_figures(writer, plan, count, RELAY)
    return figures


def _connect(name: str, job: str, relay: RelayPlace | None) -> AbstractAsyncContextManager[Bus]:
    if name == RELAY:
        assert relay is not None
        return relay.connect(job)
    network = gradbus.NetworkConfig(multicast=name == MULTICAST, lease_s=LEASE_S)
    return gradbus.connect(job, domain=_DOMAINS[name], network=network)


class Arrivals:
    """Counts the bytes of each transfer; ``done`` is called with the last frame of one."""

    def __init__(self, done: Callable[[ModelBlob], None]) -> None:
        self._done = done
        self._received: dict[int, int] = {}

    def __call__(self, message: Message) -> None:
        if isinstance(message, ModelBlob):
            frame = message.frame
            transfer = frame.key.transfer
            self._received[transfer] = self._received.get(transfer, 0) + len(frame.data)
            if self._received[transfer] == frame.total_bytes:
                del self._received[transfer]
                self._done(message)


class _End(Link):
    """One end of a bus: a link that sends updates, and waits for all peers that it has sent a word to."""

    async def hear_all(self, start: str, peers: Sequence[int], *, timeout_s: float = _ANSWER_S) -> list[str]:
        """The word of each peer that starts so.

        Raises:
            TimeoutError: some have not sent it in time; the text names them.
        """
        words: dict[int, str] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while len(words) < len(peers):
                    sender, word = await self.hear()
                    if sender in peers and word.startswith(start):
                        words[sender] = word
        except TimeoutError:
            silent = sorted(set(peers) - words.keys())
            raise TimeoutError(f"readers {silent} have not sent {start!r} after {timeout_s:g} s") from None
        return [words[peer] for peer in peers]

    async def meet_writer(self) -> None:
        """Wait until the writer can be sent updates: the channel retains none, so what is sent before is lost."""
        self._bus.open_writer(ClientUpdate)
        await self._bus.matched(lambda: self._bus.matched_readers(ClientUpdate) > 0, timeout_s=_ANSWER_S)

    async def send_update(self, payload: bytes) -> None:
        """Send to the writer of the benchmark."""
        self._transfers += 1
        me = self.identity
        await self._bus.send_update(FrameKey(Kind.UPDATE, 1, 0, me.sender, me.incarnation, self._transfers), 1, payload)

    async def receive_update(self) -> None:
        """Wait until one update is here in full."""
        received = 0
        async with asyncio.timeout(_ANSWER_S):
            while True:
                message = await self._inbox.get()
                if isinstance(message, ClientUpdate):
                    received += len(message.frame.data)
                    if received == message.frame.total_bytes:
                        return


# A reader


async def read(me: int, names: Sequence[str], job: str, relay: RelayPlace | None) -> None:
    """The whole life of a reader."""
    async with asyncio.timeout(_LIFETIME_S), AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(_answer(await stack.enter_async_context(_connect(name, job, relay)), me))


async def _answer(bus: Bus, me: int) -> None:
    """Answer until the writer says that it is over."""
    arrived: list[ModelBlob] = []
    arrivals = Arrivals(arrived.append)
    gaps: list[float] = []
    with bus.subscribe(Control, ModelBlob) as inbox:
        end = _End(bus, me, inbox)
        async with AsyncExitStack() as watching:
            while True:
                match await inbox.get():
                    case Control(sender=0, body=Leave(reason=word)):
                        if word == END:
                            return
                        if word == _WATCH:
                            gaps = await watching.enter_async_context(loop_gaps())
                        elif word == _LATE:
                            await watching.aclose()
                            await end.say(f"{_LATE} {percentile(gaps, 0.99)}")
                        elif word == HERE or word.startswith(PING):
                            await end.say(word)
                    case message:
                        arrivals(message)
                        while arrived:
                            frame = arrived.pop().frame
                            if frame.key.name == _ECHO:
                                await end.meet_writer()
                                await end.send_update(bytes(frame.total_bytes))
                            else:
                                await end.say(f"{GOT} {frame.key.transfer}")


# The writer


class _Writer:
    """The writer's ends by way, and its readers."""

    def __init__(self, ends: dict[str, _End], readers: Sequence[int]) -> None:
        self.ends = ends
        self.readers = readers

    @classmethod
    @asynccontextmanager
    async def open(cls, names: Sequence[str], count: int, relay: RelayPlace | None = None) -> AsyncIterator[_Writer]:
        """Start the readers, and meet them on every bus. ``relay``: where they meet by that way."""
        job, readers, ends = f"bench-bus-{os.getpid()}", range(1, count + 1), {}
        with Processes() as processes:
            for reader in readers:
                processes.start(f"reader {reader}", read, reader, names, job, relay)
            async with AsyncExitStack() as stack:
                for name in names:
                    bus = await stack.enter_async_context(_connect(name, job, relay))
                    inbox = stack.enter_context(bus.subscribe(Control, ClientUpdate))
                    ends[name] = _End(bus, ROOT, inbox)
                for end in ends.values():
                    async with end.saying(HERE):
                        await end.hear_all(HERE, readers, timeout_s=_MEET_S)
                yield cls(ends, readers)
                for end in ends.values():
                    await end.say(END)
                await asyncio.to_thread(processes.results, _ANSWER_S)

    async def send_ms(self, name: str, size: int, count: int) -> float:
        """Milliseconds, of one of so many transfers, until all are at all readers, by their word for the last one."""
        end, payload = self.ends[name], bytes(size)
        began_s = time.perf_counter()
        for _ in range(count):
            transfer = await end.send_model(payload)
        await end.hear_all(f"{GOT} {transfer}", self.readers)
        return 1e3 * (time.perf_counter() - began_s) / count


_Trip = Callable[[], Awaitable[None]]


def _trips_of(writer: _Writer, name: str) -> dict[str, tuple[_Trip, int]]:
    """Return what makes a round trip to the first reader by a way, and its bytes each way, by title."""
    end, ping = writer.ends[name], PING.ljust(_PING_BYTES, ".")

    async def small() -> None:
        await end.say(ping)
        await end.hear_all(ping, writer.readers)

    async def large() -> None:
        await end.send_model(bytes(_LARGE_BYTES), _ECHO)
        await end.receive_update()

    return {"64 B": (small, _PING_BYTES), "64 KiB": (large, _LARGE_BYTES)}


async def _trip_us(trip: _Trip, count: int) -> float:
    """Return the microseconds of a round trip, the median of so many."""
    taken = []
    for _ in range(count):
        began_s = time.perf_counter()
        await trip()
        taken.append(time.perf_counter() - began_s)
    return 1e6 * statistics.median(taken)


async def _bare_us(one: Echo | DdsEcho, size: int) -> float:
    return 1e6 * statistics.median(one.round_trip_s(size) for _ in range(_BARE_TRIPS))


async def _bare_stream_ms(echo: Echo, size: int, count: int) -> float:
    return 1e3 * echo.stream_s(size, count) / count


async def _pair_figures(writer: _Writer, plan: BusPlan) -> list[Measurement]:
    figures = []
    with Echo() as echo, DdsEcho() as dds_echo:
        for name, (trip, size) in _trips_of(writer, UNICAST).items():
            alone = {"tcp": partial(_bare_us, echo, size), "dds": partial(_bare_us, dds_echo, size)}
            taken = await _by_turns(plan.blocks, bus=partial(_trip_us, trip, plan.trips), **alone)
            note, against = f"Cyclone DDS alone: {statistics.median(taken['dds']):.0f} us", ("TCP", taken["tcp"])
            figures.append(measurement(f"round trip, {name}", "us", taken["bus"], against=against, note=note))
        for size in plan.streams:
            count = plan.stream_bytes // size
            stream = partial(writer.send_ms, UNICAST, size, count)
            taken = await _by_turns(plan.blocks, bus=stream, tcp=partial(_bare_stream_ms, echo, size, count))
            note = _rate_text(size, taken["bus"])
            name = f"stream of {size_text(size)} messages"
            figures.append(measurement(name, "ms", taken["bus"], against=("TCP", taken["tcp"]), note=note))
    return figures


async def _relayed_pair_figures(writer: _Writer, plan: BusPlan) -> list[Measurement]:
    """Return round trips and streams over a relay, against bare TCP between the two without a relay."""
    figures = []
    by_dds = _trips_of(writer, UNICAST)
    with Echo() as echo:
        for name, (trip, size) in _trips_of(writer, RELAY).items():
            dds = partial(_trip_us, by_dds[name][0], plan.trips)
            bus = partial(_trip_us, trip, plan.trips)
            taken = await _by_turns(plan.blocks, bus=bus, dds=dds, tcp=partial(_bare_us, echo, size))
            note = f"over DDS: {statistics.median(taken['dds']):.0f} us"
            title, against = f"round trip over a relay, {name}", ("TCP", taken["tcp"])
            figures.append(measurement(title, "us", taken["bus"], against=against, note=note))
        for size in plan.streams:
            count = plan.stream_bytes // size
            bus, dds = (partial(writer.send_ms, way, size, count) for way in (RELAY, UNICAST))
            tcp = partial(_bare_stream_ms, echo, size, count)
            taken = await _by_turns(plan.blocks, bus=bus, dds=dds, tcp=tcp)
            note = f"{_rate_text(size, taken['bus'])}; over DDS: {statistics.median(taken['dds']):.3g} ms"
            title, against = f"stream of {size_text(size)} messages over a relay", ("TCP", taken["tcp"])
            figures.append(measurement(title, "ms", taken["bus"], against=against, note=note))
    return figures


def _rate_text(size: int, taken_ms: Sequence[float]) -> str:
    return f"{size / statistics.median(taken_ms) / 1e3:,.0f} MB/s"


async def _gap_figures(writer: _Writer, plan: BusPlan, way: str) -> list[Measurement]:
    """Return how late the loops of both ends are while 4 MiB messages go through by a way: p99 of each block."""
    out_ms, in_ms, end = [], [], writer.ends[way]
    for _ in range(plan.blocks):
        await end.say(_WATCH)
        async with loop_gaps() as gaps:
            await writer.send_ms(way, 4 * MIB, max(1, plan.stream_bytes // (4 * MIB)))
        await end.say(_LATE)
        (word,) = await end.hear_all(_LATE, writer.readers)
        out_ms.append(1e3 * percentile(gaps, 0.99))
        in_ms.append(1e3 * float(word.split()[1]))
    note = "p99 of each block; a task that wants to run every millisecond"
    return [
        measurement("event loop late while 4 MiB messages go out", "ms", out_ms, note=note),
        measurement("event loop late while 4 MiB messages come in", "ms", in_ms, note=note),
    ]


async def _fan_figures(writer: _Writer, plan: BusPlan, count: int, way: str) -> list[Measurement]:
    """Return what one large message to all readers takes by unicast, and by another way."""
    sends = {name: partial(writer.send_ms, name, plan.fan_bytes, plan.fans) for name in (UNICAST, way)}
    ms = await _by_turns(plan.blocks, **sends)
    name, unicast = f"{size_text(plan.fan_bytes)} to {count} readers", ms[UNICAST]
    if way == RELAY:
        return [measurement(f"{name}, over a relay", "ms", ms[way], against=("DDS", unicast))]
    return [
        measurement(f"{name}, unicast", "ms", unicast),
        measurement(f"{name}, multicast", "ms", ms[way], against=("unicast", unicast)),
    ]


async def _by_turns(blocks: int, **samples: Callable[[], Awaitable[float]]) -> dict[str, list[float]]:
    """So many samples of each, by turns, after one of each that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in samples}
    for sample in samples.values():
        await sample()
    for name in in_turns(samples, blocks):
        taken[name].append(await samples[name]())
    return taken


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "bus-dds": Part(measure, "Bus", 30, 20),
        "bus-relay": Part(measure_relay, "Bus over a relay", 75, 40),
    },
    lambda parser: add_effort(parser, "fewer blocks"),
)
