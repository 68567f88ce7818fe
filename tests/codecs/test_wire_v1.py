"""Version 1 against writers and readers made of ``struct`` alone, after the tables in ``docs/codecs.md``."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from gradbus import codecs

F32 = np.float32


def oracle_quantize(values: list[np.float32], chunk_elems: int) -> tuple[list[np.float32], list[int]]:
    scales: list[np.float32] = []
    q: list[int] = []
    for start in range(0, len(values), chunk_elems):
        chunk = values[start : start + chunk_elems]
        scale = F32(max(abs(value) for value in chunk)) / F32(127) or F32(1.0)
        scales.append(scale)
        q += [max(-127, min(127, round(float(value / scale)))) for value in chunk]  # round() is half-to-even
    return scales, q


def oracle_largest(values: list[np.float32], density: float) -> list[int]:
    k = max(1, int(len(values) * density))
    return sorted(sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))[:k])


def oracle_encode(name: str, values: list[np.float32], *, density: float, chunk_elems: int) -> bytes:
    dim = len(values)
    if name == "fp32":
        return struct.pack(f"<{dim}f", *values)
    if name == "q8":
        scales, q = oracle_quantize(values, chunk_elems)
        header = struct.pack("<IQI", chunk_elems, dim, len(scales))
        return bytes.fromhex("51380001") + header + struct.pack(f"<{len(scales)}f{dim}b", *scales, *q)
    indices = oracle_largest(values, density)
    k, sent = len(indices), [values[index] for index in indices]
    if name == "s4":
        return bytes.fromhex("53340001") + struct.pack(f"<ii{k}i{k}f", dim, k, *indices, *sent)
    scales, q = oracle_quantize(sent, chunk_elems)
    header = struct.pack("<iiii", dim, k, chunk_elems, len(scales))
    return bytes.fromhex("53510001") + header + struct.pack(f"<{k}i{len(scales)}f{k}b", *indices, *scales, *q)


@pytest.mark.parametrize("name", [name for name in codecs.ALL if 1 in codecs.get(name).versions])
@pytest.mark.parametrize("dim", [1, 9, 10, 64, 65, 500])
def test_every_byte_is_as_the_oracle_writes_it(name: str, dim: int) -> None:
    x = torch.randn(dim, generator=torch.Generator().manual_seed(dim)).round(decimals=1)  # with ties and zeros
    options = {"density": 0.3} if name in ("s4", "sq8") else {}
    if name in ("q8", "sq8"):
        options["chunk_elems"] = 16
    payload = codecs.get(name, version=1, **options).encode(x)
    assert payload == oracle_encode(name, list(x.numpy()), density=0.3, chunk_elems=16)


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("fp32", 4_799_528), ("q8", 1_200_490), ("s4", 959_916), ("sq8", 600_020)]
)
def test_sizes_for_the_reference_network_are_exact(name: str, num_bytes: int) -> None:
    dim = 1_199_882
    x = torch.randn(dim, generator=torch.Generator().manual_seed(0))
    assert len(codecs.get(name, version=1).encode(x)) == num_bytes
    k = int(0.1 * dim)
    formula = {
        "fp32": 4 * dim,
        "q8": 20 + dim + 4 * math.ceil(dim / 8192),
        "s4": 12 + 8 * k,
        "sq8": 20 + 5 * k + 4 * math.ceil(k / 8192),
    }
    assert formula[name] == num_bytes


def test_ties_at_the_threshold_do_not_make_the_message_longer() -> None:
    payload = codecs.get("s4", version=1).encode(torch.zeros(1000))
    assert len(payload) == 12 + 8 * 100
    assert len(codecs.get("s4", version=1).encode(torch.ones(1000))) == 12 + 8 * 100


def test_the_older_s8_is_read() -> None:
    payload = struct.pack("<4siif3i3b", b"S8\0\1", 10, 3, 0.5, 0, 4, 9, -2, 127, 1)
    decoded = codecs.decode(payload, expected_dim=10)
    assert decoded.vector.tolist() == [-1, 0, 0, 0, 63.5, 0, 0, 0, 0, 0.5]
    assert decoded.is_delta
    assert decoded.codec == "s8"


def test_a_sparse_message_without_entries_is_read() -> None:
    assert codecs.decode(struct.pack("<4sii", b"S4\0\1", 10, 0), expected_dim=10).vector.tolist() == [0.0] * 10
