"""Codecs by name, and messages by their first four bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradbus.codecs import fp32, loco, q2, q4, q8, s4, sq8
from gradbus.codecs.base import Codec, Decoded, DenseBlock, Parsed
from gradbus.codecs.errors import CodecError, DimMismatchError
from gradbus.codecs.wire import Payload, as_view

_CODECS: dict[str, type[Codec]] = {
    "fp32": fp32.Fp32, "loco": loco.Loco, "q2": q2.Q2, "q4": q4.Q4, "q8": q8.Q8, "s4": s4.S4, "sq8": sq8.SQ8,
}  # fmt: skip
_ALIASES = {"chunk": "chunk_elems"}

ALL: tuple[str, ...] = tuple(_CODECS)

_PARSERS: dict[bytes, Callable[[memoryview, int], Parsed]] = {
    fp32.MAGIC_V2: fp32.parse_fp32_v2,
    q8.MAGIC_V1: q8.parse_q8_v1,
    q8.MAGIC_V2: q8.parse_q8_v2,
    q4.MAGIC: q4.parse_q4,
    q2.MAGIC: q2.parse_q2,
    loco.MAGIC: loco.parse_loco,
    s4.MAGIC_V1: partial(s4.parse_sparse_v1, "s4", s4.FLOAT32_VALUES),
    s4.MAGIC_V2: partial(s4.parse_sparse_v2, "s4", s4.FLOAT32_VALUES),
    sq8.MAGIC_S8: partial(s4.parse_sparse_v1, "s8", sq8.S8_VALUES),
    sq8.MAGIC_V1: partial(s4.parse_sparse_v1, "sq8", sq8.INT8_VALUES_V1),
    sq8.MAGIC_V2: partial(s4.parse_sparse_v2, "sq8", sq8.INT8_VALUES),
}


def get(name: str, **options: float) -> Codec:
    """The codec ``name`` (one of :data:`ALL`) with its options.

    Options: ``version`` 1 or 2 (default), of q4, q2 and loco 2 alone; ``chunk_elems`` (or ``chunk``) for q8, q4, q2 and
    sq8; ``density`` for s4 and sq8.

    Raises:
        ValueError: no such codec or option (the text names a near one), or a value out of range.
    """
    if name not in _CODECS:
        raise ValueError(f"no codec {name!r}{_nearest(name, ALL)}; there are {', '.join(ALL)}")
    codec = _CODECS[name]
    known = [field.name for field in fields(codec)]
    arguments: dict[str, Any] = {_ALIASES.get(option, option): value for option, value in options.items()}
    for option in arguments:
        if option not in known:
            raise ValueError(
                f"codec {name!r} has no option {option!r}{_nearest(option, known)}; "
                f"it takes {', '.join(known) or 'none'}"
            )
    if len(arguments) < len(options):
        raise ValueError(f"codec {name!r}: chunk and chunk_elems are the same option, give one of them")
    return codec(**arguments)


def parse(payload: Payload, *, expected_dim: int) -> Parsed:
    """Check every byte of a message of any codec and version, and make its content readable block by block.

    A known magic followed by ``expected_dim`` decides: from there on every fault is an error. Other bytes of exactly
    ``4 * expected_dim`` are headerless FP32. So weights that begin with a magic by chance are still weights, and a
    damaged message is not taken for weights because of its length.

    Args:
        payload: any contiguous buffer; kept alive by the result, and not to be changed while that is used.
        expected_dim: elements of our own model: a limit on what is allocated, whatever the message claims.

    Raises:
        NonFiniteError: well-formed, but with NaN or infinity.
        DimMismatchError: a message for a model of another size.
        CodecError: anything else that is wrong.
    """
    if expected_dim < 0:
        raise ValueError(f"expected_dim must be >= 0, got {expected_dim}")
    view = as_view(payload)
    is_headerless_length = len(view) == 4 * expected_dim
    parser = _PARSERS.get(bytes(view[:4]))
    if parser is not None:
        try:
            return parser(view, expected_dim)
        except DimMismatchError:
            if not is_headerless_length:
                raise
    if is_headerless_length:
        return fp32.parse_fp32_v1(view, expected_dim)
    raise CodecError(
        f"payload of {len(view)} bytes starts with {bytes(view[:4])!r}, expected a known magic, "
        f"or headerless FP32 of exactly {4 * expected_dim} bytes for {expected_dim} elements"
    )


def decode(payload: Payload, *, expected_dim: int, out: Tensor | None = None) -> Decoded:
    """The whole vector of a message of any codec and version; see :func:`parse`.

    Args:
        out: float32, shape (expected_dim,), any device: written and returned as ``vector``; untouched on an error.

    Raises:
        CodecError: bad bytes, or :class:`NonFiniteError` for bad values.
        ValueError: ``out`` does not fit.
    """
    if out is not None and (out.shape != (expected_dim,) or out.dtype != torch.float32):
        raise ValueError(f"out must be float32 of shape ({expected_dim},), got {out.dtype} of {tuple(out.shape)}")
    parsed = parse(payload, expected_dim=expected_dim)
    vector = torch.empty(expected_dim, dtype=torch.float32) if out is None else out
    with torch.no_grad():
        if parsed.is_sparse:
            vector.zero_()
        for block in parsed.blocks():
            if isinstance(block, DenseBlock):
                vector[block.start : block.start + block.values.numel()].copy_(block.values)
            else:
                vector[block.indices.to(vector.device)] = block.values.to(vector.device)
    return Decoded(vector, parsed.is_delta, parsed.codec)


def _nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    near = get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
