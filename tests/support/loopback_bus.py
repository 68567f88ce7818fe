"""A bus on ``lo`` of a network namespace that has another interface as well."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from structlog.testing import capture_logs

import gradbus
from gradbus.commands.lab.namespaces import enter_namespace
from gradbus.runtime.transport.dds import discovery, domains, log_sink
from gradbus.runtime.wire.messages import Control


def run_forked(spec: dict[str, Any], pipe: Any) -> None:
    """Entry of a forked process: sends the ports of a bus, and each line that Cyclone writes. Ends with the pipe.

    ``bound``: its sockets take what comes over ``lo`` alone, as they do outside of tests.
    """
    enter_namespace(spec["namespace"])
    if not spec["bound"]:
        domains.keep_to_loopback = lambda domain_id: True
    log_sink.WINDOW_S = 0.1
    with contextlib.suppress(EOFError, OSError), capture_logs() as logs:
        asyncio.run(_hold(spec, pipe, logs))


async def _hold(spec: dict[str, Any], pipe: Any, logs: list[Any]) -> None:
    async with gradbus.connect(job="outside", domain=spec["domain"]) as bus:
        bus.open_writer(Control)
        first = 7400 + 250 * spec["domain"]
        ports = {one.getsockname()[1] for one in discovery.own_sockets(range(first, first + 250))}
        pipe.send({"event": "listens", "ports": sorted(ports)})
        while not pipe.poll():
            for line in [line["text"] for line in logs if line["event"] == "Cyclone DDS says"]:
                pipe.send({"event": "line", "text": line})
            logs.clear()
            await asyncio.sleep(0.02)
