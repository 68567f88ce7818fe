"""Error feedback: nothing is lost, only late."""

from __future__ import annotations

import pytest
import torch

from gradbus import codecs


def vectors(steps: int, dim: int = 5000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(dim, generator=generator) for _ in range(steps)]


@pytest.mark.parametrize(
    ("name", "version"), [(name, version) for name in codecs.ALL for version in codecs.get(name).versions]
)
def test_what_was_sent_and_what_is_owed_make_the_input(name: str, version: int) -> None:
    codec = codecs.get(name, version=version)
    (x,) = vectors(1)
    payload, residual = codecs.residual_step(x, None, codec)
    sent = codecs.decode(payload, expected_dim=5000).vector
    if name in ("fp32", "s4"):
        assert torch.equal(sent + residual, x)
        assert not ((sent != 0) & (residual != 0)).any()
    else:
        assert torch.equal(residual, x - sent)
        assert torch.allclose(sent + residual, x, rtol=0, atol=1e-7 * float(x.abs().max()))


@pytest.mark.parametrize("name", codecs.ALL)
def test_over_many_steps_nothing_is_lost(name: str) -> None:
    codec = codecs.get(name)
    residual = None
    total_in, total_sent = torch.zeros(5000, dtype=torch.float64), torch.zeros(5000, dtype=torch.float64)
    for x in vectors(20):
        payload, residual = codecs.residual_step(x, residual, codec)
        total_in += x
        total_sent += codecs.decode(payload, expected_dim=5000).vector
    assert residual is not None
    # fp32 rounds each of the 20 sums once.
    assert (total_sent + residual - total_in).abs().max() < 20 * 1e-6
    assert residual.abs().max() < (20 if name == "loco" else 5)  # which sends an entry in 64


def test_a_constant_vector_is_sent_in_full_after_enough_steps() -> None:
    x = torch.ones(1000)
    codec, residual, total = codecs.get("s4", density=0.1), None, torch.zeros(1000)
    for _ in range(100):
        payload, residual = codecs.residual_step(x, residual, codec)
        total += codecs.decode(payload, expected_dim=1000).vector
    assert (total / 100 - x).abs().max() <= 0.11


def test_the_arguments_are_not_changed() -> None:
    x, residual = vectors(2)
    x_before, residual_before = x.clone(), residual.clone()
    for name in codecs.ALL:
        codecs.residual_step(x, residual, codecs.get(name))
        assert torch.equal(x, x_before)
        assert torch.equal(residual, residual_before)


def test_a_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="residual has shape"):
        codecs.residual_step(torch.ones(3), torch.ones(4), codecs.get("s4"))


def test_an_overflow_of_the_sum_is_refused() -> None:
    big = torch.full((3,), 3e38)
    with pytest.raises(codecs.NonFiniteError):
        codecs.residual_step(big, big, codecs.get("s4"))


@pytest.mark.parametrize("name", codecs.ALL)
def test_adding_a_message_is_adding_what_it_decodes_to(name: str) -> None:
    vector, other = vectors(2)
    payload = codecs.get(name).encode(other)
    expected = vector + codecs.decode(payload, expected_dim=5000).vector
    codecs.add_into(vector, payload)
    assert torch.equal(vector, expected)


@pytest.mark.parametrize(
    "payload",
    [
        codecs.get("sq8").encode(torch.ones(5000))[:-1],
        codecs.get("q8").encode(torch.zeros(5001)),
        torch.ones(5000).numpy().tobytes(),
    ],
    ids=["cut short", "another size", "weights"],
)
def test_bad_bytes_leave_the_vector_as_it_was(payload: bytes) -> None:
    (vector,) = vectors(1)
    before = vector.clone()
    with pytest.raises(codecs.CodecError):
        codecs.add_into(vector, payload)
    assert torch.equal(vector, before)
