"""Makes the scheme ``dds://`` known to torch.

torch looks for the scheme of ``init_method`` before it looks for the backend, so registering the backend comes too
late: ``import gradbus.torch`` registers the scheme. An entry point that torch calls at its own import would do it as
well, and run this in every program of the environment; where the package is damaged none of them could import torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

SCHEME = "dds"


def register_scheme() -> None:
    """Register the scheme. More than once does no harm, nor does a torch without torch.distributed."""
    try:
        from torch.distributed.rendezvous import register_rendezvous_handler
    except ImportError:
        return
    with contextlib.suppress(RuntimeError):  # it is known: a notebook has loaded this module anew
        register_rendezvous_handler(SCHEME, _handler)  # type: ignore[no-untyped-call]


def _handler(url: str, **options: Any) -> Iterator[Any]:
    from gradbus.torch.store.rendezvous import handler

    return handler(url, **options)
