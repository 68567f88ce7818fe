"""Settings of data-parallel training. All ranks use equal ones, except :data:`PER_RANK_SETTINGS`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gradbus.runtime.config.federated import Fraction, NonNegative, Positive, Settings

_MIB = 1 << 20

Warmup = Literal["paper", "none"] | int | tuple[float, ...]

# These may differ between the ranks: directories, timeouts, and the intervals of reports.
PER_RANK_SETTINGS = frozenset(
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
    """Settings of a data-parallel run.

    They are equal on all ranks; only directories, timeouts and the intervals of reports may differ.
    """

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Number of passes over the training set in all, those before a resume included."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Number of steps in all after which the run ends, if that is before the last epoch's end. null: no limit."""
    lr: Positive = 0.05
    """Learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum, as in torch.optim.SGD."""
    nesterov: bool = False
    """Whether the momentum is Nesterov's, as in torch.optim.SGD."""
    weight_decay: NonNegative = 0.0
    """Weight decay, as in torch.optim.SGD."""
    seed: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Seed of all random choices of the run."""
    exchange: Annotated[str, Field(min_length=1, max_length=256)] = "dense"
    """How gradients are exchanged, such as `dense`, the mean of whole gradients, or `dgc`, Deep Gradient Compression,
    the largest entries of gradient and residual (docs/dgc.md); docs/tuning.md lists all. Or your own, as
    package.module:Name."""
    exchange_options: dict[str, Any] = Field(default={})
    """Options of an exchange of your own."""
    clip_norm: Positive | None = None
    """Largest norm of the mean gradient. With dgc each rank clips its own at clip_norm / sqrt(world). null: no
    clipping."""
    accumulation_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Number of batches whose mean gradient makes one step."""
    max_nonfinite_steps: Annotated[int, Field(ge=0)] = 10
    """Number of steps in a row with NaN or infinity, in the loss or the gradients of any rank, that end the run with an
    error; all ranks skip such a step. A last epoch of nothing but skipped steps is an error, too. 0: never."""

    overlap: bool = True
    """For dense: whether a bucket is sent as soon as its gradients are there, during the backward pass."""
    bucket_bytes: Annotated[int, Field(ge=1)] = 25 * _MIB
    """For dense: size, in bytes, at which a bucket is closed."""
    first_bucket_bytes: Annotated[int, Field(ge=1)] = _MIB
    """For dense: the same size for the first bucket, which holds the last layers. A small one makes sending start
    early."""
    algorithm: Literal["auto", "direct", "ring", "shards"] = "auto"
    """For dense: algorithm of the all-reduce; see docs/collectives.md."""

    density: Fraction = 0.001
    """For dgc: share of the entries of a tensor that is sent."""
    warmup: Warmup = "paper"
    """For dgc: density of the first epochs. `paper`: 25, 6.25, 1.5625 and 0.4 %. `none`: no warm-up. A number: so many
    epochs that fall geometrically. A list: these densities."""
    masking: bool = True
    """For dgc: momentum factor masking; an entry that was sent starts again without momentum."""
    value_dtype: Literal["fp32", "fp16"] = "fp32"
    """For dgc: type of the values on the wire."""
    min_numel: Annotated[int, Field(ge=0)] = 0
    """For dgc: number of entries below which a tensor is sent dense, as are all of fewer than two dimensions."""
    sampling: Literal["strided", "random", "exact"] = "strided"
    """For dgc: which entries the threshold is estimated from. `exact`: all."""
    sample_ratio: Fraction = 0.01
    """For dgc: share of a tensor that the threshold is estimated from."""

    hash_every: Annotated[int, Field(ge=0)] = 100
    """Number of steps between two comparisons of the parameters of all ranks; the first step and the end are compared,
    too. 0: never."""
    eval_every_epochs: Annotated[int, Field(ge=0)] = 1
    """Number of epochs between two evaluations; the end of the run is always evaluated. 0: never evaluate."""

    state_dir: Path | None = None
    """Directory of the checkpoints; each rank has a folder of its own in it. Either all ranks have one or none. null:
    `gradbus worker` uses one in the run directory; a program of your own makes none."""
    checkpoint_every_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps between two checkpoints. 0: one at the end of every epoch. The end of the run always makes one.
    """
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    """Number of checkpoints to keep."""
    resume: bool = True
    """Whether to continue from the newest checkpoint that all ranks have, if there is one."""

    join_timeout_s: Positive = 60.0
    """Seconds that the ranks wait for each other at the start, loading of data included."""
    collective_timeout_s: Positive = 60.0
    """Seconds that any later exchange may take."""
    checkpoint_timeout_s: Positive = 600.0
    """Seconds that a rank waits for the others to save a checkpoint."""
    profile_window_steps: Annotated[int, Field(ge=1)] = 50
    """Number of steps whose means and maxima make one line of the profile."""
    profile_dir: Path | None = None
    """Directory of the profile. null: `gradbus worker` uses one in the run directory; a program of your own keeps it in
    memory."""
    report_every_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps between two progress lines in the log. 0: none."""
    history_dir: Path | None = None
    """Directory of the event journal, for `gradbus check`. null: no journal; `gradbus worker` keeps one in the run
    directory."""

    @field_validator("warmup", mode="before")
    @classmethod
    def _known_warmup(cls, value: Any) -> Any:
        """Raise one error in place of one for each kind of warm-up that the value is not."""
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
        """Return the settings that must be equal on all ranks, as plain data: all but :data:`PER_RANK_SETTINGS`."""
        values = self.model_dump(mode="json", exclude=set(PER_RANK_SETTINGS))
        return {**values, "state_dir": "given" if self.state_dir is not None else "none"}
