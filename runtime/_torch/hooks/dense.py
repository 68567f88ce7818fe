"""Hooks that send every entry in fewer bits, and remember nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus import codecs
from gradbus.codecs.bytegrad import MinMax, dequantize_min_max, min_max_bytes, quantize_min_max
from gradbus.codecs.quantize import check_chunk_elems, num_chunks
from gradbus.torch.hooks import wire
from gradbus.torch.hooks.state import HookParameter, HookState, mean_in_rank_order


class ByteGradHookState(HookState):
    """uint8 between the smallest and the largest value of each chunk of a parameter: a quarter of the bytes.

    The quantization is ByteGrad's (see :mod:`gradbus.codecs.bytegrad`); the exchange is a single all_gather, so that
    each gradient is rounded once, and not a scatter and a gather, which would round twice and need an order among
    buckets. Per rank n (N - 1) bytes come in, where a dense all_reduce moves 8 n (N - 1) / N: it pays for small worlds.
    No error feedback. Chunks end where parameters end: the result does not depend on how DDP forms buckets.
    """

    hook: ClassVar[str] = "byte_grad"

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]], *, chunk_elems: int = 8192, min_numel: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            named_parameters, min_numel, process_group: see :class:`HookState`.
            chunk_elems: values that share a minimum and a maximum, which take 8 bytes.

        Raises:
            ValueError: an option out of range, or parameters that this hook cannot take.
        """
        super().__init__(named_parameters, process_group=process_group, min_numel=min_numel)
        check_chunk_elems(chunk_elems)
        self._chunk_elems = chunk_elems

    def _options(self) -> dict[str, Any]:
        return {"chunk_elems": self._chunk_elems}

    def _section_bytes(self, member: HookParameter) -> int:
        return min_max_bytes(member.numel, self._chunk_elems)

    def _encode(self, member: HookParameter, gradient: Tensor, section: Tensor) -> None:
        quantized = quantize_min_max(gradient, self._chunk_elems)
        for part, values in zip(self._parts(member, section), quantized, strict=True):
            part.copy_(values)

    def _decode(self, member: HookParameter, sections: Sequence[Tensor], gradient: Tensor) -> None:
        decoded = [dequantize_min_max(self._parts(member, section), self._chunk_elems) for section in sections]
        mean_in_rank_order(decoded, gradient)

    def _parts(self, member: HookParameter, section: Tensor) -> MinMax:
        """Views into a section."""
        chunks = num_chunks(member.numel, self._chunk_elems)
        limits = wire.floats(section, 2 * chunks)
        return MinMax(limits[:chunks], limits[chunks:], section[8 * chunks : 8 * chunks + member.numel])


class Bf16HookState(HookState):
    """bfloat16 on the way, float32 in the sum: half the bytes.

    Unlike torch's ``bf16_compress_hook``, which asks for CUDA and NCCL even where all is on the CPU, and adds up in
    bfloat16: here each gradient is rounded once. Per rank 2 n (N - 1) bytes come in, where a dense all_reduce moves
    8 n (N - 1) / N: it pays for worlds below 4.
    """

    hook: ClassVar[str] = "bf16"

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]], *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """See :class:`HookState`; all parameters go in bfloat16."""
        super().__init__(named_parameters, process_group=process_group, min_numel=0)

    def _compresses(self, layout: codecs.DgcLayout) -> bool:
        return True

    def _options(self) -> dict[str, Any]:
        return {}

    def _section_bytes(self, member: HookParameter) -> int:
        return 2 * member.numel

    def _encode(self, member: HookParameter, gradient: Tensor, section: Tensor) -> None:
        wire.floats(section, member.numel, torch.bfloat16).copy_(gradient)

    def _decode(self, member: HookParameter, sections: Sequence[Tensor], gradient: Tensor) -> None:
        mean_in_rank_order([wire.floats(section, member.numel, torch.bfloat16) for section in sections], gradient)
