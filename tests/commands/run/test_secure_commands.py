"""The commands of docs/secure-aggregation.md: a controller and its clients, as real processes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from forked_commands import Forked
from fresh_shells import command_lines, write_mnist

from gradbus.actors.secure_aggregation.masked_values import size_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_the_commands_of_the_page_run_rounds_with_secure_aggregation(root: Path, tmp_path: Path, domain: int) -> None:
    write_mnist(tmp_path / "data")
    variables = {"GRADBUS_DATA": str(tmp_path / "data"), "GRADBUS_BUS__DOMAIN": str(domain)}
    page = command_lines((root / "docs" / "secure-aggregation.md").read_text(encoding="utf-8"))
    controller, client = (shlex.split(line.partition("  #")[0])[1:] for line in page if line.startswith("gradbus c"))
    short = ["--set", "federated.rounds=2", "--set", "federated.training.subset_size=8", "--no-live"]
    lines = [[*controller, *short, "--run-dir", str(tmp_path / "run")]]
    lines += [[*client[:-1], str(number)] for number in range(4)]
    running = [Forked(words, root, variables) for words in lines]
    try:
        for process in running:
            out, errors = process.communicate(timeout=150.0)
            assert process.returncode == 0, out + errors
    finally:
        for process in running:
            process.kill()
    reports = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [report["clients"] for report in reports] == [[0, 1, 2, 3]] * 2
    assert [report["bytes_up"] for report in reports] == [4 * size_of(1_199_882)] * 2
