"""Federated runs of real processes on one machine: updates and models pass through memory; nothing of it is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from federation import DIM, NOBODY_DIES_S, Federation, Node, named_by
from patience import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd"),
]

UP, DOWN = "train/client_update", "train/model_blob"
MODEL = 4 * DIM  # bytes
UPDATE = MODEL + 16
LATE_S = 0.05
OFF = {"shared_memory": False}
MORTAL = {"lease_s": 1.0}


def finish(controller: Node, *clients: Node) -> list[dict[str, Any]]:
    """What each tells when it is done, the controller first; all have ended well and hold no memory of anybody."""
    done = [node.wait_for("done", timeout_s=60.0) for node in (controller, *clients)]
    for node in (controller, *clients):
        left = node.wait_for("left")
        assert (left["mapped"], left["open_files"]) == (0, 0)
        assert node.wait() == 0
    return done


def weights(done: dict[str, Any]) -> list[int]:
    return [report["weights_crc32"] for report in done["reports"]]


@pytest.fixture(scope="module")
def over_dds() -> list[int]:
    """CRC-32 of the weights after each round of a run of three that shares no memory."""
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S, network=OFF) as federation:
        done = finish(federation.controller(rounds=3, clients__num=2), federation.client(0), federation.client(1))
    assert [one["shared"] for one in done] == [{}] * 3
    assert done[0]["received"][UP] > 6 * UPDATE
    assert done[1]["received"][DOWN] > 3 * MODEL  # the last one may be on its way when the run ends
    return weights(done[0])


def test_updates_and_models_pass_through_memory_and_no_payload_over_dds(
    federation: Federation, over_dds: list[int]
) -> None:
    controller = federation.controller(rounds=3, clients__num=2)
    clients = [federation.client(0), federation.client(1, read_delay_s=LATE_S)]  # also the last model, after RunEnded
    done, *others = finish(controller, *clients)
    assert weights(done) == over_dds
    assert (done["shared"], done["sent"], done["received"]) == ({UP: 6 * UPDATE}, {}, {})
    for other in others:
        assert (other["shared"], other["sent"], other["received"]) == ({DOWN: 4 * MODEL}, {}, {})
        assert other["bytes_up"] == 3 * UPDATE
    for report in done["reports"]:
        assert report["bytes_up_shared"] == report["bytes_up"] == 2 * UPDATE
        assert report["bytes_down_shared"] == report["bytes_down"] == 2 * MODEL
    assert [node.all("warning") for node in (controller, *clients)] == [[], [], []]


@pytest.mark.parametrize("off", ["controller", "client"])
def test_where_one_side_shares_no_memory_its_data_goes_over_dds_without_a_word(
    off: str, federation: Federation, over_dds: list[int]
) -> None:
    controller = federation.controller(rounds=3, clients__num=2, **({"network": OFF} if off == "controller" else {}))
    clients = [federation.client(0), federation.client(1, **({"network": OFF} if off == "client" else {}))]
    done, near, far = finish(controller, *clients)
    assert weights(done) == over_dds
    if off == "controller":
        assert [one["shared"] for one in (done, near, far)] == [{}] * 3
    else:
        assert (done["shared"], far["shared"]) == ({UP: 3 * UPDATE}, {})
        # The frames that go to the other one come here, too, and may be there before the word of the memory.
        assert near["shared"][DOWN] in {MODEL, 2 * MODEL, 3 * MODEL, 4 * MODEL}
        assert near["shared"][DOWN] + near["received"].get(DOWN, 0) >= 4 * MODEL
        assert 3 * UPDATE < done["received"][UP] < 4 * UPDATE
        assert [report["bytes_up_shared"] for report in done["reports"]] == [UPDATE] * 3
        assert {report["bytes_down_shared"] for report in done["reports"]} <= {0, MODEL}
    assert [node.all("warning") for node in (controller, *clients)] == [[], [], []]


def test_memory_that_cannot_be_opened_costs_one_line_in_the_log_for_each_and_the_data_goes_over_dds(
    federation: Federation, over_dds: list[int]
) -> None:
    controller = federation.controller(rounds=3, clients__num=2, refuse_memory=True)
    clients = [federation.client(0), federation.client(1, refuse_memory=True)]
    done, near, far = finish(controller, *clients)
    assert weights(done) == over_dds
    assert sorted(line["client"] for line in controller.all("warning")) == [0, 1]
    assert [len(client.all("warning")) for client in clients] == [0, 1]
    for line in (*controller.all("warning"), *clients[1].all("warning")):
        assert (line["text"], line["reason"]) == ("no shared memory", "permission denied, says the test")
    assert (done["shared"], near["shared"], far["shared"]) == ({}, {DOWN: 4 * MODEL}, {})
    assert done["received"][UP] > 6 * UPDATE
    assert [report["dropped"] for report in done["reports"]] == [{}] * 3


def test_a_client_killed_with_an_update_in_memory_leaves_nothing_and_the_round_goes_on(federation: Federation) -> None:
    controller = federation.controller(rounds=2, clients__num=2, clients__dead_after_s=5.0)
    client, victim = federation.client(0), federation.client(1, die_after_offer=True, network=MORTAL)
    assert victim.wait(60.0) == -signal.SIGKILL
    done, _ = finish(controller, client)
    assert [set(report["clients"]) >= {0} for report in done["reports"]] == [True, True]
    assert done["reports"][1]["clients"] == [0]
    until(
        lambda: not named_by(node.process.pid for node in (controller, client, victim))
    )  # torch's own manager takes away what a killed one had


def test_a_killed_controller_leaves_nothing_and_the_next_one_hands_out_its_model_in_memory_again(
    federation: Federation, over_dds: list[int], tmp_path: Path
) -> None:
    clients = [federation.client(0), federation.client(1, read_delay_s=LATE_S)]
    rules = {"rounds": 3, "clients__num": 2, "clients__min": 2, "checkpoint__dir": str(tmp_path / "state")}
    # Both have worked from model 1.
    first = federation.controller(**rules, fail_at="after_collect_before_aggregate:2", network=MORTAL)
    assert first.wait(60.0) == -signal.SIGKILL
    second = federation.controller(**rules)
    done, *others = finish(second, *clients)
    assert weights(done) == over_dds
    assert (done["sent"], done["received"]) == ({}, {})
    for other in others:
        assert other["shared"] == {DOWN: 5 * MODEL}  # 0, 1, and from the next one 1, 2, 3
    assert [client.all("warning") for client in clients] == [[], []]
    until(lambda: not named_by(node.process.pid for node in (first, second, *clients)))


@pytest.mark.parametrize("shares", [True, False])
def test_a_client_that_comes_late_reads_the_model_of_the_open_round_in_memory_or_gets_its_frames(
    shares: bool, federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    controller = federation.controller(rounds=6, clients__min=1, clients__start_grace_s=0.0)
    client = federation.client(0, hold={"2": str(gate)})
    client.wait_for("training", round=2)
    late = federation.client(1, **({} if shares else {"network": OFF}))
    controller.wait_for("takes part", client=1, from_round=3)
    gate.touch()
    done, _, other = finish(controller, client, late)
    assert [report["clients"] for report in done["reports"]] == [[0]] * 2 + [[0, 1]] * 4
    if shares:
        assert (done["sent"], other["received"], other["shared"]) == ({}, {}, {DOWN: 6 * MODEL})
    else:
        assert other["shared"] == {}
        # One that was sent before DDS had matched the two, and was followed by the next, is not kept for it.
        assert 2 * MODEL < other["received"][DOWN] <= done["sent"][DOWN]
