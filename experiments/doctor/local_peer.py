"""The other end of the doctor's measurement: ``python -m gradbus.experiments.doctor.local_peer SETTINGS``, a child."""

from __future__ import annotations

import asyncio
import sys
import time

from gradbus.experiments.buses import open_bus
from gradbus.experiments.peer_link import END, GOT, HERE, PEER, Arrivals, Link
from gradbus.runtime.config.federated import BusSettings
from gradbus.runtime.wire.messages import Control, ModelBlob

_LIFETIME_S = 20.0  # whatever becomes of the doctor


async def serve(settings: BusSettings) -> None:
    """Echo words and acknowledge transfers until the doctor says that it is over."""
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


async def _main(settings: BusSettings) -> None:
    async with asyncio.timeout(_LIFETIME_S):
        await serve(settings)


if __name__ == "__main__":
    asyncio.run(_main(BusSettings.model_validate_json(sys.argv[1])))
