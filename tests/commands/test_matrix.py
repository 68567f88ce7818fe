"""``gradbus matrix``: what it prints is what a controller does."""

from __future__ import annotations

import asyncio
import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from pydantic import ValidationError

import gradbus
from gradbus import models
from gradbus.actors import Site
from gradbus.actors.federated.controller.combinations import check_combination
from gradbus.commands.matrix import (
    Chosen,
    Table,
    as_markdown,
    as_text,
    configured,
    dimensions,
    pairs,
    refusal,
    tables,
)
from gradbus.models.data_sets import DataSplit, glyphs
from gradbus.runtime.choices import CODECS, STRATEGIES
from gradbus.runtime.config.federated import UpstreamConfig
from gradbus.runtime.errors import ConfigError

RUNS = 180  # at most, for all pairs that work: when this was written 170 configurations had all 1,099
AT_ONCE = 10  # of them, on one loop
NIGHTLY_FROM = 60  # the runs before have three of four pairs, and each choice at least once
SITES, CLIENTS_OF_A_SITE = 2, 2


@cache
def cells() -> dict[tuple[Chosen, Chosen], str]:
    return pairs(tables())


@cache
def runs() -> list[dict[str, str]]:
    """Configurations, as a value for each dimension, that together have every pair that works. The same each time.

    Greedy, as Cohen et al., The AETG System, IEEE TSE 1997: each begins with a pair that none has yet, and takes in
    each other dimension the value with most such pairs, of those with which the whole still works.
    """
    known = {one.name: one.values for one in dimensions()}
    works = {frozenset(pair) for pair, reason in cells().items() if not reason}
    left = {pair: frozenset(pair) for pair, reason in cells().items() if not reason}  # in the order of the tables
    runs = []
    while left:
        chosen: dict[str, str] = dict(next(iter(left)))
        open_pairs = set(left.values())
        for name in sorted(known.keys() - chosen.keys(), key=lambda name: (-len(known[name]), name)):
            so_far = [known[other][value] for other, value in chosen.items()]
            new = {value: {frozenset({(name, value), other}) for other in chosen.items()} for value in known[name]}
            best = sorted(known[name], key=lambda value: -len(new[value] & open_pairs))
            fits = (one for one in best if new[one] <= works and not refusal(*so_far, known[name][one]))
            chosen[name] = next(fits)
        runs.append(chosen)
        has = set(map(frozenset, itertools.combinations(chosen.items(), 2)))
        left = {pair: both for pair, both in left.items() if both not in has}
    return runs


def test_the_page_is_what_the_command_prints(root: Path, invoke: Any) -> None:
    shown = invoke("matrix", "--markdown")
    assert shown.code == 0
    assert shown.out == (root / "docs" / "matrix.md").read_text(encoding="utf-8"), "run: make docs"


def test_every_choice_is_compared_with_every_strategy() -> None:
    found = {table.columns: table for table in tables("strategy")}
    for name in ("codec", "downlink_codec"):
        assert all(list(row) == list(CODECS.table) for row in found[name].cells.values())
    assert all(list(table.cells) == list(STRATEGIES.table) for table in found.values())
    assert len(found) == len(dimensions()) - 1


def test_a_pair_gets_the_same_answer_from_both_sides() -> None:
    def swapped(table: Table) -> dict[str, dict[str, bool]]:
        columns = next(iter(table.cells.values()))
        return {column: {name: bool(row[column]) for name, row in table.cells.items()} for column in columns}

    (by_privacy,) = [table for table in tables("codec") if table.columns == "privacy"]
    (by_codec,) = [table for table in tables("privacy") if table.columns == "codec"]
    assert swapped(by_privacy) == {
        name: {column: bool(reason) for column, reason in row.items()} for name, row in by_codec.cells.items()
    }
    assert by_codec.cells["central"]["sq8"]
    assert not by_codec.cells["local"]["sq8"]


def test_a_number_in_the_tables_has_its_reason() -> None:
    for text in (as_text("mode"), as_markdown("mode")):
        numbers = {int(cell) for cell in re.findall(r"(?:\| |  )(\d+)(?= \||  |$)", text, re.MULTILINE)}
        told = {int(number) for number in re.findall(r"^(\d+)(?:\. |  )\S", text, re.MULTILINE)}
        assert numbers == told != set()


def test_an_unknown_choice_is_named_with_those_that_there_are(invoke: Any) -> None:
    shown = invoke("matrix", "--of", "optimiser")
    assert shown.code == 2
    assert "'optimiser'" in shown.err
    assert "downlink_codec" in shown.err


def test_a_controller_refuses_what_the_matrix_refuses_before_it_has_a_model() -> None:
    known = {one.name: one.values for one in dimensions()}
    first, second = known["strategy"]["scaffold"], known["downlink_codec"]["q8"]
    why = refusal(first, second)
    assert "may not be rounded" in why
    with pytest.raises(ConfigError, match=re.escape(why)):
        check_combination(configured(first, second))


def test_every_pair_of_choices_has_one_cell() -> None:
    values = [[(one.name, value) for value in one.values] for one in dimensions()]
    assert list(cells()) == [
        pair for first, second in itertools.combinations(values, 2) for pair in itertools.product(first, second)
    ]


def test_a_refusal_names_all_strategies_that_would_do_and_no_other() -> None:
    named = 0
    for table in tables("strategy"):
        for column in next(iter(table.cells.values())):
            for row in table.cells.values():
                listed = set(re.findall(r"\w+", row[column].partition(". Use ")[2])) & set(STRATEGIES.table)
                works = {name for name, own in table.cells.items() if not own[column]}
                assert listed <= works
                if len(listed) > 1:
                    assert listed == {name for name in works if STRATEGIES.table[name].adds_sums}
                    named += 1
    assert named


def test_every_pair_that_is_refused_is_refused_by_a_controller_before_it_waits_for_clients(domain: int) -> None:
    known = {one.name: one.values for one in dimensions()}
    refused = {pair: reason for pair, reason in cells().items() if reason}

    async def start(bus: gradbus.Bus, *chosen: Chosen) -> None:
        config = configured(*(known[name][value] for name, value in chosen))
        await gradbus.Controller(bus, models.NoopTask(7), config).run()

    async def start_all() -> None:
        async with asyncio.timeout(60), gradbus.connect("refused", domain=domain) as bus:
            for pair, reason in refused.items():
                with pytest.raises((ConfigError, ValidationError), match=re.escape(reason)):
                    await start(bus, *pair)

    asyncio.run(start_all())
    assert len(refused) > 100


def test_the_runs_have_every_pair_that_works() -> None:
    had = {pair for run in runs() for pair in itertools.permutations(run.items(), 2)}
    assert {pair for pair, reason in cells().items() if not reason} == had & cells().keys()
    assert len(runs()) <= RUNS
    assert all(run.keys() == {one.name for one in dimensions()} for run in runs())
    every, each_time = ({chosen for run in some for chosen in run.items()} for some in (runs(), runs()[:NIGHTLY_FROM]))
    assert every == each_time


def with_clients(run: dict[str, str]) -> gradbus.FederatedConfig:
    """The configuration of a run, with as few clients as its strategy can work with; with a part of them in a round,
    twice as many."""
    known = {one.name: one.values for one in dimensions()}
    config = configured(*(known[name][value] for name, value in run.items())).replaced("clients.dead_after_s", 30.0)
    if run["clients"] == "sites":
        return config.replaced("clients.min", SITES).replaced("clients.num", SITES)
    for trainers in (3, 5, 7):
        clients = trainers * (1 if run["selection"] == "all" else 2)
        fewer = config.replaced("clients.min", trainers).replaced("clients.num", clients)
        try:
            check_combination(fewer)
        except ConfigError:
            continue
        return fewer
    raise AssertionError(f"not enough clients for {run}")


@cache
def data() -> DataSplit:
    """The same images for all runs: to draw them takes longer than to train on them."""
    return glyphs(train=140, test=20)


def tiny() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))


async def federation(run: dict[str, str], job: str, domain: int) -> None:
    """Two rounds over DDS with all clients on this loop. Each has an update of every trainer, and changes the model."""
    config = with_clients(run)
    clients = config.clients.num or 0
    in_all = clients * (CLIENTS_OF_A_SITE if run["clients"] == "sites" else 1)
    task = models.ClassificationTask(tiny, data(), num_clients=in_all, batch_size=20)
    async with gradbus.connect(job, domain=domain) as bus, asyncio.TaskGroup() as group:
        controller = gradbus.Controller(bus, task, config)
        for number in range(clients):
            if run["clients"] == "sites":
                group.create_task(site(bus, f"{job}-{number}", domain, task, number))
            else:
                group.create_task(gradbus.Client(bus, task, client_id=number).run())
        before, reports = torch.zeros(()), []
        async for report in controller.rounds():
            reports.append(report)
            assert torch.isfinite(controller.weights).all()
            assert not torch.equal(before, controller.weights)
            before = controller.weights.clone()
    assert [report.round_id for report in reports] == [1, 2]
    updates = config.asynchronous.buffer if config.mode == "asynchronous" else config.clients.min
    assert all(report.updates >= updates for report in reports), reports


async def site(above: gradbus.Bus, job: str, domain: int, task: models.Task, number: int) -> None:
    """A site with its clients, which have a job of their own."""
    clients = {"min": CLIENTS_OF_A_SITE, "dead_after_s": 30.0}
    config = gradbus.FederatedConfig.model_validate({"clients": clients, "eval_every": 0})
    async with gradbus.connect(job, domain=domain) as bus, asyncio.TaskGroup() as group:
        group.create_task(Site(above, bus, task, config, UpstreamConfig(site=number, alone=False)).run())
        for own in range(CLIENTS_OF_A_SITE):
            group.create_task(gradbus.Client(bus, task, client_id=CLIENTS_OF_A_SITE * number + own).run())


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.nightly] if first >= NIGHTLY_FROM else [])
        for first in range(0, RUNS, AT_ONCE)
    ],
)
def test_every_pair_that_works_runs(first: int) -> None:
    """The runs are made where the test begins, and not where it is collected, which every call of pytest would do."""

    async def all_at_once() -> None:
        domain = new_domain()
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for number, run in enumerate(runs()[first : first + AT_ONCE]):
                group.create_task(federation(run, f"matrix-{number}", domain), name=" ".join(run.values()))

    pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")
    torch.set_num_threads(1)  # the trainings of these models are too short to be shared
    asyncio.run(all_at_once())
