"""The key of the user: created at first use, and found by all processes of that user on this machine.

Its place depends on the user, not on what started the process: a shell over ssh has ``XDG_RUNTIME_DIR`` and perhaps
``XDG_CONFIG_HOME``, cron and system services have neither, and desktop sandboxes have others. So it is
``.config/gradbus/user.key`` in the user's home: ``HOME`` if that folder belongs to this user (with ``sudo -E`` it does
not), else the home in the password database. A user without a home, as in many containers, has it in
``/run/user/UID/gradbus``, else in ``/dev/shm/gradbus-UID``. An existing key, in the first of these places that has one,
is used before one is created, so a home that could not be written once does not lead to two keys.

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
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.file_beginnings import read_beginning
from gradbus.runtime.security.job_key import (
    MAX_KEY_FILE_BYTES,
    JobKey,
    LoadedKey,
    check_secret,
    load_job_key,
    new_job_key,
    parse_job_key,
)
from gradbus.runtime.security.settings import Level

FILE_NAME = "user.key"
# No such folder here, or none that can be written: the next place may do.
_ELSEWHERE = {
    errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTSUP,
    errno.ESTALE, errno.EMLINK,
}  # fmt: skip


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
