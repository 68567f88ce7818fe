"""What the program around a client learns of each round that the client was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gradbus.runtime.wire.control import UploadRequest

CALLED_OFF = "called off"  # the round was over, or its controller gone, before the update was there


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReport:
    """One round of a client.

    Attributes:
        round_id: of the controller's command.
        counted: whether its update counts. reason: why not; empty: it does.
        num_samples: that it was trained on, and ``loss``, ``metrics``, ``steps``, ``train_s`` as they were announced:
            of an update that was not made 0, None and none.
        bytes_up: payload of what was sent. seconds: from the command's arrival at the training to this report.
    """

    round_id: int
    counted: bool
    reason: str = ""
    num_samples: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    steps: int = 0
    train_s: float = 0.0
    bytes_up: int = 0
    seconds: float = 0.0

    @classmethod
    def of_update(cls, request: UploadRequest, reason: str, *, bytes_up: int, seconds: float) -> ClientReport:
        """Report an update that was sent. ``reason``: why it does not count; empty: it does."""
        return cls(
            round_id=request.round_id,
            counted=not reason,
            reason=reason,
            num_samples=request.num_samples,
            loss=request.loss if math.isfinite(request.loss) else None,
            metrics=MappingProxyType(dict(request.metrics)),
            steps=request.steps,
            train_s=request.train_s,
            bytes_up=bytes_up,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """A client's part in a run.

    Attributes:
        rounds: in which its update counted. refused: updates that did not.
        bytes_up: payload of updates sent, those that did not count and repairs included, headers left out.
        train_s: seconds of training in all.
    """

    rounds: int
    refused: int
    bytes_up: int
    train_s: float
