"""The loss of the global model on a client's data, before it trains: what q-FedAvg needs to know.

Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (arXiv:1905.10497), Algorithm 2: ``F_k(w)``.
Differs from the paper: in nothing.
"""

from __future__ import annotations

from torch import Tensor

from gradbus.actors.federated.client.rules.base import ClientRule, RoundEnd, RoundStart

LOSS_BEFORE = "loss_before"


class LossBefore(ClientRule):
    """Announces the mean loss of the global model on the client's own data as the metric ``loss_before``."""

    choice = "loss_before"
    metrics = (LOSS_BEFORE,)

    def start(self, begin: RoundStart) -> None:
        self._loss = begin.local_loss()

    def finish(self, local: Tensor) -> RoundEnd:
        return RoundEnd(metrics={LOSS_BEFORE: self._loss})
