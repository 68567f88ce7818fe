"""Who sends a Hello: names, ids, and both, with and without nodes that prove who they are."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
from typing import Any

import numpy as np
import pytest
from dds_domains import new_domain

import gradbus
from gradbus.actors.federated import client_names
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client_names import ClientNames, checked_id, names_of_rows
from gradbus.actors.federated.controller.naming import ClientNaming, NamedSender
from gradbus.models import NoopTask
from gradbus.runtime.errors import ConfigError, FrameError
from gradbus.runtime.names import check_name
from gradbus.runtime.transport.access_policy import ClientNode
from gradbus.runtime.wire import control
from gradbus.runtime.wire.control import PROTOCOL, Hello
from gradbus.runtime.wire.frames import UNASSIGNED
from gradbus.runtime.wire.messages import Identity

HELLO = Hello(PROTOCOL, 10, 20, False, 0, "idle", -1, -1, "host (process 7)", -1)
START_S = 100.0


class Scene:
    """A controller's names, with clients that are here without one."""

    def __init__(self, *, num_clients: int | None = None, node: ClientNode | None = None) -> None:
        self.names = ClientNames()
        self.here: set[int] = set()
        self.node = node
        self.naming = ClientNaming(
            self.names,
            num_clients=num_clients,
            is_taken=lambda one: one in self.here,
            node_of=lambda client_id, incarnation: self.node,
            assigns_from_s=START_S,
        )
        self._incarnation = 0

    def hello(self, client_id: int = UNASSIGNED, *, now_s: float = START_S, **said: Any) -> NamedSender:
        self._incarnation += 1
        sender, hello = Identity(client_id, self._incarnation), dataclasses.replace(HELLO, **said)
        found = self.naming.resolve(sender, hello, now_s)
        if not found.refusal and not found.waits:
            self.naming.keep(sender, hello, found)
        return found


def test_a_name_gets_the_lowest_free_id_and_keeps_it() -> None:
    scene = Scene()
    scene.here = {0, 2}
    assert [scene.hello(name=name).client_id for name in ("b", "a", "c")] == [1, 3, 4]
    scene.here.clear()  # clients with ids of their own have left
    assert [scene.hello(name=name).client_id for name in ("c", "b", "d")] == [4, 1, 0]
    restarted = Scene()
    restarted.names.load_state(scene.names.state())
    assert [restarted.hello(name=name, now_s=0.0).client_id for name in ("a", "b", "c", "d")] == [3, 1, 4, 0]


def test_a_new_name_waits_until_clients_of_an_earlier_controller_have_said_their_ids() -> None:
    scene = Scene()
    assert scene.hello(name="new", now_s=START_S - 0.1).waits
    assert scene.hello(0, name="old", now_s=START_S - 0.1) == NamedSender(0, "old")
    assert scene.hello(name="new").client_id == 1


def test_more_names_than_ids_are_refused_with_the_names_that_have_them() -> None:
    scene = Scene(num_clients=2)
    assert [scene.hello(name=name).client_id for name in ("a", "b")] == [0, 1]
    scene.here = {0, 1}
    why = scene.hello(name="c").refusal
    assert "the run has 2 ids for clients with names (federated.clients.num" in why
    assert "the named ones are a, b: start it with its earlier name" in why
    assert scene.hello(name="a").client_id == 0


def test_an_id_and_a_name_belong_together_and_neither_goes_with_another() -> None:
    scene = Scene()
    assert scene.hello(5, name="a") == NamedSender(5, "a")
    assert scene.hello(name="a") == NamedSender(5, "a")
    assert "belongs to client 5: leave the id 6 out" in scene.hello(6, name="a").refusal
    assert "client 5 is the one named 'a'" in scene.hello(5, name="b").refusal
    assert "client 5 is the one named 'a': start it with that name" in scene.hello(5).refusal
    assert scene.hello(6) == NamedSender(6)
    assert scene.hello(6, name="b") == NamedSender(6, "b")  # an id gets a name later


def test_a_client_with_neither_is_refused() -> None:
    assert "neither an id nor a name" in Scene().hello().refusal


def test_a_host_names_its_range_and_takes_no_id_of_a_named_client() -> None:
    scene = Scene()
    assert scene.hello(name="a").client_id == 0
    assert "client 0 is the one named 'a'" in scene.hello(1 << 31, ids="0-9", name="lab").refusal
    assert not scene.hello(1 << 31 | 1, ids="1-9", name="lab").refusal
    assert [scene.names.name_of(one) for one in (0, 1, 9, 10)] == ["a", "lab.1", "lab.9", ""]
    assert scene.names.label(9) == "9 (lab.9)"
    assert "belongs to the host 'lab'" in scene.hello(20, name="lab.20").refusal
    assert "belongs to the host of clients 1-9" in scene.hello(1 << 31 | 30, ids="30-39", name="lab").refusal
    assert not scene.hello(1 << 31 | 1, ids="1-9", name="lab").refusal  # the next start of it
    assert scene.names.rows() == [("0", "a"), ("1-9", "lab")]
    assert scene.names.rows([0, 7]) == [("0", "a"), ("7", "lab.7")]
    rows = [{"clients": ids, "name": name} for ids, name in scene.names.rows()]
    assert names_of_rows(rows, 1000) == {i: scene.names.name_of(i) for i in range(10)}


ONE, SEVERAL = ClientNode("robot", ((3, 3),)), ClientNode("robot", ((4, 6), (9, 9)))


@pytest.mark.parametrize(
    ("node", "sender", "name", "found"),
    [
        (ONE, 3, "", (3, "robot")),
        (ONE, 3, "robot", (3, "robot")),
        (ONE, UNASSIGNED, "", (3, "robot")),
        (ONE, UNASSIGNED, "robot.arm", (3, "robot.arm")),
        (SEVERAL, 5, "", (5, "robot.5")),
        (SEVERAL, 5, "robot", (5, "robot.5")),
        (SEVERAL, 5, "robot.arm", (5, "robot.arm")),
        (SEVERAL, UNASSIGNED, "robot.9", (9, "robot.9")),
        (SEVERAL, UNASSIGNED, "robot.arm", (4, "robot.arm")),
    ],
)
def test_with_identity_the_allow_list_names_a_client(
    node: ClientNode, sender: int, name: str, found: tuple[int, str]
) -> None:
    assert Scene(node=node).hello(sender, name=name, now_s=0.0) == NamedSender(*found)


@pytest.mark.parametrize(
    ("node", "sender", "name", "words"),
    [
        (ONE, 3, "arm", "it calls itself 'arm', and its key is that of robot"),
        (ONE, UNASSIGNED, "robot2", "begins with 'robot.'"),
        (SEVERAL, 5, "robot.9", "says client 9, and its id is 5"),
        (SEVERAL, UNASSIGNED, "", "as in robot.4"),
        (SEVERAL, UNASSIGNED, "robot", "may have several clients"),
        (ClientNode("", ()), UNASSIGNED, "", "no ids of clients"),
        (ClientNode("", ()), 3, "", "taken off the allow list"),  # between the decryption of its Hello and this
        (ClientNode("", ()), 3, "robot", "taken off the allow list"),
    ],
)
def test_with_identity_other_names_are_refused(node: ClientNode, sender: int, name: str, words: str) -> None:
    assert words in Scene(node=node).hello(sender, name=name).refusal


def test_names_that_nodes_give_their_clients_are_kept_and_follow_the_allow_list() -> None:
    scene = Scene(node=SEVERAL)
    assert scene.hello(name="robot.arm").client_id == 4
    assert scene.hello(name="robot.leg").client_id == 5
    assert scene.hello(name="robot.arm").client_id == 4
    assert scene.hello(4) == NamedSender(4, "robot.arm")
    assert "belongs to client 4" in scene.hello(6, name="robot.arm").refusal
    assert [scene.hello(name=f"robot.{x}").client_id for x in "ab"] == [6, 9]
    scene.here = {4, 5, 6, 9}
    assert "all ids that the allow list gives robot are taken" in scene.hello(name="robot.c").refusal
    scene.node = ClientNode("cart", ((4, 4),))
    assert scene.hello(4) == NamedSender(4, "cart")
    assert scene.names.id_of("robot.arm") is None


@pytest.mark.parametrize("name", ["-a", ".a", "a b", "a\n", "\x1b[2J", "x" * 65, "\u00e4", "a/b"])
def test_a_name_from_the_wire_that_is_none_never_becomes_a_message(name: str) -> None:
    body = control.encode(HELLO).replace(b"\xa4name\xa0", b"\xa4name" + packed(name))
    with pytest.raises(FrameError, match="name"):
        control.decode(body)


def packed(text: str) -> bytes:
    import msgpack

    return bytes(msgpack.packb(text))


def test_names_of_files_are_bounded_and_what_is_none_is_left_out() -> None:
    rows: list[Any] = [
        {"clients": "0", "name": "a"},
        {"clients": "1", "name": "\x1b"},
        7,
        {"name": "b"},
        {"clients": "x", "name": "c"},
        {"clients": "5-2147483646", "name": "lab"},
    ]
    assert names_of_rows(rows, 3) == {0: "a", 5: "lab.5", 6: "lab.6"}


def test_integers_of_numpy_are_ids_and_texts_are_named() -> None:
    assert (checked_id(np.int64(0)), type(checked_id(np.int64(3)))) == (0, int)
    for wrong in (-1, 1 << 31):
        with pytest.raises(ValueError, match="2\\^31 - 2"):
            checked_id(wrong)
    with pytest.raises(TypeError, match="client_id is a number, got 'site-1': a name is given as name='site-1'"):
        checked_id("site-1")
    with pytest.raises(TypeError, match="client_id is an integer, got float"):
        checked_id(0.0)


def test_a_client_without_id_and_name_or_with_a_name_that_is_none_cannot_be_made() -> None:
    async def main() -> None:
        async with gradbus.connect(f"naming-{os.getpid()}", domain=new_domain()) as bus:
            with pytest.raises(TypeError, match="needs client_id= or name="):
                Client(bus, NoopTask(5))
            with pytest.raises(ConfigError, match="expected 1 to 64 of"):
                Client(bus, NoopTask(5), name="a b")

    asyncio.run(main())


@pytest.mark.parametrize("client_id", [0x7FFF_FFFF, 0x8000_0000, 0x8000_0005, 0xFFFF_FFFD])
def test_an_id_that_no_client_can_have_is_refused_and_leaves_no_name(client_id: int) -> None:
    """A checkpoint with such an id could not be read again, and a message that names it could not be sent."""
    for name in ("a", ""):
        scene = Scene()
        assert f"sends as client {client_id}: expected an id from 0 to" in scene.hello(client_id, name=name).refusal
        assert not scene.names.state()


def test_one_name_more_than_there_is_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_names, "MAX_NAMED_CLIENTS", 2)
    scene = Scene()
    assert [scene.hello(name=name).client_id for name in ("a", "b")] == [0, 1]
    assert "as many as it can have: start it with an id and without a name" in scene.hello(7, name="c").refusal
    assert scene.hello(7) == NamedSender(7)
    assert scene.hello(name="a") == NamedSender(0, "a")
    scene.node = SEVERAL
    assert "as many as it can have" in scene.hello(5).refusal


def test_a_name_that_says_an_id_which_its_node_does_not_have_is_refused() -> None:
    """It would be shown next to another id, as in 4 (robot.7)."""
    for node, name in ((SEVERAL, "robot.7"), (ONE, "robot.9")):
        for sender in (UNASSIGNED, node.ids[0][0]):
            why = Scene(node=node).hello(sender, name=name).refusal
            assert f"its name {name!r} says client {name[-1]}: the allow list gives its node no such id" in why


def test_a_heartbeat_of_a_host_changes_no_order_of_the_names() -> None:
    scene = Scene()
    for ids, name in (("0-9", "a"), ("20-29", "b"), ("0-9", "a")):
        assert not scene.hello(1 << 31 | int(ids.split("-")[0]), ids=ids, name=name).refusal
    assert scene.names.rows() == [("0-9", "a"), ("20-29", "b")]


@pytest.mark.parametrize(
    "row",
    [
        None,
        7,
        "a",
        [],
        ["name", "clients"],
        {},
        {"name": "a"},
        {"name": "a", "clients": ["0"]},
        {"name": "a", "clients": {"0": 1}},
        {"name": "a", "clients": 5},
        {"name": "a", "clients": "5-1"},
        {"name": "a", "clients": "-1"},
        {"name": "\x1b[2J", "clients": "0"},
        {"name": "a\n", "clients": "0"},
        {"name": "\u202ea", "clients": "0"},
        {"name": 7, "clients": "0"},
        {"name": ["a"], "clients": "0"},
        {"name": "x" * 65, "clients": "0"},
        {"name": "../a", "clients": "0"},
        {"name": "s\u0456te", "clients": "0"},
    ],
)
def test_a_row_of_a_damaged_file_of_names_is_left_out(row: Any) -> None:
    assert names_of_rows([row, {"name": "site-1", "clients": "3"}], 100) == {3: "site-1"}


def test_a_file_of_names_with_large_or_repeated_ranges_takes_no_longer_than_the_names_that_are_wanted() -> None:
    whole = {"name": "lab", "clients": "0-2147483647"}
    assert names_of_rows([whole], 3) == {0: "lab.0", 1: "lab.1", 2: "lab.2"}
    rows = itertools.repeat({"name": "lab", "clients": "0-98"}, 10**12)  # a file of these would be read for days
    assert len(names_of_rows(rows, 100)) == 99


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("s\u0456te-1", ConfigError, r"name 's\\u0456te-1': expected"),  # a Cyrillic letter that looks like an i
        ("\u202ea", ConfigError, r"'\\u202ea'"),
        ("\x1b[2J", ConfigError, r"'\\x1b\[2J'"),
        ("x" * 10_000, ConfigError, r"x' \(10,000 characters\): expected 1 to 64"),
        (7, TypeError, r"a name is a text, got 7 \(int\): write it as in name='site-1'"),
        (b"site-1", TypeError, r"got b'site-1' \(bytes\)"),
    ],
)
def test_what_is_no_name_is_shown_in_ascii_and_in_one_short_line(name: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        check_name(name)
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 300


def test_a_name_that_was_mistyped_gives_up_its_id_where_no_other_is_left() -> None:
    scene = Scene(num_clients=2)
    assert [scene.hello(name=name).client_id for name in ("siet-1", "site-2")] == [0, 1]
    scene.here = {1}  # the first one was stopped before the first round
    assert scene.hello(name="site-1") == NamedSender(0, "site-1")
    assert scene.names.id_of("siet-1") is None
    scene.here = {0, 1}
    assert "the named ones are site-1, site-2" in scene.hello(name="siet-1").refusal


def test_a_name_of_an_earlier_start_of_the_controller_keeps_its_id() -> None:
    """Its client may still train, and hold its interpreter: it says its id when it is done."""
    scene, restarted = Scene(num_clients=1), Scene(num_clients=1)
    assert scene.hello(name="a").client_id == 0
    restarted.names.load_state(scene.names.state())
    assert "the named ones are a" in restarted.hello(name="b").refusal


def test_a_name_is_found_also_where_it_is_that_of_a_client_of_a_host() -> None:
    scene = Scene()
    assert scene.hello(name="site-1").client_id == 0
    assert not scene.hello(1 << 31 | 5, ids="5-9", name="lab").refusal
    assert [scene.names.find(name) for name in ("site-1", "lab.5", "lab.9")] == [0, 5, 9]
    for wrong in ("lab.4", "lab.05", "lab.10", "lab.", ".5", "site-2", "", "\u0665"):
        with pytest.raises(ValueError, match="no client of this run is named"):
            scene.names.find(wrong)
    with pytest.raises(ValueError, match=r"'lab' is a host: name its clients, as in lab\.5"):
        scene.names.find("lab")
    with pytest.raises(ValueError, match="Of 0 names: none"):
        ClientNames().find("a")


def test_with_identity_a_name_is_of_one_node_also_where_another_one_is_called_alike() -> None:
    """Else a node could call its client as another node is called, and reports and orders would mistake them."""
    nodes = {"robot", "robot.arm", "robot.5"}
    robot, arm = (
        ClientNode(name, ids, nodes.__contains__) for name, ids in (("robot", ((3, 5),)), ("robot.arm", ((9, 9),)))
    )
    scene = Scene(node=robot)
    for name in ("robot.arm", "robot.arm.left", "robot.arm."):
        why = scene.hello(name=name).refusal
        assert "belongs to the node robot.arm of the allow list, and its key is that of robot: give it another" in why
    assert "belongs to the node robot.5" in scene.hello(5).refusal
    assert scene.hello(name="robot.arms") == NamedSender(3, "robot.arms")
    assert scene.hello(4) == NamedSender(4, "robot.4")
    scene.node = arm
    assert scene.hello() == NamedSender(9, "robot.arm")
    assert scene.hello(name="robot.arm.left") == NamedSender(9, "robot.arm.left")


def test_a_new_name_gets_no_id_of_a_host_that_is_away_unless_no_other_is_left() -> None:
    scene = Scene(num_clients=4)
    assert not scene.hello(1 << 31, ids="0-2", name="lab").refusal
    assert scene.hello(name="a") == NamedSender(3, "a")
    scene.here = {0, 1, 2, 3}
    assert "ids for clients with names" in scene.hello(name="b").refusal
    scene.here = {3}
    assert scene.hello(name="b") == NamedSender(0, "b")
    assert [scene.names.name_of(one) for one in range(4)] == ["b", "lab.1", "lab.2", "a"]
