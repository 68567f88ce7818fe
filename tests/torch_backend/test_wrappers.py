"""Functions and optimizer for those who come from Horovod: matched by name, in whatever order a rank calls."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import soonest
from torch_node import SOON_S, SceneRanks, play

from gradbus.torch.backend import warning_from_environment
from gradbus.torch.functions import MAX_NAME_BYTES, OPS, local_rank, wire_name

slow = pytest.mark.slow


def drawn(rank: int, *shape: int) -> torch.Tensor:
    """As ``wrapper_scenes.drawn``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7 + rank))


# In any order


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return play("wrapper_scenes", "any_order", 2, more=True)


def expected(rank: int, world: int) -> dict[str, torch.Tensor]:
    """What the calls of ``any_order`` must give."""
    everybody = [drawn(other, 9) for other in range(world)]
    stacked = torch.stack(everybody)
    found = {f"mean {n}": mean([drawn(other, n, 3) for other in range(world)]) for n in range(12)}
    found |= {"sum": total(everybody), "min": stacked.amin(0), "max": stacked.amax(0), "product": stacked.prod(0)}
    found["a name" * 40] = mean([drawn(other, 70_000).view(7, -1).t() for other in range(world)])
    found["ints"] = torch.full((3,), sum(range(world)))
    found["sparse"] = sum(torch.eye(3)[[other % 3]] * 6 for other in range(world)) / world
    found["ragged"] = torch.cat([drawn(other, other, 2) for other in range(world)])
    found["scalars"] = torch.arange(world)
    return found | {f"root {root}": drawn(root, 5) for root in range(world)}


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In rank order."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        result += tensor
    return result


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return total(tensors) * (1.0 / len(tensors))


@slow
@pytest.mark.parametrize("world", [2, 3])
def test_calls_in_another_order_on_every_rank_give_the_right_results(world: int, request: Any) -> None:
    results = request.getfixturevalue("two") if world == 2 else play("wrapper_scenes", "any_order", world)
    for rank, result in enumerate(results):
        wanted = expected(rank, world)
        assert result["values"].keys() == wanted.keys()
        unequal = [name for name, tensor in wanted.items() if not torch.equal(result["values"][name], tensor)]
        assert unequal == []
        assert result["polled"]
        assert result["same twice"]
        assert result["unnamed"] == [[sum(range(1, world + 1))] * 2, [sum(range(1, world + 1))] * 3]
        assert result["broadcast"] == [drawn(world - 1, 4).tolist(), drawn(rank, 4).tolist()]
        assert result["object"] == {"rank": world - 1, "lr": [0.1, None]}
        assert result["objects"] == [2 * other for other in range(world)]
        assert result["who"] == [rank, world]
        assert result["light"]
        assert result["left over"] == [0, (0,) * world]


@slow
def test_a_rank_that_is_far_ahead_does_not_flood_the_others(two: list[Any]) -> None:
    """70 MiB in tensors of 7 MiB: 63 may go ahead of the other rank's calls."""
    assert all(result["ahead"]["right"] for result in two)
    assert 0 < two[1]["ahead"]["kept_bytes"] <= 64 << 20


# State


@slow
def test_parameters_and_optimizer_state_of_one_rank_are_those_of_all(two: list[Any]) -> None:
    """Of Adam, of SGD with momentum, and of LBFGS, whose state is lists: and they go on equally."""
    first, second = (result["states"] for result in two)
    for kind in ("Adam", "SGD", "LBFGS"):
        assert first[kind]["shared"] == second[kind]["shared"]
        assert first[kind]["later"] == second[kind]["later"]
        assert any(line.endswith(".lr 0.03125") for line in second[kind]["shared"])
    assert any("max_exp_avg_sq" in line for line in second["Adam"]["shared"])
    assert second["of one that has none"] == 0


# What is wrong


@slow
def test_what_is_wrong_is_an_error_that_says_what_to_do(two: list[Any]) -> None:
    first, second = (result["errors"] for result in two)
    for errors in (first, second):
        assert "allreduce of 'loss'" in errors["two shapes"]
        assert "(2,4)" in errors["two shapes"]
        assert "(3,4)" in errors["two shapes"]
        assert "all_gather" in errors["two kinds"]
        assert "all_reduce" in errors["two kinds"]
        assert all(op in errors["op"] for op in OPS)
        assert "'far'" in errors["device"]
        assert "meta" in errors["device"]
        assert "0 .. 1" in errors["root"]
        assert "broadcast_object" in errors["no tensor"]
        assert "'steps'" in errors["no tensor"]
        assert "op='sum'" in errors["average"]
        assert errors["number"].count("expected a tensor, got float") == 2
        assert "rank 1" in errors["objects"]
        for name in ("object", "objects", "state"):
            assert "ickle is never used" in errors[name]
        assert "param_groups.0.frozen" in errors["state"]
        assert "world_size" in errors["again"]
        assert "fp16" in errors["compression"]
        assert "1 parameters" in errors["unnamed"]
        assert "'p'" in errors["one name"]
        assert "distributed already" in errors["twice"]
        assert "synchronize() first" in errors["zero_grad"]
        assert "backward_passes_per_step" in errors["one pass more"]
        assert "changed" in errors["after it"]
        assert "synchronize()" in errors["changed"]
        assert "two distributed optimizers" in errors["two owners"]
    assert "'b' is float32 1 on rank 0 and float32 2 on rank 1" in first["models"]
    assert "'b' is float32 2 on rank 1 and float32 1 on rank 0" in second["models"]


@slow
def test_an_optimizer_goes_on_in_a_process_group_that_is_made_anew(two: list[Any]) -> None:
    assert [result["made anew"] for result in two] == [[-0.75, -0.75]] * 2


def test_the_number_on_a_machine_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_rank() == 3
    for text in ("", "one", "-1"):
        monkeypatch.setenv("LOCAL_RANK", text)
        with pytest.raises(RuntimeError, match=r"LOCAL_RANK is .*: start with torchrun"):
            local_rank()


def test_without_a_process_group_the_error_says_how_to_make_one() -> None:
    import gradbus.torch

    with pytest.raises(RuntimeError, match=r"gradbus\.torch\.init\(\)"):
        gradbus.torch.allreduce(torch.ones(1))
    with pytest.raises(AttributeError, match="no attribute 'allreduc'"):
        gradbus.torch.allreduc  # noqa: B018 - it is asked for alone
    assert set(gradbus.torch.__all__) == {name for name in gradbus.torch.__all__ if getattr(gradbus.torch, name)}


def test_long_names_are_cut_and_stay_different() -> None:
    names = {wire_name("call", "ä" * length) for length in range(1, 200)} | {wire_name("call", "a\0b")}
    assert len(names) == 200
    assert all(len(name.encode()) <= MAX_NAME_BYTES and "\0" not in name for name in names)
    assert wire_name("call", "weight") != wire_name("gradient 0", "weight")


# Training


def training() -> Any:
    """The module of the scenes: the same training, in this process."""
    path = Path(__file__).with_name("training_scenes.py")
    spec = importlib.util.spec_from_file_location("training_scenes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["training_scenes"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


@slow
def test_training_equals_that_of_one_process_with_the_data_of_all() -> None:
    """Bit for bit, where the additions are the same."""
    scenes = training()
    torch.set_num_threads(1)
    first, second = play("training_scenes", "every_way")
    different = []
    for name, way in scenes.WAYS.items():
        alone = scenes.train(way, [0, 1], False)
        assert all(map(torch.equal, first[name], second[name])), f"{name}: the ranks differ"
        for number, (here, there) in enumerate(zip(alone, first[name], strict=True)):
            far = (here - there).abs().max().item()
            if far > way.close:
                different.append((name, number, far))
        if way.close > 1e-5:  # it has been compressed
            assert not all(map(torch.equal, alone, first[name]))
    assert different == []


# Too late, and dead


@slow
def test_who_is_late_is_named_and_who_is_dead_ends_the_step() -> None:
    assert soonest(late_then_dead, SOON_S) < SOON_S


def late_then_dead() -> float:
    """Seconds until all others know of the death."""
    with SceneRanks("wrapper_scenes", "late_then_dead", world=3, dying=[2]) as ranks:
        died = ranks.nodes[2].wait_for("dies", 60.0)
        failed = [node.wait_for("failed as it should") for node in ranks.nodes[:2]]
        results = [ranks.value(node.wait_for("done")) for node in ranks.nodes[:2]]
    for result in results:
        assert "rank 2" in result["error"]
        assert "DistBackendError" in result["error"]
        assert "allreduce of '" in result["error"]
        assert result["cleared"]
        assert result["complained"]
        assert result["right"] == [1.0, 1.0, 1.0, pytest.approx(1.0)]
        lines = [line for line in result["lines"] if line["event"] == "stalled"]
        assert lines
        assert {line["level"] for line in lines} == {"warning"}
        waited = [line["waiting_s"] for line in lines if line.get("collective") == "small"]
        pauses = [later - sooner for sooner, later in pairwise(waited)]  # of numbers that are rounded to 0.1 s
        assert len(pauses) >= 3
        assert all(pause > 0.1 * 2**number - 0.11 for number, pause in enumerate(pauses)), waited
        assert any(line["missing"] == [2] for line in lines if line.get("collective") == "from the late one")
        assert max(line.get("more_collectives", 0) for line in lines) == 34 - 20
    return max(event["at_s"] for event in failed) - died["at_s"]


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_time_for_the_stall_report_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="GRADBUS_STALL_WARNING_S"):
        warning_from_environment({"GRADBUS_STALL_WARNING_S": text})
    assert warning_from_environment({"GRADBUS_STALL_WARNING_S": "0"}) == 0.0
    assert warning_from_environment({}) == 60.0
