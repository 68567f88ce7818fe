"""Elementwise reductions in a fixed order, on plain memory, without the GIL where NumPy works.

Order: ``((x0 + x1) + x2) + ...``, then one multiplication for the mean. Float addition is not associative: only a fixed
order gives every rank, every run and every algorithm the same bits. float16 and bfloat16 are combined in float32 and
rounded once at the end. Whole numbers wrap around, as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gradbus.runtime.collectives.tensors import Bytes, dtype_name

ReduceOp = Literal["sum", "mean", "min", "max", "product", "band", "bor", "bxor"]

BLOCK_ELEMS = 32 * 1024  # of float32 128 KiB: two operands stay in the second-level cache
_FUNCTIONS: dict[str, Any] = {
    "sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip
_NUMPY: dict[torch.dtype, Any] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int8: np.int8, torch.int16: np.int16,
    torch.int32: np.int32, torch.int64: np.int64, torch.uint8: np.uint8, torch.uint16: np.uint16,
    torch.uint32: np.uint32, torch.uint64: np.uint64, torch.bool: np.bool_, torch.complex64: np.complex64,
    torch.complex128: np.complex128, torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # NumPy has no bfloat16: its bits
}  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)
# Infinities and NaN are results like others here: whoever trains with them finds out elsewhere.
_QUIET = partial(np.errstate, all="ignore")

Array = NDArray[Any]


@dataclass(frozen=True)
class Arithmetic:
    """One reduction of one dtype.

    Attributes:
        dtype: of operands and result. op: sum, mean, min, max, product; of whole numbers and bool also band, bor and
            bxor, bit by bit. divisor: of the mean.
    """

    dtype: torch.dtype
    op: ReduceOp
    divisor: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for what is not defined."""
        if self.op not in _FUNCTIONS:
            raise ValueError(f"op {self.op!r}: expected one of {', '.join(_FUNCTIONS)}")
        if self.divisor < 1:
            raise ValueError(f"divisor must be >= 1, got {self.divisor}")
        if self.dtype not in _NUMPY:
            raise ValueError(f"no arithmetic for {dtype_name(self.dtype)}; convert the tensor, or gather it")
        if self.op == "mean" and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise ValueError(f"the mean of {dtype_name(self.dtype)} is no {dtype_name(self.dtype)}; use op='sum'")
        if self.op in ("min", "max") and self.dtype.is_complex:
            raise ValueError(f"complex numbers have no order: op {self.op!r}")
        if self.op in ("band", "bor", "bxor") and (self.dtype.is_floating_point or self.dtype.is_complex):
            raise ValueError(f"op {self.op!r} is for whole numbers and bool, not for {dtype_name(self.dtype)}")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @cached_property
    def signature(self) -> str:
        """Return what all ranks must agree on."""
        return f"{self.op} {dtype_name(self.dtype)} /{self.divisor}"

    @property
    def partial(self) -> Arithmetic:
        """Return the same without the last steps, rounding and division: for sums that travel half done."""
        return Arithmetic(torch.float32 if self.dtype in _HALF else self.dtype, "sum" if self.op == "mean" else self.op)

    def reduce(self, operands: Sequence[Bytes], out: Bytes) -> None:
        """Combine the operands in their order.

        Args:
            operands: raw memory of ``dtype``, all of one size, one or more.
            out: raw memory for the result, of the same size; may be one of the operands, may not overlap otherwise.
        """
        kind = _NUMPY[self.dtype]
        typed = [_typed(operand, kind) for operand in operands]
        result = _typed(out, kind)
        work = self._reduce_half if self.dtype in _HALF else self._reduce_block
        # One pass over the memory needs no blocks.
        block = len(result) if len(typed) == 2 and self.divisor == 1 and self.dtype not in _HALF else BLOCK_ELEMS
        with _QUIET():
            for start in range(0, len(result), max(1, block)):
                here = slice(start, start + block)
                work([operand[here] for operand in typed], result[here])

    def extend(self, partial: Bytes, own: Bytes, out: Bytes, *, last: bool) -> None:
        """Combine a partial result with one more operand: ``partial op own``.

        Args:
            partial: memory of ``self.partial.dtype``. own: memory of ``dtype``.
            out: of ``dtype`` if ``last``, else of ``self.partial.dtype``; may be ``own`` if their sizes agree.
            last: also divide and round.
        """
        before, mine = _typed(partial, _NUMPY[self.partial.dtype]), _typed(own, _NUMPY[self.dtype])
        result = _typed(out, _NUMPY[self.dtype if last else self.partial.dtype])
        with _QUIET():
            for start in range(0, len(result), BLOCK_ELEMS):
                here = slice(start, start + BLOCK_ELEMS)
                self._extend_block(before[here], mine[here], result[here], last)

    def _extend_block(self, before: Array, own: Array, out: Array, last: bool) -> None:
        if self.dtype not in _HALF:
            self._function(before, own, out=out)
            if last:
                self._divide(out)
        elif last:
            self._finish_half(self._function(before, self.widen(own)), out)
        else:
            self._function(before, self.widen(own), out=out)

    def widen(self, block: Array) -> Array:
        """float32 of a block of half precision; a block of any other dtype as it is."""
        if self.dtype == torch.float16:
            return block.astype(np.float32)
        if self.dtype == torch.bfloat16:
            return (block.astype(np.uint32) << 16).view(np.float32)
        return block

    @property
    def _function(self) -> Callable[..., Any]:
        complex_product = self.op == "product" and self.dtype.is_complex
        function: Callable[..., Any] = _complex_product if complex_product else _FUNCTIONS[self.op]
        return function

    def _reduce_block(self, operands: list[Array], out: Array) -> None:
        if len(operands) == 1:
            if operands[0].ctypes.data != out.ctypes.data:
                out[:] = operands[0]
        elif len(operands) == 2:
            self._function(operands[0], operands[1], out=out)
        else:  # out may be an operand that is still to come: add up beside it
            total = self._function(operands[0], operands[1])
            for operand in operands[2:-1]:
                self._function(total, operand, out=total)
            self._function(total, operands[-1], out=out)
        self._divide(out)

    def _reduce_half(self, operands: list[Array], out: Array) -> None:
        total = self.widen(operands[0])
        for operand in operands[1:]:
            total = self._function(total, self.widen(operand))
        self._finish_half(total, out)

    def _finish_half(self, total: Array, out: Array) -> None:
        if self.op == "mean" and self.divisor != 1:
            total = total * np.float32(1 / self.divisor)
        out[:] = total.astype(np.float16) if self.dtype == torch.float16 else to_bfloat16(total)

    def _divide(self, out: Array) -> None:
        if self.op == "mean" and self.divisor != 1:
            # One multiplication by the rounded reciprocal, as DGC's mean has it: equal on every rank.
            np.multiply(out, out.dtype.type(1 / self.divisor), out=out)


def _complex_product(one: Array, other: Array, out: Array | None = None) -> Array:
    """NumPy's own rounds differently where vector instructions are used and where not: with the place in memory."""
    real = one.real * other.real - one.imag * other.imag
    imag = one.real * other.imag + one.imag * other.real
    result = np.empty_like(one) if out is None else out
    result.real, result.imag = real, imag
    return result


def to_bfloat16(values: Array) -> Array:
    """Bits of the nearest bfloat16, ties to even; uint16. NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded


def _typed(memory: Bytes, kind: Any) -> Array:
    """The bytes as elements. Payload of up to 16 KiB lies anywhere, as does that of senders that pad names otherwise
    than ours: NumPy takes that as well, at up to twice the time."""
    return memory.view(kind)
