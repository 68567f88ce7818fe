"""Each kind of control message has its recipients, and no other kind of channel."""

from __future__ import annotations

import dataclasses
from typing import get_args

from gradbus.runtime.transport.channels import (
    AMONG_RANKS,
    CHANNELS,
    FROM_CLIENTS,
    TO_ONE_CLIENT,
    BestEffort,
    Inbox,
    ToClients,
    ToController,
    channel_of,
    control_channel_of,
    is_control,
    is_control_name,
)
from gradbus.runtime.wire.control import Body, Receipt, Refused, Status
from gradbus.runtime.wire.messages import Control, ModelBlob


def test_what_names_a_start_of_a_client_is_in_its_inbox_but_for_a_refusal() -> None:
    addressed = {kind for kind in get_args(Body) if {"to", "incarnation"} <= {f.name for f in dataclasses.fields(kind)}}
    assert addressed == TO_ONE_CLIENT | {Refused}


def test_a_kind_of_message_has_one_place_and_what_a_client_sends_is_documented_so() -> None:
    assert not FROM_CLIENTS & AMONG_RANKS
    assert not (FROM_CLIENTS | AMONG_RANKS) & TO_ONE_CLIENT
    sent_by_clients = {kind for kind in get_args(Body) if (kind.__doc__ or "").startswith("Client to controller")}
    assert sent_by_clients == FROM_CLIENTS


def test_a_message_is_written_where_it_is_read() -> None:
    assert control_channel_of(Receipt(7, 9, 1, 1, 1, True, "")) == Inbox(9)
    assert control_channel_of(Refused(7, 9, "why")) is ToClients
    assert control_channel_of(Status(1, 1, "done", 0, 0)) is ToClients
    assert channel_of(Inbox(0xAB)).name == "train/control/00000000000000ab"
    assert channel_of(Inbox(0xAB)).retained


def test_all_channels_of_control_messages_are_known_as_such_by_name() -> None:
    kinds = [Control, ToController, ToClients, Inbox(1), BestEffort(ToClients)]
    assert all(is_control(channel_of(kind)) and is_control_name(channel_of(kind).name) for kind in kinds)
    assert not is_control(CHANNELS[ModelBlob])
    assert not is_control_name("train/controls")
