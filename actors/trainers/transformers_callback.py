"""The Trainer of Hugging Face's transformers as a client of a federated run.

A callback of this Trainer learns of a batch by nothing, of the loss by logs alone, and of an error not at all. So
samples are counted where the model is called in training; the last step of each round is logged, whose log has the mean
loss of the round; and whoever wants the controller to know why a client has left uses the callback as a context.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from gradbus.actors.trainers.federated_rounds import FederatedRounds
from gradbus.actors.trainers.ranks import Ranks
from gradbus.actors.trainers.round_counts import length_of
from gradbus.actors.trainers.rounds_callback import RoundsCallback
from gradbus.runtime.errors import ConfigError

REMEDY = "raise num_train_epochs, or max_steps, to as many as the rounds of the run need"


# A set-up need not have the types of transformers.
class TransformersCallback(RoundsCallback, TrainerCallback):  # type: ignore[misc]
    """Takes part in a federated run with the model of a Trainer.

    ``train`` joins the run before its first batch. At the end of each round, which is an epoch unless the controller or
    an argument says otherwise, the weights are sent with the number of samples seen, the mean training loss and the
    newest numbers of the Trainer's logs, and those of the next round are loaded, which is before the Trainer evaluates
    or saves. When the run has ended, the Trainer stops, and its model is the last global one.

    ``with FederatedCallback(...) as federated:`` around ``trainer.train()`` gives the controller an error of the
    training as the reason why the client leaves. Without it, a client whose training has failed stays until the
    callback is collected, the process ends, or the next training begins.
    """

    def _prepare(self) -> None:
        self._counting: RemovableHandle | None = None
        self._logs: dict[str, Any] = {}  # the newest numbers
        self._losses: list[tuple[float, int]] = []  # of this round: mean losses, with their steps
        self._logged_step = 0
        self._waits_for_log = False
        self._before_a_step: dict[str, Tensor] = {}
        weakref.finalize(self, self._rounds.abandon).atexit = False

    def __enter__(self) -> Self:
        """Return the callback."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the run, with an error as the reason."""
        self._forget_model()
        self._rounds.leave(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join the run, and load the model of its first round.

        Raises:
            ConfigError: the model is spread over several devices or ranks. And what ends a client.
        """
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        _check_whole(args, optimizer)
        self._forget_model()
        self._logs, self._losses, self._logged_step = {}, [], state.global_step
        ranks = Ranks(args.process_index, args.world_size)
        optimizers = [] if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]
        if self._rounds.begin(model, optimizers, step=state.global_step, ranks=ranks):
            count = partial(_count, self._rounds, self._samples_in)  # the client has the model, and that no callback
            self._counting = model.register_forward_pre_hook(count, with_kwargs=True)
            return
        control.should_training_stop = True
        # The Trainer makes one step before it looks: it is undone.
        self._before_a_step = {name: one.detach().clone() for name, one in _state_of(model).items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the round, if it is one of steps, or unwanted."""
        self._undo_step(kwargs["model"])
        if not self._rounds.is_running:
            return
        if self._rounds.is_unwanted:
            self._advance(state, control, kwargs)
        elif self._rounds.is_due(state.global_step):
            self._advance_after_log(state, control, kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the round, if it is one of epochs."""
        if not self._rounds.is_running:
            return
        self._rounds.counts.add_epoch()
        if self._waits_for_log:  # no log has come
            self._advance(state, control, kwargs)
        elif self._rounds.is_due(state.global_step):
            self._advance_after_log(state, control, kwargs)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what is logged, and end the round that waits for it."""
        logs = kwargs.get("logs") or {}
        self._logs.update({name: value for name, value in logs.items() if name != "epoch"})
        if "loss" in logs and state.global_step > self._logged_step:
            self._losses.append((float(logs["loss"]), state.global_step - self._logged_step))
            self._logged_step = state.global_step
        if self._waits_for_log and self._rounds.is_running:
            self._advance(state, control, kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the round for which no log has come."""
        if self._waits_for_log and self._rounds.is_running:
            self._advance(state, control, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the run, if it goes on."""
        self._forget_model()
        self._rounds.stop(REMEDY)

    def _advance_after_log(self, state: Any, control: Any, kwargs: Mapping[str, Any]) -> None:
        """Have this step logged, which is done behind all callbacks, and end the round then; at once if it has been."""
        if self._logged_step == state.global_step:
            self._advance(state, control, kwargs)
        else:
            self._waits_for_log = control.should_log = True

    def _advance(self, state: Any, control: Any, kwargs: Mapping[str, Any]) -> None:
        self._waits_for_log = False
        steps = sum(count for _, count in self._losses)
        loss = sum(mean * count for mean, count in self._losses) / steps if steps else None
        self._losses = []
        has_all_steps = 0 < state.max_steps <= state.global_step
        goes_on = self._rounds.advance(
            kwargs["model"],
            self._logs,
            step=state.global_step,
            dataset=length_of(kwargs["train_dataloader"]),
            loss=loss,
            is_last=has_all_steps or control.should_training_stop,
        )
        if not goes_on:
            control.should_training_stop = True

    def _forget_model(self) -> None:
        self._waits_for_log = False
        if self._counting is not None:
            self._counting.remove()
            self._counting = None

    @torch.no_grad()
    def _undo_step(self, model: nn.Module) -> None:
        before, self._before_a_step = self._before_a_step, {}
        if before:
            for name, tensor in _state_of(model).items():
                tensor.copy_(before[name])


def _count(
    rounds: FederatedRounds,
    samples_in: Callable[[Any], int],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Count the samples of a call in training: not those of an evaluation, nor of a check without gradients."""
    if module.training and torch.is_grad_enabled():
        rounds.counts.add_batch(samples_in({**dict(enumerate(args)), **kwargs}))


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}


def _check_whole(args: Any, optimizer: Any) -> None:
    """Raises ConfigError: DeepSpeed or FSDP is in charge of the model, so that its weights cannot be exchanged."""
    has_its_optimizer = "DeepSpeed" in type(optimizer).__name__
    used = {
        "DeepSpeed": args.deepspeed or _is_set("ACCELERATE_USE_DEEPSPEED") or has_its_optimizer,
        "FSDP": args.fsdp or _is_set("ACCELERATE_USE_FSDP"),
    }
    for name, is_used in used.items():
        if is_used:
            raise ConfigError(
                f"FederatedCallback exchanges whole models, and {name} spreads this one over its ranks. Train on one "
                f"device for each client, or on several with DistributedDataParallel, as torchrun does"
            )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")
