"""A process on a host of its own, whose peers have names, that joins a group or meets another: ``late_member.py JSON``.

It says what happens in JSON lines on stdout; those of its log go to stderr.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # this folder is for the import of helpers only
    sys.path.remove(str(Path(__file__).parent))

import gradbus
from gradbus.runtime import logs
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.security import Security
from gradbus.runtime.wire.messages import Control


def say(event: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


async def meet(bus: Bus, wait_s: float) -> None:
    """Wait until the endpoints of both sides match, each its own and that of the other."""
    with bus.subscribe(Control):
        bus.open_writer(Control)
        await bus.matched(
            lambda: min(bus.matched_readers(Control), bus.matched_writers(Control)) == 2, timeout_s=wait_s
        )


async def main(spec: dict[str, Any]) -> None:
    network = gradbus.NetworkConfig(profile="network", shared_memory=False, **spec["network"])
    security = Security(level="none", insecure=True)  # in a network namespace nobody else is there
    place = {"domain": spec["domain"], "network": network, "security": security}
    async with gradbus.connect("late", **place, load_actors=spec["is_group"]) as bus:
        say("open")
        wait_s = spec["wait_s"]
        if not spec["is_group"]:
            await meet(bus, wait_s)
            say("done", gathered=[])
            await asyncio.sleep(wait_s)  # the other one may still look for this one; the test ends both
            return
        async with gradbus.join_group(
            bus, rank=spec["rank"], world=2, timeout_s=wait_s, collective_timeout_s=wait_s
        ) as group:
            gathered = await group.all_gather("names", f"rank {spec['rank']}".encode())
            say("done", gathered=[bytes(one).decode() for one in gathered])


if __name__ == "__main__":
    logs.configure(style="json")
    asyncio.run(main(json.loads(sys.argv[1])))
