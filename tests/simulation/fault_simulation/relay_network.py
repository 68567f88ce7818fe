"""The transport on Zenoh in virtual time: the shipped outlets and inlets, on sessions at one simulated relay.

All processes reach the relay, which is on a machine of its own, and no process reaches another one in any other way. So
the faults of this network are those of links: see :mod:`.relay_faults`.

* **Loss.** A link is a TCP connection: a packet that is lost is late. What does get lost are the messages that a relay
  drops where the link to a peer is full, and those on their way when a link breaks. Circumstances in which packets get
  lost have some of both.
* **Power.** A process that is killed has its connections closed by its kernel, which the relay sees at once, and tells
  the others. One whose power fails, or whose machine is cut off, falls silent: the relay breaks its link when the lease
  is over. A link that is reset is closed as well, so where dialling again takes long the relay says of a process that
  lives what it says of one that was killed.
* **Closing.** A thread that closes endpoints waits until their samples have arrived, which would stop the virtual time.
  Here the endpoints stay for that time, and their process waits before it ends.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fault_simulation.faults import Fault
from fault_simulation.findings import ORDER
from fault_simulation.kernel import VirtualProcess, now_s, running
from fault_simulation.simulated_relay import RECONNECT_S, URGENT, SimulatedRelay, SimulatedSession, Step
from fault_simulation.trace import Trace
from fault_simulation.virtual_loop import VirtualLoop
from fault_simulation.virtual_schedule import VirtualSchedule, sleep_until
from gradbus.runtime.errors import NotReachable
from gradbus.runtime.network.disconnections import DISCONNECTED, redial_s
from gradbus.runtime.transport.api import Traits
from gradbus.runtime.transport.channels import Channel, is_control_name
from gradbus.runtime.transport.memory.transport import MemoryReach
from gradbus.runtime.transport.zenoh.inlet import LEAST_CREDIT, OutletState, ZenohInlet
from gradbus.runtime.transport.zenoh.keys import session_token, unescape
from gradbus.runtime.transport.zenoh.messages import SAMPLE, number_of
from gradbus.runtime.transport.zenoh.place import LINGER_S, ZenohEndpoint, ZenohPlace
from gradbus.runtime.transport.zenoh.transport import ZenohTransport

DROPPED_SHARE = 0.1  # of the share of packets that are lost: messages that the relay drops
RESET_S = 3.0  # mean time between two breaks of a link where all packets are lost
CHECK_S = 2e-3  # between two looks at whether the samples of what is closed have arrived
CLOSED_S = LINGER_S + 1.0  # from the end of a bus until its session is closed
REACH = MemoryReach(meeting_place="the simulated relay", attachment="a simulated link")


class RelayedSession(SimulatedSession):
    """One session of a virtual process.

    Attributes:
        refused_until_s: its attempts to dial fail until then. is_stale: the relay of its link is gone, which it will
            see when something passes.
    """

    relay: NetworkRelay
    process: VirtualProcess

    def __init__(self, relay: NetworkRelay, process: VirtualProcess, lease_s: float, loss: float) -> None:
        super().__init__(relay, process, lease_s, loss)
        self.refused_until_s = 0.0
        self.is_stale = False
        self._room_made: Step | None = None

    def start(self, link_changed: Any, room_made: Step) -> None:
        """See :meth:`.LinkSession.start`."""
        super().start(link_changed, room_made)
        self._room_made = room_made

    def publish(self, key: str, message: bytes | bytearray, *, urgent: bool, apart: bool = False) -> bool:
        """See :meth:`.LinkSession.publish`. Some messages find that too much waits to leave."""
        if self.relay.chance(self.relay.refused):
            self.relay.at(self.relay.rng.uniform(1e-3, 0.1), self._make_room)
            return False
        return super().publish(key, message, urgent=urgent)

    def _make_room(self) -> None:
        if self._room_made is not None and not self.process.dead and not self.is_closed:
            self._room_made()

    def receive(self, key: str, message: bytes) -> None:
        """Hand over a message, and note it in the trace."""
        if not self.is_closed and not self.process.dead:
            _, _, _, channel, kind, *_ = key.split("/")
            name = unescape(channel)
            text = f"{self.process.name} receives {kind} {name}, {len(message)} bytes, crc32 {zlib.crc32(message):08x}"
            self.relay.trace.add(text, is_shown=message[0] == SAMPLE and not is_control_name(name))
        super().receive(key, message)

    def close(self) -> None:
        """Close it once nothing is declared any more: what was closed lingers."""
        if self._tokens and not self.process.dead:
            self.relay.at(CHECK_S, self.close)
        else:
            super().close()

    def break_link(self) -> None:
        """See :meth:`.SimulatedSession.break_link`."""
        self.is_stale = False
        if self.is_linked:
            self.relay.trace.add(f"the link of {self.process.name} breaks")
        super().break_link()

    def _reconnect(self) -> None:
        is_refused = now_s() < max(self.refused_until_s, self.relay.down_until_s)
        if is_refused and not self.is_linked:
            self.relay.at(self.relay.rng.uniform(*RECONNECT_S), self._reconnect)
            return
        was_linked = self.is_linked
        super()._reconnect()
        if self.is_linked and not was_linked:
            self.relay.trace.add(f"the link of {self.process.name} stands again")

    def pass_again(self) -> None:
        """Let what was held pass, unless an end of the link is gone."""
        if self.process.dead or self.is_stale:
            self.is_silent = False
            self.break_link()
        else:
            self.speak_again()


class NetworkRelay(SimulatedRelay):
    """The relay of a :class:`RelayNetwork`, which may be down.

    Attributes:
        refused: share of messages that find that too much waits to leave. down_until_s: it takes no links until then.
    """

    def __init__(self, loop: VirtualLoop, seed: int | str, trace: Trace) -> None:
        super().__init__(VirtualSchedule(loop), seed)
        self.trace = trace
        self.refused = self.down_until_s = 0.0

    def chance(self, share: float) -> bool:
        """Return whether something happens that happens in this share of all cases."""
        return share > 0.0 and self.rng.random() < share


class CheckedInlet(ZenohInlet):
    """An inlet that checks what it hands over: each sample of an outlet once, in order, and no gap within a match.

    An outlet that was lost for a lease is forgotten: what it retains may come again.
    """

    def __init__(self, place: ZenohPlace, channel: Channel, owner: VirtualProcess) -> None:
        super().__init__(place, channel)
        self._owner = owner
        self._last: dict[str, tuple[OutletState, int, int]] = {}  # by outlet: handle of the match, number of the sample

    def _put(self, outlet: OutletState, message: bytes) -> None:
        number = number_of(message)
        known, handle, last = self._last.get(outlet.id, (outlet, 0, 0))
        if known is not outlet:
            handle = last = 0
        may_skip = self._skips_gaps or handle != outlet.handle
        if number <= last or (number > last + 1 and not may_skip):
            text = f"{self._owner.name} gets sample {number} of {self.channel.name} after sample {last}"
            self._owner.world.finding(ORDER, text)
        self._last[outlet.id] = outlet, outlet.handle, number
        super()._put(outlet, message)

    def overfull(self) -> str:
        """Return what it holds too much of, in words, or nothing."""
        bound = self.channel.reader_samples
        if not bound:
            return ""
        held = f"{self.channel.name} of {self._owner.name} holds"
        if self._gives_credit:  # what was promised to an outlet stays promised when others come
            queued = max((one.queued for one in self._outlets.values()), default=0)
            return f"{held} {queued} samples of an outlet, {bound} at most" if queued > max(bound, LEAST_CREDIT) else ""
        return f"{held} {len(self._queue)} samples, {bound} at most" if len(self._queue) > bound else ""


class RelayTransport(ZenohTransport):
    """The transport of a virtual process, with checked inlets."""

    def __init__(self, network: RelayNetwork, process: VirtualProcess, job: str, session: RelayedSession) -> None:
        schedule = VirtualSchedule(network.loop, process.context.copy())
        traits = Traits(leaves_machine=True, has_default_lease=False)
        super().__init__(
            session, job, reach=REACH, lease_s=network.lease_s, traits=traits, schedule=schedule, node=process
        )
        self.process, self.session, self.job = process, session, job

    @property
    def inlets(self) -> list[CheckedInlet]:
        """Return the inlets that are open."""
        return [one for one in self._place.endpoints.values() if isinstance(one, CheckedInlet)]

    def inlet(self, channel: Channel) -> ZenohInlet:
        """See :meth:`.api.Transport.inlet`."""
        self._check_open(channel)
        inlet = CheckedInlet(self._place, channel, self.process)
        inlet.open()
        return inlet


def close_endpoints(place: ZenohPlace, endpoints: Sequence[ZenohEndpoint]) -> None:
    """Stand in for ``ZenohPlace.close_endpoints``: what is closed stays until its samples have arrived."""
    closing = [one for one in endpoints if not one.is_closed]
    until_s = now_s() + LINGER_S
    for one in closing:
        one.is_closed = True

    def withdraw() -> None:
        if not all(one.is_settled for one in closing) and now_s() < until_s:
            place.after(CHECK_S, withdraw)
            return
        for one in closing:
            place.endpoints.pop(one.id, None)
        for one in closing:
            one.withdraw()

    withdraw()


class RelayNetwork:
    """All links to the relay, and which of them pass something.

    Attributes:
        lease_s: a peer whose link is silent, or broken, for so long is lost.
    """

    def __init__(self, loop: VirtualLoop, seed: int | str, trace: Trace) -> None:
        self.loop = loop
        self.lease_s = 10.0
        self.loss = 0.0
        self.relay = NetworkRelay(loop, seed, trace)
        self._transports: list[RelayTransport] = []
        self._cut: Counter[int] = Counter()  # machines, and how many faults cut each off

    def set_circumstances(self, base_s: float, jitter_s: float, loss: float, refused: float, lease_s: float) -> None:
        """Set what a seed has drawn. A message takes two links, each with half of the delay."""
        self.relay.base_s, self.relay.jitter_s = base_s / 2, jitter_s / 2
        self.relay.refused = refused
        self.loss, self.lease_s = loss, lease_s

    def at(self, delay_s: float, function: Any, *arguments: Any) -> None:
        """Call a function of the network after a delay."""
        self.relay.schedule.at(now_s() + delay_s, function, *arguments)

    # Processes

    def transport(self, process: VirtualProcess, job: str) -> RelayTransport:
        """Open the transport of a process. Raises NotReachable: the relay is down, or its machine cut off."""
        relay = self.relay
        if now_s() < relay.down_until_s or self._cut[process.machine]:
            raise NotReachable("no link to the simulated relay")
        session = RelayedSession(relay, process, self.lease_s, DROPPED_SHARE * self.loss)
        relay.sessions.append(session)
        made = RelayTransport(self, process, job, session)
        self._transports.append(made)
        self._reset_later(session)
        return made

    @contextlib.asynccontextmanager
    async def linger(self) -> AsyncIterator[None]:
        """Wait at the end until the sessions are closed that this process has opened meanwhile."""
        process = running()
        before = self._sessions(process)
        yield
        opened = [one for one in self._sessions(process) if one not in before]
        await sleep_until(lambda: all(one.is_closed for one in opened), CLOSED_S)

    def _sessions(self, process: VirtualProcess) -> list[RelayedSession]:
        return [one for one in self._all() if one.process is process]

    def _on_machine(self, machine: int) -> list[RelayedSession]:
        return [one for one in self._all() if one.process.machine == machine]

    def _all(self) -> Iterator[RelayedSession]:
        return (one for one in self.relay.sessions if isinstance(one, RelayedSession))

    def ended(self, process: VirtualProcess) -> None:
        """End the links of a dead process: at once, or after a lease where nothing can tell the relay."""
        for session in self._sessions(process):
            if process.lost_power and not session.is_silent:
                session.fall_silent()
            elif not session.is_silent and not session.is_closed:
                self._close_connection(session)
            if not session.is_silent:
                self.relay.sessions.remove(session)
        self._transports = [one for one in self._transports if one.process is not process]

    def overfull(self) -> Iterator[str]:
        """Yield what inlets hold too much of."""
        for transport in self._transports:
            yield from filter(None, (inlet.overfull() for inlet in transport.inlets))

    def clear(self) -> None:
        """Forget all processes: the run is over."""
        self.relay.sessions.clear()
        self._transports.clear()

    # Faults

    def inject(self, fault: Fault, process: VirtualProcess | None) -> None:
        """Let a fault of the network happen, or of the link of a process. Raises ValueError: it has no such fault."""
        match fault.action:
            case "relay":
                self.kill_relay(fault.seconds)
            case "unlink":
                self.cut(fault.machines[0], fault.seconds)
            case "reset":
                if process is not None and not process.dead:
                    self.reset(process, fault.seconds)
            case _:
                raise ValueError(f"a relay is between all processes, and each has one link: {fault}")

    def _reset_later(self, session: RelayedSession) -> None:
        """Break a link from time to time, where packets get lost."""
        if self.loss > 0.0:
            self.at(self.relay.rng.expovariate(self.loss / RESET_S), self._reset, session)

    def _reset(self, session: RelayedSession) -> None:
        if session in self.relay.sessions and not session.is_closed and not session.process.dead:
            if not session.is_silent:
                self._close_connection(session)
            self._reset_later(session)

    def reset(self, process: VirtualProcess, seconds: float) -> None:
        """Break the links of a process, which dials in vain for so long."""
        for session in self._sessions(process):
            session.refused_until_s = now_s() + seconds
            if not session.is_silent:
                self._close_connection(session)

    def _close_connection(self, session: RelayedSession) -> None:
        """Break a link as the end of its process does: the relay tells the others if it does not come back."""
        announced = [(one.job, one.own) for one in self._transports if one.session is session]
        was_linked = session.is_linked
        session.break_link()
        if was_linked:
            round_trip_s = 2 * (self.relay.base_s + self.relay.jitter_s)
            self.at(redial_s(round_trip_s), self._announce_disconnected, session, announced)

    def _announce_disconnected(self, session: RelayedSession, announced: list[tuple[str, bytes]]) -> None:
        if session.is_linked or now_s() < self.relay.down_until_s:
            return
        for job, own in announced:
            self.relay.pass_on(session, session_token(job, "0", own), DISCONNECTED, URGENT)

    def cut(self, machine: int, seconds: float) -> None:
        """Let nothing pass between a machine and the relay for so long."""
        self._cut[machine] += 1
        for session in self._on_machine(machine):
            if not session.is_silent:
                session.fall_silent()
        self.at(seconds, self._heal, machine)

    def _heal(self, machine: int) -> None:
        self._cut[machine] -= 1
        for session in self._on_machine(machine):
            self._pass_again(session)

    def _pass_again(self, session: RelayedSession) -> None:
        process = session.process
        has_power = not (process.dead and process.lost_power)
        if session.is_silent and not self._cut[process.machine] and not process.paused and has_power:
            session.pass_again()

    def kill_relay(self, seconds: float) -> None:
        """Kill the relay, which starts again after so long. A link that is silent is found broken later."""
        self.relay.down_until_s = max(self.relay.down_until_s, now_s() + seconds)
        for session in self._all():
            if session.is_silent:
                session.is_stale = True
            else:
                session.break_link()
        self.relay.tokens.clear()

    def pause(self, process: VirtualProcess) -> None:
        """Let a process stand still. The relay breaks its links after a lease."""
        process.paused = True
        for session in self._sessions(process):
            if not session.is_silent:
                session.fall_silent()

    def reconnect(self) -> None:
        """Let the links of those that have gone on pass something again."""
        for session in list(self._all()):
            self._pass_again(session)
