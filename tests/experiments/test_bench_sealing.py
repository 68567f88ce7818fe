"""The benchmark of encryption: its parts run in real processes, and a figure that falls short sets the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradbus.experiments.bench import sealing
from gradbus.experiments.bench.sealing import LEVELS, PARTS, TimedBlock, part_rows, rows_of


def blocks(psk: float, turns: int = 4) -> list[TimedBlock]:
    """Of a machine that gets slower by 1 ms from one block to the next."""
    relative = {"none": 1.0, "psk": psk, "identity": 3.0}
    return [
        TimedBlock(level, relative[level] * (1e-3 * at + 0.01), relative[level])
        for at, level in enumerate(LEVELS * turns)
    ]  # fmt: skip


def test_a_block_is_compared_with_the_line_between_its_neighbours_without_a_key() -> None:
    part = PARTS["round"]._replace(title="a round")
    rows = {row.name: row for row in rows_of(part, [blocks(1.2), blocks(1.2)])}
    measured = {name: pytest.approx(row.measured) for name, row in rows.items()}
    assert measured == {
        "a round: psk": 1.2, "a round: identity": 3.0,
        "a round: psk, processor": 1.2, "a round: identity, processor": 3.0,
    }  # fmt: skip
    assert {name: row.asked for name, row in rows.items() if row.asked} == {"a round: psk": "<= 1.05"}
    assert not any(row.asked for row in rows_of(part._replace(asked=False), [blocks(1.2)]))


@pytest.mark.parametrize(("psk", "code"), [(1.04, 0), (1.2, 1)])
def test_the_exit_code_tells_of_a_figure_that_falls_short(
    psk: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "_blocks", lambda part, folder: blocks(psk))
    out = tmp_path / "bench.json"
    assert sealing.main(["--part", "round", "--part", "alone", "--repeats", "2", "--out", str(out)]) == code
    saved = json.loads(out.read_text(encoding="utf-8"))
    assert [row["ok"] for row in saved["rows"]] == [code == 0] + [True] * 9
    assert {row["unit"] for row in saved["rows"]} == {"x none", "us"}
    assert [len(start) for start in saved["samples"][PARTS["round"].title]] == [12, 12]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["round", "all-reduce-bus", "all-reduce-network"])
def test_rounds_and_collectives_are_timed_at_all_levels_by_turns(name: str) -> None:
    rows, taken = part_rows(PARTS[name]._replace(blocks=4), repeats=1)
    if not taken:
        pytest.skip(rows[0].note)
    assert [row.measured > 0 for row in rows] == [True] * 4
    ((start,),) = taken.values()
    assert [block.level for block in start] == [*LEVELS] * (len(start) // 3)
