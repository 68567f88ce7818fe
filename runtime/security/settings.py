"""The security levels, which of them may leave the machine, and whether the machine has other users."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.errors import ConfigError

Level = Literal["user", "none", "psk", "identity"]
LEVELS: tuple[Level, ...] = get_args(Level)
KEY_VARIABLE = "GRADBUS_KEY"
KEY_FILE_VARIABLE = "GRADBUS_KEY_FILE"
Joining = Literal["client", "observer", "worker"]  # as what a node may want to join
JOINING_ROLES: tuple[Joining, ...] = get_args(Joining)


@dataclass(frozen=True, kw_only=True, slots=True)
class Security:
    """How a bus is protected; made of the settings of the same names, see docs/settings.md, and of what joins."""

    level: Level = "user"
    """``user``: encryption with the key that the process is given, as with ``psk``, else with that of its user, which
    is made at first use and is for one machine. ``psk``: all members of the job share a key; a process that has it is a
    member, and members trust each other. ``identity``: each node has a key of its own, and the controller a list of the
    nodes that it admits. ``none``: no protection."""
    key_file: Path | None = None
    """The key of the job, for ``user`` and ``psk``; None: GRADBUS_KEY_FILE names it, or GRADBUS_KEY is its text. With
    ``identity`` the key of this node; None: GRADBUS_KEY_FILE names it."""
    controller_key: str = ""
    """With ``identity``, the public key that the controller must have. The owner of its private half is the
    controller."""
    allow_file: Path | None = None
    """With ``identity``, the controller's list of nodes. Other nodes do not read it."""
    role: Joining = "client"
    """With ``identity``, as what other nodes join: ``client``; ``observer``, which only listens; or ``worker``, a rank
    of a group. All processes of a job of ranks have the role ``worker``, also the one with the controller's key, which
    gives the others theirs."""
    gives_keys: bool | None = None
    """For ``worker``, whether this process gives the others their keys; None: if its key is the controller's. Where
    several processes share that key, one gives keys and the others join it."""
    insecure: bool = False
    """Whether unprotected data may leave the machine."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ConfigError(f"security {self.level!r}: expected one of {', '.join(LEVELS)}")
        if self.role not in JOINING_ROLES:
            raise ConfigError(f"role {self.role!r}: expected one of {', '.join(JOINING_ROLES)}")
        if self.level == "none" and self.key_file is not None:
            raise ConfigError(
                f"key_file {str(self.key_file)!r} is given, but security is 'none' and would not use it: set "
                f"security to 'psk' or 'identity', or leave one of the two out"
            )
        if self.level != "identity" and (self.controller_key or self.allow_file is not None):
            raise ConfigError(
                f"controller_key and allow_file are for security 'identity', and security is {self.level!r}: set that, "
                f"or leave them out"
            )
        if self.level == "identity" and not self.controller_key:
            raise ConfigError(
                "security 'identity' needs controller_key, the public key of the controller, for clients and for the "
                "controller itself: 'gradbus keys show FILE' prints it"
            )


def security_of(settings: BusSettings) -> Security:
    """Return the security that the settings of a bus describe. Raises ConfigError: they contradict each other."""
    return Security(
        level=settings.security,
        key_file=settings.key_file,
        controller_key=settings.controller_key,
        allow_file=settings.allow_file,
        insecure=settings.insecure,
    )


def rank_security(settings: BusSettings, rank: int) -> Security:
    """Return the security of a rank; rank 0 is the key issuer of the job. Raises ConfigError, as
    :func:`security_of`."""
    security = security_of(settings)
    if security.level != "identity":
        return security
    return replace(security, role="worker", gives_keys=rank == 0)


def names_key(path: Path | None, environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is given a key: by ``path``, ``GRADBUS_KEY_FILE`` or ``GRADBUS_KEY``."""
    environment = os.environ if environment is None else environment
    return path is not None or any(environment.get(name) for name in (KEY_FILE_VARIABLE, KEY_VARIABLE))


def level_in_force(security: Security, is_exposed: bool, environment: Mapping[str, str] | None = None) -> Level:
    """Return the level that protects a bus; refuse a bus that would send unprotected data from this machine.

    The key of a user is for one machine. It never protects a bus that leaves it, not even where several machines share
    the home that holds it, unless ``key_file`` names its file.

    Args:
        is_exposed: data of the bus can reach other machines.
        environment: of this process, which may name a key.

    Returns:
        ``psk`` in place of ``user`` where the process is given a key, and ``none`` where it is given none, data leaves
        the machine, and that is allowed.

    Raises:
        ConfigError: the bus leaves the machine without protection.
    """
    level = security.level
    if level == "user" and names_key(security.key_file, environment):
        level = "psk"
    if level in ("psk", "identity") or not is_exposed:
        return level
    if security.insecure:
        return "none"
    raise ConfigError(
        "this bus leaves the machine (an interface other than lo, peers elsewhere, or a relay) and is not protected: "
        "anybody there could read the data and join in; the key of this user is for this machine alone. Give the job "
        "a key: 'gradbus keys new FILE' makes one, and bus.key_file or GRADBUS_KEY_FILE names it on each machine; or "
        "set bus.security to 'identity', with a key for each node. On a network where you trust everybody: --insecure, "
        "or bus.insecure=true"
    )


_PEOPLE = range(1000, 60_001)  # as in Debian, Fedora and most others: UID_MIN and UID_MAX of /etc/login.defs
_NO_SHELLS = ("nologin", "false")
_MOST = 5  # returned names


def other_users() -> list[str]:
    """Return names, or ids where there is none, of some other users of this machine; empty: there are none."""
    own = os.geteuid()
    found: dict[int, str] = {}
    for account in pwd.getpwall():
        if account.pw_uid in _PEOPLE and not account.pw_shell.endswith(_NO_SHELLS):
            found[account.pw_uid] = account.pw_name
    with contextlib.suppress(OSError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):  # it has ended
                    user = entry.stat().st_uid
                    if user in _PEOPLE:
                        found.setdefault(user, str(user))
    return [name for user, name in sorted(found.items()) if user != own][:_MOST]
