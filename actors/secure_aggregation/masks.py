"""Masks: key streams of AES-128 in counter mode (NIST SP 800-38A), read as integers modulo 2^64 or 2^16."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

SEED_BYTES = 32  # the key, and the first counter block
_CIPHER_BYTES = 16  # a block of AES
_BLOCK_BYTES = 128 * 1024  # of the stream, as many of the values and of zeros stay in the second-level cache
_STREAMS = 256  # at once: as many as the masks of one client
_ZEROS = bytes(_BLOCK_BYTES)

Words = NDArray[np.unsignedinteger[Any]]


class Stopped(Exception):
    """It was no longer wanted."""


def add_masks(
    values: Words,
    seeds: Iterable[tuple[bytes, bool]],
    should_stop: Callable[[], bool] = lambda: False,
    *,
    threads: int = 1,
) -> None:
    """Add masks to values in place, or take them off, modulo 2^64, or 2^16 of such values. A seed makes one mask only.

    Args:
        values: uint64 or uint16, shape (D,), contiguous.
        seeds: of each mask the seed, 32 bytes that nobody else can know, and whether the mask is taken off. Those of
            the next masks are asked for when the ones before have been added.
        should_stop: asked for each piece of the values.
        threads: among which the values are divided; the cipher and the sums run without Python's lock.

    Raises:
        Stopped: ``should_stop`` was true; the values are of no use.
    """
    block_elems = _BLOCK_BYTES // values.itemsize
    share = block_elems * max(1, -(-len(values) // (block_elems * threads)))
    starts = range(0, len(values), share)
    pieces = iter(seeds)
    with ThreadPoolExecutor(threads, "gradbus-masks") as pool:  # which starts none that has nothing to do
        run = map if len(starts) < 2 else pool.map
        while batch := list(itertools.islice(pieces, _STREAMS)):
            add = partial(_add_streams, values, share, batch, should_stop)
            list(run(add, starts))


def _add_streams(
    values: Words, share: int, seeds: Sequence[tuple[bytes, bool]], should_stop: Callable[[], bool], first: int
) -> None:
    """To ``share`` values from ``first`` on."""
    width = values.itemsize
    streams = []
    for seed, negative in seeds:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a seed of {len(seed)} bytes: expected {SEED_BYTES}")
        counter = (int.from_bytes(seed[16:], "big") + first * width // _CIPHER_BYTES) % 2**128
        cipher = Cipher(algorithms.AES(seed[:16]), modes.CTR(counter.to_bytes(16, "big"))).encryptor()
        streams.append((cipher, np.subtract if negative else np.add))
    block_elems = _BLOCK_BYTES // width
    stream = bytearray(_BLOCK_BYTES + _CIPHER_BYTES - 1)  # the library asks for a block of the cipher more, less a byte
    numbers, zeros = np.frombuffer(stream, f"<u{width}", block_elems), memoryview(_ZEROS)
    end = min(first + share, len(values))
    for start in range(first, end, block_elems):
        if should_stop():
            raise Stopped
        place = values[start : min(start + block_elems, end)]
        for cipher, change in streams:  # all masks of a piece, while it is in the cache
            cipher.update_into(zeros[: width * len(place)], stream)
            change(place, numbers[: len(place)], out=place)
