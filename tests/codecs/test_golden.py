"""Messages kept as files: a change of a single byte in a format shows here, and asks for a new version.

``python tests/codecs/test_golden.py`` writes the files anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradbus import codecs

FOLDER = Path(__file__).parent.parent / "golden"


def small_vector() -> Tensor:
    """24 values by integer arithmetic: the same on every machine. With zeros, ties and both signs."""
    return torch.tensor([((index * 7919) % 61 - 30) // 3 / 8 for index in range(24)])


def scattered_vector() -> Tensor:
    """1000 different values without a pattern."""
    return (torch.arange(1000) ** 3 * 7919 % 10_007) / 8


def two_blocks_vector() -> Tensor:
    """A whole block of 4,096 values without a pattern, and the start of another."""
    return (torch.arange(4200) ** 3 * 7919 % 10_007 - 5_000) / 8


def regular_vector() -> Tensor:
    """Every 200th of 20,000."""
    vector = torch.zeros(20_000)
    vector[::200] = torch.arange(1, 101) / 16
    return vector


def blocks_vector() -> Tensor:
    """200 runs of eight, about a quarter of them ones, the others zeros."""
    return (torch.arange(200) ** 3 * 7919 % 1009 < 250).float().repeat_interleave(8)


SMALL = {"density": 0.25}
CASES: dict[str, tuple[str, int, dict[str, float], Tensor]] = {
    "fp32_v1": ("fp32", 1, {}, small_vector()),
    "fp32_v2": ("fp32", 2, {}, small_vector()),
    "q8_v1": ("q8", 1, {"chunk_elems": 10}, small_vector()),
    "q8_v2": ("q8", 2, {"chunk_elems": 10}, small_vector()),
    "q4_v2": ("q4", 2, {"chunk_elems": 10}, small_vector()),
    "q2_v2": ("q2", 2, {"chunk_elems": 10}, small_vector()),
    "loco_v2": ("loco", 2, {}, two_blocks_vector()),
    "s4_v1": ("s4", 1, SMALL, small_vector()),
    "s4_v2_bitmap": ("s4", 2, SMALL, small_vector()),
    "s4_v2_rice": ("s4", 2, {"density": 0.02}, scattered_vector()),
    "s4_v2_raw": ("s4", 2, {"density": 1e-6}, torch.arange(100_000) / 8),
    "sq8_v1": ("sq8", 1, {"chunk_elems": 4, **SMALL}, small_vector()),
    "sq8_v2_bitmap": ("sq8", 2, {"chunk_elems": 4, **SMALL}, small_vector()),
}
# zstd may give other bytes in another release: here the content is compared, and that the old file is still read.
ZSTD_CASES: dict[str, tuple[str, int, dict[str, float], Tensor]] = {
    "sq8_v2_varint_zstd": ("sq8", 2, {"density": 0.01}, regular_vector()),
    "sq8_v2_bitmap_zstd": ("sq8", 2, {"density": 0.5}, blocks_vector()),
}
CODING_AT = 5  # byte of the version 2 header
CODINGS = {
    "s4_v2_bitmap": codecs.Coding.BITMAP,
    "s4_v2_rice": codecs.Coding.RICE,
    "s4_v2_raw": codecs.Coding.RAW,
    "sq8_v2_bitmap": codecs.Coding.BITMAP,
    "sq8_v2_varint_zstd": codecs.Coding.VARINT_ZSTD,
    "sq8_v2_bitmap_zstd": codecs.Coding.BITMAP_ZSTD,
}


def encode(case: tuple[str, int, dict[str, float], Tensor]) -> bytes:
    name, version, options, vector = case
    return codecs.get(name, version=version, **options).encode(vector)


def golden(case: str) -> bytes:
    return bytes.fromhex((FOLDER / f"codec_{case}.hex").read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_the_golden_file(case: str) -> None:
    assert encode(CASES[case]).hex() == golden(case).hex()


@pytest.mark.parametrize("case", [*CASES, *ZSTD_CASES])
def test_a_golden_file_is_read_as_the_same_vector(case: str) -> None:
    definition = (CASES | ZSTD_CASES)[case]
    name, version, _, vector = definition
    fresh = codecs.decode(encode(definition), expected_dim=vector.numel())
    old = codecs.decode(golden(case), expected_dim=vector.numel())
    assert torch.equal(old.vector, fresh.vector)
    assert (old.codec, old.is_delta) == (name, fresh.is_delta)
    assert codecs.parse(golden(case), expected_dim=vector.numel()).version == version


@pytest.mark.parametrize("case", CODINGS)
def test_the_golden_files_show_every_index_coding(case: str) -> None:
    assert golden(case)[CODING_AT] == CODINGS[case]


def write_files() -> None:
    for case, definition in (CASES | ZSTD_CASES).items():
        lines = encode(definition).hex(" ", 4).split()
        text = "\n".join(" ".join(lines[start : start + 8]) for start in range(0, len(lines), 8))
        (FOLDER / f"codec_{case}.hex").write_text(text + "\n")


if __name__ == "__main__":
    write_files()
