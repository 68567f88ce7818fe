"""Federated runs of real processes over real DDS on the loopback interface, and what is left when some of them die."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from dds_domains import new_domain
from federation import NOBODY_DIES_S, Federation, finish

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NEVER = "/nonexistent/gate"
# Who is to die is taken for dead soon, but not while it only stands still, as processes of a busy machine do. Where the
# controller stood still itself it waits for longer.
MORTAL = {"lease_s": 3.0}
DEAD_AFTER_S = 5.0
HELD_UP_S = 30.0  # a round, by who does not answer


def test_a_controller_and_two_clients_run_three_rounds(federation: Federation) -> None:
    controller = federation.controller(rounds=3, clients__num=2)
    clients = [federation.client(0), federation.client(1)]
    reports = finish(controller, *clients)
    assert [report["clients"] for report in reports] == [[0, 1]] * 3
    assert all(report["dropped"] == {} for report in reports)
    assert [client.all("done")[0]["rounds"] for client in clients] == [3, 3]


def test_a_round_completes_at_the_deadline_with_one_of_two_clients(federation: Federation) -> None:
    controller = federation.controller(rounds=2, clients__num=2, round__timeout_s=5.0)
    clients = [federation.client(0), federation.client(1, hold={"1": NEVER})]
    reports = finish(controller, *clients)
    assert reports[0]["clients"] == [0]
    assert reports[0]["outcome"] == "deadline"
    assert reports[1]["clients"] == [0, 1]  # the slow one was called off and took part in the next


def test_a_quorum_and_its_grace_end_a_round_before_the_deadline(federation: Federation) -> None:
    controller = federation.controller(rounds=1, clients__num=2, round__quorum=0.5, round__grace_s=0.3)
    clients = [federation.client(0), federation.client(1, hold={"1": NEVER})]
    reports = finish(controller, *clients)
    assert (reports[0]["clients"], reports[0]["outcome"]) == ([0], "quorum and grace")


def test_a_client_killed_in_training_is_not_waited_for(federation: Federation) -> None:
    controller = federation.controller(
        rounds=3, clients__num=2, clients__dead_after_s=DEAD_AFTER_S, round__timeout_s=HELD_UP_S
    )
    client, victim = federation.client(0), federation.client(1, hold={"2": NEVER}, network=MORTAL)
    victim.wait_for("training", round=2)
    victim.signal(signal.SIGKILL)
    reports = finish(controller, client)
    assert [report["clients"] for report in reports] == [[0, 1], [0], [0]]
    assert reports[1]["seconds"] < HELD_UP_S / 2


def test_a_client_killed_in_mid_upload_leaves_no_trace_and_may_come_back(tmp_path: Path) -> None:
    # A model of 32 MB takes long enough on its way to be cut in the middle.
    gate = tmp_path / "gate"
    with Federation(domain=new_domain(), dim=8_000_000, silence_s=NOBODY_DIES_S) as federation:
        controller = federation.controller(rounds=3, clients__num=2, clients__dead_after_s=DEAD_AFTER_S)
        client = federation.client(0, hold={"2": str(gate)})
        victim = federation.client(
            1, die_after_bytes=8 << 20, network={**MORTAL, "shared_memory": False}
        )  # else it would not be sent
        assert victim.wait(60.0) == -signal.SIGKILL
        client.wait_for("training", round=2)
        again = federation.client(1)
        controller.wait_for("takes part", client=1, from_round=3)
        gate.touch()
        reports = finish(controller, client, again)
    assert reports[0]["clients"] == [0]
    assert reports[0]["dropped"]["cut short"] == 1
    assert reports[2]["clients"] == [0, 1]


def test_a_client_that_starts_late_takes_part_from_the_next_round_with_the_current_model(
    federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    controller = federation.controller(rounds=6, clients__min=1, clients__start_grace_s=0.0, downlink_codec="s4")
    client = federation.client(0, hold={"2": str(gate)})
    client.wait_for("training", round=2)
    late = federation.client(1)
    controller.wait_for("takes part", client=1, from_round=3)
    gate.touch()
    reports = finish(controller, client, late)
    assert [report["clients"] for report in reports] == [[0]] * 2 + [[0, 1]] * 4
    assert [event["round"] for event in late.all("training")] == [3, 4, 5, 6]


def test_a_suspended_client_is_not_waited_for_and_takes_part_again_when_it_goes_on(tmp_path: Path) -> None:
    first, third = tmp_path / "first", tmp_path / "third"
    with Federation(domain=new_domain(), silence_s=MORTAL["lease_s"]) as federation:
        # With a cap by the median the first update would wait for the others, or for half of the time.
        controller = federation.controller(rounds=4, clients__num=2, round__timeout_s=12.0, limits__cap_samples=None)
        client = federation.client(0, hold={"1": str(first), "3": str(third)})
        sleeper = federation.client(1)
        controller.wait_for("takes part", client=1)
        sleeper.wait_for("phase", phase="training", round=1)
        sleeper.wait_for("phase", phase="idle")  # one that trains would be waited for until the deadline
        sleeper.signal(signal.SIGSTOP)
        first.touch()
        controller.wait_for("round", round_id=2, clients=[0])
        controller.wait_for("attempt", round=3)  # before it, the client would be in that round from its beginning
        sleeper.signal(signal.SIGCONT)
        controller.wait_for("takes part", client=1)
        third.touch()
        reports = finish(controller, client, sleeper)
    assert reports[3]["clients"] == [0, 1]


def test_a_client_whose_training_holds_the_interpreter_is_counted_in_every_round(federation: Federation) -> None:
    controller = federation.controller(rounds=2, clients__num=2, clients__heartbeat_s=0.1, clients__dead_after_s=0.6)
    clients = [federation.client(0), federation.client(1, gil_s=2.5)]
    reports = finish(controller, *clients)
    assert [report["clients"] for report in reports] == [[0, 1], [0, 1]]
    assert not any("client" in reason for report in reports for reason in report["dropped"])


def test_an_offer_of_a_client_that_was_only_silent_counts_while_its_round_is_open(
    federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    controller = federation.controller(rounds=1, clients__num=2, clients__dead_after_s=1.0)
    client = federation.client(0, hold={"1": str(gate)})
    sleeper = federation.client(1, faults="delay upload_request round=1 seconds=2")
    sleeper.wait_for("phase", phase="offering")
    sleeper.signal(signal.SIGSTOP)  # what it has to request is still in this process
    controller.wait_for("lost", client=1)
    sleeper.signal(signal.SIGCONT)
    controller.wait_for("takes part", client=1, from_round=1)
    gate.touch()
    (report,) = finish(controller, client, sleeper)
    assert report["clients"] == [0, 1]
    assert "client silent" not in report["dropped"]


def test_a_client_that_was_silent_in_all_rounds_is_named_at_the_end(federation: Federation) -> None:
    """It joined, and nobody has said how many clients there should be."""
    controller = federation.controller(rounds=1, clients__min=2, clients__dead_after_s=2.0)
    sleeper = federation.client(2)
    controller.wait_for("takes part", client=2)
    sleeper.signal(signal.SIGSTOP)
    controller.wait_for("silent", client=2)
    clients = [federation.client(number) for number in range(2)]
    done = controller.wait_for("done", timeout_s=60.0)
    sleeper.signal(signal.SIGCONT)
    assert done["never_counted"] == {2: "expected in 1 round; in round 1: client silent"}
    assert [client.wait() for client in clients] == [0, 0]


def test_without_any_client_the_controller_says_who_is_missing(federation: Federation) -> None:
    controller = federation.controller(rounds=1, clients__num=2, clients__min=2, clients__start_timeout_s=0.5)
    assert controller.wait() == 3
    (error,) = controller.all("error")
    assert error["kind"] == "BarrierTimeout"
    assert "missing [0, 1]" in error["text"]


def test_a_round_that_nobody_answers_is_tried_again_and_then_given_up(federation: Federation) -> None:
    controller = federation.controller(rounds=1, clients__num=1, round__timeout_s=0.5, round__max_attempts=2)
    federation.client(0, hold={"1": NEVER})
    assert controller.wait(40.0) == 3
    (error,) = controller.all("error")
    assert (error["kind"], "after 2 attempts" in error["text"]) == ("RoundTimeout", True)


def test_a_failing_training_function_costs_its_client_the_round_and_nothing_else(federation: Federation) -> None:
    controller = federation.controller(rounds=3, clients__num=2)
    clients = [federation.client(0), federation.client(1, raise_in=2)]
    reports = finish(controller, *clients)
    assert [report["clients"] for report in reports] == [[0, 1], [0], [0, 1]]
    assert reports[1]["dropped"]["training failed"] == 1


def test_a_client_whose_model_is_not_finite_costs_only_its_own_round(federation: Federation) -> None:
    controller = federation.controller(rounds=2, clients__num=2)
    clients = [federation.client(0), federation.client(1, nan_in=1)]
    reports = finish(controller, *clients)
    assert [report["clients"] for report in reports] == [[0], [0, 1]]
    assert reports[0]["dropped"] == {"non-finite model": 1}


def test_a_client_whose_loss_alone_is_not_finite_says_so_and_its_update_does_not_count(federation: Federation) -> None:
    controller = federation.controller(rounds=2, clients__num=2)
    clients = [federation.client(0), federation.client(1, nan_loss_in=1)]
    reports = finish(controller, *clients)
    assert [report["clients"] for report in reports] == [[0], [0, 1]]
    assert reports[0]["dropped"] == {"non-finite loss": 1}


def test_a_second_process_with_the_same_id_is_refused_and_the_first_goes_on(
    federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    controller = federation.controller(rounds=2, clients__num=1, duplicate_after_s=6.0)
    client = federation.client(0, hold={"1": str(gate)})
    client.wait_for("training", round=1)
    twin = federation.client(0)
    assert twin.wait() == 3
    assert twin.all("error")[0]["kind"] == "JoinRefused"
    assert "give each its own id" in twin.all("error")[0]["text"]
    gate.touch()
    reports = finish(controller, client)
    assert [report["clients"] for report in reports] == [[0], [0]]


def test_a_client_with_another_model_is_refused_with_the_reason(federation: Federation) -> None:
    controller = federation.controller(rounds=1, clients__num=1)
    stranger = federation.client(1, dim=1000)
    assert stranger.wait() == 3
    assert "1,000 values, here 200,000" in stranger.all("error")[0]["text"]
    finish(controller, federation.client(0))


def test_a_client_that_dies_and_is_back_at_once_does_not_hold_up_the_open_round(
    federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    controller = federation.controller(
        rounds=3, clients__num=2, clients__dead_after_s=DEAD_AFTER_S, round__timeout_s=HELD_UP_S
    )
    client = federation.client(0, hold={"2": str(gate)})
    victim = federation.client(1, hold={"2": NEVER}, network=MORTAL)
    victim.wait_for("training", round=2)
    victim.signal(signal.SIGKILL)
    again = federation.client(1)  # before anybody has noticed
    controller.wait_for("takes part", client=1, from_round=3)
    gate.touch()
    reports = finish(controller, client, again)
    assert [report["clients"] for report in reports] == [[0, 1], [0], [0, 1]]
    assert reports[1]["seconds"] < HELD_UP_S / 2


def test_a_client_whose_loop_stands_still_does_not_hold_up_the_others() -> None:
    # 100 MB fill every queue on the way to a client that does not read. In memory they would fill none.
    network = {"shared_memory": False}
    with Federation(domain=new_domain(), dim=25_000_000, silence_s=DEAD_AFTER_S, network=network) as federation:
        # It says that it trains, so in one round it is waited for as long as the rules say.
        controller = federation.controller(
            rounds=3, clients__num=2, round__timeout_s=100.0, round__quorum=0.5, round__grace_s=1.0
        )
        clients = [federation.client(0), federation.client(1, block_loop_in=1)]
        reports = finish(controller, clients[0])
    assert reports[-1]["clients"] == [0]
    assert sum(report["seconds"] for report in reports) < 50.0


def test_a_client_gives_up_when_its_controller_is_gone_while_it_offers_an_update(
    federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    controller = federation.controller(rounds=1, clients__num=1, network=MORTAL)
    controller.wait_for("started")
    client = federation.client(0, hold={"1": str(gate)}, client={"controller_timeout_s": 4.0})
    client.wait_for("training", round=1)
    controller.signal(signal.SIGKILL)
    assert controller.wait() == -signal.SIGKILL
    gate.touch()
    assert client.wait() == 3
    assert client.all("error")[0]["kind"] == "BarrierTimeout"
