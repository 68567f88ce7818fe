"""Make a unit of a configuration, by the role of its process, after the checks that the run itself would make.

A configuration is never changed. Secrets that it names are given to the service as credentials, whose paths stand in
environment variables, which are stronger than the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradbus.commands.service.unit import ServiceUnit
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.settings import load_settings, read_settings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.names import check_name
from gradbus.runtime.security.job_key import key_file

Role = Literal["controller", "client", "relay"]

_DRAIN_MARGIN_S = 15  # beside relay.drain_s
_HIDDEN = (Path("/tmp"), Path("/var/tmp"))  # by PrivateTmp
_SECRETS = ("key_file", "tls_key")
_PUBLIC = ("allow_file", "tls_ca", "tls_certificate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The request of a user of ``gradbus service install``.

    Attributes:
        config: the configuration file. role: None: by the sections of the file.
        unit: name of the unit; empty: ``gradbus-`` and the role. is_user: for the manager of this user.
        client_id, client_name: of a client. key: file with the key of the job, if the configuration names none.
    """

    config: Path
    role: Role | None = None
    unit: str = ""
    is_user: bool = False
    client_id: int | None = None
    client_name: str = ""
    key: Path | None = None


def unit_of(wanted: Wanted) -> ServiceUnit:
    """Return the unit that runs a configuration.

    Raises:
        ConfigError: the configuration is wrong, with the sentence of the run; or a service could not read its files.
    """
    config = wanted.config.absolute()
    role = wanted.role or _role_in(config)
    name = check_name(wanted.unit or f"gradbus-{role}")
    if role != "client" and (wanted.client_id is not None or wanted.client_name):
        raise ConfigError(
            f"--id and --name are for a client, and this is the configuration of a {role}: leave them out"
        )
    build: Mapping[Role, Callable[[Wanted, Path, str], ServiceUnit]] = {
        "controller": _controller, "client": _client, "relay": _relay,
    }  # fmt: skip
    if not wanted.is_user:
        _check_place(config)
        _check_readable({"CONFIG": config})
    return build[role](wanted, config, name)


def _check_place(config: Path) -> None:
    """Raises ConfigError: a system service could not see a file there."""
    if hidden := next((folder for folder in _HIDDEN if config.is_relative_to(folder)), None):
        raise ConfigError(
            f"{config}: a service has a {hidden} of its own. Put it elsewhere, for example in /etc/gradbus"
        )


def _check_job(section: str, config: Path) -> None:
    """Raises ConfigError: the name of a job has that of the user in it, and each service is a user of its own."""
    values: Any = read_settings(config)
    for key in section.split("."):
        values = values.get(key, {}) if isinstance(values, dict) else {}
    job = values.get("job")
    if job is None or "{user}" in job:
        raise ConfigError(
            f"{section}.job is {job or 'default-{user}'!r}, and each service runs as a user of its own: its members "
            f"would be in jobs of different names. Set {section}.job to a name without {{user}}"
        )


def _role_in(config: Path) -> Role:
    sections = read_settings(config).keys()
    found: list[Role] = []
    if "relay" in sections:
        found.append("relay")
    if "federated" in sections:
        found.append("controller")
    if "client" in sections:
        found.append("client")
    if len(found) != 1:
        raise ConfigError(
            f"{config}: is it of a controller, a client or a relay? Exactly one of the sections federated, client and "
            f"relay would say so, found {', '.join(found) or 'none'}. Add --role"
        )
    return found[0]


def _controller(wanted: Wanted, config: Path, name: str) -> ServiceUnit:
    from gradbus.commands.buses import check
    from gradbus.commands.files import ControllerFile, load

    file = load(ControllerFile, config, overrides=_key_override(wanted))
    check(file.bus)
    buses = {"bus": file.bus}
    if file.upstream.site is not None:
        check(file.upstream.bus)
        buses["upstream.bus"] = file.upstream.bus
    secrets = _files_of(buses, wanted)
    return ServiceUnit(
        name=name,
        description=f"gradbus controller of the job {file.bus.job}",
        command=(*_program(), "controller", str(config), *_log_words(), "--no-live", "--run-dir", _state(name)),
        folder=config.parent,
        is_user=wanted.is_user,
        secrets=secrets,
        uses_devices=file.task.device != "cpu",
    )


def _client(wanted: Wanted, config: Path, name: str) -> ServiceUnit:
    from gradbus.commands.buses import check
    from gradbus.commands.files import ClientFile, load

    file = load(ClientFile, config, overrides=_key_override(wanted))
    check(file.bus)
    if wanted.client_id is None and not wanted.client_name and file.bus.security != "identity":
        raise ConfigError("which client is this? Name it, as in --name site-1, or give it an id, as in --id 0")
    words = [] if wanted.client_id is None else ["--id", str(wanted.client_id)]
    words += ["--name", check_name(wanted.client_name)] if wanted.client_name else []
    secrets = _files_of({"bus": file.bus}, wanted)
    return ServiceUnit(
        name=name,
        description=f"gradbus client of the job {file.bus.job}",
        command=(*_program(), "client", str(config), *words, *_log_words()),
        folder=config.parent,
        is_user=wanted.is_user,
        secrets=secrets,
        environment={"GRADBUS_CLIENT__STATE_DIR": f"{_state(name)}/client"},
        uses_devices=file.task.device != "cpu",
    )


def _relay(wanted: Wanted, config: Path, name: str) -> ServiceUnit:
    from gradbus.commands.relay.command import checked_values
    from gradbus.commands.relay.settings import RelayFile

    if wanted.key is not None:
        raise ConfigError("a relay has no key of a job, as it cannot read what it forwards: leave --key-file out")
    checked_values(config, ())
    relay = load_settings(RelayFile, config).relay
    if not wanted.is_user:
        _check_readable(_named("relay", relay, _PUBLIC))
    ports = [int(port) for endpoint in relay.listen if (port := endpoint.rsplit(":", 1)[-1]).isdecimal()]
    return ServiceUnit(
        name=name,
        description="gradbus relay",
        command=(*_program(), "relay", str(config), *_log_words()),
        folder=config.parent,
        is_user=wanted.is_user,
        secrets=_variables(_named("relay", relay, _SECRETS)),
        stop_s=relay.drain_s + _DRAIN_MARGIN_S,
        opens_low_port=not wanted.is_user and min(ports, default=443) < 1024,
        keeps_state=False,
    )


def _program() -> list[str]:
    """Return the words that start gradbus of this environment."""
    script = Path(sys.executable).parent / "gradbus"
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "gradbus"]


def _log_words() -> list[str]:
    return ["--log-style", "json"]


def _state(name: str) -> str:
    """Return the state folder as systemd's specifier: for both managers the same path at each start."""
    return f"%S/{name}"


def _key_override(wanted: Wanted) -> list[str]:
    return [] if wanted.key is None else [f"bus.key_file={json.dumps(str(wanted.key.absolute()))}"]


def _files_of(buses: Mapping[str, BusSettings], wanted: Wanted) -> dict[str, Path]:
    """Return the secrets of some buses by variable. Raises ConfigError: a service would have no key, or cannot read a
    file that is no secret."""
    secrets: dict[str, Path] = {}
    for section, bus in buses.items():
        found = dict(_named(section, bus, _SECRETS))
        key = key_file(bus.key_file)
        if key is not None and bus.security != "none":
            found[f"{section}.key_file"] = key.absolute()
        secrets |= _variables(found)
        if wanted.is_user:
            continue
        _check_job(section, wanted.config)
        _check_readable(_named(section, bus, _PUBLIC))
        if key is None and bus.security in ("user", "psk", "identity") and not bus.insecure:
            raise ConfigError(
                f"a service runs as a user of its own, which has no key, and {section}.key_file names none: make one "
                f"with 'gradbus keys new FILE' and give it here, as in --key-file FILE, and to all members of the job"
            )
    return secrets


def _named(section: str, settings: Any, names: tuple[str, ...]) -> dict[str, Path]:
    """Return the files that some settings name, by setting."""
    values = ((name, getattr(settings, name, None)) for name in names)
    return {f"{section}.{name}": Path(value).absolute() for name, value in values if value is not None}


def _variables(files: Mapping[str, Path]) -> dict[str, Path]:
    return {f"GRADBUS_{setting.upper().replace('.', '__')}": path for setting, path in files.items()}


def _check_readable(files: Mapping[str, Path]) -> None:
    """Check that each user may read some files that are no secrets. Raises ConfigError: one is closed to others."""
    for setting, path in _closed(files):
        raise ConfigError(
            f"{setting}: {path} can be read by its owner only, and a service runs as a user of its own. It holds no "
            f"secret; do: chmod a+r {path}"
        )


def _closed(files: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    for setting, path in files.items():
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from None
        if not mode & 0o004:
            yield setting, path
