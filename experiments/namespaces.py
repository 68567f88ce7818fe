"""Two hosts on one machine: network namespaces joined by a veth pair, MTU 1500. For tests of what crosses a network.

Or joined by a link that is as bad as one likes, see :mod:`.bad_link`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from gradbus.experiments.bad_link import BadLink, LinkFaults, open_tap

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
    """Make the two, and take them away again. Raises NoNamespaces."""
    with _two_hosts() as hosts:
        try:
            first, second = hosts
            _ip(
                *("link", "add", first.interface, "netns", first.name, "mtu", "1500", "type", "veth"),
                *("peer", "name", second.interface, "netns", second.name, "mtu", "1500"),
            )
            _bring_up(hosts)
        except (OSError, subprocess.CalledProcessError) as error:
            raise _no_namespaces(error) from None
        yield hosts


@contextmanager
def two_far_hosts(faults: LinkFaults) -> Iterator[tuple[Host, Host, BadLink]]:
    """The same with such a link in between. Raises NoNamespaces."""
    with _two_hosts() as hosts:
        taps: list[int] = []
        try:
            taps.extend(open_tap(host.interface, partial(enter_namespace, host.name)) for host in hosts)
            _bring_up(hosts)
        except (OSError, subprocess.CalledProcessError) as error:
            for tap in taps:
                os.close(tap)
            raise _no_namespaces(error) from None
        link = BadLink(taps[0], taps[1], faults)
        try:
            yield (*hosts, link)
        finally:
            link.close()


@contextmanager
def _two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces, with nothing between them."""
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
            raise _no_namespaces(error) from None
        yield first, second
    finally:
        for host in made:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", host.name)


def _bring_up(hosts: Iterable[Host]) -> None:
    for host in hosts:
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _ip("-n", host.name, "link", "set", host.interface, "up")
        _ip("-n", host.name, "link", "set", "lo", "up")


def _no_namespaces(error: OSError | subprocess.CalledProcessError) -> NoNamespaces:
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
