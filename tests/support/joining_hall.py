"""A controller and nodes that hear each other without a bus, at a time that the test tells."""

from __future__ import annotations

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.encryption import SessionCipher, StreamDecryptor
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.allow_list import AllowList, Entry, Role
from gradbus.runtime.security.identity.handshake import Stamps
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.key import NodeKey, new_node_key
from gradbus.runtime.security.identity.key_epoch import RankKeys
from gradbus.runtime.security.identity.key_messages import CONTROL

JOB = "mnist"
SERVER, ONE, TWO, STRANGER = (new_node_key(name) for name in ("server", "robot-1", "robot-2", "stranger"))
LIST = AllowList((Entry(ONE.name, "client", ONE.public, ((0, 3),)), Entry(TWO.name, "client", TWO.public, ((7, 7),))))
UPDATES = "train/client_update"


def stamped(key: NodeKey, data: bytes, to: NodeKey = SERVER) -> bytes:
    """A message with the stamp that the holder of a key makes for another."""
    return Stamps(JOB, key).stamped(data, to.public)


class Hall:
    """One controller and some nodes, and everything that was said between them."""

    role: Role = "client"

    def __init__(self, *nodes: NodeKey, allowed: AllowList = LIST) -> None:
        self.now_s = 100.0
        self.controller = self.new_controller(allowed)
        self.nodes = [JoinClient(JOB, key, SERVER.public, self.role) for key in nodes]
        self.said: list[bytes] = []
        self.wrong: list[str] = []
        for node in self.nodes:
            self.meet(node)

    def new_controller(self, allowed: AllowList, label: str = "desk:1") -> Admission:
        """A start of the controller."""
        return Admission(JOB, SERVER, allowed, label=label, now_s=self.now_s)

    def meet(self, node: JoinClient) -> None:
        """The node hears that the controller is there."""
        beacon = self.controller.beacon
        self.pass_on(node.receive_beacon(memoryview(beacon), 1, self.now_s), node)

    def pass_on(self, said: list[bytes], by: JoinClient | Admission) -> None:
        """All hear it, and answer."""
        queue = [(by, one) for one in said]
        while queue:
            speaker, data = queue.pop(0)
            self.said.append(data)
            for party in (self.controller, *self.nodes):
                if party is not speaker:
                    try:
                        queue += [(party, one) for one in party.receive(memoryview(data), self.now_s)]
                    except FrameError as error:
                        self.wrong.append(error.reason)

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        for party in (self.controller, *self.nodes):
            self.pass_on(party.tick(self.now_s), party)

    def tell(self, topic: str, text: bytes, to: int | None = None) -> bytes:
        sealed = self.controller.seal(topic, (text,), to)
        assert sealed is not None
        return sealed.octets()

    def heard(self, node: JoinClient, topic: str, data: bytes) -> str:
        """What a node makes of it: the text, a reason why not, or nothing."""
        try:
            plain = node.open(topic, data, self.now_s)
        except FrameError as error:
            return error.reason
        return "not for it" if plain is None else bytes(plain).decode()

    def taken(self, topic: str, data: bytes) -> str:
        """What the controller makes of it: who said what."""
        try:
            opened = self.controller.open(topic, data, self.now_s)
        except FrameError as error:
            return error.reason
        return "its own" if opened is None else f"{opened[1].name}: {bytes(opened[0]).decode()}"


RANKS = AllowList((Entry(ONE.name, "worker", ONE.public, ((1, 2),)), Entry(TWO.name, "worker", TWO.public, ((3, 3),))))


class RankHall(Hall):
    """The same for a job of ranks, where all seal with one key."""

    role = "worker"

    def __init__(self, *nodes: NodeKey, allowed: AllowList = RANKS) -> None:
        self._seals: dict[bytes, SessionCipher] = {}
        self._decryptors: dict[tuple[bytes, str], StreamDecryptor] = {}
        super().__init__(*nodes, allowed=allowed)

    def new_controller(self, allowed: AllowList, label: str = "desk:1") -> Admission:
        return Admission(JOB, SERVER, allowed, label=label, now_s=self.now_s, ranks=RankKeys(JOB))

    def keys(self, party: JoinClient | Admission) -> RankKeys:
        assert party.ranks is not None
        return party.ranks

    def seal_of(self, party: JoinClient | Admission) -> SessionCipher:
        """What seals and opens for one of them; what is removed at it is removed there."""
        if party.session not in self._seals:
            made = self._seals[party.session] = SessionCipher(self.keys(party), party.session)
            party.on_removed = lambda sessions: [made.peers.remove(one) for one in sessions] and None
        return self._seals[party.session]

    def says(self, party: JoinClient | Admission, text: bytes, topic: str = CONTROL) -> bytes:
        return self.seal_of(party).encryptor(topic).seal((text,))

    def hears(self, party: JoinClient | Admission, data: bytes, topic: str = CONTROL) -> str:
        """What one of them makes of it: the text, or a reason why not."""
        seal = self.seal_of(party)
        decryptor = self._decryptors.setdefault((party.session, topic), seal.decryptor(topic, ignores_own=True))
        try:
            return bytes(decryptor.open(data).data).decode()
        except FrameError as error:
            return error.reason


def everybody_hears_everybody(hall: RankHall) -> None:
    parties = [hall.controller, *hall.nodes]
    for speaker in parties:
        said = hall.says(speaker, b"word")
        assert [hall.hears(party, said) for party in parties if party is not speaker] == ["word"] * len(hall.nodes)
        assert hall.hears(speaker, said) == "own"


def upload(node: JoinClient, text: bytes, topic: str = UPDATES) -> bytes:
    sealed = node.seal(topic, (text,))
    assert sealed is not None
    return sealed.octets()
