"""TCP ports for servers of other processes, which bind them later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def kept_ports(count: int) -> Iterator[list[int]]:
    """Free ports of this machine, which nobody is given by chance meanwhile.

    Each is bound here and never listens: so a server that asks for it by number, with SO_REUSEADDR as all do, gets it,
    and who asks for any port gets another one.
    """
    with ExitStack() as bound:
        ports = []
        for _ in range(count):
            kept = bound.enter_context(socket.socket())
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(("127.0.0.1", 0))
            ports.append(int(kept.getsockname()[1]))
        yield ports


def free_port() -> int:
    """A port that nobody has just now."""
    with kept_ports(1) as (port,):
        return port
