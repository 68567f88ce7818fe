"""Hosts on one machine: network namespaces joined by veth pairs, MTU 1500, for measurements across a network."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

_PR_SET_PDEATHSIG = 1
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One namespace: ``prefix`` starts a command in it.

    Attributes:
        process: one that has process numbers of its own there, see :func:`enter_host`; 0: there is none.
    """

    name: str
    interface: str
    address: str
    process: int = 0

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
    with _made(2, lambda hosts: link(*hosts)) as made:
        yield made[0], made[1]


@contextmanager
def hosts_on_a_switch(count: int, rate_mbit_s: float) -> Iterator[tuple[Host, ...]]:
    """Make so many namespaces, each with a link of this rate, both ways, to one switch, and remove them at the end.

    Each has process numbers of its own, too, so that what is in them shares no memory with what is in another one.

    Raises:
        NoNamespaces: none can be made here, or no links of a given rate.
    """
    with ExitStack() as removed:

        def join(hosts: Sequence[Host]) -> None:
            switch = hosts[0].name + "s"
            _ip("netns", "add", switch)
            removed.callback(_remove, switch)
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
            for host in hosts:
                port = f"p{host.interface}"
                _ip(
                    *("link", "add", host.interface, "netns", host.name, "mtu", "1500", "type", "veth"),
                    *("peer", "name", port, "netns", switch, "mtu", "1500"),
                )
                _ip("-n", switch, "link", "set", port, "master", "switch", "up")
                _set_rate(switch, port, rate_mbit_s)

        with _made(count, join) as hosts:
            for host in hosts:
                set_rate(host, rate_mbit_s)
            yield tuple(replace(host, process=_hold(host, removed)) for host in hosts)


def _hold(host: Host, removed: ExitStack) -> int:
    """Start a process that keeps the host's process numbers and its /proc. Returns its number."""
    command = [*host.prefix, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", "echo; exec cat"]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise NoNamespaces(f"no process numbers of their own here: {error}") from None

    def end() -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()  # which ends it
        process.stdout.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    removed.callback(end)
    assert process.stdout is not None
    if process.stdout.read(1) != b"\n":
        raise NoNamespaces("no process numbers of their own here: unshare --pid --mount-proc fails")
    return process.pid


def enter_host(host: Host) -> None:
    """Move this process, of one thread, to a host of :func:`hosts_on_a_switch`: network, process numbers, /proc.

    As process numbers are given at birth this returns in a child of the process, whose end is that of the process.
    """
    _join(*(f"/proc/{host.process}/ns/{kind}" for kind in ("net", "pid_for_children", "mnt")))
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _made(count: int, join: Callable[[tuple[Host, ...]], None]) -> Iterator[tuple[Host, ...]]:
    """Namespaces with addresses, on interfaces that ``join`` makes. Raises NoNamespaces."""
    number = next(_numbers)
    tag = f"{os.getpid() % 100_000}x{number}"
    letters = "abcdefghijklmnopqrstuvwxyz"[:count]
    hosts = tuple(Host(f"gb{tag}{it}", f"v{tag}{it}", f"10.231.77.{at}") for at, it in enumerate(letters, start=1))
    with ExitStack() as removed:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                removed.callback(_remove, host.name)
            join(hosts)
            for host in hosts:
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
                _ip("-n", host.name, "link", "set", host.interface, "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise NoNamespaces(f"no network namespaces here: {detail}") from None
        yield hosts


def _remove(name: str) -> None:
    with suppress(subprocess.CalledProcessError):
        _ip("netns", "del", name)


def set_link(host: Host, up: bool) -> None:
    """Cut or mend the host's network."""
    _ip("-n", host.name, "link", "set", host.interface, "up" if up else "down")


def set_rate(host: Host, rate_mbit_s: float) -> None:
    """Limit what the host sends to this rate. Raises NoNamespaces: this kernel has no queues of a given rate."""
    _set_rate(host.name, host.interface, rate_mbit_s)


def _set_rate(namespace: str, interface: str, rate_mbit_s: float) -> None:
    """By tbf: 100 packets at once, and a queue that holds all that sockets here may send, so that nothing is lost."""
    shape = ("tbf", "rate", f"{rate_mbit_s:g}mbit", "burst", "150kb", "limit", "64mb")
    try:
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *shape)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise NoNamespaces(f"no links of a given rate here: {detail}") from None


def sent_bytes(interface: str) -> int:
    """What has left by this interface of this thread's network so far, in bytes with all headers."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as lines:
        counters = dict(line.split(":") for line in lines if ":" in line)
    return int(next(text for name, text in counters.items() if name.strip() == interface).split()[8])


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


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout
