"""The job key: 32 random bytes that all members of a job share, from a file that is the owner's alone or from the
environment. Never from the command line, which every user of a machine can read."""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.file_beginnings import read_beginning
from gradbus.runtime.security.envelope import KEY_ID_BYTES
from gradbus.runtime.security.settings import KEY_FILE_VARIABLE, KEY_VARIABLE

KEY_BYTES = 32
_PREFIX = "gradbus-key-1"
_LINE = re.compile(rf"{_PREFIX} ([0-9a-f]{{{2 * KEY_BYTES}}})\s*")
MAX_KEY_FILE_BYTES = 4096


def derive(secret: bytes, salt: bytes, info: bytes, length: int = KEY_BYTES) -> bytes:
    """HKDF-SHA256 (RFC 5869)."""
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(secret)


@dataclass(frozen=True, slots=True)
class JobKey:
    """The key of a job. ``id`` is derived from it and no secret: processes with the same id have the same key."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> bytes:
        """8 bytes."""
        return derive(self.secret, b"", b"gradbus/1 key id", KEY_ID_BYTES)

    @property
    def text(self) -> str:
        """Content of a key file."""
        return f"{_PREFIX} {self.secret.hex()}\n"


class LoadedKey(NamedTuple):
    """A key, and where it is from, for log events and errors."""

    key: JobKey
    origin: str


def new_job_key() -> JobKey:
    """Return a random key."""
    return JobKey(secrets.token_bytes(KEY_BYTES))


def parse_job_key(text: str, where: str) -> JobKey:
    """Parse a job key. Raises ConfigError, which never repeats the text."""
    match = _LINE.fullmatch(text)
    if match is None and text.startswith("gradbus-identity-"):
        raise ConfigError(
            f"{where} holds the key of a node, not of a job: set bus.security to 'identity', or name another"
        )
    if match is None:
        raise ConfigError(
            f"{where} holds no job key: expected one line '{_PREFIX} ' and {2 * KEY_BYTES} hexadecimal digits, got "
            f"{len(text)} characters. Make a key with: gradbus keys new FILE"
        )
    return JobKey(bytes.fromhex(match[1]))


def read_secret_file(path: Path, what: str) -> str:
    """Read a text file that only its owner, who is this user or root, can read or write.

    The mode checked is that of the open file: nobody can replace it between the check and the reading.

    Raises:
        ConfigError: it cannot be read, is no text, or is open to others.
    """
    try:
        mode, data = read_beginning(path, MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be read: {error.strerror}. Make one with: gradbus keys new FILE"
        ) from None
    return check_secret(mode, data, path, what)


def check_secret(mode: os.stat_result, data: bytes, path: Path, what: str) -> str:
    """Check what :func:`read_beginning` has read, as :func:`read_secret_file` does; returns the text."""
    if not stat.S_ISREG(mode.st_mode) or len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"{what} {path}: expected a regular file of at most {MAX_KEY_FILE_BYTES} bytes")
    closed_to = 0o037 if is_credential(path) else 0o077
    if mode.st_mode & closed_to:
        raise ConfigError(
            f"{what} {path} has mode {stat.S_IMODE(mode.st_mode):04o}: others on this machine can use it. Expected "
            f"0600; do: chmod 600 {path}; and if they may have read it, make a new key"
        )
    if mode.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{what} {path} belongs to user {mode.st_uid}, expected {os.geteuid()}, who runs this")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} is no text file") from None


def is_credential(path: Path) -> bool:
    """Return whether systemd gives this service the file (``LoadCredential``), in a folder that others cannot enter.

    It may let the user of the service read a file of root by an entry of an access control list, whose mask the mode
    shows as rights of the group, which has none.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return bool(folder) and path.parent == Path(str(folder))


def key_file(path: Path | None) -> Path | None:
    """Return the file with the key of this process: ``path``, else the one that ``GRADBUS_KEY_FILE`` names, if any."""
    named = os.environ.get(KEY_FILE_VARIABLE)
    return Path(named) if path is None and named else path


def load_job_key(path: Path | None) -> LoadedKey:
    """Return the key in :func:`key_file`, else that in the text of ``GRADBUS_KEY``.

    Raises:
        ConfigError: there is none, or it is not one, or its file is open to others.
    """
    path = key_file(path)
    if path is not None:
        return LoadedKey(parse_job_key(read_secret_file(path, "key file"), f"key file {path}"), str(path))
    text, where = os.environ.get(KEY_VARIABLE), f"environment variable {KEY_VARIABLE}"
    if text:
        return LoadedKey(parse_job_key(text, where), where)
    raise ConfigError(
        f"security 'psk' needs the key of the job: name its file in bus.key_file or {KEY_FILE_VARIABLE}, or put its "
        f"text into {KEY_VARIABLE}. Make one with 'gradbus keys new FILE', and copy it to every member of the job"
    )


def write_secret_file(path: Path, text: str) -> None:
    """Create a file with mode 0600. Raises ConfigError: it exists, or cannot be created."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists: a key is never overwritten. Choose another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
