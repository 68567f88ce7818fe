"""The command ``gradbus relay``: it reads and checks the settings, and then becomes the process that serves.

A relay runs for months beside others. What reads settings and command lines (pydantic, typer, cryptography) would take
40 % of its memory for all that time. So this process replaces itself, by ``exec``, with one that has loaded none of it:
same process id, same output, same signals.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradbus.commands.relay.plan import in_own_words, links_of
from gradbus.commands.relay.settings import RelayFile
from gradbus.runtime import logs
from gradbus.runtime.config.settings import load_settings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.certificates import WARNING_DAYS, certificate_files, check_certificates, in_utc
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.security.settings import KEY_FILE_VARIABLE, KEY_VARIABLE

log = logs.get_logger("relay")


def checked_values(path: Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """Return the settings of a relay as values of JSON, all keys given.

    Raises:
        ConfigError: a setting or one of the certificates is wrong.
    """
    values = load_settings(RelayFile, path, overrides=overrides).model_dump(mode="json")
    try:
        check_certificates(links_of(values["relay"]))
    except ConfigError as error:
        raise in_own_words(error) from None
    return values


def run_relay(path: Path | None, overrides: Iterable[str], *, log_level: str, log_style: str) -> int:
    """Run ``gradbus relay``. It returns only where a process cannot be replaced (Windows), with the exit code.

    Raises:
        ConfigError: a setting is wrong. BusError: the relay cannot listen.
    """
    values = {**checked_values(path, overrides), "log": {"level": log_level, "style": log_style}}
    logs.configure(**values["log"])
    warn_of_ends(links_of(values["relay"]))
    if sys.platform == "win32":
        from gradbus.commands.relay.process import serve

        return serve(values)
    with tempfile.TemporaryFile() as file:  # the values may be larger than a pipe, and are in no list of processes
        file.write(json.dumps(values).encode())
        file.flush()
        file.seek(0)
        os.set_inheritable(file.fileno(), True)
        sys.stdout.flush()
        sys.stderr.flush()
        program = [sys.executable, "-P", "-m", "gradbus.commands.relay", str(file.fileno())]
        os.execve(program[0], program, _environment())


def warn_of_ends(links: LinkConfig) -> None:
    """Log the certificates of a relay that end within :data:`WARNING_DAYS`, or have ended. Raises ConfigError: one
    cannot be read."""
    now = datetime.datetime.now(datetime.UTC)
    for file in certificate_files(links):
        days = (file.ends - now).days
        is_bundle = file.setting == "bus.tls_ca" and len(file.certificates) > 1  # the others may be those in use
        if days < WARNING_DAYS and not is_bundle:
            log.warning(
                "certificate ends soon" if file.ends > now else "certificate has ended",
                setting=file.setting.replace("bus.", "relay."),
                file=str(file.path),
                ends=in_utc(file.ends),
                days=days,
                advice="have its authority make another one, and restart the relay: it reads its files at the start",
            )


def _environment() -> dict[str, str]:
    """Return the environment of this process without keys of jobs: whoever reads the relay's memory finds none."""
    return {name: text for name, text in os.environ.items() if name not in (KEY_VARIABLE, KEY_FILE_VARIABLE)}
