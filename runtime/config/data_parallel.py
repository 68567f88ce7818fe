"""Settings of data-parallel training. All ranks use equal ones, except for those marked with :data:`PER_RANK`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import to_jsonable_python

from gradbus.runtime.choices import ALGORITHMS, OPTIMIZERS, SCHEDULES, Choice
from gradbus.runtime.config.settings import (
    PER_RANK,
    CheckpointSettings,
    Duration,
    HistorySettings,
    Settings,
    flat,
)

_MIB = 1 << 20


class RankCheckpointSettings(CheckpointSettings):
    """Checkpoints of all ranks: each has a folder of its own in the directory. Either all ranks have one or none."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps between two checkpoints. 0: one at the end of every epoch. The end of the run always makes one.
    """
    timeout_s: Annotated[Duration, PER_RANK] = 600.0
    """Seconds that a rank waits for the others to save a checkpoint, and at a resume to read theirs."""


class TimeoutSettings(Settings):
    """How long a rank waits for the others."""

    join_s: Duration = 60.0
    """Seconds that the ranks wait for each other at the start, loading of data included."""
    collective_s: Duration = 60.0
    """Seconds that any later exchange may take."""


class ElasticSettings(Settings):
    """Ranks that come and go while training goes on (docs/elastic.md)."""

    min_world: Annotated[int, Field(ge=0, le=256)] = 0
    """Number of ranks that training goes on with at least; with fewer, they wait for more. 0: the group is not elastic,
    and ends when a rank is lost."""
    max_world: Annotated[int, Field(ge=1, le=256)] = 256
    """Number of ranks that take part at most. More processes wait as spares, for one to leave or to be lost."""
    wait_s: Annotated[Duration, PER_RANK] = 600.0
    """Seconds that a process waits for enough others, or for a majority, before it gives up."""
    last_call_s: Annotated[Duration | None, PER_RANK] = None
    """Seconds that process 0 waits for the other founders once `min_world` are there; it begins without those that are
    missing then, and they join when they come; less than `wait_s`. null: it waits for all. `gradbus run --elastic` sets
    60, or half of `wait_s`. Between machines a process 0 that is started again while the network is cut would begin the
    run a second time."""

    @model_validator(mode="after")
    def _ends_in_time(self) -> Self:
        if self.last_call_s is not None and self.last_call_s >= self.wait_s:
            raise ValueError(
                f"last_call_s ({self.last_call_s:g}) has to be less than wait_s ({self.wait_s:g}), after which all "
                f"give up: set a smaller one"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether ranks may come and go."""
        return self.min_world > 0

    @model_validator(mode="after")
    def _in_order(self) -> ElasticSettings:
        if self.min_world > self.max_world:
            raise ValueError(f"elastic.min_world ({self.min_world}) is more than elastic.max_world ({self.max_world})")
        return self


class ProfileSettings(Settings):
    """The profile of where the time of a step goes."""

    dir: Path | None = None
    """Directory of the profile. null: `gradbus worker` uses one in the run directory; a program of your own keeps it in
    memory."""
    window_steps: Annotated[int, Field(ge=1)] = 50
    """Number of steps whose means and maxima make one line of the profile."""


class DataParallelConfig(Settings):
    """Settings of a data-parallel run.

    They are equal on all ranks; only directories, timeouts and the intervals of reports may differ.
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "bucket_cap_mb": "bucket_bytes",
        "checkpoint_every_steps": "checkpoint.every_steps",
        "checkpoint_timeout_s": "checkpoint.timeout_s",
        "collective_timeout_s": "timeouts.collective_s",
        "compression": "algorithm",
        "exchange": "algorithm",
        "exchange_options": "algorithm",
        "gradient_accumulation_steps": "accumulation_steps",
        "history_dir": "history.dir",
        "join_timeout_s": "timeouts.join_s",
        "keep_checkpoints": "checkpoint.keep",
        "learning_rate": "optimizer.lr",
        "profile_dir": "profile.dir",
        "profile_window_steps": "profile.window_steps",
        "state_dir": "checkpoint.dir",
    }

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Number of passes over the training set in all, those before a resume included."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Number of steps in all after which the run ends, if that is before the last epoch's end. null: no limit."""
    seed: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Seed of all random choices of the run."""
    accumulation_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Number of batches whose mean gradient makes one step."""
    max_nonfinite_steps: Annotated[int, Field(ge=0)] = 10
    """Number of steps in a row with NaN or infinity, in the loss or the gradients of any rank, that end the run with an
    error; all ranks skip such a step. A last epoch of nothing but skipped steps is an error, too. 0: never. Where
    models differ, a rank skips a step without an exchange alone; all ranks end at the end of the epoch, if one has
    skipped so many."""
    hash_every: Annotated[int, Field(ge=0)] = 100
    """Number of steps between two comparisons of the parameters of all ranks; the first step and the end are compared,
    too. 0: never."""
    eval_every_epochs: Annotated[int, Field(ge=0)] = 1
    """Number of epochs between two evaluations; the end of the run is always evaluated. 0: never evaluate."""
    report_every_steps: Annotated[int, Field(ge=0), PER_RANK] = 0
    """Number of steps between two progress lines in the log. 0: none."""
    algorithm: Annotated[Choice, ALGORITHMS] = ALGORITHMS.default
    """What the ranks exchange, and how, such as `dense`, the mean of whole gradients, or `dgc`, Deep Gradient
    Compression, the largest entries of gradient and residual (docs/dgc.md); docs/algorithms.md says which to take when.
    Or your own, as package.module:Name."""
    delay_steps: Annotated[int, Field(ge=0, le=8)] | None = None
    """Number of steps after which what was exchanged is applied. With 1 an exchange goes on while the next step is
    computed, with gradients that are one step old (docs/algorithms.md). null: as the algorithm has it, mostly 0."""
    predicts_weights: bool = False
    """Whether, with delay_steps, a rank computes its gradients at the weights to come, as far as it knows them: after
    the steps that are still to be applied, made with its own gradients in place of their mean. SGD loses next to
    nothing by a delay then. It costs a copy of the gradients and one of the weights a step."""
    overlap: bool = True
    """Whether a bucket of gradients is sent as soon as they are there, during the backward pass."""
    bucket_bytes: Annotated[int, Field(ge=1)] = 25 * _MIB
    """Size, in bytes, at which a bucket is closed."""
    first_bucket_bytes: Annotated[int, Field(ge=1)] = _MIB
    """The same size for the first bucket, which holds the last layers. A small one makes sending start early."""
    optimizer: Annotated[Choice, OPTIMIZERS] = OPTIMIZERS.default
    """Optimizer: a class of torch.optim, such as adamw, with its options; or task, the one that the task makes, which
    is taken, too, where it makes one and none is named here. Or your own, as package.module:Name (docs/training.md)."""
    schedule: Annotated[Choice, SCHEDULES] = SCHEDULES.default
    """How the learning rate changes: a class of torch.optim.lr_scheduler, such as cosine, with its options. Or your
    own, as package.module:Name."""
    autocast: Literal["bf16"] | None = None
    """Type in which the forward pass computes where torch's autocast takes it to be safe; parameters and gradients stay
    float32. null: all in the types of the parameters."""
    callbacks: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=64), PER_RANK] = ()
    """Classes as package.module:Name, whose objects are called after steps, epochs and evaluations (docs/training.md).
    """
    elastic: ElasticSettings = ElasticSettings()
    checkpoint: RankCheckpointSettings = RankCheckpointSettings()
    timeouts: Annotated[TimeoutSettings, PER_RANK] = TimeoutSettings()
    profile: Annotated[ProfileSettings, PER_RANK] = ProfileSettings()
    history: Annotated[HistorySettings, PER_RANK] = HistorySettings()

    @field_validator("autocast", mode="before")
    @classmethod
    def _no_scaling(cls, value: Any) -> Any:
        if value == "fp16":
            raise ValueError(
                "fp16 needs losses that are scaled up, or small gradients become zero; there is no such scaling here. "
                "bf16 has the range of float32 and needs none"
            )
        return value

    def shared(self, algorithm: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, as plain data by their keys, such as ``optimizer.lr``.

        Args:
            algorithm: its name and all of its options, in place of those that were given.
        """
        values = self.model_dump(mode="json", exclude={**_per_rank(type(self)), "algorithm": True})
        values["checkpoint"]["dir"] = "none" if self.checkpoint.dir is None else "given"
        for name, table in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            choice = getattr(self, name)
            values[name] = {"name": choice.name, **to_jsonable_python(table.options(choice))}
        return dict(flat({**values, "algorithm": to_jsonable_python(algorithm)}))


def _per_rank(group: type[BaseModel]) -> dict[str, Any]:
    """The fields marked with :data:`PER_RANK`, as ``model_dump`` takes them to leave out."""
    found: dict[str, Any] = {}
    for name, field in group.model_fields.items():
        if PER_RANK in field.metadata:
            found[name] = True
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = _per_rank(field.annotation)
    return {name: inner for name, inner in found.items() if inner}
