"""One liar of eight clients under each strategy, with `limits.trust` = `adversarial`: the table in docs/robust.md.

What is measured is the vector that a strategy hands to its server step: how far it is, with the liar, from that of the
seven others alone, as a multiple of the median of the honest clients' weighted updates. In a first round, which takes
its medians from its own updates, and in a second one, which has them of the round before; the larger of both counts.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.bounded_strategy import BoundedStrategy, bounded
from gradbus.actors.aggregation.fednova import FedNova
from gradbus.actors.aggregation.qfedavg import LOSS_BEFORE
from gradbus.actors.aggregation.scaffold import CONTROL
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.aggregation.updates import MODEL, Facts, Update
from gradbus.codecs import Parsed
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.config.federated import FederatedConfig

DIM, CLIENTS, LIAR = 2000, 8, 7
AT_MOST = 5.0  # times the median of the honest clients' weighted updates
STANDS_STILL = 0.1  # of the length of the vector without the liar
PAGE = Path(__file__).parents[3] / "docs" / "robust.md"

# With these the vector can be read off the model, or off the state of the strategy.
OPTIONS: dict[str, dict[str, float | bool]] = {
    "fedavgm": {"momentum": 0.0},
    "decoupled": {"lr": 1.0, "momentum": 0.0, "nesterov": False},
    "delayednesterov": {"lr": 1.0, "every": 1000},
    "qfedavg": {"q": 1.0},
}
# Of how many updates the vector is made, in each coordinate, where it is no mean of all seven.
MADE_OF = {"krum": 1, "median": 1, "multi_krum": 4, "bulyan": 3, "trimmed_mean": 5}
TIMES_COUNT = {"delayednesterov"}  # the sum of the updates, not their mean


@dataclass(frozen=True)
class Sent:
    """What a client has sent, with what it announces."""

    facts: Facts
    delta: Tensor
    control: Tensor

    def announcing(self, **changed: object) -> Sent:
        return replace(self, facts=replace(self.facts, **changed))  # type: ignore[arg-type]


def honest(client_id: int, round_id: int) -> Sent:
    """An update with a share of all in common, of a length, samples, steps and loss of its own. Those of the liar are
    typical, but for its lie."""
    common = torch.randn(DIM, generator=torch.Generator().manual_seed(round_id)) / math.sqrt(DIM)
    draw = torch.Generator().manual_seed(1000 * round_id + client_id)
    own, control = (torch.randn(DIM, generator=draw) / math.sqrt(DIM) for _ in range(2))
    length, loss = (float(0.6 + 0.9 * torch.rand(1, generator=draw)) for _ in range(2))
    samples, steps = (int(torch.randint(60, 140, (1,), generator=draw)) for _ in range(2))
    if client_id == LIAR:
        length, loss, samples, steps = 1.0, 1.0, 100, 100
    facts = Facts(
        client_id=client_id,
        num_samples=samples,
        round_id=round_id,
        steps=steps // 4,
        loss=loss,
        metrics={LOSS_BEFORE: loss},
    )
    return Sent(facts, length * (common + 0.7 * own), length * (control - common))


Lie = Callable[[Sent], Sent]
# Each column with all the ways in which it may be told.
LIES: dict[str, tuple[Lie, ...]] = {
    "samples": (lambda one: one.announcing(num_samples=1 << 30), lambda one: one.announcing(num_samples=1)),
    "loss": (
        lambda one: one.announcing(loss=9e5, metrics={LOSS_BEFORE: 9e5}),
        lambda one: replace(one.announcing(loss=9e5, metrics={LOSS_BEFORE: 9e5}), delta=0.0 * one.delta),
        lambda one: one.announcing(loss=0.0, metrics={LOSS_BEFORE: 0.0}),
    ),
    "steps": (lambda one: one.announcing(steps=1), lambda one: one.announcing(steps=10**6)),
    "control variate": (
        lambda one: replace(one, control=1e6 * one.control), lambda one: replace(one, control=-one.control)
    ),
    "direction": (lambda one: replace(one, delta=-one.delta),),
    "scale": (lambda one: replace(one, delta=1e6 * one.delta), lambda one: replace(one, delta=0.0 * one.delta)),
}  # fmt: skip


def all_at_once(one: Sent) -> Sent:
    for lies in LIES.values():
        one = lies[0](one)
    return one


def encoded(vector: Tensor) -> Parsed:
    return codecs.parse(codecs.get("fp32").encode(vector), expected_dim=DIM)


def made(name: str, trust: str = "adversarial") -> tuple[FederatedConfig, Strategy]:
    rule = {"scaffold": "scaffold", "qfedavg": "loss_before"}.get(name, "plain")
    config = FederatedConfig(
        strategy={"name": name, **OPTIONS.get(name, {})},
        limits={"trust": trust},
        clients={"num": CLIENTS, "min": CLIENTS - 1},
        training={"rule": rule, "optimizer": {"name": "sgd", "lr": 0.1}},
    )
    return config, inner_of(name, config)


def inner_of(name: str, config: FederatedConfig) -> Strategy:
    inner: Strategy = STRATEGIES.make(config.strategy, DIM)
    inner.lay_out([[DIM // 4, 2], [DIM // 2]])
    inner.check(config)
    return inner


def vector_of(name: str, inner: Strategy, change: Tensor, count: int) -> Tensor:
    """What the strategy has handed to its server step, from what that made of it."""
    if name in ("fedadam", "fedyogi", "fedadagrad"):
        return inner.state()["server_m"] / 0.1  # m <- 0.9 m + 0.1 delta, of a fresh one
    if name == "delayednesterov":
        return change * 1000
    return change


def rounds_of(name: str, sent: Mapping[int, Sequence[Sent]], trust: str = "adversarial") -> Iterator[dict[str, Tensor]]:
    """The vectors of two rounds: of the model, and of the control variate. The bounds go on, the strategy is fresh."""
    config, inner = made(name, trust)
    strategy = bounded(inner, config)
    for round_id, updates in sent.items():
        if round_id > 1:
            inner = inner_of(name, config)
            bounds = strategy.bounds
            strategy = inner if bounds is None else BoundedStrategy(inner, bounds)
        strategy.begin(round_id, torch.zeros(DIM))
        given = [
            Update(encoded(one.delta), {CONTROL: encoded(one.control)} if strategy.sections else {}) for one in updates
        ]
        if (bounds := strategy.bounds) is not None:
            assert isinstance(strategy, BoundedStrategy)
            bounds.open_round(round_id)
            assert bounds.needs_norms == (round_id == 1)
            bounds.settle([one.facts for one in updates], map(strategy.norms, given))
        for update, one in zip(given, updates, strict=True):
            strategy.add(update, one.facts)
        weights = torch.zeros(DIM)
        strategy.finish(weights)
        found = {MODEL: vector_of(name, inner, weights, len(updates)).double()}
        if strategy.sections:
            control = strategy.broadcast()
            assert control is not None
            found[CONTROL] = control.double().clone()
        yield found


def weighted_updates(name: str, updates: Sequence[Sent], section: str) -> list[float]:
    """How long each honest client's part of the vector without the liar is."""
    lengths = [float((one.delta if section == MODEL else one.control).norm()) for one in updates]
    if section == CONTROL:
        of_all = sum(one.facts.num_samples for one in updates) * CLIENTS / len(updates)
        return [one.facts.num_samples * length / of_all for one, length in zip(updates, lengths, strict=True)]
    if name == "qfedavg":
        losses = [one.facts.metrics[LOSS_BEFORE] for one in updates]
        h = sum(100 * length**2 + 10 * loss for length, loss in zip(lengths, losses, strict=True))  # L is 1 / 0.1
        return [10 * loss * length / h for loss, length in zip(losses, lengths, strict=True)]
    if name in MADE_OF or name == "geometric_median":
        return [length / MADE_OF.get(name, len(updates)) for length in lengths]
    samples = [one.facts.num_samples for one in updates]
    shares = [one / sum(samples) for one in samples]
    if name == "fednova":
        reach = [FedNova(1).reach(one.facts.steps) for one in updates]
        tau = sum(share * far for share, far in zip(shares, reach, strict=True))
        shares = [share * tau / far for share, far in zip(shares, reach, strict=True)]
    times = len(updates) if name in TIMES_COUNT else 1
    return [times * share * length for share, length in zip(shares, lengths, strict=True)]


@dataclass(frozen=True)
class Cell:
    """The largest distance, and the smallest length, as shares: see the text above."""

    distance: float
    length: float


@cache
def alone(name: str) -> list[dict[str, Tensor]]:
    """The vectors of the seven others."""
    return list(rounds_of(name, {r: [honest(i, r) for i in range(CLIENTS) if i != LIAR] for r in (1, 2)}))


@cache
def cell(name: str, lie: str, trust: str = "adversarial") -> Cell:
    distances, lengths = [0.0], [math.inf]
    for told in (all_at_once,) if lie == "all" else LIES[lie]:
        sent = {r: [told(honest(i, r)) if i == LIAR else honest(i, r) for i in range(CLIENTS)] for r in (1, 2)}
        for number, (found, others) in enumerate(zip(rounds_of(name, sent, trust), alone(name), strict=True), 1):
            for section, vector in found.items():
                parts = weighted_updates(name, sent[number][:LIAR], section)
                distances.append(float((vector - others[section]).norm()) / statistics.median(parts))
            lengths.append(float(found[MODEL].norm() / others[MODEL].norm()))
    return Cell(max(distances), min(lengths))


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", STRATEGIES.table)
def test_one_lie_of_one_client_moves_the_model_no_further_than_five_honest_updates(name: str, lie: str) -> None:
    found = cell(name, lie)
    assert found.distance <= AT_MOST
    assert found.length >= STANDS_STILL, "the model stands still"


@pytest.mark.parametrize(
    ("name", "lie"),
    [("fedavg", "scale"), ("fednova", "steps"), ("qfedavg", "loss"), ("scaffold", "control variate")],
)
def test_the_arithmetic_of_the_papers_lets_one_liar_have_its_way(name: str, lie: str) -> None:
    found = cell(name, lie, trust="cooperative")
    assert found.distance > 20 * AT_MOST or found.length < STANDS_STILL / 100


def test_a_loss_of_zero_does_not_stop_the_model_where_it_has_a_power_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "qfedavg", {"q": 0.2})
    told = LIES["loss"][2]

    def length(trust: str) -> float:
        sent = {1: [told(honest(i, 1)) if i == LIAR else honest(i, 1) for i in range(CLIENTS)]}
        others = {1: sent[1][:LIAR]}
        with_it, without = (next(rounds_of("qfedavg", of, trust))[MODEL] for of in (sent, others))
        return float(with_it.norm() / without.norm())

    assert length("cooperative") < STANDS_STILL / 100
    assert length("adversarial") > STANDS_STILL


def test_the_page_has_what_was_measured() -> None:
    text = PAGE.read_text()
    columns = [*LIES, "all"]
    for name in STRATEGIES.table:
        (row,) = re.findall(rf"^\| `{name}` \|((?: \d+\.\d \|){{{len(columns)}}})$", text, re.MULTILINE)
        shown = [float(value) for value in row.split("|")[:-1]]
        assert shown == pytest.approx([cell(name, lie).distance for lie in columns], abs=0.06), name
