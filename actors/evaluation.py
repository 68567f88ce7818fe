"""When the global model is evaluated, and how: off the loop, in the module that lives in the weights."""

from __future__ import annotations

from torch import Tensor

from gradbus.actors.flat_model import FlatModel
from gradbus.actors.task import EvalOutcome, FederatedTask
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.settings import FederatedConfig


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

    def due(self, round_id: int) -> bool:
        """Whether the model after this round is to be evaluated."""
        every = self._config.eval_every
        return every > 0 and (round_id % every == 0 or round_id == self._config.rounds)

    async def run(self) -> EvalOutcome | None:
        """Quality of the weights as they are now; None if the task has no way to tell."""
        return await self._compute.run(self._evaluate)

    def _evaluate(self) -> EvalOutcome | None:
        if self._model.read().data_ptr() != self._weights.data_ptr():
            self._model.write(self._weights)
        return self._task.evaluate(self._model.module)
