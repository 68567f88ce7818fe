"""Masks: key streams of AES-128 in counter mode (NIST SP 800-38A), read as integers modulo 2^64 or 2^16."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

SEED_BYTES = 32  # the key, and the first counter block
_BLOCK_BYTES = 128 * 1024  # of the stream, as many of the values and of zeros stay in the second-level cache
_STREAMS = 256  # at once: as many as the masks of one client
_ZEROS = bytes(_BLOCK_BYTES)

Words = NDArray[np.unsignedinteger[Any]]


class Stopped(Exception):
    """It was no longer wanted."""


def add_masks(
    values: Words, seeds: Iterable[tuple[bytes, bool]], should_stop: Callable[[], bool] = lambda: False
) -> None:
    """Add masks to values in place, or take them off, modulo 2^64, or 2^16 of such values. A seed makes one mask only.

    Args:
        values: uint64 or uint16, shape (D,), contiguous.
        seeds: of each mask the seed, 32 bytes that nobody else can know, and whether the mask is taken off. Those of
            the next masks are asked for when the ones before have been added.
        should_stop: asked for each piece of the values.

    Raises:
        Stopped: ``should_stop`` was true; the values are of no use.
    """
    pieces = iter(seeds)
    while batch := list(itertools.islice(pieces, _STREAMS)):
        _add_streams(values, batch, should_stop)


def _add_streams(
    values: Words, seeds: Sequence[tuple[bytes, bool]], should_stop: Callable[[], bool]
) -> None:  # fmt: skip
    streams = []
    for seed, negative in seeds:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a seed of {len(seed)} bytes: expected {SEED_BYTES}")
        cipher = Cipher(algorithms.AES(seed[:16]), modes.CTR(seed[16:])).encryptor()
        streams.append((cipher, np.subtract if negative else np.add))
    width = values.itemsize
    block_elems = _BLOCK_BYTES // width
    stream = bytearray(_BLOCK_BYTES + 15)  # one block of the cipher more, less a byte, as the library asks for
    numbers, zeros = np.frombuffer(stream, f"<u{width}", block_elems), memoryview(_ZEROS)
    for start in range(0, len(values), block_elems):
        if should_stop():
            raise Stopped
        place = values[start : start + block_elems]
        for cipher, change in streams:  # all masks of a piece, while it is in the cache
            cipher.update_into(zeros[: width * len(place)], stream)
            change(place, numbers[: len(place)], out=place)
