"""A reader in the benchmark of the bus: ``python -m gradbus.experiments.bench.bus_peer ID DOMAIN ...``, a child.

It has one bus for each of the domains that are named, and answers on each what the root says there.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

import gradbus
from gradbus.experiments.bench.bus_words import DOMAINS, ECHO, LATE, WATCH, Words
from gradbus.experiments.bench.bus_words import network as network_of
from gradbus.experiments.bench_process import loop_gaps, percentile
from gradbus.experiments.peer_link import END, GOT, HERE, PING, ROOT, Arrivals
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.wire.messages import Control, ModelBlob

_LIFETIME_S = 300.0  # whatever becomes of the root


async def serve(bus: Bus, me: int) -> None:
    """Answer until the root says that it is over."""
    # Bounded by the root, which sends no more before it has heard of the last one.
    answers: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    def arrived(message: ModelBlob) -> None:
        key = message.frame.key
        echo = bytes(message.frame.total_bytes) if key.name == ECHO else b""
        answers.put_nowait((f"{GOT} {key.transfer}", echo))

    with bus.subscribe(Control, ModelBlob) as inbox:
        words, arrivals = Words(bus, me, inbox), Arrivals(arrived)

        async def answer() -> None:
            while True:
                word, payload = await answers.get()
                await (words.send_update(payload) if payload else words.say(word))

        answering = asyncio.create_task(answer(), name="answer")
        try:
            async with AsyncExitStack() as watching:
                gaps: list[float] = []
                while True:
                    sender, word = await words.hear(arrivals)
                    if sender != ROOT:
                        continue
                    if word == END:
                        return
                    if word == WATCH:
                        gaps = await watching.enter_async_context(loop_gaps(True))
                    elif word == LATE:
                        await watching.aclose()
                        await words.say(f"{LATE} {percentile(gaps, 0.99)}")
                    elif word == HERE or word.startswith(PING):
                        await words.say(word)
        finally:
            answering.cancel()


async def _main(me: int, names: list[str]) -> None:
    job = names.pop()
    async with asyncio.timeout(_LIFETIME_S), AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for name in names:
            connecting = gradbus.connect(job, domain=DOMAINS[name], network=network_of(name))
            group.create_task(serve(await stack.enter_async_context(connecting), me))


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2:]))
