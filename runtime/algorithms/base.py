"""What an algorithm of data-parallel training declares, and the table of all of them.

A new algorithm is a file in this folder with a class that has a ``choice``, its name; or a class anywhere, named as
``package.module:Name``. Nothing else is edited. It does no I/O: see :mod:`.requests`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from pydantic import BaseModel
from torch import Tensor

from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.requests import Program
from gradbus.runtime.choices import ALGORITHMS as ALGORITHMS
from gradbus.runtime.choices import Choice
from gradbus.runtime.choices import Options as Options
from gradbus.runtime.errors import ConfigError

Scope: TypeAlias = Literal["bucket", "weights"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank is among the others.

    Attributes:
        hosts: the host of each rank, equal texts for ranks of one machine. Empty: unknown.
    """

    rank: int
    world: int
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The step of a run, equal on all ranks.

    Attributes:
        number: counts from 0 over the whole run. epoch: from 0.
        active: ranks that have data in this step; means of gradients are over these.
    """

    number: int
    epoch: int = 0
    active: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class TensorBucket:
    """Tensors that are exchanged together: gradients, or weights.

    Attributes:
        index: of the bucket, equal on all ranks.
        flat: float32, shape (n,): memory that holds all tensors one after the other, in their order.
        tensors: views of it in the shape of the parameters, by name.
    """

    index: int
    flat: Tensor
    tensors: Mapping[str, Tensor]


class Memory:
    """Tensors that an algorithm keeps from step to step, by kind and parameter. Changes count when they are committed.

    A step that all ranks skip is rolled back, so that it leaves no trace.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._staged: dict[tuple[str, str], Tensor] = {}

    def find(self, kind: str, name: str) -> Tensor | None:
        """The tensor as it was before this step, if there is one. It is not to be changed."""
        return self._kept.get((kind, name))

    def find_or_zeros(self, kind: str, name: str, like: Tensor) -> Tensor:
        """The same; zeros if there is none, or one of another shape."""
        kept = self._kept.get((kind, name))
        return torch.zeros_like(like) if kept is None or kept.shape != like.shape else kept

    def stage(self, kind: str, name: str, tensor: Tensor) -> None:
        """Replace the tensor when the step is committed."""
        self._staged[kind, name] = tensor

    def commit(self) -> None:
        """The step counts."""
        self._kept.update(self._staged)
        self._staged.clear()

    def roll_back(self) -> None:
        """The step does not count."""
        self._staged.clear()

    def tensors(self, kinds: frozenset[str]) -> dict[str, Tensor]:
        """The tensors of these kinds as ``kind/name``, not copied."""
        return {f"{kind}/{name}": kept for (kind, name), kept in self._kept.items() if kind in kinds}

    def load(self, tensors: Mapping[str, Tensor], kinds: frozenset[str]) -> None:
        """Replace all tensors of these kinds by copies.

        Raises:
            ValueError: one has another kind, or NaN or infinity in it.
        """
        loaded: dict[tuple[str, str], Tensor] = {}
        for full_name, tensor in tensors.items():
            kind, _, name = full_name.partition("/")
            if kind not in kinds:
                raise ValueError(f"state {full_name!r}: expected one of {sorted(kinds)} before the first '/'")
            if not are_finite([tensor.detach()]):
                raise ValueError(f"state {full_name!r} has NaN or infinity in it")
            loaded[kind, name] = tensor.detach().clone()
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] not in kinds} | loaded
        self._staged.clear()


class Algorithm(ABC):
    """How the ranks turn their own gradients into one step, or their own weights into common ones.

    Attributes:
        choice: its name.
        scope: ``bucket``: a program for each bucket of gradients, as soon as it is computed. ``weights``: one for all
            weights.
        overlaps: of scope ``weights``: the weights that the gradients were computed with are exchanged, and replaced
            before the optimizer's step, so that this may go on while gradients are computed; else after that step.
        makes_steps: what the exchange leaves in a bucket is a step, to be multiplied by the learning rate, not a
            gradient: the optimizer that follows is SGD without momentum.
        equal_replicas: whether all ranks have bit-equal weights after each step.
        own, shared: the kinds of tensors in ``memory`` that belong to this rank alone, and that are equal on all ranks.
    """

    choice: ClassVar[str]
    scope: ClassVar[Scope] = "bucket"
    overlaps: ClassVar[bool] = False
    makes_steps: ClassVar[bool] = False
    equal_replicas: ClassVar[bool] = True
    own: ClassVar[frozenset[str]] = frozenset()
    shared: ClassVar[frozenset[str]] = frozenset()
    Options: ClassVar[type[BaseModel]] = Options

    def __init__(self, place: Place, options: Any) -> None:
        """``options``: an instance of ``Options``, equal on all ranks."""
        self.place = place
        self.options = options
        self.memory = Memory()

    @abstractmethod
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        """Replace the tensors of the bucket, this rank's own, by what all ranks make of theirs.

        Where NaN or infinity is in the tensors of any rank the result is not finite on any rank. Then, and only then,
        all ranks roll the step back.
        """

    def commit(self) -> None:
        """All buckets of the step have been exchanged, and are finite."""
        self.memory.commit()

    def roll_back(self) -> None:
        """The step is skipped by all ranks."""
        self.memory.roll_back()

    def own_state(self) -> dict[str, Tensor]:
        """This rank's memory by name, not copied. A rank that joins starts without it."""
        return self.memory.tensors(self.own)

    def shared_state(self) -> dict[str, Tensor]:
        """What is equal on all ranks, by name, not copied. A rank that joins starts with it."""
        return self.memory.tensors(self.shared)

    def load_state(self, own: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`own_state` and :meth:`shared_state`. Raises ValueError: it does not fit."""
        self.memory.load(own, self.own)
        self.memory.load(shared, self.shared)


def make_algorithm(name: str, place: Place, options: Mapping[str, Any] | None = None) -> Algorithm:
    """An algorithm by its name. Raises ConfigError: there is none, or the options do not fit; names the nearest."""
    kind = ALGORITHMS.find(name)
    if not issubclass(kind, Algorithm):
        raise ConfigError(f"{ALGORITHMS.key}: {name!r} is no Algorithm: inherit from gradbus.runtime.algorithms.base")
    checked = ALGORITHMS.options(Choice.model_validate({**(options or {}), "name": name}))
    algorithm: Algorithm = kind(place, kind.Options(**checked))
    return algorithm


def bucket_of(tensors: Mapping[str, Tensor], index: int = 0) -> TensorBucket:
    """A bucket with copies of these tensors."""
    flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors.values()])
    return TensorBucket(index, flat, dict(_views(flat, tensors)))


def _views(flat: Tensor, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for name, tensor in like.items():
        yield name, flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
