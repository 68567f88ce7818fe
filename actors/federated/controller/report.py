"""The report of a round, with a timeline for each client, and the progress of a run.

Clocks of different machines are not compared. The controller notes moments by its own clock; a client reports in its
request how long it waited, trained and encoded. These durations end where the request came in; what is left between
the command and them is the way of the two messages, and called ``send``. Durations that do not fit are scaled down:
they are only drawn.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from gradbus.actors.federated.client_names import ClientNames
from gradbus.actors.federated.controller.evaluation import ClientEvaluation, CrossSite
from gradbus.actors.federated.controller.rounds import Round, RoundTotals
from gradbus.actors.federated.controller.update_admission import Strike
from gradbus.runtime.wire.control import UploadRequest

MAX_CLIENTS = 64  # of a round, whose timelines are kept: 16 kB in a file of reports
MAX_CLIENT_METRICS = 8  # of each of them: with the longest names 45 kB more
ROUND_S = 6  # digits: microseconds
Moment = Literal["granted", "received", "adding"]


class Piece(NamedTuple):
    """One part of a timeline.

    Attributes:
        phase: send, wait, train, encode, queue, upload or decode.
        start_s, end_s: since the round's first command.
    """

    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeline:
    """Tells how the update of one client came to count in a round.

    Moments are seconds since the round's first command, by the controller's clock.

    Attributes:
        commanded_s: the command that it answers; later than 0 when the round was tried again.
        offered_s, granted_s, received_s, adding_s, counted_s: of the request, the grant (None: none was needed), the
            last byte, the beginning and the end of adding.
        wait_s, train_s, encode_s: durations by the client's clock, in this order; the first from the command on.
        update_norm, residual_norm: L2 norms of the difference that training made, and of the codec's residual after
            this update; None where the client reported none.
        loss, metrics: of the client's training, the first metrics alone; None where there is no loss.
    """

    client_id: int
    num_bytes: int = 0
    commanded_s: float = 0.0
    offered_s: float = 0.0
    granted_s: float | None = None
    received_s: float = 0.0
    adding_s: float = 0.0
    counted_s: float = 0.0
    wait_s: float = 0.0
    train_s: float = 0.0
    encode_s: float = 0.0
    update_norm: float | None = None
    residual_norm: float | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def pieces(self) -> list[Piece]:
        """From the command to the sum without a gap, in order; those of no length are left out."""
        span_s = max(0.0, self.offered_s - self.commanded_s)
        own_s = [max(0.0, self.wait_s), max(0.0, self.train_s), max(0.0, self.encode_s)]
        scale = min(1.0, span_s / sum(own_s)) if sum(own_s) > 0 else 0.0
        wait_s, train_s, encode_s = (scale * duration_s for duration_s in own_s)
        granted_s = self.received_s if self.granted_s is None else self.granted_s
        ends = {
            "send": self.offered_s - encode_s - train_s - wait_s,
            "wait": self.offered_s - encode_s - train_s,
            "train": self.offered_s - encode_s,
            "encode": self.offered_s,
            "queue": granted_s,
            "upload": self.received_s,
            "queue to be added": self.adding_s,
            "decode": self.counted_s,
        }
        found, at_s = [], self.commanded_s
        for phase, end_s in ends.items():
            if end_s > at_s:
                found.append(Piece(phase.split()[0], at_s, end_s))
                at_s = end_s
        return found

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, times to the microsecond."""
        short = {k: round(v, ROUND_S) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {**short, "loss": self.loss}


class _Moments(NamedTuple):
    transfer: tuple[int, int]  # incarnation, number
    offered_s: float
    others: dict[str, float]  # granted, received, adding


class RoundTiming:
    """Notes the moments of one round after another, on the controller's clock. It keeps the :data:`MAX_CLIENTS`
    timelines that ended last, as the round has waited for these."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._origin_s: float | None = None  # the first command
        self._commands: deque[float] = deque(maxlen=16)  # one for each attempt, the newest
        self._moments: dict[int, _Moments] = {}
        self._done: deque[ClientTimeline] = deque(maxlen=MAX_CLIENTS)

    def begin(self) -> None:
        """A new round."""
        self._origin_s = None
        self._commands.clear()
        self._moments.clear()
        self._done.clear()

    def commanded(self) -> None:
        """A command is about to be sent."""
        self._commands.append(self._clock())
        if self._origin_s is None:
            self._origin_s = self._commands[0]

    def offered(self, client_id: int, incarnation: int, request: UploadRequest) -> None:
        """A request came in. One that is repeated counts from the first time on."""
        known = self._moments.get(client_id)
        if known is None or known.transfer != (incarnation, request.transfer):
            self._moments[client_id] = _Moments((incarnation, request.transfer), self._clock(), {})

    def note(self, client_id: int, moment: Moment) -> None:
        """The update was granted, is here, or is being added. Of repeated grants the first one counts."""
        moments = self._moments.get(client_id)
        if moments is not None and (moment != "granted" or moment not in moments.others):
            moments.others[moment] = self._clock()

    def counted(self, client_id: int, request: UploadRequest) -> None:
        """It is in the sum."""
        moments = self._moments.pop(client_id, None)
        if moments is None or self._origin_s is None:
            return
        origin_s, now_s, others = self._origin_s, self._clock(), moments.others
        adding_s = others.get("adding", now_s)
        granted_s = others.get("granted")
        # A repeated command changes nothing for a client at work: it answers the newest that leaves room for its work.
        began_s = moments.offered_s - request.wait_s - request.train_s - request.encode_s
        commanded_s = next((at_s for at_s in reversed(self._commands) if at_s <= began_s), origin_s)
        timeline = ClientTimeline(
            client_id=client_id,
            num_bytes=request.total_bytes,
            commanded_s=commanded_s - origin_s,
            offered_s=moments.offered_s - origin_s,
            granted_s=None if granted_s is None else granted_s - origin_s,
            received_s=others.get("received", adding_s) - origin_s,
            adding_s=adding_s - origin_s,
            counted_s=now_s - origin_s,
            wait_s=request.wait_s,
            train_s=request.train_s,
            encode_s=request.encode_s,
            update_norm=_norm(request.update_norm),
            residual_norm=_norm(request.residual_norm),
            loss=request.loss if math.isfinite(request.loss) else None,
            metrics=dict(list(request.metrics.items())[:MAX_CLIENT_METRICS]),
        )
        self._done.append(timeline)

    def timelines(self) -> tuple[ClientTimeline, ...]:
        """Return those of the clients that count so far, by client id."""
        return tuple(sorted(self._done, key=lambda timeline: timeline.client_id))

    @property
    def first_command_s(self) -> float:
        """When the round's first command was given, by this object's clock; now, if there was none yet."""
        return self._clock() if self._origin_s is None else self._origin_s


def _norm(value: float) -> float | None:
    """The norm that a client reported; None: it is none, such as -1."""
    return value if math.isfinite(value) and value >= 0 else None


TIMELINES_IN_MEMORY = 16  # newest rounds whose timelines stay in a list of reports; run directories keep all
NAMED_IN_CHECKPOINT = 16  # newest rounds of which a checkpoint names clients; it is written in every round
KEPT_IN_CHECKPOINT = 10_000  # newest rounds of which it has a report


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One committed round.

    Attributes:
        attempt: how often it was tried. outcome: why it ended.
        clients: ids whose updates count; updates: how many. expected: how many took part.
        num_samples: samples trained on, all clients together.
        train_metrics: what clients announced of their training by name, the mean over samples; of sites there is none.
        loss: mean training loss, weighted by samples; None without one.
        accuracy, eval_loss: of the global model on the test set; None if not evaluated, or the task has none. metrics:
            more numbers of that evaluation, by name.
        by_clients: evaluation of the global model by clients on their own data.
        bytes_up: payload of the encoded updates that count. bytes_down: of the encoded model after this round, times
            the clients it went to. Headers, repairs, the first model of a client and models for evaluation are in
            neither.
        bytes_up_shared, bytes_down_shared: of these, what was read in shared memory and not sent over DDS.
        train_s, encode_s: of the slowest client.
        wire_s: what is left of the time from the command to the last update: transfers and waiting.
        aggregate_s: adding up and the server's step. step_s: of these, from the last update to the new model.
        checkpoint_s: until it is on the disk. publish_s: sending the model. eval_s: evaluation.
        seconds: from the start of the round to the published model. command_s: of these, until the command.
        weights_crc32: CRC-32 over the float32 weights, little-endian: equal numbers, equal models.
        dropped: updates and frames that were not counted, by reason, in this round; with the clients that were lost.
        downlink_residual_norm: L2 norm of the residual of the model's message; 0 with a lossless codec.
        strikes: bad updates in this round; the first, if there are many.
        staleness: models by which the bases of the updates were behind, their mean; max_staleness: the largest. 0 where
            rounds are synchronous.
        epsilon: what the run has spent of differential privacy, this round included; None: it has none.
        order: how the round was ordered by the caller or by the strategy, where that differed from the configuration.
        marks: clients whose updates the strategy changed, by what it did: ``clipped`` and so on.
        timeline: where the time went, by client; of the last ones, where there are very many. Empty for rounds before a
            resume, and in :attr:`Progress.reports` for all but the newest rounds.

    Of rounds before a resume there may be the figures alone: see :meth:`figures`. Run directories have all.
    """

    round_id: int
    attempt: int = 1
    clients: tuple[int, ...] = ()
    expected: int = 0
    outcome: str = ""
    num_samples: int = 0
    loss: float | None = None
    accuracy: float | None = None
    eval_loss: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_up_shared: int = 0
    bytes_down_shared: int = 0
    train_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    aggregate_s: float = 0.0
    checkpoint_s: float = 0.0
    publish_s: float = 0.0
    eval_s: float = 0.0
    seconds: float = 0.0
    weights_crc32: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    command_s: float = 0.0
    downlink_residual_norm: float | None = None
    strikes: tuple[Strike, ...] = ()
    marks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    timeline: tuple[ClientTimeline, ...] = ()
    updates: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_clients: ClientEvaluation = field(default_factory=ClientEvaluation)
    staleness: float = 0.0
    max_staleness: int = 0
    epsilon: float | None = None
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.updates:  # else it is known, also where the ids are not
            object.__setattr__(self, "updates", len(self.clients))

    @property
    def bytes_shared(self) -> int:
        """Bytes that were read in shared memory, up and down together."""
        return self.bytes_up_shared + self.bytes_down_shared

    def named(self) -> dict[str, float]:
        """All that evaluations of this round have found, by name, as settings name it: ``eval_loss``, ``accuracy``,
        the task's own metrics, and those of clients with ``client.`` in front."""
        own = {"accuracy": self.accuracy, "eval_loss": self.eval_loss}
        known = {name: value for name, value in own.items() if value is not None}
        return {**known, **self.metrics, **self.by_clients.named()}

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            **values,
            "clients": list(self.clients),
            "dropped": dict(self.dropped),
            "metrics": dict(self.metrics),
            "train_metrics": dict(self.train_metrics),
            "by_clients": self.by_clients.to_json(),
            "strikes": [strike.to_json() for strike in self.strikes],
            "marks": {mark: list(clients) for mark, clients in self.marks.items()},
            "timeline": [client.to_json() for client in self.timeline],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> RoundReport:
        """The inverse of :meth:`to_json`, but for the timeline. Missing fields have their defaults."""
        values = {key: value for key, value in entry.items() if key != "timeline"}
        values["clients"] = tuple(entry.get("clients", ()))
        values["strikes"] = tuple(Strike(**strike) for strike in entry.get("strikes", ()))
        values["marks"] = {mark: tuple(clients) for mark, clients in entry.get("marks", {}).items()}
        values["by_clients"] = ClientEvaluation.from_json(entry.get("by_clients", {}))
        return cls(**values)

    def without_timeline(self) -> RoundReport:
        """The report without what grows with the number of clients."""
        return replace(self, timeline=()) if self.timeline else self

    def without_clients(self) -> RoundReport:
        """The report without all that names clients."""
        return replace(
            self,
            clients=(),
            strikes=(),
            marks={},
            timeline=(),
            by_clients=self.by_clients.without_clients(),
            order={key: value for key, value in self.order.items() if key not in ("clients", "each")},
        )


def round_report(
    round_: Round, totals: RoundTotals, timing: RoundTiming, times_s: tuple[float, float, float], **others: Any
) -> RoundReport:
    """The report of a round at its commit.

    Args:
        times_s: by the clock of ``timing``: the round's start, its last update, and the new model.
        others: fields that are known neither from the round nor from its updates.
    """
    started_s, collected_s, aggregated_s = times_s
    return RoundReport(
        round_id=round_.round_id,
        clients=tuple(sorted(round_.accepted)),
        expected=round_.wanted,
        num_samples=totals.num_samples,
        loss=totals.loss(),
        train_metrics=totals.mean_metrics(),
        bytes_up=totals.bytes_up,
        bytes_up_shared=totals.bytes_up_shared,
        train_s=totals.train_s,
        encode_s=totals.encode_s,
        wire_s=max(0.0, collected_s - started_s - totals.train_s - totals.encode_s - totals.aggregate_s),
        aggregate_s=totals.aggregate_s + aggregated_s - collected_s,
        step_s=aggregated_s - collected_s,
        command_s=timing.first_command_s - started_s,
        timeline=timing.timelines(),
        updates=len(totals.staleness),
        staleness=sum(totals.staleness) / max(1, len(totals.staleness)),
        max_staleness=max(totals.staleness, default=0),
        **others,
    )


@dataclass(slots=True)
class Progress:
    """Tells where a controller stands now, for display. It is changed in place on the event loop.

    Attributes:
        phase: starting, waiting, training, aggregating, evaluating; at the end done, failed or stopped.
        round_id: the open round, or the last one. rounds: of the run.
        ready: updates that are in. expected: of so many. minimum: that suffice.
        clients: ids of the present clients. out: of those in quarantine, and until which round.
        reports: the rounds that are done, oldest first, all but the newest without their timelines.
        dropped: what did not count in them, by reason. accuracy, metrics: of the newest round that was evaluated.
        epsilon: of differential privacy, spent by the rounds that are done; None: the run gives none. epsilon_budget:
            that it may spend; None: there is no limit.
        never_counted: at the end, clients of which no update has counted in the whole run, and why.
        ended_early: why the run ended before its last round; empty: it did not.
        cross_site: at the end, local models on the data of all clients; None: that was not asked for.
        names: of clients.
        committed_unix_s: time of the newest commit; before the first one, of the start.
    """

    phase: str = "starting"
    round_id: int = 0
    rounds: int = 0
    ready: int = 0
    expected: int = 0
    minimum: int = 1
    clients: tuple[int, ...] = ()
    out: Mapping[int, int] = field(default_factory=dict)
    reports: list[RoundReport] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    epsilon: float | None = None
    epsilon_budget: float | None = None
    never_counted: Mapping[int, str] = field(default_factory=dict)
    ended_early: str = ""
    cross_site: CrossSite | None = None
    names: ClientNames = field(default_factory=ClientNames)
    # The lambda looks the function up when it is called, as simulated runs replace it.
    committed_unix_s: float = field(default_factory=lambda: time.time())

    def add(self, report: RoundReport) -> None:
        """A round is done."""
        self.committed_unix_s = time.time()
        self.reports.append(report)
        if len(self.reports) > TIMELINES_IN_MEMORY:
            self.reports[-1 - TIMELINES_IN_MEMORY] = self.reports[-1 - TIMELINES_IN_MEMORY].without_timeline()
        for reason, count in report.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        if report.epsilon is not None:
            self.epsilon = report.epsilon
        self._note_evaluation(report)

    def amend(self, report: RoundReport) -> None:
        """More is known of the newest round."""
        self.reports[-1] = report
        self._note_evaluation(report)

    def _note_evaluation(self, report: RoundReport) -> None:
        if report.accuracy is not None:  # kept, as each heartbeat reports it
            self.accuracy = report.accuracy
        if report.metrics:
            self.metrics = report.metrics
