"""Where the contract of a transport is tested: on DDS, on Zenoh, and on the network in memory in real time or
in steps.

In steps time is virtual and there is one thread: a wait does what is due meanwhile, so nothing is slow and each run is
the same.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from channel_node import Channel, ChannelNode
from dds_domains import new_domain
from fault_simulation.simulated_relay import SimulatedProcess, SimulatedRelay, SimulatedSession
from zenoh_node import LoopbackReach, ZenohNode, transport_at

from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.api import Inlet, Outlet, Transport
from gradbus.runtime.transport.dds.participant import Participant
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import MemoryNode
from gradbus.runtime.transport.memory.transport import MemoryTransport
from gradbus.runtime.transport.schedule import Call, ThreadSchedule
from gradbus.runtime.transport.zenoh.transport import ZenohTransport

PATIENCE_S = 30.0
SLICE_S = 0.05
STALL_S = 1.0
CUT_S = 1e6  # until the test mends it
LONG_LEASE_S, SHORT_LEASE_S = 60.0, 1.0
_NUMBER = struct.Struct("<I")
_jobs = itertools.count()


def write(outlet: Outlet, *numbers: int, size: int = 64) -> list[bool]:
    """Write samples that are numbers with padding. Returns for each whether it was accepted."""
    return [outlet.write((), (_NUMBER.pack(number), bytes(size - _NUMBER.size))) for number in numbers]


def take(inlet: Inlet) -> list[int]:
    """Return the numbers of the samples that are there."""
    found: list[int] = []
    while taken := inlet.take(16):
        samples = [inlet.decode(raw) for raw, _ in taken]
        found += [_NUMBER.unpack_from(sample.data)[0] for sample in samples if sample is not None]
    return found


class Remote(Protocol):
    """A process elsewhere, of the job ``one``, which can be stopped, cut off and killed."""

    def open_writer(self, channel: Channel, *, retained_samples: int = 1) -> None:
        """Open an outlet."""

    def open_reader(self, channel: Channel) -> None:
        """Open an inlet."""

    def write(self, key: str, *numbers: int) -> list[bool]:
        """Write samples to the channel of this name."""

    def take(self, key: str) -> list[int]:
        """Return the numbers of the samples of this channel that are there."""

    def matched(self, key: str) -> int:
        """Return how many peers the endpoint of this channel has."""

    def stop(self) -> None:
        """Have it stand still."""

    def go_on(self) -> None:
        """Let it run again."""

    def cut_off(self) -> None:
        """Let nothing pass between it and others."""

    def reconnect(self) -> None:
        """Mend its link."""

    def kill(self) -> None:
        """End it without a goodbye."""


class Scene(Protocol):
    """A network with processes on it.

    Attributes:
        stall_s: so long may this process stand still, and a write that waits for room has still not given up.
    """

    stall_s: float

    def open(self, job: str = "one") -> Transport:
        """Open a transport of this process."""

    def remote(self, lease_s: float = LONG_LEASE_S, *, loss: float = 0.0) -> Remote:
        """Start a process elsewhere, which is lost after so long a silence. ``loss``: share of its packets that get
        lost."""

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition. Raises AssertionError: it did not hold in time."""

    def pass_time(self, seconds: float) -> None:
        """Let time pass, where there is nothing to wait for."""

    def now_s(self) -> float:
        """Return the time of this network."""


class SteppedSchedule:
    """A :class:`~gradbus.runtime.transport.schedule.NetworkSchedule` in virtual time, for one thread."""

    lock: AbstractContextManager[None] = contextlib.nullcontext()

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._calls: list[Call] = []
        self._numbers = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def at(self, when_s: float, function: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._calls, (when_s, next(self._numbers), function, arguments))

    def wait(self, node: Any, is_over: Callable[[], bool], timeout_s: float) -> bool:
        until_s = self._now_s + timeout_s
        while not is_over():
            if not self._calls or self._calls[0][0] > until_s:
                self._now_s = until_s
                return is_over()
            when_s, _, function, arguments = heapq.heappop(self._calls)
            self._now_s = max(self._now_s, when_s)
            function(*arguments)
        return True

    def check(self) -> None:
        pass

    def notify(self) -> None:
        pass

    def close(self) -> None:
        self._calls.clear()


class LocalRemote:
    """A process that exists in name only.

    Attributes:
        transport: its own.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._outlets: dict[str, Outlet] = {}
        self._inlets: dict[str, Inlet] = {}

    def open_writer(self, channel: Channel, *, retained_samples: int = 1) -> None:
        opened = self.transport.outlet(channel.opened(), retained_samples=retained_samples)
        self._outlets[channel.name] = opened

    def open_reader(self, channel: Channel) -> None:
        self._inlets[channel.name] = self.transport.inlet(channel.opened())

    def write(self, key: str, *numbers: int) -> list[bool]:
        return write(self._outlets[key], *numbers)

    def take(self, key: str) -> list[int]:
        return take(self._inlets[key])

    def matched(self, key: str) -> int:
        return len((self._outlets.get(key) or self._inlets[key]).peers())


class MemoryRemote(LocalRemote):
    """A process on the network in memory."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._node = MemoryNode("remote", machine=1)
        super().__init__(MemoryTransport(network, self._node, "one"))

    def stop(self) -> None:
        self._network.pause(self._node)

    def go_on(self) -> None:
        self._network.resume(self._node)

    def cut_off(self) -> None:
        self._network.cut(0, self._node.machine, CUT_S)

    def reconnect(self) -> None:
        self._network.mend(0, self._node.machine)

    def kill(self) -> None:
        self._network.kill(self._node)


class MemoryScene:
    """The network in memory: packets are late by up to 2 ms."""

    stall_s = STALL_S

    def __init__(self, schedule: ThreadSchedule | SteppedSchedule, patience_s: float) -> None:
        self._patience_s = patience_s
        self.network = MemoryNetwork(seed=1, schedule=schedule)
        self.network.jitter_s, self.network.resend_s = 0.002, 0.005
        self._schedule = schedule
        self._nodes = itertools.count()

    def open(self, job: str = "one") -> Transport:
        return MemoryTransport(self.network, MemoryNode(f"local-{next(self._nodes)}"), job)

    def remote(self, lease_s: float = LONG_LEASE_S, *, loss: float = 0.0) -> Remote:
        self.network.lease_s, self.network.loss = lease_s, loss
        return MemoryRemote(self.network)

    def until(self, condition: Callable[[], object], what: str) -> None:
        until_s = self.now_s() + self._patience_s
        with self._schedule.lock:
            # In slices: a condition may be of other threads than those of the network, which does not know of a change.
            while not self._schedule.wait(None, lambda: bool(condition()), SLICE_S):
                assert self.now_s() < until_s, f"not within {self._patience_s:g} s: {what}"

    def pass_time(self, seconds: float) -> None:
        with self._schedule.lock:
            self._schedule.wait(None, lambda: False, seconds)

    def now_s(self) -> float:
        return self._schedule.now_s()

    def close(self) -> None:
        for participant in list(self.network.participants):
            assert isinstance(participant, MemoryTransport)
            participant.close()
        self.network.close()


class RealTimeScene:
    """A scene in real time, with jobs of its own.

    Attributes:
        opened: what :meth:`close` closes.
    """

    stall_s = STALL_S

    def __init__(self) -> None:
        self._number = next(_jobs)
        self.opened = contextlib.ExitStack()

    def job_name(self, job: str) -> str:
        """Return the name of a job that no other scene has."""
        return f"contract-{os.getpid()}-{self._number}-{job}"

    def until(self, condition: Callable[[], object], what: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until_s, f"not within {PATIENCE_S:g} s: {what}"
            time.sleep(0.002)  # what is awaited has no one event: it is of several endpoints and processes

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    def now_s(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self.opened.close()


class DdsScene(RealTimeScene):
    """Cyclone DDS on the loopback interface. Remote processes are true ones."""

    def __init__(self) -> None:
        super().__init__()
        self._domain = new_domain()

    def open(self, job: str = "one") -> Transport:
        network = NetworkConfig(shared_memory=False, lease_s=LONG_LEASE_S)
        made = Participant(domain_id=self._domain, partition=self.job_name(job), network=network)
        self.opened.callback(made.close)
        return made

    def remote(self, lease_s: float = LONG_LEASE_S, *, loss: float = 0.0) -> Remote:
        network = {"lease_s": lease_s, "loss_per_mille": int(1000 * loss)}
        return self.opened.enter_context(ChannelNode(domain=self._domain, job=self.job_name("one"), **network))


class ZenohScene(RealTimeScene):
    """Zenoh on the loopback interface, over a relay. Remote processes are true ones."""

    def __init__(self, relay_port: int) -> None:
        super().__init__()
        self._port = relay_port

    def open(self, job: str = "one") -> Transport:
        made = transport_at(self._port, self.job_name(job))
        self.opened.callback(made.close)
        return made

    def remote(self, lease_s: float = LONG_LEASE_S, *, loss: float = 0.0) -> ZenohNode:
        return self.opened.enter_context(ZenohNode(self._port, self.job_name("one"), lease_s, loss=loss))


class SimulatedRemote(LocalRemote):
    """A process that exists in name only, at a simulated relay.

    Attributes:
        session: its own.
    """

    def __init__(self, process: SimulatedProcess, session: SimulatedSession, transport: Transport) -> None:
        super().__init__(transport)
        self._process, self.session = process, session

    def stop(self) -> None:
        self._process.paused = True
        self.session.fall_silent()

    def go_on(self) -> None:
        self._process.resume()
        self.session.speak_again()

    def cut_off(self) -> None:
        self.session.fall_silent()

    def reconnect(self) -> None:
        self.session.speak_again()

    def kill(self) -> None:
        self._process.dead = True
        self.session.break_link()


class SteppedZenohScene:
    """What outlets and inlets on Zenoh say to each other, over a simulated relay in virtual time.

    Attributes:
        relay: that one.
    """

    stall_s = STALL_S

    def __init__(self, seed: int = 1) -> None:
        self._schedule = SteppedSchedule()
        self.relay = SimulatedRelay(self._schedule, seed)

    def join(self, job: str, lease_s: float = LONG_LEASE_S, *, loss: float = 0.0) -> SimulatedRemote:
        """Start a process with a transport."""
        process = SimulatedProcess(self._schedule)
        session = self.relay.session(process, lease_s, loss)
        transport = ZenohTransport(session, job, reach=LoopbackReach(), lease_s=lease_s, schedule=process)
        return SimulatedRemote(process, session, transport)

    def open(self, job: str = "one") -> Transport:
        return self.join(job).transport

    def remote(self, lease_s: float = LONG_LEASE_S, *, loss: float = 0.0) -> SimulatedRemote:
        return self.join("one", lease_s, loss=loss)

    def until(self, condition: Callable[[], object], what: str) -> None:
        until_s = self.now_s() + PATIENCE_S
        while not self._schedule.wait(None, lambda: bool(condition()), SLICE_S):
            assert self.now_s() < until_s, f"not within {PATIENCE_S:g} s: {what}"

    def pass_time(self, seconds: float) -> None:
        self._schedule.wait(None, lambda: False, seconds)

    def now_s(self) -> float:
        return self._schedule.now_s()


def in_steps() -> MemoryScene:
    """Return the network in memory in virtual time."""
    return MemoryScene(SteppedSchedule(), PATIENCE_S)


def with_threads(patience_s: float = PATIENCE_S) -> MemoryScene:
    """Return the network in memory in real time."""
    return MemoryScene(ThreadSchedule("the network in memory", thread_name="test-schedule"), patience_s)
