"""A strategy behind bounds on its updates, where clients may lie.

Explicit limits take precedence: with ``limits.cap_samples`` samples are not bounded here, and with ``limits.clip_norm``
the model's section is not (``clipping.py``), nor with central privacy, which refuses what is longer than its own bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from torch import Tensor

from gradbus.actors.aggregation.bounds import Bounds, Norms
from gradbus.actors.aggregation.clipping import norm_of, scaled
from gradbus.actors.aggregation.strategies import Strategy, WrappedStrategy
from gradbus.actors.aggregation.updates import MODEL, Facts, Update
from gradbus.codecs import Parsed
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.logs import get_logger

WEIGHT_BOUNDED = "weight bounded"  # in the marks of a round's report

log = get_logger("controller")


def norm_mark(section: str) -> str:
    """The mark of an update of which this section was too long."""
    return "norm bounded" if section == MODEL else f"{section} bounded"


class BoundedStrategy(WrappedStrategy):
    """Keeps updates within :class:`Bounds` in front of another strategy."""

    bounds: Bounds

    def __init__(self, inner: Strategy, bounds: Bounds) -> None:
        super().__init__(inner)
        self.bounds = bounds
        self._base: Tensor | None = None
        self._marks: dict[str, set[int]] = {}

    def begin(self, round_id: int, base: Tensor) -> None:
        self._base, self._marks = base, {}
        self.bounds.begin()
        super().begin(round_id, base)

    def norms(self, update: Update) -> Norms:
        """The norms of the sections that are bounded, of the model's as a difference to the base. Raises ValueError:
        they are not finite."""
        assert self._base is not None, "begin() comes first"
        found = {name: norm_of(_section(update, name), self._base) for name in self.bounds.sections}
        for name, norm in found.items():
            if not math.isfinite(norm):
                raise ValueError(f"section {name!r} of norm {norm}: expected finite values")
        return found

    def add(self, update: Update, facts: Facts) -> None:
        believed, norms = self.bounds.believed(facts), self.norms(update)
        short = self._shortened(update, norms)
        self._inner.add(short, believed)
        self.bounds.count(facts, norms)
        self._note(facts, believed, norms)

    def _shortened(self, update: Update, norms: Norms) -> Update:
        assert self._base is not None, "begin() comes first"
        for name, norm in norms.items():
            if norm > (most := self.bounds.most_norm(name)):
                short = scaled(_section(update, name), self._base, most / norm)
                others = {**update.others, name: short}
                update = update.with_model(short) if name == MODEL else dataclasses.replace(update, others=others)
        return update

    def _note(self, facts: Facts, believed: Facts, norms: Norms) -> None:
        too_much = [norm_mark(name) for name, norm in norms.items() if norm > self.bounds.most_norm(name)]
        if believed != facts:
            too_much.insert(0, WEIGHT_BOUNDED)
        for mark in too_much:
            self._marks.setdefault(mark, set()).add(facts.client_id)
        if too_much:
            log.info(
                "update bounded",
                client=facts.client_id,
                round=facts.round_id,
                marks=too_much,
                announced={"samples": facts.num_samples, "steps": facts.steps, **facts.metrics},
                believed={"samples": believed.num_samples, "steps": believed.steps, **believed.metrics},
                norms=dict(norms),
                most={name: self.bounds.most_norm(name) for name in norms},
            )

    def marks_of(self, client_id: int) -> list[str]:
        """What was bounded of the updates of this client in this round."""
        return [mark for mark, clients in self._marks.items() if client_id in clients]

    def marks(self) -> Mapping[str, tuple[int, ...]]:
        return {**{mark: tuple(sorted(ids)) for mark, ids in self._marks.items()}, **self._inner.marks()}

    def finish(self, weights: Tensor) -> None:
        super().finish(weights)
        self.bounds.commit()

    def state(self) -> Mapping[str, Tensor]:
        return {**super().state(), **self.bounds.state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        self.bounds.load_state(state)


def _section(update: Update, name: str) -> Parsed:
    return update.model if name == MODEL else update.others[name]


def bounded(strategy: Strategy, config: FederatedConfig) -> Strategy:
    """The strategy behind the bounds of a run in which clients may lie; itself where they cooperate."""
    limits = config.limits
    if not limits.is_adversarial:
        return strategy
    has_own_norm = limits.clip_norm is not None or config.privacy.name == "central"
    bounds = Bounds(
        strategy,
        times=limits.cap_times_median,
        sections=[*([] if has_own_norm else [MODEL]), *strategy.sections],
        fixed_samples=limits.cap_samples is not None,
        by_rounds=config.mode == "synchronous",
    )
    return BoundedStrategy(strategy, bounds)
