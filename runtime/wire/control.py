"""Control messages: their schema and limits. :mod:`.bounded_msgpack` says how they become bytes."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from gradbus.runtime.choices import MAX_OPTIONS_CHARS
from gradbus.runtime.names import MAX_NAME_CHARS, name_or_empty
from gradbus.runtime.plain_text import plain_line, plain_text
from gradbus.runtime.wire.bounded_msgpack import Limits, pack_body, read_body, unpack
from gradbus.runtime.wire.client_orders import MAX_CLIENT_ORDERS_CHARS, checked_orders
from gradbus.runtime.wire.id_ranges import MAX_CHARS, checked_ids

PROTOCOL = 4
LAST_ON_CONTROL = 3  # up to this protocol, controllers and clients sent all control messages on train/control
BEFORE_FIRST_ROUND = 0  # in a TrainingFailure: a client cannot get ready, and leaves
NOT_WELCOMED = 0  # no run has this id: in such a TrainingFailure, of a client that knows of no run yet
PAUSED_PHASE = "paused"  # in a Hello: the client takes part in no round until it reports another phase
FETCHING_PHASE = "fetching"  # it waits for a model, which the end of a run waits for, too
FROZEN_ROUND = 0x7FFF_FFFF  # no round has this number: it stands for the values that no round changes
CANDIDATE_ROUNDS = range(0x7FFE_0000, 0x7FFF_0000)  # nor one of these: they stand for models that are evaluated alone
MAX_BODY_BYTES = 64 * 1024
MAX_BODY_MEMORY = 1 << 20  # that reading a body may take
MAX_SEQS = 256
MAX_BINARY = 32 * 1024
_LIMITS = Limits(
    MAX_BODY_BYTES, text_bytes=MAX_BODY_BYTES, binary_bytes=MAX_BINARY, items=MAX_SEQS, fields=64, containers=16
)

STRICT = ConfigDict(strict=True, extra="ignore")

U32 = Annotated[int, Field(ge=0, le=0xFFFF_FFFF)]
World = Annotated[int, Field(ge=1, le=1024)]  # as many ranks as a group may have
U64 = Annotated[int, Field(ge=0, le=0xFFFF_FFFF_FFFF_FFFF)]
Round = Annotated[int, Field(ge=-1, le=0x7FFF_FFFF)]
OpenRound = Annotated[int, Field(ge=1, le=0x7FFF_FFFF)]
Natural32 = Annotated[int, Field(ge=0, le=0x7FFF_FFFF)]
I32 = Annotated[int, Field(ge=-0x8000_0000, le=0x7FFF_FFFF)]
Name = Annotated[str, Field(max_length=256)]
# Text of a peer that people read is made plain here, so that no error, log or table has to.
Label = Annotated[str, Field(max_length=256), AfterValidator(plain_line)]
ClientName = Annotated[str, Field(max_length=MAX_NAME_CHARS), AfterValidator(name_or_empty)]
Text = Annotated[str, Field(max_length=32 * 1024), AfterValidator(plain_line)]
Lines = Annotated[str, Field(max_length=32 * 1024), AfterValidator(plain_text)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Ranks = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 20)]], Field(max_length=MAX_SEQS)]
Seqs = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 20)]], Field(max_length=MAX_SEQS)]
Packet = Annotated[int, Field(ge=1, le=MAX_SEQS)]
Packets = Annotated[list[Packet], Field(min_length=1, max_length=MAX_SEQS)]
Incarnations = Annotated[list[U64], Field(max_length=MAX_SEQS)]
Ids = Annotated[list[U32], Field(max_length=MAX_SEQS)]
IdRanges = Annotated[str, Field(max_length=MAX_CHARS), AfterValidator(checked_ids)]
ClientOrders = Annotated[str, Field(max_length=MAX_CLIENT_ORDERS_CHARS), AfterValidator(checked_orders)]
Patterns = Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=64)]
Rules = Annotated[
    dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=16)]], Field(max_length=34)
]
MAX_REASONS = 16  # that a message has room for
MAX_REASON_CHARS = 500  # of one
Reasons = Annotated[
    list[Annotated[str, Field(max_length=MAX_REASON_CHARS), AfterValidator(plain_line)]],
    Field(max_length=MAX_REASONS),
]
Waits = Annotated[list[Seconds], Field(max_length=MAX_SEQS)]
Options = Annotated[dict[Annotated[str, Field(max_length=64)], bool | int | float | Name], Field(max_length=32)]
JsonText = Annotated[str, Field(max_length=MAX_OPTIONS_CHARS)]
Counts = Annotated[dict[Label, U64], Field(max_length=32)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Attempt = Annotated[int, Field(ge=1, le=0xFFFF_FFFF)]
Binary = Annotated[bytes, Field(max_length=MAX_BINARY)]
MAX_METRICS = 32  # that a message has room for
MAX_METRIC_CHARS = 64  # of the name of one
Metrics = Annotated[
    dict[Annotated[str, Field(max_length=MAX_METRIC_CHARS), AfterValidator(plain_line)], Finite],
    Field(max_length=MAX_METRICS),
]


@dataclass(frozen=True, slots=True, config=STRICT)
class Hello:
    """Client to controller: its state. Sent at the start, on every change and as the heartbeat.

    Attributes:
        dim: number of parameters of the client's model.
        layout: hash over names, shapes and dtypes of its parameters.
        ready: its DDS writers and readers are matched with the controller's.
        session: incarnation of the controller that has welcomed it, 0 for none.
        phase: idle, fetching, training, encoding or uploading; paused: it takes part in no round until it sends
            another one.
        round_id: the round it works on, -1 for none.
        model_round: the round of the model that it holds, -1 for none.
        host: host name and process id, for people.
        next_round: the first round that its Welcome named, -1 for none; another one gets it a new Welcome.
        memory: the machine whose shared memory it reads, empty: none.
        phase_s: seconds since the phase began.
        trained_dim, trained_layout: dim and layout of the trained part alone; 0: nothing of its model is frozen.
        site: it is the Controller of a site, whose updates are exact sums.
        ids: it speaks for the clients with these ids, which have its incarnation and its session; empty: for itself.
        shared_dim, shared_layout: dim and layout of what its Welcome's patterns share; 0: it has not been given any.
        masks: it can mask its updates. grids: and round them to a common grid before.
        name: of the client, or of the host of these clients; empty: it has none. A client that has a name and no id
            yet sends as UNASSIGNED.
    """

    protocol: U32
    dim: U64
    layout: U64
    ready: bool
    session: U64
    phase: Label
    round_id: Round
    model_round: Round
    host: Label
    next_round: Round
    memory: Name = ""
    phase_s: Seconds = 0.0
    trained_dim: U64 = 0
    trained_layout: U64 = 0
    site: bool = False
    ids: IdRanges = ""
    shared_dim: U64 = 0
    shared_layout: U64 = 0
    masks: bool = False
    grids: bool = False
    name: ClientName = ""


@dataclass(frozen=True, slots=True, config=STRICT)
class Welcome:
    """Controller to one client: take part from round ``next_round`` on, with these settings.

    Attributes:
        to: client id, or UNASSIGNED; ``incarnation``: which start of it.
        run_id: id of the run, new for each fresh start of training, kept over a resume.
        codec: name of the uplink codec. codec_options: all of its options, as a JSON object.
        num_clients: clients the run expects, 0 if it does not know.
        heartbeat_s: how often to send Hello.
        memory: the machine whose shared memory the controller reads, empty: none. Updates may lie in the client's own.
        rule: how to train, and ``options``, of the rule. A client refuses a rule that it does not have or allow.
        frozen: hash over the values of the model that are not sent; a client with other values requests them, as the
            model of round FROZEN_ROUND. 0: all are sent.
        round_s: deadline of a round, in seconds after its command; 0: unknown.
        broadcast: values that follow each model, for the rule: see ``Strategy.broadcast``.
        has_terms: RoundTerms belong to each command, and training waits for them.
        fetch_models: models are not sent to all: a client takes that of a round only if it takes part in it.
        include, exclude: patterns of names of tensors, of which some are shared and the others stay at the client;
            both empty: all are shared.
        masked: with secure aggregation: no update leaves a client before it is masked.
        buffers: how buffers of integers and booleans are merged, by pattern, the first that matches; what matches none
            is not exchanged. buffer_layout: hash over those that are exchanged, whose values end each update and each
            model; 0: there are none.
        section_codec, section_options: the same for what an update holds beside the model.
        downlink_codec: name of the codec of the models. A client refuses a codec that it does not have or allow.
        client_id: id of the client, which it sends as from now on; -1: as in ``to``. name: its name, empty: it has
            none.
        named_commands: an earlier start of this run may still run and command: only a RepeatedCommand counts, which
            goes out with each TrainCmd, as its frame has the incarnation of its controller.
    """

    to: U32
    incarnation: U64
    run_id: U64
    next_round: Round
    codec: Name
    codec_options: JsonText
    num_clients: U32
    heartbeat_s: Annotated[float, Field(ge=0.01, le=3600, allow_inf_nan=False)]
    memory: Name = ""
    frozen: U64 = 0
    rule: Name = "plain"
    options: Options = dataclasses.field(default_factory=dict)
    round_s: Seconds = 0.0
    broadcast: U64 = 0
    has_terms: bool = False
    fetch_models: bool = False
    include: Patterns = dataclasses.field(default_factory=list)
    exclude: Patterns = dataclasses.field(default_factory=list)
    masked: bool = False
    buffers: Rules = dataclasses.field(default_factory=dict)
    buffer_layout: U64 = 0
    section_codec: Name = "fp32"
    section_options: JsonText = "{}"
    downlink_codec: Name = "fp32"
    client_id: Annotated[int, Field(ge=-1, le=0x7FFF_FFFE)] = -1
    name: ClientName = ""
    named_commands: bool = False


@dataclass(frozen=True, slots=True, config=STRICT)
class RoundTerms:
    """Controller to all: what a TrainCmd has no field for. Sent before the command, and repeated with the heartbeat
    while the round is open.

    Attributes:
        round_id: of the command.
        options: of the training rule in this round, beside those of the Welcome and instead of those of the same name.
        participants: ids of the clients that are asked, as ranges; the others sit this round out. Empty: all are asked.
            A participant that newer terms of the same round do not name stops: its update is no longer needed.
        held: no update is added before those of all participants are announced.
        attempt: number of the attempt, for which the participants advertise keys; 0: without secure aggregation.
        each: what single clients are ordered to do differently, as :mod:`.client_orders` writes it. A client that knows
            a command only by newer terms of the same round has the same orders from these.
    """

    run_id: U64
    round_id: Round
    options: Options
    participants: IdRanges = ""
    held: bool = False
    attempt: U32 = 0
    each: ClientOrders = ""


@dataclass(frozen=True, slots=True, config=STRICT)
class RepeatedCommand:
    """Controller to all: the TrainCmd of the open round once more, for clients whose Hello shows that they lack it.
    Sent with the heartbeat, and with the TrainCmd where the Welcome says named_commands. Unlike a TrainCmd it names its
    controller, its run and its attempt, so a client that has answered knows whether it is asked again.

    Attributes:
        round_id, subset_size, epochs, lr, seed: as of the TrainCmd.
        attempt: at the round, from 1.
    """

    run_id: U64
    round_id: OpenRound
    subset_size: Natural32
    epochs: Natural32
    lr: Finite
    seed: I32
    attempt: Attempt


@dataclass(frozen=True, slots=True, config=STRICT)
class Refused:
    """Controller to one client: it cannot take part. ``why`` has kept its name, as clients of every version read it."""

    to: U32
    incarnation: U64
    why: Text


@dataclass(frozen=True, slots=True, config=STRICT)
class Status:
    """Controller to all: its heartbeat.

    Attributes:
        run_id: the run.
        round_id: the round that is open, or the last one committed.
        phase: waiting, training, aggregating or done.
        ready: updates that are in; ``expected``: of so many.
        host: host name and process id, for people.
        minimum: updates that suffice at the deadline. rounds: of the run. clients: that are registered.
        round_s: since the command of the open round; 0: none is open. remaining_s: until its deadline.
        awaited: ids of clients whose update is missing, the first ones; silent_s: since each one's last message.
        quarantined: ids of clients in quarantine, the first ones.
        dropped: messages and updates that did not count in this run, by reason; the most frequent ones.
        last_s, bytes_up, bytes_down: of the last round. accuracy: of the last evaluation, -1 if there was none.
        metrics: more numbers of that evaluation, by name.
        epsilon: of differential privacy that the committed rounds have spent; -1: the run gives none.
        epsilon_budget: that it may spend; -1: there is no limit.
    """

    run_id: U64
    round_id: Round
    phase: Label
    ready: U32
    expected: U32
    host: Label = ""
    minimum: U32 = 0
    rounds: U32 = 0
    clients: U32 = 0
    round_s: Seconds = 0.0
    remaining_s: Seconds = 0.0
    awaited: Ids = dataclasses.field(default_factory=list)
    silent_s: Waits = dataclasses.field(default_factory=list)
    quarantined: Ids = dataclasses.field(default_factory=list)
    dropped: Counts = dataclasses.field(default_factory=dict)
    last_s: Seconds = 0.0
    bytes_up: U64 = 0
    bytes_down: U64 = 0
    accuracy: float = -1.0
    metrics: Metrics = dataclasses.field(default_factory=dict)
    epsilon: float = -1.0
    epsilon_budget: float = -1.0


@dataclass(frozen=True, slots=True, config=STRICT)
class UploadRequest:
    """Client to controller: an update is ready to be sent. Repeated until there is an answer.

    Attributes:
        run_id: the run it was trained for.
        round_id: the round.
        transfer: number of the transfer its frames will carry.
        total_bytes: size of the encoded update.
        num_samples: samples it was trained on.
        loss: mean training loss.
        train_s: seconds of local training; ``encode_s``: of encoding.
        memory: where on the client's machine the update lies; empty: it has to be sent.
        wait_s: from the arrival of the command to the start of training.
        update_norm: L2 norm of the difference that training made; ``residual_norm``: of the codec's residual after this
            update; -1: not reported.
        steps: of the optimizer; 0: not known. metrics: more numbers of its training, by name.
        attempt: with whose masks it is masked; 0: it is not.
    """

    run_id: U64
    round_id: Round
    transfer: U32
    total_bytes: U64
    num_samples: Annotated[int, Field(ge=0, le=1 << 40)]
    loss: float
    train_s: Seconds
    encode_s: Seconds
    memory: Name = ""
    wait_s: Seconds = 0.0
    update_norm: float = -1.0
    residual_norm: float = -1.0
    steps: U64 = 0
    metrics: Metrics = dataclasses.field(default_factory=dict)
    attempt: U32 = 0


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class PacketRequest(UploadRequest):
    """Client to controller: a packet of an update is ready to be sent. The update counts when all of its packets are
    in, and none of them before. ``num_samples``, ``loss`` and the other figures of the training hold in the last one.

    Attributes:
        update: the transfer of its first packet, by which all of them belong together.
        packet: its number among them, from 1. last: there is none after it.
    """

    update: U32
    packet: Packet
    last: bool


@dataclass(frozen=True, slots=True, config=STRICT)
class Grant:
    """Controller to one client: permission to send that update now."""

    to: U32
    incarnation: U64
    round_id: Round
    transfer: U32


@dataclass(frozen=True, slots=True, config=STRICT)
class Receipt:
    """Controller to one client: whether that update counts. Without a receipt, it does not. Of a packet that is not the
    last one: whether it is here; not ``accepted``, the whole update is refused."""

    to: U32
    incarnation: U64
    run_id: U64
    round_id: Round
    transfer: U32
    accepted: bool
    reason: Text


@dataclass(frozen=True, slots=True, config=STRICT)
class RetransmitRequest:
    """Controller to one client: frames of a granted update that have not arrived."""

    to: U32
    incarnation: U64
    round_id: Round
    transfer: U32
    seqs: Seqs


@dataclass(frozen=True, slots=True, config=STRICT)
class PacketsMissing:
    """Controller to one client: the last packet of an update is here, these are not, or not any more.

    Attributes:
        transfer: of the last packet. packets: numbers of those that are missing, ascending.
    """

    to: U32
    incarnation: U64
    round_id: Round
    transfer: U32
    packets: Packets


@dataclass(frozen=True, slots=True, config=STRICT)
class MaskRoster:
    """Controller to all: who masks for whom in an attempt at a round.

    Attributes:
        threshold: clients that it takes to unmask. cap: samples that more count as, 0: there is none.
        members: of each client its id, two public keys and a commitment, 100 bytes, by ascending id.
        sent: values of an update, at positions that the round chooses, 0: all.
        block_elems: values of the model that share a step. steps: int8, the exponent of how far each block reaches, of
            which its step is a part; none: all steps are 2^-30.
    """

    run_id: U64
    round_id: Round
    attempt: Attempt
    threshold: Annotated[int, Field(ge=2, le=255)]
    cap: U64
    members: Binary
    sent: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    block_elems: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    steps: Annotated[bytes, Field(max_length=MAX_BINARY // 2)] = b""


@dataclass(frozen=True, slots=True, config=STRICT)
class MaskShares:
    """Controller to one client: the shares that the others have sealed for it.

    Attributes:
        senders: ids of the clients that have shared, itself included, ascending.
        sealed: what each of the others has sealed for it, 82 bytes, in this order.
    """

    to: U32
    incarnation: U64
    run_id: U64
    round_id: Round
    attempt: Attempt
    senders: Ids
    sealed: Binary


@dataclass(frozen=True, slots=True, config=STRICT)
class MaskSurvivors:
    """Controller to all: the clients whose masked updates are in the sum, ascending."""

    run_id: U64
    round_id: Round
    attempt: Attempt
    clients: Ids


@dataclass(frozen=True, slots=True, config=STRICT)
class MaskAnswer:
    """Client to controller: its part in a phase of an attempt.

    Attributes:
        phase: 0: keys, after RoundTerms. 1: shares for the other members of the MaskRoster. 2: the MaskShares have
            come. 3: shares that unmask, after MaskSurvivors.
    """

    run_id: U64
    round_id: Round
    attempt: Attempt
    phase: Annotated[int, Field(ge=0, le=3)]
    data: Binary


@dataclass(frozen=True, slots=True, config=STRICT)
class ModelAvailable:
    """Controller to all: the model of that round can be read in the controller's shared memory.

    Attributes:
        transfer: number that its frames carry where they are sent as well.
        delta: it is the difference to the model of the round before.
        total_bytes: size of the payload.
        memory: where on its machine it lies.
        signature: the name of its frames.
    """

    run_id: U64
    round_id: Round
    transfer: U32
    delta: bool
    total_bytes: U64
    memory: Name
    signature: Name = ""


@dataclass(frozen=True, slots=True, config=STRICT)
class ModelRequest:
    """Client to controller: the model of that round is missing, or these frames of one transfer of it.

    Attributes:
        transfer: the transfer of which frames are missing; without ``seqs``, the full model is requested.
    """

    run_id: U64
    round_id: Round
    transfer: U32
    seqs: Seqs


@dataclass(frozen=True, slots=True, config=STRICT)
class TrainingFailure:
    """Client to controller: training failed; ``text`` is the traceback.

    Attributes:
        run_id: NOT_WELCOMED: the client could not even build its model, and knows of no run.
        round_id: of the command; BEFORE_FIRST_ROUND: the client could not load its data, and takes part in no round.
        reason: ``training failed``: the training function raised; ``non-finite loss`` or ``non-finite model``: it
            returned a loss, or a model, of NaN or infinity; ``nothing to train`` or ``paused``: the client sits the
            round out. Any other text counts as the first.
        name: of a client that has no id yet; else empty.
        attempt: of a client that has paused, the attempt at the round that it sits out, as far as it can count; 0: it
            does not say.
    """

    run_id: U64
    round_id: Round
    text: Lines
    reason: Name = "training failed"
    name: ClientName = ""
    attempt: U32 = 0


@dataclass(frozen=True, slots=True, config=STRICT)
class EvaluationRequest:
    """Controller to all: the clients that are named evaluate a model on their own data. Repeated with the heartbeat,
    for those whose result is missing.

    Attributes:
        round_id: of the model; one of CANDIDATE_ROUNDS: a model that is not of a round, to be requested.
        participants: ids of the clients that are asked, as ranges; empty: nobody.
        remaining_s: until results are of no more use.
    """

    run_id: U64
    round_id: Round
    participants: IdRanges
    remaining_s: Seconds


@dataclass(frozen=True, slots=True, config=STRICT)
class EvaluationResult:
    """Client to controller: what it has found. Sent once for each request that names it.

    Attributes:
        round_id: of the model.
        num_samples: that it was evaluated on; 0: it was not.
        metrics: numbers by name, ``loss`` and ``accuracy`` among them where there are such.
        failure: why there are none; empty: there are.
        seconds: that it took.
    """

    run_id: U64
    round_id: Round
    num_samples: Annotated[int, Field(ge=0, le=1 << 40)]
    metrics: Metrics
    failure: Label
    seconds: Seconds


@dataclass(frozen=True, slots=True, config=STRICT)
class LocalModelRequest:
    """Controller to one client: upload the model that your last training has made, for others to evaluate. The answer
    is an UploadRequest, or an EvaluationResult with the reason why not.

    Attributes:
        round_id: one of CANDIDATE_ROUNDS: that of the upload.
    """

    to: U32
    incarnation: U64
    run_id: U64
    round_id: Round


FAILED = "failed: "
"""The reason of a client that leaves because of an error begins with it."""


@dataclass(frozen=True, slots=True, config=STRICT)
class Leave:
    """Client to controller: it leaves gracefully."""

    reason: Text


@dataclass(frozen=True, slots=True, config=STRICT)
class RunEnded:
    """Controller to all: this run has ended.

    Attributes:
        ok: all its rounds were done.
        final: clients end. Else, after an end that is not ``ok``, they wait for the controller to come back.
    """

    run_id: U64
    ok: bool
    reason: Text
    final: bool = False


@dataclass(frozen=True, slots=True, config=STRICT)
class Closing:
    """Anyone to all: the sender's bus is being closed. Sent for each sender of the bus.

    Attributes:
        reason: for people.
    """

    reason: Text


@dataclass(frozen=True, slots=True, config=STRICT)
class GroupHello:
    """Rank to all: it wants to form this group. Sent until the group has formed, and to ranks that still send it.

    Attributes:
        group: its name. world: number of its ranks.
        members: hash over the incarnations of all ranks, 0 while some are unknown.
        linked: frames of all other ranks of ``members`` have come, over every topic.
        formed: all ranks have sent ``linked`` for the same ``members``.
        options: hash over the settings that must be equal on all ranks.
        host: host name and process id, for people.
        memory: where on its machine its shared memory is; empty: it has none.
        attached: ranks of ``members`` whose shared memory it has mapped.
    """

    group: Name
    world: World
    members: U64
    linked: bool
    formed: bool
    options: U64
    host: Label
    memory: Name
    attached: Ranks


@dataclass(frozen=True, slots=True, config=STRICT)
class GroupLeave:
    """Rank to all: it leaves this group; all that it has sent has arrived.

    Attributes:
        members: which forming of the group.
        ok: gracefully; if not, the others need not wait for its frames.
        lost: ranks that it knows to be gone, which may be why.
        lost_reasons: what it knows of the first of them, one text each.
    """

    group: Name
    members: U64
    ok: bool
    reason: Text
    lost: Ranks
    lost_reasons: Reasons = dataclasses.field(default_factory=list)


RANK_STATUS_EVERY_S = 1.0
RANK_STATUSES_PER_S = 64  # of all ranks together: every rank receives all of them


def rank_status_period_s(world: int) -> float:
    """Seconds between two status messages of each rank of a group of this size."""
    return max(RANK_STATUS_EVERY_S, world / RANK_STATUSES_PER_S)


@dataclass(frozen=True, slots=True, config=STRICT)
class RankStatus:
    """Rank to all, once a second: its position in training, for observers. The other ranks do not use it.

    Attributes:
        group: its name. world: number of its ranks. host: host name and process id, for people.
        up_s: since the group has formed.
        step, epoch: that the worker is in, -1 where there is none. steps_per_s: since the last RankStatus.
        bytes_out, bytes_in: payload of the group's collectives.
        pending: collectives that have not ended. oldest: the name of the one that waits longest, oldest_s: for so long,
            missing: ranks that it waits for and that have not made the call, as far as this rank knows.
        lost: ranks that it knows to be gone.
        dropped: frames that were not used, by reason.
        mean_ranks: of an elastic run: how many ranks a step of the epoch had, in the mean. 0: it is none, or there was
            no step.
    """

    group: Name
    world: World
    host: Label
    up_s: Seconds
    step: Round = -1
    epoch: Round = -1
    steps_per_s: float = 0.0
    bytes_out: U64 = 0
    bytes_in: U64 = 0
    pending: U32 = 0
    oldest: Label = ""
    oldest_s: Seconds = 0.0
    missing: Ranks = dataclasses.field(default_factory=list)
    lost: Ranks = dataclasses.field(default_factory=list)
    dropped: Counts = dataclasses.field(default_factory=dict)
    mean_ranks: Finite = 0.0


@dataclass(frozen=True, slots=True, config=STRICT)
class GroupView:
    """Process to all: what it knows of the generations of an elastic group, and how it votes on the next one.

    Lists of members are two of equal length, in the order of their ranks: number and incarnation of each.

    Attributes:
        group: its name. version: counts the views of this process, so that an older one is known.
        generation: the newest one that it knows, 0: none. numbers, incarnations: its members.
        promised: the highest ballot that it has seen for the next generation; it accepts none below.
        accepted: the ballot whose proposal it has accepted last, 0: none. next_numbers, next_incarnations: that one.
        founders: of how many processes the first generation is to consist, the sender being one of them; 0: it joins.
        resting: it stands between two steps, and waits for the next generation.
        joining, leaving: it wants to be a member, or no longer. ended: the run has come to its end.
        traits: hashes that must be equal on all members, by what they are of.
        host: host name and process id, for people.
    """

    group: Name
    version: U32
    generation: U32
    numbers: Ranks
    incarnations: Incarnations
    promised: U64
    accepted: U64
    next_numbers: Ranks
    next_incarnations: Incarnations
    founders: U32
    resting: bool
    joining: bool
    leaving: bool
    ended: bool
    traits: Counts = dataclasses.field(default_factory=dict)
    host: Label = ""

    def __post_init__(self) -> None:
        """Raises ValueError: a list of members is none."""
        for what, numbers, incarnations in (
            ("members", self.numbers, self.incarnations),
            ("next members", self.next_numbers, self.next_incarnations),
        ):
            if len(set(zip(numbers, incarnations, strict=False))) != max(len(numbers), len(incarnations)):
                raise ValueError(f"{what}: expected as many numbers as incarnations, and no process twice")
        if bool(self.numbers) != bool(self.generation) or (self.accepted and not self.next_numbers):
            raise ValueError("a generation, or an accepted one, without members")


Body = (
    Hello
    | Welcome
    | RoundTerms
    | RepeatedCommand
    | Refused
    | Status
    | UploadRequest
    | PacketRequest
    | Grant
    | Receipt
    | RetransmitRequest
    | PacketsMissing
    | MaskRoster
    | MaskShares
    | MaskSurvivors
    | MaskAnswer
    | ModelAvailable
    | ModelRequest
    | TrainingFailure
    | EvaluationRequest
    | EvaluationResult
    | LocalModelRequest
    | Leave
    | RunEnded
    | Closing
    | GroupHello
    | GroupLeave
    | RankStatus
    | GroupView
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Body)}


def encode(body: Body) -> bytes:
    """Bytes of a control message.

    Raises:
        ValueError: longer than a receiver accepts.
    """
    return pack_body(body, MAX_BODY_BYTES)


def kind_name(kind: type[Any]) -> str:
    """Name of a kind of message in settings, as in ``upload_request``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def addressee(packed: bytes | memoryview) -> tuple[int | None, int]:
    """The client id that a body of :func:`encode` is addressed to, None: all, and its incarnation. Only for bodies made
    in this process, as nothing is checked; :func:`decode` checks, and takes longer."""
    _, fields = unpack(packed, _LIMITS)
    to: int | None = fields.get("to")
    incarnation: int = fields.get("incarnation", 0)
    return to, incarnation


def decode(data: bytes | memoryview) -> Body:
    """The control message in ``data``.

    Raises:
        FrameError: ``control``: too long, not msgpack, of an unknown kind, or against the schema.
    """
    body: Body = read_body(data, _LIMITS, _KINDS, "control")
    return body
