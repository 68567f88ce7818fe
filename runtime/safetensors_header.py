"""The header of a safetensors file that others may have made, checked before its library reads, maps or allocates."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from io import BufferedReader
from typing import Any

from torch import Tensor

from gradbus.runtime.json_text import count_values, parse_json

MAX_HEADER_BYTES = 100_000_000  # as the library of the format has it
# A tensor of 4 dimensions has 10: its entry, dtype, shape and offsets. A model of 100,000 tensors with two moments and
# a step of each (Adam) has 400,000 in a checkpoint. As objects of Python so many values take up to 0.5 GB.
MAX_HEADER_VALUES = 5_000_000
MAX_DIMENSIONS = 64  # as many as torch takes
MAX_ELEMENTS = 1 << 62  # of a shape, where zeros count as ones: torch computes strides of it


def check_header(file: BufferedReader) -> None:
    """Check that a safetensors file is as long as its header says, and that tensors can have its shapes.

    The format: 8 bytes N, little-endian, N bytes of JSON, then the data, to whose ends ``data_offsets`` point.

    Raises:
        ValueError: it is not.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"it is no safetensors file: its {size:,} bytes begin with a header of {length:,}")
    header = parse_json(file.read(length).decode("utf-8"), max_values=MAX_HEADER_VALUES)
    entries = header if isinstance(header, dict) else {}
    ends = [_end_of(name, entry) for name, entry in entries.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ValueError(f"it has {size:,} bytes, by its header {expected:,}")
    file.seek(0)


def check_header_of(tensors: Mapping[str, Tensor]) -> None:
    """Check that :func:`check_header` takes the file of these tensors. Raises OSError: there are too many."""
    values = sum(6 + max(1, tensor.dim()) + count_values(name) for name, tensor in tensors.items())
    if values > MAX_HEADER_VALUES:
        many = f"its {len(tensors):,} tensors have {values:,} values in their header"
        raise OSError(errno.EFBIG, f"{many}, at most {MAX_HEADER_VALUES:,} are read")


def is_shape(found: Any) -> bool:
    """Return whether this is a shape that torch can compute strides of, also where one of its dimensions is 0."""
    if not isinstance(found, list) or len(found) > MAX_DIMENSIONS:
        return False
    if any(type(one) is not int or one < 0 for one in found):
        return False
    return bool(math.prod(max(1, one) for one in found) <= MAX_ELEMENTS)


def _end_of(name: str, entry: Any) -> int:
    """Return where the data of a tensor ends. Raises ValueError: its entry is none."""
    end = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(end, list) or len(end) != 2 or type(end[1]) is not int:
        raise ValueError("it is no safetensors file: its header has no data_offsets")
    if not is_shape(entry.get("shape")):
        raise ValueError(f"its tensor {name[:80]!r} has the impossible shape {str(entry.get('shape'))[:80]}")
    return end[1]
