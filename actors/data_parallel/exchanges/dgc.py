"""Deep gradient compression: one message per step and rank, and what it leaves out is remembered. See docs/dgc.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from gradbus import codecs
from gradbus.actors.data_parallel.exchanges.base import OwnState, load_optimizer_tensors, optimizer_tensors
from gradbus.codecs import CodecError
from gradbus.runtime.choices import Options
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.settings import Fraction
from gradbus.runtime.errors import CheckpointError, CollectiveError

Warmup = Literal["paper", "none"] | int | tuple[float, ...]


class DgcExchangeOptions(Options):
    """Options of DGC; docs/dgc.md compares the defaults with the paper's."""

    density: Fraction = 0.001
    """Share of the entries of a tensor that is sent."""
    warmup: Warmup = "paper"
    """Density of the first epochs. `paper`: 25, 6.25, 1.5625 and 0.4 %. `none`: no warm-up. A number: so many
    epochs that fall geometrically. A list: these densities."""
    masking: bool = True
    """Momentum factor masking; an entry that was sent starts again without momentum."""
    value_dtype: Literal["fp32", "fp16"] = "fp32"
    """Type of the values on the wire."""
    min_numel: Annotated[int, Field(ge=0)] = 0
    """Number of entries below which a tensor is sent dense, as are all of fewer than two dimensions."""
    sampling: Literal["strided", "random", "exact"] = "strided"
    """Which entries the threshold is estimated from. `exact`: all."""
    sample_ratio: Fraction = 0.01
    """Share of a tensor that the threshold is estimated from."""

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


class DgcExchange:
    """DGC, and its optimizer without a momentum of its own. See :class:`.base.Exchange`.

    A rank without data sends its residual. The gradients of the others are multiplied by world / active before they
    are accumulated, so that their mean over the world is the mean over those that have data, and the residual of
    steps before keeps the weight it had then.
    """

    name = choice = "dgc"

    Options = DgcExchangeOptions

    def __init__(
        self, config: DataParallelConfig, group: Group, parameters: Mapping[str, Tensor], **options: Any
    ) -> None:  # fmt: skip
        """``parameters``: those that are trained, by name, in the order of the model. ``options``: as in Options."""
        own, sgd = self.Options(**options), config.optimizer
        self._config, self._options = config, own
        self._group = group
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._schedule = warmup_schedule(own)
        self._dgc = codecs.DgcConfig(
            density=own.density, momentum=sgd.momentum, nesterov=sgd.nesterov, clip_norm=sgd.clip_norm,
            world=group.world, masking=own.masking, sampling=own.sampling, sample_ratio=own.sample_ratio,
            min_numel=own.min_numel, value_dtype=own.value_dtype,
        )  # fmt: skip
        self._layout = codecs.DgcLayout.of(parameters.items(), min_numel=own.min_numel)
        device = self._parameters[0].device
        self._state = codecs.DgcState.zeros(self._layout, device=device, seed=config.seed)
        self._dense = codecs.DenseMomentum.zeros(self._layout, device=device)
        self._flat = torch.empty(self._layout.dim, dtype=torch.float32, device=device)
        self._optimizer = codecs.DgcSgd(
            self._parameters, lr=sgd.lr, momentum=sgd.momentum, nesterov=sgd.nesterov,
            weight_decay=sgd.weight_decay,
        )  # fmt: skip
        self.density = own.density
        self._step, self._active = 0, group.world
        self._payload = b""
        self._finite: Tensor | None = None  # the loss of this step, on this rank
        self._handle: CollectiveHandle[list[bytes]] | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """Which tensors are compressed decides what the state is of."""
        return {"min_numel": self._options.min_numel}

    @property
    def in_flight(self) -> Sequence[CollectiveHandle[list[bytes]]]:
        return () if self._handle is None else (self._handle,)

    def start_epoch(self, epoch: int) -> None:
        self.density = codecs.warmup_density(epoch, density=self._options.density, schedule=self._schedule)

    def begin(self, step: int, active: int) -> None:
        self._step, self._active, self._handle, self._finite = step, active, None, None
        for parameter in self._parameters:
            parameter.grad = None

    def enable_overlap(self, finite: Tensor | None = None) -> None:
        """Which entries are the largest is known only when all are there."""
        self._finite = finite

    def send(self, *, has_data: bool) -> Sequence[CollectiveHandle[list[bytes]]]:
        gradients = [parameter.grad if has_data else None for parameter in self._parameters]
        if self._active < self._group.world:
            scale = self._group.world / self._active
            gradients = [None if gradient is None else gradient.mul_(scale) for gradient in gradients]
        if self._finite is not None and not self._finite:
            gradients[0] = torch.full_like(self._parameters[0], math.nan)
        self._payload, self._state = codecs.dgc_step(gradients, self._state, self._dgc, density=self.density)
        self._handle = self._group.all_gather(
            "dgc", self._payload, round_id=self._step, timeout_s=self._config.timeouts.collective_s
        )
        return [self._handle]

    @property
    def own_is_finite(self) -> bool:
        """Always true: the messages name the ranks that are not finite, so it is not asked for."""
        return True

    def decode(self, results: Sequence[list[bytes]]) -> tuple[int, ...] | None:
        """Raises CollectiveError: a rank's message cannot be read."""
        try:
            mean = codecs.combine_dgc(results[0], self._layout, out=self._flat)
        except CodecError as error:
            raise CollectiveError(f"step {self._step}: {error}") from None
        if mean.skipped_by:
            self._state = codecs.take_back(self._payload, self._state)
            return mean.skipped_by
        self._dense = codecs.dense_momentum_step(mean, self._dense, self._dgc)
        mean.write_to(self._parameters)
        return None

    def apply(self) -> None:
        self._optimizer.step()

    def shared_state(self) -> dict[str, Tensor]:
        return {**optimizer_tensors(self._optimizer, self._names), "dgc/M": self._dense.M}

    def load_shared_state(self, tensors: Mapping[str, Tensor]) -> None:
        load_optimizer_tensors(self._optimizer, self._names, tensors)
        saved = {"M": tensors.get("dgc/M"), "layout": f"{self._layout.digest:016x}"}
        with _fitting("momentum of the dense tensors"):
            self._dense = self._dense.load_state_dict(saved)

    def own_state(self) -> OwnState:
        saved = self._state.state_dict()
        tensors = {f"dgc/{name}": saved.pop(name) for name in "UV"}
        return OwnState(tensors, saved)

    def load_own_state(self, state: OwnState) -> None:
        saved: dict[str, Any] = {**state.meta, **{name: state.tensors.get(f"dgc/{name}") for name in "UV"}}
        with _fitting("what this rank owes"):
            self._state = self._state.load_state_dict(saved)

    def close(self) -> None:
        """No hooks: nothing to let go of."""


@contextmanager
def _fitting(what: str) -> Iterator[None]:
    """Turns the codecs' ValueError about a saved state into a CheckpointError."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{what}: {error}") from None


def warmup_schedule(options: DgcExchangeOptions) -> tuple[float, ...]:
    """Densities of the first epochs."""
    match options.warmup:
        case "paper":
            return codecs.PAPER_WARMUP
        case "none":
            return ()
        case int(num_epochs):
            return codecs.geometric_warmup(num_epochs, density=options.density)
        case densities:
            return tuple(densities)
