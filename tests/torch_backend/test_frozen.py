"""Parameters that are frozen when they are wrapped, and trained later: ranks stay equal, or all raise one error."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_node import play

pytestmark = pytest.mark.slow


def alone() -> list[torch.Tensor]:
    """The same training in this process, with the data of both ranks."""
    found = importlib.util.spec_from_file_location("frozen_scenes", Path(__file__).with_name("frozen_scenes.py"))
    assert found is not None
    assert found.loader is not None
    scenes = importlib.util.module_from_spec(found)
    found.loader.exec_module(scenes)
    weights: list[torch.Tensor] = scenes.unfrozen([0, 1], False)
    return weights


def test_parameters_that_all_ranks_unfreeze_and_freeze_are_combined_from_then_on() -> None:
    first, second = play("frozen_scenes", "on_all_ranks")
    assert all(map(torch.equal, first, second))
    for here, there in zip(alone(), first, strict=True):
        torch.testing.assert_close(here, there, atol=1e-6, rtol=0.0)
    assert not torch.equal(first[0][:16], first[1][:16])  # of the body


def test_a_rank_that_alone_trains_a_parameter_is_named_on_all_ranks_at_once() -> None:
    results = play("frozen_scenes", "on_one_rank", 3)
    expected = {
        "unfrozen": "RuntimeError: ranks [1] train parameter 'body.bias' (and 1 more parameters), and ranks [0, 2] do",
        "frozen": "RuntimeError: ranks [0, 2] train parameter 'head.bias', and ranks [1] do",
        "added": "RuntimeError: ranks [1] train parameter 'body.bias' (and 1 more parameters), and ranks [0, 2] do",
    }
    for way, start in expected.items():
        texts = {result[way]["error"] for result in results}
        assert len(texts) == 1, way
        assert texts.pop().startswith(start), way
        assert all(result[way]["unchanged"] for result in results), way
        assert max(result[way]["took_s"] for result in results) < 25.0, way  # and not the timeout of the group


# The step that raises, where one is unfrozen before step 2. A loss scaler leaves that step out, and the next backward
# pass raises. With DiLoCo, which exchanges every second step, and in decentralized training, the verdict about an
# exchange is settled when the next one has been made.
RAISES = {"dense": 2, "scaled": 3, "late": 3, "powersgd": 2, "decentralized": 3, "a hook's state": 2, "diloco": 5}


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_an_algorithm_refuses_on_all_ranks_what_is_unfrozen_after_it_was_attached(backend: str) -> None:
    results: list[dict[str, Any]] = play("frozen_scenes", "exchanged", backend=backend, timeout_s=100.0)
    for way, raises in RAISES.items():
        for who, ranks in {"one": [1], "all": [0, 1]}.items():
            found = [result[f"{way}, {who}"] for result in results]
            for one in found:
                text = f"ConfigError: parameter 'body.weight' (and 1 more) is trained on ranks {ranks}, but was frozen"
                # A hook's state that does not know the optimizers raises in backward(), where torch wraps the error.
                start = "RuntimeError: " if way == "a hook's state" else text
                assert one["error"].startswith(start), (way, who, one)
                assert text in one["error"], (way, who)
            assert [one["step"] for one in found] == [raises] * 2, (way, who)
            assert "a gradient is not finite" not in found[0]["skipped"] + found[1]["skipped"], (way, who)
            assert max(one["took_s"] for one in found) < 25.0, (way, who)
        assert [result[f"{way}, none"]["error"] for result in results] == [""] * 2


def test_what_no_optimizer_of_the_algorithm_steps_may_be_unfrozen() -> None:
    assert play("frozen_scenes", "not_ours") == ["", ""]
