"""Deep gradient compression: momentum before the selection, and the largest 0.1 % of what has accumulated is sent.

Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training", ICLR 2018
(arXiv:1712.01887), algorithm 1, sections 3.1 to 3.3. The mathematics is :mod:`gradbus.codecs.dgc`; ``docs/dgc.md``
compares it with the paper and with the authors' code.

    u = m u + g;  v = v + u;  c = the largest entries of v;  v = v - c;  u = 0 where c is not;
    gradient = (1 / N) sum of c over the ranks

One message a step holds all tensors, so it needs all gradients: an index space for those of two or more dimensions, and
the others dense. The momentum of the dense ones comes after the mean. So the optimizer that follows adds none.

A rank without data sends its residual. The gradients of the others are multiplied by world / active before they are
accumulated, so that their mean over the world is the mean over those that have data, and the residual of steps before
keeps the weight it had then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from gradbus import codecs
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllGather, Program
from gradbus.runtime.errors import ConfigError

Warmup = Literal["paper", "none"] | int | tuple[float, ...]


class Dgc(Algorithm):
    """Deep gradient compression.

    In a step that is skipped the ranks whose gradients were finite keep them: what they have sent is added to the
    residual again. A tensor that is not in the bucket of a step has no gradient on any rank: what is kept for it stays
    as it is.
    """

    choice = "dgc"
    scope = "step"
    clips = True
    own = frozenset({"U", "V", "samples"})
    shared = frozenset({"M"})

    class Options(base.Options):
        """Options of ``dgc``; docs/dgc.md compares the defaults with the paper's."""

        density: float = Field(default=0.001, gt=0, le=1)
        """Share of the entries of a tensor that is sent."""
        warmup: Warmup = "paper"
        """Density of the first epochs. `paper`: 25, 6.25, 1.5625 and 0.4 %. `none`: no warm-up. A number: so many
        epochs that fall geometrically. A list: these densities."""
        masking: bool = True
        """Momentum factor masking; an entry that was sent starts again without momentum."""
        value_dtype: Literal["fp32", "fp16"] = "fp32"
        """Type of the values on the wire. What `fp16` rounds away stays in the residual."""
        dense_dtype: Literal["fp32", "fp16"] = "fp32"
        """Type of the tensors that are sent dense, on the wire. What `fp16` rounds away is lost."""
        min_numel: Annotated[int, Field(ge=0)] = 0
        """Number of entries below which a tensor is sent dense, as are all of fewer than two dimensions."""
        sampling: Literal["strided", "random", "exact"] = "strided"
        """Which entries the threshold is estimated from. `exact`: all."""
        sample_ratio: float = Field(default=0.01, gt=0, le=1)
        """Share of a tensor that the threshold is estimated from."""
        upper_bound: float = Field(default=1.3, gt=1, allow_inf_nan=False)
        """Entries above the threshold, as a multiple of those to send, from which on it is too low."""
        lower_bound: float = Field(default=0.8, gt=0, lt=1)
        """The same, below which it is too high."""
        max_iterations: int = Field(default=10, ge=0, le=1000)
        """How often a threshold that is too low or too high is changed, by the factor of that bound, at most."""
        resample: bool = True
        """What is done about a threshold that is too low: take the largest entries above it, or, with `false`, raise
        it."""
        seed: int = Field(default=0, ge=0, lt=1 << 63)
        """Seed of the choice of these entries."""
        momentum: float | None = Field(default=None, ge=0, lt=1)
        """Momentum of the gradients. null: that of the run's optimizer; where there is none 0.9."""
        nesterov: bool | None = None
        """Whether it is Nesterov's. null: as the run's optimizer has it; else not."""
        clip_norm: float | None = Field(default=None, gt=0)
        """Largest norm of the mean gradient, for which each rank clips its own at clip_norm / sqrt(world). null: as the
        run's optimizer has it; else no clipping."""

        @field_validator("warmup", mode="before")
        @classmethod
        def _known_warmup(cls, value: Any) -> Any:
            """Raise one error in place of one for each kind of warm-up that the value is not."""
            is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1000
            is_list = isinstance(value, list | tuple) and all(
                isinstance(one, int | float) and not isinstance(one, bool) and 0 < one <= 1 for one in value
            )
            if value in ("paper", "none") or is_count or is_list:
                return tuple(map(float, value)) if isinstance(value, list | tuple) else value
            raise ValueError("expected 'paper', 'none', a number of epochs, or a list of densities in (0, 1]")

    options: Any

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self._schedule = warmup_schedule(options)
        self._density = codecs.warmup_density(0, density=options.density, schedule=self._schedule)
        self._set_momentum(options.momentum, options.nesterov, options.clip_norm)
        self._parameters: Mapping[str, Tensor] = {}  # all of them, where the driver has had them checked
        self._layout: codecs.DgcLayout | None = None  # known with the first gradients
        self._state: codecs.DgcState
        self._dense: codecs.DenseMomentum
        self._flat: Tensor  # the mean, in the order of the layout
        self._own: dict[str, Tensor] = {}  # views into the state
        self._shared: dict[str, Tensor] = {}  # into the momentum of the dense tensors
        self._sent = b""  # of this step, until it counts
        self._to_restore: tuple[Tensor, Tensor, int] | None = None  # U, V and steps as they were before this step
        self._before: dict[str, Tensor] = {}  # what this step may have changed, until it counts
        self._absent: set[str] = set()  # names of tensors that are not in the bucket of this step

    def _set_momentum(self, momentum: float | None, nesterov: bool | None, clip_norm: float | None) -> None:
        options = self.options
        self._config = codecs.DgcConfig(
            density=options.density,
            momentum=0.9 if momentum is None else momentum,
            nesterov=bool(nesterov),
            clip_norm=clip_norm,
            world=self.place.world,
            masking=options.masking,
            sampling=options.sampling,
            sample_ratio=options.sample_ratio,
            upper_bound=options.upper_bound,
            lower_bound=options.lower_bound,
            max_iterations=options.max_iterations,
            resample=options.resample,
            min_numel=options.min_numel,
            value_dtype=options.value_dtype,
            dense_dtype=options.dense_dtype,
        )

    @property
    def density(self) -> float:
        """Share of the entries that the last step has sent; a warm-up changes it from epoch to epoch."""
        return self._density

    @property
    def needs_epoch(self) -> bool:
        """Whether there is a warm-up."""
        return bool(self._schedule)

    @property
    def any_dtype(self) -> bool:
        """Whatever the type of the gradients, what is kept and sent is float32."""
        return True

    def check(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        super().check(parameters, optimizer)
        self._parameters = parameters
        groups = optimizer.param_groups
        if not isinstance(optimizer, codecs.DgcSgd) and any("betas" in one or one.get("momentum") for one in groups):
            raise ConfigError(
                f"dgc gives the gradients their momentum before they are sent: it needs an optimizer without momentum, "
                f"got {type(optimizer).__name__}. Use torch.optim.SGD, and dgc's own momentum, or codecs.DgcSgd, which "
                f"gives momentum to weight decay alone"
            )

    def make_optimizer(self, parameters: Mapping[str, Tensor], settings: Any) -> torch.optim.Optimizer:
        """SGD that adds no momentum to the gradients: by these settings they have it before they are sent."""
        if dampening := getattr(settings, "dampening", 0):
            raise ConfigError(f"dgc has no dampening of its momentum: set optimizer.dampening=0, got {dampening}")
        options = self.options
        given = {name: getattr(options, name) for name in ("momentum", "nesterov", "clip_norm")}
        self._set_momentum(**{n: getattr(settings, n) if value is None else value for n, value in given.items()})
        return codecs.DgcSgd(
            parameters.values(),
            lr=settings.lr,
            momentum=self._config.momentum,
            nesterov=self._config.nesterov,
            weight_decay=settings.weight_decay,
        )

    def regroup(self, place: Place) -> None:
        super().regroup(place)
        self._config = dataclasses.replace(self._config, world=place.world)

    # The step

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        layout, config = self._prepared(bucket.tensors), self._config
        if step.active < self.place.world:
            more = self.place.world / step.active
            bucket.flat.mul_(more)
            if config.clip_norm is not None:  # of the mean over those that have data: as they are multiplied, so is it
                config = dataclasses.replace(config, clip_norm=config.clip_norm * more)
        self._density = codecs.warmup_density(step.epoch, density=self.options.density, schedule=self._schedule)
        gradients = [bucket.tensors.get(slot.name) for slot in layout.slots]
        self._absent = {slot.name for slot in layout.slots} - bucket.tensors.keys()
        self._before = {name: one.clone() for name, one in self._own.items() if name[2:] in self._absent}
        if self.may_give_up:
            self._to_restore = self._state.U.clone(), self._state.V.clone(), self._state.steps
        self._sent, self._state = codecs.dgc_step(gradients, self._state, config, density=self._density)
        messages = yield AllGather("dgc", torch.frombuffer(bytearray(self._sent), dtype=torch.uint8))
        mean = codecs.combine_dgc([message.numpy().data for message in messages], layout, out=self._flat)
        self.not_finite = mean.skipped_by
        if mean.skipped_by:
            bucket.flat.fill_(math.nan)
            return
        self._before |= {name: one.clone() for name, one in self._shared.items()}
        self._dense = codecs.dense_momentum_step(mean, self._dense, self._config)
        for slot, gradient in zip(layout.slots, mean.gradients(), strict=True):
            if slot.name in bucket.tensors:
                bucket.tensors[slot.name].copy_(gradient)

    def commit(self) -> None:
        self._put_back(self._absent)

    def roll_back(self) -> None:
        if self._sent:
            self._state = codecs.undo_step(self._sent, self._state)
        self._put_back({name[2:] for name in self._before})

    def give_up(self) -> None:
        """Nothing of the step stays, other than where all ranks skip it: its gradients come again."""
        if self._to_restore is not None:
            momentum, residual, steps = self._to_restore
            self._state.U.copy_(momentum)
            self._state.V.copy_(residual)
            self._state, self._sent = dataclasses.replace(self._state, steps=steps), b""
        self.roll_back()

    def _put_back(self, names: Set[str]) -> None:
        """Make what is kept for these tensors what it was before the step. The step is over."""
        for name, before in self._before.items():
            if name[2:] in names:
                {**self._own, **self._shared}[name].copy_(before)
        self._sent, self._before, self._to_restore = b"", {}, None

    # Its state: U and V of each compressed tensor, M of each dense one, in the shape of the tensor

    def _prepared(self, tensors: Mapping[str, Tensor]) -> codecs.DgcLayout:
        """The layout of the tensors; the first time with buffers, which take over the state that was loaded."""
        if self._layout is not None:
            return self._layout
        layout = codecs.DgcLayout.of((self._parameters or tensors).items(), min_numel=self.options.min_numel)
        loaded = self.memory.tensors(self.own)
        steps, seed = loaded.pop("samples/place", torch.tensor([0, self.options.seed])).tolist()
        state = codecs.DgcState.zeros(layout, seed=seed)
        self._state = dataclasses.replace(state, steps=steps)
        self._dense = codecs.DenseMomentum.zeros(layout)
        self._flat = torch.empty(layout.dim, dtype=torch.float32)
        for slot in layout.slots:
            parts = {"U": state.U, "V": state.V} if slot.is_sparse else {"M": self._dense.M}
            start = slot.start if slot.is_sparse else slot.start - layout.sparse_elems
            views = self._own if slot.is_sparse else self._shared
            for kind, flat in parts.items():
                views[f"{kind}/{slot.name}"] = flat[start : start + slot.numel].view(slot.shape)
        _fill(self._own, loaded)
        _fill(self._shared, self.memory.tensors(self.shared))
        self.memory = base.Memory()
        self._layout = layout
        return layout

    def own_state(self) -> dict[str, Tensor]:
        if self._layout is None:
            return super().own_state()
        return {**self._own, "samples/place": torch.tensor([self._state.steps, self._state.seed])}

    def shared_state(self) -> dict[str, Tensor]:
        return super().shared_state() if self._layout is None else dict(self._shared)

    def load_state(self, own: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        """The inverse. Raises ValueError: it does not fit, or is damaged."""
        super().load_state(own, shared)
        place = self.memory.find("samples", "place")
        if place is not None and (place.dtype != torch.int64 or place.shape != (2,) or int(place.min()) < 0):
            raise ValueError(f"state 'samples/place' must be the numbers of steps and the seed, got {place}")
        self._layout, self._own, self._shared = None, {}, {}
        self._sent, self._before, self._to_restore = b"", {}, None
        if self._parameters:
            self._prepared(self._parameters)


def _fill(views: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy what was saved into the buffers; where nothing was they stay as they are.

    Raises:
        ValueError: it was saved for other tensors, or with another min_numel.
    """
    for name in views.keys() | saved.keys() if saved else ():
        here, there = views.get(name), saved.get(name)
        if here is None or there is None or here.shape != there.shape or here.dtype != there.dtype:
            shapes = [None if one is None else (tuple(one.shape), one.dtype) for one in (here, there)]
            raise ValueError(f"saved state of dgc: {name} is {shapes[1]}, the model and min_numel need {shapes[0]}")
        here.copy_(there)


def warmup_schedule(options: Any) -> tuple[float, ...]:
    """Densities of the first epochs, of ``Dgc.Options``."""
    match options.warmup:
        case "paper":
            return codecs.PAPER_WARMUP
        case "none":
            return ()
        case int(num_epochs):
            return codecs.geometric_warmup(num_epochs, density=options.density)
        case densities:
            return tuple(densities)
