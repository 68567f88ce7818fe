"""Deep gradient compression: each step sends the largest 0.1 % of the accumulated velocity and keeps the rest.

Lin et al., "Deep Gradient Compression", ICLR 2018 (arXiv:1712.01887): momentum correction and local gradient clipping
(section 3.2), momentum factor masking (section 3.3). ``docs/dgc.md`` tells where this differs from the paper and from
the authors' implementation.

    layout = DgcLayout.of(model.named_parameters(), min_numel=config.min_numel)  # the same on all ranks
    state, dense = DgcState.zeros(layout), DenseMomentum.zeros(layout)
    payload, state = dgc_step([p.grad for p in params], state, config, density=warmup_density(epoch))
    mean = combine_dgc(payloads_of_all_ranks, layout)     # in rank order, the own one among them
    if mean.skipped_by:
        state = undo_step(payload, state)                 # NaN or infinity: no rank steps
    else:
        dense = dense_momentum_step(mean, dense, config)
        mean.write_to(params)
        optimizer.step()                                  # DgcSgd: no second momentum
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from gradbus.codecs.base import Payload, are_finite
from gradbus.codecs.dgc.config import DgcConfig, DgcLayout, Slot, check_density, check_state_dict
from gradbus.codecs.dgc.wire import add_entries, decode_dgc, encode_dgc, encode_non_finite
from gradbus.codecs.sparse import top_k


@dataclass(frozen=True, slots=True, eq=False)
class DgcState:
    """Momentum ``U`` and residual ``V`` (accumulated velocity not yet sent): float32, shape (sparse_elems,).

    ``steps`` and ``seed`` place the samples, so that a restored state goes on bit-equal. Save one per rank. After a
    change of the world size either drop it, or send it in full with a step at density 1, before the change.
    """

    layout: DgcLayout
    U: Tensor
    V: Tensor
    steps: int = 0
    seed: int = 0

    @classmethod
    def zeros(cls, layout: DgcLayout, *, device: torch.device | str = "cpu", seed: int = 0) -> Self:
        """The state before the first step. ``seed`` is 0 .. 2**64 - 1 and need not differ between ranks."""
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be 0 .. 2**64 - 1, got {seed}")
        U, V = (torch.zeros(layout.sparse_elems, dtype=torch.float32, device=device) for _ in range(2))
        return cls(layout, U, V, seed=seed)

    def state_dict(self) -> dict[str, Any]:
        """``U`` and ``V`` as they are, not copied; ``steps``, ``seed`` and ``layout`` are plain numbers and text."""
        layout = f"{self.layout.digest:016x}"
        return {"U": self.U, "V": self.V, "steps": self.steps, "seed": self.seed, "layout": layout}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> Self:
        """The state as saved, in the buffers of this one, which is used up.

        Raises:
            ValueError: saved for another layout, or damaged; then nothing is changed.
        """
        tensors = check_state_dict(saved, self.layout, dict.fromkeys("UV", self.layout.sparse_elems))
        steps, seed = saved.get("steps"), saved.get("seed")
        if (
            not isinstance(steps, int)
            or not isinstance(seed, int)
            or not (0 <= steps < 1 << 63 and 0 <= seed < 1 << 64)
        ):
            raise ValueError(
                f"saved state: steps must be a whole number of 63 bits, seed one of 64, got {steps!r}, {seed!r}"
            )
        self.U.copy_(tensors["U"])
        self.V.copy_(tensors["V"])
        return replace(self, steps=steps, seed=seed)


@torch.no_grad()
def dgc_step(
    grads: Sequence[Tensor | None], state: DgcState, config: DgcConfig, *, density: float | None = None
) -> tuple[bytes, DgcState]:
    """One step of one rank: the message for all ranks, this one included, and the state after it.

    Consumes ``state``: its buffers are reused. The gradients are only read. Dense tensors of the layout leave no trace
    in the state; their momentum comes after the mean (:func:`gradbus.codecs.dense_momentum_step`).

    With NaN or infinity in any gradient the state stays as it is, and the message holds that mark alone. So it does if
    the accumulation overflows float32; the entries that overflowed are set to 0.

    Args:
        grads: the mean gradients of this rank's batch, in the order of the layout; any float dtype and device. None
            counts as zeros: the rank has nothing new, yet its momentum goes on and its residual may be sent.
        density: of this step, as a warm-up wants it; by default the config's. At 1 no residual is left.

    Raises:
        ValueError: gradients that do not fit the layout; then nothing has been changed.
    """
    layout, U, V = state.layout, state.U, state.V
    density = config.density if density is None else check_density(density)
    flat = _flat_gradients(grads, layout, U.device)
    present = [g for g in flat if g is not None]
    if not are_finite(present):
        return encode_non_finite(layout), state
    scale = _clip_scale(present, config)

    dense = torch.zeros(layout.dense_elems, dtype=torch.float32, device=U.device)
    for slot, g in zip(layout.slots, flat, strict=True):
        here = slice(slot.start, slot.stop)
        if slot.is_sparse:
            _accumulate(U[here], V[here], g, scale, config)
        elif g is not None:
            torch.mul(g, scale, out=dense[slot.start - layout.sparse_elems : slot.stop - layout.sparse_elems])
    state = replace(state, steps=state.steps + 1)
    if not are_finite([V]):  # not of U: what overflows there is in V by now
        U[~U.isfinite() | ~V.isfinite()] = 0
        V[~V.isfinite()] = 0
        return encode_non_finite(layout), state

    chosen, masked = [torch.empty(0, dtype=torch.int64, device=U.device)], []
    for position, slot in enumerate(layout.slots):
        if not slot.is_sparse:
            continue
        plan = plan_sampling(slot.numel, density, config.sample_ratio)
        draw = _draw(state, position)
        chosen.append(select(V[slot.start : slot.stop], plan, config, draw) + slot.start)
        if config.masking and plan.k < slot.numel:
            # Masking keeps old momentum from pushing an entry that was sent late. Where all are sent, none is late,
            # and masking would leave a tensor without any momentum.
            masked.append(chosen[-1])
    indices = torch.cat(chosen)
    values = V[indices]
    payload, decoded = encode_dgc(
        layout, dense, indices, values, value_dtype=config.value_dtype, dense_dtype=config.dense_dtype
    )
    V[indices] = values - decoded if config.residual == "exact" else 0.0  # sent, so no longer residual
    if masked:
        U[torch.cat(masked)] = 0
    return payload, state


@torch.no_grad()
def undo_step(payload: Payload, state: DgcState) -> DgcState:
    """Undo a step that all ranks skip: the entries in the own ``payload`` are added to the residual again.

    The gradients of dense tensors are dropped with the step, as is momentum that was masked. Consumes ``state``.
    """
    add_entries(state.V, decode_dgc(payload, state.layout))
    return state


def _accumulate(u: Tensor, v: Tensor, g: Tensor | None, scale: float, config: DgcConfig) -> None:
    """Momentum correction (section 3.2): u and v, shape (n,), take in ``scale * g`` in place."""
    m = config.momentum
    if g is None:
        v.add_(u.mul_(m))
    elif config.nesterov:
        u.add_(g, alpha=scale).mul_(m)
        v.add_(u).add_(g, alpha=scale)
    elif scale == 1.0:
        v.add_(torch.add(g, u, alpha=m, out=u))  # m * u + g in one pass over the memory
    else:
        v.add_(u.mul_(m).add_(g, alpha=scale))


def _flat_gradients(grads: Sequence[Tensor | None], layout: DgcLayout, device: torch.device) -> list[Tensor | None]:
    """float32, shape (n,), on one device; views where the gradients allow it."""
    if len(grads) != len(layout.slots):
        raise ValueError(f"grads: expected {len(layout.slots)} in the order of the layout, got {len(grads)}")
    return [None if g is None else _flat(g, slot, device) for g, slot in zip(grads, layout.slots, strict=True)]


def _flat(g: Tensor, slot: Slot, device: torch.device) -> Tensor:
    if tuple(g.shape) != slot.shape or not g.is_floating_point() or g.layout != torch.strided:
        raise ValueError(
            f"grads: {slot.name!r} must be dense, of floating point and shape {slot.shape}, "
            f"got {g.dtype}, {tuple(g.shape)}, {g.layout}"
        )
    return g.detach().reshape(-1).to(device, torch.float32)


def _clip_scale(tensors: list[Tensor], config: DgcConfig) -> float:
    """Local gradient clipping (section 3.2): what this rank's gradients are multiplied by, before the accumulation.

    By the norm over all tensors, at clip_norm / sqrt(world): if N ranks have independent gradients of norm c each, the
    norm of their sum is about sqrt(N) c.
    """
    if config.clip_norm is None or not tensors:
        return 1.0
    norm = float(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).double().norm())
    if math.isinf(norm):  # squares above 3.4e38
        norm = float(torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]).norm())
    limit = config.clip_norm / math.sqrt(config.world)
    return limit / norm if norm > limit else 1.0


def _draw(state: DgcState, position: int) -> int:
    """A random number below 2**63 for one tensor in one step, from the state alone."""
    digest = hashlib.blake2b(struct.pack("<QQQ", state.seed, state.steps, position), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_FLT_MAX = float(np.finfo(np.float32).max)


class SamplingPlan(NamedTuple):
    """How the threshold of a tensor of n elements is estimated.

    stride: distance of the sampled entries. num_samples: n where everything is looked at, then the selection is exact.
    top: the threshold is the top-th largest of the sample. k: entries to send.
    """

    stride: int
    num_samples: int
    top: int
    k: int


def plan_sampling(n: int, density: float, sample_ratio: float) -> SamplingPlan:
    """The plan for ``n`` >= 1 elements; cheap, so it is made anew each step and follows every change of the density.

    A sample has at least ``ceil(n * sample_ratio)`` entries, and at least ``ceil(2 / density)``, so that two of the
    entries looked for are expected in it. The authors raise ratios below 0.01 to 0.01; here they count as given.
    The stride is odd: rows of a matrix mostly have an even length, and an odd stride does not stay in one column.
    """
    k = min(n, math.ceil(n * density))
    fewest = math.ceil(min(n, 2 / density))
    enough = max(math.ceil(n * sample_ratio), fewest)
    if sample_ratio >= 1.0 or n <= fewest or k == n:
        return SamplingPlan(1, n, k, k)
    stride = math.ceil(n / enough / 32) * 32 + 1
    while n // stride < enough:  # ends at stride 1 at the latest: n >= enough
        stride -= 8
    num_samples = n // stride
    return SamplingPlan(stride, num_samples, math.ceil(num_samples * density), k)


def select(v: Tensor, plan: SamplingPlan, config: DgcConfig, draw: int) -> Tensor:
    """Indices of at most ``plan.k`` entries of ``v``, the largest by magnitude as far as the threshold is exact.

    With a threshold from a sample, between ``lower_bound * k`` and k entries; with "exact", or where the sample would
    be the whole tensor, the top k. More than k above the threshold are cut back to the k largest, among equal ones
    those of lower index. Zeros are never chosen, so a tensor of zeros gives an empty result.

    Args:
        v: float32, shape (n,), finite, any device.
        draw: a random number, 0 <= draw < 2**63: places the sample.

    Returns:
        int64, shape (at most k,), strictly ascending, on the device of ``v``.
    """
    if config.sampling == "exact" or plan.num_samples == v.numel():
        return top_k(v, plan.k).without_zeros().indices
    magnitude = v.abs()
    threshold = _sampled_threshold(magnitude, plan, config, draw)
    chosen = _at_least(magnitude, threshold)
    for _ in range(config.max_iterations):
        count, last = chosen.numel(), threshold
        if count > plan.k:
            if config.resample or count <= config.upper_bound * plan.k:
                break  # cut back below: the exact top k among the chosen
            threshold = _as_float32(threshold * config.upper_bound)
            chosen = chosen[magnitude[chosen] >= threshold]
        elif count < config.lower_bound * plan.k:
            threshold = _as_float32(threshold * config.lower_bound)
            chosen = _at_least(magnitude, threshold) if threshold != last else chosen
        if threshold == last:  # the count is right, or the threshold is 0: more than 1 - density of the entries are
            break
    if chosen.numel() > plan.k:
        chosen = chosen[top_k(magnitude[chosen], plan.k).indices]
    elif not chosen.numel() and threshold > 0:  # raised above everything, as if all entries are equal
        chosen = top_k(magnitude, plan.k).without_zeros().indices
    return chosen


def _sampled_threshold(magnitude: Tensor, plan: SamplingPlan, config: DgcConfig, draw: int) -> float:
    if config.sampling == "strided":
        sample = magnitude[draw % plan.stride :: plan.stride]
    else:
        generator = torch.Generator().manual_seed(draw)
        positions = torch.randint(magnitude.numel(), (plan.num_samples,), generator=generator)
        sample = magnitude[positions.to(magnitude.device)]
    return float(torch.topk(sample, plan.top, sorted=False).values.min())


def _at_least(magnitude: Tensor, threshold: float) -> Tensor:
    """Indices of the entries that reach the threshold and are not 0, ascending."""
    if magnitude.device.type == "cpu":  # numpy compares and counts twice as fast
        array = magnitude.numpy()
        mask = array >= np.float32(threshold) if threshold > 0 else array > 0
        return torch.from_numpy(np.flatnonzero(mask))
    return torch.nonzero(magnitude >= threshold if threshold > 0 else magnitude > 0).squeeze(1)


def _as_float32(threshold: float) -> float:
    """Rounded as the entries are, so that comparing is exact on every device."""
    return float(np.float32(min(threshold, _FLT_MAX)))
