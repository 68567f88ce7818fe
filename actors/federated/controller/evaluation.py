"""Evaluation by clients as pure objects: whose results are awaited, and what the results say together."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gradbus.actors.aggregation.typical import most_samples
from gradbus.actors.federated.protocol import PAUSED
from gradbus.runtime.config.federated import OF_CLIENTS, LimitSettings
from gradbus.runtime.wire.control import EvaluationResult

LOST = "client lost"
LATE = "no result in time"
NO_SAMPLES = "a result without samples, or with too many"
MAX_VALUE = 1e30  # beyond it a metric is as good as none, and no sum may overflow
MAX_NAMES = 32  # metrics of an evaluation, all clients together
MAX_REASONS = 8  # that a report counts apart
MAX_REASON_CHARS = 120
WORST = 3  # clients that a report names for each metric
OTHERS = "other reasons"
_SPREAD = (".median", ".min", ".max", ".std")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMetric:
    """One metric over the clients that have found it.

    Attributes:
        mean: weighted by samples. median: of all clients, each counted once; None in reports of earlier versions.
        std: population standard deviation over clients, each counted once. min, max: of all. clients: how many they
            are.
        worst: id and value of the worst clients, the worst one first.
    """

    mean: float
    median: float | None = None
    std: float = 0.0
    min: float
    max: float
    clients: int
    worst: tuple[tuple[int, float], ...] = ()

    @property
    def spread(self) -> dict[str, float]:
        """All that is known of the metric, by name: mean, median, std, min and max. Reports of earlier versions have no
        median."""
        known = {"mean": self.mean, "median": self.median, "std": self.std, "min": self.min, "max": self.max}
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEvaluation:
    """The evaluation of a model by clients on their own data. Without fields: there was none.

    Attributes:
        asked: clients that were asked. answered: of them, those whose result counts. num_samples: of these, together.
        seconds: from the request to the last result, or to the deadline.
        metrics: by name. missing: why results are missing, with the number of clients.
    """

    asked: int = 0
    answered: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    metrics: Mapping[str, ClientMetric] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; empty: there was none."""
        if not self.asked:
            return {}
        return {**asdict(self), "seconds": round(self.seconds, 6)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ClientEvaluation:
        """The inverse of :meth:`to_json`."""
        metrics = {
            name: ClientMetric(**{**found, "worst": tuple((int(one), value) for one, value in found.get("worst", ()))})
            for name, found in entry.get("metrics", {}).items()
        }
        return cls(**{**entry, "metrics": metrics})

    def without_clients(self) -> ClientEvaluation:
        """The evaluation without what names clients."""
        metrics = {name: replace(one, worst=()) for name, one in self.metrics.items()}
        return ClientEvaluation(
            asked=self.asked,
            answered=self.answered,
            num_samples=self.num_samples,
            seconds=self.seconds,
            metrics=metrics,
            missing=self.missing,
        )

    def named(self, least_answered: float = 0.0) -> dict[str, float]:
        """All numbers by name: ``client.loss`` is a mean, ``client.loss.median``, ``.max``, ``.min`` and ``.std`` what
        else there is of it. A client's metric of such a name is not among them: it would stand for another. Nor
        is one that fewer than this share of the asked clients have found."""
        found: dict[str, float] = {}
        for name, one in self.metrics.items():
            if name.endswith(_SPREAD) or one.clients < least_answered * self.asked:
                continue
            found |= {
                f"{OF_CLIENTS}{name}" + (f".{key}" if key != "mean" else ""): value for key, value in one.spread.items()
            }
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossSiteRow:
    """One model on the data of all clients.

    Attributes:
        model: the client whose local model it is; None: the global model.
        failure: why it was not evaluated at all; empty: it was.
        results: metrics by name, of each client that has evaluated it. num_samples: of these. missing: of the others,
            why.
    """

    model: int | None
    failure: str = ""
    results: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    num_samples: Mapping[int, int] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossSite:
    """Models on the data of all clients.

    Attributes:
        round_id: after which it was made.
        clients: ids of those that were asked, ascending. rows: the global model, then local ones by id.
    """

    round_id: int
    clients: tuple[int, ...]
    rows: tuple[CrossSiteRow, ...]

    def names(self) -> list[str]:
        """The metrics that the most results have, at most MAX_NAMES, in the order in which they came."""
        counts = Counter(name for row in self.rows for metrics in row.results.values() for name in metrics)
        shown = {name for name, _ in counts.most_common(MAX_NAMES)}
        return [name for name in counts if name in shown]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object. Ids are texts where they are keys."""
        return asdict(self)


class OpenEvaluation:
    """Knows who was asked to evaluate one model, and what has come. A client that is gone is not awaited, nor is
    anybody after the deadline.

    Attributes:
        round_id: of the model. asked: ids. deadline_at_s: by the clock of ``now_s``.
        open: clients whose result is awaited; each method takes time by what it changes, not by who is asked.
        results: by client. names: of the metrics in them. failures: of the others that are not awaited any more, why.
    """

    def __init__(
        self, round_id: int, asked: Iterable[int], *, now_s: float, timeout_s: float, max_samples: int = 1 << 40
    ) -> None:
        """Ask at ``now_s``. ``max_samples``: that a result may claim."""
        self.round_id = round_id
        self.asked = frozenset(asked)
        self.open = set(self.asked)
        self.began_s = now_s
        self.deadline_at_s = now_s + timeout_s
        self._max_samples = max_samples
        self.results: dict[int, EvaluationResult] = {}
        self.names: set[str] = set()
        self.failures: dict[int, str] = {}

    def add(self, client_id: int, result: EvaluationResult) -> bool:
        """Take a result; whether it changes anything. The first one of a client counts, also of one that was taken for
        lost, or that had paused."""
        is_awaited = client_id in self.open or self.failures.get(client_id) in (LOST, PAUSED)
        if result.round_id != self.round_id or not is_awaited or client_id in self.results:
            return False
        self.open.discard(client_id)
        self.failures.pop(client_id, None)
        if result.failure:
            self.failures[client_id] = result.failure[:MAX_REASON_CHARS]
        elif not 1 <= result.num_samples <= self._max_samples:
            self.failures[client_id] = NO_SAMPLES
        else:
            self.results[client_id] = result
            self.names.update(result.metrics)
        return True

    def follow_clients(self, present: Collection[int], paused: Collection[int] = ()) -> list[int]:
        """Follow the registry: clients that are not ``present`` are not awaited. Returns those that are not ``paused``
        either, ascending: they are lost."""
        away = self.open.difference(present)
        self.open -= away
        self.failures.update({one: PAUSED if one in paused else LOST for one in away})
        return sorted(away.difference(paused))

    def is_over(self, now_s: float) -> bool:
        """Whether nothing more is awaited."""
        return not self.open or now_s >= self.deadline_at_s

    def close(self) -> None:
        """Nothing more is taken."""
        self.failures.update(dict.fromkeys(self.open, LATE))
        self.open.clear()

    def row(self, model: int | None) -> CrossSiteRow:
        """The results as a row of a cross-site evaluation."""
        results = dict(sorted(self.results.items()))
        return CrossSiteRow(
            model=model,
            results={one: dict(result.metrics) for one, result in results.items()},
            num_samples={one: result.num_samples for one, result in results.items()},
            missing=dict(sorted(self.failures.items())),
        )

    def summary(self, limits: LimitSettings, maximize: Collection[str], *, now_s: float) -> ClientEvaluation:
        """Return the summary of the results, in an order that does not depend on arrival.

        Args:
            limits: how many samples one client may count as, as of updates: the median is that of these results.
            maximize: metrics of which a large value is good.
        """
        results = dict(sorted(self.results.items()))
        most = most_samples(limits, [result.num_samples for result in results.values()])
        values: dict[str, dict[int, float]] = {}
        for client_id, result in results.items():
            for name, value in result.metrics.items():
                if abs(value) < MAX_VALUE:
                    values.setdefault(name, {})[client_id] = value
        shown = sorted(values, key=lambda name: -len(values[name]))[:MAX_NAMES]
        weights = {
            client_id: result.num_samples if most is None else min(result.num_samples, most)
            for client_id, result in results.items()
        }
        return ClientEvaluation(
            asked=len(self.asked),
            answered=len(results),
            num_samples=sum(result.num_samples for result in results.values()),
            seconds=max(0.0, now_s - self.began_s),
            metrics={
                name: _over_clients(values[name], weights, largest_is_best=name in maximize)
                for name in values
                if name in shown
            },
            missing=_counted(self.failures.values()),
        )


def _over_clients(values: Mapping[int, float], weights: Mapping[int, int], *, largest_is_best: bool) -> ClientMetric:
    plain = math.fsum(values.values()) / len(values)
    total = sum(weights[one] for one in values)
    mean = math.fsum(weights[one] * value for one, value in values.items()) / total
    smallest, largest = min(values.values()), max(values.values())
    ordered = sorted(values.items(), key=lambda item: (item[1] if largest_is_best else -item[1], item[0]))
    variance = math.fsum((value - plain) ** 2 for value in values.values()) / len(values)
    return ClientMetric(
        mean=min(max(mean, smallest), largest),  # rounding must not lead beyond
        median=statistics.median(values.values()),
        std=math.sqrt(variance),
        min=smallest,
        max=largest,
        clients=len(values),
        worst=tuple(ordered[:WORST]),
    )


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    counts = Counter(reasons).most_common()
    found = dict(counts[:MAX_REASONS])
    if rest := sum(count for _, count in counts[MAX_REASONS:]):
        found[OTHERS] = found.get(OTHERS, 0) + rest
    return found
