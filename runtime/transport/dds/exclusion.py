"""Shuts participants out of this process's DDS, and tells whose they are.

Cyclone DDS 11.0 has no ``ignore_participant``. What DDSI itself offers does the same: whoever gets an SPDP message that
ends a participant forgets it with all its readers, and to whoever knows a participant already, a further announcement
of it is only a sign of life. So this process sends two messages to itself: the end of that participant, and then an
announcement in its name that offers no discovery endpoints. What Cyclone keeps then is a placeholder: nothing is sent
to that participant, no reader or writer of it is found, and the placeholder goes after ``spdp.PLACEHOLDER_LEASE_S`` of
silence. The other one gets the same kind of message about the participants of this process: else it would wait for
readers here, and, as all that it announces of its own has been acknowledged, it would not be found again later.

Everybody who can send to the port can do the same to anybody, as discovery is not protected; this is the one good use.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gradbus.runtime.network.addresses import udp_socket
from gradbus.runtime.transport.dds.discovery import Claim, own_addresses
from gradbus.runtime.transport.dds.network import own_address
from gradbus.runtime.transport.dds.spdp import goodbye, placeholder_of

_SEARCH_S = 0.05  # how long to look for a process behind a port
_MAX_ADDRESSES = 4  # of one participant: it says itself where it is
_ADDRESS = re.compile(r"udp/([0-9.]+):([0-9]+)|udp6/\[([0-9a-fA-F:.]+)\]:([0-9]+)")


class _Socket(NamedTuple):
    """A UDP socket of this machine, as /proc/net/udp has it."""

    port: int
    user: int
    inode: int


class Exclusion:
    """Of one DDS domain of this process."""

    def __init__(self, document: str, domain_id: int, own: bytes) -> None:
        """Find where this process listens.

        Args:
            document: the domain's configuration. own: prefix of the GUID of a participant of this process.

        Raises:
            OSError: that cannot be found: no address, or ports of another kind.
        """
        self._own = own
        self._address = own_address(document)
        ports = [port for _, port in own_addresses(domain_id)]
        if not ports:
            raise OSError(f"this process does not listen on a port of discovery of domain {domain_id}")
        self._port = ports[0]
        self._socket = udp_socket(self._address)

    def end(self, prefix: bytes) -> None:
        """Have a participant forgotten. If it still announces itself, it is found again."""
        self._send(goodbye(prefix))

    def leave(self, prefix: bytes, addresses: str, own: Iterable[bytes]) -> None:
        """Tell a participant that this process's have ended. It finds them again by their next announcements, and asks
        for all that it has to know of them.

        Args:
            addresses: where it can be reached, see :class:`Claim`. own: prefixes of the participants of this process.
        """
        for place in _places(addresses)[:_MAX_ADDRESSES]:
            for one in own:
                self._send(goodbye(one), place)

    def place(self, prefix: bytes) -> None:
        """Put a placeholder where a participant was. DDS takes some milliseconds to forget one; until then this has no
        effect, so it is to be repeated."""
        self._send(placeholder_of(prefix, self._own, time.time(), self._address, self._port))

    def _send(self, message: bytes, to: tuple[str, int] | None = None) -> None:
        with contextlib.suppress(OSError, OverflowError):  # the queue is full, and it is repeated; or that is no port
            self._socket.sendto(message, to or (self._address, self._port))

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


def _places(addresses: str) -> list[tuple[str, int]]:
    """Addresses and ports in what a participant announces."""
    return [(four or six, int(port or port6)) for four, port, six, port6 in _ADDRESS.findall(addresses)]


def _udp_sockets() -> Iterator[_Socket]:
    for path in (Path("/proc/self/net/udp"), Path("/proc/self/net/udp6")):
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            yield _Socket(int(fields[1].rpartition(":")[2], 16), int(fields[7]), int(fields[9]))


def _inodes(process: str) -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir(f"/proc/{process}/fd") as listed:
        for entry in listed:
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def describe(claim: Claim) -> dict[str, object]:
    """Who a participant is, for a line in the log: what it announces, and where the kernel knows it, whose it is.

    Returns:
        ``host``, ``process``, ``pid`` and ``address`` as announced; of a process on this machine ``user``, the number
        of the user whose socket it is, and ``pid`` and ``process`` as the kernel has them, if this process may see it.
    """
    facts: dict[str, object] = {
        "host": claim.host[:64],
        "process": claim.process[:64],
        "pid": claim.pid[:16],
        "address": claim.addresses[:80],
    }
    for address, port in _places(claim.addresses):
        if not _is_here(address):
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            listening = next((one for one in _udp_sockets() if one.port == port), None)
            if listening is not None:
                facts["user"] = listening.user
                facts.update(_process_of(listening.inode, claim.pid))
        break
    return facts


def _is_here(address: str) -> bool:
    try:
        with udp_socket(address) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _process_of(inode: int, likely: str) -> dict[str, object]:
    until_s = time.monotonic() + _SEARCH_S
    for process in ([likely] if likely.isdecimal() else []) + [one for one in os.listdir("/proc") if one.isdecimal()]:
        if inode in _inodes(process):
            return {"pid": process, "process": Path(f"/proc/{process}/comm").read_text().strip()}
        if time.monotonic() > until_s:
            break
    return {}
