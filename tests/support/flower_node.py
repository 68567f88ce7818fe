"""A node in a process of its own that never answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import gradbus
from gradbus.actors.flower.node import MessageNode
from gradbus.actors.flower.protocol import NodePlace


class Hanging:
    """Takes an instruction, and keeps it."""

    def begin(self, run_id: int, options: Mapping[str, Any]) -> None:
        pass

    def answer(self, payload: memoryview, number: int) -> list[bytes | memoryview]:
        threading.Event().wait()
        raise AssertionError

    def refuse(self, reason: str) -> list[bytes | memoryview]:
        raise AssertionError(reason)


def hang(place: dict[str, Any]) -> None:
    """Entry of a forked process."""

    async def run() -> None:
        async with gradbus.connect(**place) as bus:
            await MessageNode(bus, Hanging(), place=NodePlace.of_partition(1, 2)).run()

    asyncio.run(run())
