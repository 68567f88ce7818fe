"""The other machines: whether their doctors are found, and the cause where they are not."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradbus.commands.buses import examination_of, open_bus, peer_names_of, reach_of
from gradbus.commands.doctor.datagrams import Datagrams, DoctorIdentity, RemoteDoctor
from gradbus.commands.doctor.machine import Finding, Severity, mtu_of
from gradbus.commands.doctor.peer_names import OtherMachines
from gradbus.commands.doctor.remote_bus import BusPeer, PeerMeasurements
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.network.addresses import address_of
from gradbus.runtime.network.network_config import DATAGRAM_BYTES, NetworkConfig
from gradbus.runtime.security.job_key import load_key
from gradbus.runtime.security.settings import level_in_force, security_of

_LINGER_S = 1.5  # for the last samples to the other one


@dataclass(frozen=True, slots=True)
class PeerContact:
    """Holds what one configured peer has sent. ``unreachable``: why packets do not get there, if that is known."""

    address: str
    datagrams: RemoteDoctor | None
    bus: BusPeer | None
    unreachable: str = ""


async def look_for(settings: BusSettings, *, wait_s: float, say: Callable[[str], None]) -> list[Finding]:
    """Find the doctors at ``settings.peers``, for so long; without peers, those that look for this one. One that is set
    up differently, and knows of this one, is not waited for.

    Raises:
        ConfigError, BusError: the bus cannot be opened.
    """
    named = peer_names_of(settings)
    address = address_of(settings.interface, ipv6=named.ipv6) or ""
    others = OtherMachines(settings.peers, address, named.family)
    await others.resolve()
    peers = others.addresses
    if settings.security == "identity":  # only a controller admits other nodes, and the measurement is no secret
        update = {"security": "none", "insecure": True, "key_file": None, "controller_key": "", "allow_file": None}
        settings = settings.model_copy(update=update)
    number = secrets.randbelow(0x7FFF_0000)
    host = socket.gethostname()
    own = DoctorIdentity(
        f"{number:x}", host, address, settings.domain, settings.job, settings.network, _protection(settings)
    )
    size = NetworkConfig.of(settings).effective_datagram_bytes
    packets = Datagrams(own, peers, size, examination_of(settings))
    measurements = PeerMeasurements(number, host, address)
    say(
        f"looking for the doctor on {str(others) or 'any machine'} for up to {wait_s:g} s: start it there with "
        f"the same settings, and {address or 'the address of this machine'} in --peers"
    )

    def is_known(peer: str) -> bool:
        found, remote = measurements.of(peer), packets.of(peer)
        differs = remote is not None and remote.receives_us and _difference(own, remote)  # which it knows as well
        return bool(differs) or (found is not None and found.measured)

    def over() -> bool:
        others.look()
        if not others.all_resolved:
            return False
        if not peers:
            return any(peer.measured for peer in measurements.found.values())
        return all(is_known(peer) for peer in peers)

    until_s = time.monotonic() + wait_s
    async with open_bus(settings) as bus:
        tasks = [asyncio.create_task(_run_if_possible(packets)), asyncio.create_task(measurements.run(bus))]
        try:
            while time.monotonic() < until_s and not over() and not tasks[1].done():
                await asyncio.wait(tasks[1:], timeout=0.1)
            await asyncio.sleep(_LINGER_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not tasks[1].cancelled() and (error := tasks[1].exception()) is not None:
            raise error
    seen = [
        PeerContact(peer, packets.of(peer), measurements.of(peer), packets.unreachable.get(peer, "")) for peer in peers
    ]
    findings = [
        judge_peer(own, one, wait_s=wait_s, misconfiguration=measurements.misconfiguration, settings=settings)
        for one in seen
    ]
    return findings + _not_in_peers(own, peers, packets, measurements)


def judge_peer(
    own: DoctorIdentity, contact: PeerContact, *, wait_s: float, misconfiguration: str, settings: BusSettings
) -> Finding:
    """The finding about a peer, with what to check where its measurement is missing or failed."""
    name, remote, peer = f"peer {contact.address}", contact.datagrams, contact.bus
    ports = examination_of(settings).ports
    if peer is not None and peer.measured and not peer.fault:
        assert peer.round_trip_s is not None
        assert peer.there is not None
        assert peer.back is not None
        value = (
            f"{peer.host}: round trip {1e6 * peer.round_trip_s:.0f} us, {peer.there / 1e6:.0f} MB/s to it, "
            f"{peer.back / 1e6:.0f} MB/s from it"
        )
        return Finding(name, value)
    other = _difference(own, remote)
    if remote is None and peer is None:
        reason = f" ({contact.unreachable})" if contact.unreachable else ""
        return Finding(
            name,
            f"no answer within {wait_s:g} s",
            Severity.BAD,
            f"nothing came from {contact.address}{reason}. Does 'gradbus doctor' run there, with domain "
            f"{own.domain}? Check there that --peers has {own.address or 'the address of this machine'}; on both "
            f"machines that UDP ports {ports} pass the firewall, and that --interface ({settings.interface} here) "
            f"leads to the other",
        )
    host = peer.host if peer is not None else remote.identity.host if remote is not None else ""
    if other:
        return Finding(name, f"{host} is set up differently", Severity.BAD, other)
    if remote is not None and not remote.receives_us:
        return Finding(
            name,
            f"{host} sends to this machine, and does not receive from it",
            Severity.BAD,
            f"packets of this machine do not reach {host}: let UDP ports {ports} through its firewall, and check that "
            f"{own.address} is reachable from there by its --interface",
        )
    if remote is not None and (lost := _lost_datagrams(settings, remote)):
        return Finding(name, f"{host}: large datagrams are lost", Severity.BAD, lost)
    if peer is not None and peer.fault:
        fault = f"{peer.fault}. Are large datagrams lost? Try --network network on both"
        return Finding(name, f"{peer.host}: broken off", Severity.BAD, fault)
    hint = f". Received samples show that {misconfiguration}" if misconfiguration else ""
    if peer is not None and not peer.sees_us:
        cure = (
            f"DDS samples of {host} come here, and this machine's do not get there{hint}. Check its firewall: {ports}"
        )
        return Finding(name, f"{host} is seen here, and does not see this machine", Severity.BAD, cure)
    cure = f"plain packets pass both ways, and DDS does not find the other one{hint}. Compare the whole command there"
    return Finding(name, f"{host}: DDS does not get through", Severity.BAD, cure)


def _lost_datagrams(settings: BusSettings, remote: RemoteDoctor) -> str:
    """Advice where datagrams are lost on the way: from here those of the size in force, from there those that every
    network has to carry, as the other machine may be set to a smaller size. Empty: none are lost."""
    wanted, least = NetworkConfig.of(settings).effective_datagram_bytes, DATAGRAM_BYTES["network"]
    if remote.largest_there >= wanted and remote.largest_here >= min(wanted, least):
        return ""
    return (
        f"datagrams of {wanted} B do not get through: {remote.largest_there} B there, {remote.largest_here} B back "
        f"(MTU of {settings.interface}: {mtu_of(settings.interface) or 'unknown'}). "
    ) + (
        "Use --network network, without bus.datagram_bytes"
        if wanted > least
        else "Is a tunnel or VPN in between? Raise its MTU, or set bus.datagram_bytes to what passes on both"
    )


def _difference(own: DoctorIdentity, remote: RemoteDoctor | None) -> str:
    """The settings in which the other doctor differs, so that they cannot find each other; empty: none."""
    if remote is None:
        return ""
    theirs = remote.identity
    compared = (
        ("DDS domain (--domain)", own.domain, theirs.domain),
        ("job (--job)", own.job, theirs.job),
        ("protection", own.security, theirs.security),
    )
    rows = [f"{what} is {other} there and {ours} here" for what, ours, other in compared if ours != other]
    if not rows:
        return ""
    key = (
        " Copy one key file to both: 'gradbus keys show FILE' prints the id" if own.security != theirs.security else ""
    )
    return f"{'; '.join(rows)}. Give both the same.{key}"


def _not_in_peers(
    own: DoctorIdentity, peers: Sequence[str], packets: Datagrams, measurements: PeerMeasurements
) -> list[Finding]:
    """Doctors that look for this one and are not among its peers."""
    found: list[Finding] = []
    for remote in packets.others.values():
        if remote.identity.address in peers or remote.source[0] in peers:
            continue
        peer = measurements.of(remote.identity.address)
        works = peer is not None and peer.measured and not peer.fault
        value = f"{remote.identity.host} looks for this machine" + (", and is found" if works else "")
        cure = f"it is not in --peers here: put {remote.identity.address or remote.source[0]} there (bus.peers)"
        if difference := _difference(own, remote):
            cure = f"{difference} And {cure}"
        found.append(
            Finding(f"doctor at {remote.identity.address}", value, Severity.ADVICE if works else Severity.BAD, cure)
        )
    return found


def _protection(settings: BusSettings) -> str:
    """Level and id of the key, which is no secret."""
    level = level_in_force(security_of(settings), reach_of(settings).is_exposed)
    if level not in ("user", "psk"):
        return level
    return f"key {load_key(level, settings.key_file)[0].id.hex()}"


async def _run_if_possible(packets: Datagrams) -> None:
    """Plain packets are an aid: where no port is left for them, DDS alone is measured."""
    with contextlib.suppress(OSError):
        await packets.run()
