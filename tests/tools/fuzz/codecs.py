"""Targets: each codec's messages, in both versions."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import Literal

import torch

from fuzz.target import Target, must
from gradbus import codecs
from gradbus.codecs import fp32, loco, q2, q4, q8, s4, sq8
from gradbus.codecs.dgc import wire as dgc_wire
from gradbus.runtime.algorithms import parts

_MAGICS = {
    "fp32": (b"", fp32.MAGIC_V2),  # version 1 has none
    "q8": (q8.MAGIC_V1, q8.MAGIC_V2),
    "s4": (s4.MAGIC_V1, s4.MAGIC_V2),
    "q4": (q4.MAGIC,),
    "q2": (q2.MAGIC,),
    "loco": (loco.MAGIC,),
    "sq8": (sq8.MAGIC_S8, sq8.MAGIC_V1, sq8.MAGIC_V2),
}
_DIMS = (60, 0, 1, 257, 1000)
_LAYOUT = codecs.DgcLayout.of([("w", torch.zeros(6, 10)), ("b", torch.zeros(3)), ("k", torch.zeros(8, 25))])

# Beside the vector itself, 4 bytes an element, at most six times as much for indices and values on
# their way, and what one block of the reader's takes.
_LIMIT_BYTES = 7 * 4 * max(_DIMS) + (64 << 10)


def _read_codec(name: str, data: bytes) -> None:
    """The first byte chooses version and size of the model; then comes the message without its magic."""
    if not data:
        return
    magics = _MAGICS[name]
    dim = _DIMS[data[0] % len(_DIMS)]
    payload = magics[data[0] // len(_DIMS) % len(magics)] + data[1:]
    try:
        parsed = codecs.parse(payload, expected_dim=dim)
    except codecs.CodecError:
        return
    vector = codecs.decode(payload, expected_dim=dim).vector
    must(vector.shape == (dim,), "a vector of another size")
    must(bool(vector.isfinite().all()), "NaN or infinity came out")
    seen = 0
    for block in parsed.blocks(50):
        seen += block.values.numel()
        if isinstance(block, codecs.SparseBlock):
            must(bool((block.indices.diff() > 0).all()), "indices do not ascend")
    must(seen <= dim, "more values than elements")


def _codec_seeds(name: str) -> list[bytes]:
    seeds = []
    options: list[dict[str, float]] = (
        [{"density": density} for density in (0.02, 0.3, 1)]
        if name in ("s4", "sq8")
        else [{}]
        if name in ("fp32", "loco")
        else [{"chunk_elems": 16}]
    )
    for version, (at, dim), option in itertools.product(codecs.get(name).versions, enumerate(_DIMS), options):
        x = torch.randn(dim, generator=torch.Generator().manual_seed(dim))
        message = codecs.get(name, version=version, **option).encode(x)
        magics = _MAGICS[name]
        number = next(i for i, magic in enumerate(magics) if message.startswith(magic) and (magic or version == 1))
        seeds.append(bytes([at + len(_DIMS) * number]) + message[len(magics[number]) :])
    return seeds


def _with_digest(data: bytes) -> bytes:
    """The same with the magic and the digest of our layout: chance would never find them."""
    header = dgc_wire.HEADER
    if len(data) < header.size:
        return data
    _, *fields = header.unpack_from(data)
    fields[3] = _LAYOUT.digest
    return header.pack(dgc_wire.MAGIC, *fields) + data[header.size :]


def _read_dgc(data: bytes) -> None:
    for payload in (data, _with_digest(data)):
        try:
            message = codecs.decode_dgc(payload, _LAYOUT)
        except codecs.CodecError:
            continue
        mean = codecs.combine_dgc([payload], _LAYOUT)  # of one: the sum of several may be beyond float32
        must(bool(mean.flat.isfinite().all()), "NaN or infinity came out")
        must(bool(mean.skipped_by) != message.is_finite, "a step that is to be skipped is not")


def _dgc_seeds() -> list[bytes]:
    seeds = []
    dtypes: tuple[Literal["fp32", "fp16"], ...] = ("fp32", "fp16")
    for density, dtype, dense, scale in itertools.product((0.001, 0.1, 1.0), dtypes, dtypes, (1.0, float("nan"))):
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(slot.shape, generator=generator) * scale for slot in _LAYOUT.slots]
        config = codecs.DgcConfig(density=density, value_dtype=dtype, dense_dtype=dense)
        seeds.append(codecs.dgc_step(grads, codecs.DgcState.zeros(_LAYOUT), config)[0])
    return seeds


def _read_sparse(data: bytes) -> None:
    """Messages of the algorithms: entries of a vector, and values in 8 bits."""
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    for dim in _DIMS:
        try:
            entries = parts.decode_sparse(message, dim)
        except codecs.CodecError:
            continue
        if entries is not None:
            must(bool((entries[0].diff() > 0).all()), "indices do not ascend")
            must(not entries[0].numel() or int(entries[0][-1]) < dim, "an index beyond the vector")
    with contextlib.suppress(codecs.CodecError):
        must(parts.dequantized(message, 60, 16).shape == (60,), "a vector of another size")


def _sparse_seeds() -> list[bytes]:
    x = torch.randn(60, generator=torch.Generator().manual_seed(1))
    messages = [parts.take_largest(x.clone() * scale, [20, 40], 0.2)[0] for scale in (1.0, float("nan"))]
    return [bytes(message.tolist()) for message in (*messages, parts.quantized(x, 16))]


TARGETS = {
    **{
        name: Target(partial(_read_codec, name), _LIMIT_BYTES, partial(_codec_seeds, name), max_len=20_000)
        for name in codecs.ALL
    },
    "dgc": Target(_read_dgc, _LIMIT_BYTES, _dgc_seeds),
    "sparse": Target(_read_sparse, _LIMIT_BYTES, _sparse_seeds),
}
