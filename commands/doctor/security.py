"""The protection of the bus: its level, the id of its key, and whether a sealed sample can be opened again."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gradbus.commands.buses import open_bus, reach_of, uses_links
from gradbus.commands.doctor.links import OTHER_JOBS
from gradbus.commands.doctor.machine import Finding, Severity
from gradbus.commands.doctor.settings import NO_IDENTITY
from gradbus.commands.peer_link import PEER, ROOT, Link
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.security.identity.key import public_text
from gradbus.runtime.security.identity.opening import read_identity
from gradbus.runtime.security.job_key import load_key, new_job_key, write_secret_file
from gradbus.runtime.security.settings import level_in_force, names_key, other_users, security_of
from gradbus.runtime.wire.messages import Control

TRIP_S = 10.0
_PROOF = "sealed"


@contextmanager
def measurable(settings: BusSettings) -> Iterator[BusSettings]:
    """Settings with which two processes of this node can measure the bus. With ``identity`` both would be the same
    client, or both the controller: a bus that is sealed with a random key stands in for it, at the same cost."""
    if settings.security != "identity":
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="gradbus-doctor-") as folder:
        key_file = Path(folder, "job.key")
        write_secret_file(key_file, new_job_key().text)
        yield settings.model_copy(update={"security": "psk", "key_file": key_file, **NO_IDENTITY})


def protection(settings: BusSettings, *, trusted: bool = False) -> Finding:
    """Return the level, and whether its keys and lists can be read, without opening a bus.

    Args:
        trusted: as for :func:`security`.
    """
    try:
        if settings.security == "identity":
            key, pinned, _ = read_identity(replace(security_of(settings), role="worker"))
            whose = "is the controller" if key.public == pinned else f"expects the controller {public_text(pinned)}"
            return Finding("security", f"identity: {key.name} {whose}. Joining is not tried")
        level = level_in_force(security_of(settings), reach_of(settings).is_exposed)
        if level == "none":
            return _unprotected(settings, trusted)
        key_of_job, origin = load_key(level, settings.key_file)
    except (ConfigError, BusError) as error:
        return Finding("security", f"{settings.security}: does not work", Severity.BAD, str(error))
    return Finding("security", f"{level}, key {key_of_job.id.hex()} from {origin}. Joining is not tried")


async def _identity(settings: BusSettings) -> Finding:
    """The name and files of this node. With the controller's key, a rank with the same key can join it, which is tried;
    other nodes can only join a controller that runs, which is not tried."""
    try:
        key, pinned, allowed = read_identity(replace(security_of(settings), role="worker"))
        if key.public != pinned:
            controller = public_text(pinned)
            value = f"{key.name}, {public_text(key.public)}, expects the controller {controller}. Joining is not tried"
        else:
            nodes = "no list of others" if allowed is None else f"{len(allowed.entries)} nodes on its list"
            trip_s = await _trip_s(settings, ranks=(0, 1))
            value = f"{key.name} is the controller, {nodes}. A rank with its key joins it, {1000 * trip_s:.0f} ms"
    except (ConfigError, BusError) as error:
        return Finding("security", "identity: does not work", Severity.BAD, str(error))
    except TimeoutError:
        cure = f"the key is well, but a rank with the same key was not admitted within {TRIP_S:g} s: {_next(settings)}"
        return Finding("security", "identity: joining fails", Severity.BAD, cure)
    return Finding("security", f"identity: {value}; measured with a key of this moment")


async def security(settings: BusSettings, *, trusted: bool = False) -> Finding:
    """The level, and with a key whether a sealed sample comes back. Names the key's id, never the key.

    ``trusted``: all users of the network are trusted, so that no key is needed there.
    """
    if settings.security == "identity":
        return await _identity(settings)
    level = level_in_force(security_of(settings), reach_of(settings).is_exposed)
    if level == "none":
        return _unprotected(settings, trusted)
    try:
        key, origin = load_key(level, settings.key_file)
        trip_s = await _trip_s(settings)
    except (ConfigError, BusError) as error:
        return Finding("security", f"{level}: does not work", Severity.BAD, str(error))
    except TimeoutError:
        cure = f"key {key.id.hex()} is well, but no sealed sample came back within {TRIP_S:g} s: {_next(settings)}"
        return Finding("security", f"{level}: no sealed sample came back", Severity.BAD, cure)
    return Finding("security", f"{level}, key {key.id.hex()}: works, {1000 * trip_s:.0f} ms; from {origin}")


def _next(settings: BusSettings) -> str:
    """Return what to look at where no sample comes back."""
    return f"see discovery. {OTHER_JOBS}" if uses_links(settings) else "see discovery"


def _unprotected(settings: BusSettings, trusted: bool) -> Finding:
    """The finding where nothing is sealed, by request or for want of a key on a network."""
    is_exposed = reach_of(settings).is_exposed
    if is_exposed and not trusted:
        return Finding(
            "security",
            "none, on a network",
            Severity.BAD,
            "anybody there could read the data and join in, so no job starts: make a key with 'gradbus keys new "
            "job.key', copy it to all machines, and give --key-file job.key (bus.key_file); --insecure does without "
            "where everybody is trusted",
        )
    if settings.security == "none" and names_key(settings.key_file):
        return Finding(
            "security",
            "none, though there is a key",
            Severity.ADVICE,
            "no job uses that key: leave bus.security out, and GRADBUS_BUS__SECURITY in the environment",
        )
    others = other_users()
    if settings.security == "none" and not is_exposed and others:
        return Finding(
            "security",
            f"none, and this machine has other users ({', '.join(others)})",
            Severity.ADVICE,
            "they can read the data and join in: leave bus.security out, and GRADBUS_BUS__SECURITY in the environment",
        )
    return Finding("security", "none: for a machine of your own, or a network where you trust everybody")


async def _trip_s(settings: BusSettings, ranks: tuple[int | None, int | None] = (None, None)) -> float:
    """Seconds from opening two buses of a job in this process until a sealed sample has passed both ways. ``ranks``: as
    for :func:`~gradbus.commands.buses.open_bus`."""
    settings = settings.model_copy(update={"job": f"doctor-{secrets.token_hex(4)}"})
    started_s = time.monotonic()
    buses = [open_bus(settings, rank=rank) for rank in ranks]
    async with asyncio.timeout(TRIP_S), buses[0] as one, buses[1] as other:
        with one.subscribe(Control) as ours, other.subscribe(Control) as theirs:
            ends = Link(one, ROOT, ours), Link(other, PEER, theirs)
            # Each goes on until both have heard: what one says may come before the other can read it.
            async with ends[0].saying(_PROOF), ends[1].saying(_PROOF):
                await asyncio.gather(*(end.hear() for end in ends))
    return time.monotonic() - started_s
