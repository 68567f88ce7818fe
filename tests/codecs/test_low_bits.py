"""q4, q2 and loco against NumPy, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus import codecs

Array = NDArray[np.float64]


def heavy(dim: int, seed: int = 0) -> Tensor:
    """Values of very different sizes, as pseudo-gradients are."""
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed)) ** 3 * 0.01


def decoded(name: str, x: Tensor, **options: float) -> Tensor:
    return codecs.decode(codecs.get(name, **options).encode(x), expected_dim=x.numel()).vector


def two_magnitudes(x: Array) -> Array:
    """A chunk in two bits a value."""
    size, threshold = np.abs(x), 1.25 * np.abs(x).mean()
    for _ in range(2):
        above = size > threshold
        high = size[above].mean() if above.any() else 0.0
        low = size[~above].mean() if not above.all() else 0.0
        high = high if above.any() else low
        threshold = (low + high) / 2
    levels = torch.tensor([low, high]).to(torch.bfloat16).double().numpy()
    return np.where(x < 0, -1, 1) * np.where(above, levels[1], levels[0])


@pytest.mark.parametrize("dim", [1, 2, 7, 64, 65, 1000])
def test_q4_rounds_to_one_of_fifteen_steps_of_its_chunk(dim: int) -> None:
    x = heavy(dim)
    found = decoded("q4", x, chunk_elems=64)
    for chunk, there in zip(x.split(64), found.split(64), strict=True):
        scale = np.float32(float(chunk.abs().max())) / np.float32(7)
        expected = np.clip(np.round(chunk.numpy() / scale), -7, 7) * scale
        assert np.array_equal(there.numpy(), expected)


def test_q4_takes_less_than_4_bits_a_value_with_its_scales() -> None:
    dim = 1_199_882  # of the CNN
    assert len(codecs.get("q4").encode(heavy(dim))) < dim / 2
    ends = torch.tensor([1.0, -1.0]).repeat(128 * 5)[:-3]  # all digits the largest or the smallest
    for x in (ends, -ends, ends.abs()):
        assert torch.equal(decoded("q4", x), x)


@pytest.mark.parametrize("dim", [1, 2, 7, 64, 65, 1000])
def test_q2_takes_two_magnitudes_and_a_sign(dim: int) -> None:
    x = heavy(dim)
    found = decoded("q2", x, chunk_elems=64)
    expected = [two_magnitudes(chunk.double().numpy()) for chunk in x.split(64)]
    assert np.allclose(found.numpy(), np.concatenate(expected), rtol=1e-2, atol=0)  # a rounding of bfloat16


@pytest.mark.parametrize("dim", [1, 63, 64, 65, 4095, 4096, 4097, 10_000])
def test_loco_sends_the_largest_of_each_block(dim: int) -> None:
    x = heavy(dim)
    payload = codecs.get("loco").encode(x)
    found = codecs.decode(payload, expected_dim=dim).vector
    k = 0
    for block, there in zip(x.split(4096), found.split(4096), strict=True):
        count = -(-block.numel() * 64 // 4096)
        largest = np.sort(np.lexsort((np.arange(block.numel()), -block.abs().numpy()))[:count])
        expected = np.zeros(block.numel())
        expected[largest] = two_magnitudes(block.double().numpy()[largest])
        assert np.allclose(there.numpy(), expected, rtol=1e-2, atol=0)
        k += count
    assert len(payload) == 16 + 4 * -(-dim // 4096) + -(-k // 4) + -(-3 * k // 2)


def test_a_block_of_loco_takes_116_bytes() -> None:
    codec = codecs.get("loco")
    assert codec.max_bytes(4096 * 3) - codec.max_bytes(4096 * 2) == 116


@pytest.mark.parametrize("name", ["q4", "q2", "loco"])
@pytest.mark.parametrize("dim", [0, 1, 5, 4096, 5000])
def test_all_messages_of_a_length_are_as_long_as_the_limit(name: str, dim: int) -> None:
    codec = codecs.get(name)
    for x in (heavy(dim), torch.zeros(dim)):
        assert len(codec.encode(x)) == codec.max_bytes(dim)


@pytest.mark.parametrize(("name", "share"), [("q4", 0.3), ("q2", 0.65), ("loco", 0.97)])
@pytest.mark.parametrize("seed", range(3))
def test_what_rounding_leaves_out_is_shorter_than_the_vector_so_that_feedback_converges(
    name: str, share: float, seed: int
) -> None:
    x = heavy(20_000, seed)
    assert (x - decoded(name, x)).norm() <= share * x.norm()
    codec, residual, total, rounds = codecs.get(name), None, torch.zeros(20_000), 400 if name == "loco" else 50
    for _ in range(rounds):
        payload, residual = codecs.residual_step(x, residual, codec)
        codecs.add_into(total, payload)
    assert (total / rounds - x).norm() <= 0.35 * x.norm()  # of loco, 64 of whose entries wait for 64 rounds


@pytest.mark.parametrize("name", ["q4", "q2", "loco"])
@pytest.mark.parametrize("peak", [3.4e38, 1e-38, 1e-44])
def test_the_ends_of_the_range_stay_finite(name: str, peak: float) -> None:
    x = torch.tensor([peak, -peak, peak / 2, 0.0] * 30)
    found = decoded(name, x)
    assert found.isfinite().all()
    assert (found - x).abs().max() <= max(1.01 * peak, 2e-38)


@pytest.mark.parametrize("name", ["q4", "q2", "loco"])
def test_there_is_no_version_1(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: version must be 2, got 1"):
        codecs.get(name, version=1)


def test_bytes_that_no_encoder_makes_are_refused() -> None:
    q4 = bytearray(codecs.get("q4").encode(heavy(5)))
    q2 = bytearray(codecs.get("q2").encode(heavy(5)))
    loco = bytearray(codecs.get("loco").encode(heavy(200)))  # four entries, the levels at 16, values at 20
    for good, at, byte, text in [
        (q4, 31, 0x7F, r"is 15\*\*16 or larger"),
        (q4, 30, 0xF1, "digits or bits after the last value"),
        (q4, 31, 0x80, "digits or bits after the last value"),
        (q4, 23, 0xBF, "scales: expected > 0"),
        (q2, 21, 0xFF, "non-finite Q2 levels|expected 0 <= lower"),
        (q2, 21, 0xBF, "expected 0 <= lower <= higher"),
        (q2, 21, 0x7E, "expected 0 <= lower <= higher"),
        (q2, 25, 0xFF, "bits after the last of 5"),
        (loco, 21, 0xFF, "below 200|ascending"),
        (loco, 17, 0x7E, "expected 0 <= lower <= higher"),
    ]:
        wrong = bytearray(good)
        wrong[at] = byte
        dim = 200 if good is loco else 5
        with pytest.raises(codecs.CodecError, match=text):
            codecs.decode(wrong, expected_dim=dim)
