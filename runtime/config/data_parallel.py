"""Settings of data-parallel training. All ranks use equal ones, but for those that :data:`OWN_BUSINESS` names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gradbus.runtime.config.federated import Fraction, NonNegative, Positive, Settings

_MIB = 1 << 20

Warmup = Literal["paper", "none"] | int | tuple[float, ...]

# A rank may have its own: where it writes, how long it waits, what it tells.
OWN_BUSINESS = frozenset(
    {
        "state_dir",
        "profile_dir",
        "profile_window_steps",
        "report_every_steps",
        "history_dir",
        "join_timeout_s",
        "collective_timeout_s",
        "checkpoint_timeout_s",
    }
)


class DataParallelConfig(Settings):
    """Rules of a data-parallel run, equal on all ranks.

    Attributes:
        epochs: passes over the training set in all, those before a resume included. max_steps: end after so many steps
            in all, if that comes first.
        lr: learning rate. momentum, nesterov, weight_decay: as in ``torch.optim.SGD``. seed: of everything random.
        exchange: your own as package.module:Name, with ``exchange_options``; or ``dense`` averages whole gradients,
            ``dgc`` sends the largest of what is owed; see docs/dgc.md.
        clip_norm: limit of the mean gradient's norm; None: none. With dgc each rank clips its own at
            clip_norm / sqrt(world).
        accumulation_steps: batches whose mean gradient makes one step.
        max_nonfinite_steps: a step with NaN or infinity in the loss or the gradients of any rank is skipped by all; so
            many in a row, or all steps of the last epoch, end the run with an error. 0: never.

        overlap: dense: send a bucket as soon as its gradients are there, while the backward pass goes on.
        bucket_bytes: dense: a bucket is closed when it holds so much. first_bucket_bytes: the same for the first one,
            which holds the last layers: small, so that sending starts early.
        algorithm: dense: how tensors are added up; see ``Group.all_reduce``.

        density: dgc: share of the entries of a tensor that is sent. warmup: that of the first epochs: ``paper`` for
            25, 6.25, 1.5625, 0.4 %, ``none``, a number of epochs that fall geometrically, or a list of densities.
        masking, value_dtype, min_numel, sampling, sample_ratio: dgc: as in ``codecs.DgcConfig``.

        hash_every: compare the parameters of all ranks after every so many steps, after the first one, and at the end;
            0: never.
        eval_every_epochs: evaluate after every so many epochs, and at the end; 0: never.

        state_dir: where checkpoints go, each rank in a folder of its own below; None: none are made. Either all ranks
            have one or none.
        checkpoint_every_steps: 0: at the end of every epoch. The end of the run always makes one.
        keep_checkpoints: how many. resume: go on from the newest one that all ranks have, if there is one.

        join_timeout_s: how long the ranks wait for each other at the start; also while they load data.
        collective_timeout_s: how long any later exchange may take. checkpoint_timeout_s: how long a rank waits for the
            others to save; a large model on a slow disk takes its time.
        profile_window_steps: steps of one line of means and maxima. profile_dir: where they go; None: in memory only.
        report_every_steps: a line in the log after every so many steps; 0: none.
        history_dir: where what happened is noted, for ``gradbus check``; None: nowhere.
    """

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    max_steps: Annotated[int, Field(ge=1)] | None = None
    lr: Positive = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    seed: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    exchange: Annotated[str, Field(min_length=1, max_length=256)] = "dense"
    exchange_options: dict[str, Any] = Field(default_factory=dict)
    clip_norm: Positive | None = None
    accumulation_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    max_nonfinite_steps: Annotated[int, Field(ge=0)] = 10

    overlap: bool = True
    bucket_bytes: Annotated[int, Field(ge=1)] = 25 * _MIB
    first_bucket_bytes: Annotated[int, Field(ge=1)] = _MIB
    algorithm: Literal["auto", "direct", "ring", "shards"] = "auto"

    density: Fraction = 0.001
    warmup: Warmup = "paper"
    masking: bool = True
    value_dtype: Literal["fp32", "fp16"] = "fp32"
    min_numel: Annotated[int, Field(ge=0)] = 0
    sampling: Literal["strided", "random", "exact"] = "strided"
    sample_ratio: Fraction = 0.01

    hash_every: Annotated[int, Field(ge=0)] = 100
    eval_every_epochs: Annotated[int, Field(ge=0)] = 1

    state_dir: Path | None = None
    checkpoint_every_steps: Annotated[int, Field(ge=0)] = 0
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    resume: bool = True

    join_timeout_s: Positive = 60.0
    collective_timeout_s: Positive = 60.0
    checkpoint_timeout_s: Positive = 600.0
    profile_window_steps: Annotated[int, Field(ge=1)] = 50
    profile_dir: Path | None = None
    report_every_steps: Annotated[int, Field(ge=0)] = 0
    history_dir: Path | None = None

    @field_validator("warmup", mode="before")
    @classmethod
    def _known_warmup(cls, value: Any) -> Any:
        """One sentence in place of one complaint for each kind of warm-up that it is not."""
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1000
        is_list = isinstance(value, list | tuple) and all(
            isinstance(density, int | float) and not isinstance(density, bool) and 0 < density <= 1 for density in value
        )
        if value in ("paper", "none") or is_count or is_list:
            return tuple(map(float, value)) if isinstance(value, list | tuple) else value
        raise ValueError("expected 'paper', 'none', a number of epochs, or a list of densities in (0, 1]")

    @model_validator(mode="after")
    def _consistent(self) -> DataParallelConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=true needs momentum > 0")
        return self

    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks, as plain data: every setting but those that are each rank's own business."""
        values = self.model_dump(mode="json", exclude=set(OWN_BUSINESS))
        return {**values, "state_dir": "given" if self.state_dir is not None else "none"}
