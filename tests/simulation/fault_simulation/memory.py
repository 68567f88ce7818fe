"""The network in memory in virtual time, and how a virtual process gets its bus there."""

from __future__ import annotations

import contextlib
import contextvars
import zlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import Any

from fault_simulation.kernel import VirtualProcess, now_s
from fault_simulation.trace import Trace
from fault_simulation.virtual_loop import VirtualLoop
from gradbus.runtime.bus.bus import Bus, connect_over
from gradbus.runtime.security import Security
from gradbus.runtime.security.identity.opening import identity_membership
from gradbus.runtime.security.sealed import Sealed
from gradbus.runtime.transport.channels import is_control_name
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import EndpointPair
from gradbus.runtime.transport.memory.transport import MemoryTransport

OUTSIDE = contextvars.Context()  # in which the network itself acts
WINDOW_BYTES = 64 << 10  # 64 small samples: a run has too few to fill the window that is shipped


class VirtualSchedule:
    """Calls functions of the network at a virtual time: the :class:`.schedule.NetworkSchedule` of a simulation.
    No two callbacks run at the same time, so there is nothing to lock. Nothing waits; the time of a thread passes."""

    lock: AbstractContextManager[None] = contextlib.nullcontext()

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        """Return the virtual time."""
        return now_s()

    def at(self, when_s: float, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function of the network then."""
        self._loop.call_at(when_s, function, *arguments, context=OUTSIDE)

    def wait(self, node: VirtualProcess, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Note that a thread of the process has waited in vain: nothing else runs meanwhile."""
        if not is_over():
            node.blocked_s += timeout_s
        return is_over()

    def check(self) -> None:
        """Do nothing: an exception of the network ends the run."""

    def notify(self) -> None:
        """Do nothing: nobody waits."""

    def close(self) -> None:
        """Do nothing: the loop drops its callbacks itself."""


def virtual_network(loop: VirtualLoop, seed: int | str, trace: Trace) -> MemoryNetwork:
    """Return a network in virtual time whose deliveries are in the trace."""

    def note(pair: EndpointPair, sample: Any) -> None:
        data = getattr(sample, "data", b"")
        about = f"crc32 {zlib.crc32(data):08x}" if data else f"round {sample.round_id}"
        name = pair.reader.channel.name
        text = f"{pair.target.name} receives {name} of {pair.source.name}, {about}"
        trace.add(text, is_shown=not is_control_name(name))  # these are many, and all are repeated

    network = MemoryNetwork(seed, VirtualSchedule(loop))
    network.on_delivered = note
    network.window_bytes = WINDOW_BYTES
    return network


def connected(process: VirtualProcess, job: str = "simulation") -> AbstractAsyncContextManager[Bus]:
    """Open a bus of a virtual process, without protection."""
    return connect_over(partial(MemoryTransport, process.world.network, process), job)


def connected_with_identity(
    process: VirtualProcess, security: Security, job: str = "simulation"
) -> AbstractAsyncContextManager[Bus]:
    """Open a bus of a virtual process that has a key of its own: encrypted as it is on any transport."""

    def opened(job: str) -> Sealed:
        membership = identity_membership(job, security)
        return Sealed(MemoryTransport(process.world.network, process, job), membership)

    return connect_over(opened, job)
