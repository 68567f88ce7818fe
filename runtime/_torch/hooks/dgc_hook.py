"""Deep gradient compression as a communication hook: :mod:`gradbus.codecs.dgc`, one parameter at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradbus import codecs
from gradbus.codecs.dgc.step import plan_sampling
from gradbus.codecs.dgc.wire import HEADER
from gradbus.codecs.index_coding import max_index_bytes
from gradbus.torch.hooks import wire
from gradbus.torch.hooks.state import HookParameter, HookState, mean_in_rank_order, saved_tensor, whole_number


@dataclass(slots=True, eq=False)
class _Sparse:
    """A compressed parameter. sent: the message of this step, while it can be taken back. before: U and V before this
    step, where this rank has no gradient and perhaps no rank has."""

    state: codecs.DgcState
    sent: bytes = b""
    before: tuple[Tensor, Tensor] | None = None


@dataclass(slots=True, eq=False)
class _Dense:
    """A parameter that is not compressed. before: M before this step, while it can be taken back."""

    momentum: codecs.DenseMomentum
    before: Tensor | None = None


class DgcOptions(TypedDict, total=False):
    """Options of ``codecs.DgcConfig`` that a hook can have; those that are left out have the defaults there."""

    momentum: float
    nesterov: bool
    masking: bool
    min_numel: int
    value_dtype: Literal["fp32", "fp16"]
    sampling: Literal["strided", "random", "exact"]
    sample_ratio: float


class DgcHookState(HookState):
    """Each step sends the largest 0.1 % of the accumulated velocity and remembers the rest.

    Lin et al., "Deep Gradient Compression", ICLR 2018 (arXiv:1712.01887); ``docs/dgc.md`` has the algorithm.

    **Momentum** is in the hook, for compressed and dense parameters alike, so the optimizer must not have one:
    ``torch.optim.SGD(model.parameters(), lr)`` without ``momentum``, or :class:`gradbus.codecs.DgcSgd`, which gives
    momentum to weight decay alone. At density 1 both are SGD with momentum.

    Every parameter has a state of its own, and its samples follow from ``seed``, its name and the number of its steps:
    the result does not depend on how DDP forms buckets. A gradient that is zero on all ranks counts as none, as in
    steps that leave a layer out: its momentum rests, and nothing of the residual is lost. Gradients are not clipped:
    the norm of all of them is not known when the first bucket goes.

    Messages have the same size on all ranks and in all steps of equal density: each parameter may take k values and as
    many bytes as k indices can need at most.
    """

    hook: ClassVar[str] = "dgc"
    has_memory: ClassVar[bool] = True

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]], *, density: float = 0.001, warmup: Sequence[float] = (),
        seed: int = 0, process_group: dist.ProcessGroup | None = None, **options: Unpack[DgcOptions],
    ) -> None:  # fmt: skip
        """
        Args:
            named_parameters, process_group: see :class:`HookState`.
            density: share of each parameter's entries that is sent; at least one.
            warmup: densities of the first epochs, as ``codecs.PAPER_WARMUP`` or ``codecs.geometric_warmup(3)``; then
                call :meth:`start_epoch` at the start of each epoch.
            seed: places the samples; 0 .. 2**64 - 1.
            options: ``momentum`` and others, see :class:`DgcOptions`.

        Raises:
            ValueError: an option out of range, or parameters that this hook cannot take.
        """
        unknown = options.keys() - DgcOptions.__annotations__
        if unknown:
            raise TypeError(f"DgcHookState has no options {sorted(unknown)}; there are {[*DgcOptions.__annotations__]}")
        super().__init__(named_parameters, process_group=process_group, min_numel=options.get("min_numel", 0))
        self._config = codecs.DgcConfig(density=density, **options)
        self._warmup = tuple(warmup)
        codecs.warmup_density(0, density=density, schedule=self._warmup)  # checks the schedule
        self._epoch: int | None = None
        self._density = density
        self._sparse: dict[str, _Sparse] = {}
        self._dense: dict[str, _Dense] = {}
        for member in self._members.values():
            if member.is_compressed:
                own_seed = wire.digest(f"{seed} {member.name}")
                self._sparse[member.name] = _Sparse(codecs.DgcState.zeros(member.layout, seed=own_seed))
            else:
                self._dense[member.name] = _Dense(codecs.DenseMomentum.zeros(member.layout))

    @property
    def density(self) -> float:
        """Of the next step."""
        return self._density

    def start_epoch(self, epoch: int) -> None:
        """The density from now on is that of ``epoch``, counted from 0. Call it on all ranks, between two steps."""
        self._density = codecs.warmup_density(epoch, density=self._config.density, schedule=self._warmup)
        self._epoch = epoch
        self._plans.clear()  # other sizes

    @torch.no_grad()
    def take_back(self) -> None:
        """The gradients of the last step were not used, as when a loss scaler has left it out: what was sent in them
        goes back to the residual. Call it on all ranks, before the next step. Momentum that was masked stays lost."""
        for sparse in self._sparse.values():
            _take_back(sparse)
        for dense in self._dense.values():
            if dense.before is not None:
                dense.momentum.M.copy_(dense.before)
                dense.before = None

    # The hook

    def _options(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self._config), "density": self._density}

    def _section_bytes(self, member: HookParameter) -> int:
        k = plan_sampling(member.numel, self._density, self._config.sample_ratio).k
        value_bytes = 2 if self._config.value_dtype == "fp16" else 4
        return wire.payload_section_bytes(HEADER.size + value_bytes * k + max_index_bytes(member.numel, k))

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """See :meth:`HookState.exchange`. Raises RuntimeError: there is a warm-up, and the epoch is not known."""
        if self._warmup and self._epoch is None:
            raise RuntimeError(
                "hooks.dgc: with warmup, call DgcHookState.start_epoch(epoch) at the start of each epoch"
            )
        return super().exchange(bucket)

    def _encode(self, member: HookParameter, gradient: Tensor, section: Tensor) -> None:
        sparse = self._sparse[member.name]
        is_absent = not bool(gradient.any())
        sparse.before = (sparse.state.U.clone(), sparse.state.V.clone()) if is_absent else None
        shaped = None if is_absent else gradient.view(member.shape)
        sparse.sent, sparse.state = codecs.dgc_step([shaped], sparse.state, self._config, density=self._density)
        # The codec's own message has whether it is finite.
        wire.write_payload(section, sparse.sent, is_absent=is_absent, is_finite=True)

    def _decode(self, member: HookParameter, sections: Sequence[Tensor], gradient: Tensor) -> None:
        sparse = self._sparse[member.name]
        payloads = [wire.read_payload(section) for section in sections]
        before, sparse.before = sparse.before, None
        if before is not None and all(payload.is_absent for payload in payloads):
            sparse.state.U.copy_(before[0])
            sparse.state.V.copy_(before[1])
            sparse.sent = b""
            gradient.zero_()
            return
        mean = codecs.combine_dgc([payload.data for payload in payloads], member.layout, out=gradient)
        if mean.skipped_by:
            _take_back(sparse)
            gradient.fill_(torch.nan)

    def _decode_dense(self, member: HookParameter, parts: Sequence[Tensor], gradient: Tensor) -> None:
        dense = self._dense[member.name]
        dense.before = None
        mean_in_rank_order(parts, gradient)
        if not bool(gradient.isfinite().all()) or not any(bool(part.any()) for part in parts):
            return  # the momentum rests
        dense.before = dense.momentum.M.clone()
        codecs.dense_momentum_step(codecs.DgcMean(member.layout, gradient, ()), dense.momentum, self._config)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`HookState.state_dict`: per compressed parameter U, V and the number of steps, per dense one M."""
        return {**super().state_dict(), "epoch": self._epoch}

    def _saved(self, member: HookParameter) -> dict[str, Any]:
        if not member.is_compressed:
            return {"M": member.shaped(self._dense[member.name].momentum.M)}
        state = self._sparse[member.name].state
        return {
            "U": member.shaped(state.U), "V": member.shaped(state.V), "steps": state.steps, "seed": state.seed,
        }  # fmt: skip

    @torch.no_grad()
    def _load(self, parameters: Mapping[HookParameter, Mapping[str, Any]], saved: Mapping[str, Any]) -> None:
        epoch = None if saved.get("epoch") is None else whole_number(saved, "epoch")
        sparse: dict[str, dict[str, Any]] = {}
        dense: dict[str, Tensor] = {}
        for member, content in parameters.items():
            if member.is_compressed:
                sparse[member.name] = {
                    "U": saved_tensor(content, "U", member), "V": saved_tensor(content, "V", member),
                    "steps": whole_number(content, "steps"), "seed": whole_number(content, "seed"),
                    "layout": f"{member.layout.digest:016x}",
                }  # fmt: skip
            else:
                dense[member.name] = saved_tensor(content, "M", member)
        for name, content in sparse.items():
            self._sparse[name] = _Sparse(self._sparse[name].state.load_state_dict(content))
        for name, momentum in dense.items():
            self._dense[name].momentum.M.copy_(momentum)
            self._dense[name].before = None
        if epoch is not None:
            self.start_epoch(epoch)


def _take_back(sparse: _Sparse) -> None:
    """Put what was sent back to the residual."""
    if sparse.sent:
        sparse.state = codecs.take_back(sparse.sent, sparse.state)
        sparse.sent = b""
