"""The choice of the largest entries, against a slow oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus import codecs
from gradbus.codecs.sparse import largest_by_torch


def slow_top_k(values: list[float], k: int) -> list[int]:
    by_size = sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))
    return sorted(by_size[:k])


FEW_VALUES = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -3e38]), max_size=60)
ANY_VALUES = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(values=FEW_VALUES | ANY_VALUES, data=st.data())
def test_top_k_takes_what_the_definition_says(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(values)))
    x = torch.tensor(values, dtype=torch.float32)
    values = x.tolist()  # what float32 makes of them
    sparse = codecs.top_k(x, k)
    assert sparse.indices.tolist() == slow_top_k(values, k)
    assert sparse.values.tolist() == [values[index] for index in sparse.indices.tolist()]
    assert (sparse.dim, sparse.indices.dtype) == (len(values), torch.int64)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(values=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=2, max_size=60), data=st.data())
def test_the_path_for_other_devices_takes_the_same(values: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values) - 1))
    magnitude = torch.tensor(values, dtype=torch.int32)
    assert largest_by_torch(magnitude, k).tolist() == slow_top_k([float(value) for value in values], k)


def test_among_equal_entries_the_first_ones_are_taken() -> None:
    assert codecs.top_k(torch.ones(1000), 3).indices.tolist() == [0, 1, 2]
    assert codecs.top_k(torch.tensor([1.0, -2.0, 2.0, -2.0]), 2).indices.tolist() == [1, 2]


def test_a_large_vector_gives_exactly_k_and_the_largest() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(3)).round(decimals=2)
    sparse = codecs.top_k(x, 10_000)
    assert sparse.indices.numel() == 10_000
    rest = x.clone()
    rest[sparse.indices] = 0
    assert rest.abs().max() <= sparse.values.abs().min()
    assert torch.equal(sparse.to_dense() + rest, x)


@pytest.mark.parametrize("k", [-1, 11])
def test_k_outside_the_vector_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=r"k must be 0 \.\. 10"):
        codecs.top_k(torch.ones(10), k)


def test_only_float32_vectors_are_taken() -> None:
    with pytest.raises(ValueError, match="x must be float32"):
        codecs.top_k(torch.ones(10, dtype=torch.float64), 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_entries_are_refused_whatever_k_is(bad: float) -> None:
    x = torch.ones(10)
    x[4] = bad
    for k in (0, 1, 10):
        with pytest.raises(codecs.NonFiniteError, match="element 4"):
            codecs.top_k(x, k)
