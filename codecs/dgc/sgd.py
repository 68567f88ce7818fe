"""What comes after the mean: momentum for the dense tensors, and an optimizer that adds none to the others.

The compressed tensors had their momentum before they were sent (momentum correction), the dense ones get it here, once,
from the mean. So no gradient has momentum twice or never, and at density 1 all of this is ``torch.optim.SGD`` with
momentum, since momentum is linear and commutes with the mean.

All arithmetic here is on what every rank holds, so it is of separate multiplications and additions: a fused one
(``add_`` with ``alpha``) rounds once where the processor can, twice where it cannot, and replicas on two kinds of
processors would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from gradbus.codecs.dgc.config import DgcConfig, DgcLayout, check_state_dict
from gradbus.codecs.dgc.wire import DgcMean


@dataclass(frozen=True, slots=True, eq=False)
class DenseMomentum:
    """Momentum of the dense tensors: ``M`` float32, shape (dense_elems,). Equal on all ranks: save it once."""

    layout: DgcLayout
    M: Tensor

    @classmethod
    def zeros(cls, layout: DgcLayout, *, device: torch.device | str = "cpu") -> Self:
        return cls(layout, torch.zeros(layout.dense_elems, dtype=torch.float32, device=device))

    def state_dict(self) -> dict[str, Any]:
        """``M`` as it is, not copied, and the layout's digest."""
        return {"M": self.M, "layout": f"{self.layout.digest:016x}"}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> Self:
        """The momentum as saved, in the buffer of this one.

        Raises:
            ValueError: saved for another layout, or damaged; then nothing is changed.
        """
        self.M.copy_(check_state_dict(saved, self.layout, {"M": self.layout.dense_elems})["M"])
        return self


@torch.no_grad()
def dense_momentum_step(mean: DgcMean, momentum: DenseMomentum, config: DgcConfig) -> DenseMomentum:
    """Replace the dense tensors in ``mean`` by their momentum, in place; nothing in a step that is skipped.

    With a = the mean: ``M <- m M + a``, out = M; Nesterov: ``M <- m (M + a)``, out = M + a. Consumes ``momentum``.
    """
    if mean.layout.digest != momentum.layout.digest:
        raise ValueError("dense_momentum_step: mean and momentum are of different layouts")
    if mean.skipped_by:
        return momentum
    M, a = momentum.M, mean.flat[mean.layout.sparse_elems :]
    if config.nesterov:
        M.add_(a.to(M.device)).mul_(config.momentum)
        a.add_(M)
    else:
        M.mul_(config.momentum).add_(a.to(M.device))
        a.copy_(M)
    return momentum


class DgcSgd(torch.optim.Optimizer):
    """SGD for gradients that carry their momentum already; only weight decay has momentum here.

    ``p <- p - lr * (p.grad + d)``. With a buffer w per parameter and c = 1 - dampening (1 in the first step):
    ``w <- momentum * w + c * weight_decay * p`` and d = w; Nesterov: d = ``weight_decay * p + momentum * w``.
    This is the part of ``torch.optim.SGD`` that weight decay takes in its momentum buffer.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        """Arguments as of ``torch.optim.SGD``; ``momentum`` and ``nesterov`` as in :class:`DgcConfig`.

        ``dampening`` acts on weight decay alone.
        """
        if lr < 0 or not 0 <= momentum < 1 or weight_decay < 0:
            raise ValueError(
                f"DgcSgd: expected lr >= 0, momentum in [0, 1), weight_decay >= 0, got {lr}, {momentum}, {weight_decay}"
            )
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(f"DgcSgd: nesterov needs momentum > 0 and dampening 0, got {momentum}, {dampening}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Change the parameters that have a gradient; gradients are only read."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                out = p.grad
                if group["weight_decay"] != 0:
                    out = self._decay(p, group).add_(out)
                p.sub_(out * group["lr"])
        return loss

    def _decay(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """d of the class's text, a new tensor: the buffer itself would be changed by adding the gradient to it."""
        m: float = group["momentum"]
        decay: Tensor = p * group["weight_decay"]
        if m == 0:
            return decay
        state = self.state[p]
        w: Tensor | None = state.get("decay_momentum")
        if w is None:
            w = state["decay_momentum"] = decay.clone()
        else:
            w.mul_(m).add_(decay * (1 - group["dampening"]))
        return decay.add_(w * m) if group["nesterov"] else w.clone()
