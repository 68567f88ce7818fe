"""Communication hooks: bit-equal replicas and backends, however DDP forms its buckets; and what becomes of the rest."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hooked_training import EVERY, NAMED
from torch_node import SceneRanks, play

from gradbus.runtime.choices import ALGORITHMS

pytestmark = pytest.mark.slow

Results = list[dict[str, Any]]
# Entries that share a scale, or are rounded together, are those of a bucket.
BY_BUCKET = {"byte grad"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where states are saved."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Results:
    """What all scenes return on dds, rank by rank."""
    with SceneRanks("hook_scenes", "dds_all", folder=str(folder)) as ranks:
        return ranks.results(timeout_s=100.0)


@pytest.fixture(scope="module")
def on_gloo() -> Results:
    """Every hook in every way, rank by rank."""
    return play("hook_scenes", "every_way", backend="gloo", timeout_s=100.0)


def of_both(ours: Results, scene: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = ours
    return first[scene], second[scene]


@pytest.mark.parametrize("hook", EVERY)
def test_every_algorithm_is_a_hook_whose_ranks_hold_the_same_bits_after_every_step(ours: Results, hook: str) -> None:
    first, second = (found[hook] for found in of_both(ours, "every_way"))
    if hook in NAMED or ALGORITHMS.find(hook).equal_replicas:
        assert first == second
    for way, digests in first.items():
        assert len(set(digests)) == len(digests), f"{way}: a step has changed nothing"


@pytest.mark.parametrize("hook", EVERY)
def test_every_hook_gives_the_same_bits_on_gloo(ours: Results, on_gloo: Results, hook: str) -> None:
    assert [found[hook] for found in on_gloo] == [rank["every_way"][hook] for rank in ours]


def test_results_do_not_depend_on_how_ddp_forms_buckets(ours: Results) -> None:
    for hook in NAMED.keys() - BY_BUCKET:
        ways = ours[0]["every_way"][hook]
        for way in ("several buckets", "gradients as views", "static graph", "a given group"):
            assert ways.get(way, ways["one bucket"]) == ways["one bucket"], f"{hook}, {way}"


def test_a_step_takes_fewer_bytes(ours: Results) -> None:
    """Against a dense all_reduce, which sends 2 (N - 1) / N of the gradients: with two ranks all once."""
    shares = {"dgc": 0.08, "dgc fp16": 0.04, "top k": 0.08, "byte grad": 0.27, "bf16": 0.51}
    for found in of_both(ours, "bytes_of_a_step"):
        for hook, (bytes_out, dense_bytes) in found.items():
            assert 0 < bytes_out <= shares[hook] * dense_bytes, hook


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


def test_a_saved_state_goes_on_bit_equal_with_other_buckets(ours: Results, folder: Path) -> None:
    found = play("hook_scenes", "loaded", folder=str(folder))
    for hook in NAMED.keys() - BY_BUCKET:
        assert [rank[hook] for rank in found] == [rank["saved_halfway"][hook] for rank in ours], hook


def test_what_is_saved_has_each_entry_in_its_place_whatever_the_order_in_memory(ours: Results) -> None:
    for found in of_both(ours, "memory_formats"):
        assert found == dict.fromkeys(("dgc", "dgc fp16", "top k", "qadam", "onebit-adam"), True)


def test_an_infinite_gradient_on_one_rank_makes_the_loss_scalers_of_all_leave_the_step_out(ours: Results) -> None:
    first, second = of_both(ours, "not_finite")
    assert first == second
    for hook, found in first.items():
        assert "last.weight" in found["bad"], hook
        changed = [old != new for old, new in itertools.pairwise(found["digests"])]
        assert changed == [True, False, True], hook
        assert (found["scale"], found["skipped"]) == (2.0, 1), hook
        assert found["finite"], hook


def test_a_step_that_is_taken_back_leaves_no_trace_and_with_dgc_its_gradient_waits(ours: Results) -> None:
    for found in of_both(ours, "taken_back"):
        assert {hook for hook, _ in (name.rsplit(" ", 1) for name in found)} == {"dgc", "dgc fp16", "top k"}
        assert {name: off for name, off in found.items() if off > 1e-7} == {}


def test_what_is_kept_for_a_layer_rests_while_no_rank_uses_it(ours: Results) -> None:
    for found in of_both(ours, "unused_by_all"):
        assert {name.rsplit(" ", 1)[0] for name in found} == {"dgc", "dgc fp16", "top k"}
        assert [name for name, rests in found.items() if not rests] == []


MISTAKES = {
    "float64": "parameter weight is torch.float64, expected torch.float32",
    "device": "parameter weight is on meta, expected on the CPU",
    "twice": "a parameter is given twice",
    "nothing": "no parameter that requires a gradient",
    "density": "density",
    "weights": "decentralized averages weights: it needs the optimizers of the model",
    "options": "all ranks need the same options: rank 0 has",
    "state": "TypeError: this hook needs a DgcHookState, got TopKHookState",
    "unknown": "has a parameter of shape (8, 1, 3, 3) that was not given",
    "sparse": "bucket 0 is torch.float32, torch.sparse_coo; expected float32, strided",
    "epoch": "call hook.start_epoch(epoch) at the start of each",
    "loss": "2 ranks have not reported theirs: call hook.report_loss(loss) after backward()",
    "world": "world is 3, here 2",
    "other hook": "algorithm is 'topk', here 'dgc'",
    "names": "parameters is {'conv.weight': [8, 1, 3, 3]",
    "min_numel": "option min_numel is",
    "steps": "all ranks need the same steps: rank 0 has 0, rank 1 5",
    "one rank": "algorithm is 'densest', here 'dense'",
    "damaged": "has NaN or infinity in it",
}


def test_mistakes_are_told_on_all_ranks(ours: Results) -> None:
    for found in of_both(ours, "mistakes"):
        assert {name: found[name] for name, text in MISTAKES.items() if text not in found[name]} == {}
    assert "ValueError" in ours[1]["mistakes"]["group"]
