"""A node joins while an outsider floods the topics of joining, over DDS and from a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bus_helpers import membership_of
from identities import Identities

import gradbus
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.security import Security

WITHIN_S = 15.0  # a lost Hello is said again after 5 s and half of it at most
FLOOD = Path(__file__).with_name("join_flood.py")


@contextmanager
def flooded(job: str, domain: int, name: str, public: bytes) -> Iterator[dict[str, int]]:
    """While the flood comes. What is given is filled with how many messages it was, when it is over."""
    sent: dict[str, int] = {}
    command = [sys.executable, str(FLOOD), job, str(domain), name, public.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "floods\n"
            yield sent
            process.stdin.close()
            sent |= json.loads(process.stdout.readlines()[-1])
        finally:
            process.kill()


async def in_s(bus: Bus) -> float:
    """How long it takes to be let in."""
    began_s = time.monotonic()
    async with asyncio.timeout(60):
        while membership_of(bus).party.keys is None:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.002)
    return time.monotonic() - began_s


def join_while_flooded(folder: str, domain: int) -> None:
    """Join as a node of the list while an outsider floods, three times."""
    known = Identities(Path(folder), clients=3)
    place = {"job": f"flood-{os.getpid()}", "domain": domain, "lease_s": 1.0}

    def opens(name: str) -> Bus:
        given = {k: Path(v) if k.endswith("_file") else v for k, v in known.security(name).items()}
        return gradbus.connect(**place, security=Security(**given))  # type: ignore[arg-type, return-value]

    async def main() -> None:
        async with opens("server") as server:
            target = known.keys["robot-1"]
            times = []
            with flooded(place["job"], domain, target.name, target.public) as sent:  # type: ignore[arg-type]
                async with asyncio.timeout(60):
                    while min(server.rejected[why] for why in ("stamp", "busy")) < 500:  # noqa: ASYNC110 - no event
                        await asyncio.sleep(0.01)
                for _ in range(3):
                    async with opens("robot-1") as bus:
                        times.append(await in_s(bus))
            assert sent["hello"] > 1000
            assert max(times) < WITHIN_S, times

    asyncio.run(main())
