"""What a selector is: a pure choice of the clients of a round, by the seed of the run and the number of the round.

A draw is a number for each client that depends on seed, round and id alone, not on who else is there. So a round that
is tried again, or again after a resume, has the same participants among the same ready clients, and where one is gone
only that one is replaced.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from gradbus.runtime.choices import SELECTORS, Choice, Options
from gradbus.runtime.errors import ConfigError

_MASK = (1 << 64) - 1
_GAMMA = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """Holds what is known of a client that is ready for a round.

    Attributes:
        num_samples: of its newest update that counted, at most so many as an update may weigh; 0: none has counted.
        loss: mean training loss of that update; None: there is none, or it was not finite.
        rounds: in which it was asked to take part, and in which its update counted or not.
    """

    client_id: int
    num_samples: int = 0
    loss: float | None = None
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """The random numbers of one round.

    Attributes:
        seed: of the run. round_id: of the round.
    """

    seed: int
    round_id: int

    def uniform(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """A number in (0, 1) for each id: the outputs of SplitMix64 (Steele, Lea and Flood, Fast Splittable
        Pseudorandom Number Generators, OOPSLA 2014, figure 17) from a state of its own for each, as float64, shape
        (len(ids),)."""
        start = _mixed(_mixed((self.seed + _GAMMA) & _MASK) ^ self.round_id)
        with np.errstate(over="ignore"):
            z = np.asarray(ids, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(start)
            for _ in range(2):  # ids are mostly 0, 1, 2 ...: one pass would do for those, two do for any
                z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
                z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
                z = z ^ (z >> np.uint64(31))
        return ((z >> np.uint64(11)).astype(np.float64) + 0.5) / float(1 << 53)

    def order(self, ids: Sequence[int], weights: Sequence[float] | None = None) -> list[int]:
        """All ids in a random order. With weights, the first k are a sample of k without replacement, each drawn in
        proportion to its weight: by ascending ``-ln(u) / w`` (Efraimidis and Spirakis, Weighted random sampling with a
        reservoir, 2006, algorithm A). Weights are above 0."""
        keys = -np.log(self.uniform(ids)) / (1.0 if weights is None else np.asarray(weights, dtype=np.float64))
        return [ids[place] for place in np.lexsort((np.asarray(ids), keys))]


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return z ^ (z >> 31)


class SelectorOptions(Options):
    """Options that every selector has."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the ready clients whose updates make a round, rounded up."""
    count: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Number of clients whose updates make a round, in place of `fraction`; all that are ready if there are fewer."""
    over_select: Annotated[float, Field(ge=1, le=10)] = 1.0
    """How many times as many clients are asked, so that slow and lost ones are not waited for: the first updates count,
    and the round of the others is ended."""

    @model_validator(mode="after")
    def _consistent(self) -> SelectorOptions:
        if self.count is not None and self.fraction != 1.0:
            raise ValueError("give fraction or count, not both")
        if self.over_select > 1.0 and not is_partial(self):
            raise ValueError("over_select asks more clients than are needed: set fraction (below 1) or count")
        return self


def is_partial(options: Any) -> bool:
    """Whether with these options not all ready clients may take part in a round."""
    return options.count is not None or options.fraction < 1.0


class Selector(ABC):
    """Says who takes part in a round. One of the user's inherits this class, and its ``Options`` those of this one.

    Attributes:
        partial: not all ready clients may take part. Clients then fetch the model of a round only if they do.
        reads_updates: it looks at the samples or losses that clients have announced. With differential privacy at the
            controller that is refused, as no noise is added to these.
    """

    Options: ClassVar[type[SelectorOptions]] = SelectorOptions
    reads_updates: ClassVar[bool] = True

    def __init__(self, *, fraction: float = 1.0, count: int | None = None, over_select: float = 1.0) -> None:
        """The options, as :class:`SelectorOptions` has checked them."""
        self._fraction, self._count, self._over_select = fraction, count, over_select
        self.partial = count is not None or fraction < 1.0

    def wanted(self, num_ready: int, minimum: int = 1) -> int:
        """Number of updates that make a round with so many ready clients: at least ``minimum``, as far as there are so
        many."""
        # 0.55 * 100 is 55.00000000000001, and 55 of 100 are that share.
        share = self._count if self._count is not None else math.ceil(self._fraction * num_ready - 1e-9)
        return min(num_ready, max(share, minimum))

    def asked(self, num_ready: int, wanted: int) -> int:
        """Number of clients that are asked for so many updates."""
        return min(num_ready, math.ceil(self._over_select * wanted - 1e-9))

    @abstractmethod
    def select(self, ready: Sequence[ClientFacts], count: int, draw: Draw) -> Sequence[int]:
        """Ids of ``count`` of these clients, each once.

        Args:
            ready: the clients that can take part, by ascending id, at least ``count``.
            draw: the random numbers of the round. Nothing else is random.
        """


def make_selector(choice: Choice) -> Selector:
    """The selector that a setting names.

    Raises:
        ConfigError: there is none, its options are wrong, or the user's class is no Selector.
    """
    if not issubclass(SELECTORS.find(choice.name), Selector):
        raise ConfigError(f"{SELECTORS.key}: {choice.name!r} is no selector: inherit gradbus.selectors.Selector")
    selector: Selector = SELECTORS.make(choice)
    return selector


def selected(selector: Selector, ready: Sequence[ClientFacts], count: int, draw: Draw) -> list[int]:
    """Return what the selector selects, ascending and checked: it may be the user's.

    Raises:
        ConfigError: not ``count`` of the ready clients.
    """
    found = sorted({int(client_id) for client_id in selector.select(ready, count, draw)})
    if len(found) != count or not {facts.client_id for facts in ready}.issuperset(found):
        raise ConfigError(
            f"{SELECTORS.key}: {type(selector).__name__}.select gave clients {found[:20]}: expected {count} of the "
            f"{len(ready)} that are ready, each once"
        )
    return found
