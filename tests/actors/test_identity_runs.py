"""Federated runs of real processes in which every node has a key of its own."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from federation import NOBODY_DIES_S, Federation, Node
from identities import Identities
from outsider import Outsider

import gradbus
from gradbus.actors.federated.controller.rounds import CLIENT_LOST
from gradbus.models import NoopTask
from gradbus.runtime.errors import JobInUse
from gradbus.runtime.security import Security

pytestmark = pytest.mark.slow

TIMES = 5  # that a recording is said again
_ON_THE_BUS = {"shared_memory": False}  # so that all of it is on the bus
# No round without both clients: one that is not seen for a moment, because it stands still, changes no weights.
_RULES: dict[str, Any] = {"rounds": 3, "clients__num": 2, "clients__min": 2, "codec": "s4"}


@pytest.fixture
def known(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def start(federation: Federation, known: Identities, **rules: Any) -> list[Node]:
    """A controller and two clients."""
    return [
        federation.controller(**_RULES | rules, security=known.security("server")),
        *(federation.client(number, security=known.security(f"robot-{number}")) for number in range(2)),
    ]


def finish(nodes: list[Node]) -> list[int]:
    """The checksums of the weights after each round, in which nobody was lost: another attempt at a round comes to the
    same weights, so they alone would not tell."""
    done = nodes[0].wait_for("done", timeout_s=60.0)
    assert [node.wait() for node in nodes] == [0] * len(nodes)
    for report in done["reports"]:
        assert (report["clients"], report["attempt"]) == ([0, 1], 1), str(report)
        assert CLIENT_LOST not in report["dropped"], str(report)
    return [report["weights_crc32"] for report in done["reports"]]


@functools.cache
def plain_weights(**rules: Any) -> list[int]:
    """Of the same run without any security."""
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S, network=_ON_THE_BUS) as federation:
        return finish([federation.controller(**_RULES | rules), federation.client(0), federation.client(1)])


@pytest.mark.parametrize("memory", [False, True], ids=["on the bus", "in memory"])
def test_a_run_of_known_nodes_comes_to_the_weights_of_an_open_one_and_an_outsider_reads_and_changes_nothing(
    known: Identities, memory: bool
) -> None:
    domain, job = new_domain(), f"known-nodes-{os.getpid()}"
    network = {"shared_memory": memory}
    with (
        Outsider(job, domain, echoes=True, lease_s=NOBODY_DIES_S) as outsider,
        Federation(domain=domain, job=job, silence_s=NOBODY_DIES_S, network=network) as federation,
    ):
        weights = finish(start(federation, known))
    assert weights == plain_weights()
    assert outsider.in_clear == []
    assert {name for name, _ in outsider.heard} >= {"train/train_cmd_sealed", "train/control/clients"}


def test_differences_on_the_way_down_are_signed_as_well(known: Identities) -> None:
    rules = {"downlink_codec": "sq8"}
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S, network=_ON_THE_BUS) as federation:
        assert finish(start(federation, known, **rules)) == plain_weights(**rules)


def test_a_run_of_known_nodes_ends_without_a_warning_about_readers(known: Identities) -> None:
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S) as federation:
        slow = {"train_s": 0.7}  # so that all are there for longer than foreign readers are left alone
        nodes = [
            federation.controller(**_RULES, security=known.security("server")),
            *(federation.client(one, security=known.security(f"robot-{one}"), **slow) for one in range(2)),
        ]
        finish(nodes)
    assert [event for node in nodes for event in node.all("warning") if "readers" in event["text"]] == []


def test_strangers_are_told_why_they_are_kept_out_and_the_run_does_not_notice(known: Identities) -> None:
    known.new("stranger")
    known.allow(known.new("watcher"), "observer")
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S, network=_ON_THE_BUS) as federation:
        controller = federation.controller(**_RULES, security=known.security("server"))
        controller.wait_for("started")
        short = {"controller_timeout_s": 4.0}  # in which it is to hear the controller
        stranger = federation.client(2, security=known.security("stranger"))
        watcher = federation.client(3, security=known.security("watcher"))
        misled = federation.client(0, security=known.security("robot-0", pinned="stranger"), client=short)
        errors = [node.wait_for("error") for node in (stranger, watcher, misled)]
        clients = [federation.client(number, security=known.security(f"robot-{number}")) for number in range(2)]
        weights = finish([controller, *clients])
    assert [error["kind"] for error in errors] == ["JoinRefused", "JoinRefused", "BarrierTimeout"]
    assert "stranger is not on the allow list of the controller" in errors[0]["text"]
    assert "watcher is on the allow list as observer, and wants to join as client" in errors[1]["text"]
    assert "compare bus.controller_key with 'gradbus keys show'" in errors[2]["text"]
    refused = {event["node"]: event["reason"] for event in controller.all("warning") if event["text"] == "join refused"}
    assert set(refused) == {"stranger", "watcher", "robot-0"}
    assert "expects another key of the controller" in refused["robot-0"]
    assert weights == plain_weights()


def test_clients_come_back_by_themselves_to_a_controller_that_was_killed_and_a_recording_of_before_is_worth_nothing(
    known: Identities, tmp_path: Path
) -> None:
    domain, job, gate = new_domain(), f"restarted-{os.getpid()}", tmp_path / "gate"
    rules = {"checkpoint__dir": str(tmp_path / "state")}
    with (
        Outsider(job, domain, lease_s=NOBODY_DIES_S, patience_s=5.0) as outsider,
        Federation(domain=domain, job=job, silence_s=NOBODY_DIES_S, network=_ON_THE_BUS) as federation,
    ):
        mortal = {"lease_s": 1.0, **_ON_THE_BUS}
        controller = federation.controller(**_RULES | rules, security=known.security("server"), network=mortal)
        clients = [
            federation.client(number, security=known.security(f"robot-{number}"), hold={"2": str(gate)})
            for number in range(2)
        ]
        for client in clients:
            client.wait_for("training", round=2)
        controller.signal(signal.SIGKILL)
        controller.wait()
        recorded = list(outsider.heard)
        for_controller = sum(name in ("train/client_update", "train/control/controller") for name, _ in recorded)
        outsider.wait_for_nobody()  # else it would be the one that was killed that hears it
        again = federation.controller(**_RULES | rules, security=known.security("server"))
        outsider.wait_for_readers(1)
        for _ in range(TIMES):
            outsider.say_all(recorded)
        gate.touch()
        weights = finish([again, *clients])
        done = again.all("done")[0]
    assert weights == plain_weights()
    assert for_controller > 10
    # Most of it, as readers of one topic may be found later than those of another. It is more by far than what the
    # clients still say to the controller before.
    assert done["rejected"]["no key"] >= (TIMES - 1) * for_controller


def test_who_is_taken_off_the_list_ends_with_the_reason_and_the_others_go_on(known: Identities, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    rules = {"rounds": 3, "clients__num": 2, "clients__min": 1, "codec": "s4"}
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S, network=_ON_THE_BUS) as federation:
        controller = federation.controller(**rules, security=known.security("server"))
        stays = federation.client(0, security=known.security("robot-0"), hold={"2": str(gate)})
        goes = federation.client(1, security=known.security("robot-1"))
        stays.wait_for("training", round=2)
        known.remove("robot-1")
        error = goes.wait_for("error")
        gate.touch()
        done = controller.wait_for("done", timeout_s=60.0)
        assert [node.wait() for node in (controller, stays)] == [0, 0]
    assert error["kind"] == "JoinRefused"
    assert "robot-1 has been taken off the allow list" in error["text"]
    assert done["reports"][-1]["clients"] == [0]


def test_a_second_controller_with_the_same_key_is_told_who_holds_the_job(known: Identities, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S, network=_ON_THE_BUS) as federation:
        first = federation.controller(**_RULES, security=known.security("server"))
        clients = [
            federation.client(number, security=known.security(f"robot-{number}"), hold={"1": str(gate)})
            for number in range(2)
        ]
        clients[0].wait_for("training", round=1)
        error = federation.controller(**_RULES, security=known.security("server")).wait_for("error")
        assert error["kind"] == "JobInUse"
        assert re.search(rf"the job is held by the controller \S+:{first.process.pid}\. Stop that one", error["text"])
        gate.touch()
        assert finish([first, *clients]) == plain_weights()


def test_a_controller_that_is_refused_after_it_has_claimed_the_job_ends_and_says_who_holds_it(
    known: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing_heard(*_: Any, **__: Any) -> None:
        """As on a machine that is so slow that the answer comes later."""

    monkeypatch.setattr("gradbus.actors.federated.controller.controller.claim_job", nothing_heard)
    said = {k: Path(v) if k.endswith("_file") else v for k, v in known.security("server").items()}
    place: dict[str, Any] = {
        "job": f"late-answer-{os.getpid()}",
        "domain": new_domain(),
        "security": Security(**said),
    }

    async def main() -> None:
        async with asyncio.timeout(20), gradbus.connect(**place), gradbus.connect(**place) as bus:
            config = gradbus.FederatedConfig(rounds=1, clients={"heartbeat_s": 0.1})
            with pytest.raises(JobInUse, match=r"the job is held by the controller \S+\. Stop that one first"):
                await gradbus.Controller(bus, NoopTask(100), config).run()

    asyncio.run(main())


def test_a_key_that_is_not_the_controllers_cannot_lead_a_job_nor_the_controllers_be_a_client(
    known: Identities,
) -> None:
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S, network=_ON_THE_BUS) as federation:
        leads = federation.controller(**_RULES, security=known.security("robot-0")).wait_for("error")
        follows = federation.client(0, security=known.security("server")).wait_for("error")
    assert leads["kind"] == follows["kind"] == "ConfigError"
    assert "its key is not bus.controller_key" in leads["text"]
    assert "a client needs a key_file of its own" in follows["text"]
