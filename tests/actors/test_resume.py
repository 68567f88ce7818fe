"""The controller dies at every step of a round and goes on with the same run, to the same weights."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from federation import NOBODY_DIES_S, Federation

from gradbus.actors.federated.controller.rounds import CLIENT_LOST

pytestmark = [pytest.mark.slow, pytest.mark.faults]

# No round without both clients: one that is not seen for a moment, because it stands still, changes no weights.
_RULES = {
    "rounds": 4,
    "clients__num": 2,
    "clients__min": 2,
    "codec": "sq8",
    "downlink_codec": "s4",
    "strategy": "fedavgm",
    "history__payloads": True,
}
_MORTAL = {"lease_s": 1.0}
_STEPS = [
    "before_command",
    "after_command",
    "mid_collect",
    "after_collect_before_aggregate",
    "after_aggregate_before_commit",
    "after_commit_before_note",
    "after_commit_before_publish",
    "after_publish",
]


def weights_of(reports: list[dict[str, Any]], killed_in: int = 0) -> list[int]:
    """CRC-32 of the weights after each round. Nobody was lost, but in the round in which there was a death: another
    attempt at a round comes to the same weights, so they alone would not tell."""
    for report in reports:
        if report["round_id"] != killed_in:
            assert (report["clients"], report["attempt"]) == ([0, 1], 1), str(report)
            assert CLIENT_LOST not in report["dropped"], str(report)
    return [report["weights_crc32"] for report in reports]


@pytest.fixture(scope="module")
def unbroken() -> list[int]:
    """The weights after each round of a run in which nobody dies."""
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S) as federation:
        controller = federation.controller(**_RULES)
        clients = [federation.client(0), federation.client(1)]
        done = controller.wait_for("done", timeout_s=60.0)
        assert [client.wait() for client in clients] == [0, 0]
    return weights_of(done["reports"])


@pytest.mark.parametrize("step", _STEPS)
def test_killed_at_any_step_the_run_ends_with_the_weights_of_an_unbroken_one(
    step: str, federation: Federation, unbroken: list[int], tmp_path: Path
) -> None:
    state = str(tmp_path / "controller")
    clients = [federation.client(i, client={"state_dir": str(tmp_path / "clients")}) for i in (0, 1)]
    first = federation.controller(**_RULES, checkpoint__dir=state, fail_at=f"{step}:2", network=_MORTAL)
    assert first.wait(60.0) == -signal.SIGKILL
    second = federation.controller(**_RULES, checkpoint__dir=state)
    done = second.wait_for("done", timeout_s=60.0)
    assert [client.wait() for client in clients] == [0, 0]  # they were not restarted
    assert weights_of(done["reports"], killed_in=2) == unbroken
    assert [report["round_id"] for report in done["reports"]] == [1, 2, 3, 4]
    committed = 2 if step in ("after_commit_before_note", "after_commit_before_publish", "after_publish") else 1
    assert len(second.all("round")) == 4 - committed  # at most the open round was done again
    findings = federation.findings()
    assert all(findings[name].checked for name in ("I1", "I2", "I4", "I7"))
    assert findings["I3"].checked == 4  # every round was computed again


def test_a_controller_killed_twice_before_it_can_note_its_commit_loses_nothing_and_its_journal_says_so(
    federation: Federation, unbroken: list[int], tmp_path: Path
) -> None:
    state = str(tmp_path / "controller")
    clients = [federation.client(i, client={"state_dir": str(tmp_path / "clients")}) for i in (0, 1)]
    for round_id in (2, 3):  # two starts one after the other, each in the round after the one before it
        fail_at = f"after_commit_before_note:{round_id}"
        killed = federation.controller(**_RULES, checkpoint__dir=state, fail_at=fail_at, network=_MORTAL)
        assert killed.wait(60.0) == -signal.SIGKILL
    done = federation.controller(**_RULES, checkpoint__dir=state).wait_for("done", timeout_s=60.0)
    assert [client.wait() for client in clients] == [0, 0]
    assert [report["weights_crc32"] for report in done["reports"]] == unbroken
    findings = federation.findings()
    assert [finding.violations for finding in findings.values() if finding.violations] == []
    assert findings["I4"].checked >= 4  # two comparisons of each start with the one before
    assert findings["I3"].checked == 4


def test_everybody_dies_and_all_go_on_from_what_is_on_the_disk(
    federation: Federation, unbroken: list[int], tmp_path: Path
) -> None:
    state, client = str(tmp_path / "controller"), {"state_dir": str(tmp_path / "clients")}
    clients = [federation.client(i, client=client) for i in (0, 1)]
    first = federation.controller(**_RULES, checkpoint__dir=state, fail_at="mid_collect:3", network=_MORTAL)
    assert first.wait(60.0) == -signal.SIGKILL
    for node in clients:
        node.signal(signal.SIGKILL)
        node.wait()
    again = [federation.client(i, client=client) for i in (0, 1)]
    done = federation.controller(**_RULES, checkpoint__dir=state).wait_for("done", timeout_s=60.0)
    assert [node.wait() for node in again] == [0, 0]
    assert weights_of(done["reports"], killed_in=3) == unbroken


def test_asynchronous_rounds_go_on_when_the_controller_and_then_a_client_are_killed(
    federation: Federation, tmp_path: Path
) -> None:
    rules = {
        "rounds": 6, "clients__num": 2, "mode": "asynchronous", "asynchronous__buffer": 2,
        "asynchronous__repeats": False,  # so that a round waits for both, as long as both live
        "checkpoint__dir": str(tmp_path / "controller"), "history__dir": None,
    }  # fmt: skip
    client = {"state_dir": str(tmp_path / "clients"), "history": {}}
    stays = federation.client(0, client=client)
    victim = federation.client(1, client=client, hold={"5": "/nonexistent/gate"}, network=_MORTAL)
    first = federation.controller(**rules, fail_at="mid_collect:3", network=_MORTAL)
    assert first.wait(60.0) == -signal.SIGKILL
    second = federation.controller(**rules)
    victim.wait_for("training", round=5)
    victim.signal(signal.SIGKILL)
    reports = second.wait_for("done", timeout_s=60.0)["reports"]
    assert (second.wait(), stays.wait()) == (0, 0)
    assert [report["round_id"] for report in reports] == [1, 2, 3, 4, 5, 6]
    assert [event["round_id"] for event in second.all("round")] == [3, 4, 5, 6]  # the first two were on the disk
    assert [report["clients"] for report in reports[4:]] == [[0], [0]]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    federation: Federation, unbroken: list[int], tmp_path: Path
) -> None:
    state, client = tmp_path / "controller", {"state_dir": str(tmp_path / "clients")}
    federation.may_break.add("I4")  # what was written to the disk was lost there
    clients = [federation.client(i, client=client) for i in (0, 1)]
    first = federation.controller(**_RULES, checkpoint__dir=str(state), fail_at="after_publish:3", network=_MORTAL)
    assert first.wait(60.0) == -signal.SIGKILL
    newest = state / "round-000003.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    second = federation.controller(**_RULES, checkpoint__dir=str(state))
    done = second.wait_for("done", timeout_s=60.0)
    assert [node.wait() for node in clients] == [0, 0]
    assert [event["round_id"] for event in second.all("round")] == [3, 4]
    assert weights_of(done["reports"], killed_in=3) == unbroken


def test_a_finished_run_started_again_has_nothing_to_do(federation: Federation, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    controller = federation.controller(rounds=1, clients__num=1, checkpoint__dir=state)
    client = federation.client(0)
    controller.wait_for("done")
    assert client.wait() == 0
    again = federation.controller(rounds=1, clients__num=1, checkpoint__dir=state)
    done = again.wait_for("done")
    assert [report["round_id"] for report in done["reports"]] == [1]


def test_two_controllers_cannot_share_a_state_directory(federation: Federation, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    first = federation.controller(rounds=1, clients__num=1, checkpoint__dir=state)
    first.wait_for("started")
    federation.client(0, hold={"1": "/nonexistent/gate"}).wait_for("training", round=1)
    second = federation.controller(rounds=1, clients__num=1, checkpoint__dir=state)
    assert second.wait() == 3
    assert "in use by another running process" in second.all("error")[0]["text"]


def test_a_checkpoint_holds_the_history_and_only_the_last_few_are_kept(federation: Federation, tmp_path: Path) -> None:
    state = tmp_path / "state"
    controller = federation.controller(rounds=5, clients__num=1, checkpoint__dir=str(state), checkpoint__keep=2)
    client = federation.client(0)
    controller.wait_for("done", timeout_s=60.0)
    assert client.wait() == 0
    names = sorted(path.name for path in state.glob("round-*"))
    assert names == [f"round-00000{i}.{kind}" for i in (4, 5) for kind in ("json", "safetensors")]
    meta = json.loads((state / "round-000005.json").read_text(encoding="utf-8"))["meta"]
    assert [entry["round_id"] for entry in meta["history"]] == [1, 2, 3, 4, 5]


def test_killed_after_the_last_commit_the_controller_comes_back_to_say_that_all_is_done(
    federation: Federation, tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    client = federation.client(0)
    rules = {"rounds": 1, "clients__num": 1, "checkpoint__dir": state}
    first = federation.controller(**rules, fail_at="after_commit_before_publish:1", network=_MORTAL)
    assert first.wait() == -signal.SIGKILL
    second = federation.controller(**rules)
    second.wait_for("done")
    assert client.wait() == 0


def test_a_controller_whose_clock_was_set_back_is_still_the_one_that_counts(
    federation: Federation, tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    client = federation.client(0)
    rules = {"rounds": 3, "clients__num": 1, "checkpoint__dir": state}
    first = federation.controller(**rules, fail_at="after_command:2", network=_MORTAL)
    assert first.wait() == -signal.SIGKILL
    second = federation.controller(**rules, clock_offset_s=-3600)
    done = second.wait_for("done")
    assert client.wait() == 0
    assert [report["clients"] for report in done["reports"]] == [[0], [0], [0]]


@pytest.mark.parametrize("durable", [True, False])
def test_what_was_being_trained_for_a_dead_controller_is_no_answer_to_the_next_one(
    durable: bool, federation: Federation, tmp_path: Path
) -> None:
    rules = {"rounds": 1, "clients__num": 1, **({"checkpoint__dir": str(tmp_path / "state")} if durable else {})}
    gate = tmp_path / "gate"
    client = federation.client(0, hold={"1": str(gate)})
    first = federation.controller(**rules, network=_MORTAL)
    client.wait_for("training", round=1)
    first.signal(signal.SIGKILL)
    first.wait()
    second = federation.controller(**rules)  # gives the same command again
    client.wait_for("training", round=1)
    gate.touch()
    done = second.wait_for("done")
    assert client.wait() == 0
    assert [report["clients"] for report in done["reports"]] == [[0]]
    assert done["reports"][0]["attempt"] == 1
