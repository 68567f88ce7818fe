"""When the global model is evaluated, and how: off the loop, in the module that lives in the weights."""

from __future__ import annotations

from torch import Tensor

from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.report import Progress
from gradbus.actors.federated.task import EvalOutcome, FederatedTask
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import FederatedConfig


class Evaluation:
    """Evaluates after every so many rounds, and after the last."""

    def __init__(
        self, task: FederatedTask, model: FlatModel, weights: Tensor, compute: ComputeThread, config: FederatedConfig
    ) -> None:
        self._task = task
        self._model = model
        self._weights = weights
        self._compute = compute
        self._config = config

    async def after(self, round_id: int, progress: Progress) -> EvalOutcome | None:
        """Quality of the weights as they are now, after this round; None if it is not due, or if the task has no way to
        tell."""
        every = self._config.eval_every
        if not every or (round_id % every and round_id != self._config.rounds):
            return None
        progress.phase = "evaluating"
        return await self._compute.run(self._evaluate)

    def _evaluate(self) -> EvalOutcome | None:
        self._model.hold(self._weights)
        return self._task.evaluate(self._model.module)
