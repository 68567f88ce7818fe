"""Bounds on what one update may do, by what is typical of all: ``limits.trust = adversarial``.

A strategy bounds nothing itself. Its :meth:`.Strategy.weights` say by which numbers an update counts, whatever these
are made of: its samples, in FedNova samples and steps together, in q-FedAvg a power of its loss. None may be more than
``times`` the median of the round, over what its clients have announced before any update is added. And no section of
an update, the model's or another, may be longer than ``times`` the median norm of the last committed round. What is
more counts as that much: the announced numbers are believed up to there, and the section is scaled down
(``bounded_strategy.py``).

What has no earlier round waits for its own: the weights of every synchronous round for its announcements, the norms of
a first round for its updates, which are then measured before any is added (``held_updates.py``). Asynchronous rounds
have the weights of the last committed buffer, too. With fewer liars than honest clients the median lies between two
numbers of honest ones. Of an even number it is the lower one, so that even half of them cannot raise it. A norm of zero
says nothing of what is typical, and is not counted; but where most updates of a round are zero, those that are not do
not say what is typical of later rounds, if that is known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gradbus.actors.aggregation.typical import lower_median
from gradbus.actors.aggregation.updates import Facts
from gradbus.runtime.errors import CheckpointError

ENOUGH = 2  # clients that decide what is typical of later rounds: one alone would decide it by itself
_WEIGHTS, _NORMS = "typical_weights", "typical_norms"  # in a checkpoint

Norms = Mapping[str, float]
T = TypeVar("T")


class Weighing(Protocol):
    """Names what :class:`Bounds` needs of a strategy: by what it weighs updates. See :class:`.strategies.Strategy`."""

    metrics: tuple[str, ...]

    def weights(self, facts: Facts) -> tuple[float, ...]: ...

    def believed(self, facts: Facts, most: tuple[float, ...]) -> Facts: ...


class Bounds:
    """Keeps the bounds of one round at a time, and what is typical of the last one. Pure.

    The loop opens and settles a round before updates are added; what has counted is noted and committed from the
    compute thread, which is idle when a round is opened.
    """

    def __init__(
        self,
        strategy: Weighing,
        *,
        times: float,
        sections: Sequence[str],
        fixed_samples: bool = False,
        by_rounds: bool = True,
    ) -> None:
        """Begin without an open round.

        Args:
            strategy: whose updates they are for. times: factor of all medians, 1 or more.
            sections: whose norms are bounded.
            fixed_samples: samples have another limit, so that an update of one sample stands for all.
            by_rounds: weights are compared within a round; False: with the last committed one.
        """
        self._strategy = strategy
        self._times = times
        self._sections = tuple(sections)
        self._fixed_samples = fixed_samples
        self._by_rounds = by_rounds
        one, other = self._weights_of_all(1), self._weights_of_all(2)
        self._weighs = one is None or one != other
        self._num_weights = None if one is None else len(one)
        self._round_id = -1
        self._weights: tuple[float, ...] | None = None  # typical of the open round; None: not known yet
        self._norms: Norms | None = None
        self._last_weights: tuple[float, ...] | None = None  # of the last committed round
        self._last_norms: Norms = {}
        self._counted: dict[int, tuple[tuple[float, ...], Norms]] = {}  # by client, as of its newest update

    def _weights_of_all(self, number: int) -> tuple[float, ...] | None:
        """Return the weights of a client all of whose figures are this; None: the strategy, one of the user's own,
        cannot use such figures."""
        metrics = dict.fromkeys(self._strategy.metrics, float(number))
        try:
            return self._weights_of(Facts(client_id=0, num_samples=number, steps=number, metrics=metrics))
        except ValueError:
            return None

    def _weights_of(self, facts: Facts) -> tuple[float, ...]:
        """Return the weights of an update. Raises ValueError: it cannot be used, which no median may suffer from."""
        weights = usable(self._strategy.weights, self._of_one_sample(facts) if self._fixed_samples else facts)
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"its weights are {weights}: expected finite numbers above 0")
        return weights

    @staticmethod
    def _of_one_sample(facts: Facts) -> Facts:
        return dataclasses.replace(facts, num_samples=1)

    def check(self, facts: Facts) -> None:
        """Raise ValueError if an update with these facts cannot be used, so that it has no part in a median."""
        if self._weighs:
            self._weights_of(facts)

    # The open round

    def open_round(self, round_id: int) -> None:
        """Open a round; another attempt at it changes nothing."""
        if round_id == self._round_id:
            return
        self._round_id = round_id
        known = self._last_weights if not self._by_rounds else None
        self._weights = known if self._weighs else ()
        self._norms = self._last_norms if self._last_norms.keys() >= set(self._sections) else None

    @property
    def is_settled(self) -> bool:
        """Return whether updates may be added."""
        return self._weights is not None and self._norms is not None

    @property
    def needs_norms(self) -> bool:
        """Return whether updates have to be measured before any is added, as nothing is known of an earlier round."""
        return self._norms is None

    def settle(self, announced: Iterable[Facts], measured: Iterable[Norms]) -> None:
        """Decide what is typical, where it is not known: by what clients have announced, and by the norms of updates,
        one of each client. Without one usable announcement nothing is decided."""
        if self._weights is None:
            self._weights = self._typical_weights(announced)
        if self._norms is None:
            self._norms = {**_typical_norms(self._sections, list(measured)), **self._last_norms}

    def _typical_weights(self, announced: Iterable[Facts]) -> tuple[float, ...] | None:
        found = []
        for facts in announced:
            try:
                found.append(self._weights_of(facts))
            except ValueError:  # it will be refused
                continue
        return tuple(_medians(found)) if found else None

    def in_force(self) -> dict[str, object]:
        """Return the medians of the open round, as JSON, for the journal."""
        return {"weights": list(self._weights or ()), "norms": dict(self._norms or {})}

    def set_in_force(self, round_id: int, weights: Sequence[float], norms: Norms) -> None:
        """Open a round by what :meth:`in_force` gave. Raises ValueError: it did not give this."""
        values = [*weights, *norms.values()] if isinstance(weights, list) and isinstance(norms, Mapping) else [None]
        if not all(isinstance(value, float) and 0 < value < math.inf for value in values):
            raise ValueError(f"medians of round {round_id} are {values}: expected positive numbers")
        self._round_id, self._weights, self._norms = round_id, tuple(weights), dict(norms)

    def believed(self, facts: Facts) -> Facts:
        """Return what is believed of these facts. Raises ValueError: the update cannot be used."""
        if not self._weights:
            return facts
        most, given = tuple(self._times * typical for typical in self._weights), self._weights_of(facts)
        if all(one <= limit for one, limit in zip(given, most, strict=True)):
            return facts
        believe = functools.partial(self._strategy.believed, most=most)
        if not self._fixed_samples:
            return usable(believe, facts)
        found = usable(believe, self._of_one_sample(facts))
        return dataclasses.replace(found, num_samples=facts.num_samples)

    def most_norm(self, section: str) -> float:
        """Return the largest norm that this section may have."""
        return self._times * (self._norms or {}).get(section, math.inf)

    @property
    def sections(self) -> Sequence[str]:
        """Return the sections whose norms are bounded."""
        return self._sections

    # What has counted

    def begin(self) -> None:
        """Forget what has counted in a round that was not committed."""
        self._counted.clear()

    def count(self, facts: Facts, norms: Norms) -> None:
        """Note an update that counts, as it was before it was bounded."""
        self._counted[facts.client_id] = self._weights_of(facts), norms

    def commit(self) -> None:
        """Let the clients that have counted decide what is typical of the next round, each once, if they are enough."""
        counted = self._counted.values()
        if len(counted) >= ENOUGH:
            if self._weighs and not self._by_rounds:
                self._last_weights = tuple(_medians([weights for weights, _ in counted]))
            measured = [norms for _, norms in counted]
            found = _typical_norms(self._sections, measured)
            few = {name for name in found if 2 * sum(norms[name] > 0 for norms in measured) <= len(measured)}
            # Where most are zero, the few others may be liars: they decide only what is not known at all.
            self._last_norms = {**found, **self._last_norms, **{name: found[name] for name in found.keys() - few}}
        self._counted.clear()

    def state(self) -> dict[str, Tensor]:
        """Return tensors for a checkpoint: float64; NaN: not known."""
        norms = [self._last_norms.get(name, math.nan) for name in self._sections]
        return {
            _WEIGHTS: torch.tensor(self._last_weights or (), dtype=torch.float64),
            _NORMS: torch.tensor(norms, dtype=torch.float64),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state` gave. Where a checkpoint has nothing of the kind, as of a cooperative run or with
        another strategy, the next round is a first one.

        Raises:
            CheckpointError: it is damaged.
        """
        given = {name: state[name].tolist() if _is_vector(state.get(name)) else [] for name in (_WEIGHTS, _NORMS)}
        weights, norms = given[_WEIGHTS], given[_NORMS]
        if not all(0 < one < math.inf for one in weights) or not all(0 < one < math.inf or one != one for one in norms):
            raise CheckpointError(
                f"{_WEIGHTS} or {_NORMS} of the checkpoint holds {[*weights, *norms]}: expected positive numbers. "
                f"It is damaged: start from another one"
            )
        is_ours = weights and self._num_weights in (None, len(weights))  # another strategy may have others
        self._last_weights = tuple(weights) if is_ours else None
        pairs = zip(self._sections, norms, strict=False) if len(norms) == len(self._sections) else ()
        self._last_norms = {name: norm for name, norm in pairs if norm == norm}


def usable(compute: Callable[[Facts], T], facts: Facts) -> T:
    """Return what a strategy computes of announced numbers.

    Raises:
        ValueError: it cannot be computed: a number is missing, or leads out of the range of floats.
    """
    try:
        return compute(facts)
    except (ArithmeticError, LookupError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the strategy cannot compute with the numbers that it announces ({reason})") from error


def _is_vector(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float64 and tensor.dim() == 1


def _medians(weights: Sequence[tuple[float, ...]]) -> list[float]:
    """Return the median of each place, of at least one update."""
    return [sorted(place)[(len(place) - 1) // 2] for place in zip(*weights, strict=True)]


def _typical_norms(sections: Sequence[str], measured: Sequence[Norms]) -> dict[str, float]:
    """Return the median norm of each section of these updates; none of a section that is zero in all."""
    found = {name: lower_median(norms[name] for norms in measured if norms[name] > 0) for name in sections}
    return {name: typical for name, typical in found.items() if typical is not None}
