"""Data-parallel training of a labelled data set: the samples of each rank.

A block is ``world * batch_size`` samples of the epoch's permutation, and rank r takes the r-th ``batch_size`` of it, so
``world`` ranks see in step s the samples of one process with batches of that size. The rest at the end of an epoch is
divided evenly: smaller batches, and none for some ranks if there are fewer samples than ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .data import DataSplit
from .networks import SeededDropout, reseed_dropout
from .seeds import derive_seed, seeded_generator
from .task import ShardResult

# The CNN's activations then take some 24 MB, which malloc keeps from batch to batch. With 500 it asked the kernel for
# new pages each time: evaluation took twice the processor time.
EVAL_BATCH = 100


def num_shard_batches(samples: int, batch_size: int, *, rank: int, world: int) -> int:
    """Batches of this rank in an epoch over ``samples`` samples. Raises ValueError: an argument is out of range."""
    _check_rank(rank, world)
    if batch_size < 1 or samples < 0:
        raise ValueError(f"need batch_size >= 1 and samples >= 0, got {batch_size} and {samples}")
    full, rest = divmod(samples, world * batch_size)
    return full + (rest > rank)  # tensor_split gives the first ``rest % world`` ranks one more than the others


def shard_indices(order: Tensor, batch_size: int, *, rank: int, world: int) -> Iterator[Tensor]:
    """This rank's batches, as pieces of ``order``: int64 (samples,) -> int64 (up to batch_size,) each.

    Over all ranks, every entry of ``order`` is in exactly one piece.
    """
    _check_rank(rank, world)
    block = world * batch_size
    full = len(order) // block
    for step in range(full):
        start = step * block + rank * batch_size
        yield order[start : start + batch_size]
    rest = order[full * block :].tensor_split(world)[rank]
    if len(rest):
        yield rest


@dataclass(frozen=True, slots=True, eq=False)
class ShardBatch:
    """Samples of one rank in one step: ``images`` (B, ...), ``labels`` int64 (B,).

    ``seed``: of the masks of dropout, another one for every epoch, step and rank; a resumed run draws the same again.
    """

    images: Tensor
    labels: Tensor
    seed: int

    def __len__(self) -> int:
        return len(self.labels)


class ShardedTraining:
    """The data-parallel half of :class:`gradbus.models.ClassificationTask`; the partition has no effect on it."""

    batch_size: int
    device: torch.device
    _loss: Callable[[Tensor, Tensor], Tensor]

    @property
    def data(self) -> DataSplit:
        """Both sets, loaded at the first use."""
        raise NotImplementedError

    def prepare_shard(self, rank: int, world: int) -> None:
        """Load the data. Raises ValueError: no such rank, or no samples at all."""
        _check_rank(rank, world)
        if not len(self.data.train):
            raise ValueError(f"the training set {self.data.name!r} is empty")

    def data_digest(self) -> str:
        """The digest of both sets, see :meth:`gradbus.models.DataSplit.digest`."""
        return self.data.digest()

    def num_batches(self, *, rank: int, world: int, epoch: int) -> int:
        """Batches of this rank in an epoch; the same in every one."""
        return num_shard_batches(len(self.data.train), self.batch_size, rank=rank, world=world)

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[ShardBatch]:
        """This rank's batches of an epoch, from 0. The permutation follows from ``seed`` and ``epoch`` alone."""
        train = self.data.train
        order = torch.randperm(len(train), generator=seeded_generator("parallel", seed, epoch)).to(self.device)
        for step, picked in enumerate(shard_indices(order, self.batch_size, rank=rank, world=world)):
            own_seed = derive_seed("parallel", seed, epoch, step, rank)
            yield ShardBatch(train.images[picked], train.labels[picked], own_seed)

    def loss(self, model: nn.Module, batch: ShardBatch) -> Tensor:
        """Mean loss over the batch, a scalar to call ``backward`` on."""
        if any(isinstance(module, SeededDropout) for module in model.modules()):
            reseed_dropout(model, torch.Generator().manual_seed(batch.seed))
        return self._loss(model(batch.images), batch.labels)

    def evaluate_shard(self, model: nn.Module, *, rank: int, world: int) -> ShardResult | None:
        """Counts on this rank's part of the test set, None without one. All ranks together see every sample once."""
        _check_rank(rank, world)
        test = self.data.test
        if test is None or not len(test):
            return None
        images, labels = (whole.tensor_split(world)[rank] for whole in (test.images, test.labels))
        correct, loss_sum = count_correct(model, images, labels, self._loss)
        return ShardResult(correct=correct, total=len(labels), loss_sum=loss_sum)


def count_correct(
    model: nn.Module, images: Tensor, labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[int, float]:
    """Right answers, and the sum of the losses of all samples, in evaluation mode; the model's mode is put back."""
    correct = torch.zeros((), dtype=torch.int64, device=labels.device)
    loss_sum = torch.zeros((), device=labels.device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(labels), EVAL_BATCH):
                some_images, some_labels = (whole[start : start + EVAL_BATCH] for whole in (images, labels))
                logits = model(some_images)
                loss_sum += loss(logits, some_labels) * len(some_labels)
                correct += (logits.argmax(dim=-1) == some_labels).sum()
    finally:
        model.train(was_training)
    return int(correct), float(loss_sum)


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in 0..{world - 1}, got {rank}")
