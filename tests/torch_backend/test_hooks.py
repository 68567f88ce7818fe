"""Communication hooks: bit-equal replicas and backends, however DDP forms its buckets; and what becomes of the rest."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch_node import SceneRanks, play

pytestmark = pytest.mark.slow

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where states are saved."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Results:
    """What all scenes return on dds, rank by rank."""
    with SceneRanks("hook_scenes", "dds_all", folder=str(folder)) as ranks:
        return ranks.results(timeout_s=100.0)


def of_both(ours: Results, scene: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = ours
    return first[scene], second[scene]


def test_all_ranks_hold_the_same_bits_after_every_step(ours: Results) -> None:
    first, second = of_both(ours, "every_way")
    assert first == second
    for hook, ways in first.items():
        for way, digests in ways.items():
            assert len(set(digests)) == len(digests), f"{hook}, {way}: a step has changed nothing"


def test_every_hook_gives_the_same_bits_on_gloo(ours: Results) -> None:
    assert play("hook_scenes", "every_way", backend="gloo") == [rank["every_way"] for rank in ours]


def test_results_do_not_depend_on_how_ddp_forms_buckets(ours: Results) -> None:
    for hook, ways in ours[0]["every_way"].items():
        expected = ways["one bucket"]
        for way in ("several buckets", "gradients as views", "static graph", "a given group"):
            assert ways.get(way, expected) == expected, f"{hook}, {way}"


def test_a_bucket_takes_one_collective_and_fewer_bytes(ours: Results) -> None:
    shares = {"dgc": 0.08, "dgc fp16": 0.04, "top k": 0.08, "top k int8": 0.04, "byte grad": 0.27, "bf16": 0.51}
    for found in of_both(ours, "collectives"):
        for hook, (collectives, messages, bytes_out, dense_bytes) in found.items():
            assert collectives == messages == 2 * 3, hook  # steps, buckets
            assert bytes_out <= shares[hook] * dense_bytes, hook


def test_warm_up_sends_less_in_each_epoch_and_goes_on_after_loading(ours: Results) -> None:
    for found in of_both(ours, "warm_up"):
        first, second, third = found["started"]
        assert first > 3 * second > 9 * third
        assert found["loaded"] == [second, third]


def test_each_hook_learns_nearly_as_well_as_without(ours: Results) -> None:
    """Cross entropy of five classes, 1.6 at the start: within 0.1 of the dense run where 5 % is sent, else 0.01."""
    losses = ours[0]["final_losses"]
    assert losses["dense"] < 0.6
    for hook, room in {"dgc": 0.1, "top k": 0.1, "byte grad": 0.01, "bf16": 0.01}.items():
        assert losses[hook] <= losses["dense"] + room, hook


def test_dgc_that_sends_everything_is_sgd_with_momentum(ours: Results) -> None:
    assert ours[0]["everything_sent"] <= 1e-6


def test_a_saved_state_goes_on_bit_equal_with_other_buckets(ours: Results, folder: Path) -> None:
    assert play("hook_scenes", "loaded", folder=str(folder)) == [rank["saved_halfway"] for rank in ours]


def test_what_is_saved_has_the_shape_of_the_parameter_whatever_its_order_in_memory(ours: Results) -> None:
    for found in of_both(ours, "memory_formats"):
        assert found == dict.fromkeys(("dgc", "dgc fp16", "top k", "top k int8"), True)


def test_an_infinite_gradient_on_one_rank_makes_the_loss_scalers_of_all_leave_the_step_out(ours: Results) -> None:
    first, second = of_both(ours, "not_finite")
    assert first == second
    for hook, found in first.items():
        assert found["bad"] == ["last.weight"], hook  # in that one step, and no other parameter
        changed = [old != new for old, new in itertools.pairwise(found["digests"])]
        assert changed == [True, False, True], hook
        assert found["scale"] == 2.0, hook
        assert found["finite"], hook


def test_nothing_of_a_step_that_is_taken_back_is_lost(ours: Results) -> None:
    for found in of_both(ours, "taken_back"):
        assert {hook for hook, _ in (name.rsplit(" ", 1) for name in found)} == {
            "dgc",
            "dgc fp16",
            "top k",
            "top k int8",
        }
        assert {name: off for name, off in found.items() if off > 1e-7} == {}


def test_what_is_owed_to_a_layer_rests_while_no_rank_uses_it(ours: Results) -> None:
    for found in of_both(ours, "unused_by_all"):
        assert len(found) == 8
        assert [name for name, rests in found.items() if not rests] == []


MISTAKES = {
    "float64": "ValueError: TopKHookState: parameter 'weight' must be float32 on the CPU, got torch.float64",
    "device": "ValueError: Bf16HookState: parameter 'weight' must be float32 on the CPU, got torch.float32 on meta",
    "twice": "parameter 'conv.weight' is given twice",
    "nothing": "no parameters that require a gradient",
    "density": "ValueError: density must be in (0, 1], got 100",
    "state": "TypeError: hooks.dgc needs a DgcHookState, got TopKHookState: ddp.register_comm_hook(hooks.DgcHookState(",
    "unknown": "parameter of shape (8, 1, 3, 3) that Bf16HookState does not know",
    "sparse": "bucket 0 is torch.float32, torch.sparse_coo; expected float32, strided",
    "epoch": "call DgcHookState.start_epoch(epoch)",
    "options": "gave its hook state other options",
    "steps": "have all loaded a state of the same step?",
    "world": "of 3, this is rank",
    "other hook": "the saved state is of hook 'top_k', expected 'dgc'",
    "names": "has 'conv.weight' that this model has not",
    "min_numel": "saved state of 'conv.weight': M must be float32",
    "damaged": "saved state of 'last.weight': V must be float32 of shape (4, 64), got torch.float32 of (3,)",
}


def test_mistakes_are_told_on_all_ranks(ours: Results) -> None:
    for found in of_both(ours, "mistakes"):
        assert {name: found[name] for name, text in MISTAKES.items() if text not in found[name]} == {}
    assert "process_group must be a group that this rank is in" in ours[1]["mistakes"]["group"]
