"""Top-k with error feedback as a communication hook: the codecs s4 and sq8 in :func:`gradbus.codecs.residual_step`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus import codecs
from gradbus.codecs.index_coding import max_index_bytes
from gradbus.codecs.quantize import num_chunks
from gradbus.codecs.s4 import S4
from gradbus.codecs.sq8 import SQ8
from gradbus.torch.hooks import wire
from gradbus.torch.hooks.state import HookParameter, HookState, saved_tensor


@dataclass(slots=True, eq=False)
class _Memory:
    """residual: float32, shape (n,), what was not sent. sent: the message of this step, while it can be taken back."""

    residual: Tensor
    sent: bytes = b""


class TopKHookState(HookState):
    """Each step sends the entries of largest magnitude of gradient plus residual; the residual is what was not sent.

    Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (arXiv:1809.07599). Any optimizer can follow,
    with momentum or without: it gets the mean of what the ranks have sent. The residual is in units of the gradient, so
    a lower learning rate also applies to it.

    A gradient that is zero on all ranks counts as none, as in steps that leave a layer out: nothing is sent of the
    residual. Messages have the same size on all ranks and in all steps.
    """

    hook: ClassVar[str] = "top_k"
    has_memory: ClassVar[bool] = True

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]], *, density: float = 0.01,
        value_dtype: Literal["fp32", "int8"] = "fp32", min_numel: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            named_parameters, min_numel, process_group: see :class:`HookState`.
            density: share of each parameter's entries that is sent; at least one.
            value_dtype: of what is sent; the rounding of "int8" stays in the residual.

        Raises:
            ValueError: an option out of range, or parameters that this hook cannot take.
        """
        super().__init__(named_parameters, process_group=process_group, min_numel=min_numel)
        if value_dtype not in ("fp32", "int8"):
            raise ValueError(f"value_dtype must be 'fp32' or 'int8', got {value_dtype!r}")
        self._codec = S4(density=density) if value_dtype == "fp32" else SQ8(density=density)
        self._memory = {
            member.name: _Memory(torch.zeros(member.numel)) for member in self._members.values() if member.is_compressed
        }

    @torch.no_grad()
    def take_back(self) -> None:
        """The gradients of the last step were not used, as when a loss scaler has left it out: what was sent in them
        goes back to the residual. Call it on all ranks, before the next step. Dense gradients are not kept."""
        for memory in self._memory.values():
            self._take_back(memory)

    # The hook

    def _options(self) -> dict[str, Any]:
        return {"codec": self._codec.name, "density": self._codec.density}

    def _section_bytes(self, member: HookParameter) -> int:
        k = self._codec.count_v2(member.numel)
        header_bytes = len(self._codec.encode(torch.zeros(1)))  # zeros are not sent
        value_bytes = k + 4 * num_chunks(k, self._codec.chunk_elems) if isinstance(self._codec, SQ8) else 4 * k
        return wire.payload_section_bytes(header_bytes + value_bytes + max_index_bytes(member.numel, k))

    def _encode(self, member: HookParameter, gradient: Tensor, section: Tensor) -> None:
        memory = self._memory[member.name]
        is_absent, is_finite = not bool(gradient.any()), True
        try:
            memory.sent, memory.residual = codecs.residual_step(gradient, memory.residual, self._codec)
        except codecs.NonFiniteError:
            memory.sent, is_finite = b"", False  # the residual is still the valid one
        wire.write_payload(section, memory.sent, is_absent=is_absent, is_finite=is_finite)

    def _decode(self, member: HookParameter, sections: Sequence[Tensor], gradient: Tensor) -> None:
        memory = self._memory[member.name]
        payloads = [wire.read_payload(section) for section in sections]
        is_finite = all(payload.is_finite for payload in payloads)
        if not is_finite or all(payload.is_absent for payload in payloads):
            self._take_back(memory)
            gradient.fill_(0.0 if is_finite else torch.nan)
            return
        gradient.zero_()
        for payload in payloads:
            self._add_up(payload.data, gradient)
        gradient.mul_(1.0 / len(payloads))

    def _take_back(self, memory: _Memory) -> None:
        if memory.sent:
            self._add_up(memory.sent, memory.residual)
            memory.sent = b""

    def _add_up(self, payload: bytes | memoryview, out: Tensor) -> None:
        parsed = codecs.parse(payload, expected_dim=out.numel())
        if parsed.codec != self._codec.name:
            raise codecs.CodecError(f"message of codec {parsed.codec}, expected {self._codec.name}")
        for block in parsed.blocks():
            assert isinstance(block, codecs.SparseBlock)
            out.index_add_(0, block.indices, block.values)  # each index occurs once: no order to agree on

    # Saving

    def _saved(self, member: HookParameter) -> dict[str, Any]:
        if not member.is_compressed:
            return {}
        return {"residual": member.shaped(self._memory[member.name].residual)}

    def _load(self, parameters: Mapping[HookParameter, Mapping[str, Any]], saved: Mapping[str, Any]) -> None:
        residuals = {
            member.name: saved_tensor(content, "residual", member)
            for member, content in parameters.items()
            if member.is_compressed
        }
        for name, residual in residuals.items():
            self._memory[name] = _Memory(residual)
