"""Rounds with a part of the clients, by real processes over real DDS: who trains, and what travels to whom."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from dds_domains import new_domain
from federation import DIM, NOBODY_DIES_S, Federation, finish

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NEVER = "/nonexistent/gate"
MODEL_BYTES = 4 * DIM
OVER_DDS = {"shared_memory": False}


def test_clients_that_sit_out_do_not_train_and_are_sent_no_model(federation: Federation) -> None:
    controller = federation.controller(
        rounds=4, clients__num=4, selection={"name": "round_robin", "count": 1}, network=OVER_DDS
    )
    clients = [federation.client(one, network=OVER_DDS) for one in range(4)]
    reports = finish(controller, *clients)
    assert [report["clients"] for report in reports] == [[0], [1], [2], [3]]
    assert [client.all("done")[0]["rounds"] for client in clients] == [1] * 4
    assert all(report["dropped"] == {} for report in reports)
    assert [report["bytes_down"] for report in reports] == [MODEL_BYTES] * 4
    received = [client.all("done")[0]["received"]["train/model_blob"] for client in clients]
    assert all(MODEL_BYTES <= one < 1.1 * MODEL_BYTES for one in received), received  # each the model of its round


def test_clients_of_one_machine_read_the_model_of_their_rounds_in_memory(federation: Federation) -> None:
    controller = federation.controller(rounds=4, clients__num=2, selection={"name": "round_robin", "count": 1})
    clients = [federation.client(one) for one in range(2)]
    reports = finish(controller, *clients)
    assert [report["clients"] for report in reports] == [[0], [1], [0], [1]]
    assert all(report["bytes_down"] == report["bytes_down_shared"] == MODEL_BYTES for report in reports[1:])


def test_the_first_updates_count_and_the_round_of_the_others_is_ended(federation: Federation) -> None:
    controller = federation.controller(rounds=2, clients__num=3, selection={"count": 2, "over_select": 1.5})
    clients = [federation.client(0), federation.client(1), federation.client(2, hold={"1": NEVER})]
    reports = finish(controller, *clients)
    assert (reports[0]["clients"], reports[0]["outcome"]) == ([0, 1], "enough updates")
    assert reports[0]["expected"] == 2
    assert [len(report["clients"]) for report in reports] == [2, 2]


def test_a_selected_client_that_dies_does_not_stop_the_round(federation: Federation) -> None:
    controller = federation.controller(
        rounds=3, clients__num=3, clients__dead_after_s=5.0, selection={"name": "round_robin", "count": 2}
    )
    clients = [federation.client(one) for one in range(2)]
    victim = federation.client(2, hold={"2": NEVER}, network={"lease_s": 3.0})
    victim.wait_for("training", round=2)
    victim.signal(signal.SIGKILL)
    reports = finish(controller, *clients)
    assert [report["clients"] for report in reports] == [[0, 1], [0], [0, 1]]


def test_who_is_slow_goes_on_in_another_attempt_at_a_round_with_too_few(federation: Federation) -> None:
    controller = federation.controller(
        rounds=1,
        clients__num=2,
        clients__min=2,
        selection={"count": 2},
        round__timeout_s=0.6,
        limits__cap_samples=None,  # the fast one counts before the slow one has said how many it has
    )
    clients = [federation.client(0), federation.client(1, train_s=0.8)]
    (report,) = finish(controller, *clients)
    assert report["attempt"] >= 2  # more, where the machine is busy
    assert report["outcome"] == "all live clients answered"
    assert [len(client.all("training")) for client in clients] == [1, 1]  # what it had begun was not given up


def test_a_resumed_run_selects_as_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    chosen = []
    for fail_at in ("", "after_command:3"):
        settings = {"rounds": 5, "clients__num": 5, "seed": 11, "selection": {"name": "power_of_choice", "count": 2}}
        with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S) as federation:
            settings["checkpoint__dir"] = str(tmp_path / (fail_at or "whole"))
            controller = federation.controller(fail_at=fail_at, **settings)
            clients = [federation.client(one) for one in range(5)]
            if fail_at:
                assert controller.wait(60.0) == -signal.SIGKILL
                controller = federation.controller(**settings)
            reports = finish(controller, *clients)
            chosen.append([(report["clients"], report["weights_crc32"]) for report in reports])
    assert chosen[0] == chosen[1]
