"""Deep gradient compression: one message per step and rank, and what it leaves out is remembered. See docs/dgc.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.data_parallel.exchanges.base import OwnState, load_optimizer_tensors, optimizer_tensors
from gradbus.codecs import CodecError
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError, CollectiveError


def warmup_schedule(config: DataParallelConfig) -> tuple[float, ...]:
    """Densities of the first epochs."""
    match config.warmup:
        case "paper":
            return codecs.PAPER_WARMUP
        case "none":
            return ()
        case int(num_epochs):
            return codecs.geometric_warmup(num_epochs, density=config.density)
        case densities:
            return tuple(densities)


class DgcExchange:
    """DGC, and its optimizer without a momentum of its own. See :class:`.base.Exchange`.

    A rank without data sends its residual. The gradients of the others are multiplied by world / active before they
    are accumulated, so that their mean over the world is the mean over those that have data, and the residual of
    steps before keeps the weight it had then.
    """

    name = choice = "dgc"

    def __init__(self, config: DataParallelConfig, group: Group, parameters: Mapping[str, Tensor]) -> None:
        """``parameters``: those that are trained, by name, in the order of the model."""
        self._config = config
        self._group = group
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._schedule = warmup_schedule(config)
        self._dgc = codecs.DgcConfig(
            density=config.density, momentum=config.momentum, nesterov=config.nesterov, clip_norm=config.clip_norm,
            world=group.world, masking=config.masking, sampling=config.sampling, sample_ratio=config.sample_ratio,
            min_numel=config.min_numel, value_dtype=config.value_dtype,
        )  # fmt: skip
        self._layout = codecs.DgcLayout.of(parameters.items(), min_numel=config.min_numel)
        device = self._parameters[0].device
        self._state = codecs.DgcState.zeros(self._layout, device=device, seed=config.seed)
        self._dense = codecs.DenseMomentum.zeros(self._layout, device=device)
        self._flat = torch.empty(self._layout.dim, dtype=torch.float32, device=device)
        self._optimizer = codecs.DgcSgd(
            self._parameters, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )  # fmt: skip
        self.density = config.density
        self._step, self._active = 0, group.world
        self._payload = b""
        self._finite: Tensor | None = None  # the loss of this step, on this rank
        self._handle: CollectiveHandle[list[bytes]] | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """Which tensors are compressed decides what the state is of."""
        return {"min_numel": self._config.min_numel}

    @property
    def in_flight(self) -> Sequence[CollectiveHandle[list[bytes]]]:
        return () if self._handle is None else (self._handle,)

    def start_epoch(self, epoch: int) -> None:
        self.density = codecs.warmup_density(epoch, density=self._config.density, schedule=self._schedule)

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
            "dgc", self._payload, round_id=self._step, timeout_s=self._config.collective_timeout_s
        )
        return [self._handle]

    @property
    def own_is_finite(self) -> bool:
        """Messages say it, so nobody asks."""
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
