"""What drivers do to the weights that a rank trains, ``live``, by the result of an exchange of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Algorithm, Step, bucket_of, views_of


@torch.no_grad()
def write_weights(live: Mapping[str, Tensor], flat: Tensor) -> None:
    """Replace all weights. ``flat``: the new ones, shape (n,), one after the other."""
    for name, tensor in views_of(flat, live).items():
        live[name].copy_(tensor)


@torch.no_grad()
def apply_result(
    live: Mapping[str, Tensor], algorithm: Algorithm, step: Step, result: Tensor, before: Tensor | None
) -> Tensor:
    """Replace weights by the result of an exchange, shape (n,). Returns what that has changed, for :func:`take_back`.

    ``before``: the weights as they were exchanged in ``step``, if the rank has trained on since, else None.
    """
    now = bucket_of(live).flat
    made = result if before is None else algorithm.applied_late(step, now, before, result)
    write_weights(live, made)
    return torch.sub(made, now, out=now)  # in place: each of these is as large as the model


def take_back(live: Mapping[str, Tensor], change: Tensor) -> None:
    """Undo what a result has changed; what the rank has trained since stays."""
    write_weights(live, bucket_of(live).flat - change)


@torch.no_grad()
def restart(live: Mapping[str, Tensor], weights_of_joiner: Callable[[Tensor], Tensor]) -> bool:
    """Go on from the weights of the last exchange, if the algorithm, whose function this is, has them: for a rank whose
    own ones are not finite, as after a step that overflowed. Returns whether it has."""
    begun = weights_of_joiner(bucket_of(live).flat)
    if is_usable := are_finite([begun]):
        write_weights(live, begun)
    return is_usable
