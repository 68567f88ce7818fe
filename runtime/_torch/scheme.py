"""Makes the scheme ``dds://`` known to torch.

torch looks for the scheme of ``init_method`` before it looks for the backend, so registering the backend comes too
late. Hence the entry point ``torch.backends``, which torch calls at the end of ``import torch``. At that time the
package that imports torch may itself be half loaded: nothing here may be imported before it is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

SCHEME = "dds"


def register_scheme() -> None:
    """Register the scheme. More than once does no harm, and nor does a torch without torch.distributed."""
    try:
        from torch.distributed.rendezvous import register_rendezvous_handler
    except ImportError:
        return
    with contextlib.suppress(RuntimeError):  # it is known
        register_rendezvous_handler(SCHEME, _handler)  # type: ignore[no-untyped-call]


def _handler(url: str, **options: Any) -> Iterator[Any]:
    from gradbus.torch.rendezvous import handler

    return handler(url, **options)
