"""Lightning's Trainer as a client of a federated run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradbus.actors.trainers.ranks import Ranks
from gradbus.actors.trainers.round_counts import length_of
from gradbus.actors.trainers.rounds_callback import RoundsCallback
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as missing:
    try:  # the same library by its older name
        from pytorch_lightning import Callback
    except ModuleNotFoundError:
        raise missing from None

STRATEGIES = (
    "SingleDeviceStrategy",
    "DDPStrategy",
)  # by name: lightning and pytorch_lightning have classes of their own
SHARDED = ("DeepSpeedStrategy",)  # derived from DDPStrategy
REMEDY = "max_epochs=-1 and max_steps=-1 have the Trainer go on until the run ends"

log = get_logger("client")


class LightningCallback(RoundsCallback, Callback):  # type: ignore[misc]  # a set-up need not have Lightning's types
    """Takes part in a federated run with a LightningModule.

    ``fit`` joins the run before its first batch. At the end of each round, which is an epoch unless the controller or
    an argument says otherwise, the weights are sent with the number of samples seen, the mean training loss, and the
    metrics of ``trainer.callback_metrics``, and those of the next round are loaded. When the run has ended, the Trainer
    stops, and the module has the last global model.
    """

    _step = 0  # the newest that was looked at

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raises ConfigError: the strategy of the Trainer spreads the model over its devices."""
        kinds = {kind.__name__ for kind in type(trainer.strategy).__mro__}
        if stage == "fit" and (kinds.isdisjoint(STRATEGIES) or not kinds.isdisjoint(SHARDED)):
            raise ConfigError(
                f"FederatedCallback exchanges whole models: it works on one device and with DDPStrategy, got "
                f"{type(trainer.strategy).__name__}. Choose Trainer(strategy='ddp'), or one device for each client"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the run, and load the model of its first round. This is behind the check of the validation loop."""
        if trainer.fast_dev_run:
            log.warning("not joined", reason="fast_dev_run: the Trainer tries the code with a batch or two")
            return
        # Lightning only notes SIGTERM, and ends at its next batch.
        self._rounds.is_interrupted = partial(getattr, trainer, "received_sigterm", False)
        ranks, self._step = Ranks(trainer.global_rank, trainer.world_size), trainer.global_step
        if not self._rounds.begin(pl_module, trainer.optimizers, step=self._step, ranks=ranks):
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a batch, and end the round if it is one of steps."""
        if not self._rounds.is_running:
            return
        self._rounds.counts.add_batch(self._samples_in(batch), _loss_of(outputs, _divisor_of(trainer, pl_module)))
        if trainer.global_step == self._step:  # gradients are accumulated: those of this round are not stepped yet
            return
        self._step = trainer.global_step
        if self._rounds.is_unwanted or self._rounds.is_due(self._step):
            self._advance(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the round if it is one of epochs. This is before checkpoints are saved."""
        if not self._rounds.is_running:
            return
        self._rounds.counts.add_epoch()
        if self._rounds.is_due(trainer.global_step):
            self._advance(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the run, if it goes on."""
        self._rounds.stop(REMEDY)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run, with the error as the reason."""
        self._rounds.leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the run, where ``fit`` had nothing to train."""
        self._rounds.leave()

    def _advance(self, trainer: Any, pl_module: nn.Module) -> None:
        goes_on = self._rounds.advance(
            pl_module,
            trainer.callback_metrics,
            step=trainer.global_step,
            dataset=length_of(trainer.train_dataloader),
            is_last=_ends_by_itself(trainer),
        )
        if not goes_on:
            trainer.should_stop = True


def _loss_of(outputs: Any, divisor: int) -> Tensor | None:
    """The loss that a training step has returned; None: it has not, as with some manual optimizations."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() * divisor if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _divisor_of(trainer: Any, pl_module: Any) -> int:
    """By what Lightning has divided a loss that it hands to callbacks: where it accumulates gradients."""
    return int(trainer.accumulate_grad_batches) if pl_module.automatic_optimization else 1


def _ends_by_itself(trainer: Any) -> bool:
    """Whether a limit of the Trainer ends it behind this round, as far as can be seen."""
    epochs = trainer.fit_loop.epoch_progress.current.processed  # with this one, at its end
    has_all_epochs = trainer.max_epochs not in (None, -1) and epochs >= trainer.max_epochs
    has_all_steps = trainer.max_steps not in (None, -1) and trainer.global_step >= trainer.max_steps
    return bool(trainer.should_stop or has_all_epochs or has_all_steps)
