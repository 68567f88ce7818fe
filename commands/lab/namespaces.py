"""Hosts on one machine: network namespaces, two joined by a veth pair, or any number of them on a switch.

The links to the switch have the rate, delay and loss that :class:`LinkConditions` says. The kernel gives them these
(tbf, netem); where it has no netem, and a delay or loss is asked for, a :class:`Switch` in this process does.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.switch import Switch, open_tap
from gradbus.runtime.errors import GradbusError
from gradbus.runtime.json_text import parse_json

_CLONE_NEWUTS = 0x04000000
_MOST_HOSTS = 64
_REMOVED_IN_S = 20.0
# A process of its own: it waits for a line, or for the end of the process that would write it, killed or not.
_REMOVER = """
trap "" HUP INT TERM
read -r line
for name; do
    for process in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$process"; done
    ip netns del "$name"
done
"""
_numbers = itertools.count()

Carrier = Literal["kernel", "switch"]


@dataclass(frozen=True)
class Host:
    """One namespace: ``prefix`` starts a command in it."""

    name: str
    interface: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    @property
    def machine_prefix(self) -> tuple[str, ...]:
        """Starts a command as on another machine: with a host name of its own, too, so that it shares no memory."""
        return (*self.prefix, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name)


@dataclass(frozen=True)
class Network:
    """Hosts on a switch. ``switch``: the one in this process; None: the kernel carries what they send."""

    hosts: tuple[Host, ...]
    conditions: LinkConditions
    switch: Switch | None


class NoNamespaces(GradbusError):
    """None can be made on this machine, for the reason in the text."""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two namespaces joined by a veth pair, MTU 1500, and remove them at the end. Raises NoNamespaces."""

    def join(hosts: Sequence[Host]) -> None:
        first, second = hosts
        _ip(
            *("link", "add", first.interface, "netns", first.name, "mtu", "1500", "type", "veth"),
            *("peer", "name", second.interface, "netns", second.name, "mtu", "1500"),
        )

    with _made(2, join) as made:
        yield made[0], made[1]


@contextmanager
def hosts_on_a_switch(count: int, conditions: LinkConditions, by: Carrier | None = None) -> Iterator[Network]:
    """Make so many namespaces, each with a link to one switch, and remove them at the end.

    Args:
        by: what carries packets; None: the kernel where it can, else a switch in this process.

    Raises:
        NoNamespaces: none can be made here, or no such links.
    """
    if not 1 <= count <= _MOST_HOSTS:
        raise NoNamespaces(f"1 to {_MOST_HOSTS} hosts can be made, not {count}")
    needs_netem = conditions.delay_s or conditions.loss or conditions.duplicate
    carrier = by or ("switch" if needs_netem and not has_netem() else "kernel")
    with ExitStack() as removed:
        switches: list[Switch] = []
        join = partial(_join_by_kernel, conditions)
        if carrier == "switch":
            join = partial(_join_by_switch, conditions, removed, switches)
        with _made(count, join, quiet=True) as hosts:
            yield Network(hosts, conditions, switches[0] if switches else None)


def _bridge_of(hosts: Sequence[Host]) -> str:
    return f"{hosts[0].name}s"


def _join_by_kernel(conditions: LinkConditions, hosts: Sequence[Host]) -> None:
    """veth pairs to a bridge. Both ends of a link have the rate; delay and loss are those of the end at the bridge."""
    bridge = _bridge_of(hosts)
    _ip("netns", "add", bridge)
    _ip("-n", bridge, "link", "add", "switch", "type", "bridge")
    _ip("-n", bridge, "link", "set", "switch", "up")
    mtu = str(conditions.mtu)
    for host in hosts:
        port = f"p{host.interface}"
        _ip(
            *("link", "add", host.interface, "netns", host.name, "mtu", mtu, "type", "veth"),
            *("peer", "name", port, "netns", bridge, "mtu", mtu),
        )
        _ip("-n", bridge, "link", "set", port, "master", "switch", "up")
        parent: tuple[str, ...] = ("root",)
        if conditions.delay_s or conditions.loss or conditions.duplicate:
            shape = [*("limit", "200000"), *("delay", f"{1e6 * conditions.delay_s:.0f}us")]
            shape += [f"{1e6 * conditions.jitter_s:.0f}us"] if conditions.jitter_s else []
            shape += ["loss", f"{100 * conditions.loss:g}%"] if conditions.loss else []
            shape += ["duplicate", f"{100 * conditions.duplicate:g}%"] if conditions.duplicate else []
            _tc(bridge, port, "root", "handle", "1:", "netem", *shape)
            parent = ("parent", "1:1")
        if conditions.rate_bit_s is not None:
            _tc(bridge, port, *parent, *_tbf(conditions))
            _tc(host.name, host.interface, "root", *_tbf(conditions))


def _join_by_switch(
    conditions: LinkConditions, removed: ExitStack, switches: list[Switch], hosts: Sequence[Host]
) -> None:
    """TAP devices of a :class:`Switch`. What hosts send is limited by the kernel where it can: their sockets wait then,
    as they do for a real interface."""
    devices: dict[bytes, int] = {}
    with ExitStack() as failed:
        kernel_limits = conditions.rate_bit_s is not None
        for number, host in enumerate(hosts):
            try:
                tap = open_tap(host.interface, partial(enter_namespace, host.name))
            except OSError as error:
                raise NoNamespaces(
                    "this kernel has no netem (tc), and without it delay and loss need /dev/net/tun, which cannot be "
                    f"used: {error.strerror}. Load one of them (modprobe sch_netem, or tun) as root; in a container: "
                    "--device /dev/net/tun"
                ) from None
            failed.callback(os.close, tap)
            address = bytes((2, 0x67, 0x62, 0, 0, number))
            devices[address] = tap
            shape = ("address", address.hex(":"), "mtu", str(conditions.mtu), "txqueuelen", "10000")
            _ip("-n", host.name, "link", "set", host.interface, *shape)
            try:
                if kernel_limits:
                    _tc(host.name, host.interface, "root", *_tbf(conditions))
            except NoNamespaces:
                kernel_limits = False
        switches.append(Switch(devices, conditions, limits_senders=not kernel_limits))
        removed.callback(switches[0].close)
        failed.pop_all()


@functools.cache
def has_netem() -> bool:
    """Whether this kernel's tc can delay and lose packets. Raises NoNamespaces."""
    with _made(1, lambda hosts: None, with_addresses=False) as (host,):
        try:
            _tc(host.name, "lo", "root", "netem", "delay", "1ms")
        except NoNamespaces:
            return False
    return True


def enter_host(host: Host) -> None:
    """Move this thread, and those that it starts, to a host as to another machine: network, and a host name."""
    enter_namespace(host.name)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare of the host name")
    socket.sethostname(host.name)


@contextmanager
def _made(
    count: int, join: Callable[[tuple[Host, ...]], None], *, with_addresses: bool = True, quiet: bool = False
) -> Iterator[tuple[Host, ...]]:
    """Namespaces with addresses, on interfaces that ``join`` makes. Raises NoNamespaces.

    ``quiet``: the kernel sends nothing by itself (IPv6 announces its addresses), which would count as traffic.
    """
    number = next(_numbers)
    tag = f"{os.getpid() % 100_000}x{number}"
    letters = (f"{chr(97 + at // 26)}{chr(97 + at % 26)}" if at >= 26 else chr(97 + at) for at in range(count))
    hosts = tuple(Host(f"gb{tag}{it}", f"v{tag}{it}", f"10.231.77.{at}") for at, it in enumerate(letters, start=1))
    with _removed_at_end([*(host.name for host in hosts), _bridge_of(hosts)]):
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
            join(hosts)
            for host in hosts if with_addresses else ():
                if quiet:
                    with suppress(subprocess.CalledProcessError):  # a kernel without IPv6
                        _ip("-n", host.name, "link", "set", host.interface, "addrgenmode", "none")
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
                _ip("-n", host.name, "link", "set", host.interface, "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            raise NoNamespaces(f"no network namespaces here: {_detail(error)}") from None
        yield hosts


@contextmanager
def _removed_at_end(names: Sequence[str]) -> Iterator[None]:
    """Remove the namespaces of these names at the end, however it comes, and kill the processes left in them."""
    try:
        remover = subprocess.Popen(
            ["sh", "-c", _REMOVER, "sh", *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise NoNamespaces(f"no network namespaces here: {error}") from None
    try:
        yield
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):  # one that takes longer goes on by itself
            remover.communicate(b"end\n", timeout=_REMOVED_IN_S)


def let_dial_only(host: Host, target: Host, port: int) -> None:
    """Have a host reach one TCP port of one other host, and nothing else: neither others nor other ports, nor can
    anybody dial it, as behind address translation or a firewall that lets connections out. Raises NoNamespaces.

    Routes do it, which every kernel has: without one, nothing leaves the host, answers to others included.
    """
    allowed = ("to", target.address, "ipproto", "tcp", "dport", str(port), "lookup", "main")
    try:
        _ip("-n", host.name, "rule", "add", "pref", "10", *allowed)
        _ip("-n", host.name, "rule", "add", "pref", "20", "unreachable")
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoNamespaces(f"no routes by port here (ip rule): {_detail(error)}") from None


def set_link(host: Host, up: bool) -> None:
    """Cut or mend the host's network."""
    _ip("-n", host.name, "link", "set", host.interface, "up" if up else "down")


def set_sides(*sides: Sequence[Host]) -> None:
    """Cut a switch that the kernel is into several, one for the hosts of each side; one side of all hosts mends it."""
    bridge = _bridge_of([min((host for side in sides for host in side), key=lambda host: host.name)])
    for number, side in enumerate(sides):
        switch = f"switch{number or ''}"
        with suppress(subprocess.CalledProcessError):  # it is there
            _ip("-n", bridge, "link", "add", switch, "type", "bridge")
        _ip("-n", bridge, "link", "set", switch, "up")
        for host in side:
            _ip("-n", bridge, "link", "set", f"p{host.interface}", "master", switch)


def _tbf(conditions: LinkConditions) -> tuple[str, ...]:
    shape = ("rate", f"{conditions.rate_bit_s or 0:.0f}bit", "burst", f"{conditions.burst_bytes}b")
    return ("tbf", *shape, "limit", f"{conditions.queue_bytes}b")


def _tc(namespace: str, interface: str, *discipline: str) -> None:
    """Raises NoNamespaces: this kernel has no such queueing discipline, or there is no right to set one."""
    try:
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, *discipline)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoNamespaces(f"no links of a given rate or delay here: {_detail(error)}") from None


@dataclass(frozen=True)
class LinkTraffic:
    """Holds what has passed a host's interface so far, with Ethernet headers. ``dropped``: packets before they were
    sent."""

    sent_bytes: int
    received_bytes: int
    dropped: int


def traffic(host: Host) -> LinkTraffic:
    """The counters of a host's interface. Raises OSError or subprocess.CalledProcessError: it is gone."""
    found = parse_json(_run("ip", "-n", host.name, "-s", "-j", "link", "show", "dev", host.interface))[0]["stats64"]
    return LinkTraffic(found["tx"]["bytes"], found["rx"]["bytes"], found["tx"]["dropped"])


def sent_bytes(interface: str) -> int:
    """Return what has left by this interface of this thread's network so far, in bytes with all headers."""
    return _counters(interface)[8]


def link_bytes(interface: str) -> int:
    """Return what has left and come by this interface of this thread's network so far, in bytes with all headers."""
    counters = _counters(interface)
    return counters[0] + counters[8]


def _counters(interface: str) -> list[int]:
    with open("/proc/thread-self/net/dev", encoding="ascii") as lines:
        counters = dict(line.split(":") for line in lines if ":" in line)
    return [int(count) for count in next(text for name, text in counters.items() if name.strip() == interface).split()]


def enter_namespace(name: str) -> None:
    """Have this thread, and those that it starts, use the network of a host."""
    _join(f"/var/run/netns/{name}")


def _join(*namespaces: str) -> None:
    """``os.setns`` is of Python 3.12."""
    with ExitStack() as opened:
        files = [opened.enter_context(open(path, "rb")) for path in namespaces]  # before /proc is another one
        for file in files:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {file.name!r}")


def _detail(error: OSError | subprocess.CalledProcessError) -> str:
    return error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout
