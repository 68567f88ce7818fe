"""What an algorithm of data-parallel training declares, and the table of all of them.

A new algorithm is a file in this folder with a class that has a ``choice``, its name; or a class anywhere, named as
``package.module:Name``. Nothing else is edited. It does no I/O: see :mod:`.requests`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
from gradbus.runtime.in_network.options import InNetworkOptions

Scope: TypeAlias = Literal["bucket", "step", "weights"]


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
        loss: the mean over these ranks of the last step that was not skipped, with equal bits on all ranks; NaN before
            the first one, and for algorithms without ``needs_loss``. Where weights are exchanged after the optimizer's
            step, to be applied at once or later, that is this one; NaN if no rank has made it. Where the exchange
            ``overlaps``, and is not late, it begins before the loss of its step is known.
    """

    number: int
    epoch: int = 0
    active: int = 1
    loss: float = math.nan


@dataclass(frozen=True, slots=True, eq=False)
class TensorBucket:
    """Tensors that are exchanged together: gradients, or weights.

    Attributes:
        index: of the bucket, equal on all ranks.
        flat: shape (n,), float32, see :attr:`Algorithm.any_dtype`: memory that holds all tensors one after the other,
            in their order.
        tensors: views of it in the shape of the parameters, by name.
    """

    index: int
    flat: Tensor
    tensors: Mapping[str, Tensor]


class Memory:
    """Tensors that an algorithm keeps from step to step, by kind and parameter. Changes count when they are committed.

    A step that all ranks skip is rolled back, so that it leaves no trace.

    Attributes:
        staged: what replaces the tensors when the step is committed. Algorithms call :meth:`stage`.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}
        self.staged: dict[tuple[str, str], Tensor] = {}

    def find(self, kind: str, name: str) -> Tensor | None:
        """The tensor as it was before this step, if there is one. It is not to be changed."""
        return self._kept.get((kind, name))

    def find_or_zeros(self, kind: str, name: str, like: Tensor) -> Tensor:
        """Return the same on the device of ``like``, as a state is loaded to the CPU. Zeros if there is none, or one of
        another shape."""
        kept = self._kept.get((kind, name))
        return torch.zeros_like(like) if kept is None or kept.shape != like.shape else kept.to(like.device)

    def stage(self, kind: str, name: str, tensor: Tensor) -> None:
        """Replace the tensor when the step is committed."""
        self.staged[kind, name] = tensor

    def commit(self) -> None:
        """The step counts."""
        self.commit_taken(self.take_staged())

    def take_staged(self) -> dict[tuple[str, str], Tensor]:
        """Return what is staged, to be committed later, or never: it is staged no more."""
        staged, self.staged = self.staged, {}
        return staged

    def commit_taken(self, staged: Mapping[tuple[str, str], Tensor]) -> None:
        """Keep what :meth:`take_staged` returned. What later steps have staged stays staged."""
        self._kept.update(staged)

    def roll_back(self) -> None:
        """The step does not count."""
        self.staged.clear()

    def drop(self, kinds: frozenset[str]) -> None:
        """Forget the tensors of these kinds, and what is staged."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] not in kinds}
        self.staged.clear()

    def forget(self, kind: str, name: str) -> None:
        """Forget a tensor, at once."""
        self._kept.pop((kind, name), None)

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
        self.drop(kinds)
        self._kept |= loaded


class Algorithm(ABC):
    """How the ranks turn their own gradients into one step, or their own weights into common ones.

    Attributes:
        choice: its name. Without one it is named by its class.
        scope: ``bucket``: a program for each bucket of gradients, as soon as it is computed. ``step``: one for all
            gradients, bucket 0, when the backward pass of a step has ended. ``weights``: one for all weights, bucket 0.
        overlaps: of scope ``weights``: the weights that the gradients were computed with are exchanged, and replaced
            before the optimizer's step, so that this may go on while gradients are computed; else after that step.
        makes_steps: what the exchange leaves in a bucket is a step, to be multiplied by the learning rate, not a
            gradient: the optimizer that follows is SGD without momentum.
        equal_replicas: whether all ranks have bit-equal weights after each step.
        clips: the algorithm limits norms by itself, by the ``clip_norm`` that :meth:`make_optimizer` gets; else the
            driver clips what the exchange leaves in the buckets.
        needs_loss: whether :class:`Step` is to have the loss.
        delay_steps: number of steps after which the result of an exchange is applied, where the run sets none. With 1
            the exchange of a step goes on while the next one is computed. Of gradients: the optimizer steps with those
            of the step before. Of weights: see :meth:`applied_late`.
        own, shared: the kinds of tensors in ``memory`` that belong to this rank alone, and that are equal on all ranks.
        relative: those of them that are right only together with what other ranks remember, such as what others know of
            this rank. All ranks forget them when a rank joins or leaves, see :meth:`regroup`.
        is_elastic: whether ranks may come and go while a run goes on, see :meth:`regroup`.
        can_drop_late: whether they may with a delay, too. A result that is on its way when a rank is lost is dropped by
            all ranks, so an exchange changes nothing but its bucket and what it stages in ``memory``, and nothing of
            that is exchanged again before it is applied. Then it is committed, without :meth:`commit`. So only an
            algorithm of scope ``weights`` can, that does not need the loss and leaves :meth:`commit` as it is.
        may_change: options that a run may be resumed with others of, as the state does not depend on them.

    What a rank asks for, and the shapes, follow from the step, the place and ``shared`` alone: a rank that has joined
    has the same of these, and nothing of ``own``.
    """

    choice: ClassVar[str]
    scope: ClassVar[Scope] = "bucket"
    overlaps: ClassVar[bool] = False
    makes_steps: ClassVar[bool] = False
    equal_replicas: ClassVar[bool] = True
    clips: ClassVar[bool] = False
    needs_loss: ClassVar[bool] = False
    delay_steps: int = 0
    own: ClassVar[frozenset[str]] = frozenset()
    shared: ClassVar[frozenset[str]] = frozenset()
    relative: ClassVar[frozenset[str]] = frozenset()
    is_elastic: ClassVar[bool] = True
    can_drop_late: ClassVar[bool] = False
    may_change: ClassVar[frozenset[str]] = frozenset()
    Options: ClassVar[type[BaseModel]] = Options

    def __init__(self, place: Place, options: Any) -> None:
        """``options``: an instance of ``Options``, equal on all ranks."""
        self.place = place
        self.options = options
        self.memory = Memory()
        self.may_give_up = False
        """Whether the driver may call :meth:`give_up`; it sets this before the first step."""
        self.not_finite: tuple[int, ...] = ()
        """Ranks whose tensors of the newest step were not finite, where the messages tell; set by :meth:`exchange`."""

    @property
    def called(self) -> str:
        """Its name in errors: its choice, or its class where it has none, as those of users need not."""
        kind = type(self)
        return getattr(kind, "choice", f"{kind.__module__}:{kind.__qualname__}")

    @property
    def density(self) -> float:
        """Share of the entries that a rank sends in a step, for reports."""
        return 1.0

    @property
    def interval_steps(self) -> int | None:
        """Of scope ``weights``: the fewest steps between two exchanges of a weight; None: not known."""
        return None

    @property
    def needs_epoch(self) -> bool:
        """Whether what it does depends on the epoch, which a script of one's own then has to tell."""
        return False

    @property
    def any_dtype(self) -> bool:
        """Whether tensors of a bucket may have any floating-point type, one for all; else they are float32."""
        return False

    @property
    def any_device(self) -> bool:
        """Whether tensors of a bucket may be on an accelerator; else drivers give it copies on the CPU."""
        return False

    def check(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Refuse what the algorithm cannot work with, before a run starts.

        Args:
            parameters: those that are trained, by name, in the order of the model.
            optimizer: that follows the exchange; one call for each where there are several.

        Raises:
            ConfigError: with the reason, and what to do.
        """
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32 and not (self.any_dtype and parameter.is_floating_point()):
                raise ConfigError(f"{self.called}: parameter {name} is {parameter.dtype}, expected torch.float32")
        if not self.makes_steps:
            return
        is_sgd = isinstance(optimizer, torch.optim.SGD)
        if not is_sgd or any(group["momentum"] for group in optimizer.param_groups):
            raise ConfigError(
                f"{self.called} computes the steps itself: it needs torch.optim.SGD without momentum, got "
                f"{type(optimizer).__name__}" + (" with momentum" if is_sgd else "")
            )

    def make_optimizer(self, parameters: Mapping[str, Tensor], settings: Any) -> torch.optim.Optimizer | None:
        """The optimizer that follows the exchange, of these parameters. None: the one that the run names.

        Args:
            settings: of the optimizer, as ``parallel.optimizer`` has them: ``lr``, ``momentum``, ``nesterov``,
                ``weight_decay``, ``clip_norm``.
        """
        return None

    def begin(self, weights: TensorBucket) -> None:  # noqa: B027  # most have no use for it
        """Of scope ``weights``: take note of the weights that a run begins with, equal on all ranks.

        The driver calls it once, before the first step, when what was saved has been loaded: a state that was loaded
        stays as it is.

        Args:
            weights: bucket 0, as :meth:`exchange` gets it. It is not kept.
        """

    def is_due(self, step: Step) -> bool:
        """Of scope ``weights``: whether there is an exchange in this step, equal on all ranks.

        A step without one sends nothing at all. A rank whose gradients are not finite skips such a step by itself.
        With a delay ``step.loss`` is NaN here: the exchange that tells it may go on meanwhile.
        """
        return True

    @abstractmethod
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        """Replace the tensors of the bucket, this rank's own, by what all ranks make of theirs.

        Where NaN or infinity is in the tensors of any rank the result is not finite on any rank. Then, and only then,
        all ranks roll the step back.
        """

    def applied_late(self, step: Step, live: Tensor, before: Tensor, result: Tensor) -> Tensor:
        """Of scope ``weights``, with a delay: the weights after a late result.

        By default what the exchange has changed is added to the weights of now.

        Args:
            step: whose weights were exchanged. live: the weights as they are now. before: as they were copied when
                the exchange began. result: what it has made of the copy. All of shape (n,); none is changed, or kept.
        """
        return live + (result - before)

    def check_delay(self, asked: int | None) -> int:
        """After how many steps a result is applied. ``asked``: what the run sets, or None.

        How far a rank is from the mean of all is d - d' after an exchange, with d' what it was when the exchange began.
        That is 0 where no other one came in between; from the second one in between on it grows for ever.

        Raises:
            ConfigError: this algorithm cannot be so late.
        """
        delay, most = self.delay_steps if asked is None else asked, self.interval_steps
        if most is not None and delay > most:
            raise ConfigError(
                f"{self.called}: delay_steps={delay} with an exchange every {most} steps: the next one begins without "
                f"the result of this one, and ranks drift apart; at most {most}"
            )
        return delay

    def weights_of_joiner(self, weights: Tensor) -> Tensor:
        """Of scope ``weights``: what a rank trains on from that has joined, and has the shared state.

        By default those of the rank whose copy it is, which are of that rank alone if exchanges are rare.

        Args:
            weights: those of that rank, shape (n,). Not to be changed.
        """
        return weights

    @classmethod
    def joiner_gets(cls) -> str:
        """Return what a rank that joins has of this algorithm, for people; empty: ranks cannot come and go."""
        if not cls.is_elastic:
            return ""
        starts_at_anchor = "anchor" in cls.shared  # see weights_of_joiner
        first = "weights of the last exchange" if starts_at_anchor else "weights of one rank"
        parts = ["weights" if cls.equal_replicas else first, *sorted(cls.shared - {"anchor"})]
        return ", ".join(parts) + (f"; zero at first: {', '.join(sorted(cls.own))}" if cls.own else "")

    @property
    def in_network(self) -> InNetworkOptions | None:
        """How its sums use an aggregator, which the driver is to join; None: there is none."""
        return None

    @property
    def by_hosts(self) -> bool:
        """Whether the way of its sums goes by where the ranks of a fixed world are."""
        return False

    def commit(self) -> None:
        """All buckets of the step have been exchanged, and are finite."""
        self.memory.commit()

    def roll_back(self) -> None:
        """The step is skipped by all ranks."""
        self.memory.roll_back()

    def give_up(self) -> None:
        """This rank does not apply the step, as another one was lost: it is computed anew, and leaves no trace.

        Called between two steps, too, and only where :attr:`may_give_up` was set before.
        """
        self.roll_back()

    def regroup(self, place: Place) -> None:
        """Go on among other ranks: one has joined, has left, or was replaced. On all ranks, between the same two steps.

        A rank that joins makes the algorithm, loads the shared state of a rank that stays, and no own state, and calls
        this as the others do. Residuals of ranks that stay go on; those of ranks that have left are lost.
        """
        self.place = place
        self.memory.drop(self.relative)

    def own_state(self) -> dict[str, Tensor]:
        """This rank's memory by name, not copied: valid until the next step. A rank that joins has none."""
        return self.memory.tensors(self.own)

    def shared_state(self) -> dict[str, Tensor]:
        """Return what is equal on all ranks, by name, not copied, until the next step: a rank that joins gets it."""
        return self.memory.tensors(self.shared)

    def load_state(self, own: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`own_state` and :meth:`shared_state`. Raises ValueError: it does not fit."""
        self.memory.load(own, self.own)
        self.memory.load(shared, self.shared)


def algorithm_maker(choice: Choice) -> Callable[[Place], Algorithm]:
    """Return what makes the chosen algorithm for a rank: the class is found, and its options are checked, by now.

    Raises:
        ConfigError: there is none, which names the nearest, or the options do not fit.
    """
    kind = ALGORITHMS.find(choice.name)
    if not issubclass(kind, Algorithm):
        raise ConfigError(
            f"{ALGORITHMS.key}: {choice.name!r} is no Algorithm, and no codec: inherit from "
            f"gradbus.runtime.algorithms.base.Algorithm, or from gradbus.codecs.CustomCodec"
        )
    options = ALGORITHMS.checked(choice)

    def make(place: Place) -> Algorithm:
        algorithm: Algorithm = kind(place, options)
        return algorithm

    return make


def make_algorithm(name: str, place: Place, options: Mapping[str, Any] | None = None) -> Algorithm:
    """An algorithm by its name. Raises ConfigError: there is none, or the options do not fit; names the nearest."""
    return algorithm_maker(Choice.model_validate({**(options or {}), "name": name}))(place)


def bucket_of(tensors: Mapping[str, Tensor], index: int = 0) -> TensorBucket:
    """A bucket with copies of these tensors on the CPU."""
    flat = torch.cat([tensor.detach().reshape(-1).to("cpu", torch.float32) for tensor in tensors.values()])
    return TensorBucket(index, flat, views_of(flat, tensors))


def views_of(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of a vector, one after the other, in the shapes of these tensors, by name."""
    parts = torch.split(flat, [tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for part, (name, tensor) in zip(parts, like.items(), strict=True)}
