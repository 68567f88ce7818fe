"""One step of one rank: what is sent, what is remembered, and what is left alone."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradbus import codecs
from gradbus.codecs.base import are_finite
from gradbus.models import mnist_cnn

LAYOUT = codecs.DgcLayout.of([("w", torch.zeros(50, 40)), ("b", torch.zeros(7)), ("c", torch.zeros(5, 4))])


def config(**options: Any) -> codecs.DgcConfig:
    return codecs.DgcConfig(**{"density": 0.01, "sampling": "exact", **options})


def gradients(seed: int = 0, layout: codecs.DgcLayout = LAYOUT) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slot.shape, generator=generator) for slot in layout.slots]


def binary_gradients(seed: int) -> list[Tensor | None]:
    """Multiples of 1/64 below 16: sums of hundreds of them are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1023, 1024, slot.shape, generator=generator) / 64 for slot in LAYOUT.slots]


def flat_sparse(grads: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in (grads[0], grads[2]) if g is not None])


def sent(payload: bytes, layout: codecs.DgcLayout = LAYOUT) -> Tensor:
    """The compressed part of one message, dense."""
    return codecs.combine_dgc([payload], layout).flat[: layout.sparse_elems].clone()


def copy(state: codecs.DgcState) -> codecs.DgcState:
    return codecs.DgcState(state.layout, state.U.clone(), state.V.clone(), state.steps, state.seed)


@pytest.mark.parametrize("nesterov", [False, True])
def test_three_steps_are_those_of_the_algorithm_written_out(nesterov: bool) -> None:
    options, m = config(nesterov=nesterov), 0.9
    state = codecs.DgcState.zeros(LAYOUT)
    u, v = torch.zeros(2020), torch.zeros(2020)
    for seed in range(3):
        grads = gradients(seed)
        g = flat_sparse(grads)
        u = m * (u + g) if nesterov else m * u + g
        v = v + u + g if nesterov else v + u
        expected = torch.zeros(2020)
        for start, stop, k in ((0, 2000, 20), (2000, 2020, 1)):
            largest = v[start:stop].abs().topk(k).indices + start
            expected[largest] = v[largest]
            u[largest] = v[largest] = 0
        payload, state = codecs.dgc_step(grads, state, options)
        assert torch.allclose(sent(payload), expected, rtol=1e-6, atol=0)
        assert torch.allclose(state.V, v, rtol=1e-5, atol=1e-6)
        assert torch.allclose(state.U, u, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value_dtype", ["fp32", "fp16"])
def test_without_momentum_all_that_came_in_is_sent_or_owed_exactly(value_dtype: str) -> None:
    options = config(momentum=0.0, masking=False, value_dtype=value_dtype)
    state = codecs.DgcState.zeros(LAYOUT)
    came_in, went_out = torch.zeros(2020, dtype=torch.float64), torch.zeros(2020, dtype=torch.float64)
    for seed in range(40):
        grads = binary_gradients(seed)
        payload, state = codecs.dgc_step(grads, state, options)
        came_in += flat_sparse(grads)
        went_out += sent(payload)
        assert torch.equal(went_out + state.V, came_in)


def test_the_authors_residual_forgets_what_fp16_rounds_away() -> None:
    owed = {}
    for residual in ("exact", "authors"):
        payload, state = codecs.dgc_step(
            gradients(), codecs.DgcState.zeros(LAYOUT), config(value_dtype="fp16", residual=residual)
        )
        owed[residual] = state.V[sent(payload) != 0]
    assert owed["exact"].abs().max() > 0
    assert not owed["authors"].any()


def test_masking_zeroes_the_momentum_of_what_was_sent_and_of_nothing_else() -> None:
    payload, masked = codecs.dgc_step(gradients(), codecs.DgcState.zeros(LAYOUT), config())
    _, unmasked = codecs.dgc_step(gradients(), codecs.DgcState.zeros(LAYOUT), config(masking=False))
    was_sent = sent(payload) != 0
    assert not masked.U[was_sent].any()
    assert torch.equal(masked.U[~was_sent], unmasked.U[~was_sent])
    assert unmasked.U[was_sent].all()


def test_a_tensor_sent_in_full_keeps_its_momentum() -> None:
    _, state = codecs.dgc_step(gradients(), codecs.DgcState.zeros(LAYOUT), config(density=1.0))
    assert torch.equal(state.U, flat_sparse(gradients()))
    assert not state.V.any()


def test_density_1_sends_all_that_is_owed() -> None:
    state = codecs.DgcState.zeros(LAYOUT)
    for seed in range(5):
        _, state = codecs.dgc_step(gradients(seed), state, config(momentum=0.0))
    owed = state.V.clone()
    payload, state = codecs.dgc_step([None] * 3, state, config(momentum=0.0), density=1.0)
    assert torch.equal(sent(payload), owed)
    assert not state.V.any()


def test_small_tensors_are_decided_before_any_state_exists_and_travel_as_they_are() -> None:
    """Had they gone through the accumulation first, what it kept of them would grow and never be sent."""
    layout = codecs.DgcLayout.of([("w", torch.zeros(50, 40)), ("c", torch.zeros(5, 4))], min_numel=21)
    state = codecs.DgcState.zeros(layout)
    assert state.V.shape == (2000,)
    for seed in range(5):
        grads = gradients(seed, layout)
        payload, state = codecs.dgc_step(grads, state, config())
        _, c = codecs.combine_dgc([payload], layout).gradients()
        assert torch.equal(c, grads[1])  # type: ignore[arg-type]


def test_a_step_keeps_no_gradient_alive_and_changes_none() -> None:
    grads = gradients()
    before = [g.clone() for g in grads if g is not None]
    _, state = codecs.dgc_step(grads, codecs.DgcState.zeros(LAYOUT), config(clip_norm=0.1))
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))  # type: ignore[arg-type]
    references = [weakref.ref(g) for g in grads if g is not None]
    del grads
    gc.collect()
    assert all(reference() is None for reference in references)
    assert state.V.any()


def test_a_rank_without_a_gradient_takes_part_and_sends_what_it_owes() -> None:
    options = config(momentum=0.5)
    _, state = codecs.dgc_step(gradients(), codecs.DgcState.zeros(LAYOUT), options)
    with_none, with_zeros = copy(state), copy(state)
    zeros = [torch.zeros(slot.shape) for slot in LAYOUT.slots]
    first, with_none = codecs.dgc_step([None, None, None], with_none, options)
    second, with_zeros = codecs.dgc_step(zeros, with_zeros, options)
    assert first == second
    assert sent(first).count_nonzero() == 21
    assert torch.equal(with_none.U, with_zeros.U)
    empty, _ = codecs.dgc_step([None, None, None], codecs.DgcState.zeros(LAYOUT), options)
    assert not codecs.combine_dgc([empty], LAYOUT).flat.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_gradient_that_is_not_finite_changes_nothing_and_makes_all_ranks_skip(position: int, bad: float) -> None:
    _, state = codecs.dgc_step(gradients(), codecs.DgcState.zeros(LAYOUT), config())
    before = copy(state)
    grads = gradients(1)
    grads[position].view(-1)[3] = bad  # type: ignore[union-attr]
    payload, after = codecs.dgc_step(grads, state, config())
    assert torch.equal(after.U, before.U)
    assert torch.equal(after.V, before.V)
    assert after.steps == before.steps
    fine, _ = codecs.dgc_step(gradients(2), codecs.DgcState.zeros(LAYOUT), config())
    mean = codecs.combine_dgc([fine, payload, fine, payload], LAYOUT)
    assert mean.skipped_by == (1, 3)
    assert not mean.flat.any()
    assert codecs.undo_step(payload, after) is after


def test_a_skipped_step_leaves_nothing_unsaid() -> None:
    state = codecs.DgcState.zeros(LAYOUT)
    total = torch.zeros(2020)
    for seed in range(4):
        grads = binary_gradients(seed)
        payload, state = codecs.dgc_step(grads, state, config(momentum=0.0, value_dtype="fp16"))
        state = codecs.undo_step(payload, state)
        total += flat_sparse(grads)
    assert torch.equal(state.V, total)
    payload, state = codecs.dgc_step([None] * 3, state, config(momentum=0.0), density=1.0)
    assert torch.equal(codecs.undo_step(payload, state).V, total)


def test_values_of_sparse_gradients_are_looked_at() -> None:
    finite = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 3.0]), (4,), check_invariants=True
    )
    for value in (math.nan, math.inf):
        spoilt = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([value]), (4,), check_invariants=True)
        assert are_finite([finite, torch.ones(2)])
        assert not are_finite([torch.ones(2), finite, spoilt])


def test_large_gradients_whose_sum_overflows_are_finite() -> None:
    payload, _ = codecs.dgc_step([torch.full((50, 40), 3e38), None, None], codecs.DgcState.zeros(LAYOUT), config())
    assert codecs.decode_dgc(payload, LAYOUT).is_finite


def test_an_overflow_of_the_accumulation_is_reported_once_and_does_not_stay() -> None:
    w = torch.zeros(50, 40)
    w[4, 4], w[5, 5] = 3e38, 1.0
    grads: list[Tensor | None] = [w, None, None]
    state = codecs.DgcState.zeros(LAYOUT)
    _, state = codecs.dgc_step(grads, state, config(masking=False, density=0.0001))
    payload, state = codecs.dgc_step(grads, state, config(masking=False))
    assert not codecs.decode_dgc(payload, LAYOUT).is_finite
    assert (state.U.isfinite() & state.V.isfinite()).all()
    assert state.V[205] == pytest.approx(2.9)  # its neighbour goes on
    payload, _ = codecs.dgc_step([None] * 3, state, config())
    assert codecs.decode_dgc(payload, LAYOUT).is_finite


@pytest.mark.parametrize("world", [1, 4])
def test_clipping_is_by_the_norm_of_all_tensors_at_a_share_per_rank(world: int) -> None:
    grads = gradients()
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None))
    payload, state = codecs.dgc_step(grads, codecs.DgcState.zeros(LAYOUT), config(clip_norm=norm / 2, world=world))
    scale = 0.5 / math.sqrt(world)
    assert torch.allclose(sent(payload) + state.V, scale * flat_sparse(grads), rtol=1e-5)
    assert torch.allclose(list(codecs.combine_dgc([payload], LAYOUT).gradients())[1], scale * grads[1], rtol=1e-5)  # type: ignore[operator]
    _, untouched = codecs.dgc_step(grads, codecs.DgcState.zeros(LAYOUT), config(clip_norm=3 * norm * math.sqrt(world)))
    assert torch.equal(untouched.U[untouched.U != 0], flat_sparse(grads)[untouched.U != 0])


def test_clipping_survives_a_norm_beyond_float32() -> None:
    grads: list[Tensor | None] = [torch.full((50, 40), 1e30), None, None]
    payload, _ = codecs.dgc_step(grads, codecs.DgcState.zeros(LAYOUT), config(clip_norm=1.0))
    assert sent(payload).max() == pytest.approx(1 / math.sqrt(2000), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_another_precision_count_as_float32(dtype: torch.dtype) -> None:
    grads = [g.to(dtype) for g in gradients() if g is not None]
    single = [g.to(torch.float32) for g in grads]
    payload, _ = codecs.dgc_step(grads, codecs.DgcState.zeros(LAYOUT), config())
    assert payload == codecs.dgc_step(single, codecs.DgcState.zeros(LAYOUT), config())[0]


def test_a_gradient_that_is_not_contiguous_is_read_row_by_row() -> None:
    grads = gradients()
    payload, _ = codecs.dgc_step(grads, codecs.DgcState.zeros(LAYOUT), config())
    assert grads[0] is not None
    turned = [grads[0].t().contiguous().t(), grads[1], grads[2]]
    assert codecs.dgc_step(turned, codecs.DgcState.zeros(LAYOUT), config())[0] == payload


BAD_GRADIENTS: dict[str, list[Any]] = {
    "expected 3 in the order of the layout, got 2": [None, None],
    r"'w' must be dense, of floating point and shape \(50, 40\), got torch.float32, \(40, 50\)": [
        torch.zeros(40, 50), None, None,
    ],
    "'c' must be dense.*got torch.int64": [torch.ones(50, 40), None, torch.zeros(5, 4, dtype=torch.int64)],
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_GRADIENTS)
def test_gradients_that_do_not_fit_are_refused_before_anything_changes(text: str) -> None:
    state = codecs.DgcState.zeros(LAYOUT)
    with pytest.raises(ValueError, match=text):
        codecs.dgc_step(BAD_GRADIENTS[text], state, config())
    assert not state.U.any()


@pytest.mark.parametrize("sampling", ["strided", "random", "exact"])
def test_a_saved_state_goes_on_bit_equal(sampling: str) -> None:
    layout = codecs.DgcLayout.of([("w", torch.zeros(300, 100)), ("b", torch.zeros(7))])
    options = config(sampling=sampling, value_dtype="fp16")
    state = codecs.DgcState.zeros(layout, seed=5)
    for seed in range(3):
        _, state = codecs.dgc_step(gradients(seed, layout), state, options)
    saved = {name: x.clone() if isinstance(x, Tensor) else x for name, x in state.state_dict().items()}
    restored = codecs.DgcState.zeros(layout).load_state_dict(saved)
    for seed in range(3, 8):
        payload, state = codecs.dgc_step(gradients(seed, layout), state, options)
        again, restored = codecs.dgc_step(gradients(seed, layout), restored, options)
        assert again == payload
    assert torch.equal(restored.U, state.U)
    assert torch.equal(restored.V, state.V)


def test_a_saved_state_of_another_model_or_shape_is_refused() -> None:
    saved = codecs.DgcState.zeros(LAYOUT).state_dict()
    other = codecs.DgcState.zeros(codecs.DgcLayout.of([("w", torch.zeros(50, 40))]))
    with pytest.raises(ValueError, match="names, shapes or min_numel differ"):
        other.load_state_dict(saved)
    for change in ({"V": torch.zeros(3)}, {"U": torch.zeros(2020, dtype=torch.float64)}, {"U": None}, {"steps": -1}):
        with pytest.raises(ValueError, match="saved state"):
            codecs.DgcState.zeros(LAYOUT).load_state_dict(saved | change)
    with pytest.raises(ValueError, match=r"seed must be 0 \.\. 2\*\*64 - 1"):
        codecs.DgcState.zeros(LAYOUT, seed=-1)


@pytest.mark.parametrize(
    "bad",
    [
        {"momentum": 1.0},
        {"clip_norm": 0.0},
        {"world": 0},
        {"sampling": "all"},
        {"sample_ratio": 0.0},
        {"upper_bound": 1.0},
        {"lower_bound": 1.0},
        {"max_iterations": -1},
        {"min_numel": -1},
        {"value_dtype": "int8"},
        {"residual": "none"},
    ],
)
def test_a_bad_option_is_named(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} must be"):
        codecs.DgcConfig(**bad)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=5),
    density=st.sampled_from([0.001, 0.1, 0.5, 1.0]),
    min_numel=st.integers(0, 10),
)
def test_any_shapes_come_back_in_place(shapes: list[list[int]], density: float, min_numel: int) -> None:
    layout = codecs.DgcLayout.of([(str(i), torch.zeros(s)) for i, s in enumerate(shapes)], min_numel=min_numel)
    state = codecs.DgcState.zeros(layout)
    grads = gradients(3, layout)
    payload, state = codecs.dgc_step(grads, state, config(momentum=0.0), density=density)
    mean = codecs.combine_dgc([payload], layout)
    for slot, got, g in zip(layout.slots, mean.gradients(), grads, strict=True):
        owed = state.V[slot.start : slot.stop].view(slot.shape) if slot.is_sparse else torch.zeros(slot.shape)
        assert torch.equal(got + owed, g)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value_dtype", "limit"), [("fp32", 8000), ("fp16", 5600)])
def test_the_reference_network_takes_less_than_a_500th_of_its_gradient(value_dtype: str, limit: int) -> None:
    layout = codecs.DgcLayout.of(mnist_cnn().named_parameters())
    assert (layout.dim, layout.dense_elems) == (1_199_882, 234)
    state = codecs.DgcState.zeros(layout)
    options = codecs.DgcConfig(value_dtype=value_dtype)  # type: ignore[arg-type]
    for seed in range(4):
        payload, state = codecs.dgc_step(gradients(seed, layout), state, options)
        assert len(payload) < limit < 4 * layout.dim / 500


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", ["strided", "random", "exact"])
def test_a_state_on_a_gpu_sends_the_same_message(sampling: str) -> None:
    layout = codecs.DgcLayout.of([("w", torch.zeros(300, 100)), ("b", torch.zeros(7))])
    options = config(sampling=sampling, momentum=0.0, value_dtype="fp16")  # one rounding each: equal bits are due
    here, there = codecs.DgcState.zeros(layout), codecs.DgcState.zeros(layout, device="cuda")
    for seed in range(3):
        payload, here = codecs.dgc_step(gradients(seed, layout), here, options)
        on_gpu = [g.cuda() for g in gradients(seed, layout) if g is not None]
        again, there = codecs.dgc_step(on_gpu, there, options)
        assert again == payload
    out = torch.empty(layout.dim, device="cuda")
    assert torch.equal(
        codecs.combine_dgc([payload], layout, out=out).flat.cpu(), codecs.combine_dgc([payload], layout).flat
    )
