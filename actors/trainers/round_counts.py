"""What a trainer does in a round: the samples that it has seen, its steps and epochs, and its mean loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbus.runtime.errors import ConfigError

_DEPTH = 4  # of batches within batches


class RoundCounts:
    """Counts from one ``receive`` to the next ``send``.

    Attributes:
        batches, epochs: of this round; an epoch counts when it ends, also one that the round has begun within.
    """

    def __init__(self) -> None:
        self._in_epoch = self._largest_epoch = 0  # samples, over the rounds
        self.start()

    def start(self) -> None:
        """Begin a round."""
        self.batches = self.epochs = self._samples = 0
        self._loss: Tensor | None = None
        self._loss_weight = 0

    def add_batch(self, samples: int, loss: Tensor | None = None) -> None:
        """Count a batch. ``loss``: its mean loss, a tensor of one value on any device, which is not waited for."""
        self.batches += 1
        self._samples += samples
        self._in_epoch += samples
        if loss is not None:
            total = loss.detach().to(torch.float32 if loss.device.type == "mps" else torch.float64) * samples
            self._loss = total if self._loss is None else self._loss + total
            self._loss_weight += samples

    def add_epoch(self) -> None:
        """Count the end of an epoch, for this round if it has trained in it."""
        self.epochs += bool(self.batches)
        self._largest_epoch = max(self._largest_epoch, self._in_epoch)
        self._in_epoch = 0

    def totals(self) -> tuple[int, int, float, int]:
        """Return samples seen, those of the largest epoch that has ended so far, and the sum and the weight of the
        loss. Over several ranks, the totals add up."""
        loss = 0.0 if self._loss is None else float(self._loss)
        return self._samples, self._largest_epoch, loss, self._loss_weight


def distinct_samples(seen: int, largest_epoch: int, epochs: int, dataset: int | None) -> int:
    """Return how many of the samples seen in a round count as distinct: no more than the data set has, nor, where an
    epoch has ended in the round, than one epoch had.

    Args:
        dataset: its length; None: unknown.
    """
    limits = [seen]
    if epochs and largest_epoch:
        limits.append(largest_epoch)
    if dataset:
        limits.append(dataset)
    return min(limits)


def batch_size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of the first tensor that is found in it, in
    mappings, sequences and dataclasses.

    Raises:
        ConfigError: there is none.
    """
    found = _first_length(batch, _DEPTH)
    if found is None:
        raise ConfigError(
            f"the samples of a batch cannot be counted: a {type(batch).__name__} without a tensor of one or more "
            f"dimensions. Pass samples_in, a function that returns the number of samples in a batch, to "
            f"FederatedCallback"
        )
    return found


def _first_length(batch: Any, depth: int) -> int | None:
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    if isinstance(batch, int | float | str | bytes) or batch is None or not depth:
        return None
    parts: Iterable[Any]
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence):
        if batch and isinstance(batch[0], str):  # texts, one a sample
            return len(batch)
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        length = getattr(batch, "num_graphs", None)  # batches of PyTorch Geometric
        return length if isinstance(length, int) else None
    return next((found for part in parts if (found := _first_length(part, depth - 1)) is not None), None)


def length_of(dataloader: Any) -> int | None:
    """Return the number of samples in the data set of a loader; None: it is not known."""
    try:
        return len(dataloader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None
