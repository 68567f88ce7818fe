"""A process on a host of its own, whose peers have names, that joins a group or meets another.

It sends what happens into a pipe, and what it logs.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from host_files import enter_host

import gradbus
from gradbus.runtime import logs
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.security import Security
from gradbus.runtime.wire.messages import Control


class Events(io.TextIOBase):
    """A stderr whose lines are JSON, each of which is sent."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        """``send``: may be called by any thread."""
        self._send = send

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.startswith("{"):
                self._send(json.loads(line))
        return len(text)


async def meet(bus: Bus, wait_s: float) -> None:
    """Wait until the endpoints of both sides match, each its own and that of the other."""
    with bus.subscribe(Control):
        bus.open_writer(Control)
        await bus.matched(
            lambda: min(bus.matched_readers(Control), bus.matched_writers(Control)) == 2, timeout_s=wait_s
        )


async def main(spec: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    network = gradbus.NetworkConfig(profile="network", shared_memory=False, **spec["network"])
    security = Security(level="none", insecure=True)  # in a network namespace nobody else is there
    place = {"domain": spec["domain"], "network": network, "security": security}
    async with gradbus.connect("late", **place, load_actors=spec["is_group"]) as bus:
        send({"event": "open"})
        wait_s = spec["wait_s"]
        if not spec["is_group"]:
            await meet(bus, wait_s)
            send({"event": "done", "gathered": []})
            await asyncio.sleep(wait_s)  # the other one may still look for this one; the test ends both
            return
        async with gradbus.join_group(
            bus, rank=spec["rank"], world=2, timeout_s=wait_s, collective_timeout_s=wait_s
        ) as group:
            gathered = await group.all_gather("names", f"rank {spec['rank']}".encode())
            send({"event": "done", "gathered": [bytes(one).decode() for one in gathered]})


def run(spec: dict[str, Any], pipe: Connection) -> None:
    """Entry of a forked process: events go into the pipe."""
    lock = threading.Lock()

    def send(event: dict[str, Any]) -> None:
        with lock:  # threads of the bus log, too
            pipe.send(event)

    enter_host(spec["host"])
    sys.stderr = Events(send)
    logs.configure(style="json")
    asyncio.run(main(spec, send))
