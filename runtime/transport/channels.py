"""The channels of a job: what a transport owes the samples of each, and how these become messages.

The names and types are those of ``gradbus.idl``, which other languages read as well.

A control message has an address, which follows from its kind (:func:`control_channel_of`): clients write to their
controller, the controller to all clients or to the inbox of one process of clients, ranks to each other. So a process
neither receives nor decrypts what is for another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from gradbus.runtime.errors import FrameError
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.messages import ClientUpdate, Control, Message, ModelBlob, TrainCmd

WINDOW_BYTES = 16 << 20
"""The window of an outlet: octets of samples, about, that it keeps for an inlet which has not acknowledged them. A
write that finds so many waits. Sixteen frames of the largest size, which long fat links need; and a model of up to this
size reaches the healthy inlets at once although a dead one still holds its lease."""


@dataclass(frozen=True, slots=True)
class Channel:
    """What one kind of sample asks of its transport.

    Attributes:
        name: one for all processes of the job.
        sample_type: name of the type in gradbus.idl, which says what fields a sample has.
        retained: its outlets keep the newest samples for inlets that match later.
        keep_last: only the newest sample counts; otherwise all are kept until taken.
        reader_samples: samples that wait in an inlet at most; then its outlets wait. 0: no bound.
        inbox: messages that wait in the process at most; then the inlet fills up.
        may_drop: with a full inbox, drop messages and count them instead. For data that is broadcast and can be asked
            for again: one process that does not keep up must not hold up the others.
        block_s: how long one write may wait. Short where the event loop writes, longer where the thread does.
        to_message: from the fields of a sample to a message.
        overwrites: a full inlet drops its oldest sample instead of making its outlets wait. For what is sent again
            anyway: a process whose interpreter is held for long takes nothing, and must not stop the others.
        ignore_local: what a transport writes does not arrive at its own inlet.
        reliable: outlets send again what an inlet misses, and wait for it.
        lasts_to_all: the inlets of an outlet that keeps the last sample keep all: they wait for one that they miss, and
            must be told that it was replaced.
        for_partners: it is for transports that share another channel as well, and a transport that can tell does not
            match it with others. For what all processes of a job write, so that clients of one controller, which have
            nothing to say to each other, do not receive it from each other.
        side_links: its samples are large, and may come over so many connections of their own at most, beside the one
            for control messages. More than one where many write to one inlet at the same time.

    Raises (to_message):
        FrameError: the bytes are not a message of this channel.
    """

    name: str
    sample_type: str
    retained: bool
    keep_last: bool
    reader_samples: int
    inbox: int
    block_s: float
    may_drop: bool
    to_message: Callable[[Any], Message | frames.Frame]
    ignore_local: bool = False
    reliable: bool = True
    overwrites: bool = False
    lasts_to_all: bool = False
    for_partners: bool = False
    side_links: int = 0


def _train_cmd(sample: Any) -> TrainCmd:
    if sample.round_id < 1 or sample.epochs < 0 or sample.subset_size < 0 or not math.isfinite(sample.lr):
        raise FrameError("command", f"TrainCmd out of range: {sample}")
    return TrainCmd(sample.round_id, sample.subset_size, sample.epochs, sample.lr, sample.seed)


def _client_update(sample: Any) -> ClientUpdate:
    frame = frames.parse(sample.data)
    key = frame.key
    if key.kind is not frames.Kind.UPDATE or key.sender != sample.client_id or key.round_id != sample.round_id:
        raise FrameError("mismatch", f"ClientUpdate of client {sample.client_id} holds a frame of {key}")
    return ClientUpdate(sample.client_id, sample.round_id, sample.num_samples, frame)


def _model_blob(sample: Any) -> ModelBlob:
    frame = frames.parse(sample.data)
    key = frame.key
    if key.kind is not frames.Kind.MODEL or key.sender != frames.CONTROLLER or key.round_id != sample.round_id:
        raise FrameError("mismatch", f"ModelBlob of round {sample.round_id} holds a frame of {key}")
    return ModelBlob(sample.round_id, frame)


def _control(sample: Any) -> Control:
    frame = frames.parse(sample.data)
    if frame.key.kind is not frames.Kind.CONTROL or frame.seq_cnt != 1:
        raise FrameError("mismatch", f"control topic: frame of {frame.key} in {frame.seq_cnt} parts")
    key = frame.key
    return Control(key.sender, key.incarnation, control.decode(frame.data), key.transfer, key.name)


class ToController:
    """Names the control messages of clients to their controller, in :meth:`.bus.Bus.subscribe`."""


class ToClients:
    """Names the control messages of a controller to all clients."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """Names the control messages of a controller to one process of clients.

    Attributes:
        incarnation: of the clients. Those of one host have the same one, and so share its inbox.
    """

    incarnation: int


@dataclass(frozen=True, slots=True)
class BestEffort:
    """Names the messages of a kind for a bus that only looks on: some may be missing. No outlet waits for such a
    reader, whatever becomes of its process."""

    kind: type[Any]


MessageKind: TypeAlias = type[Any] | Inbox | BestEffort
"""What a bus may subscribe to. :class:`~gradbus.runtime.wire.messages.Control` names those among ranks of groups."""

_GROUPS = Channel(
    # Every rank receives everything, and everything is repeated: one that hangs must not stop the writes of the others.
    "train/control",
    "Frame",
    retained=False,
    keep_last=False,
    reader_samples=4096,
    inbox=1024,
    block_s=0.01,
    may_drop=True,
    to_message=_control,
    overwrites=True,
)
CHANNELS: dict[type[Any], Channel] = {
    # A late or restarted client still reads the command of the open round: state, not event.
    TrainCmd: Channel("train/train_cmd", "TrainCmd", True, True, 0, 64, 0.01, False, _train_cmd),
    ClientUpdate: Channel(
        "train/client_update", "ClientUpdate", False, False, 16, 16, 0.1, False, _client_update, side_links=4
    ),
    ModelBlob: Channel("train/model_blob", "ModelBlob", True, False, 16, 64, 0.1, True, _model_blob, side_links=1),
    # Up to PROTOCOL 3 clients and controllers used this one, too, and all of them received everything.
    Control: _GROUPS,
    ToController: replace(_GROUPS, name="train/control/controller"),
    ToClients: replace(_GROUPS, name="train/control/clients"),
}
_INBOX = "train/control/"
INBOXES = f"{_INBOX}<incarnation>"
"""The name under which the traffic of all inboxes counts."""

INBOX_RETAINED = 16
"""Messages that the outlet to an inbox keeps: what it writes before the two have matched arrives at the match."""


def inbox_channel(incarnation: int) -> Channel:
    """Return the channel of the control messages to one process of clients: ``train/control/<incarnation>``, in 16
    hexadecimal digits.

    It is retained, because the controller opens its outlet with the first message that it addresses: a client need not
    ask twice. After a lost match the newest messages arrive again, and a bus drops those that it has received.
    """
    return replace(_GROUPS, name=f"{_INBOX}{incarnation:016x}", retained=True)


def is_inbox_name(name: str) -> bool:
    """Return whether the channel of this name is the inbox of one process of clients."""
    return len(name) == len(_INBOX) + 16 and name.startswith(_INBOX)


def traffic_name(channel: Channel) -> str:
    """Return the name under which traffic on a channel counts: all inboxes have one."""
    return INBOXES if is_inbox_name(channel.name) else channel.name


def is_control(channel: Channel) -> bool:
    """Return whether a channel carries control messages, whoever they are for."""
    return channel.to_message is _control


def is_control_name(name: str) -> bool:
    """Return whether the channel of this name carries control messages."""
    return name == _GROUPS.name or name.startswith(f"{_GROUPS.name}/")


def channel_of(kind: MessageKind) -> Channel:
    """Return the channel of what a bus writes or subscribes to."""
    if isinstance(kind, Inbox):
        return inbox_channel(kind.incarnation)
    if isinstance(kind, BestEffort):
        return replace(CHANNELS[kind.kind], reliable=False, overwrites=False)
    return CHANNELS[kind]


AMONG_RANKS = frozenset({control.GroupHello, control.GroupLeave, control.GroupView, control.RankStatus})
FROM_CLIENTS = frozenset(
    {
        control.Hello,
        control.UploadRequest,
        control.PacketRequest,
        control.MaskAnswer,
        control.ModelRequest,
        control.TrainingFailure,
        control.EvaluationResult,
        control.Leave,
    }
)
TO_ONE_CLIENT = frozenset(
    {
        control.Welcome,
        control.Grant,
        control.Receipt,
        control.RetransmitRequest,
        control.PacketsMissing,
        control.MaskShares,
        control.LocalModelRequest,
    }
)


def control_channel_of(body: control.Body) -> MessageKind:
    """Return where a control message is written. All that is not for one receiver is for all clients.

    So is a refusal, which names whom it is for: a process that may not join gets no inbox, or a flood of Hellos would
    have the controller open an outlet for each.
    """
    kind = type(body)
    if kind in TO_ONE_CLIENT:
        incarnation: int = getattr(body, "incarnation")  # noqa: B009 - each of these kinds has one
        return Inbox(incarnation)
    if kind in FROM_CLIENTS:
        return ToController
    return Control if kind in AMONG_RANKS else ToClients


def _collective(sample: Any) -> frames.Frame:
    frame = frames.parse(sample.data)
    if frame.key.kind is not frames.Kind.COLLECTIVE:
        raise FrameError("mismatch", f"collective topic: frame of {frame.key}")
    return frame


def collective_channel(name: str) -> Channel:
    """Return the channel of the frames of one group of ranks: ``train/frame/<group>`` for what goes to all of them, and
    ``train/frame/<group>/<rank>`` for what goes to one. Its reader is emptied at once, on the receive thread, so the
    bound on its samples holds up writers only while that thread has no turn.

    The newest frames are retained, not for newcomers, who know that these are not for them, but for inlets that are
    lost and found again: after a stop that was longer than a lease, or after a goodbye that somebody else has sent in
    their name. What was written meanwhile would be lost, and a collective would wait for it until its deadline.
    """
    return Channel(f"train/frame/{name}", "Frame", True, False, 512, 0, 0.01, False, _collective, ignore_local=True)


def _store(sample: Any) -> frames.Frame:
    frame = frames.parse(sample.data)
    if frame.key.kind is not frames.Kind.CONTROL or frame.seq_cnt != 1:
        raise FrameError("mismatch", f"store topic: frame of {frame.key} in {frame.seq_cnt} parts")
    return frame


def store_channel(inbox: int = 0) -> Channel:
    """Return the channel of a store of keys and values: ``train/store`` for what goes to the rank that holds the table,
    and ``train/store/<incarnation>``, in 16 hexadecimal digits, for its answers to one process. Whoever waits for an
    answer asks again, so a writer that is held up for ``block_s`` gives up."""
    name = f"train/store/{inbox:016x}" if inbox else "train/store"
    return Channel(name, "Frame", False, False, 512, 0, 0.01, False, _store)
