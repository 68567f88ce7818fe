"""The samples of an epoch, divided among ranks whose number changes in the midst of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from gradbus.runtime.errors import CheckpointError


class ElasticSampler(Sampler[int]):
    """A seeded order of all samples that all ranks share, and how much of it is done.

    Rank r of w takes every w-th sample of what is left, from the r-th on. Give it to a :class:`.TorchState`, and call
    :meth:`record_batch` after each step: then an epoch goes on where the last commit was, whatever the number of ranks,
    and no sample is left out or taken twice but those of steps that were not committed. Where what is left cannot be
    divided evenly the first samples of the order fill it up, as in torch's ``DistributedSampler``: all ranks have the
    same number of batches.

    Attributes:
        epoch: which the order follows from, with the seed. processed: samples of it that all ranks together have done.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """``dataset``: equal on all ranks. ``shuffle``: False: the order is that of the data set."""
        self._num_samples = len(dataset)
        if not self._num_samples:
            raise ValueError("ElasticSampler: the data set has no samples")
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0
        self.processed = 0

    def __repr__(self) -> str:
        """Return what the order follows from, which is equal on all ranks."""
        return f"ElasticSampler({self._num_samples} samples, shuffle={self._shuffle}, seed={self._seed})"

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all of its samples. The epoch that the sampler is in goes on."""
        if epoch != self.epoch:
            self.epoch, self.processed = epoch, 0

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a step in which each rank has done a batch. ``batch_idx`` is Horovod's, and is not used here."""
        self.processed = min(self._num_samples, self.processed + batch_size * _place()[1])

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank, of what is left now."""
        rank, world = _place()
        order = self._order()[self.processed :]
        num_each = math.ceil(len(order) / world)
        filled = order + self._order()[: num_each * world - len(order)]
        while len(filled) < num_each * world:  # fewer samples than ranks
            filled += filled[: num_each * world - len(filled)]
        return iter(filled[rank::world])

    def __len__(self) -> int:
        """Return the number of samples of this rank that are left."""
        return math.ceil((self._num_samples - self.processed) / _place()[1])

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        random = torch.Generator().manual_seed(self._seed + self.epoch)
        return torch.randperm(self._num_samples, generator=random).tolist()

    def state_dict(self) -> dict[str, int]:
        """Return epoch and place."""
        return {"epoch": self.epoch, "processed": self.processed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises CheckpointError: it is no place in this data set."""
        epoch, processed = state.get("epoch"), state.get("processed")
        if not isinstance(epoch, int) or not isinstance(processed, int) or not 0 <= processed <= self._num_samples:
            raise CheckpointError(
                f"state of ElasticSampler: expected an epoch and 0 to {self._num_samples} processed samples, got "
                f"{epoch!r:.40} and {processed!r:.40}. Give all processes the same data set"
            )
        self.epoch, self.processed = epoch, processed


def _place() -> tuple[int, int]:
    """Rank and world; those of one process where there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
