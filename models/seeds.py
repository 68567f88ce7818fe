"""Seeds and generators: every random choice of this package comes from a generator made here.

PyTorch's global generator is shared between the threads of a process, in which several clients may train: numbers drawn
from it depend on the schedule.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_global_generator_lock = threading.RLock()  # one model may be built of another


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from a tuple such as ``("order", seed, client_id, round_id)``.

    Hashed, because sums and products of small numbers collide: client 1 in round 2 must not repeat client 2 in round 1.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded_generator(*parts: int | str) -> torch.Generator:
    """A fresh CPU generator that starts from :func:`derive_seed` of ``parts``."""
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextmanager
def seeded_global_generator(seed: int) -> Iterator[None]:
    """Seed the global CPU generator for one block and put its old state back.

    For code that takes no generator, such as the constructor of a user's network. Other threads that draw meanwhile
    are not kept out, so the block should be short.
    """
    with _global_generator_lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed, and not restore, accelerators as well
        yield
