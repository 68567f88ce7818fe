"""Reader for IDX, the format of the MNIST files: a big-endian header, then the bytes of one array.

Own, although torchvision has one: that reader takes unpacked files only, so it would have to write next to the archives
(a shared data folder is often read-only, and several processes start at once); and importing torchvision costs seconds.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

MAX_BYTES = 1 << 30  # of an array: twice the largest known set in this format, EMNIST
MAX_DIMS = 8
_UINT8 = 0x08
_STEP_BYTES = 1 << 20


def read_idx(path: Path) -> Tensor:
    """The array of unsigned bytes in ``path``, gunzipped in memory if the name ends in ``.gz``.

    No more memory is taken than the file has bytes for, and no more is unpacked than its header says.

    Returns:
        uint8, shape as the header says.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not an IDX file of unsigned bytes, it is cut short, or beyond the limits.
    """
    if path.suffix != ".gz":
        with path.open("rb") as file:
            return _read(file, path)
    try:
        with gzip.open(path) as file:
            return _read(file, path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: damaged gzip file ({error}); remove it and download it again") from None


def _read(file: BinaryIO | gzip.GzipFile, path: Path) -> Tensor:
    start = file.read(4)
    if len(start) < 4 or start[:3] != bytes([0, 0, _UINT8]):
        raise ValueError(f"{path}: not an IDX file of unsigned bytes, it starts with {start.hex() or 'nothing'}")
    dims = start[3]
    if dims > MAX_DIMS:
        raise ValueError(f"{path}: header says {dims} dimensions, at most {MAX_DIMS}")
    sizes = file.read(4 * dims)
    if len(sizes) < 4 * dims:
        raise ValueError(f"{path}: cut short inside the header, {4 + len(sizes)} of {4 + 4 * dims} bytes")
    shape = struct.unpack(f">{dims}I", sizes)
    size = math.prod(shape)
    if max(size, math.prod(max(1, extent) for extent in shape)) > MAX_BYTES:  # strides of an empty array count, too
        raise ValueError(f"{path}: header says {size} bytes {shape}, at most {MAX_BYTES} bytes are read")
    content = bytearray()
    # In steps, for the size is only a claim; and one byte more, to see whether there is one.
    while len(content) <= size and (some := file.read(min(_STEP_BYTES, size + 1 - len(content)))):
        content += some
    if len(content) != size:
        found = "more" if len(content) > size else len(content)
        raise ValueError(f"{path}: header says {size} bytes {shape}, the file has {found}")
    return torch.frombuffer(content, dtype=torch.uint8).view(shape) if size else torch.empty(shape, dtype=torch.uint8)
