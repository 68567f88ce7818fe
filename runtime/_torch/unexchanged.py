"""Parameters that a rank trains although the ranks do not exchange them, so that each rank's differ from the others'.

What is exchanged is settled when an algorithm is attached to a model: DDP has its buckets then, and algorithms their
memory. A parameter that is unfrozen later, or added to an optimizer, is an error: :class:`UnexchangedParameters` finds
it on the rank that trains it, and :func:`refusal` is what all ranks raise, once each has sent what it has found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradbus.runtime.errors import ConfigError


class UnexchangedParameters:
    """Looks for parameters of one model that are trained and not exchanged."""

    def __init__(self, of_model: Iterable[tuple[str, Tensor]], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """
        Args:
            of_model: its parameters by name. Those that require a gradient now are exchanged.
            optimizers: that change them; empty: not known. Parameters of other modules that they have now are left to
                the script.
        """
        named = list(of_model)
        self._frozen = [(key, one) for key, one in named if not one.requires_grad]
        self._optimizers = optimizers
        self._known = {id(one) for _, one in named}
        self._others = [one for one in self._listed() if id(one) not in self._known]  # held, so that ids stay theirs
        self._known.update(map(id, self._others))

    def find(self) -> list[str]:
        """Return the names of those that are trained by now."""
        listed = self._listed()
        stepped = {id(one) for one in listed}
        found = [key for key, one in self._frozen if one.requires_grad and (not self._optimizers or id(one) in stepped)]
        added = (one for one in listed if id(one) not in self._known and one.requires_grad)
        return found + [f"one of shape {tuple(one.shape)}, new in an optimizer" for one in added]

    def _listed(self) -> list[Tensor]:
        return [one for optimizer in self._optimizers for group in optimizer.param_groups for one in group["params"]]


def refusal(of_ranks: Sequence[Sequence[str]]) -> ConfigError:
    """The error that all ranks raise. ``of_ranks``: what :meth:`UnexchangedParameters.find` gave, in rank order; at
    least one rank has found something."""
    name = next(found[0] for found in of_ranks if found)
    ranks = [rank for rank, found in enumerate(of_ranks) if name in found]
    more = len({one for found in of_ranks for one in found}) - 1
    also = f" (and {more} more)" if more else ""
    return ConfigError(
        f"parameter {name!r}{also} is trained on ranks {ranks}, but was frozen (requires_grad=False) or not in an "
        f"optimizer when the algorithm was attached to the model, so the ranks do not exchange it. Unfreeze and add "
        f"parameters before DistributedDataParallel, with_algorithm, DiLoCo and the hook's state are made, and make "
        f"them again when this changes"
    )
