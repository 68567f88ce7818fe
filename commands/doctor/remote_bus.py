"""Two doctors that find each other on DDS as processes of a job do, and measure the way between them, both ways.

On one machine the second one is a child of the first.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradbus.commands.peer_link import Link
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BusError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.tasks import TaskGroup
from gradbus.runtime.wire.messages import Control, Message, ModelBlob

_ANNOUNCE_S = 0.1
_TRIPS = 50
_PING_BYTES = 64
_TRANSFER_BYTES = 8 << 20
_TRANSFERS = 3
STEP_S = 10.0  # deadline of one answer
_MAX_DOCTORS = 32


@dataclass(slots=True)
class BusPeer:
    """Another doctor on the bus.

    Attributes:
        host, address: as it has sent them. sees_us: it has received our samples.
        discovery_s: from the moment it opened its bus to its first sample here; for one of this machine only.
        round_trip_s: of 64 bytes, median. there, back: bytes per second to it, and from it, in frames of 1 MiB.
        fault: the error while measuring.
    """

    host: str
    address: str
    discovery_s: float = 0.0
    sees_us: bool = False
    round_trip_s: float | None = None
    there: float | None = None
    back: float | None = None
    fault: str = ""

    @property
    def measured(self) -> bool:
        """Whether its measurement is over."""
        return self.back is not None or bool(self.fault)


@dataclass(slots=True)
class PeerMeasurements:
    """The measurements of one doctor with all others on the bus.

    Attributes:
        found: other doctors, by the random number of each. misconfiguration: the bus's hint at others with different
            settings.
    """

    number: int
    host: str
    address: str
    found: dict[int, BusPeer] = field(default_factory=dict)
    misconfiguration: str = ""
    _opened_ns: int = field(default_factory=time.monotonic_ns)  # the same clock for all processes of a machine
    _answers: dict[tuple[int, str], asyncio.Future[None]] = field(default_factory=dict)
    _received: dict[int, int] = field(default_factory=dict)  # bytes of the payload that comes, by sender

    async def run(self, bus: Bus) -> None:
        """Until cancelled."""
        with bus.subscribe(Control, ModelBlob) as inbox:
            link = Link(bus, self.number, inbox)
            async with TaskGroup() as group:
                group.create_task(self._announce(bus, link), name="doctor-here")
                group.create_task(self._measure_all(link), name="doctor-measure")
                while True:
                    sender, word = await link.hear(partial(self._on_frame, link=link, group=group))
                    answer = self.on_word(sender, word, link)
                    if answer is not None:
                        group.create_task(answer, name="doctor-answer")

    def of(self, address: str) -> BusPeer | None:
        """The doctor at an address."""
        return next((peer for peer in self.found.values() if peer.address == address), None)

    async def _announce(self, bus: Bus, link: Link) -> None:
        while True:
            self.misconfiguration = bus.misconfiguration
            facts = {"host": self.host, "address": self.address, "opened_ns": self._opened_ns}
            await _publish(link, "here", **facts, sees=sorted(self.found))
            await asyncio.sleep(_ANNOUNCE_S)

    # Incoming messages

    def on_word(self, sender: int, word: str, link: Link) -> Coroutine[Any, Any, None] | None:
        """Take a message of another doctor, JSON that nobody has looked at yet. What it asks for is returned, to be
        awaited; None where it asks for nothing, or is none that a doctor sends."""
        try:
            fields: dict[str, Any] = parse_json(word)
            if not isinstance(fields, dict) or fields.get("to", self.number) != self.number:
                return None
            match fields["word"]:
                case "here" if sender in self.found or len(self.found) < _MAX_DOCTORS:
                    host, address = plain_line(str(fields["host"]))[:128], plain_line(str(fields["address"]))[:64]
                    discovery_s = (time.monotonic_ns() - int(fields["opened_ns"])) / 1e9
                    peer = self.found.setdefault(sender, BusPeer(host, address, discovery_s))
                    peer.sees_us = self.number in fields["sees"]
                case "ping":
                    return _publish(link, "pong", to=sender, pad=str(fields["pad"])[:_PING_BYTES])
                case "send":
                    return self._send(link, sender)
                case "pong" | "got" as answer:
                    self._resolve((sender, answer))
                case "result" if sender in self.found:
                    peer = self.found[sender]
                    peer.round_trip_s = float(fields["round_trip_s"])
                    peer.there, peer.back = float(fields["back"]), float(fields["there"])  # as seen from here
                case "fault" if sender in self.found:
                    self.found[sender].fault = plain_line(str(fields["text"]))[:300]
        except (ValueError, KeyError, TypeError, ArithmeticError):  # from another program in this job
            pass
        return None

    def _on_frame(self, message: Message, link: Link, group: TaskGroup) -> None:
        if not isinstance(message, ModelBlob):
            return
        frame = message.frame
        to, _, sender = frame.key.name.partition(" ")
        if to != str(self.number) or not sender.isdigit() or int(sender) not in self.found:
            return
        number = int(sender)
        self._received[number] = self._received.get(number, 0) + len(frame.data)
        if self._received[number] >= frame.total_bytes:  # one at a time: the next is sent when this one has come
            self._received[number] = 0
            self._resolve((number, "model"))
            group.create_task(_publish(link, "got", to=number), name="doctor-got")

    def _resolve(self, key: tuple[int, str]) -> None:
        waiting = self._answers.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    # Measuring

    async def _measure_all(self, link: Link) -> None:
        """Measure one doctor after the other: of two, the one with the lower number does, and publishes the result."""
        while True:
            for number, peer in list(self.found.items()):
                if number > self.number and peer.sees_us and not peer.measured:
                    await self._measure_one(link, number, peer)
            await asyncio.sleep(_ANNOUNCE_S)

    async def _measure_one(self, link: Link, number: int, peer: BusPeer) -> None:
        try:
            trips = []
            for _ in range(_TRIPS):
                started_s = time.perf_counter()
                await self._ask(link, number, "pong", _publish(link, "ping", to=number, pad="." * _PING_BYTES))
                trips.append(time.perf_counter() - started_s)
            there, back = [], []
            for _ in range(_TRANSFERS):
                started_s = time.perf_counter()
                await self._ask(link, number, "got", self._send(link, number))
                there.append(_TRANSFER_BYTES / (time.perf_counter() - started_s))
                started_s = time.perf_counter()
                await self._ask(link, number, "model", _publish(link, "send", to=number))
                back.append(_TRANSFER_BYTES / (time.perf_counter() - started_s))
        except (TimeoutError, BusError) as error:
            peer.fault = str(error) or f"no answer within {STEP_S:g} s: data does not get through"
            await _publish(link, "fault", to=number, text=peer.fault)
            return
        peer.round_trip_s, peer.there, peer.back = (statistics.median(values) for values in (trips, there, back))
        await _publish(link, "result", to=number, round_trip_s=peer.round_trip_s, there=peer.there, back=peer.back)

    async def _ask(self, link: Link, number: int, answer: str, question: Awaitable[None]) -> None:
        waiting = self._answers[number, answer] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(STEP_S):
            await question
            await waiting

    async def _send(self, link: Link, to: int) -> None:
        await link.send_model(bytes(_TRANSFER_BYTES), f"{to} {self.number}")


async def _publish(link: Link, word: str, **facts: Any) -> None:
    await link.say(json.dumps({"word": word, **facts}))
