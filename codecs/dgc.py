"""Deep gradient compression: each step sends the largest 0.1 % of the accumulated velocity and remembers the rest.

Lin et al., "Deep Gradient Compression", ICLR 2018 (arXiv:1712.01887): momentum correction and local gradient clipping
(section 3.2), momentum factor masking (section 3.3). ``docs/dgc.md`` tells where this differs from the paper and from
the authors' implementation.

    layout = DgcLayout.of(model.named_parameters(), min_numel=config.min_numel)  # the same on all ranks
    state, dense = DgcState.zeros(layout), DenseMomentum.zeros(layout)
    payload, state = dgc_step([p.grad for p in params], state, config, density=warmup_density(epoch))
    mean = combine_dgc(payloads_of_all_ranks, layout)     # in rank order, the own one among them
    if mean.skipped_by:
        state = take_back(payload, state)                 # NaN or infinity somewhere: nobody steps
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
from typing import Any, Self

import torch
from torch import Tensor

from gradbus.codecs.dgc_config import DgcConfig, DgcLayout, Slot, check_density, check_state_dict
from gradbus.codecs.dgc_sampling import plan_sampling, select
from gradbus.codecs.dgc_wire import add_entries, decode_dgc, encode_dgc, encode_non_finite
from gradbus.codecs.finite import are_finite
from gradbus.codecs.wire import Payload


@dataclass(frozen=True, slots=True, eq=False)
class DgcState:
    """What one rank remembers: the compressed tensors flat, one after the other as in ``layout``.

    U: momentum, V: accumulated velocity not yet sent; both float32, shape (sparse_elems,). ``steps`` and ``seed`` place
    the samples, so that a restored state goes on bit-equal. It belongs to a rank: save one per rank. After a change of
    the world size either drop it, or send it in full with a step at density 1, before the change.
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

    With NaN or infinity in any gradient the state stays as it is, and the message says only that. If the accumulation
    overflows float32, the message says the same, and the entries that overflowed are forgotten.

    Args:
        grads: the mean gradients of this rank's batch, in the order of the layout; any float dtype and device. None
            counts as zeros: the rank has nothing new, yet its momentum goes on and what it owes may be sent.
        density: of this step, as a warm-up wants it; by default the config's. At 1 everything is sent and owed no more.

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
    payload, decoded = encode_dgc(layout, dense, indices, values, value_dtype=config.value_dtype)
    V[indices] = values - decoded if config.residual == "exact" else 0.0  # sent, so no longer owed
    if masked:
        U[torch.cat(masked)] = 0
    return payload, state


@torch.no_grad()
def take_back(payload: Payload, state: DgcState) -> DgcState:
    """Undo the sending of a step that all ranks skip: the entries in the own ``payload`` are owed again.

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
