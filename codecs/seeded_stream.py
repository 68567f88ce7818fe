"""Random numbers of a seed, the same ones on every machine and in every version of every library."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


class SeededStream:
    """The words of Philox 4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).

    Its key are the 16 bytes of BLAKE2b of the seed, little-endian, and its counter begins at 0. NumPy keeps the words
    of a bit generator as they are, in distinction to what its distributions, and those of PyTorch, make of them.
    """

    def __init__(self, seed: bytes) -> None:
        """``seed``: any bytes."""
        key = hashlib.blake2b(seed, digest_size=16).digest()
        self._generator = np.random.Philox(key=int.from_bytes(key, "little"))

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next ones, shape (count,), little-endian."""
        return self._generator.random_raw(count).astype("<u8", copy=False)
