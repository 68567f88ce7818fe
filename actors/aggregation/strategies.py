"""Aggregation strategies: from the updates of a round to the next model.

Those here see the exact weighted mean ``delta`` of the clients' differences and treat it as a pseudo-gradient:

    FedAvg    w <- w + delta                                  McMahan et al., AISTATS 2017 (arXiv:1602.05629)
    FedAvgM   v <- beta v + delta;  w <- w + eta v            Hsu et al., arXiv:1909.06335
              w <- w + eta (delta + beta v) with nesterov     Douillard et al., DiLoCo, arXiv:2311.08105, Algorithm 1

Differs from the paper: the mean is a sum of integers, so that the order in which updates arrive changes no bit.
docs/strategies.md has all strategies.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from gradbus.actors.aggregation.common_grid import EXACT, CommonGrid
from gradbus.actors.aggregation.exact_sum import ExactMean
from gradbus.actors.aggregation.orders import RoundOrder
from gradbus.actors.aggregation.partial_sum import PartialSum
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.runtime.choices import STRATEGIES, Options
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.config.settings import Positive
from gradbus.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from gradbus.actors.aggregation.bounds import Bounds


def summing_strategies() -> str:
    """Names of the built-in strategies that need the sum of the updates alone, for errors that refuse the others."""
    *most, last = [name for name, kind in STRATEGIES.table.items() if kind.adds_sums]
    return f"{', '.join(most)} or {last}"


class NoRoom(ValueError):
    """There is no memory for one more update."""


class Strategy(ABC):
    """Turns the updates of a round into the next model. Called from the compute thread, one call at a time.

    Attributes:
        weighs_samples: an update of more samples weighs more. False: their number does not matter.
        adds_sums: it needs the sum of the updates alone, so that :meth:`add_sum` works.
        metrics: names of metrics that the clients' training rule has to announce.
        takes_repeats: several updates of one client may count in a round.
        uses_steps: it needs the number of optimizer steps that a client announces.
        buffer_rule: how buffers of integers and booleans are merged, unless the configuration says otherwise.
        epsilon: what the run has spent of differential privacy so far; None: it gives none. epsilon_budget: what it may
            spend; None: there is no limit.
        bounds: on the updates of a round, with `limits.trust` = `adversarial`; None: it takes them as they are.
    """

    choice: ClassVar[str] = ""  # its name in the configuration, of a built-in one
    Options: ClassVar[type[BaseModel]] = Options
    weighs_samples = True
    adds_sums = False
    metrics: tuple[str, ...] = ()
    takes_repeats = True
    uses_steps = False
    buffer_rule: ClassVar[str] = "max"
    epsilon: float | None = None
    epsilon_budget: float | None = None
    bounds: Bounds | None = None

    @property
    def masked_grid(self) -> CommonGrid:
        """The grid to which clients round their updates in the next round, with secure aggregation."""
        return EXACT

    @abstractmethod
    def begin(self, round_id: int, base: Tensor) -> None:
        """Start a round, or start it anew.

        Args:
            round_id: the round.
            base: float32, shape (D,): the model that the clients hold. It stays as it is until the round is finished.
        """

    @property
    def sections(self) -> Mapping[str, int]:
        """Sections that each update has to have beside the model's, in this order, and the number of values of each."""
        return {}

    def broadcast(self) -> Tensor | None:
        """Return what the clients' training rule needs beside the model, float32, shape (E,), of a length that never
        changes: it is sent behind the model, after each round. None: nothing."""
        return None

    def weights(self, facts: Facts) -> tuple[float, ...]:
        """Return the numbers above 0 by which an update counts, as many for each: a client gains by a larger one. Where
        clients may lie they are bounded. Empty: all updates count alike.

        Raises:
            ValueError: the update cannot be used.
        """
        return (float(facts.num_samples),) if self.weighs_samples else ()

    def believed(self, facts: Facts, most: tuple[float, ...]) -> Facts:
        """Return what may be believed of these facts: those of which no :meth:`weights` is more than ``most``, up to
        the rounding to whole samples, at least one, and to whole steps. Here weights are in proportion to samples.

        Raises:
            ValueError: the update cannot be used.
        """
        samples = facts.num_samples
        within = (int(samples * limit / weight) for weight, limit in zip(self.weights(facts), most, strict=True))
        return dataclasses.replace(facts, num_samples=max(1, min(samples, *within)))

    @abstractmethod
    def add(self, update: Update, facts: Facts) -> None:
        """Take in one update. It either counts in full or, with an exception, not at all.

        Args:
            update: its sections, those that :attr:`sections` names.
            facts: what its client has announced of it.

        Raises:
            ValueError: the update cannot be used; the text says why.
        """

    def add_sum(self, partial: PartialSum) -> None:
        """Take in the exact sum of a site's updates, in full or, with an exception, not at all.

        Raises:
            ValueError: it cannot be used; the text says why.
        """
        raise NotImplementedError(f"{self.name} needs the updates one by one")

    def add_masked(self, partial: PartialSum, facts: Sequence[Facts]) -> None:
        """Take in the exact sum of updates of which none is known by itself, with secure aggregation.

        Args:
            facts: what their clients have announced, one for each update, with the samples that it counts as in front
                of this strategy.

        Raises:
            ValueError: it cannot be used; the text says why.
        """
        self.add_sum(partial)

    def add_noise(self, draw: Callable[[int], Tensor]) -> None:
        """Add noise to the exact sum, as :meth:`.ExactMean.add_noise` does, with :attr:`adds_sums`."""
        raise NotImplementedError(f"{self.name} has no exact sum")

    def terms(self) -> Mapping[str, Any]:
        """Options that its clients are sent beside those of their training rule."""
        return {}

    def order(self, round_id: int, clients: Sequence[int]) -> RoundOrder | None:
        """Return how the clients are to train in a round that begins, where that differs from the configuration; None:
        it does not. The controller sends it, after it has written it to the disk: a round that is repeated after a
        crash has the same order, whatever this returns then. It is called once for each round that is done, or
        repeated, so that a state which it changes is as without the crash. What the caller of the round orders, for
        all clients or single ones, is over it.

        Args:
            round_id: the round.
            clients: ids of those that are ready, ascending.
        """
        return None

    @property
    def gives_orders(self) -> bool:
        """Whether :meth:`order` may return orders."""
        return type(self).order is not Strategy.order

    def undone(self, rounds: int) -> None:  # noqa: B027 - most strategies need not know
        """Note that so many rounds were committed, and are done again, as no checkpoint has them any more."""

    def end_reason(self) -> str:
        """Why the run ends before its next round; empty: it goes on."""
        return ""

    @abstractmethod
    def finish(self, weights: Tensor) -> None:
        """Change ``weights``, float32, shape (D,), in place to the next model. At least one update has been added."""

    @property
    def name(self) -> str:
        """For reports and checkpoints."""
        return type(self).__name__

    def lay_out(self, shapes: Sequence[Sequence[int]]) -> None:  # noqa: B027 - most strategies see a vector alone
        """Learn the shapes of the model's tensors, in the order of the vector, before a run. A built-in strategy takes
        the size of the model from them: it may have been made to check the settings, when there was no model."""

    def check(self, config: FederatedConfig) -> None:  # noqa: B027 - most strategies work by any rules
        """Check the rules once, before a run. Raises ConfigError: the strategy cannot work by them."""

    def marks(self) -> Mapping[str, tuple[int, ...]]:
        """Clients of this round whose updates it changed, by what it did, for the round's report."""
        return {}

    def state(self) -> Mapping[str, Tensor]:
        """Tensors that have to be kept from round to round."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - a strategy without state has nothing to do
        """Restore what :meth:`state` gave. Raises CheckpointError: it does not fit."""


def _asks_inner(kind: type[WrappedStrategy]) -> type[WrappedStrategy]:
    """Give it all properties and methods of :class:`Strategy` that it lacks: they are those of the inner strategy."""
    for name, member in vars(Strategy).items():
        is_asked = isinstance(member, property) or (callable(member) and name[0] != "_" and name != "Options")
        if is_asked and name not in vars(kind):
            setattr(kind, name, property(operator.attrgetter(f"_inner.{name}")))
    return kind


@_asks_inner
class WrappedStrategy(Strategy):
    """A strategy in front of another one, which does all that it does not do itself."""

    add_sum = Strategy.add_sum  # it refuses: what changes single updates has none of them in a sum
    epsilon = property(operator.attrgetter("_inner.epsilon"))

    def __init__(self, inner: Strategy) -> None:
        self._inner = inner
        self.weighs_samples, self.adds_sums, self.metrics = inner.weighs_samples, inner.adds_sums, inner.metrics
        self.takes_repeats, self.uses_steps = inner.takes_repeats, inner.uses_steps
        self.epsilon_budget = inner.epsilon_budget

    def begin(self, round_id: int, base: Tensor) -> None:
        self._inner.begin(round_id, base)

    def add(self, update: Update, facts: Facts) -> None:
        self._inner.add(update, facts)

    def finish(self, weights: Tensor) -> None:
        self._inner.finish(weights)


class FedAvg(Strategy):
    """The mean of the clients' models, weighted by their samples."""

    choice = "fedavg"
    adds_sums = True

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._mean: ExactMean | None = None  # made at the first round: a controller that waits needs no sum
        self._base: Tensor | None = None

    def lay_out(self, shapes: Sequence[Sequence[int]]) -> None:
        self._dim = sum(map(math.prod, shapes))

    def begin(self, round_id: int, base: Tensor) -> None:
        if self._mean is None:
            self._mean = ExactMean(self._dim)
        self._mean.reset()
        self._base = base

    def add(self, update: Update, facts: Facts) -> None:
        assert self._mean is not None, "begin() comes first"
        assert self._base is not None
        self._mean.add(update.model, base=self._base, num_samples=facts.num_samples)

    def add_sum(self, partial: PartialSum) -> None:
        assert self._mean is not None, "begin() comes first"
        self._mean.add_sum(partial)

    def add_noise(self, draw: Callable[[int], Tensor]) -> None:
        assert self._mean is not None, "begin() comes first"
        self._mean.add_noise(draw)

    def finish(self, weights: Tensor) -> None:
        assert self._mean is not None, "begin() comes first"
        for place, delta in self._mean.blocks():
            self._step(place, delta, weights[place])

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        """Change one piece of the weights; ``delta`` is float64 and may be used up."""
        weights.copy_(delta.add_(weights))


class WithBuffers(FedAvg):
    """A strategy with float32 buffers of the size of the model."""

    names: tuple[str, ...] = ()

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self._make_buffers()

    def lay_out(self, shapes: Sequence[Sequence[int]]) -> None:
        super().lay_out(shapes)
        self._make_buffers()

    def _make_buffers(self) -> None:
        self._buffers = {name: torch.zeros(self._dim, dtype=torch.float32) for name in self.names}

    def state(self) -> Mapping[str, Tensor]:
        return self._buffers

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, buffer in self._buffers.items():
            if name not in state or (state[name].shape, state[name].dtype) != (buffer.shape, buffer.dtype):
                raise CheckpointError(
                    f"the checkpoint holds no {name!r} of {self._dim} values for {type(self).__name__}: made with "
                    f"another strategy or model. Use the same, or start afresh in another state directory"
                )
            buffer.copy_(state[name])


class ServerOptions(Options):
    """Options of a strategy that is an optimizer of the server."""

    lr: Positive = 1.0
    """Learning rate of the server."""


class FedAvgMOptions(ServerOptions):
    """Options of FedAvgM."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the server."""
    nesterov: bool = False
    """Whether the step looks ahead: `w <- w + lr (delta + momentum v)`, as DiLoCo's outer optimizer does."""


class FedAvgM(WithBuffers):
    """FedAvg with momentum at the server."""

    choice = "fedavgm"
    names = ("server_momentum",)

    Options = FedAvgMOptions

    def __init__(self, dim: int, *, lr: float = 1.0, momentum: float = 0.9, nesterov: bool = False) -> None:
        super().__init__(dim)
        self._lr, self._momentum, self._nesterov = lr, momentum, nesterov

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        velocity = self._buffers["server_momentum"][place]
        velocity.mul_(self._momentum).add_(delta)
        if self._nesterov:
            weights.add_(delta.add_(velocity, alpha=self._momentum), alpha=self._lr)
        else:
            weights.add_(velocity, alpha=self._lr)
