"""The network in memory in virtual time, and how a virtual process gets its bus on any network."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from fault_simulation.faults import Fault
from fault_simulation.kernel import VirtualProcess
from fault_simulation.trace import Trace
from fault_simulation.virtual_loop import VirtualLoop
from fault_simulation.virtual_schedule import VirtualSchedule
from gradbus.runtime.bus.bus import Bus, connect_over
from gradbus.runtime.security import Security
from gradbus.runtime.security.identity.opening import identity_membership
from gradbus.runtime.security.sealed import Sealed
from gradbus.runtime.transport.api import Transport
from gradbus.runtime.transport.channels import is_control_name
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import EndpointPair
from gradbus.runtime.transport.memory.transport import MemoryTransport

WINDOW_BYTES = 64 << 10  # 64 small samples: a run has too few to fill the window that is shipped


class VirtualMemoryNetwork(MemoryNetwork):
    """The network in memory, as a world has it."""

    def transport(self, process: VirtualProcess, job: str) -> MemoryTransport:
        """Open the transport of a process."""
        return MemoryTransport(self, process, job)

    def set_circumstances(self, base_s: float, jitter_s: float, loss: float, refused: float, lease_s: float) -> None:
        """Set what a seed has drawn."""
        self.base_s, self.jitter_s, self.loss = base_s, jitter_s, loss
        self.refused, self.lease_s = refused, lease_s

    def linger(self) -> AbstractAsyncContextManager[None]:
        """Do nothing: the network itself sees to what is closed."""
        return contextlib.nullcontext()

    def inject(self, fault: Fault, process: VirtualProcess | None) -> None:
        """Let a fault of the network happen. Raises ValueError: only a relay has such a fault."""
        if fault.action != "cut":
            raise ValueError(f"no relay is between processes in memory: {fault}")
        self.cut(*fault.machines, fault.seconds)

    def overfull(self) -> Iterator[str]:
        """Yield what inlets hold too much of, in words."""
        for participant in self.participants:
            for inlet in participant.inlets:
                bound = inlet.channel.reader_samples
                if bound and len(inlet.queue) > bound:
                    name = f"{inlet.channel.name} of {participant.node.name}"
                    yield f"{name} holds {len(inlet.queue)} samples, {bound} at most"

    def clear(self) -> None:
        """Forget all processes: the run is over."""
        self.pairs.clear()
        self.participants.clear()


def virtual_network(loop: VirtualLoop, seed: int | str, trace: Trace) -> VirtualMemoryNetwork:
    """Return a network in virtual time whose deliveries are in the trace."""

    def note(pair: EndpointPair, sample: Any) -> None:
        data = getattr(sample, "data", b"")
        about = f"crc32 {zlib.crc32(data):08x}" if data else f"round {sample.round_id}"
        name = pair.reader.channel.name
        text = f"{pair.target.name} receives {name} of {pair.source.name}, {about}"
        trace.add(text, is_shown=not is_control_name(name))  # these are many, and all are repeated

    network = VirtualMemoryNetwork(seed, VirtualSchedule(loop))
    network.on_delivered = note
    network.window_bytes = WINDOW_BYTES
    return network


def connected(process: VirtualProcess, job: str = "simulation") -> AbstractAsyncContextManager[Bus]:
    """Open a bus of a virtual process, without protection."""
    return _connected(process, partial(process.world.network.transport, process), job)


def connected_with_identity(
    process: VirtualProcess, security: Security, job: str = "simulation"
) -> AbstractAsyncContextManager[Bus]:
    """Open a bus of a virtual process that has a key of its own: encrypted as it is on any transport."""

    def opened(job: str) -> Sealed:
        membership = identity_membership(job, security)
        return Sealed(process.world.network.transport(process, job), membership)

    return _connected(process, opened, job)


@contextlib.asynccontextmanager
async def _connected(process: VirtualProcess, opened: Callable[[str], Transport], job: str) -> AsyncIterator[Bus]:
    async with process.world.network.linger(), connect_over(opened, job) as bus:
        yield bus
