"""Which id the name of a client stands for. A pure table, part of the state of a run.

A name is a label: messages, seeds and shares of the data know ids only. So a name keeps its id for the whole run, also
where its client leaves, comes back on another machine, or the controller starts again. Names come from the wire and
from checkpoints: they are checked where they come in, and their number is bounded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from gradbus.runtime.names import MAX_NAME_CHARS, check_name, is_name
from gradbus.runtime.wire.control import ClientName
from gradbus.runtime.wire.id_ranges import common_ids, format_ids, has_id, parse_ids

MAX_NAMED_CLIENTS = 65_536  # as many as a run has clients
MAX_CLIENT_ID = 0x7FFF_FFFE
NAMES_FILE = "clients.json"  # of a run directory
_MAX_SHOWN = 8  # names that an error lists
_MAX_COMPARED = 2_000  # names that a wrong one is compared with: they take some 75 ms

Pair = tuple[Annotated[ClientName, AfterValidator(check_name)], Annotated[int, Field(ge=0, le=MAX_CLIENT_ID)]]
"""A name in a checkpoint, and its id."""


class ClientNames:
    """Names by id, and ids by name. May be read on any thread; the event loop changes it.

    The clients of a host have no names of their own: of a host ``lab``, client 7 is ``lab.7``.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._hosts: dict[str, tuple[range, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._ids or self._hosts)

    def id_of(self, name: str) -> int | None:
        """Return the id of a name; None: it has none yet."""
        return self._ids.get(name)

    def find(self, name: str) -> int:
        """Return the id of the client with this name, also of a host's.

        Raises:
            ValueError: there is none; the text has the names that are near, or else the first ones.
        """
        host, _, number = name.rpartition(".")
        ids = self._hosts.get(host, ())
        known = self._ids.get(name)
        if known is None and number.isdecimal() and has_id(tuple(ids), int(number)) and number == str(int(number)):
            known = int(number)
        if known is not None:
            return known
        names = [*self._ids, *(f"{host}.{ids[0].start}" for host, ids in self._hosts.items())]
        near = get_close_matches(name[:MAX_NAME_CHARS], names[:_MAX_COMPARED], n=_MAX_SHOWN)
        shown = ", ".join(near or names[:_MAX_SHOWN]) or "none"
        own = self._hosts.get(name)
        of_host = f". {name!r} is a host: name its clients, as in {name}.{own[0].start}" if own else ""
        raise ValueError(
            f"no client of this run is named {name[:MAX_NAME_CHARS]!a}{of_host}. "
            f"{'Near names' if near else f'Of {len(names):,} names'}: {shown}. An id is a number, such as 0"
        )

    def name_of(self, client_id: int) -> str:
        """Return the name of a client; empty: it has none."""
        name = self._names.get(client_id)
        if name is not None:
            return name
        hosts = self._hosts.copy()
        return next((f"{host}.{client_id}" for host, ranges in hosts.items() if has_id(ranges, client_id)), "")

    def own_name_of(self, client_id: int) -> str:
        """Return the name of a client that has it for itself, and not by its host; empty: it has none."""
        return self._names.get(client_id, "")

    def label(self, client: int | str) -> str:
        """Return id and name for people, as in ``0 (site-1)``; of a client without an id its name, which is given."""
        name = "" if isinstance(client, str) else self.name_of(client)
        return f"{client} ({name})" if name else str(client)

    def facts(self, client: int | str) -> dict[str, Any]:
        """Return id and name for a log event; of a client without an id its name, which is given."""
        if isinstance(client, str):
            return {"name": client}
        name = self.name_of(client)
        return {"client": client, "name": name} if name else {"client": client}

    def named(self, client_ids: Iterable[int]) -> dict[str, str]:
        """Return the names of those of these clients that have one, by id as text, for JSON."""
        found = {str(one): self.name_of(one) for one in client_ids}
        return {one: name for one, name in found.items() if name}

    def conflict(self, name: str, client_id: int) -> str:
        """Return why a client may not have this name, as a sentence; empty: it may."""
        known, other = self._ids.get(name), self._names.get(client_id)
        if known is not None and known != client_id:
            return f"the name {name!r} belongs to client {known}: leave the id {client_id} out, or take another name"
        if other is not None and other != name:
            return f"client {client_id} is the one named {other!r}: start it with that name, or take another id"
        return self.conflict_with_hosts(name)

    def conflict_with_hosts(self, name: str) -> str:
        """Return why a name is of the clients of a host, as a sentence; empty: it is not."""
        host = name if name in self._hosts else name.rpartition(".")[0]
        if host in self._hosts:
            return f"the name {name!r} belongs to the host {host!r} of other clients: take another name"
        return ""

    def host_conflict(self, name: str, ids: str) -> str:
        """Return why a host may not speak for these clients under this name, which may be empty, as a sentence."""
        ranges = parse_ids(ids)
        for client_id, known in self._names.items():
            if has_id(ranges, client_id):
                return f"client {client_id} is the one named {known!r}: leave its id out of the ids of the host"
            if name and (known == name or known.startswith(f"{name}.")):
                return f"the name {known!r} belongs to client {client_id}: take another name for the host"
        other = self._hosts.get(name, ranges)
        if name and other != ranges and next(common_ids(other, ranges), None) is None:
            return f"the name {name!r} belongs to the host of clients {_text(other)[:40]}: take another name"
        return ""

    def has_room_for(self, name: str, client_id: int) -> bool:
        """Return whether :meth:`keep` can give a client this name: there is a bound on how many names there are."""
        return len(self._ids) < MAX_NAMED_CLIENTS or name in self._ids or client_id in self._names

    def keep(self, name: str, client_id: int) -> None:
        """Give a client this name, in place of another one of it, and the name this id.

        Raises:
            ValueError: there are :data:`MAX_NAMED_CLIENTS` names.
        """
        if self._ids.get(name) == client_id and self._names.get(client_id) == name:
            return
        self._names.pop(self._ids.pop(name, -1), None)
        self._ids.pop(self._names.pop(client_id, ""), None)
        if len(self._ids) >= MAX_NAMED_CLIENTS:
            raise ValueError(f"{MAX_NAMED_CLIENTS:,} clients have names already")
        self._ids[name], self._names[client_id] = client_id, name

    def keep_host(self, name: str, ids: str) -> None:
        """Give the clients of a host the name of the host."""
        ranges = parse_ids(ids)
        if name and self._hosts.get(name) == ranges:
            return  # as with each heartbeat: files list the hosts in the order in which they came
        for other, theirs in list(self._hosts.items()):
            if next(common_ids(theirs, ranges), None) is not None:
                del self._hosts[other]
        if name and len(self._hosts) < MAX_NAMED_CLIENTS:
            self._hosts[name] = ranges

    def lowest_free(self, among: Iterable[range], is_taken: Callable[[int], bool]) -> int | None:
        """Return the lowest of these ids that is nobody's, nor that of a host's client; None: there is none."""
        hosts = tuple(sorted((ids for host in self._hosts.values() for ids in host), key=lambda ids: ids.start))
        free = (
            one
            for ids in among
            for one in ids
            if one not in self._names and not has_id(hosts, one) and not is_taken(one)
        )
        return next(free, None)

    def rows(self, here: Iterable[int] | None = None) -> list[tuple[str, str]]:
        """Return ids and name, of each client that has its own and of each host: as text, as in ``0`` or ``0-99``.

        Args:
            here: the ids that are wanted; None: all.
        """
        ranges = None if here is None else parse_ids(format_ids(here))
        own = [(str(i), name) for i, name in sorted(self._names.copy().items()) if ranges is None or has_id(ranges, i)]
        for name, ids in self._hosts.copy().items():
            wanted = _text(ids) if ranges is None else format_ids(common_ids(ids, ranges))
            own += [(wanted, f"{name}.{wanted}" if wanted.isdecimal() else name)] if wanted else []
        return own

    def state(self) -> list[Pair]:
        """Return the pairs for a checkpoint. From any thread."""
        return list(self._ids.copy().items())

    def load_state(self, pairs: Iterable[Pair]) -> None:
        """Restore what :meth:`state` gave. Hosts say their names again."""
        self._ids.clear()
        self._names.clear()
        for name, client_id in pairs:
            if name not in self._ids and client_id not in self._names:
                self.keep(name, client_id)


def json_rows(names: ClientNames) -> list[dict[str, str]]:
    """Return all names as files have them: what :func:`names_of_rows` reads."""
    return [{"clients": ids, "name": name} for ids, name in names.rows()]


def checked_id(client_id: Any) -> int:
    """Return a client id, which may be any integer as of NumPy.

    Raises:
        TypeError: it is no integer. ValueError: it is out of range.
    """
    if isinstance(client_id, str):
        raise TypeError(f"client_id is a number, got {client_id[:80]!r}: a name is given as name={client_id[:80]!r}")
    try:
        number = operator.index(client_id)
    except TypeError:
        raise TypeError(f"client_id is an integer, got {type(client_id).__name__}") from None
    if not 0 <= number <= MAX_CLIENT_ID:
        raise ValueError(f"client_id must be within 0 .. 2^31 - 2, got {number}")
    return number


def label_of(client_id: int, names: Mapping[int, str]) -> str:
    """Return id and name for people, as :meth:`ClientNames.label`."""
    name = names.get(client_id)
    return f"{client_id} ({name})" if name else str(client_id)


def _text(ranges: Iterable[range]) -> str:
    return ",".join(str(one.start) if len(one) == 1 else f"{one.start}-{one.stop - 1}" for one in ranges)


def names_of_rows(rows: Iterable[Any], most: int) -> Mapping[int, str]:
    """Return names by id from what a file has of :meth:`ClientNames.rows`, of the first ``most`` ids in it; what is
    wrong is left out.

    Args:
        rows: objects with ``clients``, ids as text, and ``name``. An id that is in two of them has the first name.
    """
    found: dict[int, str] = {}
    named = (pair for row in rows for pair in _names_of_row(row))
    for client_id, name in islice(named, most):
        found.setdefault(client_id, name)
    return found


def _names_of_row(row: Any) -> Iterator[tuple[int, str]]:
    name, ids = (row.get(key) for key in ("name", "clients")) if isinstance(row, Mapping) else (None, None)
    if not (isinstance(name, str) and isinstance(ids, str) and is_name(name)):
        return
    try:
        ranges = parse_ids(ids)
    except ValueError:
        return
    is_one = len(ranges) == 1 and len(ranges[0]) == 1
    for client_id in (one for each in ranges for one in each):
        yield client_id, name if is_one else f"{name}.{client_id}"
