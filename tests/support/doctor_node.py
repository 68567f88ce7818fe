"""A doctor that looks for others, in the network of a namespace."""

from __future__ import annotations

import asyncio
from typing import Any

from gradbus.commands.doctor.peers import look_for
from gradbus.commands.lab.namespaces import enter_namespace
from gradbus.runtime.config.bus import BusSettings


def run_forked(spec: dict[str, Any], pipe: Any) -> None:
    """Entry of a forked process: tells its findings."""
    enter_namespace(spec["namespace"])
    settings = BusSettings(network="network", insecure=True, **spec["settings"])
    found = asyncio.run(look_for(settings, wait_s=spec["wait_s"], say=lambda text: None))
    pipe.send({"found": [(one.name, one.value, one.severity.value, one.cure) for one in found]})
