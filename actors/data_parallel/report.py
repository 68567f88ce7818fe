"""The reports of a worker: one for each epoch, and a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from gradbus.runtime.profiling.profile import ProfileSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One epoch, or the part of it that ``max_steps`` allowed.

    Loss, accuracy and hash are of all ranks together and equal on all of them; times and bytes are this rank's.

    Attributes:
        epoch: from 0. step: steps done in all. finished: whether the epoch was gone through to its end.
        loss: mean training loss over the batches of all ranks, skipped steps left out.
        accuracy, eval_loss: on the test set, each rank having counted a part of it; None if not evaluated.
        metrics: of the test set, by name, as the task reports them. train_metrics: of the batches of the epoch; skipped
            steps left out.
        test_samples: how many that were.
        model: whose model accuracy, eval_loss and params_hash are of: ``equal``, that of all ranks, or the ``mean`` of
            models that differ.
        params_hash: of the parameters, 64 bits; equal numbers, equal models.
        consensus_distance: how far the models of the ranks are from their mean, as a share of its norm: the root of the
            mean of |x_i - x|^2, over |x|. None where they are equal.
        skipped_steps: steps of the epoch that all ranks skipped, for some rank had NaN or infinity. Where models
            differ, a rank skips steps without an exchange alone: then those of the rank that skipped most.
        skipped_exchanges: exchanges of weights in the epoch of which all ranks dropped the result, for it had NaN or
            infinity on some rank.
        density: share of the gradient's entries that was sent.
        step_s_mean: seconds a step took, with its share of the wait for what was on its way at the end of the epoch and
            before checkpoints. wait_s_mean: of these, waiting for the others and the network.
        bytes_out_per_step: payload handed to DDS.
        seconds: the epoch, evaluation included.
    """

    epoch: int
    step: int
    loss: float
    accuracy: float | None = None
    eval_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    train_metrics: dict[str, float] = field(default_factory=dict)
    test_samples: int = 0
    model: str = "equal"
    params_hash: int = 0
    consensus_distance: float | None = None
    skipped_steps: int = 0
    skipped_exchanges: int = 0
    density: float = 1.0
    step_s_mean: float = 0.0
    wait_s_mean: float = 0.0
    bytes_out_per_step: float = 0.0
    seconds: float = 0.0
    finished: bool = True

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse; keys that are not known are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """How training goes in the midst of an epoch, as this rank sees it.

    Attributes:
        step: steps done in all. epoch: from 0.
        loss: mean training loss over this rank's batches of the epoch so far.
        step_s_mean, wait_s_mean, bytes_out_per_step: as of an :class:`EpochReport`, over the steps of the epoch that
            this process has done so far.
    """

    step: int
    epoch: int
    loss: float
    step_s_mean: float
    wait_s_mean: float
    bytes_out_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSummary:
    """A run as this rank saw it.

    Attributes:
        epochs: that were done, before a resume or now. steps: the same.
        accuracy: at the end, None if it was never evaluated. loss: mean training loss of the last epoch, if any.
        metrics: of the test set, at the end.
        params_hash: of the parameters at the end.
        skipped_steps: by this rank, since this process started.
        bytes_out, bytes_in: payload that this process has sent and received for the run, all collectives of all its
            groups included (:mod:`gradbus.runtime.traffic` says what counts): equal to those of ``profile``, in steps,
            outside of them and earlier. Earlier starts of the run are in it as far as the profile's file in
            ``profile.dir`` has them: of one that was killed, up to its last window. What other processes have
            exchanged, as elastic ranks that are gone, is in their profiles. seconds: of this process.
        profile: where the time went. algorithm: name of what the ranks exchange.
    """

    rank: int
    world: int
    epochs: int
    steps: int
    accuracy: float | None
    loss: float | None
    params_hash: int
    skipped_steps: int
    bytes_out: int
    bytes_in: int
    seconds: float
    profile: ProfileSummary
    metrics: dict[str, float] = field(default_factory=dict)
    algorithm: str = "dense"
