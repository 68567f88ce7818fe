"""gradbus.torch.profile: the parts of a step, the files, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_node import play

import gradbus.torch
from gradbus.commands.rundir.reading import read_run
from gradbus.runtime.profiling.profile import Profile
from gradbus.runtime.profiling.summary import ProfileSummary, read_summary
from gradbus.runtime.profiling.table import text_table

STEPS, LATE_S = 12, 0.05  # of profile_scenes
WAYS = ("dense", "topk", "DistributedOptimizer")


@pytest.mark.slow
def test_each_part_of_a_step_has_its_time_and_the_early_rank_waits(tmp_path: Path) -> None:
    results = play("profile_scenes", "measured", folder=str(tmp_path))
    for way in WAYS:
        check_parts(way, *(result[way] for result in results))
        check_files(tmp_path / way, [result[way] for result in results])
    for result in results:
        assert "another one is under way" in result["nested"]
        assert result["by hand"] == [1, 4000, True]
        assert result["left"] == [True, True]


def check_parts(way: str, early: dict[str, Any], late: dict[str, Any]) -> None:
    for one in (early, late):
        mean = one["mean"]
        assert (one["steps"], one["failed"]) == (STEPS, 0), way
        parts = sum(mean[name] for name in ("forward_s", "backward_s", "wait_s", "apply_s", "other_s"))
        assert parts == pytest.approx(mean["step_s"], rel=1e-6), way
        assert mean["bytes_out"] > 0
        assert mean["exchange_ms"] > 0
        assert ("compression_ms" in mean) == (way == "topk")
        lines = one["table"].splitlines()
        assert lines[0].split()[:4] == ["rank", "0," if one is early else "1,", str(STEPS), "steps"]
        assert [line.split(",")[0].strip() for line in lines[1:4]] == ["step", "forward", "backward"]
    assert late["mean"]["forward_s"] > LATE_S
    assert early["mean"]["wait_s"] > LATE_S / 2, way  # it begins to wait when its own backward pass is over
    assert early["mean"]["forward_s"] < LATE_S / 2


def check_files(folder: Path, results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        summary = read_summary(folder / f"profile-rank-{rank}.jsonl")
        assert summary is not None
        assert summary.total["bytes_out"] == result["total"]["bytes_out"]
        assert summary.mean["wait_s"] == pytest.approx(result["mean"]["wait_s"], abs=1e-6)
    run = read_run(folder)  # as gradbus report does
    assert run.kind != "federated"
    assert [len(windows) for windows in run.windows.values()] == [STEPS // 4] * 2
    assert set(run.spans) == {0, 1}


def test_without_a_process_group_the_error_says_how_to_make_one() -> None:
    with pytest.raises(RuntimeError, match=r"gradbus\.torch\.init\(\)"), gradbus.torch.profile():
        pass


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("dds", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Fails(torch.optim.SGD):
    """An optimizer whose second step fails."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("a rank was lost")
        return super().step(closure)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        with contextlib.suppress(RuntimeError):
            optimizer.step()


@pytest.mark.usefixtures("alone")
def test_steps_count_after_one_whose_optimizer_has_failed() -> None:
    model = nn.Linear(3, 2)
    with gradbus.torch.profile() as p:
        train(model, Fails(model.parameters(), lr=0.1), steps=5)
    summary = p.summary()
    assert summary.steps == 4
    assert 0 < summary.mean["apply_s"] < summary.mean["step_s"]


@pytest.mark.usefixtures("alone")
def test_what_a_function_of_a_step_holds_goes_with_its_return() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[weakref.ref[nn.Module]] = []

    def step() -> None:
        batch = nn.Identity()  # in the place of tensors, to which there are no weak references from here
        held.append(weakref.ref(batch))
        model(batch(torch.ones(4, 3))).sum().backward()
        optimizer.step()

    gc.disable()
    try:
        with gradbus.torch.profile():
            for _ in range(3):
                step()
            assert [one() for one in held[:-1]] == [None, None]
    finally:
        gc.enable()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_is_measured_and_stays_in_one_graph() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with gradbus.torch.profile() as p:
        train(compiled, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    summary = p.summary()
    assert summary.steps == 3
    assert summary.mean["forward_s"] > 0


@pytest.mark.usefixtures("alone")
def test_a_compiled_step_of_an_optimizer_ends_a_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with gradbus.torch.profile() as p:
        for _ in range(3):
            model(torch.ones(4, 3)).sum().backward()
            step()
    assert p.summary().steps == 3


@pytest.mark.usefixtures("alone")
def test_whoever_keeps_the_measuring_backward_measures_nothing_after_the_block() -> None:
    with gradbus.torch.profile() as p:
        kept = torch.autograd.backward
    assert torch.autograd.backward is not kept
    before = p.summary().outside
    kept(nn.Linear(3, 2)(torch.ones(3)).sum())
    assert p.summary().outside == before


def test_without_a_process_group_an_algorithm_says_how_to_make_one() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"no process group yet: call torch.distributed.init_process_group\(\)"):
        gradbus.torch.with_algorithm(model, [optimizer], "topk")


def test_a_table_before_the_block_says_how_to_begin_it() -> None:
    with pytest.raises(RuntimeError, match=r"write 'with gradbus.torch.profile\(...\) as p:'"):
        gradbus.torch.profile().table()


def test_a_step_that_is_cancelled_counts_nowhere() -> None:
    profile = Profile(0)
    with profile.step(0) as step, step.span("compute"):
        pass
    step = profile.step(1).__enter__()
    step.count("bytes_out", 7)
    with step.span("compute"):
        pass
    step.cancel()
    summary = profile.summary()
    assert (summary.steps, summary.failed_steps, summary.last_step) == (1, 0, 0)
    assert summary.outside == {"bytes_out": 7}


def test_an_inner_span_takes_its_time_from_the_one_around_it() -> None:
    profile = Profile(0)
    with profile.step(0), profile.span("backward") as span:
        profile.add_inner_span("wait", span._start_s, span._start_s + 100.0)  # noqa: SLF001 - longer than it lasts
    mean = profile.summary().mean
    assert (mean["wait_s"], mean["backward_s"]) == (100.0, 0.0)


def test_the_table_has_a_line_for_each_part() -> None:
    summary = ProfileSummary(
        rank=1,
        steps=3,
        mean={"step_s": 0.01, "forward_s": 0.004, "wait_s": 0.006, "exchange_ms": 7.25, "bytes_out": 1234.0},
        max={"step_s": 0.02, "forward_s": 0.005, "wait_s": 0.015, "exchange_ms": 9.0, "bytes_out": 1234.0},
    )
    assert text_table(summary).splitlines() == [
        "rank 1, 3 steps                         mean     longest   share",
        "  step, ms                             10.00       20.00",
        "  forward, ms                           4.00        5.00    40 %",
        "  wait (network), ms                    6.00       15.00    60 %",
        "  bytes out                            1,234       1,234",
        "  exchange (beside), ms                 7.25        9.00",
    ]
