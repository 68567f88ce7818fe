"""Two hosts on one machine: network namespaces joined by a veth pair, MTU 1500, for measurements across a network."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

_CLONE_NEWNET = 0x4000_0000
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One namespace: ``prefix`` starts a command in it."""

    name: str
    interface: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


class NoNamespaces(RuntimeError):
    """None can be made on this machine, for the reason in the text."""


def _veth(first: Host, second: Host) -> None:
    _ip(
        *("link", "add", first.interface, "netns", first.name, "mtu", "1500", "type", "veth"),
        *("peer", "name", second.interface, "netns", second.name, "mtu", "1500"),
    )


@contextmanager
def two_hosts(link: Callable[[Host, Host], None] = _veth) -> Iterator[tuple[Host, Host]]:
    """Make two namespaces with a link between them, and remove them at the end.

    ``link`` makes the interface of each host; by default they are the ends of a veth pair. Raises NoNamespaces.
    """
    number = next(_numbers)
    tag = f"{os.getpid() % 100_000}x{number}"
    hosts = (Host(f"gb{tag}a", f"v{tag}a", "10.231.77.1"), Host(f"gb{tag}b", f"v{tag}b", "10.231.77.2"))
    with ExitStack() as removed:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                removed.callback(_remove, host)
            link(*hosts)
            for host in hosts:
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
                _ip("-n", host.name, "link", "set", host.interface, "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise NoNamespaces(f"no network namespaces here: {detail}") from None
        yield hosts


def _remove(host: Host) -> None:
    with suppress(subprocess.CalledProcessError):
        _ip("netns", "del", host.name)


def set_link(host: Host, up: bool) -> None:
    """Cut or mend the host's network."""
    _ip("-n", host.name, "link", "set", host.interface, "up" if up else "down")


def enter_namespace(name: str) -> None:
    """Have this thread, and those that it starts, use the network of a host. ``os.setns`` is of Python 3.12."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name!r}")
    finally:
        os.close(descriptor)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
