"""Discovery of DDS: which processes its participants are in, and how it learns of those that have ended.

Each participant says in its user data which process it is in (:mod:`gradbus.runtime.transport.peer_processes`). When
the kernel says that this one has ended, DDS gets the message that the process itself sends when it leaves gracefully,
which goes to this process's own sockets alone. Else DDS would keep the dead one until its lease ends, and a writer that
waits for a reader of it would wait as long; so a lease can be long where processes share a machine, and a stopped
process lose nothing.

To set the user data anew has DDS announce the participant at once. So it can do so by itself but seldom: a newcomer is
heard of because it says so, a few times at growing intervals, as a datagram may be lost in a crowd.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsParticipant
from cyclonedds.builtin_types import cqos_to_qos
from cyclonedds.core import DDSException, InstanceState, Policy, Qos, ReadCondition, SampleState, ViewState
from cyclonedds.domain import DomainParticipant

from gradbus.runtime.network.addresses import FAMILIES, family_of
from gradbus.runtime.transport import peer_processes
from gradbus.runtime.transport.dds import libddsc
from gradbus.runtime.transport.dds.network import discovery_ports
from gradbus.runtime.transport.dds.spdp import goodbye

MAX_CLAIM_BYTES = 64
MAX_PARTICIPANTS = 4096  # of others
ANNOUNCE_S = (0.8, 2.8, 6.8)  # when a participant is announced again, after it has been made
# Of announcements at a time: a thousand take a tenth of a second, and there may be no end of them.
BATCH, MOST_BATCHES = 64, 16
_PROPERTIES = {"__Hostname": "host", "__ProcessName": "process", "__Pid": "pid", "__NetworkAddresses": "addresses"}
_MAX_TEXT = 256
_OF_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where this machine reaches a socket that is bound to all addresses
_ADDRESSES_S = 1.0  # to look for sockets takes longer the more files are open


@dataclass(frozen=True, slots=True)
class Claim:
    """Holds what discovery says of a participant. All of it but the address is what its process says of itself.

    Attributes:
        host, process, pid: as announced; empty: not announced.
        addresses: where Cyclone sends to, as ``udp/127.0.0.1:7412@1``.
    """

    host: str = ""
    process: str = ""
    pid: str = ""
    addresses: str = ""


def own_addresses(domain_id: int) -> list[tuple[str, int]]:
    """Where DDS in this process listens for news of other participants of a domain."""
    found = []
    for one in own_sockets(discovery_ports(domain_id)):
        address, port, *_ = one.getsockname()
        found.append((_OF_ANY.get(address, address), port))
    return found


def keep_to_loopback(domain_id: int) -> bool:
    """Have the sockets of a domain that is open in this process take what comes over interface ``lo`` alone. Cyclone
    binds them to all addresses, whatever interface it is to use, so that others could send to them.

    Returns:
        Whether the kernel does so. False: another one than Linux, one before 5.7, or a sandbox that does not let it.
    """
    first = 7400 + 250 * domain_id
    bound = []
    for one in own_sockets(range(first, first + 250)):
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            bound.append(True)
        except (OSError, AttributeError):  # Linux alone has it
            bound.append(False)
    return bool(bound) and all(bound)


def own_sockets(ports: range) -> Iterator[socket.socket]:
    """UDP sockets of this process that are bound to one of these ports. Each is closed again, as the copy that it is,
    when the next one is asked for."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                is_udp = one.family in FAMILIES and one.type == socket.SOCK_DGRAM
                if is_udp and one.getsockname()[1] in ports:
                    yield one
        except OSError:  # it has been closed meanwhile
            continue


class Discovery:
    """Holds what is known of the participants of one domain. Threads of several buses use it."""

    def __init__(self, domain_id: int, participant: Any) -> None:
        """``participant``: one of this process's. Raises DDSException."""
        self._domain_id = domain_id
        self._lock = threading.Lock()
        self._processes: dict[bytes, str] = {}  # by GUID prefix: the first claim counts
        self._of_process: dict[str, set[bytes]] = {}  # and the other way round
        self._claims: dict[bytes, Claim] = {}  # by GUID prefix
        self._addresses: list[tuple[str, int]] = []
        self._addresses_s = -_ADDRESSES_S
        self._reader = BuiltinDataReader(participant, BuiltinTopicDcpsParticipant)
        # Where its own one raises, all the samples of a batch are lost.
        self._reader._cqos_conv = _policies_of  # noqa: SLF001 - the binding gives no other way to have them read
        self._new = ReadCondition(self._reader, SampleState.NotRead | InstanceState.Any | ViewState.Any)
        self._is_open = True

    def look(self) -> None:
        """Take note of participants that have come or gone. Does not wait."""
        with self._lock:
            if not self._is_open:
                return
            for _ in range(MOST_BATCHES):  # the rest is for the next time
                try:
                    news = self._reader.take(BATCH, self._new)
                except Exception:  # of DDS, or of the binding for what a stranger says: neither may end the thread
                    return
                for sample in news:
                    self._note(sample)
                if len(news) < BATCH:
                    return

    @property
    def others(self) -> dict[bytes, str]:
        """The processes of participants elsewhere on this machine, by the first 12 bytes of the participant's GUID."""
        with self._lock:
            return dict(self._processes)

    @property
    def claims(self) -> dict[bytes, Claim]:
        """Return what participants say of themselves, by the first 12 bytes of their GUID."""
        with self._lock:
            return dict(self._claims)

    def _note(self, sample: Any) -> None:
        prefix = sample.key.bytes[:12]
        if sample.sample_info.instance_state != InstanceState.Alive:
            self._claims.pop(prefix, None)
            self._forget(prefix)
            return
        if len(self._claims) < MAX_PARTICIPANTS or prefix in self._claims:
            self._claims[prefix] = _claim_in(sample.qos)
        if prefix in self._processes or len(self._processes) >= MAX_PARTICIPANTS:
            return
        claim = _process_in(sample.qos)
        if not claim or claim == peer_processes.own_claim():
            return
        others = self._of_process.setdefault(claim, set())
        others.add(prefix)
        self._processes[prefix] = claim  # first: the end may be reported at once
        if len(others) > 1:  # one listener for all of a process, which may announce thousands
            if peer_processes.has_ended(claim):
                self._dismiss([prefix])
        elif not peer_processes.watched.watch(claim, self._on_ended):
            del self._processes[prefix], self._of_process[claim]

    def _forget(self, prefix: bytes) -> None:
        claim = self._processes.pop(prefix, None)
        if claim is not None:
            others = self._of_process[claim]
            others.discard(prefix)
            if not others:
                del self._of_process[claim]
                peer_processes.watched.unwatch(claim, self._on_ended)

    def _on_ended(self, claim: str) -> None:
        """On a thread of the kernel's news, or within :meth:`look`."""
        self._dismiss(list(self._of_process.get(claim, ())))

    def _dismiss(self, prefixes: list[bytes]) -> None:
        if not prefixes or not self._is_open:
            return
        now_s = time.monotonic()
        if now_s > self._addresses_s + _ADDRESSES_S:
            self._addresses, self._addresses_s = own_addresses(self._domain_id), now_s
        for address in self._addresses:
            with contextlib.suppress(OSError), socket.socket(family_of(address[0]), socket.SOCK_DGRAM) as speaker:
                for prefix in prefixes:
                    speaker.sendto(goodbye(prefix), address)

    def close(self) -> None:
        """Before its participant goes."""
        with self._lock:
            self._is_open = False
            claims, self._processes, self._of_process = list(self._of_process), {}, {}
            libddsc.delete_entity(self._reader)
        for claim in claims:
            peer_processes.watched.unwatch(claim, self._on_ended)


def _policies_of(pointer: Any) -> Any:
    """What a participant says of itself; nothing where the binding cannot read it, as text that is not UTF-8, or two
    properties of one name."""
    try:
        return cqos_to_qos(pointer)  # type: ignore[no-untyped-call]
    except Exception:  # what others say there may be anything
        return Qos()


def _process_in(qos: Any) -> str:
    with contextlib.suppress(Exception):  # what others say there may be anything
        data = bytes(qos[Policy.Userdata].data)
        if len(data) <= MAX_CLAIM_BYTES:
            return data.split(b"\n")[0].decode("ascii")
    return ""


def _claim_in(qos: Any) -> Claim:
    found: dict[str, str] = {}
    with contextlib.suppress(Exception):
        for policy in qos:
            if isinstance(policy, Policy.Property) and policy.key in _PROPERTIES:
                found[_PROPERTIES[policy.key]] = str(policy.value)[:_MAX_TEXT]
    return Claim(**found)


def make_participant(domain_id: int) -> Any:
    """A participant that says which process it is in. Raises DDSException."""
    return DomainParticipant(domain_id, qos=_user_data(0))


class Announcer:
    """Has a new participant announced again, some times."""

    def __init__(self, participant: Any) -> None:
        self._participant = participant
        self._made_s = time.monotonic()
        self._count = 0

    def announce(self) -> None:
        """If it is time. Called now and then."""
        if self._count < len(ANNOUNCE_S) and time.monotonic() >= self._made_s + ANNOUNCE_S[self._count]:
            self._count += 1
            with contextlib.suppress(DDSException):
                self._participant.set_qos(_user_data(self._count))


def _user_data(count: int) -> Qos:
    # Cyclone would add both, in clear. What is set already it leaves as it is.
    names = [Policy.Property(key=key, value="", propagate=True) for key in ("__Hostname", "__ProcessName")]
    return Qos(Policy.Userdata(data=f"{peer_processes.own_claim()}\n{count}".encode()), *names)
