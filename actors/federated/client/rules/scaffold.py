"""SCAFFOLD at the client: each step is corrected by the difference of two control variates.

Karimireddy et al., SCAFFOLD, ICML 2020 (arXiv:1910.06378), Algorithm 1 with option II:
``y <- y - lr (g(y) - c_i + c)``, then ``c_i+ = c_i - c + (w - y) / (K lr)``; ``c_i+ - c_i`` is sent beside the model.
:mod:`gradbus.actors.aggregation.scaffold` is the server's half. Differs from the paper: none, with SGD without
momentum; with another optimizer ``(w - y) / (K lr)`` is no mean of gradients, so set ``task.momentum=0``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.optimizer import Optimizer

from gradbus.actors.federated.client.rules.base import ClientRule, RoundEnd, RoundStart
from gradbus.runtime.complex_pairs import from_pairs
from gradbus.runtime.logs import get_logger

CONTROL = "control"

log = get_logger("client")


@lru_cache(maxsize=32)
def _warn(optimizer: str) -> None:
    """Log, once in a process, that this optimizer is not what the algorithm assumes."""
    log.warning(
        "scaffold assumes SGD without momentum",
        optimizer=optimizer,
        effect="the control variates are no mean gradients",
        remedy="set task.momentum=0, or another training rule",
    )


class ControlVariates(ClientRule):
    """Corrects each step by control variates, as SCAFFOLD does; with the strategy of that name."""

    choice = "scaffold"
    sections = (CONTROL,)

    def start(self, begin: RoundStart) -> None:
        if begin.broadcast.shape != begin.base.shape:
            raise ValueError(
                f"{begin.broadcast.numel():,} values came behind a model of {begin.base.numel():,}: expected the "
                f"control variate of the server. Set federated.strategy=scaffold on the controller"
            )
        self._begin = begin
        self._own = begin.state.get(CONTROL, torch.zeros_like(begin.base))  # c_i; zero at a client that joins
        correction = begin.broadcast - self._own
        self._pairs = [(one, from_pairs(correction[place], one).to(one)) for one, place in begin.parameters]

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if type(optimizer) is not SGD or any(group["momentum"] for group in optimizer.param_groups):
            _warn(type(optimizer).__name__)

    @torch.no_grad()
    def before_step(self, model: nn.Module) -> None:
        for parameter, correction in self._pairs:
            if parameter.grad is not None:
                parameter.grad.add_(correction)

    @torch.no_grad()
    def finish(self, local: Tensor) -> RoundEnd:
        begin = self._begin
        change = torch.zeros_like(begin.base)  # stays so for buffers, which have no gradient
        for parameter, place in begin.parameters:
            steps = self.steps_of.get(id(parameter), self.steps)  # K: of its own optimizer, where there are several
            mean_step = (begin.base[place] - local[place]) / (steps * begin.lr)
            change[place] = mean_step - begin.broadcast[place]
        return RoundEnd(sections={CONTROL: change}, state={CONTROL: self._own + change})
