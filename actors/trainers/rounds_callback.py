"""What the callbacks of all trainers have in common: their options, and the round that they are in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gradbus.actors.federated.client.handover import TrainingRound
from gradbus.actors.federated.client.script_client import check_named, client, keywords
from gradbus.actors.trainers.federated_rounds import FederatedRounds, OptimizerState, RoundLength
from gradbus.actors.trainers.round_counts import batch_size_of
from gradbus.runtime.misuse import check_keywords

_CALL = "FederatedCallback"


class RoundsCallback:
    """Follows the rounds of a run for a trainer, whose own class of callbacks comes behind this one."""

    def __init__(
        self,
        job: str | None = None,
        *,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        optimizer_state: OptimizerState = "keep",
        metrics: Sequence[str] | None = None,
        samples_in: Callable[[Any], int] = batch_size_of,
        **settings: Any,
    ) -> None:
        """A client that joins when training begins; each ``fit`` or ``train`` joins anew.

        Args:
            job: name of the job, as of :func:`gradbus.client`.
            every_n_epochs, every_n_steps: length of a round in epochs, or in optimizer steps; at most one of them.
                None: what the controller asks for, ``federated.training.steps`` or ``epochs``, by default one epoch.
            optimizer_state: "keep": optimizers go on over the rounds, as the trainer has it. "reset": each round begins
                with the state that they had at first, such as no momentum; learning rates and schedules go on.
            metrics: names of the numbers that the trainer has logged to send; None: all.
            samples_in: returns the number of samples in a batch, which for transformers is what the model is called
                with, a mapping of its arguments.
            settings: name, client_id, config and the settings of the bus, as of :func:`gradbus.client`.

        Raises:
            ConfigError, TypeError, ValueError: one of them is wrong, or there is neither a name nor an id.
        """
        super().__init__()
        check_keywords(f"{_CALL}()", settings, keywords() | _OWN)
        check_named(_CALL, settings.get("name"), settings.get("client_id"), settings)
        client(job, **settings)  # which has not been entered: it is made for its checks
        length = RoundLength.of_arguments(every_n_epochs, every_n_steps)
        self._rounds = FederatedRounds(partial(client, job, **settings), length, optimizer_state, metrics)
        self._samples_in = samples_in
        self._prepare()

    def _prepare(self) -> None:
        """Make what the callback of one trainer keeps beside this; the end of the constructor, whose signature is the
        same for all."""

    @property
    def round(self) -> TrainingRound:
        """Return what the controller asks for in this round, such as ``lr``, which a module may follow. Raises
        OutOfTurn: there is none."""
        return self._rounds.round


_OWN = inspect.signature(RoundsCallback).parameters.keys() - {"settings"}
