"""What machines made of network namespaces have in ``/etc/hosts``, for processes that ``ip netns exec`` starts, and for
forked ones that enter a host as it does."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gradbus.commands.lab.namespaces import Host, enter_namespace

_FOLDER = Path("/etc/netns")
_CLONE_NEWNS = 0x00020000  # of <sched.h>; Python has it with 3.12
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000  # of <sys/mount.h>


def enter_host(name: str) -> None:
    """Have this process, which has one thread as yet, use the network of a host, and the files of ``/etc`` that it has
    of its own, as ``ip netns exec`` does for a new program."""
    enter_namespace(name)
    if not (own := sorted((_FOLDER / name).glob("*"))):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(None, b"/", None, _MS_SLAVE | _MS_REC, None), "mount /")  # mounts stay in this process
    for file in own:
        _check(
            libc.mount(os.fsencode(file), os.fsencode(Path("/etc", file.name)), None, _MS_BIND, None), f"mount {file}"
        )


def _check(code: int, call: str) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), call)


def add_ipv6_addresses(hosts: Sequence[Host]) -> list[str]:
    """Give each host an IPv6 address, of one network. Skips the test where this machine has no IPv6."""
    import pytest  # not at each start of a process that enters a host

    addresses = [f"fd00:77::{number}" for number in range(1, len(hosts) + 1)]
    for host, address in zip(hosts, addresses, strict=True):
        command = ["ip", "-n", host.name, "addr", "add", f"{address}/64", "dev", host.interface, "nodad"]
        if subprocess.run(command, timeout=10).returncode:
            pytest.skip("no IPv6 in network namespaces here")
    return addresses


@contextmanager
def name_service(hosts: Sequence[Host]) -> Iterator[None]:
    """Give each host a file of names that has ``localhost`` alone, and no name server, until the end."""
    made = [_FOLDER / host.name for host in hosts]
    was_there = _FOLDER.exists()
    try:
        for folder in made:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n", encoding="ascii")
            # It refuses at once, as nothing listens there.
            (folder / "resolv.conf").write_text(
                "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n", encoding="ascii"
            )
        yield
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        if not was_there:
            _FOLDER.rmdir()


def add_names(host: Host, names: Mapping[str, str]) -> None:
    """Have a host know the addresses of names from now on, the processes that run there included."""
    with (_FOLDER / host.name / "hosts").open("a", encoding="ascii") as file:  # the same file: it is mounted
        file.write("".join(f"{address} {name}\n" for name, address in names.items()))
