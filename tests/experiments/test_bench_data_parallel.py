"""The benchmark of data-parallel training: its cheap parts run, and a figure that falls short sets the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradbus.experiments.bench import data_parallel
from gradbus.experiments.bench.limits import Part, at_most
from gradbus.experiments.bench.processes import ProcessFailed
from gradbus.experiments.bench.training import Training, train
from gradbus.models import mnist_mlp


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_the_others_are_ended() -> None:
    run = Training(model=mnist_mlp, batch_size=8, config={"lr": -1.0}, data="glyphs")
    with pytest.raises(ProcessFailed, match=r"rank [01] failed(.|\n)*lr"):
        train(run, timeout_s=30)


@pytest.mark.slow
def test_the_bytes_of_a_step_are_those_of_the_gradient_and_a_small_share_of_them() -> None:
    rows, taken = data_parallel.bytes_rows(steps=4, data="glyphs", model=mnist_mlp)
    sent = taken["bytes_per_step"]
    assert sent["dense fp32"] >= 4 * sum(parameter.numel() for parameter in mnist_mlp(0).parameters())
    assert sent["DGC fp16"] < sent["DGC fp32"] < sent["dense fp32"] / 100
    assert [row.ok for row in rows[2:]] == [True] * 3, rows  # coded indices


@pytest.mark.parametrize(("limit", "code"), [(2.0, 0), (0.5, 1)])
def test_the_exit_code_tells_of_a_figure_that_falls_short(
    limit: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(lambda: ([at_most("wait", 1.0, limit, "ms")], {"wait_s": [0.001]}), "one")
    monkeypatch.setattr(data_parallel, "PARTS", {"one": part})
    out = tmp_path / "bench.json"
    assert data_parallel.main(["--out", str(out)]) == code
    saved = json.loads(out.read_text(encoding="utf-8"))
    assert saved["rows"][0]["ok"] is (code == 0)
    assert saved["samples"]["wait_s"] == [0.001]
    assert set(saved["samples"]["seconds"]) == {"one"}
