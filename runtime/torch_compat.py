"""Calls to torch whose signature or behaviour differs between the versions that gradbus supports, 2.6 and newer.

``gradbus.torch``, the backend of torch.distributed, requires a newer torch, and checks that by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")

HAS_STREAM_CONTEXT = hasattr(torch.Stream, "__enter__")  # torch 2.6 has no such method


_COMPILED = "_orig_mod."  # what torch.compile adds to the names of a module's tensors, also of one within another


def uncompiled_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of tensors as they are without ``torch.compile``, by the given names.

    If two would be equal then, all stay as they are.
    """
    found = {name: name.replace(_COMPILED, "") for name in names}
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def unwrapped(module: T) -> T | nn.Module:
    """Return the module within ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile``, which add a prefix
    to the names of its tensors; any other object as it is."""
    found: T | nn.Module = module
    while True:
        if isinstance(found, DistributedDataParallel | nn.DataParallel):
            found = found.module
        elif isinstance(found, nn.Module) and isinstance(inner := getattr(found, "_orig_mod", None), nn.Module):
            found = inner
        else:
            return found


def available_accelerator() -> torch.device | None:
    """Return the accelerator of this machine, without an index; None if there is no usable one.

    Newer versions of torch have ``current_accelerator(check_available=True)`` for this. In torch 2.6 the function lacks
    that argument, and raises RuntimeError on a machine without an accelerator.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


@contextlib.contextmanager
def copy_stream(device: torch.device) -> Iterator[torch.Stream]:
    """Enter a stream for copies to and from ``device``, on which the work of the block is queued.

    The stream is separate from those that compute, so that copies overlap with kernels. torch 2.6 cannot enter a
    ``torch.Stream``: there it is the current stream of the calling thread, and copies wait for its earlier kernels.
    """
    if not HAS_STREAM_CONTEXT:
        yield torch.accelerator.current_stream(device)
        return
    stream = _stream(device)
    with stream:
        yield stream


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
