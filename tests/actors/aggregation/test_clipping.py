"""Limits on one update: its length and its weight, in front of whatever strategy there is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.adaptive import FedAdam
from gradbus.actors.aggregation.clipping import LimitedStrategy, clipped, within_limits
from gradbus.actors.aggregation.exact_sum import OutOfRange
from gradbus.actors.aggregation.robust import CoordinateMedian
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.codecs import DenseBlock, Parsed
from gradbus.runtime.config.federated import FederatedConfig

DIM = 70_000  # more than one block


def random_vector(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


def message(name: str, version: int, delta: Tensor, base: Tensor) -> Parsed:
    codec = codecs.get(name, version=version)
    carries_weights = version == 1 and not codec.v1_is_delta
    return codecs.parse(codec.encode(base + delta if carries_weights else delta), expected_dim=len(delta))


def mean_of(strategy: FedAvg | LimitedStrategy, base: Tensor, *updates: tuple[Parsed, int]) -> Tensor:
    weights = base.clone()
    strategy.begin(1, base)
    for client_id, (update, num_samples) in enumerate(updates):
        strategy.add(Update(update), Facts(client_id=client_id, num_samples=num_samples))
    strategy.finish(weights)
    return weights - base


@pytest.mark.parametrize(
    ("name", "version"), [(name, version) for name in codecs.ALL for version in codecs.get(name).versions]
)
def test_an_update_that_is_too_long_keeps_its_direction_and_gets_the_limit_as_its_length(
    name: str, version: int
) -> None:
    base = random_vector(1)
    update = message(name, version, random_vector(2, 0.1), base)
    plain = mean_of(FedAvg(DIM), base, (update, 5))
    short = mean_of(LimitedStrategy(FedAvg(DIM), clip_norm=0.5), base, (update, 5))
    assert plain.norm() > 5
    assert short.norm().item() == pytest.approx(0.5, rel=1e-3)  # the weights are float32
    assert torch.allclose(short, plain * (0.5 / plain.norm()), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", codecs.ALL)
def test_an_update_within_the_limit_is_left_as_it_is_to_the_bit(name: str) -> None:
    base = random_vector(1)
    update = message(name, 2, random_vector(2, 0.1), base)
    assert clipped(update, base, 1e6) is update
    limited = LimitedStrategy(FedAvg(DIM), clip_norm=1e6, cap_samples=10)
    assert torch.equal(mean_of(limited, base, (update, 5)), mean_of(FedAvg(DIM), base, (update, 5)))
    assert limited.marks() == {}


@settings(derandomize=True, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    limit=st.floats(1e-3, 1e3),
)
def test_nothing_is_longer_than_the_limit_whatever_the_values(values: list[float], limit: float) -> None:
    vector = torch.tensor(values)
    update = codecs.parse(codecs.get("fp32").encode(vector), expected_dim=len(values))
    (block,) = clipped(update, torch.zeros(len(values)), limit).blocks()
    assert block.values.double().norm().item() <= limit * (1 + 1e-6)
    assert math.isfinite(block.values.sum().item())


def test_an_update_that_would_overflow_the_sum_counts_once_it_is_clipped() -> None:
    base = torch.zeros(DIM)
    huge = codecs.parse(codecs.get("fp32").encode(torch.full((DIM,), 1e30)), expected_dim=DIM)
    with pytest.raises(ValueError, match="does not fit"):
        mean_of(FedAvg(DIM), base, (huge, 1))
    assert mean_of(LimitedStrategy(FedAvg(DIM), clip_norm=1.0), base, (huge, 1)).norm().item() == pytest.approx(
        1.0, rel=1e-4
    )


def test_samples_beyond_the_cap_give_no_more_weight() -> None:
    base = torch.zeros(DIM)
    honest, liar = (message("fp32", 2, random_vector(seed), base) for seed in (1, 2))
    limited = LimitedStrategy(FedAvg(DIM), cap_samples=100)
    found = mean_of(limited, base, (honest, 100), (liar, 1 << 30))
    assert torch.equal(found, mean_of(FedAvg(DIM), base, (honest, 100), (liar, 100)))
    assert limited.marks() == {"samples capped": (1,)}


def test_the_report_learns_who_was_clipped_in_this_round_only() -> None:
    base = torch.zeros(DIM)
    long, short = message("fp32", 2, random_vector(1), base), message("fp32", 2, random_vector(2, 1e-6), base)
    limited = LimitedStrategy(FedAvg(DIM), clip_norm=1.0)
    mean_of(limited, base, (long, 1), (short, 1), (long, 1))
    assert limited.marks() == {"clipped": (0, 2)}
    mean_of(limited, base, (short, 1))
    assert limited.marks() == {}


def test_an_update_that_is_refused_leaves_no_mark() -> None:
    base = torch.zeros(DIM)
    limited = LimitedStrategy(FedAvg(DIM), clip_norm=1e35, cap_samples=1)
    limited.begin(1, base)
    huge = codecs.parse(codecs.get("fp32").encode(torch.full((DIM,), 1e34)), expected_dim=DIM)
    with pytest.raises(ValueError, match="does not fit"):
        limited.add(Update(huge), Facts(client_id=0, num_samples=5))
    assert limited.marks() == {}


def test_weights_in_a_sparse_message_are_refused() -> None:
    sparse = codecs.parse(codecs.get("s4").encode(torch.ones(DIM), is_delta=False), expected_dim=DIM)
    with pytest.raises(ValueError, match="holds weights"):
        clipped(sparse, torch.zeros(DIM), 1.0)


def not_a_number() -> Parsed:
    """What no codec gives, but a caller's own code might."""
    whole = codecs.parse(codecs.get("fp32").encode(torch.ones(4)), expected_dim=4)
    return whole.replaced(lambda _: iter([DenseBlock(0, torch.full((4,), math.nan))]), is_sparse=False)


def test_what_is_not_a_number_is_neither_clipped_nor_taken_by_a_robust_strategy() -> None:
    with pytest.raises(ValueError, match="norm nan"):
        clipped(not_a_number(), torch.zeros(4), 1.0)
    median = CoordinateMedian(4, byzantine=0)
    median.begin(1, torch.zeros(4))
    with pytest.raises(OutOfRange, match="a value of nan"):
        median.add(Update(not_a_number()), Facts(client_id=0, num_samples=1))


def test_the_strategy_behind_the_limits_keeps_its_name_and_state() -> None:
    inner = FedAdam(4)
    assert within_limits(inner, FederatedConfig()) is inner
    limited = within_limits(inner, FederatedConfig(limits={"clip_norm": 1.0}))
    assert isinstance(limited, LimitedStrategy)
    assert limited.name == "FedAdam"
    assert limited.state().keys() == {"server_m", "server_v"}
    limited.load_state({"server_m": torch.ones(4), "server_v": torch.zeros(4)})
    assert inner.state()["server_m"].tolist() == [1.0] * 4
