"""Packets of in-network aggregation between ranks of a group, in order, many in one message.

The group's own messages are reliable and ordered, so packets are neither lost nor do they overtake each other: what the
protocol needs on the way to an aggregator (rule 4 of :mod:`gradbus.runtime.in_network.worker`).
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import torch

from gradbus.runtime.collectives.group import Group
from gradbus.runtime.collectives.handle import CollectiveHandle
from gradbus.runtime.errors import BusClosed, CollectiveError
from gradbus.runtime.in_network.encoding import (
    MAX_PACKETS,
    MalformedPackets,
    decode_packets,
    encode_packets,
    message_limit,
)
from gradbus.runtime.in_network.packets import Packet
from gradbus.runtime.logs import get_logger
from gradbus.runtime.traffic import Traffic

MESSAGE_BYTES = 4 << 20  # packets of one message, about
UNDER_WAY = 4  # messages to one rank
MAX_WAITING = 2 * MAX_PACKETS  # packets to one rank; a window of 64 groups among 64 workers is 4096 blocks
# A stream waits as long as the group lasts: the group tells of a peer that dies, and a step has its own deadline.
_FOREVER_S = 1e9

log = get_logger("in_network")


def payload_limit(block_elems: int) -> int:
    """Return what a member of a group takes at most in one message, before memory is found for it."""
    return message_limit(MESSAGE_BYTES, block_elems)


class PacketStreams:
    """The streams of one rank to and from some others. Use it as a context manager.

    Attributes:
        lost_packets: that were dropped on purpose.
    """

    def __init__(
        self,
        group: Group,
        peers: Sequence[int],
        *,
        block_elems: int,
        receive: Callable[[int, list[Packet]], None],
        lost: Callable[[int, Exception], None],
        loss: float = 0.0,
    ) -> None:
        """
        Args:
            peers: ranks of the group.
            receive: called on the event loop with a rank and packets that came from it.
            lost: called once for a peer that is gone, sends what is none, or takes none.
            loss: for experiments: probability that a packet is dropped before it is sent.
        """
        self._group = group
        self._block_elems = block_elems
        self._receive = receive
        self._lost = lost
        self._loss = loss
        self._random = random.Random(group.rank)
        self._waiting: dict[int, deque[Packet]] = {peer: deque() for peer in peers}
        self._wake = {peer: asyncio.Event() for peer in peers}
        self._tasks: list[asyncio.Task[None]] = []
        self._gone: set[int] = set()
        self.lost_packets = 0

    async def __aenter__(self) -> PacketStreams:
        for peer in self._waiting:
            for stream in (self._send_all(peer), self._receive_all(peer)):
                self._tasks.append(asyncio.create_task(self._guarded(peer, stream)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def traffic(self) -> Traffic:
        """Return the payload of the group, which is that of these streams and a few messages at its start."""
        return self._group.traffic

    def post(self, to: int, packet: Packet) -> None:
        """Send a packet, after those before it. To a peer that is gone nothing is sent.

        The protocol's window bounds how many wait for an honest peer. One that has more answers to take than
        :data:`MAX_WAITING` asks and does not read: it is lost.
        """
        if to in self._gone or to not in self._waiting:
            return
        if packet.is_repeated and self._waiting[to]:
            return  # the first copy may still be among these
        if self._loss and self._random.random() < self._loss:
            self.lost_packets += 1
            return
        if len(self._waiting[to]) >= MAX_WAITING:
            self._lose(to, CollectiveError(f"rank {to} takes no packets: {MAX_WAITING} wait for it"))
            return
        self._waiting[to].append(packet)
        self._wake[to].set()

    async def _send_all(self, peer: int) -> None:
        waiting, wake = self._waiting[peer], self._wake[peer]
        under_way: deque[CollectiveHandle[None]] = deque()
        try:
            while True:
                await wake.wait()
                wake.clear()
                while waiting:
                    message = torch.from_numpy(encode_packets(self._next(waiting)))
                    under_way.append(self._group.send("packets", message, to=peer, timeout_s=_FOREVER_S))
                    while under_way and (len(under_way) >= UNDER_WAY or under_way[0].done()):
                        await under_way.popleft()
        finally:
            for handle in under_way:
                handle.cancel()

    @staticmethod
    def _next(waiting: deque[Packet]) -> list[Packet]:
        packets: list[Packet] = []
        size = 0
        while waiting and size < MESSAGE_BYTES and len(packets) < MAX_PACKETS:
            packets.append(waiting.popleft())
            values = packets[-1].values
            size += 0 if values is None else values.nbytes
        return packets

    async def _receive_all(self, peer: int) -> None:
        # Several calls ahead: a large message is sent when its receiver has called, and would wait for that each time.
        expected: deque[CollectiveHandle[Any]] = deque()
        try:
            while peer not in self._gone:
                while len(expected) < UNDER_WAY:
                    expected.append(self._group.recv("packets", source=peer, timeout_s=_FOREVER_S))
                self._take(peer, await expected.popleft())
        finally:
            for handle in expected:
                handle.cancel()

    def _take(self, peer: int, message: Any) -> None:
        if not isinstance(message, torch.Tensor) or message.dtype != torch.uint8 or message.dim() != 1:
            raise MalformedPackets(f"rank {peer} sent {type(message).__name__} in place of packets")
        self._receive(peer, decode_packets(np.asarray(message), block_elems=self._block_elems))

    async def _guarded(self, peer: int, stream: Coroutine[Any, Any, None]) -> None:
        try:
            await stream
        except Exception as error:
            if not isinstance(error, BusClosed | CollectiveError | MalformedPackets):
                log.error("packets of a peer", group=self._group.name, peer=peer, exc_info=error)
            self._lose(peer, error)

    def _lose(self, peer: int, error: Exception) -> None:
        if peer not in self._gone:
            self._gone.add(peer)
            self._waiting[peer].clear()
            self._lost(peer, error)
