"""A labelled data set as two tensors, and the walk over it in batches.

There is no ``DataLoader``: the sets fit in memory, and indexing a tensor with a piece of a permutation is both faster
than worker processes and a pure function of that permutation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Mean and standard deviation of MNIST's training pixels on the scale 0..1; the glyphs use them too, so that a network
# sees inputs of one kind.
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081

_DIGEST_SAMPLES = 256  # of each set: enough to tell sets apart, and few enough that a large set costs no more


@dataclass(frozen=True, slots=True, eq=False)  # eq would compare tensors, which gives a tensor
class Dataset:
    """Images and their labels, and a name for logs and reports.

    Attributes:
        images: float32 (N, 1, 28, 28), normalised, for the sets of this package; else any shape (N, ...) and any type
            its network takes.
        labels: int64 (N,). Another type or length raises ValueError.
    """

    name: str
    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.labels.dtype != torch.int64 or self.labels.dim() != 1:
            raise ValueError(f"labels must be int64 (N,), got {self.labels.dtype} {tuple(self.labels.shape)}")
        if self.images.shape[:1] != self.labels.shape:
            raise ValueError(f"{len(self.labels)} labels for images of shape {tuple(self.images.shape)}")

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> Dataset:
        """A copy of the samples at ``indices`` (int64 (K,)), in that order."""
        indices = indices.to(self.labels.device)
        return replace(self, images=self.images[indices], labels=self.labels[indices])

    def to(self, device: torch.device | str) -> Dataset:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class DataSplit:
    """A training and a test set. ``note``: one line on its origin, for the log."""

    train: Dataset
    test: Dataset | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return self.train.name

    def to(self, device: torch.device | str) -> DataSplit:
        return replace(self, train=self.train.to(device), test=None if self.test is None else self.test.to(device))

    def digest(self) -> str:
        """Equal for equal data, whatever device they are on: of the size, types and shapes of both sets, and of some
        hundred samples, evenly spaced, with their labels. Sets that differ in other samples alone have one digest. Of
        samples of floating point the means count, to a tenth: processors that compute them from one seed may differ in
        the last bits."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.train, self.test):
            if part is None:
                digest.update(b"none")
                continue
            digest.update(f"{part.images.dtype} {tuple(part.images.shape)}".encode())
            if len(part):
                count = min(len(part), _DIGEST_SAMPLES)
                some = part.subset(torch.arange(count) * len(part) // count).to("cpu")
                for tensor in (some.images, some.labels):
                    hashed = tensor
                    if tensor.is_floating_point():
                        hashed = (10 * tensor.double().reshape(count, -1).mean(1)).round().to(torch.int64)
                    digest.update(hashed.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def normalise(pixels: Tensor) -> Tensor:
    """uint8 (N, 28, 28) to float32 (N, 1, 28, 28) of mean 0 and standard deviation 1 over MNIST's training set."""
    return pixels.unsqueeze(1).float().div_(255).sub_(PIXEL_MEAN).div_(PIXEL_STD)


def batches(dataset: Dataset, batch_size: int, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(images, labels)`` of up to ``batch_size`` samples; the last batch may be smaller, none is dropped.

    Args:
        order: int64 (K,), the indices to visit, repeats allowed; None: all, as they lie (no copy is made then).
    """
    if order is None:
        yield from zip(torch.split(dataset.images, batch_size), torch.split(dataset.labels, batch_size), strict=True)
        return
    for picked in torch.split(order.to(dataset.labels.device), batch_size):
        yield dataset.images[picked], dataset.labels[picked]
