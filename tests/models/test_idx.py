"""IDX files: read as they are, and what claims or unpacks to more than it should is refused before memory is."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch

from gradbus.models import mnist_files as idx
from gradbus.models.mnist_files import read_idx

MIB = 1 << 20


def idx_bytes(shape: tuple[int, ...], content: bytes) -> bytes:
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + content


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def peak_bytes_of_refusing(path: Path, words: str) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=words) as caught:
            read_idx(path)
        assert str(path) in str(caught.value)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["plain", "packed.gz"])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3), (0,), (0, 28, 28), ()])
def test_an_array_comes_back_in_its_shape(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    count = torch.Size(shape).numel()
    array = read_idx(write(tmp_path / name, idx_bytes(shape, bytes(range(count)))))
    assert array.dtype == torch.uint8
    assert array.shape == shape
    assert array.flatten().tolist() == list(range(count))


@pytest.mark.parametrize("name", ["plain", "packed.gz"])
def test_bytes_after_the_array_are_refused_without_reading_all_of_them(name: str, tmp_path: Path) -> None:
    """In a packed file a thousand times as many may follow as the file is long."""
    path = write(tmp_path / name, idx_bytes((5,), bytes(64 * MIB)))
    assert peak_bytes_of_refusing(path, r"header says 5 bytes \(5,\), the file has more") < 3 * MIB


@pytest.mark.parametrize("name", ["plain", "packed.gz"])
def test_a_claim_takes_no_memory(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, idx_bytes((idx.MAX_BYTES,), b"abc"))
    assert peak_bytes_of_refusing(path, r"header says 1073741824 bytes \(1073741824,\), the file has 3") < 3 * MIB


@pytest.mark.parametrize("shape", [(idx.MAX_BYTES + 1,), (1 << 16, 1 << 16), (1 << 31, 1 << 31, 1 << 31)])
def test_an_array_beyond_the_limit_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "big", idx_bytes(shape, b""))
    assert peak_bytes_of_refusing(path, "at most 1073741824 bytes") < MIB


@pytest.mark.parametrize("shape", [(1,) * 17, (0,) + (1 << 31,) * 4])
def test_a_shape_that_no_data_set_has_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "shape", idx_bytes(shape, b"a" * all(shape)))
    assert peak_bytes_of_refusing(path, "dimensions, at most 8|at most 1073741824 bytes") < MIB
