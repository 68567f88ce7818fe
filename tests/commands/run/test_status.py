"""``gradbus status``: who is waited for and why, in both kinds of jobs, without the job noticing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bus_helpers import lowest
from cyclonedds.qos import Policy
from dds_domains import new_domain
from identities import Identities
from patience import PATIENT_S
from ports import kept_ports

import gradbus
from gradbus.actors.federated.client import updates_out as update_sender
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.controller import uploads
from gradbus.actors.federated.controller.clients import FIRST_HOST
from gradbus.commands.buses import open_bus
from gradbus.commands.exit_codes import NoJob
from gradbus.commands.run import status
from gradbus.commands.run.status import Observer, lines_of, observe, settings_of
from gradbus.models import NoopTask
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.errors import ConfigError, NotReachable
from gradbus.runtime.security.job_key import new_job_key, write_secret_file
from gradbus.runtime.transport.channels import CHANNELS, BestEffort, ToClients, ToController
from gradbus.runtime.wire import control
from gradbus.runtime.wire.control import (
    PROTOCOL,
    Body,
    GroupHello,
    GroupLeave,
    GroupView,
    Hello,
    Leave,
    RankStatus,
    Status,
)
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Control, Identity, PeerGone


def hello(phase: str, phase_s: float = 0.0, round_id: int = 4) -> Hello:
    return Hello(PROTOCOL, 9, 9, True, 1, phase, round_id, 3, "host-a:77", 1, phase_s=phase_s)


def picture_of(*said: tuple[int, float, Body], now_s: float = 10.0) -> dict[str, Any]:
    observer = Observer()
    for sender, at_s, body in said:
        assert observer.take(Control(sender, 100 + sender, body), at_s)
    return observer.picture("cells", now_s)


STATUS = Status(
    5,
    4,
    "training",
    1,
    5,
    minimum=2,
    rounds=10,
    clients=5,
    round_s=12.34,
    remaining_s=287.6,
    awaited=[1, 2, 3, 9],
    silent_s=[0.1, 0.2, 2.2, 0.3],
    quarantined=[7],
    dropped={"stale": 3},
    last_s=1.5,
    bytes_up=9_600_000,
    bytes_down=4_800_000,
    accuracy=0.9876,
    epsilon=3.14159,
    epsilon_budget=8.0,
)


def test_each_client_that_is_waited_for_has_a_reason() -> None:
    picture = picture_of(
        (CONTROLLER, 9.9, STATUS),
        (0, 9.9, hello("idle")),
        (1, 9.9, hello("training", 12.3)),
        (2, 9.8, hello("uploading", 0.5)),
        (3, 9.0, hello("training", 3.0)),
        (7, 9.9, hello("idle")),
    )
    clients = {client["client"]: client.get("why") for client in picture["federated"]["clients"]}
    assert clients == {
        0: None,
        1: "trains since 12.3 s",
        2: "sends its update since 0.5 s",
        3: "silent since 2.2 s",
        7: "kept out for bad updates",
        9: "silent since 0.3 s",
    }
    assert lines_of(json.loads(json.dumps(picture))) == [
        "job cells",
        "training, round 4/10, 5 clients",
        "  updates 1/5 (min 2) after 12.3 s, 288 s until the deadline",
        "  last round 1.50 s, up 9.60 MB, down 4.80 MB, accuracy 98.76 %",
        "  privacy: epsilon 3.142 of 8 spent",
        "  not counted: stale 3",
        "  waiting for client 1: trains since 12.3 s [host-a:77]",
        "  waiting for client 2: sends its update since 0.5 s [host-a:77]",
        "  waiting for client 3: silent since 2.2 s [host-a:77]",
        "  waiting for client 9: silent since 0.3 s",
        "  clients that are not waited for: 0, 7",
        "  kept out for bad updates: 7",
    ]


def test_a_client_of_a_host_does_what_its_host_does_and_the_host_is_no_client() -> None:
    first = dataclasses.replace(hello("training", 12.3), ids="0,2-3,1000-2147483647")
    second = dataclasses.replace(hello("uploading", 0.5), ids="4-8,10-900")
    alone = hello("idle")
    picture = picture_of(
        (CONTROLLER, 9.9, STATUS), (FIRST_HOST, 9.9, first), (FIRST_HOST | 4, 9.9, second), (1, 9.9, alone)
    )
    clients = {client["client"]: client.get("why") for client in picture["federated"]["clients"]}
    assert clients == {
        1: "has not begun since 0.0 s",
        2: "trains since 12.3 s",
        3: "silent since 2.2 s",
        9: "silent since 0.3 s",
    }
    assert "clients that are not waited for" not in "".join(lines_of(picture))


def test_ranks_say_which_collective_waits_and_which_rank_has_sent_no_status() -> None:
    pulse = RankStatus(
        "world", 4, "host-a (process 7)", 30.0, 120, 1, 8.5, 10_000_000, 9_000_000, 2, "grad/0", 7.25, [2]
    )
    picture = picture_of(
        (0, 9.9, pulse),
        (1, 9.5, RankStatus("world", 4, "host-b", 30.0, 120, 1, lost=[3], dropped={"early": 2})),
        (2, 5.0, RankStatus("world", 4, "host-c", 25.0)),
    )
    assert lines_of(picture) == [
        "job cells",
        "group world: 3 of 4 ranks have sent their status",
        "  rank 0: waits in 'grad/0' since 7.2 s for ranks [2], epoch 2, step 120, 8.5 steps/s, sent 10.00 MB "
        "[host-a (process 7)]",
        "  rank 1: works, epoch 2, step 120, 0.0 steps/s, sent 0 B, has lost ranks [3], not used: early 2 [host-b]",
        "  rank 2: silent since 5.0 s, sent 0 B [host-c]",
        "  rank 3: no status received",
    ]


def test_ranks_of_a_large_group_speak_less_often_and_are_not_taken_for_silent() -> None:
    observer = Observer()
    observer.take(Control(0, 100, RankStatus("world", 640, "host-a", 30.0)), 0.0)
    assert observer.listen_s == pytest.approx(16.0)  # each speaks every 10 s
    (group,) = observer.picture("cells", 12.0)["groups"]
    assert group["ranks"][0]["state"] == "works"
    (group,) = observer.picture("cells", 40.0)["groups"]
    assert group["ranks"][0]["state"].startswith("silent since 40")


def test_who_leaves_or_dies_is_no_longer_shown_and_a_group_may_be_forming() -> None:
    observer = Observer()
    for sender, body in ((0, hello("idle")), (1, hello("idle")), (2, RankStatus("world", 3, "h", 1.0))):
        assert observer.take(Control(sender, 100 + sender, body), 1.0)
    assert observer.take(Control(0, 9, GroupHello("late", 2, 0, False, False, 0, "h", "", [])), 1.0)
    observer.take(Control(0, 100, Leave("done")), 1.0)
    observer.take(PeerGone(1, 101), 1.0)
    observer.take(Control(2, 102, GroupLeave("world", 1, True, "done", [])), 1.0)
    picture = observer.picture("cells", 2.0)
    assert lines_of(picture) == [
        "job cells",
        "group late: 1 of 2 ranks have sent their status",
        "  rank 0: waits for the group to form [h]",
        "  rank 1: no status received",
    ]


def test_of_an_elastic_group_it_is_said_who_takes_part_and_who_waits() -> None:
    old = GroupView("world", 3, 4, [0, 2], [1, 1], 0, 0, [], [], 0, False, False, False, False)
    new = dataclasses.replace(old, generation=5, numbers=[0, 2, 3], incarnations=[1, 1, 1])
    spare = dataclasses.replace(new, joining=True)
    picture = picture_of((0, 9.9, new), (2, 9.9, old), (7, 9.9, spare))
    assert picture["elastic"]["members"] == [0, 2, 3]
    assert lines_of(picture) == [
        "job cells",
        "elastic group world: generation 5, processes 0, 2, 3 take part; waiting 7; silent 3",
    ]
    first = dataclasses.replace(old, generation=0, numbers=[], incarnations=[])
    assert "elastic group world: waits for its first generation" in lines_of(picture_of((0, 9.9, first)))[1]


def test_a_rank_of_an_elastic_group_that_is_in_no_step_yet_while_others_train_gets_its_copy() -> None:
    view = GroupView("world", 3, 4, [0, 2, 5], [1, 1, 1], 0, 0, [], [], 0, False, False, False, False)
    views = [(number, 9.9, view) for number in (0, 2, 5)]
    first, second, third = (
        RankStatus("world_4", 3, "h", 5.0, step=step, epoch=0, mean_ranks=mean)
        for step, mean in ((7, 2.25), (6, 2.5), (-1, 0.0))
    )
    observer = Observer()
    for sender, at_s, body in (*views, (0, 9.9, first), (1, 9.9, second), (2, 9.9, third)):
        observer.take(Control(sender, 100 + sender, body), at_s)
    picture = observer.picture("cells", 10.0)
    assert picture["elastic"]["copying"] == [5]
    assert picture["elastic"]["mean_ranks"] == 2.25  # of the newest step
    assert not any("mean_ranks" in rank for rank in picture["groups"][0]["ranks"])
    assert lines_of(picture) == [
        "job cells",
        "elastic group world: generation 4, processes 0, 2 take part; 2.25 a step in this epoch; gets its copy: 5",
        "group world_4: 3 of 3 ranks have sent their status",
        "  rank 0: works, epoch 1, step 7, 0.0 steps/s, sent 0 B [h]",
        "  rank 1: works, epoch 1, step 6, 0.0 steps/s, sent 0 B [h]",
        "  rank 2: gets its copy, sent 0 B [h]",
    ]
    begins = [(rank, 9.9, dataclasses.replace(first, step=-1)) for rank in range(3)]
    assert picture_of(*views, *begins)["elastic"]["copying"] == []  # nobody trains yet


def test_a_word_that_would_move_the_cursor_does_not_reach_the_terminal() -> None:
    (_, line, *_) = lines_of(picture_of((CONTROLLER, 9.9, Status(5, 1, "\x1b[2J", 0, 0))))
    assert "\x1b" not in line


@pytest.mark.parametrize("options", [{}, {"domain": 5}])
def test_without_a_job_it_is_said_what_to_give(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gradbus status mnist"):
        settings_of(None, options)


def test_a_configuration_of_any_kind_names_the_job_and_options_are_stronger(tmp_path: Path) -> None:
    file = tmp_path / "any.json"
    file.write_text('{"bus": {"job": "cells", "domain": 3}, "federated": {"rounds": 5}, "world": 3}')
    assert settings_of(file, {}) == BusSettings(job="cells", domain=3)
    assert settings_of(file, {"job": "2024", "peers": ["a"]}) == BusSettings(job="2024", domain=3, peers=("a",))


def test_a_job_that_is_not_there_is_an_error_after_the_deadline() -> None:
    settings = BusSettings(job=f"nobody-{os.getpid()}", domain=new_domain())
    with pytest.raises(NoJob, match=r"was found within 0.3 s: DDS domain \d+ on lo"):
        asyncio.run(observe(settings, timeout_s=0.3, listen_s=1.0))


def test_where_nothing_listens_it_is_told_at_once_and_tried_for_the_time_to_wait_only() -> None:
    with kept_ports(1) as (port,):
        settings = BusSettings(job="nobody", security="none", connect=(f"tcp/127.0.0.1:{port}",))
        told: list[tuple[float, str]] = []
        began_s = time.monotonic()

        def tell(text: str) -> None:
            told.append((time.monotonic() - began_s, text))

        with pytest.raises(NotReachable, match=rf"nothing listens on port {port} there.* It was tried for 3 s"):
            asyncio.run(observe(settings, timeout_s=3.0, listen_s=1.0, tell=tell))
        assert 3.0 <= time.monotonic() - began_s < 3.0 + PATIENT_S
        ((told_s, text),) = told
        assert told_s < 3.0
        assert f"nothing listens on port {port} there" in text
        assert "tried again for 3 s (--timeout)" in text


async def told_instead(settings: BusSettings, wanted: str) -> str:
    """What who looks on is told in place of a picture; again, if the members had no time to say anything until then."""
    for _ in range(10):
        with pytest.raises(NoJob) as caught:
            await observe(settings, timeout_s=2.0, listen_s=1.0)
        if wanted in str(caught.value):
            break
    return str(caught.value)


_NONE = {"security": "none"}
_KEYED = {"key_file": "job.key"}


@pytest.mark.parametrize(
    ("members", "looks", "wanted"),
    [
        (_KEYED, {}, "have another key than this process, which may be another user: give the key of the job with"),
        ({}, _NONE, "leave out GRADBUS_BUS__SECURITY, and give the key of the job, if it is not that of this user"),
        (_NONE, _KEYED, "leave out the key"),
        (_NONE, {}, "set GRADBUS_BUS__SECURITY=none"),
    ],
)
def test_who_looks_on_with_the_wrong_security_is_told_what_to_give(
    members: dict[str, Any], looks: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    write_secret_file(tmp_path / "job.key", new_job_key().text)  # in the folder that the test runs in

    async def main() -> str:
        at = {"job": f"keyed-{os.getpid()}", "domain": new_domain()}
        member = BusSettings.model_validate({**at, **members})
        looking = settings_of(None, {**at, **looks})
        async with open_bus(member) as bus:
            bus.open_writer(ToController)

            async def speak() -> None:
                while True:
                    await bus.publish(Identity(0, 1), Leave("word"))
                    await asyncio.sleep(0.05)

            speaking = asyncio.create_task(speak())
            try:
                return await told_instead(looking, wanted)
            finally:
                speaking.cancel()

    assert wanted in asyncio.run(main())


def test_a_key_file_is_that_of_the_job_unless_the_configuration_says_that_nodes_have_their_own(tmp_path: Path) -> None:
    config = tmp_path / "client.json"
    options = {"job": "cells", "key_file": "some.key"}
    assert settings_of(None, options).security == "psk"
    for level, wanted in (("none", "psk"), ("psk", "psk"), ("identity", "identity")):
        config.write_text(json.dumps({"bus": {"job": "cells", "security": level, "key_file": "other.key"}}))
        settings = settings_of(config, options)
        assert (settings.security, settings.key_file) == (wanted, Path("some.key"))


def test_who_looks_on_and_is_not_let_in_is_told_why(tmp_path: Path) -> None:
    known = Identities(tmp_path, clients=0)
    known.new("stranger")

    async def main() -> str:
        at = {"job": f"known-{os.getpid()}", "domain": new_domain()}

        def place(name: str) -> BusSettings:
            said = known.security(name)
            return BusSettings.model_validate({**at, "security": said.pop("level"), **said})

        async with open_bus(place("server")):
            return await told_instead(place("stranger"), wanted)

    wanted = "stranger is not on the allow list of the controller"
    assert wanted in asyncio.run(main())


def test_nobody_waits_for_the_one_that_looks_on() -> None:
    async def main() -> None:
        domain = new_domain()
        async with gradbus.connect(job="o", domain=domain) as bus, gradbus.connect(job="o", domain=domain) as watching:
            with watching.subscribe(BestEffort(ToClients)):
                reader = lowest(watching._channels[BestEffort(ToClients)].inlet).entity  # noqa: SLF001 - DDS alone has its QoS
                assert reader.get_qos()[Policy.Reliability] == Policy.Reliability.BestEffort
                bus.open_writer(ToClients)
                await bus.matched(lambda: bus.matched_readers(ToClients) == 1, timeout_s=10.0)
                assert not any(map(watching.writes, CHANNELS))  # it has none that others could match

    asyncio.run(main())


async def observe_until(
    right: Callable[[dict[str, Any]], bool], settings: BusSettings, *, listen_s: float
) -> dict[str, Any]:
    """The first picture that is right; fails with the last one."""
    found: dict[str, Any] = {}
    until_s = time.monotonic() + PATIENT_S
    while not right(found):
        assert time.monotonic() < until_s, json.dumps(found)
        found = await observe(settings, timeout_s=10.0, listen_s=listen_s)
    return found


def test_a_federated_job_and_why_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SILENT_S", PATIENT_S)  # all of it is in this process, which may stand still
    monkeypatch.setattr(
        update_sender, "REPEAT_AFTER_S", 60.0
    )  # what is offered twice may come twice, and one is dropped
    monkeypatch.setattr(uploads, "REPAIR_AFTER_S", 60.0)
    go_on, begun = threading.Event(), asyncio.Event()

    loop: asyncio.AbstractEventLoop

    class Slow(NoopTask):
        def train(self, model: Any, **arguments: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(60.0)
            return super().train(model, **arguments)

    def tells_of_training(found: dict[str, Any]) -> bool:
        told = found.get("federated", {})
        clients = told.get("clients")
        return bool(told.get("controller") and clients) and clients[-1].get("phase") == "training"

    async def main() -> dict[str, Any]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        job, domain = f"status-{os.getpid()}", new_domain()
        config = gradbus.FederatedConfig(
            rounds=1, clients={"num": 2, "heartbeat_s": 0.1, "dead_after_s": PATIENT_S}, eval_every=0
        )

        async def client(client_id: int) -> None:
            async with gradbus.connect(job=job, domain=domain) as bus:
                await Client(bus, (Slow if client_id else NoopTask)(100), client_id=client_id).run()

        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            controller = gradbus.Controller(bus, NoopTask(100), config)
            running = group.create_task(controller.run())
            for client_id in (0, 1):
                group.create_task(client(client_id))
            await begun.wait()
            try:
                # Who has stood still has sent no status.
                found = await observe_until(tells_of_training, BusSettings(job=job, domain=domain), listen_s=0.6)
            finally:
                go_on.set()
            await running
        assert [report.clients for report in controller.progress.reports] == [(0, 1)]
        assert controller.progress.dropped == {}
        return found

    federated = asyncio.run(main())["federated"]
    assert federated["controller"]["phase"] == "training"
    assert federated["controller"]["waited_for"][-1] == 1
    client = federated["clients"][-1]
    assert (client["client"], client["waited_for"]) == (1, True)
    assert client["why"].startswith("trains since ")
    assert client["phase_s"] > 0


def test_a_group_of_ranks_and_the_collective_that_it_waits_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "RANK_STATUS_EVERY_S", 0.1)

    def tells_of_both(found: dict[str, Any]) -> bool:
        states = [rank["state"] for group in found.get("groups", ()) for rank in group["ranks"]]
        return len(states) == 2 and states[0].startswith("waits in") and states[1] == "works"

    async def main() -> dict[str, Any]:
        job, domain = f"ranks-{os.getpid()}", new_domain()
        called, done = asyncio.Event(), asyncio.Event()

        async def rank(number: int) -> None:
            async with (
                gradbus.connect(job=job, domain=domain) as bus,
                gradbus.join_group(bus, rank=number, world=2) as group,
            ):
                group.at_step(41, 2)
                if number:
                    await done.wait()
                handle = group.all_reduce("grad/0", torch.ones(4))
                called.set()
                await handle

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for number in (0, 1):
                tasks.create_task(rank(number))
            await called.wait()
            await asyncio.sleep(1.7)  # so long that it is worth a word
            try:
                # A rank that has stood still is silent, or has sent no status.
                return await observe_until(tells_of_both, BusSettings(job=job, domain=domain), listen_s=0.3)
            finally:
                done.set()

    (group,) = asyncio.run(main())["groups"]
    assert (group["group"], group["world"]) == ("world", 2)
    first, second = group["ranks"]
    assert (first["collective"], first["waits_for"], first["step"], first["epoch"]) == ("grad/0", [1], 41, 2)
    assert first["waits_s"] > 1.6
    assert (second["state"], second["pending"]) == ("works", 0)
