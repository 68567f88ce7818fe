"""Makes the backend known to torch. Loads the rest only when a process group is made."""

from __future__ import annotations

import re
from typing import Any

import torch

NAME = "dds"
OLDEST = (2, 14)  # the first torch that takes a backend written in Python


def register() -> None:
    """Register the backend "dds".

    torch calls this through the entry point; more than once does no harm.

    Raises:
        RuntimeError: this torch cannot have it; the text says what to do.
    """
    check(torch.__version__, torch.distributed.is_available())
    import torch.distributed as dist

    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def check(version: str, has_distributed: bool) -> None:
    """Raises RuntimeError: a torch of this version, with or without torch.distributed, cannot have the backend."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        raise RuntimeError(
            f"backend {NAME!r} needs torch {OLDEST[0]}.{OLDEST[1]} or newer, this is {version}, which takes no backend "
            f"written in Python. Upgrade torch, or use gradbus.join_group, which works with it"
        )
    if not has_distributed:
        raise RuntimeError(f"backend {NAME!r} needs torch.distributed, which this torch was built without")


def _create(options: Any, backend_options: Any) -> Any:
    from gradbus.torch.process_group import create

    return create(NAME, options)
