"""Weights to come in the forward passes of a script's model: see :mod:`gradbus.runtime.algorithms.prediction`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.runtime.algorithms.prediction import weights_ahead

LateSteps = Callable[[], Sequence[Mapping[Tensor, Tensor]]]


class PredictedWeights:
    """Has the parameters of a model be ahead from a forward pass, in which gradients are computed, to the next step."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], late: LateSteps, newest: Callable[[], object]
    ) -> None:
        """
        Args:
            optimizers: of the model.
            late: the gradients of this rank, by parameter, of the steps that are still to be applied, oldest first.
            newest: the newest exchange: while it is the same, the weights that were predicted are up to date.
        """
        self._optimizers = optimizers
        self._late = late
        self._newest = newest
        self._ahead = ExitStack()  # when it is closed the parameters have the weights of all ranks
        self._since: object = None  # the newest exchange when they went ahead; None: they are not ahead

    def go_ahead(self, module: nn.Module, *_: Any) -> None:
        """A forward pass begins: have the weights to come until the next step, if gradients are computed."""
        if not (module.training and torch.is_grad_enabled()):
            self.go_back()
        elif self._since is not (newest := self._newest()):  # if they are ahead, a step was left out: they are old
            self.go_back()
            self._since = newest
            late = self._late()
            for optimizer in self._optimizers:
                self._ahead.enter_context(weights_ahead(optimizer, late))

    def go_back(self) -> None:
        """Have the weights that all ranks have, as they do without a prediction, and after each step."""
        self._since = None
        self._ahead.close()
