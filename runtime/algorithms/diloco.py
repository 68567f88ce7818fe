"""DiLoCo: ranks train by themselves for some steps, then an outer optimizer steps with the mean of what they changed.

Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023 (arXiv:2311.08105),
algorithm 1, with Nesterov as the outer optimizer; in parts and late as Douillard et al., "Streaming DiLoCo with
overlapping communication", 2025 (arXiv:2501.18512), section 2. theta is what all ranks had after the last exchange, and
theta_k what rank k has made of it by its own optimizer, any one, whose state is never sent:

    Delta = mean over k of (theta - theta_k)
    m <- outer_momentum m + Delta;  theta <- theta - outer_lr (Delta + outer_momentum m)
    theta_k <- alpha theta_k + (1 - alpha) theta

``fragments``: the weights are cut into so many parts of equal size, and each is exchanged every ``steps`` steps at an
offset of its own, so that the network has an even load. ``delay``: theta is applied so many steps later, by the last
line with the theta_k of then; one fragment without delay is DiLoCo itself.

``dense_steps``: after each of so many steps at the start theta is the mean of the theta_k, as with ``post-local-sgd``,
and DiLoCo begins there: the authors begin with a model that was trained synchronously. These steps send what dense
does.

theta_k - theta is measured from the last exchange that has counted: one that fails, on all ranks, keeps what they have
changed for the next. What ``codec`` rounds off a message is kept, too. Due is an exchange by the number of the step, so
it is the same on all ranks, whatever steps they skip. With ``outer_lr`` 1, no momentum and ``fp32`` the new theta is
the mean of the theta_k, and is computed as that, to the bits of ``local-sgd``.

Differs from the sources: fragments are cut where their length ends, not between layers, since the outer step is
elementwise, and none is larger than another; steps of q4 are of one size within a chunk, where the authors' 4-bit
floating point has powers of two; all lossy codecs have error feedback. Buffers, such as running means of
batch norm, are not exchanged: each rank has its own, and the model of a run has their means.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradbus import codecs
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.anchored import ANCHOR, MOMENTUM, Anchored
from gradbus.runtime.algorithms.base import Place, Step, TensorBucket
from gradbus.runtime.algorithms.compressed_mean import RESIDUAL, RESIDUAL_OF_MEAN, coded_mean, half_mean
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.errors import ConfigError

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class StreamingDiLoCo(Anchored):
    """Local steps, then an outer Nesterov step with the mean of what they changed; in fragments and late, if wanted."""

    choice = "diloco"
    own = frozenset({RESIDUAL, RESIDUAL_OF_MEAN})
    shared = frozenset({ANCHOR, MOMENTUM})
    relative = frozenset({RESIDUAL_OF_MEAN})
    can_drop_late = True

    class Options(base.Options):
        """Options of ``diloco``."""

        steps: int = Field(default=50, ge=1)
        """Number of local steps between two exchanges of a weight (H)."""
        outer_lr: float = Field(default=0.7, gt=0)
        """Learning rate of the outer step."""
        outer_momentum: float = Field(default=0.9, ge=0, lt=1)
        """Nesterov momentum of the outer step."""
        fragments: int = Field(default=1, ge=1, le=4096)
        """Number of parts that the weights are exchanged in, each at steps of its own."""
        delay: int = Field(default=0, ge=0)
        """Number of steps for which an exchange may go on while training continues; below ``steps``."""
        alpha: float | None = Field(default=None, ge=0, lt=1)
        """Share of a rank's own weights in what it goes on with after an exchange. null: 0.5 with a delay, else 0."""
        codec: Literal["fp32", "fp16", "bf16", "q8", "q4", "q2"] = "q8"
        """Format of the changes on the wire; what it rounds off is sent later."""
        dense_steps: int = Field(default=0, ge=0)
        """Number of steps at the start with a mean of all weights after each, in float32; without a delay alone."""

        @model_validator(mode="after")
        def _fit_together(self) -> StreamingDiLoCo.Options:
            for name in ("fragments", "delay"):
                if getattr(self, name) > self.steps - (name == "delay"):
                    raise ValueError(
                        f"{name}={getattr(self, name)} with steps={self.steps}: each fragment has a step of its own, "
                        f"and its result is there before it is exchanged again"
                    )
            if self.dense_steps and (self.delay or self.alpha):
                raise ValueError(
                    f"dense_steps={self.dense_steps} with delay={self.delay} and alpha={self.alpha}: after each of "
                    f"these steps all ranks have the same weights; leave out the others"
                )
            return self

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self.delay_steps = options.delay
        self._alpha = options.alpha if options.alpha is not None else 0.5 if options.delay else 0.0
        self._codec = None if options.codec in ("fp32", *_HALF) else codecs.get(options.codec)

    def _averages(self, step: Step) -> bool:
        """Whether the new theta is the mean of the theta_k."""
        options = self.options
        is_mean = options.outer_lr == 1 and not options.outer_momentum and options.codec == "fp32"
        return is_mean or self._is_dense(step)

    def is_due(self, step: Step) -> bool:
        return bool(self._due(step))

    def _is_dense(self, step: Step) -> bool:
        return bool(step.number < self.options.dense_steps)

    def _due(self, step: Step) -> list[str]:
        """The fragments that are exchanged after this step."""
        every, count = self.options.steps, self.options.fragments
        if self._is_dense(step):
            return [_name(one) for one in range(count)]
        return [_name(one) for one in range(count) if (step.number + 1 - one * every // count) % every == 0]

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """All fragments: their lengths differ by one at most."""
        return {_name(number): part for number, part in enumerate(flat.tensor_split(self.options.fragments))}

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        parts = self.parts(bucket.flat)
        for key in self._due(step):
            if (own := parts[key]).numel():
                common = yield from self._average(key, own) if self._averages(step) else self._outer_step(key, own)
                own.copy_(common if not self._alpha else self._alpha * own + (1 - self._alpha) * common)

    def _average(self, key: str, own: Tensor) -> Program[Tensor]:
        average: Tensor = yield AllReduce(key, own, "mean")
        self.memory.stage(ANCHOR, key, average.clone())
        return average

    def _outer_step(self, key: str, own: Tensor) -> Program[Tensor]:
        """Return what theta becomes. ``own``: theta_k, of one fragment."""
        anchor = self.anchor(key, own)
        change = yield from self._mean(key, anchor - own)
        momentum = self.memory.find_or_zeros(MOMENTUM, key, own) * self.options.outer_momentum + change
        found: Tensor = anchor - self.options.outer_lr * (change + self.options.outer_momentum * momentum)
        self.memory.stage(ANCHOR, key, found)
        self.memory.stage(MOMENTUM, key, momentum)
        return found

    def _mean(self, key: str, change: Tensor) -> Program[Tensor]:
        if self._codec is not None:
            mean: Tensor = yield from coded_mean(self.place, self.memory, key, change, self._codec)
        elif self.options.codec in _HALF:
            mean = yield from half_mean(self.memory, key, change, _HALF[self.options.codec])
        else:
            mean = yield AllReduce(key, change, "mean", out=change)
        return mean

    def check_delay(self, asked: int | None) -> int:
        if asked not in (None, self.delay_steps):
            raise ConfigError(
                f"diloco: parallel.delay_steps={asked} with a delay of {self.delay_steps}: a rank would lose what it "
                f"trains while an exchange goes on; set parallel.algorithm.delay={asked} instead"
            )
        return self.delay_steps

    @torch.no_grad()
    def applied_late(self, step: Step, live: Tensor, before: Tensor, result: Tensor) -> Tensor:
        """Of the fragments that were exchanged theta is in ``result``: of what a rank has done meanwhile it keeps
        ``alpha``. Of the others all of it."""
        made = live.clone()
        for key in self._due(step):
            new, now, old, common = (self.parts(one)[key] for one in (made, live, before, result))
            new.copy_(common + self._alpha * (now - old))
        return made


def _name(fragment: int) -> str:
    return f"fragment{fragment}"
