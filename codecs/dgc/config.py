"""Options of deep gradient compression, and what all ranks agree on before the first step: the layout."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from gradbus.codecs.index_coding import MAX_DIM


def check_density(density: float) -> float:
    """``density`` if it is a share in (0, 1]."""
    if not 0.0 < density <= 1.0:  # NaN fails as well
        raise ValueError(f"density must be in (0, 1], got {density} (0.001 sends 0.1 %)")
    return density


@dataclass(frozen=True, kw_only=True, slots=True)
class DgcConfig:
    """Options of :func:`gradbus.codecs.dgc_step`; ``docs/dgc.md`` compares the defaults with the paper's.

    All ranks use equal ``momentum`` and ``nesterov``, or their gradients do not add up to one; the rest may differ.
    """

    density: float = 0.001  # share of the entries of each tensor that is sent
    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float | None = None  # of the mean gradient; a rank clips its own at clip_norm / sqrt(world)
    world: int = 1  # ranks that take part; used for clipping only
    masking: bool = True  # momentum factor masking: an entry that was sent starts again without momentum
    sampling: Literal["strided", "random", "exact"] = "strided"
    sample_ratio: float = 0.01  # share of a tensor that the threshold is estimated from, at least 2 / density entries
    upper_bound: float = 1.3  # a threshold that lets more than upper_bound * k through is raised
    lower_bound: float = 0.8  # one that lets fewer than lower_bound * k through is lowered
    max_iterations: int = 10  # of raising and lowering
    resample: bool = True  # too many: take the exact top k of those that came through, and never raise
    min_numel: int = 0  # smaller tensors travel dense, as do all of fewer than two dimensions
    value_dtype: Literal["fp32", "fp16"] = "fp32"
    dense_dtype: Literal["fp32", "fp16"] = "fp32"  # of the tensors that are sent whole; fp16 rounds them for good
    residual: Literal["exact", "authors"] = "exact"  # "authors" forgets what fp16 rounds away

    def __post_init__(self) -> None:
        check_density(self.density)
        self._check(0.0 <= self.momentum < 1.0, "momentum", "in [0, 1)")
        self._check(self.clip_norm is None or 0.0 < self.clip_norm < math.inf, "clip_norm", "None or finite and > 0")
        self._check(self.world >= 1, "world", ">= 1")
        self._check(self.sampling in ("strided", "random", "exact"), "sampling", "'strided', 'random' or 'exact'")
        self._check(0.0 < self.sample_ratio <= 1.0, "sample_ratio", "in (0, 1]")
        self._check(1.0 < self.upper_bound < math.inf, "upper_bound", "finite and > 1")
        self._check(0.0 < self.lower_bound < 1.0, "lower_bound", "in (0, 1)")
        self._check(self.max_iterations >= 0, "max_iterations", ">= 0")
        self._check(self.min_numel >= 0, "min_numel", ">= 0")
        self._check(self.value_dtype in ("fp32", "fp16"), "value_dtype", "'fp32' or 'fp16'")
        self._check(self.dense_dtype in ("fp32", "fp16"), "dense_dtype", "'fp32' or 'fp16'")
        self._check(self.residual in ("exact", "authors"), "residual", "'exact' or 'authors'")

    def _check(self, is_right: bool, name: str, expected: str) -> None:
        if not is_right:
            raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor and its place ``start .. stop`` in the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    is_sparse: bool

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class DgcLayout:
    """Which tensors there are, which of them are compressed, and where each lies in one flat vector.

    The compressed ones come first, ``0 .. sparse_elems``, then the others, ``sparse_elems .. dim``; within both, and in
    ``slots``, in the order of the parameters. The decision rests on shapes alone, so it is taken before any gradient is
    seen and is the same on all ranks; ``digest`` travels in every message and proves it.
    """

    slots: tuple[Slot, ...]
    sparse_elems: int
    dim: int
    digest: int  # 64 bits of SHA-256 over names, shapes and decisions

    @classmethod
    def of(cls, named_parameters: Iterable[tuple[str, Tensor]], *, min_numel: int = 0) -> Self:
        """The layout for ``model.named_parameters()``, or any other names and tensors of floating point.

        Args:
            min_numel: as in :class:`DgcConfig`. Tensors of fewer elements, or of fewer than two dimensions (biases,
                norms: small, and hurt most by delay), are not compressed.

        Raises:
            ValueError: a name given twice, or a tensor that is not of floating point.
        """
        tensors = list(named_parameters)
        names = [name for name, _ in tensors]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"layout: parameter {twice!r} is given twice; a shared parameter is to be named once")
        for name, tensor in tensors:
            if not tensor.is_floating_point():
                raise ValueError(f"layout: parameter {name!r} must be of floating point, got {tensor.dtype}")
        decisions = [tensor.dim() > 1 and tensor.numel() >= max(1, min_numel) for _, tensor in tensors]
        sparse_elems = sum(tensor.numel() for (_, tensor), sparse in zip(tensors, decisions, strict=True) if sparse)
        if sparse_elems > MAX_DIM:
            raise ValueError(f"layout: {sparse_elems} compressed elements, at most 2**40 can be indexed")
        starts = {True: 0, False: sparse_elems}
        slots = []
        for (name, tensor), is_sparse in zip(tensors, decisions, strict=True):
            slots.append(Slot(name, tuple(tensor.shape), starts[is_sparse], tensor.numel(), is_sparse))
            starts[is_sparse] += tensor.numel()
        described = json.dumps([[slot.name, slot.shape, slot.is_sparse] for slot in slots])
        digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:8], "little")
        return cls(tuple(slots), sparse_elems, starts[False], digest)

    @property
    def dense_elems(self) -> int:
        return self.dim - self.sparse_elems

    def slot(self, name: str) -> Slot:
        """The place of one tensor: ``state.U[slot.start : slot.stop].view(slot.shape)``."""
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise KeyError(f"layout has no tensor {name!r}; it has {', '.join(slot.name for slot in self.slots)}")

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """One view per tensor, in the order of the parameters, into ``flat`` of shape (dim,)."""
        if flat.shape != (self.dim,):
            raise ValueError(f"flat must have shape ({self.dim},) for this layout, got {tuple(flat.shape)}")
        return (flat[slot.start : slot.stop].view(slot.shape) for slot in self.slots)


def check_state_dict(saved: object, layout: DgcLayout, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The tensors of a saved state, by name, if it was saved for ``layout``.

    Raises:
        ValueError: another layout, or a tensor that is missing or of another shape or type.
    """
    if not isinstance(saved, dict) or saved.get("layout") != f"{layout.digest:016x}":
        found = saved.get("layout") if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(
            f"saved state is for layout {found}, this model has {layout.digest:016x}: names, shapes or min_numel "
            f"differ; start from zeros instead"
        )
    for name, size in sizes.items():
        tensor = saved.get(name)
        if not isinstance(tensor, Tensor) or tensor.shape != (size,) or tensor.dtype != torch.float32:
            got = f"{tensor.dtype} of {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
            raise ValueError(f"saved state: {name} must be float32 of shape ({size},), got {got}")
    return {name: saved[name] for name in sizes}


# Sparsity 75, 93.75, 98.4375 and 99.6 %, then 99.9 %: a quarter of the share per epoch.
PAPER_WARMUP = (0.25, 0.0625, 0.015625, 0.004)


def warmup_density(epoch: int, *, density: float = 0.001, schedule: Sequence[float] = PAPER_WARMUP) -> float:
    """The density of an epoch, from 0: that of the schedule, and after its end ``density``, which is also its minimum.

    ``schedule``: one density per epoch of warm-up: the paper's by default, any list, or :func:`geometric_warmup`.
    Raises ValueError: a negative epoch, or a density that is not in (0, 1].
    """
    if epoch < 0:
        raise ValueError(f"epoch must be >= 0, got {epoch}")
    check_density(density)
    for step in schedule:
        check_density(step)
    return max(schedule[epoch], density) if epoch < len(schedule) else density


def geometric_warmup(num_epochs: int, *, density: float = 0.001) -> tuple[float, ...]:
    """A schedule of ``num_epochs`` equal factors that would reach ``density`` in the epoch after it.

    Epoch e gets ``density ** ((e + 1) / (num_epochs + 1))``, as the authors' implementation does by default: 0.178,
    0.0316, 0.00562 for three epochs to 0.001.
    """
    if num_epochs < 0:
        raise ValueError(f"num_epochs must be >= 0, got {num_epochs}")
    check_density(density)
    return tuple(density ** ((epoch + 1) / (num_epochs + 1)) for epoch in range(num_epochs))
