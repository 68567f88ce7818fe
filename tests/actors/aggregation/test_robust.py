"""Median, trimmed mean, Krum, Multi-Krum: against NumPy, in any order, within their bounds, against attackers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from settings import nested
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.exact_sum import OutOfRange
from gradbus.actors.aggregation.robust import (
    BLOCK_ELEMS,
    CoordinateMedian,
    Krum,
    MultiKrum,
    Robust,
    TrimmedMean,
    sort_rows,
    sorting_network,
)
from gradbus.actors.aggregation.strategies import NoRoom
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.codecs import Parsed
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError

DIM = 2 * BLOCK_ELEMS + 17
Matrix = np.ndarray[Any, Any]

MAKE: dict[str, Callable[..., Robust]] = {
    "median": CoordinateMedian,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
}
each_strategy = pytest.mark.parametrize("name", MAKE)


def random_rows(count: int, dim: int = DIM, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def parsed(delta: Matrix | Tensor, name: str = "fp32", **options: Any) -> Parsed:
    vector = torch.as_tensor(delta)
    return codecs.parse(codecs.get(name, **options).encode(vector), expected_dim=len(vector))


def result(strategy: Robust, rows: Matrix, order: Sequence[int] | None = None, base: Tensor | None = None) -> Matrix:
    """The change of the weights, float32, when client i sends row i."""
    base = torch.zeros(rows.shape[1]) if base is None else base
    weights = base.clone()
    strategy.begin(1, base)
    for index in range(len(rows)) if order is None else order:
        strategy.add(Update(parsed(rows[index])), Facts(client_id=index, num_samples=1 + index))
    strategy.finish(weights)
    return (weights - base).numpy()


def oracle(name: str, rows: Matrix, f: int) -> Matrix:
    """The textbook's formula in float64, over all of the matrix at once."""
    exact, n = rows.astype(np.float64), len(rows)
    match name:
        case "median":
            return np.median(exact, axis=0)
        case "trimmed_mean":
            return np.sort(exact, axis=0)[f : n - f].mean(axis=0)
    distances = np.array([[((a - b) ** 2).sum() for b in exact] for a in exact])
    scores = [np.sort(np.delete(distances[i], i))[: n - f - 2].sum() for i in range(n)]
    best = np.argsort(scores, kind="stable")[: 1 if name == "krum" else n - f - 2]
    return exact[best].mean(axis=0)


@each_strategy
@pytest.mark.parametrize(("n", "f"), [(3, 0), (5, 1), (8, 2), (11, 3), (25, 4)])
def test_it_is_what_numpy_makes_of_all_updates_at_once(name: str, n: int, f: int) -> None:
    rows = random_rows(n, seed=n)
    found = result(MAKE[name](DIM, byzantine=f), rows)
    np.testing.assert_allclose(found, oracle(name, rows, f), rtol=2e-7, atol=1e-12)


@each_strategy
@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data())
def test_the_order_in_which_updates_come_changes_no_bit(name: str, data: st.DataObject) -> None:
    n, dim = data.draw(st.integers(5, 9)), data.draw(st.integers(1, 6))
    values = st.floats(-1e9, 1e9, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40])
    rows = np.array(data.draw(st.lists(st.lists(values, min_size=dim, max_size=dim), min_size=n, max_size=n)), "f4")
    order = data.draw(st.permutations(range(n)))
    base = torch.from_numpy(random_rows(1, dim)[0])
    found = [result(MAKE[name](dim, byzantine=1), rows, way, base) for way in (None, order)]
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data())
def test_f_hostile_updates_leave_each_coordinate_between_honest_values(name: str, data: st.DataObject) -> None:
    f = data.draw(st.integers(1, 3))
    honest = random_rows(data.draw(st.integers(f + 1, 7)), 5, seed=data.draw(st.integers(0, 99)))
    values = st.floats(-1e9, 1e9, width=32)
    hostile = np.array(data.draw(st.lists(st.lists(values, min_size=5, max_size=5), min_size=f, max_size=f)), "f4")
    found = result(MAKE[name](5, byzantine=f), np.concatenate([honest, hostile]))
    assert (found >= honest.min(axis=0)).all()
    assert (found <= honest.max(axis=0)).all()


@pytest.mark.parametrize(("name", "f"), [("krum", 1), ("krum", 2), ("multi_krum", 1), ("multi_krum", 2)])
def test_krum_never_takes_updates_far_from_the_others_even_if_they_are_alike(name: str, f: int) -> None:
    honest, hostile = random_rows(7, 50), 40.0 + random_rows(f, 50, seed=9) * 1e-3
    strategy = MAKE[name](50, byzantine=f)
    result(strategy, np.concatenate([hostile, honest]))
    assert isinstance(strategy, MultiKrum)
    assert set(strategy.chosen).isdisjoint(range(f))
    assert set(range(f)) <= set(strategy.marks()["left out"])
    assert len(strategy.chosen) + len(strategy.marks()["left out"]) == 7 + f


def test_of_equal_updates_krum_takes_the_smallest_id() -> None:
    strategy = Krum(4, byzantine=1)
    result(strategy, np.ones((6, 4), np.float32), order=[5, 3, 4, 1, 2, 0])
    assert strategy.chosen == (0,)


@pytest.mark.parametrize("codec", codecs.ALL)
def test_every_codec_and_weights_in_place_of_differences_are_understood(codec: str) -> None:
    base, strategy = torch.from_numpy(random_rows(1, seed=1)[0]), CoordinateMedian(DIM, byzantine=1)
    deltas = [torch.from_numpy(row) for row in random_rows(3, seed=2)]
    strategy.begin(1, base)
    strategy.add(Update(parsed(deltas[0], codec)), Facts(client_id=0, num_samples=1))
    strategy.add(Update(parsed(deltas[1], codec)), Facts(client_id=1, num_samples=1))
    strategy.add(
        Update(codecs.parse((base + deltas[2]).numpy().tobytes(), expected_dim=DIM)), Facts(client_id=2, num_samples=1)
    )
    weights = base.clone()
    strategy.finish(weights)
    told = [codecs.decode(codecs.get(codec).encode(delta), expected_dim=DIM).vector for delta in deltas[:2]]
    expected = torch.stack([*told, deltas[2]]).median(dim=0).values
    assert (weights - base - expected).abs().max() < 1e-6


@each_strategy
def test_a_round_that_is_started_again_forgets_its_first_attempt(name: str) -> None:
    rows = random_rows(6)
    strategy = MAKE[name](DIM, byzantine=1)
    strategy.begin(1, torch.zeros(DIM))
    for index in range(4):
        strategy.add(Update(parsed(1e3 * rows[index])), Facts(client_id=index, num_samples=1))
    assert result(strategy, rows).tobytes() == result(MAKE[name](DIM, byzantine=1), rows).tobytes()


# Bounds


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"strategy": "median", "strategy__byzantine": 2},
            "strategy median with byzantine=2 needs 2 f + 1 = 5 updates",
        ),
        (
            {"strategy": "trimmed_mean", "strategy__byzantine": 1, "clients__min": 2},
            "needs 2 f + 1 = 3 updates .* ends? with 2",
        ),
        (
            {"strategy": "krum", "strategy__byzantine": 2, "clients__min": 6},
            r"needs 2 f \+ 3 = 7 .*set federated.clients.min=7",
        ),
        ({"strategy": "multi_krum", "strategy__keep": 6, "clients__min": 8}, r"needs 6 \+ f \+ 2 = 9 updates"),
        (
            {"strategy": "krum", "clients__min": 5, "clients__num": 50, "strategy__budget_bytes": 1 << 20},
            r"50 x 10,000 values of 4 bytes are 2,000,000 bytes, more than federated.strategy.budget_bytes=1,048,576",
        ),
    ],
)
def test_a_configuration_that_cannot_hold_is_refused_before_the_run(config: dict[str, Any], words: str) -> None:
    rules = FederatedConfig(**nested(config))
    strategy = STRATEGIES.make(rules.strategy, 10_000)
    with pytest.raises(ConfigError, match=words.replace("2 f + ", r"2 f \+ ")):
        strategy.check(rules)


@pytest.mark.parametrize(
    "config",
    [
        {"strategy": "median", "clients__min": 3},
        {"strategy": "krum", "strategy__byzantine": 2, "clients__min": 7, "clients__num": 9},
        {"strategy": "multi_krum", "strategy__byzantine": 0, "clients__min": 3, "strategy__budget_bytes": 120_000},
        {"strategy": "fedavg"},
    ],
)
def test_a_configuration_that_holds_is_taken(config: dict[str, Any]) -> None:
    rules = FederatedConfig(**nested(config))
    STRATEGIES.make(rules.strategy, 10_000).check(rules)


@each_strategy
def test_with_fewer_updates_than_it_bears_there_is_no_result(name: str) -> None:
    strategy = MAKE[name](4, byzantine=2)
    rows = random_rows(strategy.least - 1, 4)
    with pytest.raises(ValueError, match=rf"= {strategy.least} updates, got {len(rows)}: set clients.min"):
        result(strategy, rows)


def test_an_update_beyond_the_budget_finds_no_room_and_memory_is_used_again() -> None:
    strategy, rows, used = CoordinateMedian(DIM, byzantine=1, budget_bytes=4 * DIM * 3), random_rows(4), list[Matrix]()
    for _ in range(3):
        result(strategy, rows[:3])
        with pytest.raises(NoRoom, match="3 updates fill"):
            strategy.add(Update(parsed(rows[3])), Facts(client_id=3, num_samples=1))
        # Kept, so that no new row is where an old one was.
        used += strategy._rows.values()  # noqa: SLF001 - of new rows in place of old ones no amount of memory tells
    assert len({row.ctypes.data for row in used}) == 3


def test_an_update_that_is_out_of_range_or_a_second_one_counts_not_at_all() -> None:
    strategy = CoordinateMedian(4, byzantine=0)
    strategy.begin(1, torch.zeros(4))
    strategy.add(Update(parsed(torch.ones(4))), Facts(client_id=0, num_samples=1))
    with pytest.raises(OutOfRange, match="a value of 1e"):
        strategy.add(Update(parsed(torch.full((4,), 1e30))), Facts(client_id=1, num_samples=1))
    with pytest.raises(ValueError, match="client 0 has an update in this round already"):
        strategy.add(Update(parsed(torch.zeros(4))), Facts(client_id=0, num_samples=1))
    with pytest.raises(ValueError, match="holds weights"):
        strategy.add(
            Update(codecs.parse(codecs.get("s4").encode(torch.ones(4), is_delta=False), expected_dim=4)),
            Facts(client_id=2, num_samples=1),
        )
    weights = torch.zeros(4)
    strategy.finish(weights)
    assert weights.tolist() == [1.0] * 4


# The sorting network


@pytest.mark.parametrize("count", range(1, 12))
def test_the_network_sorts_every_column_of_zeros_and_ones_and_so_every_other(count: int) -> None:
    """Knuth, 5.3.4, Theorem Z: who sorts all of zeros and ones sorts everything."""
    columns = np.array(list(itertools.product([0.0, 1.0], repeat=count)), np.float32).T
    rows = [row.copy() for row in columns]
    found = sort_rows(rows, np.empty(columns.shape[1], np.float32), range(count))
    assert (np.array(found) == np.sort(columns, axis=0)).all()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(count=st.integers(1, 70), data=st.data())
def test_of_the_rows_only_those_that_are_wanted_are_made_right(count: int, data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    rows = random_rows(count, 31, seed=count)
    found = sort_rows([row.copy() for row in rows], np.empty(31, np.float32), wanted)
    assert (np.array(found)[sorted(wanted)] == np.sort(rows, axis=0)[sorted(wanted)]).all()
    assert len(sorting_network(count, frozenset(wanted))) <= len(sorting_network(count, frozenset(range(count))))
