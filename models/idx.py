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

import torch
from torch import Tensor

_UINT8 = 0x08


def read_idx(path: Path) -> Tensor:
    """The array of unsigned bytes in ``path``, gunzipped in memory if the name ends in ``.gz``.

    Returns:
        uint8, shape as the header says.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not an IDX file of unsigned bytes, or it is cut short.
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path}: damaged gzip file ({error}); remove it and download it again") from None
    if len(data) < 4 or data[:3] != bytes([0, 0, _UINT8]):
        raise ValueError(f"{path}: not an IDX file of unsigned bytes, it starts with {data[:4].hex() or 'nothing'}")
    dims = data[3]
    header_bytes = 4 + 4 * dims
    if len(data) < header_bytes:
        raise ValueError(f"{path}: cut short inside the header, {len(data)} of {header_bytes} bytes")
    shape = struct.unpack_from(f">{dims}I", data, 4)
    if len(data) - header_bytes != math.prod(shape):
        raise ValueError(
            f"{path}: header says {math.prod(shape)} bytes {shape}, the file has {len(data) - header_bytes}"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header_bytes).view(shape)
