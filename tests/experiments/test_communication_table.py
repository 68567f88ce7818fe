"""The table of docs/algorithms.md: what is counted again, over DDS and in lockstep, is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from dds_domains import new_domain
from doc_pages import rows, section

from gradbus.experiments.studies import communication_table
from gradbus.experiments.studies.communication_table import WAYS, WORLDS, count

# The page has one decimal, and headers may change by a few bytes: these are less than 1 % of the vector.
TOLERANCE = 0.05 + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_the_page_has_what_is_counted(root: Path, world: int) -> None:
    page = section((root / "docs" / "algorithms.md").read_text(encoding="utf-8"), "Orders, and what was counted")
    table = {cells[0]: cells[1:] for cells in rows(page, "way")}
    assert list(table) == [way.name for way in WAYS]
    at = WORLDS.index(world)
    counted = count(world, domain=new_domain(), job="test-communication")
    for way in WAYS:
        latency, bandwidth, *cells = table[way.name]
        assert (latency, bandwidth) == (way.latency, way.bandwidth)
        rounds, sent, received, all_received = (float(cell.split(", ")[at]) for cell in cells)
        found = counted[way.name]
        assert rounds == found.rounds, way.name
        assert sent == pytest.approx(found.sent, abs=TOLERANCE, rel=0.01), way.name
        assert received == pytest.approx(found.received, abs=TOLERANCE, rel=0.01), way.name
        assert all_received == pytest.approx(found.all_received, abs=TOLERANCE, rel=0.01), way.name


@pytest.mark.slow
def test_the_command_replaces_the_table_of_a_page_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication_table, "WORLDS", (2,))
    monkeypatch.setattr(communication_table, "WAYS", WAYS[:1])
    monkeypatch.setattr(communication_table, "count", lambda world: count(world, domain=new_domain(), job="test-write"))
    page = tmp_path / "page.md"
    page.write_text("above\n\nCounted for N = 7:\n\n| way |\n|---|\n| old |\n\nbelow\n")
    configured = structlog.get_config()
    try:
        communication_table.main(["--write", str(page)])
    finally:
        structlog.configure(**configured)
    above, table = page.read_text().split("Counted for N = 2:\n\n")
    assert above == "above\n\n"
    assert table.endswith("|\n\nbelow\n")
    assert [row[0] for row in rows(table, "way")] == [WAYS[0].name]
    page.write_text("no table\n")
    with pytest.raises(SystemExit, match="expected one table behind 'Counted for N = ', found 0"):
        communication_table.main(["--write", str(page)])
