"""Any sequence of Hellos, deaths and rounds leaves names of one client each, and a checkpoint that can be read."""

from __future__ import annotations

import dataclasses
import random

import pytest
from pydantic import TypeAdapter

from gradbus.actors.federated.client_names import ClientNames, Pair, json_rows, names_of_rows
from gradbus.actors.federated.controller.clients import FIRST_HOST, ClientRegistry, ExpectedModel, HelloAnswer
from gradbus.actors.federated.controller.naming import ClientNaming
from gradbus.runtime.transport.access_policy import ClientNode
from gradbus.runtime.wire.control import PROTOCOL, Hello
from gradbus.runtime.wire.frames import UNASSIGNED
from gradbus.runtime.wire.messages import Identity

HELLO = Hello(PROTOCOL, 10, 20, True, 1, "idle", -1, -1, "host (process 7)", 1)
NAMES = ["", "", "a", "b", "lab", "lab.1", "7", "robot", "robot.arm", "robot.0", "robot.x", "cart", "cart.5", "cart.9"]
NODES = {"robot": ((0, 1),), "robot.arm": ((2, 2),), "cart": ((3, 3), (5, 6))}
IDS = range(8)
SAVED = TypeAdapter(list[Pair])


class Play:
    """A controller, and processes that say anything."""

    def __init__(self, seed: int, *, has_nodes: bool) -> None:
        self.draw = random.Random(seed)
        self.has_nodes = has_nodes
        self.owners: dict[int, str] = {}  # node of each incarnation
        self.counted: set[int] = set()
        self.names = ClientNames()
        self.now_s, self.number = 0.0, 0
        self.registry = ClientRegistry(ExpectedModel(10, 20), session=1, dead_after_s=3.0, duplicate_after_s=1.0)
        self.naming = ClientNaming(
            self.names,
            num_clients=self.draw.choice([None, 3, 5]),
            is_taken=self.is_taken,
            node_of=self.node_of,
            assigns_from_s=0.0,
        )

    def is_taken(self, client_id: int) -> bool:
        return client_id in self.counted or self.registry.incarnation_of(client_id) is not None

    def node_of(self, client_id: int, incarnation: int) -> ClientNode | None:
        if not self.has_nodes:
            return None
        name = self.owners[incarnation]
        return ClientNode(name, NODES[name], NODES.__contains__)

    def step(self) -> None:
        self.now_s, self.number, chance = (
            self.now_s + self.draw.choice([0.1, 0.5, 2, 4]),
            self.number + 1,
            self.draw.random(),
        )
        if chance < 0.15 and len(self.registry):
            gone = self.draw.choice(list(self.registry))
            self.registry.remove(gone.client_id, gone.incarnation)
        elif chance < 0.2:
            self.counted.update(one.client_id for one in self.registry if self.draw.random() < 0.3)
        else:
            self.hello()

    def hello(self) -> None:
        draw, incarnation = self.draw, self.draw.randrange(1, 12)
        self.owners.setdefault(incarnation, draw.choice(list(NODES)))
        sender = Identity(
            draw.choice([UNASSIGNED, UNASSIGNED, draw.randrange(6), 0x7FFF_FFFF, 0x8000_0003]), incarnation
        )
        hello = dataclasses.replace(HELLO, name=draw.choice(NAMES))
        if not self.has_nodes and draw.random() < 0.1:
            first = draw.randrange(5)
            sender = Identity(FIRST_HOST | first, incarnation)
            hello = dataclasses.replace(hello, ids=f"{first}-{first + draw.randrange(1, 3)}")
        own = NODES[self.owners[incarnation]]
        if self.has_nodes and sender.sender != UNASSIGNED and not any(a <= sender.sender <= b for a, b in own):
            return  # its frames do not arrive
        found = self.naming.resolve(sender, hello, self.now_s)
        if found.refusal:
            return
        before = self.names.id_of(found.name)
        if hello.ids:
            answer, _ = self.registry.answer_host_hello(
                sender, hello, self.number, now_s=self.now_s, next_round=1, out_until=lambda client_id: 0
            )
        else:
            client = Identity(found.client_id, incarnation)
            answer, _ = self.registry.answer_hello(client, hello, self.number, now_s=self.now_s, next_round=1)
        known = sender.sender if hello.ids else found.client_id
        if answer is HelloAnswer.REFUSE or self.registry.get(known, incarnation) is None:
            return
        self.naming.keep(sender, hello, found)
        if found.name and not hello.ids:
            assert (self.names.id_of(found.name), self.names.own_name_of(known)) == (known, found.name)
            assert self.has_nodes or before in (None, known), "a name keeps its id"

    def check(self) -> None:
        saved = self.names.state()
        SAVED.validate_python(SAVED.dump_python(saved))
        restored = ClientNames()
        restored.load_state(saved)
        assert dict(restored.state()) == dict(saved)
        shown = {one: name for one in IDS if (name := self.names.name_of(one))}
        assert len(set(shown.values())) == len(shown), "two clients have one name"
        assert {name: self.names.find(name) for name in shown.values()} == {name: one for one, name in shown.items()}
        in_file = names_of_rows(json_rows(self.names), 100)
        assert {one: name for one, name in in_file.items() if one in IDS} == shown


@pytest.mark.parametrize("has_nodes", [False, True])
def test_names_are_of_one_client_each_whatever_arrives(has_nodes: bool) -> None:
    for seed in range(30):
        play = Play(seed, has_nodes=has_nodes)
        for _ in range(150):
            play.step()
            play.check()
