"""Sends what one client has trained: updates in one piece, in packets or masked, one update at a time."""

from __future__ import annotations

import asyncio
import itertools

from gradbus.actors.federated.client.packets_out import PacketSender
from gradbus.actors.federated.client.update_masks import ClientMasking
from gradbus.actors.federated.client.updates_out import UpdateSender
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.testing.journal import Probe
from gradbus.runtime.wire.control import Grant, PacketsMissing, Receipt, RetransmitRequest
from gradbus.runtime.wire.messages import Identity


class Outbox:
    """Holds the senders of one client.

    Attributes:
        transfers: numbers of uploads, none of which this client uses twice.
        updates: sends whole updates, and the last packet of others. early: the packets before that.
        packets: decides which packets go out. masking: has the masks of this client.
        answered_by: the incarnation of the controller that has answered last about an update.
    """

    def __init__(self, bus: Bus, identity: Identity, probe: Probe, *, least_members: int) -> None:
        """``least_members``: with fewer this client takes no part in masked sums."""
        self.transfers = itertools.count(1)
        self.updates = UpdateSender(bus, identity, probe)
        self.early = UpdateSender(bus, identity, probe)
        self.packets = PacketSender(self.early, self.updates, self.transfers, probe)
        self.answered_by = 0
        self.masking = ClientMasking(bus, identity, least_members=least_members)

    @property
    def bytes_up(self) -> int:
        """Return the bytes of updates that were sent so far."""
        return self.updates.bytes_up + self.early.bytes_up

    def interrupt(self) -> None:
        """Check at once whether an update, sent or waiting for masks, is still wanted."""
        self.updates.interrupt()
        self.early.interrupt()
        self.masking.interrupt()

    def on_answer(
        self, session: int, body: Grant | RetransmitRequest | Receipt | PacketsMissing, group: asyncio.TaskGroup
    ) -> None:
        """The controller has answered about an update, or a packet of one.

        Args:
            session: its incarnation. group: tasks that send belong to it.
        """
        self.answered_by = session
        if isinstance(body, PacketsMissing):
            self.packets.on_missing(body)
        elif not self.updates.on_answer(body, group):
            self.early.on_answer(body, group)

    def close(self) -> None:
        """End. What is being made is given up."""
        self.masking.close()
