"""A client that speaks the protocol rightly and sends rubbish: what becomes of it, and of everybody else."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from other_payloads import send_instead
from settings import nested

import gradbus
from gradbus.actors.federated.controller import selection
from gradbus.actors.federated.controller.participation import FOR_GOOD
from gradbus.actors.federated.controller.selection import StartCondition
from gradbus.models import NoopTask
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.errors import BarrierTimeout, JoinRefused
from gradbus.runtime.tasks import single_error
from gradbus.runtime.wire.frames import FrameKey

DIM = 2_000
_numbers = itertools.count()


@pytest.fixture
def liars(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Client -> rounds in which it sends NaN."""
    rounds: dict[int, set[int]] = {}

    def choose(key: FrameKey, honest: bytes) -> bytes:
        return honest[:-4] + b"\x00\x00\xc0\x7f" if key.round_id in rounds.get(key.sender, ()) else honest

    send_instead(monkeypatch, choose)
    return rounds


async def run(config: gradbus.FederatedConfig, *, clients: int = 3) -> tuple[list[gradbus.RoundReport], dict[int, str]]:
    """The reports, and how clients ended that did not end well."""
    job, domain = f"quarantine-{os.getpid()}-{next(_numbers)}", new_domain()
    ends: dict[int, str] = {}

    async def client(client_id: int) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            try:
                await gradbus.Client(bus, NoopTask(DIM, delta="seeded"), client_id=client_id).run()
            except JoinRefused as refused:
                ends[client_id] = str(refused)

    async with asyncio.timeout(40), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(i)) for i in range(clients)]
        try:
            reports = await gradbus.Controller(bus, NoopTask(DIM), config).run()
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
    return reports, ends


def config_of(**changes: Any) -> gradbus.FederatedConfig:
    clients = {"clients__num": 3, "clients__min": 2, "clients__heartbeat_s": 0.1, "clients__dead_after_s": 30.0}
    return gradbus.FederatedConfig(**nested({**clients, "eval_every": 0, **changes}))


def test_after_its_strikes_a_client_is_out_for_some_rounds_and_then_back(liars: dict[int, set[int]]) -> None:
    liars[1] = {1, 2}
    reports, ends = asyncio.run(run(config_of(rounds=6, limits__max_strikes=2, limits__quarantine_rounds=2)))
    assert ends == {}
    assert [report.clients for report in reports] == [(0, 2), (0, 2), (0, 2), (0, 2), (0, 1, 2), (0, 1, 2)]
    assert [report.expected for report in reports] == [3, 3, 2, 2, 3, 3]
    assert [report.dropped.get("non-finite", 0) for report in reports] == [1, 1, 0, 0, 0, 0]
    first, second = (strike for report in reports for strike in report.strikes)
    assert (first.client_id, first.round_id, first.count, first.out_until) == (1, 1, 1, 0)
    assert (second.round_id, second.count, second.out_until, second.reason) == (2, 2, 5, "non-finite")
    assert "nan" in second.detail


def test_out_for_good_is_told_to_the_client_and_those_that_are_left_go_on(liars: dict[int, set[int]]) -> None:
    liars[2] = set(range(10))
    reports, ends = asyncio.run(run(config_of(rounds=3, limits__max_strikes=1, limits__quarantine_rounds=0)))
    assert [report.clients for report in reports] == [(0, 1)] * 3
    assert [strike.out_until for report in reports for strike in report.strikes] == [FOR_GOOD]
    assert list(ends) == [2]
    assert "out for good after strike 1 in round 1: non-finite" in ends[2]


def test_a_run_that_lacks_clients_says_who_is_kept_out(
    liars: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts_s = iter([30.0])  # until all are there for the first time

    def gathering(**options: Any) -> StartCondition:
        return StartCondition(**{**options, "timeout_s": next(timeouts_s, 0.1)})

    monkeypatch.setattr(selection, "StartCondition", gathering)
    liars[2] = set(range(10))
    config = config_of(rounds=3, clients__min=3, limits__max_strikes=1, round__max_attempts=2)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run(config))
    error = single_error(caught.value)
    assert isinstance(error, BarrierTimeout)
    assert "round 1 cannot start (kept out: 2): clients: 2 of 3 ready" in str(error)


def test_a_restart_forgets_neither_strikes_nor_who_is_out(liars: dict[int, set[int]], tmp_path: Path) -> None:
    liars[1] = {1, 2}
    rules: dict[str, Any] = {"limits__max_strikes": 2, "limits__quarantine_rounds": 2, "checkpoint__dir": tmp_path}
    unbroken, _ = asyncio.run(run(config_of(rounds=5, **{**rules, "checkpoint__dir": None})))
    for rounds in (1, 3, 5):
        reports, _ = asyncio.run(run(config_of(rounds=rounds, **rules)))
    assert [report.clients for report in reports] == [report.clients for report in unbroken]
    assert [report.weights_crc32 for report in reports] == [report.weights_crc32 for report in unbroken]
    told = [json.loads(json.dumps(report.to_json()))["strikes"] for report in reports]
    assert told == [[strike.to_json() for strike in report.strikes] for report in unbroken]


def test_a_clipped_update_is_named_in_the_report_and_bounded_in_the_model(tmp_path: Path) -> None:
    reports, _ = asyncio.run(run(config_of(rounds=1, limits__clip_norm=1e-3, checkpoint__dir=tmp_path)))
    assert reports[0].marks == {"clipped": (0, 1, 2)}
    store = CheckpointStore(tmp_path)
    checkpoint = store.load_newest()
    store.close()
    assert checkpoint is not None
    # Three directions that have nothing to do with each other: their mean is shorter than any of them.
    assert 0 < checkpoint.tensors["weights"].norm() <= 1.001e-3
    assert torch.isfinite(checkpoint.tensors["weights"]).all()
