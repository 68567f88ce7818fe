"""What is trained while things break: little, at a steady pace, and with results that a checker can compute again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from gradbus.models import ClassificationTask, NoopTask, glyphs, mnist_mlp

_STEP_S = 0.005


class PacedTask(NoopTask):
    """For clients: noise, another for each client and round, that takes ``train_s`` to learn."""

    def __init__(self, dim: int = 5000, train_s: float = 0.2) -> None:
        super().__init__(dim, delta="seeded")
        self._train_s = train_s

    def train(self, model: Any, **arguments: Any) -> Any:
        until_s = time.monotonic() + self._train_s
        while time.monotonic() < until_s and not arguments["should_stop"]():
            time.sleep(_STEP_S)
        return super().train(model, **arguments)


class PacedShards(ClassificationTask):
    """For workers: digits, a batch every ``batch_s``."""

    def __init__(self, batch_s: float = 0.15) -> None:
        super().__init__(mnist_mlp, lambda: glyphs(train=480, test=50), batch_size=8)
        self._batch_s = batch_s

    def batches(self, **where: Any) -> Iterator[Any]:
        for batch in super().batches(**where):
            time.sleep(self._batch_s)
            yield batch
