"""The levels of security, and which of them may leave the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network import has_peers_elsewhere, leaves_machine
from gradbus.runtime.settings import BusSettings

Level = Literal["none", "psk", "identity"]
LEVELS: tuple[Level, ...] = ("none", "psk", "identity")
Joining = Literal["client", "observer", "worker"]  # as what a node may want to join
JOINING_ROLES: tuple[Joining, ...] = get_args(Joining)


@dataclass(frozen=True, kw_only=True, slots=True)
class Security:
    """How a bus is protected.

    Attributes:
        level: ``none``: not at all, for one machine. ``psk``: all members of the job share a key; who has it is a
            member, and members trust each other. ``identity``: each node has a key of its own, and the controller a
            list of those that it lets in.
        key_file: the key of the job, for psk; None: GRADBUS_KEY_FILE or GRADBUS_KEY say it. For identity the key of
            this node; None: GRADBUS_KEY_FILE says it.
        controller_key: for identity, the public key that the controller must have. Who has its private half is the
            controller.
        allow_file: for identity, the controller's list of nodes; others do not look at it.
        role: for identity, as what other nodes join: ``client``; ``observer``, who only listens; or ``worker``, a rank
            of a group. All processes of a job of ranks say ``worker``, that with the controller's key, too: it gives
            the others their keys.
        gives_keys: for ``worker``, whether this process is the one that does so; None: if its key is the controller's.
            Where several processes share that key, one gives and the others join it.
        insecure: let unprotected data leave the machine.
    """

    level: Level = "none"
    key_file: Path | None = None
    controller_key: str = ""
    allow_file: Path | None = None
    role: Joining = "client"
    gives_keys: bool | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ConfigError(f"security {self.level!r}: expected one of {', '.join(LEVELS)}")
        if self.role not in JOINING_ROLES:
            raise ConfigError(f"role {self.role!r}: expected one of {', '.join(JOINING_ROLES)}")
        if self.level == "none" and self.key_file is not None:
            raise ConfigError(
                f"key_file {str(self.key_file)!r} is given, but security is 'none' and would not use it: set "
                f"security to 'psk' or 'identity', or leave the file out"
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
    """What the settings of a bus say. Raises ConfigError: they do not fit together."""
    return Security(
        level=settings.security,
        key_file=settings.key_file,
        controller_key=settings.controller_key,
        allow_file=settings.allow_file,
        insecure=settings.insecure,
    )


def rank_security(settings: BusSettings, rank: int) -> Security:
    """The same, for a rank of a job. Rank 0 gives the keys. Raises ConfigError."""
    security = security_of(settings)
    if security.level != "identity":
        return security
    return replace(security, role="worker", gives_keys=rank == 0)


def check_exposure(security: Security, document: str) -> bool:
    """Refuse to let unprotected data leave this machine.

    Args:
        document: the configuration of DDS.

    Returns:
        Whether data leaves it.

    Raises:
        ConfigError: with what to do about it.
    """
    exposed = leaves_machine(document) or has_peers_elsewhere(document)
    if exposed and security.level == "none" and not security.insecure:
        raise ConfigError(
            "this bus leaves the machine (an interface other than lo, or peers elsewhere) and is not protected: "
            "anybody there could read the data and join in. Set bus.security to 'psk' and give the job a key: 'gradbus "
            "keys new FILE' makes one; or to 'identity', with "
            "a key for each node. On a network where you trust everybody: --insecure, or bus.insecure=true"
        )
    return exposed
