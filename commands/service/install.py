"""``gradbus service install``: show a unit, have systemd check it, write it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from gradbus.commands.service.unit import FIRST_LINE, ServiceUnit
from gradbus.runtime.errors import ConfigError

_VERIFY_S = 60.0
_MAX_SHOWN = 20  # lines of systemd-analyze


def folder_of_units(*, is_user: bool) -> Path:
    """Return where an administrator, or a user, keeps units."""
    if not is_user:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def verify(unit: ServiceUnit) -> None:
    """Have ``systemd-analyze`` read a unit.

    Raises:
        ConfigError: there is no such program, or it finds something: a key that this systemd does not know, for
            example. It exits with 0 then, so whatever it prints about the unit is a fault.
    """
    program = shutil.which("systemd-analyze")
    if program is None:
        raise ConfigError(
            "systemd-analyze is not on PATH, so the unit cannot be checked here: is this a machine with systemd? "
            "--dry-run prints the unit without it"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / unit.file_name
        file.write_text(unit.text, encoding="utf-8")
        words = [program, *(["--user"] if unit.is_user else []), "--man=no", "verify", str(file)]
        try:
            environment = {"XDG_RUNTIME_DIR": folder, **os.environ}  # the check of a user's unit needs such a folder
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=_VERIFY_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"systemd-analyze verify gave no answer within {_VERIFY_S:g} s") from None
        found = [line for line in done.stderr.splitlines() if unit.file_name in line]  # others' units are not ours
        if found or done.returncode:
            lines = "; ".join((found or done.stderr.splitlines())[:_MAX_SHOWN])
            raise ConfigError(f"systemd-analyze verify finds faults in this unit: {lines.replace(folder + '/', '')}")


def write(unit: ServiceUnit, folder: Path) -> Path:
    """Write a unit in one step, so that systemd never reads a part of it. Returns the file.

    Raises:
        ConfigError: there is a unit of this name that gradbus did not write, or the folder cannot be written.
    """
    file = folder / unit.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (file.exists() or file.is_symlink()) and not _is_ours(file):
            raise ConfigError(
                f"{file} exists and was not written by gradbus: remove it, or name this unit with --unit NAME"
            )
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, prefix=".gradbus-", delete=False) as part:
            try:
                part.write(unit.text)
                part.flush()
                os.fchmod(part.fileno(), 0o644)
                os.fsync(part.fileno())
                os.replace(part.name, file)
            except BaseException:
                os.unlink(part.name)
                raise
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None
    return file


def _is_ours(file: Path) -> bool:
    if file.is_symlink():
        return False
    with file.open("rb") as begun:
        return begun.read(len(FIRST_LINE) + 1) == f"{FIRST_LINE}\n".encode()
