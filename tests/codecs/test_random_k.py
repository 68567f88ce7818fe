"""The choice of entries by a seed, the same on every machine."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.codecs import random_k


def test_a_seed_always_chooses_the_same_entries() -> None:
    """These are on the wire: nobody sends them, and all have to know them."""
    assert random_k(20, 5, b"seed").tolist() == [1, 3, 6, 12, 17]
    chosen = random_k(1_199_882, 119_989, b"gradbus")
    assert chosen[:6].tolist() == [6, 11, 19, 28, 43, 49]
    digest = hashlib.sha256(chosen.numpy().astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "ffb696a4aaad7b06"


@settings(max_examples=100, deadline=None)
@given(numel=st.integers(0, 300), share=st.floats(0, 1), seed=st.binary(max_size=8))
def test_there_are_k_different_ones_ascending_with_no_two_in_one_part(numel: int, share: float, seed: bytes) -> None:
    k = round(share * numel)
    chosen = random_k(numel, k, seed)
    assert chosen.dtype == torch.int64
    assert len(chosen) == k
    assert all(0 <= one < numel for one in chosen.tolist())
    assert bool((chosen.diff() > 0).all())
    if k > 1:  # neighbours lie in neighbouring parts
        gaps = torch.cat((chosen.diff(), chosen[:1] + numel - chosen[-1:]))
        assert int(gaps.max()) < 2 * -(-numel // k)


def test_every_entry_is_as_likely_as_any_other() -> None:
    counts = torch.zeros(23)
    for number in range(4000):
        counts[random_k(23, 5, str(number).encode())] += 1
    expected = 4000 * 5 / 23
    assert float(((counts - expected) ** 2 / expected).sum()) < 49.7  # chi-squared with 22 degrees: p > 0.0006


@pytest.mark.parametrize("k", [-1, 6])
def test_more_entries_than_there_are_cannot_be_chosen(k: int) -> None:
    with pytest.raises(ValueError, match=f"k must be 0 .. 5, got {k}"):
        random_k(5, k, b"")
