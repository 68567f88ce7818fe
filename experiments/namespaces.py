"""Two hosts on one machine: network namespaces joined by a veth pair, MTU 1500, to measure what crosses a network."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
    """This machine does not let us make any; the text says why."""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two namespaces with a link between them, and remove them at the end. Raises NoNamespaces."""
    with unlinked_hosts() as hosts:
        try:
            first, second = hosts
            _ip(
                *("link", "add", first.interface, "netns", first.name, "mtu", "1500", "type", "veth"),
                *("peer", "name", second.interface, "netns", second.name, "mtu", "1500"),
            )
            bring_up(hosts)
        except (OSError, subprocess.CalledProcessError) as error:
            raise no_namespaces(error) from None
        yield hosts


@contextmanager
def unlinked_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two namespaces with no link between them, and remove them at the end. Raises NoNamespaces."""
    number = next(_numbers)
    tag = f"{os.getpid() % 100_000}x{number}"
    first, second = (
        Host(f"gb{tag}{side}", f"v{tag}{side}", f"10.231.77.{index}") for index, side in ((1, "a"), (2, "b"))
    )
    made: list[Host] = []
    try:
        try:
            for host in (first, second):
                _ip("netns", "add", host.name)
                made.append(host)
        except (OSError, subprocess.CalledProcessError) as error:
            raise no_namespaces(error) from None
        yield first, second
    finally:
        for host in made:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", host.name)


def bring_up(hosts: Iterable[Host]) -> None:
    """Give each host its address, and enable its interfaces. Raises subprocess.CalledProcessError."""
    for host in hosts:
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _ip("-n", host.name, "link", "set", host.interface, "up")
        _ip("-n", host.name, "link", "set", "lo", "up")


def no_namespaces(error: OSError | subprocess.CalledProcessError) -> NoNamespaces:
    """The error that says why none can be made."""
    detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
    return NoNamespaces(f"no network namespaces here: {detail}")


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
