"""The bus: asyncio on one side, a transport on the other, as a rule DDS.

    async with gradbus.connect(job="mnist") as bus:
        with bus.subscribe(ModelBlob, ToClients) as inbox:
            await bus.publish(identity, Hello(...))
            async for message in inbox: ...

One bus has two threads: one waits for data, one writes what is large. All state belongs to the event loop that opened
the bus. Buses of different jobs in one process may share what their transport has open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

from gradbus.runtime import drive, forks
from gradbus.runtime.bus.inbox_outlets import InboxOutlets
from gradbus.runtime.bus.raw_endpoints import RawEndpoints
from gradbus.runtime.bus.receiver import InboundChannel, Receiver
from gradbus.runtime.bus.sender import Job, Sample, Sender
from gradbus.runtime.bus.subscription import Subscription, Subscriptions
from gradbus.runtime.bus.transport_factory import (
    check_job,
    closed_on_error,
    open_transport,
    short_switch_interval,
    transport_maker,
)
from gradbus.runtime.config.bus import default_job
from gradbus.runtime.errors import BarrierTimeout, BusClosed, ConfigError, GradbusError
from gradbus.runtime.misuse import check_instance, opening
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security import Level, Security
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.testing.fault_injection import FaultInjector
from gradbus.runtime.testing.faults import Faults
from gradbus.runtime.traffic import Traffic
from gradbus.runtime.transport import peer_processes
from gradbus.runtime.transport.api import Outlet, Periodic, Transport
from gradbus.runtime.transport.channels import (
    INBOX_RETAINED,
    Inbox,
    MessageKind,
    ToController,
    channel_of,
    control_channel_of,
    is_control,
    traffic_name,
)
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.frames import FrameKey
from gradbus.runtime.wire.messages import (
    ClientUpdate,
    Identity,
    Message,
    ModelBlob,
    PeerDisconnected,
    PeerGone,
    TrainCmd,
)

LOOK_AROUND_S = 1.0  # what discovery has found: in a crowd there is news every millisecond
_ON_LOOPBACK = NetworkConfig()
_MAX_JOBS = 16
_MAX_SENDERS = 4096  # whose end is announced when the bus closes


class Bus:
    """One participant of one job. Made by :func:`connect`.

    Attributes:
        memory: what passes beside the transport, between its processes. traffic: payload of the collectives of all its
            groups.
    """

    def __init__(self, job: str, transport: Transport, loop: asyncio.AbstractEventLoop, stall_timeout_s: float) -> None:
        self.job = job
        self.stall_timeout_s = stall_timeout_s
        self.memory = PayloadMemory(switched_on=transport.traits.shared_memory)
        self.traffic = Traffic()
        self.lease_s = transport.lease_s  # after so long a silence others elsewhere are gone
        self.has_default_lease = transport.traits.has_default_lease  # nobody has chosen it
        self.access_policy = transport.access_policy  # what its security says of this process
        self.reach = transport.reach  # who can be met on it
        self.faults: Faults | None = None  # of a test
        self._transport = transport
        self._loop = loop
        self._receiver = Receiver(transport, loop, self._on_matched, self._on_gone, self._on_fault)
        self._thread = self._receiver.thread
        self._thread.add_periodic(Periodic(transport.look_around, LOOK_AROUND_S))
        self._sender = Sender()
        self._slots = asyncio.Semaphore(_MAX_JOBS)
        self._writers: dict[MessageKind, Outlet] = {}
        self._inboxes = InboxOutlets(self._open_inbox, self._close_outlets)
        self._channels: dict[MessageKind, InboundChannel] = {}
        self._subscriptions = Subscriptions(self._receiver.consumed, self._receiver.handover)
        self._ports: list[RawEndpoints] = []
        self._port_bytes: Counter[str] = Counter()  # of ports that are closed
        self._flags = int(frames.Flags.NONE if transport.traits.needs_crc else frames.Flags.HEAD_CRC)
        self._groups: set[str] = set()
        self.incarnations: deque[int] = deque(maxlen=64)  # of the ranks it has been; their words may still come
        self._match_waiters: list[asyncio.Future[int]] = []
        self._messages_out = 0
        self._inline_bytes: Counter[str] = Counter()  # of small messages, by topic
        self._senders: dict[Identity, set[MessageKind]] = {}  # that have sent through it, and where
        self._closed = False
        self._made_in = forks.generation
        self._claim = peer_processes.own_claim()
        self._thread.start()
        try:
            transport.start(self._receiver)
            self._sender.start()
        except BaseException:  # whoever closes the transport now must be the only one that uses it
            self._thread.stop()
            self._thread.join(1.0)
            raise

    @property
    def remote_lease_s(self) -> float | None:
        """After so long a silence a process of another machine counts as dead; None: none can be reached, and of those
        of this machine the kernel tells."""
        return self.lease_s if self.reach.leaves_machine else None

    @property
    def is_closed(self) -> bool:
        """Whether it was closed: the block of its ``async with`` has ended."""
        return self._closed

    # Sending

    def open_writer(self, kind: MessageKind, *, retained_samples: int = 1) -> None:
        """Make the writer of a topic, so that readers can match it. ``retained_samples``: see
        :meth:`.transport.api.Transport.outlet`."""
        if kind not in self._writers:
            self._check_open()
            self._writers[kind] = self._open_outlet(kind, retained_samples)

    def _open_outlet(self, kind: MessageKind, retained_samples: int) -> Outlet:
        writer = self._transport.outlet(channel_of(kind), retained_samples=retained_samples)
        self._receiver.add(writer)
        return writer

    def _open_inbox(self, inbox: Inbox) -> Outlet:
        return self._open_outlet(inbox, INBOX_RETAINED)

    def _close_outlets(self, outlets: Sequence[Outlet]) -> None:
        self._receiver.remove(outlets, lambda: None)

    def close_inbox(self, incarnation: int) -> None:
        """Address a process of clients no more, because it has left. A later message to it opens its inbox again."""
        if not self._closed:
            self._inboxes.close(Inbox(incarnation))

    @property
    def open_inboxes(self) -> int:
        """The number of processes of clients that are addressed."""
        return len(self._inboxes)

    def _writer_of(self, kind: MessageKind) -> Outlet:
        self._check_open()
        if isinstance(kind, Inbox):
            return self._inboxes.get(kind)
        self.open_writer(kind)
        return self._writers[kind]

    async def publish(
        self, sender: Identity, message: TrainCmd | control.Body, *, on: MessageKind | None = None
    ) -> None:
        """Send a small message to those that it is for, which its kind says, and its fields where it is for one client.
        Returns when the transport has taken it, as a rule at once.

        Args:
            on: where it is written instead, as for peers of an earlier protocol.

        Raises:
            BusClosed, WriteTimeout.
        """
        kind: MessageKind
        sample: Sample
        if isinstance(message, TrainCmd):
            kind, sample = TrainCmd, (astuple(message), ())
        else:
            kind, sample = on or control_channel_of(message), self._control_sample(sender, message)
            if len(self._senders) < _MAX_SENDERS and not isinstance(kind, Inbox):
                self._senders.setdefault(sender, set()).add(kind)
        writer = self._writer_of(kind)
        if writer.write(*sample):
            self._inline_bytes[traffic_name(writer.channel)] += sum(map(len, sample[1]))
        else:  # some reader's queue is full: wait off the loop
            await self._submit(writer, iter([sample]))

    def _control_sample(self, sender: Identity, message: control.Body) -> Sample:
        self._messages_out = (self._messages_out + 1) & 0xFFFF_FFFF
        key = FrameKey(frames.Kind.CONTROL, 0, 0, sender.sender, sender.incarnation, self._messages_out, self._claim)
        (frame,) = frames.split(key, control.encode(message), chunk_bytes=control.MAX_BODY_BYTES)
        return (), frame

    def _announce_closing(self) -> None:
        """Announce the end of each sender to all that it has sent to, as what a transport says of a process that lives
        is no proof. A peer that does not take this at once finds out by its lease. Inboxes get none: who reads one also
        reads what is for all clients."""
        with contextlib.suppress(GradbusError):  # a writer may be what has failed
            for kind, writer in self._writers.items():
                for sender in [one for one, kinds in self._senders.items() if kind in kinds]:
                    if not writer.write(*self._control_sample(sender, control.Closing("its bus was closed"))):
                        break
        self._senders.clear()

    def is_delivered(self, kind: MessageKind) -> bool:
        """Return whether all readers have taken over what was published on a topic. Does not wait."""
        writer = self._writers.get(kind)
        return writer is None or writer.is_acknowledged

    def delivery_progress(self, kind: MessageKind) -> tuple[int, int]:
        """Return what grows while what was published on a topic is being delivered: octets that the transport has
        taken, and samples that readers have acknowledged, 0 where the transport does not count them."""
        writer = self._writers.get(kind)
        taken = 0 if writer is None else self.sent_bytes[traffic_name(writer.channel)]
        return taken, 0 if writer is None else writer.acknowledged_samples

    async def drain(self, kind: MessageKind, timeout_s: float) -> bool:
        """Whether all readers have taken over what was published on a topic, within so long."""
        writer = self._writers.get(kind)
        if writer is None:
            return True
        try:
            async with asyncio.timeout(timeout_s + 1.0):  # the pool of threads may be busy with others' work
                return await asyncio.to_thread(writer.wait_for_acks, timeout_s)
        except TimeoutError:
            return False

    async def send_update(
        self, key: FrameKey, num_samples: int, payload: Any, *, only: Sequence[int] | None = None
    ) -> int:
        """Send a client's update in frames, or those with the numbers ``only``. Returns the bytes of the payload that
        were written, without headers."""
        self.open_writer(ClientUpdate)
        fields = (key.sender, key.round_id, num_samples)
        samples = ((fields, frame) for frame in frames.split(key, payload, flags=self._flags, only=only))
        return await self._submit_payload(self._writers[ClientUpdate], samples, payload, only)

    async def send_model(
        self, key: FrameKey, payload: Any, *, flags: int = 0, only: Sequence[int] | None = None
    ) -> int:
        """Send a global model to all clients, in frames, or those with the numbers ``only``. Returns the bytes of the
        payload that were written, without headers.

        ``payload`` is read while it is sent; the caller leaves it as it is until this returns.
        """
        self.open_writer(ModelBlob)
        flags |= self._flags
        samples = (((key.round_id,), frame) for frame in frames.split(key, payload, flags=flags, only=only))
        return await self._submit_payload(self._writers[ModelBlob], samples, payload, only)

    async def _submit_payload(
        self, writer: Outlet, samples: Iterator[Sample], payload: Any, only: Sequence[int] | None
    ) -> int:
        await self._submit(writer, samples)
        total_bytes = memoryview(payload).nbytes
        return total_bytes if only is None else frames.bytes_in(total_bytes, only)

    async def _submit(self, writer: Outlet, samples: Iterator[Sample]) -> int:
        self._check_open()  # close() keeps the slots that it takes: nobody waits for one after it
        async with self._slots:
            self._check_open()
            done: asyncio.Future[int] = self._loop.create_future()
            job = Job(writer, samples, partial(self._post, _resolve, done), self.stall_timeout_s)
            self._sender.submit(job)
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                job.cancelled = True  # the thread lets go of the payload before its next frame
                await asyncio.wait([done], timeout=1.0)
                raise

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._receiver.handover.post(function, *arguments)

    def raw_endpoints(self) -> RawEndpoints:
        """Topics of frames past the subscriptions, for who can take them on the receive thread; see RawEndpoints."""
        self._check_open()
        port = RawEndpoints(self._transport, self._receiver, self._sender, self.stall_timeout_s, self._port_closed)
        self._ports.append(port)
        return port

    def _port_closed(self, port: RawEndpoints) -> None:
        self._ports.remove(port)
        self._port_bytes.update(port.inline_bytes)

    def claim(self, group: str) -> None:
        """Register a rank of a group. Raises ConfigError: this bus holds one already. It does not receive its own
        samples on the topics of a group, so two ranks of one bus would wait for each other for ever."""
        self._check_open()
        self.access_policy.check_rank()
        if group in self._groups:
            raise ConfigError(f"this bus already holds a rank of group {group!r}: open another bus for a second one")
        self._groups.add(group)

    def release(self, group: str) -> None:
        """Unregister the rank of a group."""
        self._groups.discard(group)

    # Receiving

    def subscribe(
        self, *kinds: MessageKind, only: Callable[[Message], bool] | None = None, passing: bool = False
    ) -> Subscription:
        """Messages of these kinds: TrainCmd, ClientUpdate, ModelBlob, and Control messages of ranks (Control), to the
        controller (ToController), to all clients (ToClients), and to one process of clients (Inbox). With any of these
        comes PeerGone, and with ToController PeerDisconnected: the others wait until it is certain. Both are of senders
        whose control messages have been received: a TrainCmd does not name its sender, and no client obeys one before
        its Welcome, which does.

        Args:
            only: whether a message is wanted; what is not, wakes none of the many actors that may share a bus.
            passing: with the last subscription of a kind its reader goes, so that nothing is sent here any more. That
                of an inbox goes always.
        """
        self._check_open()
        for kind in kinds:
            if kind not in self._channels:
                inlet = self._transport.inlet(channel_of(kind))
                channel = self._channels[kind] = InboundChannel(
                    inlet, _no_messages, is_retained=isinstance(kind, Inbox)
                )
                channel.deliver = partial(self._subscriptions.deliver, kind, channel)
                self._receiver.add(channel)
        on_unused = self._remove_reader if passing else self._remove_inbox
        return self._subscriptions.open(kinds, only, on_unused=on_unused)

    def _remove_inbox(self, kind: MessageKind) -> None:
        if isinstance(kind, Inbox):
            self._remove_reader(kind)

    def _remove_reader(self, kind: MessageKind) -> None:
        if not self._closed:
            self._receiver.remove([self._channels.pop(kind)], lambda: None)

    def _on_gone(self, channel: InboundChannel, gone: list[Message]) -> None:
        """Hand over which peers are gone, once to each subscription of control messages that is to know."""
        kinds = [kind for kind, one in self._channels.items() if is_control(one.inlet.channel)]
        for message in gone:
            to = [ToController] if isinstance(message, PeerDisconnected) else kinds
            self._subscriptions.deliver_once(to, channel, [message])

    # Who is there

    def writes(self, kind: MessageKind) -> bool:
        """Whether there is a writer of this topic here."""
        return kind in self._writers

    def matched_readers(self, kind: MessageKind) -> int:
        """Readers that match our writer of this topic. Where members share a key: of processes that know that this one
        is alive, which takes milliseconds; others would drop a part of what is sent at once."""
        writer = self._writers.get(kind)
        return 0 if writer is None else writer.matched

    def matched_writers(self, kind: MessageKind) -> int:
        """Writers that match our reader of this topic."""
        channel = self._channels.get(kind)
        return 0 if channel is None else channel.inlet.matched

    async def matched(self, condition: Callable[[], bool], *, timeout_s: float, what: str = "matching") -> None:
        """Wait until ``condition``, a function of the matched counts, holds. Raises BarrierTimeout: not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._check_open()
                    waiter: asyncio.Future[int] = self._loop.create_future()
                    self._match_waiters.append(waiter)
                    try:
                        await waiter
                    finally:
                        with contextlib.suppress(ValueError):  # it was woken, and so is no longer listed
                            self._match_waiters.remove(waiter)
        except TimeoutError:
            raise BarrierTimeout(
                what, missing=(), ready=0, needed=1, timeout_s=timeout_s, misconfiguration=self.misconfiguration
            ) from None

    def _on_fault(self) -> None:
        """The receive thread has ended: nothing will come any more, so all that wait get the error."""
        self._subscriptions.close(fault=f"the receive thread ended with {self._thread.fault!r}")
        self._on_matched()

    def _on_matched(self) -> None:
        waiters, self._match_waiters = self._match_waiters, []
        for waiter in waiters:
            _resolve(waiter, 0)

    # State

    @property
    def fast_path(self) -> bool:
        """Whether samples go through libddsc without the GIL; False: through the binding."""
        return self._transport.traits.frees_gil

    @property
    def rejected(self) -> Counter[str]:
        """Samples that were dropped before they became a message, by reason."""
        return Counter(self._receiver.rejected)

    @property
    def misconfiguration(self) -> str:
        """Why this process is not admitted, or which samples of this job could not be decoded: the first thing to look
        at when no peer is found. Empty: nothing."""
        return self.access_policy.refusal or self._receiver.rejections.misconfiguration

    @property
    def sent_bytes(self) -> Counter[str]:
        """Bytes of frames given to the transport, by topic, headers and repeats included; of payload there is
        :attr:`traffic`."""
        inline = [self._inline_bytes, self._port_bytes, *(port.inline_bytes for port in self._ports)]
        return sum(inline, Counter(self._sender.sent_bytes))

    @property
    def shared_bytes(self) -> Counter[str]:
        """Bytes of payloads that were read from the memory of other processes instead, by topic."""
        return Counter(self.memory.read_bytes)

    @property
    def received_bytes(self) -> Counter[str]:
        """Bytes of accepted frames taken from the transport, by topic."""
        return Counter(self._receiver.received_bytes)

    @property
    def received_control(self) -> Counter[str]:
        """Control messages taken from the transport by the open subscriptions, by topic, and reports of peers that are
        gone."""
        channels = [channel for channel in self._channels.values() if is_control(channel.inlet.channel)]
        return Counter({channel.inlet.channel.name: channel.taken for channel in channels})

    def _check_open(self) -> None:
        if self._made_in != forks.generation:
            raise forks.refusal("the bus")
        if self._closed:
            raise BusClosed("the bus is closed")
        if self._thread.fault is not None:
            raise BusClosed(f"the receive thread ended with {self._thread.fault!r}") from self._thread.fault

    async def close(self, *, drain_s: float = 1.0) -> None:
        """Send what is queued (for at most ``drain_s``), stop both threads, leave the job. Bounded in time, also when
        the caller is cancelled meanwhile."""
        if self._closed:
            return
        self._closed = True
        if self._made_in != forks.generation:
            return  # its parent's bus goes on
        try:
            if not self._sender.idle:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(drain_s):
                        for _ in range(_MAX_JOBS):  # all slots are ours: all jobs are done
                            await self._slots.acquire()
        finally:
            self._announce_closing()
            self._subscriptions.close()
            self._on_matched()
            self._sender.stop()
            self._thread.stop()
            finished: asyncio.Future[int] = self._loop.create_future()
            drive.later(partial(self._shut_down, finished, list(self._ports)), name="gradbus-close")
            # A cancel does not stop the shutdown, which goes on in its thread; it only stops the wait for it.
            await asyncio.wait([finished], timeout=5.0)

    def _shut_down(self, finished: asyncio.Future[int], ports: list[RawEndpoints]) -> None:
        for port in ports:
            port.refuse_writes()
        self._receiver.join(3.0)
        self._sender.join(3.0)
        self._transport.close()
        self._post(_resolve, finished, 0)


def _no_messages(_: Any) -> None:
    pass


def _resolve(done: asyncio.Future[int], outcome: int | Exception) -> None:
    if done.done():
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


def check_bus(call: str, argument: str, given: object) -> None:
    """Check what an actor is given as its bus.

    ``call``, ``argument``: as of :func:`~gradbus.runtime.misuse.check_instance`.

    Raises:
        ConfigError: it is no bus, or one that is closed.
    """
    advice = "Give the bus of 'async with gradbus.connect(...) as bus:', and keep the order of the arguments"
    check_instance(call, argument, given, Bus, advice)
    if isinstance(given, Bus) and given.is_closed:
        raise ConfigError(
            f"{call}: {argument}: expected an open bus, got one that is closed: its 'async with gradbus.connect(...)' "
            f"block has ended. Construct and run it inside of such a block"
        )


@opening("gradbus.connect", "bus")
async def connect(
    job: str | None = None,
    *,
    domain: int = 0,
    network: NetworkConfig = _ON_LOOPBACK,
    stall_timeout_s: float = 30.0,
    fast: bool | None = None,
    faults: str | Faults = "",
    security: Level | Security = "user",
) -> AsyncIterator[Bus]:
    """Join a job where everything is loaded already: :func:`gradbus.connect` explains the arguments.

    Raises:
        ConfigError: a setting is wrong, or data would leave the machine without protection. BusError: the
            transport cannot be started. NotReachable: nothing has answered for too long.
    """
    job = default_job() if job is None else job
    check_job(job, domain)
    find = partial(transport_maker, job, domain=domain, network=network, fast=fast, security=security)
    injector = FaultInjector(faults) if faults else None
    async with _opened(job, find, stall_timeout_s, injector, network.first_link_s) as bus:
        yield bus


@contextlib.asynccontextmanager
async def connect_over(
    transport: Callable[[str], Transport], job: str, *, stall_timeout_s: float = 30.0
) -> AsyncIterator[Bus]:
    """Join a job over a given transport, encrypted if that encrypts: for tests and simulations, such as over
    :mod:`gradbus.runtime.transport.memory`.

    ``transport``: opens that of the job, off the loop. Raises what this raises.
    """
    check_job(job, 0)
    async with _opened(job, lambda: partial(transport, job), stall_timeout_s) as bus:
        yield bus


@contextlib.asynccontextmanager
async def _opened(
    job: str,
    find: Callable[[], Callable[[], Transport]],
    stall_timeout_s: float,
    injector: FaultInjector | None = None,
    first_link_s: float | None = None,
) -> AsyncIterator[Bus]:
    """Hold a bus open on the transport that is made by what ``find`` returns."""
    with short_switch_interval():
        transport = await open_transport(find, first_link_s=first_link_s)
        if injector is not None:
            transport = injector.over(transport)
        async with closed_on_error(transport):
            bus = Bus(job, transport, asyncio.get_running_loop(), stall_timeout_s)
        if injector is not None:
            bus.faults = injector.faults
        try:
            yield bus
        finally:
            try:
                if injector is not None:
                    injector.close()
            finally:
                await bus.close()


__all__ = ["Bus", "PeerGone", "Subscription", "check_bus", "connect", "connect_over"]
