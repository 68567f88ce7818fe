"""The controller's allow list: names, roles and public keys of the nodes that it admits.

A text file, one node a line: ``NAME ROLE ed25519:KEY``, and the ids that a client, or the ranks that a worker may use,
``0`` or ``0-3,7``. ``#`` starts a comment. The list is no secret, but write access to it is the right to admit nodes.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.foreign_files import read_beginning
from gradbus.runtime.names import check_name
from gradbus.runtime.security.identity.key import parse_public, public_text

Role = Literal["client", "controller", "worker", "observer"]
ROLES: tuple[Role, ...] = get_args(Role)
WITH_IDS: tuple[Role, ...] = ("client", "worker")
MAX_LIST_BYTES = 1 << 20
MAX_ENTRIES = 4096
MAX_RANGES = 64
LOCK_S = 10.0  # the longest wait for another process that changes the list
LOOK_S = 0.02
MAX_CLIENT_ID = 0x7FFF_FFFE
_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")

Ids = tuple[tuple[int, int], ...]  # from .. to, both included


def parse_role(text: str, where: str) -> Role:
    """Parse a role. Raises ConfigError."""
    for role in ROLES:
        if role == text:
            return role
    raise ConfigError(f"{where}: role {text[:20]!r}: expected one of {', '.join(ROLES)}")


def parse_ids(text: str, where: str) -> Ids:
    """Parse client ids, or ranks, such as ``0-3,7``. Raises ConfigError."""
    found: list[tuple[int, int]] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= MAX_CLIENT_ID:
            raise ConfigError(f"{where}: ids {text[:40]!r}: expected numbers and ranges like 0-3,7, up to 2^31 - 2")
        found.append((first, last))
    if len(found) > MAX_RANGES:
        raise ConfigError(f"{where}: {len(found)} ranges of ids, at most {MAX_RANGES}")
    return tuple(sorted(found))


def ids_text(ids: Ids) -> str:
    """Return ids as the list has them."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ids)


def is_within(number: int, ids: Ids) -> bool:
    """Whether a number is one of these ids."""
    return any(first <= number <= last for first, last in ids)


@dataclass(frozen=True, slots=True)
class Entry:
    """One node.

    Attributes:
        public: its key, 32 bytes.
        ids: of clients that it may send as, or ranks that it may be; empty for other roles.
    """

    name: str
    role: Role
    public: bytes
    ids: Ids = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.role not in ROLES:
            raise ConfigError(f"role {self.role!r} of {self.name}: expected one of {', '.join(ROLES)}")
        if (self.role in WITH_IDS) != bool(self.ids):
            what = "ranks" if self.role == "worker" else "ids"
            expected = (
                f"the {what} that it may use, for example 0 or 0-3"
                if not self.ids
                else "no ids: clients and workers have some"
            )
            raise ConfigError(f"{self.role} {self.name}: expected {expected}")

    @property
    def text(self) -> str:
        """The line of this node."""
        return " ".join((self.name, self.role, public_text(self.public), ids_text(self.ids))).rstrip()

    def may_be(self, client_id: int) -> bool:
        """Whether it may send as this client, or be this rank."""
        return is_within(client_id, self.ids)


class AllowList:
    """The admitted nodes. Names and keys are unique, and a client id or a rank belongs to one node."""

    def __init__(self, entries: tuple[Entry, ...] = (), where: str = "allow list") -> None:
        """Raises ConfigError: entries contradict each other."""
        self.entries = entries
        if len(entries) > MAX_ENTRIES:
            raise ConfigError(f"{where}: {len(entries)} nodes, at most {MAX_ENTRIES}")
        self._by_name: dict[str, Entry] = {}
        self._by_key: dict[bytes, Entry] = {}
        for entry in entries:
            if entry.name in self._by_name or entry.public in self._by_key:
                raise ConfigError(f"{where}: the name or the key of {entry.name} is there twice: one node, one line")
            self._by_name[entry.name] = self._by_key[entry.public] = entry
        for role, what in (("client", "use client id"), ("worker", "be rank")):
            ranges = self._ranges_of(role)
            for (_, last, one), (first, _, other) in itertools.pairwise(ranges):
                if first <= last:
                    raise ConfigError(f"{where}: {one} and {other} may both {what} {first}: give each its own")

    def _ranges_of(self, role: str) -> list[tuple[int, int, str]]:
        return sorted(
            (first, last, entry.name) for entry in self.entries if entry.role == role for first, last in entry.ids
        )

    @cached_property
    def _ranges(self) -> list[tuple[int, int, str]]:
        return self._ranges_of("client")

    def get(self, name: str) -> Entry | None:
        """Return the node of a name."""
        return self._by_name.get(name)

    def of_key(self, public: bytes) -> Entry | None:
        """Return the node that has a key."""
        return self._by_key.get(public)

    def owner_of(self, client_id: int) -> str | None:
        """Return the name of the node that may send as a client."""
        at = bisect.bisect_right(self._ranges, (client_id, MAX_CLIENT_ID + 1, "")) - 1
        if at < 0 or not self._ranges[at][0] <= client_id <= self._ranges[at][1]:
            return None
        return self._ranges[at][2]

    @property
    def text(self) -> str:
        """The whole file."""
        return "# NAME ROLE KEY IDS, see 'gradbus keys allow --help'\n" + "".join(f"{e.text}\n" for e in self.entries)


def parse_allow_list(text: str, where: str) -> AllowList:
    """Parse an allow list. Raises ConfigError, with the number of the line."""
    entries: list[Entry] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        here = f"{where}, line {number}"
        if not 3 <= len(words) <= 4:
            raise ConfigError(
                f"{here}: expected NAME ROLE KEY and, for clients and workers, IDS; got {len(words)} words"
            )
        if len(entries) >= MAX_ENTRIES:
            raise ConfigError(f"{here}: more than {MAX_ENTRIES} nodes")
        role = parse_role(words[1], here)
        ids = parse_ids(words[3], here) if len(words) == 4 else ()
        try:
            entries.append(Entry(words[0], role, parse_public(words[2], here), ids))
        except ConfigError as error:
            raise ConfigError(f"{here}: {str(error).removeprefix(here + ': ')}") from None
    return AllowList(tuple(entries), where)


class UnreadableList(ConfigError):
    """The file of a list could not be read, which may pass: too many open files, a file system that is away."""


def load_allow_list(path: Path) -> AllowList:
    """Read the list in a file that only its owner, who is this user or root, can write.

    Raises:
        UnreadableList: it cannot be read.
        ConfigError: others can write it, or it is no list.
    """
    try:
        mode, data = read_beginning(path, MAX_LIST_BYTES + 1)
    except OSError as error:
        raise UnreadableList(
            f"allow list {path} cannot be read: {error.strerror}. 'gradbus keys allow' makes one"
        ) from None
    if not stat.S_ISREG(mode.st_mode) or len(data) > MAX_LIST_BYTES:
        raise ConfigError(f"allow list {path}: expected a regular file of at most {MAX_LIST_BYTES} bytes")
    if mode.st_mode & 0o022 or mode.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"allow list {path} can be changed by others: mode {stat.S_IMODE(mode.st_mode):04o}, user {mode.st_uid}. "
            f"Who can write it decides who is let in: chmod go-w {path}, and look at what it says"
        )
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"allow list {path} is no text file of ASCII characters") from None
    return parse_allow_list(text, f"allow list {path}")


def _target(path: Path) -> Path:
    """The file that a path means: a link stays, and what it leads to is changed."""
    return Path(os.path.realpath(path))


def _status(path: Path) -> os.stat_result | None:
    """The metadata of a file; None: there is no such file."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _give(handle: int, former: os.stat_result) -> None:
    """Give an open file the owner and the group of another one, as far as this user may: root may."""
    with contextlib.suppress(PermissionError):
        os.fchown(handle, former.st_uid if os.geteuid() == 0 else -1, former.st_gid)


def _open_lock(lock: Path, of_list: os.stat_result | None) -> int:
    """Open the lock file of a list, and make it if there is none. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(lock, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(lock, flags)  # and its owner stays: who may write the folder may have put any file there
    if of_list is not None:
        _give(handle, of_list)
    return handle


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """Lock a list against other processes that change it, for reading, changing and writing in one step.

    The lock is a file beside the list, of the same owner.

    Raises:
        ConfigError: another process holds the lock for :data:`LOCK_S`, or there can be no lock file beside the list.
    """
    target = _target(path)
    lock = target.with_name(f".{target.name}.lock")  # stays there: the list itself is replaced
    try:
        handle = _open_lock(lock, _status(target))
    except OSError as error:
        raise ConfigError(f"allow list {path} cannot be changed: {lock}: {error.strerror}") from None
    try:
        until_s = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise ConfigError(
                        f"allow list {path} is being changed by another process, for more than {LOCK_S:g} s"
                    ) from None
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(handle)  # and so the lock is given back


def write_allow_list(path: Path, allowed: AllowList) -> None:
    """Replace the file atomically; mode and, where root does it, owner stay: the controller reads the list anew.

    Raises:
        ConfigError: that failed.
    """
    target = _target(path)
    try:
        former = _status(target)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(handle, "w", encoding="ascii") as file:
                if former is not None:
                    _give(handle, former)
                    os.fchmod(handle, stat.S_IMODE(former.st_mode) & 0o755)  # others may not write it
                file.write(allowed.text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"allow list {path} cannot be written: {error.strerror}") from None


def with_entry(allowed: AllowList, entry: Entry) -> AllowList:
    """Return the list with one node more. Raises ConfigError: its name, key or ids are taken."""
    known = allowed.get(entry.name)
    if known is not None:
        raise ConfigError(
            f"{entry.name} is on the list already, with key {public_text(known.public)}. For another one: gradbus keys "
            f"remove {entry.name}, then allow it again"
        )
    return AllowList((*allowed.entries, entry))


def without(allowed: AllowList, name: str) -> AllowList:
    """Return the list without a node. Raises ConfigError: it is not on it."""
    if allowed.get(name) is None:
        known = ", ".join(entry.name for entry in allowed.entries[:20]) or "nobody"
        raise ConfigError(f"{name!r} is not on the list, which has: {known}")
    return AllowList(tuple(entry for entry in allowed.entries if entry.name != name))


class _Stamp(NamedTuple):
    """File metadata that changes with every write or replacement. ``mtime_ns`` can be set back; ``ctime_ns`` cannot."""

    ctime_ns: int
    mtime_ns: int
    device: int
    inode: int
    size: int


class AllowListWatcher:
    """Watches the file of an allow list, and reloads it when it has changed.

    An editor or a copy may write the file in several steps, so a state counts once two successive checks have found it,
    and an empty file never does: an intentionally empty list contains a comment. A file that cannot be read is tried
    again with every check: a node that was removed must not stay because of one failure.

    Attributes:
        allowed: the list as it was read last.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: it cannot be read, or is no list."""
        self._path = path
        self._unread = ""  # why the state that was found last could not be read
        self._seen = self._looked = self._stamp()  # before reading: a change meanwhile is found by the next check
        self.allowed = self._read(self._seen)

    @property
    def is_changing(self) -> bool:
        """Whether the last check has found another state than was read last, which the next one may read."""
        return self._looked != self._seen and not self._unread

    def news(self) -> AllowList | None:
        """Check the file; returns the new list, or None if it is unchanged or not stable yet.

        Raises:
            ConfigError: the file is invalid, or cannot be read; raised once per state, and once per reason.
        """
        before, self._looked = self._looked, self._stamp()
        if self._looked == self._seen or self._looked != before:
            self._unread = ""
            return None
        try:
            allowed = self._read(self._looked)
        except UnreadableList as error:
            reported, self._unread = self._unread, str(error)
            if reported == self._unread:
                return None
            raise
        except ConfigError:
            self._seen, self._unread = self._looked, ""
            raise
        self._seen, self._unread = self._looked, ""
        if self._stamp() != self._seen:
            return None  # changed while it was read
        self.allowed = allowed
        return allowed

    def _read(self, stamp: _Stamp | None) -> AllowList:
        if stamp is not None and not stamp.size:
            raise ConfigError(
                f"allow list {self._path} is empty. A list of nobody has a comment in it, as 'gradbus keys remove' "
                f"leaves it; 'gradbus keys allow' makes a new list"
            )
        return load_allow_list(self._path)

    def _stamp(self) -> _Stamp | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return _Stamp(status.st_ctime_ns, status.st_mtime_ns, status.st_dev, status.st_ino, status.st_size)
