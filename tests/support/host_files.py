"""What machines made of network namespaces have in ``/etc/hosts``, for processes that ``ip netns exec`` starts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradbus.commands.lab.namespaces import Host

_FOLDER = Path("/etc/netns")


def add_ipv6_addresses(hosts: Sequence[Host]) -> list[str]:
    """Give each host an IPv6 address, of one network. Skips the test where this machine has no IPv6."""
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
