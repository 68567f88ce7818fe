"""``gradbus matrix``: what it prints is what a controller does."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

import gradbus
from gradbus import models
from gradbus.actors.federated.combinations import check_combination
from gradbus.experiments.matrix import Table, as_markdown, as_text, configured, dimensions, refusal, tables
from gradbus.models.data_sets import glyphs
from gradbus.runtime.choices import CODECS, STRATEGIES
from gradbus.runtime.errors import ConfigError

RUNS = 4  # cells that are run, of those that work
TRAINERS = 7  # clients that train in each round of such a run: enough for every strategy with its defaults


def works() -> list[tuple[str, str, str]]:
    """Strategy, other dimension and its value, of all cells that work with clients of this Controller, in an order
    that is arbitrary and always the same."""
    cells = [
        (strategy, table.columns, column)
        for table in tables()
        for strategy, row in table.cells.items()
        for column, reason in row.items()
        if not reason and column != "sites"
    ]
    return sorted(cells, key=lambda cell: hashlib.sha256(repr(cell).encode()).digest())


def test_the_page_is_what_the_command_prints(root: Path, invoke: Any) -> None:
    shown = invoke("matrix", "--markdown")
    assert shown.code == 0
    assert shown.out == (root / "docs" / "matrix.md").read_text(encoding="utf-8"), (
        "run: gradbus matrix --markdown > docs/matrix.md"
    )


def test_every_choice_is_compared_with_every_strategy() -> None:
    found = {table.columns: table for table in tables()}
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


@pytest.mark.slow
@pytest.mark.parametrize("cell", works()[:RUNS], ids=lambda cell: "-".join(cell))
def test_a_cell_that_works_runs(cell: tuple[str, str, str], domain: int) -> None:
    """Two rounds over DDS in which seven clients count."""
    strategy, dimension, value = cell
    known = {one.name: one.values for one in dimensions()}
    config = configured(known["strategy"][strategy], known[dimension][value])
    clients = TRAINERS * (2 if dimension == "selection" and value != "all" else 1)  # half of them are asked
    config = config.replaced("clients.min", TRAINERS).replaced("clients.num", clients)

    async def run() -> list[gradbus.RoundReport]:
        task = models.ClassificationTask(
            models.mnist_mlp, glyphs(train=140, test=20), num_clients=clients, batch_size=10
        )
        async with gradbus.connect("matrix", domain=domain) as bus, asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(gradbus.Client(bus, task, client_id=number).run())
            return [report async for report in gradbus.Controller(bus, task, config).rounds()]

    reports = asyncio.run(run())
    assert [report.round_id for report in reports] == [1, 2]
    assert all(report.updates for report in reports)
