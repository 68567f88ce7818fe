"""Makes the backend and the scheme ``dds://`` known to torch. Loads the rest only when a process group is made.

torch looks for the scheme of ``init_method`` before it looks for the backend, so registering the backend comes too
late: ``import gradbus.torch`` registers the scheme. An entry point that torch calls at its own import would do it as
well, and run this in every program of the environment; where the package is damaged none of them could import torch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch

NAME = "dds"
OLDEST = (2, 14)  # the first torch that takes a backend written in Python


def register() -> None:
    """Register the backend "dds".

    torch calls this through the entry point; calling it again has no effect.

    Raises:
        ImportError: this torch is too old; the text names the remedy. RuntimeError: it has no torch.distributed.
    """
    check_version(torch.__version__)
    if not torch.distributed.is_available():
        raise RuntimeError(f"backend {NAME!r} needs torch.distributed, which this torch was built without")
    import torch.distributed as dist

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def check_version(version: str) -> None:
    """Raise ImportError if a torch of this version cannot have the backend. `import gradbus.torch` begins with this."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        raise ImportError(
            f"backend {NAME!r} needs torch {OLDEST[0]}.{OLDEST[1]} or newer, this is {version}, which takes no backend "
            f"written in Python. Upgrade torch, or use gradbus.join_group, which works with it"
        )


def _create(options: Any, backend_options: Any) -> Any:
    from gradbus.torch.process_group import create

    return create(NAME, options)


def register_scheme() -> None:
    """Register the scheme. Calling it again has no effect, nor has a torch without torch.distributed."""
    try:
        from torch.distributed.rendezvous import register_rendezvous_handler
    except ImportError:
        return
    with contextlib.suppress(RuntimeError):  # it is known: a notebook has loaded this module anew
        register_rendezvous_handler(NAME, _handler)  # type: ignore[no-untyped-call]


def _handler(url: str, **options: Any) -> Iterator[Any]:
    from gradbus.torch.store.rendezvous import handler

    return handler(url, **options)
