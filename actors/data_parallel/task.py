"""What a data-parallel worker needs of a task: structural types, so that actors need not know where it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from gradbus.actors.data_parallel.metrics import Reported


class ShardCounts(Protocol):
    """Holds what one rank counted on its part of the test set."""

    # Two more are looked for: ``correct``, the number of right answers, and ``metrics``, as :data:`Reported`.

    @property
    def total(self) -> int:
        """Samples."""

    @property
    def loss_sum(self) -> float:
        """Sum of the losses of all samples."""


class DataParallelTask(Protocol):
    """Model, data and loss. ``gradbus.models.ClassificationTask`` is one; any object with these methods will do.

    Three more are called where they are there: ``make_optimizer(model)``, which returns an optimizer of torch for all
    that the model trains; ``make_schedule(optimizer)``, a schedule of torch, stepped after each step; and
    ``data_digest()``, a text that is equal on two processes if they have the same data, as a hash of some samples:
    ranks that come and go have to have the same one. Without it only their numbers of batches are compared.

    All methods are called off the event loop, one after the other.
    """

    def build_model(self) -> nn.Module:
        """The model. Rank 0's initial parameters and buffers are sent to the others, so they need not be equal."""

    def prepare_shard(self, rank: int, world: int) -> None:
        """Load the data of this rank, warm up. Called once, before the first step."""

    def num_batches(self, *, rank: int, world: int, epoch: int) -> int:
        """Batches of this rank in an epoch; the ranks may have different numbers."""

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[Any]:
        """These batches, the same again for equal arguments: a resumed run skips those that are done.

        Whatever is random in them comes from ``seed``, ``epoch`` and ``rank``; no two ranks have a sample in common.
        """

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Reported]:
        """Mean loss over the batch, a scalar to call ``backward`` on. The model is in training mode.

        Metrics of the batch may come with it.
        """

    def evaluate_shard(self, model: nn.Module, *, rank: int, world: int) -> ShardCounts | None:
        """Counts on this rank's part of the test set; None if there is none. Leaves the model in training mode."""
