"""Whole runs with secure aggregation in which a client does not keep to the protocol: it is named and left out, the run
goes on without it, and waits for nothing that cannot come."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from masking_scene import reseal
from secure_runs import Observer, Run, plain_weights, replace_masking
from structlog.testing import capture_logs

import gradbus
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.update_masks import ClientMasking, MaskingAttempt
from gradbus.actors.federated.controller.masked_attempt import BROKEN
from gradbus.actors.secure_aggregation.keys import Roster
from gradbus.actors.secure_aggregation.masking_client import MaskingClient
from gradbus.runtime.errors import RoundTimeout
from gradbus.runtime.wire.control import MaskSurvivors

Change = Callable[[bytes], bytes]
PHASE_S = 10.0  # the deadline of each phase, by default


class Lying(ClientMasking):
    """Sends something else in a phase. ``changes``: by phase."""

    changes: Mapping[int, Change]
    from_attempt = 1

    def _answer(self, own: Any, phase: int, data: bytes, group: Any) -> None:
        if own.client.attempt.number >= self.from_attempt and phase in self.changes:
            data = self.changes[phase](data)
        super()._answer(own, phase, data, group)


class Inconsistent(MaskingClient):
    """Seals shares that can be opened, and are of no secret."""

    def share(self, roster: Roster) -> list[bytes]:
        super().share(roster)
        own = next(one for one in roster.ids if roster.entry_of(one).sealing == self.advertise()[:32])
        others = [one for one in roster.ids if one != own]
        return [reseal(self, roster, one, (b"\0" + secrets.token_bytes(32),) * 2) for one in others]


class SealingOthers(Lying):
    """Seals such shares in round 1."""

    changes: Mapping[int, Change] = {}

    def begin(self, run_id: int, session: int, round_id: int, number: int, group: Any) -> None:
        super().begin(run_id, session, round_id, number, group)
        if round_id == 1 and self._own is not None and not isinstance(self._own.client, Inconsistent):
            own = MaskingAttempt(Inconsistent(self._own.client.attempt, self._identity.sender))
            self._own = own
            super()._answer(own, 0, own.client.advertise(), group)

    def _answer(self, own: Any, phase: int, data: bytes, group: Any) -> None:
        if own.client.attempt.round_id != 1 or phase or isinstance(own.client, Inconsistent):
            super()._answer(own, phase, data, group)


def ids(*clients: int) -> bytes:
    return b"".join(one.to_bytes(4, "little") for one in clients)


def run(
    count: int, liars: Mapping[int, Mapping[int, Change]], *, kind: type[Lying] = Lying, **settings: Any
) -> tuple[Run, Callable[[], tuple[gradbus.Controller, list[Any], float]]]:
    """A run with liars, by client id; and what runs it: gives the controller, the log, and its seconds."""
    job = Run(range(count), **settings)

    def make_client(bus: Any, task: Any, *, client_id: int, config: Any) -> Client:
        client = Client(bus, task, client_id=client_id, config=config)
        if client_id in liars:
            replace_masking(client, kind).changes = liars[client_id]
        return client

    job.make_client = make_client

    def start() -> tuple[gradbus.Controller, list[Any], float]:
        began_s = time.monotonic()
        with capture_logs() as logs:
            controller = job()
        return controller, logs, time.monotonic() - began_s

    return job, start


def warned_of(logs: list[Any]) -> set[int]:
    """Clients that the controller's warnings and errors name, as those that something is wrong with."""
    lines = [one for one in logs if one["log_level"] in ("warning", "error") and one["source"] == "controller"]
    named = {one["client"] for one in lines if "client" in one}
    return named.union(*(one.get("clients", ()) for one in lines))


RANDOM: Mapping[str, Mapping[int, Change]] = {
    "random shares": {1: lambda data: secrets.token_bytes(len(data))},
    "shares of another length": {1: lambda data: data[:-1]},
    "one share too few": {1: lambda data: data[:-114]},
    "keys of another length": {0: lambda data: data[:-1]},
    "keys of small order": {0: lambda data: bytes(32) + data[32:]},
    "one key for two purposes": {0: lambda data: data[:32] + data[:32] + data[64:]},
}


@pytest.mark.parametrize("lie", RANDOM)
def test_who_seals_something_else_is_named_and_struck_and_the_round_goes_on_without_it(lie: str) -> None:
    _, start = run(5, {4: RANDOM[lie]}, round={"max_attempts": 1})
    controller, logs, seconds = start()
    (report,) = controller.progress.reports
    assert report.clients == (0, 1, 2, 3)
    assert torch.equal(controller.weights, plain_weights(4))
    assert report.attempt == (2 if lie == "random shares" else 1)
    assert [(one.client_id, one.reason) for one in report.strikes] == [(4, BROKEN)]
    assert report.dropped[BROKEN] == 1
    assert warned_of(logs) == {4}
    assert seconds < PHASE_S, "nobody waits for a deadline"


def test_the_log_says_what_a_client_has_done() -> None:
    _, start = run(4, {3: RANDOM["random shares"]})
    _, logs, _ = start()
    (line,) = [one for one in logs if one["event"] == "client left out of secure aggregation"]
    assert line["reason"] == "3 of 3 other clients cannot use the shares that it has sealed for them"
    assert (line["client"], line["round"], line["attempt"]) == (3, 1, 1)
    (failed,) = [one for one in logs if one["event"] == "secure aggregation failed"]
    assert failed["reason"] == "secure aggregation: too few clients can use the shares of others, which is due to [3]"
    assert [one["senders"] for one in logs if one["event"] == "shares of other clients cannot be used"] == [[3]] * 3


def test_after_its_strikes_a_client_is_in_quarantine_and_rounds_have_one_attempt_again() -> None:
    _, start = run(4, {3: RANDOM["random shares"]}, rounds=3, limits={"max_strikes": 2})
    controller, _, seconds = start()
    assert [(one.attempt, one.clients) for one in controller.progress.reports] == [
        (2, (0, 1, 2)),
        (2, (0, 1, 2)),
        (1, (0, 1, 2)),
    ]
    assert torch.equal(controller.weights, plain_weights(3, 3))
    assert seconds < PHASE_S


def test_two_that_seal_random_bytes_are_both_left_out() -> None:
    _, start = run(6, dict.fromkeys((4, 5), RANDOM["random shares"]), round={"max_attempts": 1})
    controller, logs, _ = start()
    assert controller.progress.reports[0].clients == (0, 1, 2, 3)
    assert torch.equal(controller.weights, plain_weights(4))
    assert warned_of(logs) == {4, 5}


def test_who_complains_about_all_others_is_named_and_they_all_count_in_the_same_attempt() -> None:
    _, start = run(5, {4: {2: lambda _: ids(0, 1, 2, 3)}})
    controller, logs, seconds = start()
    (report,) = controller.progress.reports
    assert report.attempt == 1
    assert set(report.clients) >= {0, 1, 2, 3}, "its own may have been there before all have complained"
    assert torch.equal(controller.weights, plain_weights(len(report.clients)))
    assert [one.client_id for one in report.strikes] == [4]
    assert warned_of(logs) == {4}
    assert seconds < PHASE_S


def test_one_false_complaint_changes_nothing() -> None:
    _, start = run(5, {4: {2: lambda _: ids(0)}})
    controller, logs, _ = start()
    (report,) = controller.progress.reports
    assert (report.clients, report.attempt, report.strikes) == ((0, 1, 2, 3, 4), 1, ())
    assert torch.equal(controller.weights, plain_weights(5))
    assert not warned_of(logs)


@pytest.mark.parametrize("about", [ids(9), ids(3, 1), ids(4), b"\1"], ids=["unknown", "unordered", "itself", "cut"])
def test_complaints_that_no_honest_client_makes_name_who_makes_them(about: bytes) -> None:
    _, start = run(5, {4: {2: lambda _: about}})
    controller, logs, _ = start()
    assert set(controller.progress.reports[0].clients) >= {0, 1, 2, 3}
    assert warned_of(logs) == {4}


def test_where_all_have_to_stay_a_pair_in_dispute_is_left_out_without_a_strike() -> None:
    _, start = run(5, {4: {2: lambda _: ids(3)}}, secure_aggregation={"threshold": 1.0})
    controller, logs, _ = start()
    (report,) = controller.progress.reports
    assert (report.clients, report.attempt, report.strikes) == ((0, 1, 2), 2, ())
    assert torch.equal(controller.weights, plain_weights(3))
    (line,) = [one for one in logs if one["event"] == "clients in dispute"]
    assert line["clients"] == [3, 4]


def test_two_clients_of_which_one_lies_end_the_run_at_once_with_an_error_that_names_the_pair() -> None:
    _, start = run(2, {1: RANDOM["random shares"]})
    began_s = time.monotonic()
    with pytest.raises(RoundTimeout, match=r"too few clients can use the shares of others, which is due to \[0, 1\]"):
        start()
    assert time.monotonic() - began_s < PHASE_S


@pytest.mark.parametrize("answer", [b"\1", b"\1" * 33], ids=["cut short", "wrong shares"])
def test_who_gives_wrong_shares_to_unmask_is_named_and_struck_and_its_update_counts(answer: bytes) -> None:
    _, start = run(5, {4: {3: lambda data: (answer * len(data))[: len(data) - (len(answer) == 1)]}})
    controller, logs, seconds = start()
    (report,) = controller.progress.reports
    assert (report.clients, report.attempt) == ((0, 1, 2, 3, 4), 1)
    assert torch.equal(controller.weights, plain_weights(5))
    assert warned_of(logs) <= {4}  # where the four others were enough before it, nobody has looked at its answer
    assert seconds < PHASE_S


def test_shares_of_no_secret_cost_one_round_that_says_so_and_name_their_sender() -> None:
    job, start = run(5, {4: {}}, kind=SealingOthers, rounds=3)
    observer = Observer(job)
    controller, logs, seconds = start()
    first, second, third = controller.progress.reports
    assert (first.clients, first.outcome) == ((), "given up, as a client broke the protocol")
    assert [(one.client_id, one.reason) for one in first.strikes] == [(4, BROKEN)]
    assert second.clients == (0, 1, 2, 3), "the next round is without it"
    assert third.clients == (0, 1, 2, 3, 4), "one strike alone does not keep it out"
    assert [one.attempt for one in (first, second, third)] == [1, 1, 1]
    assert warned_of(logs) == {4}
    refused = [one["reason"] for one in logs if one["event"] == "update refused"]
    assert set(refused) == {"the round was given up, as a client broke the protocol"}
    assert {tuple(body.clients) for _, body in observer.all(MaskSurvivors) if body.round_id == 1} == {(0, 1, 2, 3, 4)}
    assert seconds < PHASE_S


class Silent(Lying):
    """Says nothing in some phases."""

    changes: Mapping[int, Change] = {}
    in_phases: frozenset[int] = frozenset()

    def _answer(self, own: Any, phase: int, data: bytes, group: Any) -> None:
        if phase not in self.in_phases:
            super()._answer(own, phase, data, group)


class SilentToComplain(Silent):
    """Nor does it ever send an update."""

    in_phases = frozenset({2})

    async def _make_masks(self, own: MaskingAttempt, dim: int) -> None:
        pass


class SilentToUnmask(Silent):
    in_phases = frozenset({3})


def test_who_seals_random_bytes_and_is_silent_then_holds_the_others_up_for_one_phase_alone() -> None:
    timeouts = {"keys_timeout_s": 20.0, "shares_timeout_s": 1.0, "unmask_timeout_s": 20.0}
    lie = {4: RANDOM["random shares"]}
    _, start = run(5, lie, kind=SilentToComplain, secure_aggregation=timeouts, round={"quorum": 1.0})
    controller, logs, seconds = start()
    (report,) = controller.progress.reports
    assert (report.clients, report.attempt) == ((0, 1, 2, 3), 2)
    assert torch.equal(controller.weights, plain_weights(4))
    assert warned_of(logs) == {4}
    assert 1.0 <= seconds < PHASE_S


def test_who_seals_random_bytes_for_one_and_does_not_answer_itself_costs_one_round_and_one_deadline() -> None:
    def change(data: bytes) -> bytes:
        return secrets.token_bytes(114) + data[114:]

    timeouts = {"unmask_timeout_s": 1.0}
    _, start = run(4, {3: {1: change}}, kind=SilentToUnmask, secure_aggregation=timeouts, rounds=2)
    controller, logs, seconds = start()
    first, second = controller.progress.reports
    assert (first.clients, first.attempt, first.strikes) == ((), 1, ())
    assert (second.clients, second.attempt) == ((0, 1, 2), 1)
    failed = [one["reason"] for one in logs if one["event"] == "secure aggregation failed"]
    assert len(failed) == 1
    assert "of client 3's secret 2 shares have come, the threshold is 3" in failed[0]
    assert 1.0 <= seconds < PHASE_S


def test_one_after_the_other_is_left_out_however_few_attempts_a_round_may_have() -> None:
    class Later(Lying):
        from_attempt = 2

    job, start = run(6, {5: RANDOM["random shares"]}, round={"max_attempts": 1})
    make_client = job.make_client

    def two_liars(bus: Any, task: Any, *, client_id: int, config: Any) -> Client:
        client: Client = make_client(bus, task, client_id=client_id, config=config)
        if client_id == 4:
            replace_masking(client, Later).changes = RANDOM["random shares"]
        return client

    job.make_client = two_liars
    controller, logs, _ = start()
    (report,) = controller.progress.reports
    assert (report.clients, report.attempt) == ((0, 1, 2, 3), 3)
    assert torch.equal(controller.weights, plain_weights(4))
    assert warned_of(logs) == {4, 5}
