"""Clients that have nothing to train in a round sit it out: no failure, no strike, and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from structlog.testing import capture_logs
from trees import DIM as TREE_DIM
from trees import rules, site_of, tree

import gradbus
from gradbus.actors.federated.controller.rounds import Outcome, Round, RoundRules
from gradbus.actors.federated.protocol import SAT_OUT
from gradbus.commands.history.invariants import check
from gradbus.commands.history.reader import read_history
from gradbus.models import NoopTask, TrainResult
from gradbus.runtime.errors import RoundTimeout, TrainingFailed

DIM = 50
SOME: dict[str, Any] = {"clients": {"min": 1}}  # one is enough
_jobs = itertools.count()


class Sometimes(NoopTask):
    """Has data in some rounds only."""

    def __init__(self, without: Collection[int]) -> None:
        super().__init__(DIM, delta="seeded")
        self._without = without

    def train(self, model: Any, **arguments: Any) -> Any:
        result = super().train(model, **arguments)
        return TrainResult.nothing() if arguments["round_id"] in self._without else result


def run(
    without: Sequence[Collection[int] | NoopTask],
    *,
    rounds: int = 3,
    client: gradbus.ClientConfig | None = None,
    **changes: Any,
) -> tuple[list[gradbus.RoundReport], list[Any], list[Any]]:
    """A run whose clients have nothing to train in these rounds, or another task: its reports, what the clients did,
    and the log."""
    job, domain = f"sits-out-{os.getpid()}-{next(_jobs)}", new_domain()
    config = gradbus.FederatedConfig(rounds=rounds, eval_every=0, **{"clients": {"num": len(without)}, **changes})
    config = config.replaced("clients.dead_after_s", 30.0)

    async def one(client_id: int) -> Any:
        async with gradbus.connect(job=job, domain=domain) as bus:
            given = without[client_id]
            task = given if isinstance(given, NoopTask) else Sometimes(given)
            with contextlib.suppress(TrainingFailed):  # the controller raises it, too
                return await gradbus.Client(bus, task, client_id=client_id, config=client).run()

    async def main() -> tuple[list[gradbus.RoundReport], list[Any]]:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus:
            async with asyncio.TaskGroup() as group:
                clients = [group.create_task(one(client_id)) for client_id in range(len(without))]
                reports = await gradbus.Controller(bus, NoopTask(DIM), config).run()
            return reports, [client.result() for client in clients]

    with capture_logs() as logs:
        return *asyncio.run(main()), logs


def test_a_client_that_has_nothing_to_train_is_counted_as_such_and_trains_again_later() -> None:
    reports, clients, logs = run([{}, {2}])
    assert [report.clients for report in reports] == [(0, 1), (0,), (0, 1)]
    assert [report.dropped.get(SAT_OUT, 0) for report in reports] == [0, 1, 0]
    assert [report.attempt for report in reports] == [1, 1, 1]
    assert not any(report.strikes for report in reports)
    assert [client.rounds for client in clients] == [3, 2]
    assert [(one["client"], one["round"]) for one in logs if one["event"] == "client sits out"] == [(1, 2)]
    assert not [one for one in logs if one["log_level"] in ("error", "warning")]


@pytest.mark.parametrize("changes", [{}, {"downlink_codec": "sq8"}, {"strategy": "fedadam"}], ids=str)
def test_a_round_in_which_no_client_has_anything_to_train_is_committed_with_the_same_model(
    changes: dict[str, Any],
) -> None:
    reports, _, logs = run([{2}, {2}], **changes)
    assert [report.clients for report in reports] == [(0, 1), (), (0, 1)]
    assert reports[1].outcome == "no client had anything to train"
    assert (reports[1].loss, reports[1].num_samples) == (None, 0)
    first, second, third = (report.weights_crc32 for report in reports)
    assert first == second != third
    (told,) = [one for one in logs if one["event"] == "model unchanged"]
    assert (told["round"], told["clients"]) == (2, 2)


def test_the_checker_of_histories_computes_such_a_round_again(tmp_path: Path) -> None:
    history = {"dir": str(tmp_path), "payloads": True}
    run([{2}, {2, 3}], rounds=4, history=history, client=gradbus.ClientConfig(history={"dir": str(tmp_path)}))
    found = {one.name: one for one in check(read_history(tmp_path))}
    assert {name: one.violations for name, one in found.items() if one.violations} == {}
    assert found["I3"].checked >= 4


def test_without_enough_updates_the_error_names_those_that_sat_out() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run([{1}, {}], rounds=1, round={"max_attempts": 2}, clients={"num": 2, "min": 2})
    assert caught.group_contains(RoundTimeout, match="client 0 had nothing to train")


class Stepping(Sometimes):
    """Trains by an optimizer of torch, as the rules of clients need."""

    def train(self, model: Any, **arguments: Any) -> Any:
        if arguments["round_id"] not in self._without:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sum(parameter.square().sum() for parameter in model.parameters()).backward()
            optimizer.step()
        return super().train(model, **arguments)


@pytest.mark.parametrize(
    ("rule", "strategy"), [("fedprox", "fedavg"), ("ditto", "fedavg"), ("scaffold", "scaffold"), ("plain", "fednova")]
)
def test_a_client_sits_out_whatever_the_rule_of_its_training(rule: str, strategy: str) -> None:
    reports, _, logs = run([Stepping({}), Stepping({2})], training={"rule": rule}, strategy=strategy)
    assert [report.clients for report in reports] == [(0, 1), (0,), (0, 1)]
    assert [report.dropped.get(SAT_OUT, 0) for report in reports] == [0, 1, 0]
    assert not [one for one in logs if one["log_level"] == "error"]


class Failing(NoopTask):
    """Fails in each round."""

    def __init__(self) -> None:
        super().__init__(DIM)

    def train(self, model: Any, **arguments: Any) -> Any:
        raise KeyError("age")


@pytest.mark.parametrize(("without", "least"), [({1}, 1), ({}, 2)], ids=["sits out", "waits for a second update"])
def test_a_round_that_fails_by_a_training_names_it_whatever_the_other_client_does(
    without: Collection[int], least: int
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run([without, Failing()], rounds=1, round={"max_attempts": 2}, clients={"num": 2, "min": least})
    assert caught.group_contains(TrainingFailed, match="training failed on client 1: KeyError: 'age', at ")


def test_without_enough_updates_the_error_names_why_updates_were_refused() -> None:
    with pytest.raises(ExceptionGroup) as caught:  # FedNova needs steps, and this task makes none
        run([{}, {}], rounds=1, strategy="fednova", round={"max_attempts": 2})
    assert caught.group_contains(RoundTimeout, match="after 2 attempts: updates of clients 0, 1: refused, see the log")


def opened(minimum: int = 1) -> Round:
    rules = RoundRules(minimum=minimum, quorum=1.0, deadline_s=60.0, grace_s=0.0)
    return Round(1, range(3), rules, now_s=0.0)


def test_a_round_has_nothing_only_if_all_that_were_expected_have_sat_it_out() -> None:
    round_ = opened()
    for client_id in (0, 1):
        round_.fail(client_id, SAT_OUT)
        assert round_.verdict(1.0) is None
    failing, alone = opened(), opened(minimum=3)
    round_.fail(2, SAT_OUT)
    assert round_.verdict(1.0) is Outcome.NOTHING
    for client_id in range(3):
        failing.fail(client_id, SAT_OUT if client_id else "training failed")
    assert failing.verdict(1.0) is Outcome.TOO_FEW
    alone.lose(0)
    for client_id in (1, 2):
        alone.fail(client_id, SAT_OUT)
    assert alone.verdict(1.0) is Outcome.TOO_FEW, "two of three clients that make a round"


def test_an_update_outweighs_that_a_client_had_nothing_in_an_attempt_before() -> None:
    round_ = opened()
    round_.fail(0, SAT_OUT)
    assert round_.may_send(0) is None


def test_asynchronous_rounds_go_on_when_clients_sit_out() -> None:
    reports, _, logs = run([{2}, {2, 3}], rounds=4, mode="asynchronous", asynchronous={"buffer": 2})
    assert [report.round_id for report in reports] == [1, 2, 3, 4]
    assert sum(report.dropped.get(SAT_OUT, 0) for report in reports) >= 2
    assert not [one for one in logs if one["log_level"] == "error"]


class Elsewhere(NoopTask):
    """Has data at some clients in some rounds only, and moves the model by the client's id. ``without``: pairs of a
    client and a round."""

    def __init__(self, without: Collection[tuple[int, int]], dim: int = TREE_DIM) -> None:
        super().__init__(dim, delta="seeded")
        self._without = frozenset(without)

    def train(self, model: Any, **arguments: Any) -> Any:
        result = super().train(model, **arguments)
        has_none = (arguments["client_id"], arguments["round_id"]) in self._without
        return TrainResult.nothing() if has_none else result


async def tree_run(
    without: Collection[tuple[int, int]], sites: list[list[int]], *, rounds: int, secure: bool = False, **top: Any
) -> list[gradbus.RoundReport]:
    """A centre above sites with these clients."""
    async with tree() as place, asyncio.TaskGroup() as group:
        for number, ids in enumerate(sites):
            level = f"site-{number}"
            own = rules(len(ids), **({"secure_aggregation": {"enabled": True}} if secure else SOME))
            group.create_task(site_of(await place.bus("centre"), await place.bus(level), number, own).run())
            for client_id in ids:
                client = gradbus.Client(await place.bus(level), Elsewhere(without), client_id=client_id)
                group.create_task(client.run())
        centre = gradbus.Controller(
            await place.bus("centre"), NoopTask(TREE_DIM), rules(len(sites), sites=True, rounds=rounds, **top)
        )
        return await centre.run()


async def flat_run(without: Collection[tuple[int, int]], count: int, rounds: int) -> list[int]:
    """Checksums of the models of a run with the same clients and one Controller."""
    async with tree() as place, asyncio.TaskGroup() as group:
        for client_id in range(count):
            client = gradbus.Client(await place.bus("flat"), Elsewhere(without), client_id=client_id)
            group.create_task(client.run())
        config = rules(count, rounds=rounds, clients={"min": 1})
        controller = gradbus.Controller(await place.bus("flat"), NoopTask(TREE_DIM), config)
        return [report.weights_crc32 for report in await controller.run()]


def test_a_client_below_a_site_sits_out_and_the_sum_of_its_site_is_that_of_the_others() -> None:
    without = {(1, 2)}
    with capture_logs() as logs:
        reports = asyncio.run(tree_run(without, [[0, 1], [2, 3]], rounds=3, **SOME))
    assert [report.clients for report in reports] == [(0, 1)] * 3
    assert [report.weights_crc32 for report in reports] == asyncio.run(flat_run(without, 4, 3))
    assert not [one for one in logs if one["log_level"] == "error"]


def test_a_site_whose_clients_have_all_nothing_sits_the_round_out_and_is_back_in_the_next_one() -> None:
    without = {(0, 2), (1, 2)}
    with capture_logs() as logs:
        reports = asyncio.run(tree_run(without, [[0, 1], [2, 3]], rounds=3, **SOME))
    assert [report.clients for report in reports] == [(0, 1), (1,), (0, 1)]
    assert [report.dropped.get(SAT_OUT, 0) for report in reports] == [0, 1, 0]
    assert [report.weights_crc32 for report in reports] == asyncio.run(flat_run(without, 4, 3))
    assert not any(report.strikes for report in reports)
    assert not [one for one in logs if one["log_level"] == "error"]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "masked"])
def test_a_round_of_a_tree_in_which_nobody_has_anything_is_committed_with_the_same_model(secure: bool) -> None:
    without = {(client_id, 2) for client_id in range(4)}
    with capture_logs() as logs:
        reports = asyncio.run(tree_run(without, [[0, 1], [2, 3]], rounds=3, secure=secure))
    assert [report.clients for report in reports] == [(0, 1), (), (0, 1)]
    assert reports[1].outcome == "no client had anything to train"
    first, second, third = (report.weights_crc32 for report in reports)
    assert first == second != third
    assert not [one for one in logs if one["log_level"] == "error"]


def virtual_run(without: Collection[tuple[int, int]], count: int, **settings: Any) -> gradbus.SimulationResult:
    config = gradbus.FederatedConfig(**{"rounds": 3, "eval_every": 0, "clients": {"dead_after_s": 30.0}, **settings})
    options = gradbus.SimulationOptions(domain=new_domain(), processes=2)
    return gradbus.simulate(Elsewhere(without), count, config=config, options=options)


def test_a_virtual_client_sits_out_and_trains_again_later() -> None:
    without = {(1, 2), (2, 2)}
    with capture_logs() as logs:
        result = virtual_run(without, 4)
    assert [report.clients for report in result.rounds] == [(0, 1, 2, 3), (0, 3), (0, 1, 2, 3)]
    assert [report.dropped.get(SAT_OUT, 0) for report in result.rounds] == [0, 2, 0]
    assert [report.weights_crc32 for report in result.rounds] == asyncio.run(flat_run(without, 4, 3))
    assert not any(report.strikes for report in result.rounds)
    assert not [one for one in logs if one["log_level"] in ("warning", "error")]


@pytest.mark.parametrize("changes", [{}, {"selection": {"name": "uniform", "fraction": 0.5}}], ids=["all", "half"])
def test_a_round_in_which_no_virtual_client_has_anything_is_committed_with_the_same_model(
    changes: dict[str, Any],
) -> None:
    result = virtual_run({(client_id, 2) for client_id in range(4)}, 4, **changes)
    asked = 2 if changes else 4
    assert [len(report.clients) for report in result.rounds] == [asked, 0, asked]
    assert result.rounds[1].outcome == "no client had anything to train"
    first, second, third = (report.weights_crc32 for report in result.rounds)
    assert first == second != third


def test_virtual_clients_that_are_too_few_without_those_that_sit_out_end_the_run_with_their_names() -> None:
    with pytest.raises(RoundTimeout, match="client 0 had nothing to train"):
        virtual_run({(0, 1)}, 2, clients={"min": 2, "dead_after_s": 30.0}, round={"max_attempts": 1})
