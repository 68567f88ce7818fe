"""DDS domains and participants of this process, which its buses share; and topics, which readers and writers share.

A domain is one per process and id: that is DDS, not us. Participants are shared for another reason. With two in one
process of which one goes while a third comes elsewhere, Cyclone 11.0 may take what the newcomer says about its readers
and writers for received, when the one that has asked for it is gone: the endpoints are never found, and those who wait
for each other wait for ever. So no participant is taken down before the last bus of its domain.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cyclonedds.core import DDSException, Entity
from cyclonedds.domain import Domain

from gradbus.runtime import forks
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.network.addresses import FAMILIES
from gradbus.runtime.network.host_names import FIRST_LOOKUP_S, LOOKUPS
from gradbus.runtime.transport import peer_processes
from gradbus.runtime.transport.dds import libddsc
from gradbus.runtime.transport.dds.discovery import Announcer, Discovery, keep_to_loopback, make_participant
from gradbus.runtime.transport.dds.exclusion import Exclusion
from gradbus.runtime.transport.dds.late_peers import LatePeers
from gradbus.runtime.transport.dds.log_sink import dds_log
from gradbus.runtime.transport.dds.network import leaves_machine, names_in, own_address, uses_ipv6, with_addresses
from gradbus.runtime.transport.dds.spdp import PREFIX_BYTES


@dataclass(slots=True)
class SharedParticipant:
    """A DDS participant, and the partitions that buses use on it.

    A partition is used by one bus at a time: another bus with the same one gets another participant, for DDS can tell
    what a process itself has written from the rest by the participant alone.
    """

    domain_id: int
    entity: Any
    announcer: Announcer
    discovery: Discovery  # of its domain
    late_peers: LatePeers | None = None  # of its domain, if there are some
    partitions: set[str] = field(default_factory=set)
    prefix: bytes = b""  # what all GUIDs of it begin with, and no other's

    def __post_init__(self) -> None:
        self.prefix = bytes(self.entity.guid.bytes[:PREFIX_BYTES])


@dataclass(slots=True)
class _OpenDomain:
    xml: str
    entity: Any
    users: int = 0
    discovery: Discovery | None = None
    late_peers: LatePeers | None = None
    participants: list[SharedParticipant] = field(default_factory=list)
    exclusion: Exclusion | None = None


_domains: dict[int, _OpenDomain] = {}
_lock = threading.Lock()
_is_broken = False  # this process was forked from one that had DDS open: its locks and threads are in pieces


def _forget() -> None:
    """In a child by fork: DDS is never called again. Else the destructors of entities would, as soon as the interpreter
    drops them, and wait for threads that are not there."""
    global _is_broken, _lock
    _is_broken = _is_broken or bool(_domains) or _lock.locked()
    _lock = threading.Lock()
    if _is_broken:
        none: Any = weakref.WeakValueDictionary()
        # A destructor does nothing for what is not among these.
        Entity._entities = none  # noqa: SLF001 - the binding has no call to switch destructors off
        _domains.clear()
        libddsc.disable_in_child()


forks.in_child(_forget)


def acquire(domain_id: int, xml: str, partition: str) -> SharedParticipant:
    """A participant for a bus; :func:`release` gives it back.

    Args:
        domain_id: 0 .. 232. xml: configuration of the domain, which may have host names for peers. partition: that the
            bus will use.

    Raises:
        ConfigError: the domain is open with another configuration, or its configuration is refused.
        BusError: no participant could be made.
        ForkedProcess: this process was forked from one that had DDS open.
    """
    if _is_broken:
        raise forks.refusal("DDS")
    names = names_in(xml)
    addresses: dict[str, tuple[str, ...]] = {}
    if names and domain_id not in _domains:  # before the lock: it takes a second where a name server does not answer
        addresses = LOOKUPS.look_up(names, FIRST_LOOKUP_S, FAMILIES[uses_ipv6(xml)])
    with _lock:
        domain = _open(domain_id, xml, addresses)
        try:
            participant = _participant(domain_id, domain, partition)
        except DDSException as error:
            _close_unused(domain_id, domain)
            raise BusError(
                f"no DDS participant in domain {domain_id}: {error.msg or error.code}. Are there more than 120 on this "
                f"machine, or is the interface down?"
            ) from None
        participant.partitions.add(partition)
        domain.users += 1
    if domain.late_peers is not None:
        domain.late_peers.warn_once()
    return participant


def release(participant: SharedParticipant, partition: str) -> None:
    """The bus has deleted what it had on the participant."""
    if _is_broken:
        return
    with _lock:
        domain = _domains[participant.domain_id]
        participant.partitions.discard(partition)
        domain.users -= 1
        _close_unused(participant.domain_id, domain)


def exclusion(participant: SharedParticipant) -> Exclusion:
    """What shuts participants of others out of the domain, in this process. Raises OSError: that cannot be done."""
    with _lock:
        domain = _domains[participant.domain_id]
        if domain.exclusion is None:
            domain.exclusion = Exclusion(domain.xml, participant.domain_id, participant.prefix)
        return domain.exclusion


def own_prefixes(domain_id: int) -> set[bytes]:
    """Of the participants that this process has in a domain."""
    with _lock:
        domain = _domains.get(domain_id)
        return set() if domain is None else {participant.prefix for participant in domain.participants}


def _open(domain_id: int, xml: str, addresses: Mapping[str, tuple[str, ...]]) -> _OpenDomain:
    """Return the domain, opened if it is not. ``addresses``: of the host names among the peers, as far as known."""
    known = _domains.get(domain_id)
    if known is not None and known.xml != xml:
        raise ConfigError(
            f"DDS domain {domain_id} is already open in this process with other network settings. Use the same "
            f"settings, or another domain"
        )
    if known is not None:
        return known
    late = _late_peers(domain_id, xml, addresses)
    try:
        with dds_log.captured():
            entity = Domain(domain_id, with_addresses(xml, addresses, None if late is None else late.relay))
    except DDSException as error:
        if late is not None:
            late.close()
        if error.code == DDSException.DDS_RETCODE_PRECONDITION_NOT_MET:
            raise ConfigError(
                f"DDS domain {domain_id} is already open in this process, configured by somebody else. "
                f"Choose another domain (domain={domain_id + 1}), or open the bus before the other user of DDS"
            ) from None
        raise _refusal(domain_id, xml) from None
    if not leaves_machine(xml):
        keep_to_loopback(domain_id)
    known = _domains[domain_id] = _OpenDomain(xml, entity, late_peers=late)
    return known


def _refusal(domain_id: int, xml: str) -> ConfigError:
    """Return the error for a configuration that Cyclone has refused, with what it has said of it."""
    lines = dds_log.lines()
    why = "; ".join([line for line in lines if line.startswith("config:")] or lines[-2:]) or "its reason is on stderr"
    cure = "Check CYCLONEDDS_URI, or unset it" if os.environ.get("CYCLONEDDS_URI") else "Check the settings of the bus"
    try:
        own_address(xml)
    except OSError as error:
        return _no_address(error)
    return ConfigError(f"Cyclone DDS refused the configuration of domain {domain_id}: {why.rstrip('. ')}. {cure}")


def _no_address(error: OSError) -> ConfigError:
    return ConfigError(f"{error}: is it up? Give it one, or name another interface (bus.interface)")


def _late_peers(domain_id: int, xml: str, addresses: Mapping[str, tuple[str, ...]]) -> LatePeers | None:
    """Return what announces this process to peers whose names have no address; None: all have one. Raises ConfigError:
    this machine has no address itself."""
    missing = {name: ports for name, ports in names_in(xml).items() if name not in addresses}
    if not missing:
        return None
    try:
        return LatePeers(domain_id, missing, own_address(xml))
    except OSError as error:
        raise _no_address(error) from None


def _participant(domain_id: int, domain: _OpenDomain, partition: str) -> SharedParticipant:
    for participant in domain.participants:
        if partition not in participant.partitions:
            return participant
    entity = make_participant(domain_id)
    if domain.discovery is None:
        domain.discovery = Discovery(domain_id, entity)
    participant = SharedParticipant(domain_id, entity, Announcer(entity), domain.discovery, domain.late_peers)
    if domain.late_peers is not None:
        domain.late_peers.add_participant(participant.prefix)
    domain.participants.append(participant)
    return participant


def _close_unused(domain_id: int, domain: _OpenDomain) -> None:
    if domain.users > 0:
        return
    del _domains[domain_id]
    if domain.late_peers is not None:
        domain.late_peers.close()
    if domain.discovery is not None:
        domain.discovery.close()
    peer_processes.watched.rest()
    if domain.exclusion is not None:
        domain.exclusion.close()
    for participant in domain.participants:
        delete(participant.entity)
    domain.entity = None  # the binding deletes the domain with its object


class Topics:
    """Those of one bus: each is there for as long as it has readers or writers, as groups have topics of their own, and
    a bus may see any number of groups."""

    def __init__(self, participant: Any, kind: Callable[[Any, str, Any], Any]) -> None:
        """``kind``: makes a topic of a participant, a name and an IDL type."""
        self._participant = participant
        self._kind = kind
        self._entities: dict[str, Any] = {}
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()  # the loop opens readers and writers, the receive thread deletes them

    @property
    def names(self) -> list[str]:
        """Of those that are in use."""
        with self._lock:
            return sorted(self._entities)

    def enter(self, name: str, idl_type: Any) -> Any:
        """The topic, for one more reader or writer; :meth:`leave` gives it back."""
        with self._lock:
            if name not in self._entities:
                self._entities[name] = self._kind(self._participant, name, idl_type)
            self._users[name] += 1
            return self._entities[name]

    def leave(self, name: str) -> None:
        """A reader or writer is gone."""
        with self._lock:
            if name in self._entities:
                self._users[name] -= 1
                if not self._users[name]:
                    delete(self._entities.pop(name))

    def close(self) -> None:
        """Delete all; what was on them has gone before."""
        with self._lock:
            for entity in self._entities.values():
                delete(entity)
            self._entities.clear()


@contextlib.contextmanager
def made_by_dds(what: str) -> Iterator[None]:
    """Around calls of DDS that make something. ``what`` it is, for the error.

    Raises:
        BusError: instead of what the binding or :mod:`.libddsc` raises.
    """
    try:
        yield
    except (DDSException, OSError) as error:
        text = str(error).rstrip(". ")
        raise BusError(
            f"DDS did not make {what}: {text}. Has the process run out of memory, or was the bus closed meanwhile?"
        ) from error


def delete(entity: Any) -> None:
    """Delete a DDS entity and all below it; the binding's object becomes an empty shell."""
    if _is_broken:
        return
    libddsc.delete_entity(entity)
