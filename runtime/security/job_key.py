"""The job key: 32 random bytes that all members of a job share, from a file that is the owner's alone or from the
environment; never from the command line, which every user of a machine can read. Without one, the key of the user:
created at first use, and found by all processes of that user on this machine.

The place of the user's key depends on the user, not on what started the process: a shell over ssh has
``XDG_RUNTIME_DIR`` and perhaps ``XDG_CONFIG_HOME``, cron and system services have neither, and desktop sandboxes have
others. So it is ``.config/gradbus/user.key`` in the user's home: ``HOME`` if that folder belongs to this user (with
``sudo -E`` it does not), else the home in the password database. A user without a home, as in many containers, has it
in ``/run/user/UID/gradbus``, else in ``/dev/shm/gradbus-UID``. An existing key, in the first of these places that has
one, is used before one is created, so a home that could not be written once does not lead to two keys.

A home that several machines share gives all of them the same key. It protects only what stays on a machine: a bus that
leaves it uses no key but a given one (see :mod:`.settings`).

Other users cannot plant a key: the folder must belong to this user and be writable for nobody else, the file readable
for nobody else, and neither may be a link. Nor can they deny one: a folder of another user in one that all may write,
such as ``/dev/shm``, is ignored.

Two processes that start at once end with the same key: each writes a file of its own and links it to the name, which
succeeds for the first one only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.foreign_files import read_beginning
from gradbus.runtime.security.envelope import KEY_ID_BYTES
from gradbus.runtime.security.settings import KEY_FILE_VARIABLE, KEY_VARIABLE, Level

KEY_BYTES = 32
_PREFIX = "gradbus-key-1"
_LINE = re.compile(rf"{_PREFIX} ([0-9a-f]{{{2 * KEY_BYTES}}})\s*")
MAX_KEY_FILE_BYTES = 4096
FILE_NAME = "user.key"
# No such folder here, or none that can be written: the next place may do.
_ELSEWHERE = {
    errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTSUP,
    errno.ESTALE, errno.EMLINK,
}  # fmt: skip


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


class _Occupied(ConfigError):
    """The folder belongs to another user, in one where everybody may create folders."""


def load_key(level: Level, path: Path | None) -> LoadedKey:
    """Return the key of a level in force: for ``psk`` the given one, for ``user`` that of the user.

    Raises:
        ConfigError: a file is no key or open to others; no key is given; or there is no place for one.
    """
    return load_user_key() if level == "user" else load_job_key(path)


def load_user_key(places: tuple[Path, ...] | None = None) -> LoadedKey:
    """Return the key of the user that this process runs as; created, if there is none.

    Args:
        places: folders, in the order in which they are searched; None: :func:`places_of_user`.

    Raises:
        ConfigError: a file there is no key or open to others, or a key can be created nowhere.
    """
    places = places_of_user() if places is None else places
    for folder in places:
        with contextlib.suppress(_Occupied):
            key = _read(folder)
            if key is not None:
                return LoadedKey(key, str(folder / FILE_NAME))
    faults = []
    for folder in places:
        try:
            _create(folder)
            key = _read(folder)
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise ConfigError(f"the key of this user cannot be made in {folder}: {error.strerror}") from None
            faults.append(f"{folder} ({error.strerror})")
        except _Occupied as error:
            faults.append(str(error))
        else:
            if key is not None:
                return LoadedKey(key, str(folder / FILE_NAME))
            faults.append(f"{folder} (it was removed again)")
    raise ConfigError(
        f"the key of this user, with which processes of one machine protect what they send, can be made nowhere: "
        f"{'; '.join(faults)}. Make one of these folders writable for user {os.geteuid()}, or name a key in "
        f"bus.key_file, GRADBUS_KEY_FILE or GRADBUS_KEY ('gradbus keys new FILE' makes one), the same for all "
        f"processes of the job"
    )


def places_of_user() -> tuple[Path, ...]:
    """Return the folders that may hold the key of this user, in the order of their search."""
    user = os.geteuid()
    home = _home(user)
    return (
        *(() if home is None else (home / ".config" / "gradbus",)),
        Path(f"/run/user/{user}/gradbus"),
        Path(f"/dev/shm/gradbus-{user}"),  # the folder is checked before it is used
    )


def _home(user: int) -> Path | None:
    try:
        registered = pwd.getpwuid(user).pw_dir
    except KeyError:  # containers may run as a user that the database lacks
        registered = ""
    for name in (os.environ.get("HOME", ""), registered):
        with contextlib.suppress(OSError, ValueError):
            if os.path.isabs(name) and os.stat(name).st_uid == user:
                return Path(name)
    return None


def _read(folder: Path) -> JobKey | None:
    """Return the key in a folder; None: there is none. Raises ConfigError: it is not this user's alone, or no key."""
    path = folder / FILE_NAME
    try:
        with _opened(folder) as handle:
            mode, data = read_beginning(Path(FILE_NAME), MAX_KEY_FILE_BYTES + 1, folder=handle)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"the key of this user, {path}, is a link: expected a file") from None
        if error.errno in (errno.ENOENT, errno.ENOTDIR) or not _is_there(path):
            return None
        raise ConfigError(f"the key of this user, {path}, cannot be read: {error.strerror}") from None
    return parse_job_key(check_secret(mode, data, path, "key file"), f"key file {path}")


def _is_there(path: Path) -> bool:
    try:
        return os.path.lexists(path)
    except OSError:
        return False


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder that nobody else can change. Raises OSError; ConfigError: others can change it; _Occupied."""
    _check_owner(folder)
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if os.path.islink(folder):
            raise ConfigError(f"{folder}, for the key of this user, is a link: expected a folder") from None
        raise error from None
    try:
        mode = os.fstat(handle)
        if mode.st_uid != os.geteuid():
            raise ConfigError(
                f"{folder}, for the key of this user, belongs to user {mode.st_uid}, expected {os.geteuid()}, who runs "
                f"this. Remove it, or name a key in GRADBUS_KEY_FILE"
            )
        if mode.st_mode & 0o022:
            raise ConfigError(
                f"{folder}, for the key of this user, has mode {stat.S_IMODE(mode.st_mode):04o}: others on this "
                f"machine can change what is in it. Expected 0700; look at what is there, then: chmod 700 {folder}"
            )
        yield handle
    finally:
        os.close(handle)


def _check_owner(folder: Path) -> None:
    """Raise _Occupied. A folder that is put there after this check is refused by :func:`_opened`."""
    try:
        owner, parent = os.lstat(folder).st_uid, os.stat(folder.parent).st_mode
    except OSError:
        return
    if owner != os.geteuid() and parent & stat.S_IWOTH:
        raise _Occupied(f"{folder} (it belongs to user {owner})")


def _create(folder: Path) -> None:
    """Create a key in a folder, unless there is one by now. Raises OSError, and as :func:`_opened`."""
    _check_owner(folder)
    if folder.parent.name == ".config":
        folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    with _opened(folder) as handle:
        own = f".{FILE_NAME}.{secrets.token_hex(8)}"
        file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=handle)
        try:
            with open(file, "w", encoding="ascii") as text:
                text.write(new_job_key().text)
                text.flush()
                os.fsync(file)
            with contextlib.suppress(FileExistsError):  # another process was first: its key is the user's
                os.link(own, FILE_NAME, src_dir_fd=handle, dst_dir_fd=handle, follow_symlinks=False)
        finally:
            os.unlink(own, dir_fd=handle)
        os.fsync(handle)
