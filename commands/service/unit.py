"""The text of a systemd unit that runs one process of gradbus. Pure: it reads no file and starts nothing.

A system unit runs as a user of its own that exists while the service does (``DynamicUser``), may write to its own state
and cache folder only, and gets secrets as copies that no other process can read (``LoadCredential``). A user unit runs
as the user who starts it; the manager of a user may take fewer rights away, so it has fewer lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradbus.commands.exit_codes import RESTART_CANNOT_HELP
from gradbus.runtime.errors import ConfigError

FIRST_LINE = "# Written by: gradbus service install"
"""The first line of every unit: a file that begins otherwise is not ours to replace."""

RESTART_S = 5
LOW_PORT = "CAP_NET_BIND_SERVICE"

# What a unit may hold without quotes and escapes, none of which all of systemd's lists understand.
_PLAIN = re.compile(r"[A-Za-z0-9_./@:+=,-]+")

# Rights that a process of gradbus never needs. MemoryDenyWriteExecute is missing: torch compiles kernels in memory.
_NO_RIGHTS = (
    "LockPersonality=yes",
    "NoNewPrivileges=yes",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK AF_UNIX",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallErrorNumber=EPERM",
    "SystemCallFilter=@system-service",
    "UMask=0077",
)
_SYSTEM_ONLY = (
    "PrivateTmp=yes",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectProc=invisible",
    "ProtectSystem=strict",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceUnit:
    """One service.

    Attributes:
        name: of the unit, without ``.service``. description: for ``systemctl status``.
        command: words of the command line; ``%S/NAME`` in them is the state folder.
        folder: current directory of the process, from which its own code and relative paths are found.
        is_user: for the manager of a user, not of the system.
        secrets: files by the environment variable that names them to the process.
        environment: further variables.
        stop_s: time from SIGTERM until systemd kills the process.
        opens_low_port: it listens on a port below 1024.
        uses_devices: it needs the devices of this machine, such as a GPU.
        keeps_state: it has a state folder.
    """

    name: str
    description: str
    command: tuple[str, ...]
    folder: Path
    is_user: bool = False
    secrets: Mapping[str, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_s: float = 45.0
    opens_low_port: bool = False
    uses_devices: bool = False
    keeps_state: bool = True

    @property
    def file_name(self) -> str:
        """Return the name of its file."""
        return f"{self.name}.service"

    @property
    def text(self) -> str:
        """Return the file. Raises ConfigError: a word of it has a space or a character that systemd would read as its
        own."""
        return "\n".join([FIRST_LINE, *self._unit(), "", *self._service(), "", *self._install(), ""])

    def _unit(self) -> Iterator[str]:
        yield "[Unit]"
        yield f"Description={self.description}"
        if not self.is_user:  # the manager of a user knows no target of the system
            yield "After=network-online.target"
            yield "Wants=network-online.target"

    def _service(self) -> Iterator[str]:
        yield "[Service]"
        yield "Type=exec"
        yield f"WorkingDirectory={plain(str(self.folder))}"
        yield f"ExecStart={' '.join(plain(word) for word in self.command)}"
        yield "Restart=on-failure"
        yield f"RestartSec={RESTART_S}s"
        yield f"RestartPreventExitStatus={' '.join(str(int(code)) for code in RESTART_CANNOT_HELP)}"
        yield "SuccessExitStatus=143"
        yield f"TimeoutStopSec={self.stop_s:g}s"
        for variable, text in self.environment.items():
            yield f"Environment={variable}={plain(text)}"
        yield from self._secrets()
        if self.keeps_state:
            yield f"StateDirectory={self.name}"
            yield "StateDirectoryMode=0700"
        yield f"CacheDirectory={self.name}"
        yield f"Environment=XDG_CACHE_HOME=%C/{self.name}"
        yield from self._rights()

    def _secrets(self) -> Iterator[str]:
        for variable, path in self.secrets.items():
            if self.is_user:  # it runs as the owner of the file
                yield f"Environment={variable}={plain(str(path))}"
            else:
                yield f"LoadCredential={variable}:{plain(str(path))}"
                yield f"Environment={variable}=%d/{variable}"

    def _rights(self) -> Iterator[str]:
        yield from _NO_RIGHTS
        if self.is_user:
            return
        yield "DynamicUser=yes"
        yield f"CapabilityBoundingSet={LOW_PORT if self.opens_low_port else ''}"
        if self.opens_low_port:
            yield f"AmbientCapabilities={LOW_PORT}"
        if not self.uses_devices:
            yield "DevicePolicy=closed"
            yield "PrivateDevices=yes"
        homes = (Path("/home"), Path("/root"))
        is_at_home = any(path.is_relative_to(home) for home in homes for path in (Path(self.command[0]), self.folder))
        yield f"ProtectHome={'read-only' if is_at_home else 'yes'}"
        yield from _SYSTEM_ONLY

    def _install(self) -> Iterator[str]:
        yield "[Install]"
        yield f"WantedBy={'default' if self.is_user else 'multi-user'}.target"


def plain(word: str) -> str:
    """Return a word of a unit as it stands there. Raises ConfigError: systemd would read it as something else."""
    if not _PLAIN.fullmatch(word.replace("%S/", "").replace("%d/", "")):
        raise ConfigError(
            f"{word[:200]!a} would have to be quoted in a unit of systemd: expected only letters, digits and "
            f". _ / @ : + = , -. Use another name or folder"
        )
    return word
