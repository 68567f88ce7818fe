"""What a round leaves behind: one object, for a table, a log line, a file or a metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gradbus.actors.timeline import ClientTimeline

TIMELINES_IN_MEMORY = 16  # newest rounds whose timelines stay in a list of reports; run directories keep all


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One committed round.

    Attributes:
        round_id: its number; attempt: how often it was tried.
        clients: ids whose updates count. expected: how many took part. outcome: why it ended.
        num_samples: samples trained on, all clients together.
        loss: mean training loss, weighted by samples; None without one.
        accuracy, eval_loss: of the global model on the test set; None if not evaluated.
        bytes_up: encoded updates that count. bytes_down: encoded model, times the clients it went to.
        bytes_up_shared, bytes_down_shared: how many of these were read from the memory of a process on the same
            machine, and did not go over DDS.
        train_s: the slowest client's training. encode_s: the slowest client's encoding.
        wire_s: what is left of the time from the command to the last update: transfers and waiting.
        aggregate_s: adding up and the server's step. step_s: of these, from the last update to the new model.
        checkpoint_s: until it is on the disk. publish_s: sending the model. eval_s: evaluation.
        seconds: from the start of the round to the published model. command_s: of these, until the command.
        weights_crc32: CRC-32 over the float32 weights, little-endian: equal numbers, equal models.
        dropped: updates and frames that were not counted, by reason, in this round; with the clients that were lost.
        downlink_residual_norm: L2 norm of what the model's message to the clients did not say; 0 with a lossless codec.
        timeline: where the time went, by client; of the clients that counted last, where there are very many. Empty for
            rounds before a resume, and in :attr:`Progress.reports` for all but the newest rounds.
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
    timeline: tuple[ClientTimeline, ...] = ()

    @property
    def bytes_shared(self) -> int:
        """What did not go over DDS, up and down together."""
        return self.bytes_up_shared + self.bytes_down_shared

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        timeline = [client.to_json() for client in self.timeline]
        return {**values, "clients": list(self.clients), "dropped": dict(self.dropped), "timeline": timeline}

    def without_timeline(self) -> RoundReport:
        """The same, for what must not grow with the number of clients."""
        return replace(self, timeline=()) if self.timeline else self


@dataclass(slots=True)
class Progress:
    """Where a controller stands now, for whoever shows it. Changed in place on the event loop.

    Attributes:
        phase: starting, waiting, training, aggregating, evaluating; at the end done, failed or stopped.
        round_id: the open round, or the last one. rounds: how many there will be.
        ready: updates that are in. expected: of so many. minimum: that suffice.
        clients: ids of the clients that are there.
        reports: the rounds that are done, oldest first, all but the newest without their timelines.
        dropped: what was not counted in them, by reason.
    """

    phase: str = "starting"
    round_id: int = 0
    rounds: int = 0
    ready: int = 0
    expected: int = 0
    minimum: int = 1
    clients: tuple[int, ...] = ()
    reports: list[RoundReport] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def add(self, report: RoundReport) -> None:
        """A round is done."""
        self.reports.append(report)
        if len(self.reports) > TIMELINES_IN_MEMORY:
            self.reports[-1 - TIMELINES_IN_MEMORY] = self.reports[-1 - TIMELINES_IN_MEMORY].without_timeline()
        for reason, count in report.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """What a client did.

    Attributes:
        rounds: rounds whose update was counted. refused: updates that were not.
        bytes_up: bytes of updates sent, repairs included. train_s: seconds of training in all.
    """

    rounds: int
    refused: int
    bytes_up: int
    train_s: float
