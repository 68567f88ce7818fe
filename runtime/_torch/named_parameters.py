"""The parameters of a model by name, and their gradients in the buckets of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradbus.torch.cpu_copies import local_of


class NamedParameters(Mapping[str, Tensor]):
    """Parameters that are trained, in the order of the model.

    Attributes:
        named_once: whether each has one name, and each name one parameter.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        pairs = list(named)
        self._parameters = dict(pairs)
        self._names = {id(parameter): key for key, parameter in pairs}
        self._strides = {key: torch.empty_like(local_of(one), device="meta").stride() for key, one in pairs}
        self.named_once = len(self._parameters) == len(self._names) == len(pairs)

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each, as plain data."""
        return {name: list(parameter.shape) for name, parameter in self._parameters.items()}

    def views(self, bucket: GradBucket, flat: Tensor) -> dict[str, Tensor]:
        """Return the gradients in ``flat``, as large as the bucket's buffer, by name: in the shapes of the parameters,
        whose order in memory they have.

        Raises:
            ValueError: a parameter of the bucket is none of these.
        """
        parts = torch.split(flat, [gradient.numel() for gradient in bucket.gradients()])
        views = {}
        for part, parameter in zip(parts, bucket.parameters(), strict=True):
            if id(parameter) not in self._names:
                raise ValueError(
                    f"with_algorithm: bucket {bucket.index()} has a parameter of shape {tuple(parameter.shape)} that "
                    f"was not given; give named_parameters() of the model that DDP wraps"
                )
            name = self._names[id(parameter)]
            views[name] = part.as_strided(parameter.shape, self._strides[name])
        return views
