"""Who sends a Hello: the id and the name of a client that says an id, a name, or both.

How a client without an id speaks until it is welcomed: it sends Hello, and nothing else, under the number that all such
clients share (UNASSIGNED), and is told apart by its incarnation. Its Welcome says its id; from then on it sends under
that, with the same incarnation, as a client does whose user has chosen the id. So whatever needs an id (rounds,
updates, masks, evaluations, its state on the disk) begins once there is one.

Rules, with security that knows single nodes (``identity``):

- The node decides the name, by the allow list: a client is NODE, or NODE.ID where the node has several ids. A name that
  it gives itself is one of these or begins with ``NODE.``, and with the name of no other node after that.

Rules without:

- A name has the id that it had before in this run. A new one gets the lowest id that is nobody's: below
  ``clients.num`` where that is set, and not before clients of an earlier start of the controller have had the time to
  say which ids they have. If there is none left, it gets that of a name whose client has left before it ever took
  part. The Controller of a site assigns none: ids are unique in the whole tree.
- A client that says an id is that client. If it says a name, too, both belong together from then on; an id that a name
  has is not given to a client that does not say it, as that may be another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradbus.actors.federated.client_names import MAX_CLIENT_ID, MAX_NAMED_CLIENTS, ClientNames
from gradbus.runtime.transport.access_policy import ClientNode
from gradbus.runtime.wire.control import Hello
from gradbus.runtime.wire.frames import UNASSIGNED
from gradbus.runtime.wire.messages import Identity

NO_NAME = (
    "it has neither an id nor a name: give it client_id= or name=, with gradbus client --id or --name. With security "
    "'identity' it needs neither"
)
_UNIQUE_IN_TREE = (
    "its controller is that of a site, and the ids of clients are unique in the whole tree, so it cannot assign one: "
    "give {name!r} an id once, as in --id 3 --name {name}"
)
_OFF_LIST = "its node has been taken off the allow list, so it has no ids of clients"
MAX_SHOWN = 8  # names that a sentence lists


class NamedSender(NamedTuple):
    """The sender of a Hello.

    Attributes:
        client_id: its id; -1: it has none. name: empty: it has none.
        refusal: why it cannot take part, as a sentence; empty: it can.
        waits: it has no answer yet, and is to send again.
    """

    client_id: int
    name: str = ""
    refusal: str = ""
    waits: bool = False


class ClientNaming:
    """Finds the id and the name of each sender of a Hello, and keeps the pairs of those that take part."""

    def __init__(
        self,
        names: ClientNames,
        *,
        num_clients: int | None,
        is_taken: Callable[[int], bool],
        node_of: Callable[[int, int], ClientNode | None],
        assigns_from_s: float,
        is_site: bool = False,
    ) -> None:
        """Args:
        names: the pairs of the run.
        num_clients: names get ids below; None: there is no such limit.
        is_taken: whether an id without a name is that of some client, which may be away.
        node_of: of id and incarnation of a sender: the node that has proved to be it, None where none can.
        assigns_from_s: no new name gets an id before that time.
        is_site: whether other controllers have clients of the same run: then none of them can tell which ids are free.
        """
        self._names = names
        self._num_clients = num_clients
        self._is_taken = is_taken
        self._node_of = node_of
        self._assigns_from_s = assigns_from_s
        self._is_site = is_site
        self._assigned: dict[int, int] = {}  # ids of senders that had none, by incarnation
        self._seen: set[int] = set()  # ids of clients with names that have been here since this start of the controller

    def resolve(self, sender: Identity, hello: Hello, now_s: float) -> NamedSender:
        """Return who sends this. Nothing is kept."""
        if hello.ids:
            return NamedSender(sender.sender, hello.name, self._names.host_conflict(hello.name, hello.ids))
        if sender.sender > MAX_CLIENT_ID and sender.sender != UNASSIGNED:
            why = f"it sends as client {sender.sender}: expected an id from 0 to {MAX_CLIENT_ID}"
            return NamedSender(sender.sender, refusal=why)
        found = self._found(sender, hello, now_s)
        if found.name and not found.refusal and not self._names.has_room_for(found.name, found.client_id):
            why = f"{MAX_NAMED_CLIENTS:,} clients of this run have names, as many as it can have"
            return NamedSender(found.client_id, found.name, f"{why}: start it with an id and without a name")
        return found

    def _found(self, sender: Identity, hello: Hello, now_s: float) -> NamedSender:
        node = self._node_of(sender.sender, sender.incarnation)
        if node is not None:
            found = self._of_node(sender.sender, hello.name, node)
            return found if found.refusal else _of_its_node(found, node)
        if sender.sender != UNASSIGNED:
            return self._with_id(sender.sender, hello.name)
        if not hello.name:
            return NamedSender(-1, refusal=NO_NAME)
        return self._with_name(hello.name, now_s)

    def keep(self, sender: Identity, hello: Hello, found: NamedSender) -> None:
        """Keep the pair of a sender that takes part."""
        if hello.ids:
            self._names.keep_host(found.name, hello.ids)
            return
        if found.name:
            self._names.keep(found.name, found.client_id)
            self._seen.add(found.client_id)
        if sender.sender == UNASSIGNED:
            self._assigned[sender.incarnation] = found.client_id
            while len(self._assigned) > MAX_NAMED_CLIENTS:
                del self._assigned[next(iter(self._assigned))]

    def failed_client(self, sender: Identity, name: str) -> int | str:
        """Return the id of a client that has none yet, as far as it is known, else its name; empty: it is none's. It
        reports that it cannot join, so a new name gets no id."""
        node = self._node_of(sender.sender, sender.incarnation)
        if node is not None:
            found = self._of_node(sender.sender, name, node)
            return "" if found.refusal else found.client_id
        known = self._names.id_of(name)
        return name if known is None else known

    def id_of(self, sender: int, incarnation: int) -> int:
        """Return the id of a sender of any message, also of one that has been assigned its id just now."""
        return self._assigned.get(incarnation, sender) if sender == UNASSIGNED else sender

    def _with_id(self, client_id: int, name: str) -> NamedSender:
        known = self._names.own_name_of(client_id)
        if name:
            return NamedSender(client_id, name, self._names.conflict(name, client_id))
        if known:
            why = f"client {client_id} is the one named {known!r}: start it with that name, or take another id"
            return NamedSender(client_id, known, why)
        return NamedSender(client_id)

    def _with_name(self, name: str, now_s: float) -> NamedSender:
        known = self._names.id_of(name)
        if known is not None:
            return NamedSender(known, name)
        if self._is_site:
            return NamedSender(-1, name, _UNIQUE_IN_TREE.format(name=name))
        if now_s < self._assigns_from_s:
            return NamedSender(-1, name, waits=True)
        limit = MAX_NAMED_CLIENTS if self._num_clients is None else self._num_clients
        client_id = self._free_id([range(limit)])
        if client_id is None:
            return NamedSender(-1, name, self._no_id_left(limit))
        return NamedSender(client_id, name, self._names.conflict_with_hosts(name))

    def _free_id(self, among: Sequence[range]) -> int | None:
        """Return the lowest of these ids that no client has. Without one, the lowest whose client has been here and has
        left before it ever took part, as one with a mistyped name has. None: there is none either."""
        free = self._names.lowest_free(among, self._is_taken)
        if free is not None:
            return free
        unused = (
            one
            for ids in among
            for one in ids
            if not self._is_taken(one) and (one in self._seen or not self._names.own_name_of(one))  # else of a host
        )
        return next(unused, None)

    def _no_id_left(self, limit: int) -> str:
        taken = [name for _, name in self._names.rows(range(limit))]
        more = f" and {len(taken) - MAX_SHOWN} more" if len(taken) > MAX_SHOWN else ""
        named = f", the named ones are {', '.join(taken[:MAX_SHOWN])}{more}" if taken else ""
        return (
            f"the run has {limit:,} ids for clients with names (federated.clients.num of the controller), and all of "
            f"them are taken{named}: start it with its earlier name, if it is one of these, or raise clients.num"
        )

    def _of_node(self, sender: int, name: str, node: ClientNode) -> NamedSender:
        """Return a client of a node whose key has encrypted its Hello."""
        if not node.name:  # the list has changed since the Hello was decrypted
            return NamedSender(-1, refusal=_OFF_LIST)
        given, said = None if sender == UNASSIGNED else sender, _id_in(name, node)
        if name and name != node.name and not name.startswith(f"{node.name}."):
            why = (
                f"it calls itself {name!r}, and its key is that of {node.name}: the name of its client is "
                f"{node.name!r}, or begins with {node.name + '.'!r}"
            )
            return NamedSender(-1, refusal=why)
        if said is not None and not node.has(said):
            return NamedSender(
                -1, refusal=f"its name {name!r} says client {said}: the allow list gives its node no such id"
            )
        if given is not None and said is not None and said != given:
            return NamedSender(-1, refusal=f"its name {name!r} says client {said}, and its id is {given}")
        client_id = self._id_of_node(name, node) if given is None else given
        if client_id is None:
            return NamedSender(-1, refusal=_no_id_of(name, node))
        if name in ("", node.name):
            return NamedSender(client_id, self._listed_name(client_id, name, node))
        known = self._names.id_of(name)
        if known is not None and known != client_id and node.has(known):
            return NamedSender(client_id, refusal=f"the name {name!r} belongs to client {known}: leave the id out")
        return NamedSender(client_id, name)

    def _id_of_node(self, name: str, node: ClientNode) -> int | None:
        """Return the id of a client of a node that says none; None: there is none for it."""
        known = [node.only_id, _id_in(name, node), self._names.id_of(name) if name else None]
        found = next((one for one in known if one is not None and node.has(one)), None)
        if found is not None or name in ("", node.name):
            return found
        return self._free_id([range(first, last + 1) for first, last in node.ids])

    def _listed_name(self, client_id: int, name: str, node: ClientNode) -> str:
        """Return the name that follows from the allow list, or the one that the client had before."""
        before = self._names.own_name_of(client_id)
        if not name and before.startswith(f"{node.name}."):
            return before
        return node.name if node.only_id is not None else f"{node.name}.{client_id}"


def _of_its_node(found: NamedSender, node: ClientNode) -> NamedSender:
    """Return a client of a node; refused where its name is, or begins with, that of another node on the allow list."""
    dots = [at for at, letter in enumerate(found.name) if letter == "." and at > len(node.name)]
    for end in (*dots, len(found.name)):
        other = found.name[:end]
        if other != node.name and node.is_node(other):
            why = f"the name {found.name!r} belongs to the node {other} of the allow list"
            advice = "give it another name, or rename that node"
            return NamedSender(-1, refusal=f"{why}, and its key is that of {node.name}: {advice}")
    return found


def _no_id_of(name: str, node: ClientNode) -> str:
    if not node.ids:
        return "the allow list gives its node no ids of clients"
    if name not in ("", node.name):
        return f"all ids that the allow list gives {node.name} are taken: give it more, or use an earlier name"
    return (
        f"by the allow list node {node.name} may have several clients: give this one an id, or a name that begins with "
        f"{node.name + '.'!r}, as in {node.name}.{node.ids[0][0]}"
    )


def _id_in(name: str, node: ClientNode) -> int | None:
    """Return the id that a name as in ``NODE.ID`` says, which need not be one of its node's; None: it says none."""
    text = name.removeprefix(f"{node.name}.")
    if text == name or not text.isdecimal() or len(text) > 10 or (text != "0" and text.startswith("0")):
        return None
    return int(text)
