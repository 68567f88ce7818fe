"""An update in packets at its client: what a task sends while it trains, and how it goes out.

    train ... round.send(packet) ... round.send(packet) ... return TrainResult.packets(more)
                    |                        |
    the loop:   PacketRequest -> Grant -> frames -> Receipt       of each packet but the last, beside the training
                                     last packet, with the figures of the training -> Receipt of the update

A packet goes out when the next one is made, as only then it is known not to be the last. All of them are kept until the
update counts: where the controller has lost some, it asks for them again. Where an update has to be one piece before it
leaves (masked, with noise, with sections of a training rule, or made by a process that sends nothing itself), the
packets are added here, to the same bits, and what goes out is an update like any other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.packet_sum import MAX_PACKETS, max_packet_bytes, max_update_bytes, sum_packets
from gradbus.actors.federated.client.updates_out import EncodedUpdate, UpdateSender
from gradbus.codecs import Codec, CodecError
from gradbus.runtime.testing.journal import Probe, no_probe
from gradbus.runtime.wire.control import PacketRequest, PacketsMissing, Receipt, UploadRequest
from gradbus.runtime.wire.frames import FrameKey


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTraining:
    """The outcome of a training all of whose packets are made; see ``TrainOutcome``."""

    num_samples: int
    loss: float | None
    metrics: Any


@dataclass(frozen=True, slots=True)
class PacketRoute:
    """The way out for packets while their client trains.

    Attributes:
        transfers: numbers of uploads. put: takes a packet that is not the last; from any thread.
    """

    transfers: Iterator[int]
    put: Callable[[EncodedUpdate], None]


class RoundPackets:
    """The packets of one training. A task whose ``train`` has an argument ``round`` gets it there.

    Attributes:
        base: float32, shape (D,): the global model that training begins with; not to be changed.
    """

    def __init__(
        self,
        base: Tensor,
        layers: Callable[[], dict[str, slice]],
        read: Callable[[], Tensor],
        key: FrameKey,
        route: PacketRoute | None = None,
        own: Sequence[type[Codec]] = (),
    ) -> None:
        """Begin without a packet.

        Args:
            layers: returns where each tensor is in the vector. read: returns the model as it is now.
            key: of the first packet's frames.
            route: by which packets leave at once; None: they are added here.
            own: codecs that are not built in, in which packets may be.
        """
        self.base = base
        self._layers = layers
        self._read = read
        self._key = key
        self._route = route
        self._own = own
        self._payloads: list[bytes] = []
        self._num_bytes = 0
        self._num_samples = 0  # so far, as the newest packet says; 0: it does not
        self._newest: tuple[FrameKey, PacketRequest] | None = None  # of the packet that waits for the next one
        self._sum: memoryview | None = None

    @property
    def layers(self) -> dict[str, slice]:
        """Where each tensor of the model is in the vector, by its name."""
        return self._layers()

    def vector(self) -> Tensor:
        """Return the model as it is now, float32, shape (D,), to keep."""
        return self._read().clone()

    def send(self, packet: bytes | bytearray | memoryview, num_samples: int = 0) -> None:
        """Add a packet to the update, which is the sum of all of them in place of the trained model. It does not wait.

        Args:
            packet: a message of any codec, such as ``gradbus.codecs.get("s4").encode(vector)`` with a vector of shape
                (D,). num_samples: trained on so far; that of the last packet counts. 0: what ``train`` returns.

        Raises:
            ValueError: it is no such message, or one more than an update may have, or too long.
        """
        payload, dim, number = bytes(packet), self.base.numel(), len(self._payloads) + 1
        if number > MAX_PACKETS:
            raise ValueError(f"packet {number} of an update: it has at most {MAX_PACKETS}. Send larger parts")
        if len(payload) > max_packet_bytes(dim) or self._num_bytes + len(payload) > max_update_bytes(dim):
            raise ValueError(
                f"packet {number} of {len(payload)} bytes, after {self._num_bytes}: at most {max_packet_bytes(dim)} in "
                f"one, and {max_update_bytes(dim)} in all of an update of {dim} values. Send sparse ones, or fewer"
            )
        try:
            codecs.parse(payload, expected_dim=dim, own=self._own)
        except CodecError as error:
            raise type(error)(f"packet {number} is no message of a codec for {dim} values: {error}") from None
        self._payloads.append(payload)
        self._num_bytes += len(payload)
        self._num_samples = int(num_samples)
        if self._route is not None:
            self._leave(self._route, len(payload), number)

    def _leave(self, route: PacketRoute, num_bytes: int, number: int) -> None:
        """Let the packet before go, and have this one wait."""
        if self._newest is not None:
            key, request = self._newest
            route.put(EncodedUpdate(key, request, self._payloads[number - 2]))
        key = self._key if number == 1 else self._key._replace(transfer=next(route.transfers))
        request = PacketRequest(
            run_id=key.job,
            round_id=key.round_id,
            transfer=key.transfer,
            total_bytes=num_bytes,
            num_samples=max(1, self._num_samples),
            loss=math.nan,
            train_s=0.0,
            encode_s=0.0,
            update=self._key.transfer,
            packet=number,
            last=False,
        )
        self._newest = key, request

    def complete(self, outcome: Any, should_stop: Callable[[], bool]) -> Any:
        """Take the packets of an outcome of training, and return it as it is with all of them.

        Raises:
            ValueError: there are none, or it has a packet that :meth:`send` refuses. And what making one raises.
        """
        parts: Iterable[Any] | None = getattr(outcome, "parts", None)
        if parts is None and not self.count:
            return outcome
        for part in parts or ():
            self.send(*(part if isinstance(part, tuple) else (part,)))
            if should_stop():
                break
        if not self.count:
            raise ValueError("TrainResult.packets without a packet: if there was nothing to train, return nothing()")
        return FinishedTraining(
            num_samples=self._num_samples or outcome.num_samples,
            loss=outcome.loss,
            metrics=getattr(outcome, "metrics", None),
        )

    @property
    def count(self) -> int:
        """Number of packets so far."""
        return len(self._payloads)

    @property
    def leaves(self) -> bool:
        """Whether the update goes out in its packets."""
        return self._route is not None and bool(self._payloads)

    def sum(self) -> memoryview:
        """Return the sum of all packets as a message of ``fp32``."""
        if self._sum is None:
            self._sum = sum_packets(self._payloads, dim=self.base.numel(), own=self._own)
        return self._sum

    def change(self) -> Tensor | None:
        """Return what the packets come to as a difference to the base, float32, shape (D,); None: there are none.

        Raises:
            NonFiniteError: their sum is not finite.
        """
        if not self._payloads:
            return None
        decoded = codecs.decode(self.sum(), expected_dim=self.base.numel())
        return decoded.vector if decoded.is_delta else decoded.vector - self.base

    def make_last(self, whole: EncodedUpdate) -> EncodedUpdate:
        """Return the last packet with the figures of ``whole``, the update as one piece, and what it keeps."""
        assert self._newest is not None, "only where it leaves in packets"
        key, newest = self._newest
        names = {field.name for field in fields(UploadRequest)} - {"transfer", "total_bytes", "memory"}
        figures = {name: getattr(whole.request, name) for name in names}
        return replace(whole, key=key, request=replace(newest, **figures, last=True), payload=self._payloads[-1])


class _Outgoing:
    """The packets of one update that are not the last, on the loop. ``next``: index of the first one that has not been
    delivered. ``refused``: the receipt that refuses the whole update."""

    def __init__(self) -> None:
        self.made: list[EncodedUpdate] = []
        self.next = 0
        self.changed = asyncio.Event()
        self.refused: Receipt | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def is_through(self) -> bool:
        """Whether none of them is on its way."""
        return self.task is None or self.next == len(self.made) or self.task.done()

    def of_number(self, number: int) -> EncodedUpdate | None:
        """The packet of this number; None: it is the last, or there is none."""
        return self.made[number - 1] if number <= len(self.made) else None


class PacketSender:
    """Sends the packets of one update at a time, those before the last beside the training. Used on the loop. After
    :meth:`begin`, either :meth:`deliver` or :meth:`stop` has to be called.

    The last packet does not wait for those before it: it has the figures of the training, which the controller of a
    first round has to know of all clients before it adds an update of any.
    """

    def __init__(
        self, early: UpdateSender, last: UpdateSender, transfers: Iterator[int], probe: Probe | None = None
    ) -> None:
        """``early``: sends packets before the last. ``last``: sends the last. ``transfers``: numbers of uploads."""
        self._probe = probe or no_probe()
        self._early = early
        self._last = last
        self._transfers = transfers
        self._outgoing = _Outgoing()
        self._missing: PacketsMissing | None = None

    def begin(
        self, loop: asyncio.AbstractEventLoop, group: asyncio.TaskGroup, check: Callable[[], bool]
    ) -> PacketRoute:
        """Return the way out for the packets of a training, which may be called on its thread.

        Args:
            loop: of this sender. group: the task that sends them belongs to it.
            check: whether the update is still wanted.
        """
        outgoing = self._outgoing = _Outgoing()

        def take(packet: EncodedUpdate) -> None:
            if self._outgoing is not outgoing:
                return  # of a training that was given up
            outgoing.made.append(packet)
            outgoing.changed.set()
            if outgoing.task is None:
                outgoing.task = group.create_task(self._send(outgoing, check), name="client-packets")

        def put(packet: EncodedUpdate) -> None:
            loop.call_soon_threadsafe(take, packet)

        return PacketRoute(self._transfers, put)

    async def _send(self, outgoing: _Outgoing, check: Callable[[], bool]) -> None:
        """Deliver packets as they are made, until cancelled, or the update is of no use."""
        try:
            while True:
                while outgoing.next < len(outgoing.made):
                    packet = outgoing.made[outgoing.next]
                    receipt = await self._early.deliver(packet, check=check)
                    if receipt is None or not receipt.accepted:
                        outgoing.refused = receipt
                        return
                    outgoing.next += 1
                    self._probe.reached("between_packets", packet.key.round_id)
                self._last.interrupt()
                outgoing.changed.clear()
                await outgoing.changed.wait()
        finally:
            self._last.interrupt()

    async def stop(self) -> None:
        """Send nothing more before the last packet."""
        task = self._outgoing.task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def deliver(self, last: EncodedUpdate, *, check: Callable[[], bool], is_held: bool = False) -> Receipt | None:
        """Deliver the last packet, and those before it that the controller lacks, until there is a receipt for the
        update. Arguments are those of :meth:`.UpdateSender.deliver`.

        Returns:
            The receipt; None: there will be none.
        """
        outgoing = self._outgoing
        try:
            while outgoing.refused is None:
                self._missing = None
                receipt = await self._last.deliver(
                    last, check=lambda: self._missing is None and outgoing.refused is None and check(), is_held=is_held
                )
                missing = self._lacked(outgoing)
                if receipt is not None or not missing:
                    return receipt or outgoing.refused
                await self.stop()
                for packet in missing:
                    receipt = await self._early.deliver(packet, check=check)
                    if receipt is None or not receipt.accepted:
                        return receipt
            return outgoing.refused
        finally:
            await self.stop()

    def _lacked(self, outgoing: _Outgoing) -> list[EncodedUpdate]:
        """The packets before the last that the controller has asked for; no honest one lacks what was never made."""
        numbers = [] if self._missing is None else self._missing.packets
        return [packet for number in numbers if (packet := outgoing.of_number(number)) is not None]

    def on_missing(self, body: PacketsMissing) -> None:
        """The controller has the last packet, and lacks others. Those that are on their way still will come."""
        if self._outgoing.is_through and self._last.is_sending(body.round_id, body.transfer):
            self._missing = body
            self._last.interrupt()
