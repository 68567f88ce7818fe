"""What the doctor says of protection: the level, which key, and whether a sealed sample comes back."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradbus.experiments.buses import open_bus
from gradbus.experiments.doctor_facts import Finding, Verdict
from gradbus.experiments.doctor_link import DOCTOR, PEER, Link
from gradbus.experiments.status_settings import BusFile
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.messages import Control
from gradbus.runtime.security.identity_key import public_text
from gradbus.runtime.security.identity_opening import read_identity
from gradbus.runtime.security.job_key import (
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    load_job_key,
    new_job_key,
    write_secret_file,
)
from gradbus.runtime.security.settings import security_of
from gradbus.runtime.settings import BusSettings, load_settings

TRIP_S = 5.0
_PROOF = "a sealed word"


def protected(settings: BusSettings, key_file: Path | None) -> BusSettings:
    """The settings with the security that ``--key-file`` or the environment ask for. Raises ConfigError: nonsense."""
    environment = load_settings(BusFile, None).bus
    names = ("security", "key_file", "controller_key", "allow_file")
    update = {name: getattr(environment, name) for name in names}
    if key_file is not None:
        update = {"security": "psk", "key_file": key_file, "controller_key": "", "allow_file": None}
    return settings.model_copy(update=update)


@contextmanager
def measurable(settings: BusSettings) -> Iterator[BusSettings]:
    """Settings with which two processes of this node can talk. With ``identity`` they cannot: both would be the same
    client, or both the controller. A bus that is sealed with a random key stands in for it, and costs the same."""
    if settings.security != "identity":
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="gradbus-doctor-") as folder:
        key_file = Path(folder, "job.key")
        write_secret_file(key_file, new_job_key().text)
        update = {"security": "psk", "key_file": key_file, "controller_key": "", "allow_file": None}
        yield settings.model_copy(update=update)


def _identity(settings: BusSettings) -> Finding:
    """Who this node is, and whether its files are well. Joining takes a controller, and is not tried."""
    try:
        key, pinned, allowed = read_identity(security_of(settings))
    except ConfigError as error:
        return Finding("security", "identity: does not work", Verdict.BAD, str(error))
    if allowed is not None:
        value = f"{key.name} is the controller, {len(allowed.entries)} nodes on its list"
    else:
        value = f"{key.name}, {public_text(key.public)}, expects the controller {public_text(pinned)}"
    return Finding("security", f"identity: {value}. Joining is not tried; measured with a key of this moment")


def has_key(settings: BusSettings) -> bool:
    """Whether a key is configured, used or not."""
    return settings.security == "psk" or any(os.environ.get(name) for name in (KEY_FILE_VARIABLE, KEY_VARIABLE))


async def security(settings: BusSettings) -> Finding:
    """The level, and with a job key whether a sealed sample comes back. The key's id is said, never the key."""
    if settings.security == "identity":
        return _identity(settings)
    if not has_key(settings):
        return Finding("security", "none: for one machine, or a network where you trust everybody")
    try:
        key_id = load_job_key(settings.key_file).id.hex()
        trip_s = await _trip_s(settings.model_copy(update={"security": "psk"}))
    except (ConfigError, BusError) as error:
        return Finding("security", "psk: does not work", Verdict.BAD, str(error))
    except TimeoutError:
        cure = f"key {key_id} is well, but no sealed sample came back within {TRIP_S:g} s: see discovery"
        return Finding("security", "psk: no sealed sample came back", Verdict.BAD, cure)
    value = f"psk, key {key_id}: works, {1000 * trip_s:.0f} ms"
    if settings.security == "psk":
        return Finding("security", value)
    return Finding(
        "security", "none, though there is a key", Verdict.ADVICE,
        f"no job uses that key ({value}): set bus.security=psk, or GRADBUS_BUS__SECURITY=psk in the environment",
    )  # fmt: skip


async def _trip_s(settings: BusSettings) -> float:
    """Seconds from the first bus of a job to a sealed word from one to the other. Both are in this process."""
    settings = settings.model_copy(update={"job": f"doctor-{secrets.token_hex(4)}"})
    started_s = time.monotonic()
    async with asyncio.timeout(TRIP_S), open_bus(settings) as one, open_bus(settings) as other:
        with one.subscribe(Control) as ours, other.subscribe(Control) as theirs:
            speaks = asyncio.create_task(Link(one, DOCTOR, ours).meet(_PROOF), name="doctor")
            try:
                hears = Link(other, PEER, theirs)
                while await hears.hear() != _PROOF:
                    pass
                await hears.say(_PROOF)
                await speaks
            finally:
                speaks.cancel()
                await asyncio.wait([speaks])
    return time.monotonic() - started_s
