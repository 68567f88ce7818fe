"""Which nodes the clients belong to that have no id yet.

Such clients share one sender number, so the number does not say which node may use it: the node is the one whose key
encrypted the message, and is noted by the incarnation of the client. The receive thread notes it before the message is
handed over, so the event loop finds it there.
"""

from __future__ import annotations

from gradbus.runtime.errors import FrameError

MAX_UNASSIGNED = 4096  # as many nodes as an allow list has


class UnassignedClients:
    """Nodes by the incarnations of their clients. The oldest is forgotten first: such a client sends again."""

    def __init__(self) -> None:
        self._nodes: dict[int, str] = {}

    def claim(self, incarnation: int, node: str) -> None:
        """Note that a node has sent as this incarnation.

        Raises:
            FrameError: ``identity``: another node has.
        """
        if self._nodes.setdefault(incarnation, node) != node:
            raise FrameError("identity", f"{node} sends as an unassigned client of {self._nodes[incarnation]}")
        while len(self._nodes) > MAX_UNASSIGNED:
            del self._nodes[next(iter(self._nodes))]

    def node_of(self, incarnation: int) -> str:
        """Return the name of the node; empty: none is known."""
        return self._nodes.get(incarnation, "")
