"""The benchmark of data-parallel training: its cheap parts run, and a figure that falls short is told of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradbus.experiments import bench_ddp
from gradbus.experiments.bench_children import ChildFailed
from gradbus.experiments.bench_ddp_collectives import Case, cases, collective_rows, reduced
from gradbus.experiments.bench_ddp_exact import bit_equal_rows, dense_dgc_rows, equal_rows
from gradbus.experiments.bench_ddp_process import Training, run_ranks
from gradbus.experiments.bench_parts import Part
from gradbus.experiments.bench_rows import at_most
from gradbus.models import mnist_mlp


@pytest.mark.slow
def test_every_collective_is_compared_with_numpy() -> None:
    rows, taken = collective_rows((2,), large_elems=1000)
    assert [row.ok for row in rows] == [True], rows
    assert rows[0].measured == float(rows[0].asked) > 1000
    assert [rank["wrong"] for rank in taken["collectives_2"]] == [[], []]


@pytest.mark.slow
def test_parameters_of_all_ranks_are_equal_after_every_step() -> None:
    (row,), _ = equal_rows((2,), steps=6, data="glyphs")
    assert row.ok
    assert (row.measured, row.asked) == (12, "12")  # dense and DGC


@pytest.mark.slow
def test_ranks_are_bit_equal_to_one_process_also_where_one_has_no_data() -> None:
    (row,), taken = bit_equal_rows((2,), steps=6, data="glyphs")
    assert row.ok, taken
    assert (row.measured, row.asked) == (18, "18")  # three algorithms


@pytest.mark.slow
def test_dgc_that_sends_everything_is_sgd() -> None:
    (row,), _ = dense_dgc_rows((2,), steps=5, data="glyphs")
    assert row.ok, row


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_the_others_are_ended() -> None:
    run = Training(world=2, model=mnist_mlp, batch_size=8, config={"lr": -1.0}, data="glyphs")
    with pytest.raises(ChildFailed, match=r"rank [01] failed(.|\n)*lr"):
        run_ranks(run, timeout_s=30)


@pytest.mark.parametrize(("limit", "code"), [(2.0, 0), (0.5, 1)])
def test_the_exit_code_tells_of_a_figure_that_falls_short(
    limit: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(lambda: ([at_most("wait", 1.0, limit, "ms")], {"wait_s": [0.001]}), "one")
    monkeypatch.setattr(bench_ddp, "PARTS", {"one": part})
    out = tmp_path / "bench.json"
    assert bench_ddp.main(["--out", str(out)]) == code
    saved = json.loads(out.read_text(encoding="utf-8"))
    assert saved["rows"][0]["ok"] is (code == 0)
    assert saved["samples"]["wait_s"] == [0.001]
    assert set(saved["samples"]["seconds"]) == {"one"}


@pytest.mark.parametrize("case", cases(1000), ids=str)
def test_values_of_a_case_have_its_shape_and_differ_between_ranks(case: Case) -> None:
    here, there = case.tensor(0), case.tensor(1)
    assert here.shape == case.shape
    assert here.dtype == case.dtype
    assert torch.equal(here, case.tensor(0))
    assert here.numel() == 0 or not torch.equal(here, there)
    assert case.layout not in ("transposed", "every second") or not here.is_contiguous()


def test_half_precision_is_added_in_float32_and_rounded_once() -> None:
    tensors = [torch.tensor([2048.0 if rank == 0 else 1.0], dtype=torch.float16) for rank in range(3)]
    assert reduced(tensors, "sum").item() == 2050.0  # 2048 + 1 is 2048 in float16
