"""The bus that the doctor examines: of a configuration, of the environment and of options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradbus.commands.run.status import BusFile, refuse_relay_file
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.settings import load_settings

JOB = "gradbus-doctor"
"""The job in which doctors of several machines meet: that of the configuration may be running."""

NO_IDENTITY = {"controller_key": "", "allow_file": None}


def settings_of(config: Path | None, options: Mapping[str, Any], key_file: Path | None = None) -> BusSettings:
    """Return the bus of a configuration and of the environment. Options are stronger, and so is ``key_file``, which is
    the key of a job. The job is JOB, unless an option names another one.

    Raises:
        ConfigError: something is wrong with them, or the configuration is that of a relay.
    """
    refuse_relay_file(
        config,
        "'gradbus doctor --connect tls/HOST:PORT --tls-ca ca.pem', where a client runs, tries the relay and looks at "
        "its certificate",
    )
    overrides = [f"bus.{key}={json.dumps(value)}" for key, value in options.items()]
    found = load_settings(BusFile, config, overrides=overrides).bus
    # It sends no data of a job, reports what has no protection, and injects no faults into what it measures.
    update: dict[str, Any] = {"job": options.get("job", JOB), "insecure": True, "faults": ""}
    if "connect" in options:  # as one of those that dial, also with the configuration of one that listens
        update |= {"listen": (), "tls_clients": False}
    if key_file is not None:
        update |= {"security": "psk", "key_file": key_file, **NO_IDENTITY}
    return found.model_copy(update=update)


def is_trusted(config: Path | None) -> bool:
    """Return whether a configuration, or the environment, lets data leave this machine without protection. Raises
    ConfigError: something is wrong with it."""
    return load_settings(BusFile, config).bus.insecure
