"""The best model of a run so far, kept beside the newest checkpoints, in a folder ``best`` of theirs.

It is written as each checkpoint is, whole or not at all, and before the one that it replaces is removed: a crash leaves
the old one, or the new one, or both. A round that is evaluated again after a crash is no better than itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gradbus.actors.federated.controller.early_stop import evaluated_metric
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.controller.saved_run import SavedRun
from gradbus.actors.federated.controller.state import RunState
from gradbus.runtime.checkpoint import CheckpointStore, Meta
from gradbus.runtime.config.federated import InitialCheckpointSettings
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.logs import get_logger

FOLDER = "best"
MAX_METRIC_NAME_CHARS = 1000  # of a checkpoint: a client's metric has 64, and that of a task is a word

log = get_logger("controller")


class Best(Meta):
    """Why a model was kept: the metric, whether ``min`` or ``max`` of it is best, and its value."""

    metric: Annotated[str, Field(max_length=MAX_METRIC_NAME_CHARS)]
    mode: Literal["min", "max"]
    value: Annotated[float, Field(allow_inf_nan=False)]


class SavedBest(SavedRun):
    """The metadata of a kept model: that of a checkpoint, and ``best``."""

    best: Best


class BestModel:
    """Follows the evaluations of a run, and keeps its best model. Its methods may block.

    Attributes:
        best: of the model that is kept; None: there is none. round_id: of that model.
    """

    def __init__(self, settings: InitialCheckpointSettings, state: RunState, *, least_answered: float = 0.0) -> None:
        """Go on with what is kept of this run, with ``keep_best`` set. ``least_answered``: as of an EarlyStop.

        Raises:
            CheckpointError: the folder cannot be used. ConfigError: there is none.
        """
        assert settings.keep_best is not None, "without it there is no best model"
        self._metric, self._mode, self._state = settings.keep_best, settings.best_mode or "min", state
        self._least_answered = least_answered
        self.best: Best | None = None
        self.round_id = 0
        if settings.dir is None:
            raise ConfigError("federated.checkpoint.keep_best needs federated.checkpoint.dir, where the model is kept")
        self._store = CheckpointStore(settings.dir / FOLDER, keep=1, inside=settings.dir)
        try:
            self._go_on()
        except BaseException:
            self._store.close()
            raise

    def _go_on(self) -> None:
        """Take up the newest model that is of this run and of this metric; others are removed."""
        store = self._store
        for round_id in reversed(store.rounds()):
            try:
                saved = SavedBest.of(store.load(round_id, SavedBest.of))
            except CheckpointError:
                store.remove(round_id)  # the log has named it
                continue
            is_known = int(saved.run_id, 16) == self._state.run_id and round_id <= self._state.round_id
            if is_known and self.best is None and (saved.best.metric, saved.best.mode) == (self._metric, self._mode):
                self.best, self.round_id = saved.best, round_id
            else:
                log.info(
                    "best model removed",
                    round=round_id,
                    metric=saved.best.metric,
                    mode=saved.best.mode,
                    value=saved.best.value,
                    why="it is of another run, metric or mode, or not the newest",
                )
                store.remove(round_id)

    def note(self, report: RoundReport) -> None:
        """The newest round was evaluated: keep its model if it is the best one.

        Raises:
            ConfigError: the controller's evaluation lacks the metric. CheckpointError: the model cannot be written.
        """
        value = evaluated_metric(report, self._metric, "federated.checkpoint.keep_best", self._least_answered)
        if value is None or not self._is_better(value):
            return
        best = Best(metric=self._metric, mode=self._mode, value=value)
        self._store.save(self._state.checkpoint_of_weights(best=best.model_dump()))
        self.best, self.round_id = best, report.round_id
        log.info("best model so far", round=report.round_id, metric=self._metric, value=value)

    def _is_better(self, value: float) -> bool:
        if not abs(value) < float("inf"):  # NaN is not, either
            return False
        before = self.best
        return before is None or (value < before.value if self._mode == "min" else value > before.value)

    def close(self) -> None:
        """Let another process use the folder."""
        self._store.close()


def place_of(state_dir: Path) -> Path:
    """Return where the best model of a run is, by the directory of its checkpoints."""
    return state_dir / FOLDER
