"""A collective that waits too long is named in the log, with the ranks it waits for; less and less often."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch
from dds_domains import new_domain

import gradbus
from gradbus.runtime.collectives import status
from gradbus.runtime.collectives.data_movement import Barrier
from gradbus.runtime.collectives.operation import Operation, OperationKey
from gradbus.runtime.collectives.status import MAX_LINES, StallLog
from gradbus.runtime.wire import control


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.two_ranks = asyncio.Event()  # have said that they wait for rank 2 alone

    def warning(self, event: str, **facts: Any) -> None:
        self.lines.append({"event": event, **facts})
        if len({line["rank"] for line in self.lines if line.get("missing") == [2]}) == 2:
            self.two_ranks.set()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(status, "log", log)
    return log


def waiting(name: str, started_s: float = 100.0) -> Operation:
    operation = Barrier(0, 3)
    operation.key, operation.started_s = OperationKey(7, 2, name), started_s
    operation.called.add(1)
    return operation


def test_lines_come_after_the_time_that_was_set_and_then_after_twice_as_long(log: Log) -> None:
    report, operation = StallLog("world", 0, 3, 10.0), waiting("worker/save")
    told_at = []
    for now_s in range(100, 200):
        before = len(log.lines)
        report.look([operation], float(now_s))
        told_at += [now_s] * (len(log.lines) - before)
    assert told_at == [110, 130, 170]
    line = log.lines[0]
    assert (line["event"], line["collective"], line["round"], line["call_no"]) == ("stalled", "worker/save", 7, 2)
    assert (line["ready"], line["waiting_s"], line["group"], line["rank"]) == ([0, 1], 10.0, "world", 0)


def test_many_at_once_are_summed_up_and_zero_means_never(log: Log) -> None:
    many = [waiting(f"grad/{i}") for i in range(MAX_LINES + 5)]
    StallLog("world", 0, 3, 0.0).look(many, 1e6)
    assert log.lines == []
    StallLog("world", 0, 3, 10.0).look(many, 1e6)
    assert len(log.lines) == MAX_LINES + 1
    assert log.lines[-1]["more_collectives"] == 5


def test_lines_that_cannot_be_written_do_not_come_again_at_once(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    report, both = StallLog("world", 0, 3, 1.0), [waiting("a"), waiting("b")]
    with monkeypatch.context() as broken:
        broken.setattr(status, "log", None)  # whatever is called of it raises
        with pytest.raises(AttributeError):
            report.look(both, 101.5)
    report.look(both, 102.0)
    assert log.lines == []
    report.look(both, 103.6)
    assert [line["collective"] for line in log.lines] == ["a", "b"]


def test_a_plain_group_names_the_rank_that_does_not_call(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "RANK_STATUS_EVERY_S", 0.05)

    async def main() -> None:
        job, domain = f"stalls-{os.getpid()}", new_domain()

        async def rank(number: int) -> None:
            async with (
                gradbus.connect(job=job, domain=domain) as bus,
                gradbus.join_group(bus, rank=number, world=3, stall_warning_s=0.2) as group,
            ):
                if number == 2:
                    await log.two_ranks.wait()
                await group.all_reduce("loss/4", torch.ones(4), op="mean", round_id=4)

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(rank(number))

    asyncio.run(main())
    for line in log.lines:
        assert (line["collective"], line["round"]) == ("loss/4", 4)
        assert line["missing"] == [2] or line["missing"] == sorted({0, 1, 2} - {line["rank"]})  # it was first
        assert line["waiting_s"] >= 0.2
    assert {line["rank"] for line in log.lines} == {0, 1}
