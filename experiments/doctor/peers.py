"""The doctor's look at the other machines: whether their doctors are found, and what is in the way."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradbus.experiments.buses import document_of, open_bus
from gradbus.experiments.doctor.datagrams import LARGE_BYTES, SMALL_BYTES, Card, Heard, Packets
from gradbus.experiments.doctor.machine import Finding, Verdict, mtu_of
from gradbus.experiments.doctor.remote_bus import Meeting, Met
from gradbus.runtime.config.federated import BusSettings
from gradbus.runtime.dds.missing_peers import address_of, port_range
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.security.settings import level_in_force, security_of
from gradbus.runtime.security.user_key import load_key

JOB = "gradbus-doctor"
_LINGER_S = 1.5  # so that the other one gets what it still misses


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found of one configured peer. ``unreachable``: why packets do not get there, if that is known."""

    address: str
    heard: Heard | None
    met: Met | None
    unreachable: str = ""


async def look_for(settings: BusSettings, *, wait_s: float, say: Callable[[str], None]) -> list[Finding]:
    """Find the doctors at ``settings.peers``, for so long; without peers, whoever looks for this one.

    Raises:
        ConfigError, BusError: the bus cannot be opened.
    """
    own = address_of(settings.interface) or ""
    peers = [peer for peer in map(_numeric, settings.peers) if peer not in (own, "127.0.0.1")]
    if settings.security == "identity":  # two nodes that are no controller do not meet: what is measured is no secret
        settings = settings.model_copy(
            update={"security": "none", "insecure": True, "key_file": None, "controller_key": "", "allow_file": None}
        )
    number = secrets.randbelow(0x7FFF_0000)
    host = socket.gethostname()
    card = Card(f"{number:x}", host, own, settings.domain, settings.job, settings.network, _protection(settings))
    size = LARGE_BYTES if settings.network == "loopback" else SMALL_BYTES
    packets, meeting = Packets(card, peers, size), Meeting(number, host, own)
    say(
        f"looking for the doctor on {', '.join(peers) or 'any machine'} for up to {wait_s:g} s: start it there with "
        f"the same settings, and {own or 'the address of this machine'} in --peers"
    )

    def over() -> bool:
        if not peers:
            return any(met.measured for met in meeting.met.values())
        return all((met := meeting.of(peer)) is not None and met.measured for peer in peers)

    until_s = time.monotonic() + wait_s
    async with open_bus(settings) as bus:
        tasks = [asyncio.create_task(_quietly(packets)), asyncio.create_task(meeting.run(bus))]
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
    seen = [Seen(peer, packets.of(peer), meeting.of(peer), packets.unreachable.get(peer, "")) for peer in peers]
    findings = [judge_peer(card, one, wait_s=wait_s, doubt=meeting.doubt, settings=settings) for one in seen]
    return findings + _strangers(card, peers, packets, meeting)


def judge_peer(card: Card, seen: Seen, *, wait_s: float, doubt: str, settings: BusSettings) -> Finding:
    """What was found of a peer, and what to check where that is not all well."""
    name, heard, met = f"peer {seen.address}", seen.heard, seen.met
    ports = port_range(card.domain)
    if met is not None and met.measured and not met.fault:
        assert met.round_trip_s is not None
        assert met.there is not None
        assert met.back is not None
        value = (
            f"{met.host}: round trip {1e6 * met.round_trip_s:.0f} us, {met.there / 1e6:.0f} MB/s to it, "
            f"{met.back / 1e6:.0f} MB/s from it"
        )
        return Finding(name, value)
    other = _difference(card, heard)
    if heard is None and met is None:
        reason = f" ({seen.unreachable})" if seen.unreachable else ""
        return Finding(
            name, f"no answer within {wait_s:g} s", Verdict.BAD,
            f"nothing came from {seen.address}{reason}. Does 'gradbus doctor' run there, with domain {card.domain}? "
            f"Check there that --peers has {card.address or 'the address of this machine'}; on both machines that UDP "
            f"ports {ports} pass the firewall, and that --interface ({settings.interface} here) leads to the other",
        )  # fmt: skip
    host = met.host if met is not None else heard.card.host if heard is not None else ""
    if other:
        return Finding(name, f"{host} is set up differently", Verdict.BAD, other)
    if heard is not None and not heard.hears_us:
        return Finding(
            name, f"{host} is heard here, and does not hear this machine", Verdict.BAD,
            f"packets of this machine do not reach {host}: let UDP ports {ports} through its firewall, and check that "
            f"{card.address} is reachable from there by its --interface",
        )  # fmt: skip
    if met is not None and met.fault:
        fault = f"{met.fault}. Are large datagrams lost? Try --network network on both"
        return Finding(name, f"{met.host}: broken off", Verdict.BAD, fault)
    told = f". It was heard that {doubt}" if doubt else ""
    if met is not None and not met.sees_us:
        cure = (
            f"DDS samples of {host} come here, and this machine's do not get there{told}. Check its firewall: {ports}"
        )
        return Finding(name, f"{host} is seen here, and does not see this machine", Verdict.BAD, cure)
    wanted = LARGE_BYTES if settings.network == "loopback" else SMALL_BYTES
    if heard is not None and min(heard.largest, heard.got) < wanted:
        mtu = mtu_of(settings.interface)
        cure = (
            f"datagrams of {wanted} B do not get through: {heard.largest} B there, {heard.got} B back (MTU of "
            f"{settings.interface}: {mtu or 'unknown'}). "
            + ("Use --network network" if wanted == LARGE_BYTES else "Is a tunnel or VPN in between? Raise its MTU")
        )
        return Finding(name, f"{host}: large datagrams are lost", Verdict.BAD, cure)
    cure = f"plain packets pass both ways, and DDS does not find the other one{told}. Compare the whole command there"
    return Finding(name, f"{host}: DDS does not get through", Verdict.BAD, cure)


def _difference(card: Card, heard: Heard | None) -> str:
    """In what the other doctor is set up differently, so that they cannot meet; empty: in nothing."""
    if heard is None:
        return ""
    theirs, rows = heard.card, []
    for what, ours, other in (
        ("DDS domain (--domain)", card.domain, theirs.domain),
        ("job (--job)", card.job, theirs.job),
        ("protection", card.security, theirs.security),
    ):
        if ours != other:
            rows.append(f"{what} is {other} there and {ours} here")
    if not rows:
        return ""
    key = (
        " Copy one key file to both: 'gradbus keys show FILE' prints the id" if card.security != theirs.security else ""
    )
    return f"{'; '.join(rows)}. Give both the same.{key}"


def _strangers(card: Card, peers: Sequence[str], packets: Packets, meeting: Meeting) -> list[Finding]:
    """Doctors that look for this one and are not among its peers."""
    found: list[Finding] = []
    for heard in packets.heard.values():
        if heard.card.address in peers or heard.source[0] in peers:
            continue
        met = meeting.of(heard.card.address)
        works = met is not None and met.measured and not met.fault
        value = f"{heard.card.host} looks for this machine" + (", and is found" if works else "")
        cure = f"it is not in --peers here: put {heard.card.address or heard.source[0]} there (bus.peers)"
        if difference := _difference(card, heard):
            cure = f"{difference} And {cure}"
        found.append(Finding(f"doctor at {heard.card.address}", value, Verdict.ADVICE if works else Verdict.BAD, cure))
    return found


def _protection(settings: BusSettings) -> str:
    """Level and id of the key, which is no secret."""
    level = level_in_force(security_of(settings), document_of(settings))
    if level not in ("user", "psk"):
        return level
    return f"key {load_key(level, settings.key_file)[0].id.hex()}"


def _numeric(peer: str) -> str:
    """An address for a name; what cannot be looked up stays, and is not reached."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(peer)
    return peer


async def _quietly(packets: Packets) -> None:
    """Plain packets are an aid: where no port is left for them, DDS alone tells."""
    with contextlib.suppress(OSError):
        await packets.run()


__all__ = ["JOB", "BusError", "ConfigError", "Seen", "judge_peer", "look_for"]
