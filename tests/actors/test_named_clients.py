"""Clients by name, as real processes over the bus: the same ids, and so the same data, whoever restarts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from federation import NOBODY_DIES_S, Federation, Node, finish
from identities import Identities

RULES: dict[str, Any] = {"rounds": 3, "clients__num": 3, "clients__min": 3}
NAMES = ("site-1", "site-2", "site-3")


@pytest.fixture
def federation() -> Any:
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S) as federation:
        yield federation


def id_of(node: Node) -> int:
    """The id that a client's task got."""
    return int(node.wait_for("prepare")["client"])


def test_three_clients_by_name_one_killed_and_restarted_have_the_same_ids(
    federation: Federation, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    controller = federation.controller(**RULES)
    clients = {name: federation.client(name=name, hold={"2": gate}) for name in NAMES}
    ids = {name: id_of(node) for name, node in clients.items()}
    assert sorted(ids.values()) == [0, 1, 2]
    clients["site-2"].wait_for("training", round=2)
    clients["site-2"].signal(signal.SIGKILL)
    assert clients["site-2"].wait() == -signal.SIGKILL
    clients["site-2"] = federation.client(name="site-2")  # long before any lease ends: the kernel has told
    assert id_of(clients["site-2"]) == ids["site-2"]
    Path(gate).touch()
    reports = finish(controller, *clients.values())
    assert [report["clients"] for report in reports][::2] == [[0, 1, 2]] * 2
    for name, node in clients.items():
        assert node.all("named") == [{"event": "named", "client": ids[name], "name": name}]


def test_a_second_process_with_the_name_of_a_live_one_is_refused_and_the_first_stays(
    federation: Federation, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    controller = federation.controller(**{**RULES, "clients__num": 1, "clients__min": 1}, duplicate_after_s=1.0)
    first = federation.client(name="site-1", hold={"1": gate})
    first.wait_for("training", round=1)
    second = federation.client(name="site-1")
    error = second.wait_for("error")
    assert error["kind"] == "JoinRefused"
    assert "the name 'site-1' is in use by" in error["text"]
    assert "(client 0): give each its own" in error["text"]
    Path(gate).touch()
    assert [report["clients"] for report in finish(controller, first)] == [[0]] * 3
    assert second.wait() == 3


def test_ids_and_names_take_part_together_and_more_names_than_ids_are_refused(
    federation: Federation, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    controller = federation.controller(**RULES)
    numbered = federation.client(0, hold={"1": gate})
    assert id_of(numbered) == 0
    both = federation.client(2, name="both", hold={"1": gate})
    assert id_of(both) == 2
    named = federation.client(name="named", hold={"1": gate})
    assert id_of(named) == 1
    late = federation.client(name="late")
    assert "the run has 3 ids for clients with names" in late.wait_for("error")["text"]
    other = federation.client(1)
    assert "client 1 is the one named 'named'" in other.wait_for("error")["text"]
    Path(gate).touch()
    assert [report["clients"] for report in finish(controller, numbered, both, named)] == [[0, 1, 2]] * 3
    assert [node.wait() for node in (late, other)] == [3, 3]


@pytest.mark.parametrize("fail_at", ["before_command:1", "after_commit_before_publish:1"])
def test_a_controller_that_dies_before_or_after_its_first_checkpoint_finds_the_same_clients(
    federation: Federation, tmp_path: Path, fail_at: str
) -> None:
    """Before the first checkpoint with their names clients that live say their ids themselves; one that has died, too,
    gets what is left."""
    rules = RULES | {"checkpoint__dir": str(tmp_path / "state")}
    controller = federation.controller(**rules, fail_at=fail_at)
    clients = {name: federation.client(name=name) for name in NAMES}
    ids = {name: id_of(node) for name, node in clients.items()}
    assert controller.wait() == -signal.SIGKILL
    clients["site-3"].signal(signal.SIGKILL)
    clients["site-3"].wait()
    clients["site-3"] = federation.client(name="site-3")
    controller = federation.controller(**rules)
    assert id_of(clients["site-3"]) == ids["site-3"]
    finish(controller, *clients.values())
    saved = json.loads(max((tmp_path / "state").glob("round-*.json")).read_text())
    assert dict(saved["meta"]["client_names"] if "meta" in saved else saved["client_names"]) == ids


def test_a_site_has_a_name_next_to_its_number_and_gives_its_clients_no_ids_of_others(federation: Federation) -> None:
    job = f"{federation.job}-4"
    above = federation.controller(rounds=2, clients__num=1, clients__min=1, clients__kind="sites", history__dir=None)
    upstream = {"site": 4, "name": "berlin", "job": federation.job, "alone": False}
    below = federation.controller(
        job=job, upstream=upstream, clients__num=1, clients__min=1, round__timeout_s=20.0, history__dir=None
    )
    quiet: dict[str, Any] = {"job": job, "client": {"history": {"dir": None}}}
    refused = federation.client(name="ward-1", **quiet)
    assert "give 'ward-1' an id once, as in --id 3 --name ward-1" in refused.wait_for("error")["text"]
    client = federation.client(3, name="ward-1", **quiet)
    done = above.wait_for("done", timeout_s=60.0)
    assert [report["clients"] for report in done["reports"]] == [[4], [4]]
    assert done["names"] == [["4", "berlin"]]
    assert [node.wait() for node in (above, below, client, refused)] == [0, 0, 0, 3]


def test_names_of_the_allow_list_and_names_that_begin_with_them(tmp_path: Path) -> None:
    known = Identities(tmp_path, clients=1)
    known.allow(known.new("cart"), ids=((1, 2),))
    known.allow(known.new("arm"), ids=((3, 3),))
    with Federation(
        domain=new_domain(), job=f"named-{os.getpid()}", silence_s=NOBODY_DIES_S, network={"shared_memory": False}
    ) as federation:
        controller = federation.controller(**RULES, security=known.security("server"))
        clients = [
            federation.client(name="robot-0", security=known.security("robot-0")),
            federation.client(name="cart.2", security=known.security("cart")),
        ]
        wrong = federation.client(name="cart", security=known.security("arm"))
        assert "it calls itself 'cart', and its key is that of arm" in wrong.wait_for("error")["text"]
        assert wrong.wait() == 3
        clients.append(federation.client(security=known.security("arm")))  # with neither: its node has one id
        finish(controller, *clients)
        named = [(node.all("named")[0]["client"], node.all("named")[0]["name"]) for node in clients]
        assert named == [(0, "robot-0"), (2, "cart.2"), (3, "arm")]


@pytest.mark.parametrize(
    "rules",
    [
        {"mode": "asynchronous", "asynchronous__buffer": 3, "history__dir": None},
        {"secure_aggregation__enabled": True, "limits__cap_samples": 64},
        {"selection__name": "uniform", "selection__count": 3},
    ],
    ids=["asynchronous", "masked", "selected"],
)
def test_names_do_where_the_id_is_part_of_keys_masks_and_terms(federation: Federation, rules: dict[str, Any]) -> None:
    controller = federation.controller(**RULES | rules)
    clients = [federation.client(name=name) for name in NAMES]
    reports = finish(controller, *clients)
    assert {one for report in reports for one in report["clients"]} == {0, 1, 2}
