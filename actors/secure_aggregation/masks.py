"""Masks: key streams of AES-128 in counter mode (NIST SP 800-38A), read as integers modulo 2^64."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

SEED_BYTES = 32  # the key, and the first counter block
_BLOCK_ELEMS = 32 * 1024  # 256 KiB of stream stay in the second-level cache
_ZEROS = bytes(8 * _BLOCK_ELEMS)


def add_mask(values: NDArray[np.uint64], seed: bytes, *, negative: bool = False) -> None:
    """Add the mask of a seed to values in place, or take it off, modulo 2^64. A seed makes one mask only.

    Args:
        values: uint64, shape (D,), contiguous. seed: 32 bytes that nobody else can know. negative: take it off.
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed of {len(seed)} bytes: expected {SEED_BYTES}")
    cipher = Cipher(algorithms.AES(seed[:16]), modes.CTR(seed[16:])).encryptor()
    stream = bytearray(8 * _BLOCK_ELEMS + 15)  # one block of the cipher more, less a byte, as the library asks for
    numbers = np.frombuffer(stream, "<u8", _BLOCK_ELEMS)
    zeros, change = memoryview(_ZEROS), np.subtract if negative else np.add
    for start in range(0, len(values), _BLOCK_ELEMS):
        place = values[start : start + _BLOCK_ELEMS]
        cipher.update_into(zeros[: 8 * len(place)], stream)
        change(place, numbers[: len(place)], out=place)
