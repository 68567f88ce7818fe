"""Reductions on plain memory: rank order bit for bit, one rounding of half precision, any place in memory."""

from __future__ import annotations

import itertools
from functools import reduce as fold
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.runtime.collectives import arithmetic
from gradbus.runtime.collectives.arithmetic import Arithmetic, ReduceOp, to_bfloat16
from gradbus.runtime.collectives.tensors import as_bytes

BLOCK = 256  # elements; in earnest there are more in a block, which would only take longer
FLOATS = [torch.float32, torch.float64]
HALF = [torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
ALL = [*FLOATS, *HALF, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
FLOAT_OPS: list[ReduceOp] = ["sum", "mean", "min", "max", "product"]
BIT_OPS: list[ReduceOp] = ["band", "bor", "bxor"]
OPS: list[ReduceOp] = [*FLOAT_OPS, *BIT_OPS]
NUMPY = {"min": np.minimum, "max": np.maximum, "product": np.multiply} | {
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "BLOCK_ELEMS", BLOCK)


def is_defined(dtype: torch.dtype, op: ReduceOp) -> bool:
    if dtype.is_complex:
        return op in ("sum", "mean", "product")
    return op not in BIT_OPS if dtype.is_floating_point else op != "mean"


CASES = [(dtype, op) for dtype, op in itertools.product(ALL, OPS) if is_defined(dtype, op)]
each_case = pytest.mark.parametrize(("dtype", "op"), CASES, ids=[f"{str(d)[6:]}-{op}" for d, op in CASES])
each_half = pytest.mark.parametrize("dtype", HALF, ids=["float16", "bfloat16"])


def values(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Values of all magnitudes, so that the order of additions shows in the last bits; integers of the whole range."""
    rng = np.random.default_rng([seed, numel])
    if dtype == torch.bool:
        return torch.from_numpy(rng.random(numel) < 0.5)
    if not (dtype.is_floating_point or dtype.is_complex):
        whole = torch.empty(numel, dtype=dtype)
        as_bytes(whole)[:] = rng.integers(0, 256, whole.nbytes, np.uint8)
        return whole
    spread = rng.standard_normal(numel) * 10.0 ** rng.integers(-3, 4, numel)
    if dtype.is_complex:
        spread = spread + 1j * rng.standard_normal(numel)
    return torch.from_numpy(spread).to(dtype)


def reduced(tensors: list[Tensor], op: ReduceOp, divisor: int = 1, out: Tensor | None = None) -> Tensor:
    target = torch.empty_like(tensors[0]) if out is None else out
    Arithmetic(tensors[0].dtype, op, divisor).reduce([as_bytes(tensor) for tensor in tensors], as_bytes(target))
    return target


def chained(tensors: list[Tensor], op: ReduceOp, divisor: int = 1) -> Tensor:
    """The same, as partial results that pass from rank to rank."""
    what = Arithmetic(tensors[0].dtype, op, divisor)
    first, *middle, last = tensors
    partial = as_bytes(first if first.dtype == what.partial.dtype else first.to(what.partial.dtype))
    for tensor in middle:
        onward = np.empty(tensor.numel() * what.partial.itemsize, np.uint8)
        what.extend(partial, as_bytes(tensor), onward, last=False)
        partial = onward
    out = torch.empty_like(last)
    what.extend(partial, as_bytes(last), as_bytes(out), last=True)
    return out


def in_numpy(tensors: list[Tensor], op: ReduceOp, divisor: int) -> NDArray[np.uint8]:
    """``((x0 op x1) op x2)`` over whole arrays in NumPy, then a multiplication by the reciprocal; as bytes."""
    dtype = tensors[0].dtype
    function = complex_product if op == "product" and dtype.is_complex else NUMPY.get(op, np.add)
    wide = [tensor.float() if dtype in HALF else tensor for tensor in tensors]
    total = np.asarray(fold(function, [tensor.numpy() for tensor in wide]))
    if op == "mean":
        total = total * total.dtype.type(1 / divisor)
    return as_bytes(torch.from_numpy(total).to(dtype) if dtype in HALF else torch.from_numpy(total))


def complex_product(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Each product and each sum rounded by itself."""
    real = one.real * other.real - one.imag * other.imag
    imag = one.real * other.imag + one.imag * other.real
    return np.stack([real, imag], -1).view(one.dtype)[..., 0]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and np.array_equal(as_bytes(one), as_bytes(other))


@each_case
def test_operands_are_combined_in_rank_order_bit_for_bit(dtype: torch.dtype, op: ReduceOp) -> None:
    for ranks, numel in itertools.product((1, 2, 3, 5), (0, 1, 7, 200)):
        tensors = [values(dtype, numel, rank) for rank in range(ranks)]
        assert np.array_equal(as_bytes(reduced(tensors, op, divisor=3)), in_numpy(tensors, op, 3))


@each_case
def test_the_edges_of_the_blocks_do_not_show(dtype: torch.dtype, op: ReduceOp) -> None:
    for numel in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5):
        tensors = [values(dtype, numel, rank) for rank in range(3)]
        assert np.array_equal(as_bytes(reduced(tensors, op, divisor=3)), in_numpy(tensors, op, 3))


@pytest.mark.parametrize("dtype", [*FLOATS, *SIGNED, torch.uint8, torch.bool])
def test_torch_gets_the_same_bits(dtype: torch.dtype) -> None:
    x0, x1, x2 = (values(dtype, 1000, rank) for rank in range(3))
    assert same_bits(reduced([x0, x1, x2], "sum"), (x0 + x1) + x2)
    assert same_bits(reduced([x0, x1, x2], "min"), torch.minimum(torch.minimum(x0, x1), x2))
    assert same_bits(reduced([x0, x1, x2], "max"), torch.maximum(torch.maximum(x0, x1), x2))
    assert same_bits(reduced([x0, x1, x2], "product"), (x0 * x1) * x2)
    if not dtype.is_floating_point:
        assert same_bits(reduced([x0, x1, x2], "band"), x0 & x1 & x2)
        assert same_bits(reduced([x0, x1, x2], "bor"), x0 | x1 | x2)
        assert same_bits(reduced([x0, x1, x2], "bxor"), x0 ^ x1 ^ x2)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_a_product_of_complex_numbers_is_torchs_but_for_the_rounding(dtype: torch.dtype) -> None:
    x0, x1, x2 = (values(dtype, 1000, rank) for rank in range(3))
    torch.testing.assert_close(reduced([x0, x1, x2], "product"), (x0 * x1) * x2)


def test_another_order_of_the_operands_would_give_other_bits() -> None:
    """Else the tests above would show nothing."""
    tensors = [values(torch.float32, 1000, rank) for rank in range(3)]
    assert not same_bits(reduced(tensors, "sum"), reduced(tensors[::-1], "sum"))


@each_half
def test_half_precision_is_combined_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    tensors = [values(dtype, 10_000, rank) for rank in range(5)]
    total = fold(torch.add, [tensor.float() for tensor in tensors])
    assert same_bits(reduced(tensors, "sum"), total.to(dtype))
    assert same_bits(reduced(tensors, "mean", divisor=5), (total * np.float32(1 / 5)).to(dtype))
    assert not same_bits(reduced(tensors, "sum"), fold(torch.add, tensors))  # rounded at every step
    product = fold(torch.mul, [tensor.float() for tensor in tensors])
    assert same_bits(reduced(tensors, "product"), product.to(dtype))


def test_bfloat16_is_rounded_as_torch_does() -> None:
    """Every upper half, with lower halves at and beside the ties: denormals, the largest numbers and infinities too."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        wide = (upper | np.uint32(lower)).view(np.float32)
        ours = torch.from_numpy(to_bfloat16(wide)).view(torch.bfloat16)
        theirs = torch.from_numpy(wide).to(torch.bfloat16)
        assert torch.equal(ours.isnan(), theirs.isnan())
        numbers = ~ours.isnan()
        assert torch.equal(ours.view(torch.int16)[numbers], theirs.view(torch.int16)[numbers])
    nan = torch.tensor([float("nan")]).numpy()
    assert to_bfloat16(nan).tolist() == [0x7FC0]


@each_half
def test_what_is_too_large_becomes_infinite_and_nan_stays_without_a_warning(dtype: torch.dtype) -> None:
    largest, inf, nan = torch.finfo(dtype).max, float("inf"), float("nan")
    x0 = torch.tensor([largest, -largest, inf, nan, inf], dtype=dtype)
    x1 = torch.tensor([largest, -largest, 1.0, 1.0, -inf], dtype=dtype)
    assert torch.equal(reduced([x0, x1], "sum").isnan(), torch.tensor([False, False, False, True, True]))
    assert reduced([x0, x1], "sum")[:3].tolist() == [inf, -inf, inf]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", FLOAT_OPS)
def test_overflow_and_nan_of_floats_give_no_warning(dtype: torch.dtype, op: ReduceOp) -> None:
    largest, inf, nan = torch.finfo(dtype).max, float("inf"), float("nan")
    x0, x1 = (torch.tensor([largest, inf, nan, 1e-30], dtype=dtype) for _ in range(2))
    x1[1] = -inf
    result = reduced([x0, x1, x0], op, divisor=3)
    assert result[2].isnan()
    assert same_bits(chained([x0, x1, x0], op, divisor=3), result)


@each_case
def test_the_result_may_take_the_place_of_any_operand(dtype: torch.dtype, op: ReduceOp) -> None:
    for alias in range(4):
        tensors = [values(dtype, BLOCK + 77, rank) for rank in range(4)]
        expected = reduced([tensor.clone() for tensor in tensors], op, divisor=4)
        assert same_bits(reduced(tensors, op, divisor=4, out=tensors[alias]), expected)


@each_case
def test_partial_results_passed_on_give_the_same_bits(dtype: torch.dtype, op: ReduceOp) -> None:
    for ranks, numel in itertools.product((2, 3, 4), (0, 1, 100, BLOCK + 1)):
        tensors = [values(dtype, numel, rank) for rank in range(ranks)]
        assert same_bits(chained(tensors, op, divisor=ranks), reduced(tensors, op, divisor=ranks))


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype not in HALF])
def test_a_partial_result_may_take_the_place_of_the_own_operand(dtype: torch.dtype) -> None:
    x0, x1 = values(dtype, 1000, 0), values(dtype, 1000, 1)
    expected = reduced([x0, x1], "sum")
    Arithmetic(dtype, "sum").extend(as_bytes(x0), as_bytes(x1), as_bytes(x1), last=True)
    assert same_bits(x1, expected)


@each_half
def test_the_last_partial_result_of_half_precision_may_take_the_place_of_the_own_operand(dtype: torch.dtype) -> None:
    x0, x1 = values(dtype, 1000, 0), values(dtype, 1000, 1)
    expected = reduced([x0, x1], "mean", divisor=2)
    Arithmetic(dtype, "mean", 2).extend(as_bytes(x0.float()), as_bytes(x1), as_bytes(x1), last=True)
    assert same_bits(x1, expected)


@each_case
def test_memory_need_not_be_aligned(dtype: torch.dtype, op: ReduceOp) -> None:
    tensors = [values(dtype, 999, rank) for rank in range(3)]
    expected = as_bytes(reduced(tensors, op, divisor=3))
    for shift in (1, 4):
        moved = []
        for tensor in tensors:
            room = np.empty(shift + expected.size, np.uint8)
            room[shift:] = as_bytes(tensor)
            moved.append(room[shift:])
        out = np.empty(shift + expected.size, np.uint8)[shift:]
        Arithmetic(dtype, op, 3).reduce(moved, out)
        assert np.array_equal(out, expected)


def specials(dtype: torch.dtype) -> list[Tensor]:
    """Every pair of zeros of both signs, a number, infinity, and NaN of different bits."""
    bits = {torch.float32: [0x7FC00000, 0xFFC00001, 0x7FC12345], torch.float64: [0x7FF8 << 48, 0xFFF8 << 48 | 1]}[dtype]
    kind = np.uint32 if dtype == torch.float32 else np.uint64
    nans = torch.from_numpy(np.array(bits, kind)).view(dtype)
    special = torch.cat([torch.tensor([0.0, -0.0, 1.0, float("inf")], dtype=dtype), nans])
    pairs = torch.cartesian_prod(special, special).repeat(4, 1)
    return [pairs[:, 0].contiguous(), pairs[:, 1].contiguous()]


def moved(tensor: Tensor, shift: int) -> NDArray[np.uint8]:
    """The bytes of a tensor at an address ``shift`` beside a good one."""
    room = np.empty(tensor.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + shift
    room[start : start + tensor.nbytes] = as_bytes(tensor)
    return room[start : start + tensor.nbytes]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", FLOAT_OPS)
def test_signs_of_zero_and_bits_of_nan_do_not_depend_on_the_place_in_memory(dtype: torch.dtype, op: ReduceOp) -> None:
    """Ranks hold their operands at other addresses, and put the result beside them or in the place of their own one."""
    tensors = specials(dtype)
    what, expected = Arithmetic(dtype, op, 3), as_bytes(reduced(specials(dtype), op, divisor=3))
    for shifts in itertools.product((0, 4, 8, 16), repeat=3):
        x0, x1, out = (moved(tensor, shift) for tensor, shift in zip([*tensors, tensors[0]], shifts, strict=True))
        what.reduce([x0, x1], out)
        assert np.array_equal(out, expected), shifts
        for place in (0, 1):
            operands = [x0.copy(), x1.copy()]
            what.reduce(operands, operands[place])
            assert np.array_equal(operands[place], expected), (shifts, place)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", FLOAT_OPS)
def test_signs_of_zero_do_not_depend_on_how_the_vector_is_cut(dtype: torch.dtype, op: ReduceOp) -> None:
    """Algorithms cut it differently, and vector instructions must not decide otherwise than those for the rest.
    (Which NaN of two comes out does depend on it. It is NaN all the same.)"""
    x0, x1 = specials(dtype)
    whole, numbers = reduced([x0, x1], op), ~(x0.isnan() | x1.isnan())
    for size in (1, 2, 3, 5, 17):
        parts = [reduced([x0[i : i + size].clone(), x1[i : i + size].clone()], op) for i in range(0, len(x0), size)]
        assert torch.equal(torch.cat(parts).isnan(), whole.isnan())
        assert same_bits(torch.cat(parts)[numbers], whole[numbers])
    assert same_bits(chained([x0, x1], op), whole)


@pytest.mark.parametrize("dtype", [*FLOATS, *HALF, *COMPLEX])
def test_the_mean_is_one_multiplication_by_the_reciprocal_of_the_divisor(dtype: torch.dtype) -> None:
    x0, x1 = values(dtype, 100, 0), values(dtype, 100, 1)
    total, wide = reduced([x0, x1], "sum"), (torch.float32 if dtype in HALF else dtype)
    assert same_bits(reduced([x0, x1], "mean", divisor=1), total)
    expected = (x0.to(wide) + x1.to(wide)).numpy() * np.asarray(1 / 7).astype(torch.empty(0, dtype=wide).numpy().dtype)
    assert same_bits(reduced([x0, x1], "mean", divisor=7), torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "op", "divisor", "why"),
    [
        (torch.float32, "prod", 1, "expected one of sum, mean, min, max, product, band, bor, bxor"),
        (torch.float32, "mean", 0, "divisor must be >= 1"),
        (torch.int32, "mean", 1, "use op='sum'"),
        (torch.bool, "mean", 1, "use op='sum'"),
        (torch.float32, "band", 1, "for whole numbers and bool, not for float32"),
        (torch.bfloat16, "bor", 1, "for whole numbers and bool, not for bfloat16"),
        (torch.complex64, "bxor", 1, "for whole numbers and bool, not for complex64"),
        (torch.complex64, "min", 1, "no order"),
        (torch.complex128, "max", 1, "no order"),
        *((dtype, "sum", 1, "no arithmetic for float8") for dtype in FLOAT8),
    ],
)
def test_what_is_not_defined_is_refused(dtype: torch.dtype, op: ReduceOp, divisor: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Arithmetic(dtype, op, divisor)
