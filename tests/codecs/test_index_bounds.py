"""No set of indices takes more than the bound, and the bound is not far above what sets take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus import codecs
from gradbus.codecs.index_coding import max_index_bytes


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), dim=st.one_of(st.integers(1, 300), st.integers(1, 1 << 40)), room=st.integers(0, 40))
def test_no_set_takes_more_than_the_bound(data: st.DataObject, dim: int, room: int) -> None:
    near_the_end = st.integers(max(0, dim - 80), dim - 1)
    indices = sorted(data.draw(st.sets(st.one_of(near_the_end, st.integers(0, dim - 1)), max_size=60)))
    _, coded = codecs.encode_indices(torch.tensor(indices, dtype=torch.int64), dim)
    assert len(coded) <= max_index_bytes(dim, min(dim, len(indices) + room))


@pytest.mark.parametrize(("dim", "max_k"), [(1_179_648, 1180), (18_432, 19), (5000, 5000), (300, 7), (9, 1)])
@pytest.mark.parametrize("part", [1.0, 0.9, 0.7, 0.5, 0.3, 0.1])
def test_neither_spread_nor_crowded_sets_of_any_size_pass_the_bound(dim: int, max_k: int, part: float) -> None:
    k = max(1, int(max_k * part))
    bound = max_index_bytes(dim, max_k)
    random = np.random.default_rng(k)
    sets = [
        np.arange(k),
        dim - 1 - np.arange(k)[::-1],
        np.linspace(0, dim - 1, k).astype(np.int64),
        np.sort(random.choice(dim, k, replace=False)),
        np.unique(np.concatenate([np.arange(k - k // 2), dim - 1 - np.arange(k // 2)])),
    ]
    for indices in sets:
        assert len(codecs.encode_indices(torch.from_numpy(indices.astype(np.int64)), dim)[1]) <= bound


def test_the_bound_is_within_6_percent_of_a_random_set_at_a_thousandth() -> None:
    dim = 1_179_648
    indices = torch.from_numpy(np.sort(np.random.default_rng(1).choice(dim, 1180, replace=False)))
    _, coded = codecs.encode_indices(indices, dim)
    assert max_index_bytes(dim, 1180) <= 1.06 * len(coded)


def test_no_index_takes_no_bytes() -> None:
    assert max_index_bytes(1000, 0) == 0
