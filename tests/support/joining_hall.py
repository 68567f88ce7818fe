"""A controller and nodes that hear each other without a bus, at a time that the test tells."""

from __future__ import annotations

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import epoch
from gradbus.runtime.security.allow_list import AllowList, Entry
from gradbus.runtime.security.applicant import Applicant
from gradbus.runtime.security.door import Door
from gradbus.runtime.security.identity_key import NodeKey, new_node_key

JOB = "mnist"
SERVER, ONE, TWO, STRANGER = (new_node_key(name) for name in ("server", "robot-1", "robot-2", "stranger"))
LIST = AllowList(
    (Entry(ONE.name, "client", ONE.public, ((0, 3),)), Entry(TWO.name, "client", TWO.public, ((7, 7),)))
)  # fmt: skip
UPDATES, CONTROL, COMMANDS, MODELS = "train/client_update", epoch.CONTROL, epoch.COMMANDS, epoch.MODELS


class Hall:
    """One controller and some nodes, and everything that was said between them."""

    def __init__(self, *nodes: NodeKey, allowed: AllowList = LIST) -> None:
        self.now_s = 100.0
        self.door = Door(JOB, SERVER, allowed, label="desk:1", now_s=self.now_s)
        self.nodes = [Applicant(JOB, key, SERVER.public, "client") for key in nodes]
        self.said: list[bytes] = []
        self.wrong: list[str] = []
        for node in self.nodes:
            self.meet(node)

    def meet(self, node: Applicant) -> None:
        """The node hears that the controller is there."""
        beacon = self.door.beacon
        self.pass_on(node.hear_beacon(memoryview(beacon), 1, self.now_s), node)

    def pass_on(self, said: list[bytes], by: Applicant | Door) -> None:
        """All hear it, and answer."""
        queue = [(by, one) for one in said]
        while queue:
            speaker, data = queue.pop(0)
            self.said.append(data)
            for party in (self.door, *self.nodes):
                if party is not speaker:
                    try:
                        queue += [(party, one) for one in party.hear(memoryview(data), self.now_s)]
                    except FrameError as error:
                        self.wrong.append(error.reason)

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        for party in (self.door, *self.nodes):
            self.pass_on(party.tick(self.now_s), party)

    def tell(self, topic: str, text: bytes, to: int | None = None) -> bytes:
        sealed = self.door.seal(topic, (text,), to)
        assert sealed is not None
        return sealed.octets()

    def heard(self, node: Applicant, topic: str, data: bytes) -> str:
        """What a node makes of it: the text, a reason why not, or nothing."""
        try:
            plain = node.open(topic, data, self.now_s)
        except FrameError as error:
            return error.reason
        return "not for it" if plain is None else bytes(plain).decode()

    def taken(self, topic: str, data: bytes) -> str:
        """What the controller makes of it: who said what."""
        try:
            opened = self.door.open(topic, data, self.now_s)
        except FrameError as error:
            return error.reason
        return "its own" if opened is None else f"{opened[1].name}: {bytes(opened[0]).decode()}"


def upload(node: Applicant, text: bytes, topic: str = UPDATES) -> bytes:
    sealed = node.seal(topic, (text,))
    assert sealed is not None
    return sealed.octets()
