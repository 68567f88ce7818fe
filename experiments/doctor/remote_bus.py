"""Two doctors that meet on DDS as members of a job do, and measure the way between them, both ways."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradbus.experiments.peer_link import Link
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BusError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.wire.messages import Control, Message, ModelBlob

_HERE_S = 0.25
_TRIPS = 50
_PING_BYTES = 64
_TRANSFER_BYTES = 8 << 20
_TRANSFERS = 3
_STEP_S = 10.0  # deadline of one answer
_MAX_DOCTORS = 32


@dataclass(slots=True)
class Met:
    """Another doctor on the bus.

    Attributes:
        host, address: as it says. sees_us: it says so, too. round_trip_s: of 64 bytes, median.
        there, back: bytes per second to it, and from it, in frames of 1 MiB. fault: what went wrong while measuring.
    """

    host: str
    address: str
    sees_us: bool = False
    round_trip_s: float | None = None
    there: float | None = None
    back: float | None = None
    fault: str = ""

    @property
    def measured(self) -> bool:
        """Whether all is known that will be."""
        return self.back is not None or bool(self.fault)


@dataclass(slots=True)
class Meeting:
    """This doctor's side.

    Attributes:
        met: others, by the number that each has made up. doubt: what was heard of others that are set up differently.
    """

    number: int
    host: str
    address: str
    met: dict[int, Met] = field(default_factory=dict)
    doubt: str = ""
    _answers: dict[tuple[int, str], asyncio.Future[None]] = field(default_factory=dict)
    _received: dict[int, int] = field(default_factory=dict)  # bytes of the payload that comes, by sender

    async def run(self, bus: Bus) -> None:
        """Until cancelled."""
        with bus.subscribe(Control, ModelBlob) as inbox:
            link = Link(bus, self.number, inbox)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._say_here(bus, link), name="doctor-here")
                group.create_task(self._measure_all(link), name="doctor-measure")
                while True:
                    sender, word = await link.hear(partial(self._on_frame, link=link, group=group))
                    answer = self._on_word(sender, word, link)
                    if answer is not None:
                        group.create_task(answer, name="doctor-answer")

    def of(self, address: str) -> Met | None:
        """The doctor at an address."""
        return next((met for met in self.met.values() if met.address == address), None)

    async def _say_here(self, bus: Bus, link: Link) -> None:
        while True:
            self.doubt = bus.doubt
            await _say(link, "here", host=self.host, address=self.address, sees=sorted(self.met))
            await asyncio.sleep(_HERE_S)

    # What comes in

    def _on_word(self, sender: int, word: str, link: Link) -> Coroutine[Any, Any, None] | None:
        try:
            said: dict[str, Any] = parse_json(word)
            if said.get("to", self.number) != self.number:
                return None
            match said["word"]:
                case "here" if sender in self.met or len(self.met) < _MAX_DOCTORS:
                    host, address = plain_line(str(said["host"]))[:128], plain_line(str(said["address"]))[:64]
                    met = self.met.setdefault(sender, Met(host, address))
                    met.sees_us = self.number in said["sees"]
                case "ping":
                    return _say(link, "pong", to=sender, pad=str(said["pad"])[:_PING_BYTES])
                case "send":
                    return self._send(link, sender)
                case "pong" | "got" as answer:
                    self._give((sender, answer))
                case "result" if sender in self.met:
                    met = self.met[sender]
                    met.round_trip_s = float(said["round_trip_s"])
                    met.there, met.back = float(said["back"]), float(said["there"])  # as seen from here
                case "fault" if sender in self.met:
                    self.met[sender].fault = plain_line(str(said["text"]))[:300]
        except (ValueError, KeyError, TypeError):  # another program says something on this job
            pass
        return None

    def _on_frame(self, message: Message, link: Link, group: asyncio.TaskGroup) -> None:
        if not isinstance(message, ModelBlob):
            return
        frame = message.frame
        to, _, sender = frame.key.name.partition(" ")
        if to != str(self.number) or not sender.isdigit() or int(sender) not in self.met:
            return
        number = int(sender)
        self._received[number] = self._received.get(number, 0) + len(frame.data)
        if self._received[number] >= frame.total_bytes:  # one at a time: the next is sent when this one has come
            self._received[number] = 0
            self._give((number, "model"))
            group.create_task(_say(link, "got", to=number), name="doctor-got")

    def _give(self, key: tuple[int, str]) -> None:
        waiting = self._answers.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    # Measuring

    async def _measure_all(self, link: Link) -> None:
        """The doctor with the lower number measures, one after the other, and tells what came out."""
        while True:
            for number, met in list(self.met.items()):
                if number > self.number and met.sees_us and not met.measured:
                    await self._measure_one(link, number, met)
            await asyncio.sleep(_HERE_S)

    async def _measure_one(self, link: Link, number: int, met: Met) -> None:
        try:
            trips = []
            for _ in range(_TRIPS):
                started_s = time.perf_counter()
                await self._ask(link, number, "pong", _say(link, "ping", to=number, pad="." * _PING_BYTES))
                trips.append(time.perf_counter() - started_s)
            there, back = [], []
            for _ in range(_TRANSFERS):
                started_s = time.perf_counter()
                await self._ask(link, number, "got", self._send(link, number))
                there.append(_TRANSFER_BYTES / (time.perf_counter() - started_s))
                started_s = time.perf_counter()
                await self._ask(link, number, "model", _say(link, "send", to=number))
                back.append(_TRANSFER_BYTES / (time.perf_counter() - started_s))
        except (TimeoutError, BusError) as error:
            met.fault = str(error) or f"no answer within {_STEP_S:g} s: data does not get through"
            await _say(link, "fault", to=number, text=met.fault)
            return
        met.round_trip_s, met.there, met.back = (statistics.median(values) for values in (trips, there, back))
        await _say(link, "result", to=number, round_trip_s=met.round_trip_s, there=met.there, back=met.back)

    async def _ask(self, link: Link, number: int, answer: str, question: Awaitable[None]) -> None:
        waiting = self._answers[number, answer] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(_STEP_S):
            await question
            await waiting

    async def _send(self, link: Link, to: int) -> None:
        await link.send_model(bytes(_TRANSFER_BYTES), f"{to} {self.number}")


async def _say(link: Link, word: str, **facts: Any) -> None:
    await link.say(json.dumps({"word": word, **facts}))
