"""The sum of the updates of a round: each is read, checked and added.

The update receiver has this done on the compute thread. The journal notes an update before its receipt goes out: what a
client takes for counted is in the history.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradbus.actors.aggregation.bounded_strategy import BoundedStrategy
from gradbus.actors.aggregation.bounds import Bounds, Norms
from gradbus.actors.aggregation.merged_buffers import BufferLayout, BufferMerge
from gradbus.actors.aggregation.packet_sum import sum_packets
from gradbus.actors.aggregation.partial_sum import CountedTwice, PartialSum
from gradbus.actors.aggregation.partial_sum import parse as parse_sum
from gradbus.actors.aggregation.strategies import NoRoom, Strategy
from gradbus.actors.aggregation.sum_summary import SumSummary
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.aggregation.updates import parse as parse_update
from gradbus.actors.federated.controller.asynchronous import BaseGone, Bases
from gradbus.actors.federated.controller.masked_attempt import MaskedAttempt
from gradbus.actors.federated.controller.rounds import STALE
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.update_admission import UpdateRefusal
from gradbus.actors.federated.controller.uploads import IncomingUpload, RequestedUpload
from gradbus.codecs import Codec, CodecError, NonFiniteError
from gradbus.runtime.shm.segment import read
from gradbus.runtime.testing.journal import update_name
from gradbus.runtime.wire.control import UploadRequest
from gradbus.runtime.wire.frames import FrameKey

_NO_STRIKE: dict[type[Exception], str] = {CountedTwice: "counted twice", BaseGone: STALE, NoRoom: "no room"}


def unusable(error: ValueError | ArithmeticError) -> UpdateRefusal:
    """The refusal of an update that could not be added."""
    if (reason := _NO_STRIKE.get(type(error))) is not None:
        return UpdateRefusal(reason, str(error))
    malformed = "malformed" if isinstance(error, CodecError) else "refused"
    return UpdateRefusal("non-finite" if isinstance(error, NonFiniteError) else malformed, str(error), True)


def facts_of(client_id: int, request: UploadRequest, weight: int) -> Facts:
    """Return what a client has announced, where its update counts with this weight."""
    return Facts(
        client_id=client_id,
        num_samples=weight,
        round_id=request.round_id,
        steps=request.steps,
        loss=request.loss if math.isfinite(request.loss) else None,
        metrics=request.metrics,
    )


@dataclass(slots=True, eq=False)
class IncomingUpdate(IncomingUpload):
    """An update on its way.

    Attributes:
        adding: it is being read, decoded and added. crc32: of its payload, where the journal needs it later.
        is_measured: its norms are known.
        buffers: that it came with. packets: payloads of all its packets, where it came in such, until they are added.
        last_packet: the last of these; None: it came in one piece.
    """

    adding: bool = False
    is_measured: bool = False
    crc32: int = 0
    buffers: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    packets: Sequence[memoryview] = ()
    last_packet: RequestedUpload | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here, and will count or be refused in a moment."""
        return self.adding or self.payload is not None or bool(self.packets)

    def hold_packets(self, packets: Sequence[memoryview], last: RequestedUpload | None) -> None:
        """Keep the payloads of all its packets. ``last``: the last one."""
        self.packets, self.last_packet = packets, last

    def begin_reading(self) -> None:
        """Note that it is being read."""
        self.adding = True

    def end_reading(self) -> None:
        """Note that it is not being read any more, and not added yet."""
        self.adding = False

    def note_measured(self) -> None:
        """Note that its norms are known."""
        self.is_measured = True


class MaskedUpdate(NamedTuple):
    """An update that is in the sum of an attempt with secure aggregation. ``weight``: in front of the strategy.
    ``buffers``: it came with these."""

    update: RequestedUpload
    weight: int
    crc32: int
    buffers: Mapping[str, Tensor]

    @property
    def client_id(self) -> int:
        return self.update.client_id

    @property
    def request(self) -> UploadRequest:
        return self.update.request


class UpdateForm(NamedTuple):
    """Tells what updates hold, and what is needed to read them.

    Attributes:
        dim: values of the model. buffers: that end each update, and are merged; None: none do.
        own_codecs: that are not built in, which updates may be in.
        bases: of asynchronous rounds, in which what comes between two of them waits for the next; None: of others.
    """

    dim: int
    buffers: BufferLayout | None = None
    own_codecs: Sequence[type[Codec]] = ()
    bases: Bases | None = None


class UpdateSum:
    """Adds updates, one after the other. All methods but the properties are called on the compute thread.

    Attributes:
        form: of the updates. buffers: merges those of the updates that count; None: they have none.
    """

    def __init__(self, context: RunContext, strategy: Strategy, form: UpdateForm) -> None:
        """``strategy``: keeps the sum, of the vectors."""
        self._context = context
        self._strategy = strategy
        self._bounded = strategy if isinstance(strategy, BoundedStrategy) else None
        self.form = form
        self.buffers = BufferMerge(form.buffers) if form.buffers else None

    @property
    def bounds(self) -> Bounds | None:
        """What updates are bounded by, where clients may lie; None: nothing is."""
        return self._strategy.bounds

    def begin(self, round_id: int, base: Tensor) -> None:
        """Begin the sum of a round. ``base``: float32, shape (D,): the model that the clients hold."""
        self._strategy.begin(round_id, base)
        if self._strategy.bounds is not None and self._strategy.bounds.is_settled:
            self.note_bounds(round_id)
        if self.buffers is not None:
            self.buffers.begin(self._context.state.buffers)
        if self.form.bases is not None:
            self.form.bases.keep(round_id, base)

    def note_bounds(self, round_id: int) -> None:
        """Note in the journal what is typical of a round."""
        assert self._strategy.bounds is not None, "updates are held where there are bounds"
        self._context.history.note("bounds", round=round_id, **self._strategy.bounds.in_force())

    def norms_of(self, transfer: IncomingUpdate, staleness: int) -> Norms:
        """Return the norms of an update, which stays where it is. Raises SharedMemoryFault; ValueError: it cannot be
        used."""
        assert self._bounded is not None, "updates are measured where there are bounds"
        content, _ = self._split(self._payload(transfer))
        return self._bounded.norms(self._parsed(content, transfer.key.round_id, staleness))

    def add(
        self, transfer: IncomingUpdate, weight: int, staleness: int, sums: Mapping[int, SumSummary]
    ) -> SumSummary | None:
        """Read, decode and add an update.

        Args:
            weight: the samples that it counts as. staleness: of its base.
            sums: what sites have reported that count in the round already, by site.

        Returns:
            What a site has reported of its clients; None: it is the update of a client.

        Raises:
            SharedMemoryFault: it cannot be read from here. ValueError, ArithmeticError: it cannot be used.
        """
        key, request, history, summary = transfer.key, transfer.source.request, self._context.history, None
        payload = self._payload(transfer)
        content, buffers = self._split(payload)
        if self._context.config.clients.kind == "sites":
            summary = self._add_partial(key.sender, content, weight, sums)
        else:
            self._check_metrics(request)
            facts = dataclasses.replace(facts_of(key.sender, request, request.num_samples), staleness=staleness)
            self._strategy.add(self._parsed(content, key.round_id, staleness), facts)
        if self.buffers is not None:
            self.buffers.add(buffers, staleness=staleness)
        if history.on:
            history.keep(update_name(key.round_id, key.sender, key.incarnation, key.transfer), payload)
            self._note_counted(key, request, weight, history.checksum(payload))
        return summary

    def add_to_attempt(self, transfer: IncomingUpdate, attempt: MaskedAttempt) -> None:
        """Read a masked update, and add it to the sum of an attempt. Raises as :meth:`add`."""
        payload = self._payload(transfer)
        content, transfer.buffers = self._split(payload)
        attempt.add(transfer.key.sender, content, transfer.source.request.num_samples)
        transfer.crc32 = self._context.history.checksum(payload)

    def add_masked(self, partial: PartialSum, updates: Sequence[MaskedUpdate]) -> None:
        """Add the sum of an attempt, of these updates. Raises ValueError: it cannot be used."""
        self._strategy.add_masked(partial, [facts_of(one.client_id, one.request, one.weight) for one in updates])
        for one in updates:
            if self.buffers is not None:
                self.buffers.add(one.buffers)
            self._note_counted(one.update.key, one.request, one.weight, one.crc32)

    def _payload(self, transfer: IncomingUpdate) -> memoryview:
        """The bytes of a complete update."""
        if transfer.packets:
            transfer.hold(sum_packets(transfer.packets, dim=self.form.dim, own=self.form.own_codecs))
            transfer.packets = ()
        if transfer.payload is None:
            transfer.hold(read(transfer.request.memory, transfer.request.total_bytes))
        assert transfer.payload is not None
        return transfer.payload

    def _parsed(self, content: memoryview, round_id: int, staleness: int) -> Update:
        """The checked content of an update for a round, as it counts with a base so old."""
        others, bases = self._strategy.sections, self.form.bases
        update = parse_update(content, expected_dim=self.form.dim, others=others, own=self.form.own_codecs)
        return update if bases is None else update.with_model(bases.brought(update.model, round_id, staleness))

    def _split(self, payload: memoryview) -> tuple[memoryview, Mapping[str, Tensor]]:
        """Return the vectors of an update, and its merged buffers. Raises CodecError: these are malformed."""
        return (payload, {}) if self.buffers is None else self.buffers.layout.split(payload)

    def _check_metrics(self, request: UploadRequest) -> None:
        """Raises ValueError: the update does not announce a metric that the strategy reads."""
        if missing := [name for name in self._strategy.metrics if name not in request.metrics]:
            raise ValueError(
                f"it does not announce {', '.join(missing)}, by which {self._strategy.name} weighs updates: choose "
                f"the training rule that does"
            )

    def _note_counted(self, key: FrameKey, request: UploadRequest, weight: int, crc32: int) -> None:
        marks = [] if self._bounded is None else self._bounded.marks_of(key.sender)
        self._context.history.note(
            "counted",
            round=key.round_id,
            **self._context.client_facts(key.sender),
            incarnation=key.incarnation,
            transfer=key.transfer,
            num_samples=request.num_samples,
            bytes=request.total_bytes,
            crc32=crc32,
            weight=weight,
            steps=request.steps,
            loss=request.loss if math.isfinite(request.loss) else None,
            metrics=request.metrics,
            **({"bounded": marks} if marks else {}),
        )

    def _add_partial(
        self, site_id: int, payload: memoryview, announced: int, sums: Mapping[int, SumSummary]
    ) -> SumSummary:
        """Add the exact sum of a site."""
        partial = parse_sum(payload, expected_dim=self.form.dim, max_samples=self._context.config.limits.max_samples)
        summary = partial.summary
        if summary.num_samples != announced:
            raise CodecError(f"partial sum of {summary.num_samples:,} samples, {announced:,} were announced")
        for other_id, other in sums.items():
            if other_id != site_id and (client_id := summary.shared_client(other)) is not None:
                raise CountedTwice(
                    f"client {client_id} counts already, in the sum of site {other_id}: a client belongs to one site, "
                    f"and its id to one client of the whole tree"
                )
        self._strategy.add_sum(partial)
        return summary
