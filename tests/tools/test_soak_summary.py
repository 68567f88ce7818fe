"""What a soak makes of its history: who comes back late, or never, is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from soak.summary import LIMITS, recoveries, summarise

from gradbus.commands.history.reader import RunHistory, Start

GAP, CLIENT, LINK, CONTROLLER, RANKS = LIMITS


def start(at_s: float, **events: list[float]) -> Start:
    """A start, and times of what happened in it."""
    return Start(
        {"event": "started", "at_s": at_s},
        [{"event": name, "at_s": time_s} for name, times in events.items() for time_s in times],
    )


def fault(kind: str, target: str, at_s: float) -> dict[str, Any]:
    return {"event": "begins", "kind": kind, "target": target, "at_s": at_s}


def run(*clients: Start, until_s: float = 100.0) -> RunHistory:
    controller = start(
        0.0, commanded=[*range(int(until_s))], committed=[second + 0.5 for second in range(int(until_s))]
    )
    return RunHistory(Path(), controller=[controller], clients={0: list(clients)})


def test_who_comes_back_is_measured() -> None:
    found = recoveries(run(start(0.0, offered=[1.0]), start(10.0, offered=[12.0, 13.0])), None, [])
    assert found[CLIENT] == [2.0]


def test_who_never_comes_back_counts_with_all_the_time_there_was() -> None:
    found = recoveries(run(start(0.0, offered=[1.0]), start(10.0)), None, [])
    (seconds,) = found[CLIENT]
    assert seconds > 80.0 > LIMITS[CLIENT]


def test_who_had_no_time_to_come_back_does_not_count() -> None:
    assert recoveries(run(start(0.0), start(10.0), start(12.0, offered=[13.0])), None, [])[CLIENT] == [1.0]
    assert recoveries(run(start(0.0), start(95.0)), None, [])[CLIENT] == []


def test_a_client_is_not_late_by_the_time_in_which_no_controller_runs() -> None:
    history = run(start(0.0, offered=[1.0, 29.0]), start(31.0, offered=[53.0]))
    history.controller = [start(0.0, committed=[30.0]), start(50.0, commanded=[50.5]), start(90.0)]
    history.controller[1].events.append({"event": "committed", "at_s": 89.0})
    mended = {"event": "ends", "kind": "partition", "target": "the far clients", "at_s": 49.0}
    found = recoveries(history, None, [mended])
    assert found[CLIENT] == [3.0]
    assert found[LINK] == [3.0]


@pytest.mark.parametrize(("told", "worst"), [([31.0], 1.5), ([], 68.0)])
def test_a_rank_that_never_learns_of_the_death_of_another_is_told(told: list[float], worst: float) -> None:
    ranks = RunHistory(Path(), ranks={0: [start(1.0, failed=[31.5])], 1: [start(1.0)], 2: [start(1.0, failed=told)]})
    found = recoveries(run(), ranks, [fault("kill rank", "rank-1", 30.0)])
    assert len(found[RANKS]) == 2
    assert max(found[RANKS]) >= worst


def test_ranks_that_were_not_at_it_learn_nothing() -> None:
    ranks = RunHistory(Path(), ranks={0: [start(1.0, failed=[20.0])], 1: [start(1.0)], 2: [start(1.0, failed=[20.0])]})
    assert recoveries(run(), ranks, [fault("kill rank", "rank-1", 30.0)])[RANKS] == []


def test_a_controller_that_gives_no_command_any_more_is_told() -> None:
    history = run(until_s=50.0)
    history.controller.append(start(60.0))
    history.resources.append({"at_s": 100.0})
    assert recoveries(history, None, [])[CONTROLLER] == [40.0]


def test_a_soak_in_which_nothing_could_be_checked_is_not_well(tmp_path: Path) -> None:
    folder = tmp_path / "federated" / "history"
    folder.mkdir(parents=True)
    (folder / "controller.jsonl").touch()
    (tmp_path / "nemesis.jsonl").touch()
    summary = summarise(tmp_path, minutes=1.0, seed=1)
    assert (summary["ok"], summary["nothing_to_check"]) == (False, ["I1", "I2", "I3", "I7", "I8"])
