"""Which tensors that a client keeps are of the model, and its own: by the first part of the names it keeps them by."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

PERSONAL = "personal."  # tensors of the model that are not shared
OWN_MODEL = "own_model."  # of a rule that trains a second model, such as Ditto: all that training changes


def part_of(kept: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in kept.items() if name.startswith(prefix)}


def own_tensors(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the model that a client has of its own, by their names there: those of the model that its rule
    trains, else its personal ones."""
    for part in (OWN_MODEL, PERSONAL):
        if own := part_of(kept, part):
            return own
    return {}
