"""Every algorithm in a script of one's own: ``gradbus.torch.with_algorithm``."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch_node import play

from gradbus.runtime.choices import ALGORITHMS

pytestmark = pytest.mark.slow


@cache
def trained(backend: str, world: int) -> list[dict[str, Any]]:
    return play("algorithm_scenes", "every_algorithm", world, backend, timeout_s=150.0)


@cache
def late(what: str, backend: str) -> list[dict[str, Any]]:
    return play("algorithm_scenes", f"late_{what}", 2, backend)


@cache
def losses() -> list[dict[str, Any]]:
    return play("algorithm_scenes", "losses_and_hashes", 2, "dds")


def largest_difference(here: list[torch.Tensor], there: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(here, there, strict=True))


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_replicas_are_equal_where_this_is_promised_and_close_elsewhere(backend: str) -> None:
    first, *others = trained(backend, 3)
    for name, kind in ALGORITHMS.table.items():
        differences = [largest_difference(first[name], other[name]) for other in others]
        assert all(difference <= (0.0 if kind.equal_replicas else 0.2) for difference in differences), name


def test_dense_is_what_ddp_does_without_a_hook_bit_by_bit() -> None:
    for found in trained("dds", 3):
        assert largest_difference(found["dense"], found[""]) <= 1e-7  # DDP divides before it adds
    for found in play("algorithm_scenes", "every_algorithm", 2, "dds"):
        assert largest_difference(found["dense"], found[""]) == 0.0


def test_backends_agree() -> None:
    """Sums in another order differ in their last bits, which may decide what is the largest entry, or a sign."""
    for ours, theirs in zip(trained("dds", 3), trained("gloo", 3), strict=True):
        for name in ALGORITHMS.table:
            limit = {"signsgd": 1e-2, "qadam": 1e-2, "bytegrad": 1e-2, "onebit-adam": 0.5}.get(name, 1e-4)
            assert largest_difference(ours[name], theirs[name]) <= limit, name


def test_powersgd_is_that_of_torchs_hook() -> None:
    for found in play("algorithm_scenes", "powersgd_and_torchs_hook", 2, "dds"):
        assert largest_difference(found["ours"], found["torch"]) <= 1e-5


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all_without_a_trace() -> None:
    for found in play("algorithm_scenes", "spoilt_steps", 2, "dds"):
        for name, of_one in found.items():
            if ALGORITHMS.find(name).scope == "weights":
                continue  # a rank skips its own step alone
            assert of_one["skipped"] == 2, name
            if name == "dgc":
                continue  # the ranks that were finite keep what they have accumulated
            assert largest_difference(of_one["weights"], of_one["as"]) <= 1e-6, name


def test_a_run_goes_on_from_its_state_to_the_same_bits() -> None:
    """DDP forms other buckets in its first step: where entries of a bucket share a scale, other ones do then. And the
    error of 1-bit Adam's sums belongs to a bucket."""
    for found in play("algorithm_scenes", "resumed", 2, "dds"):
        for name, of_one in found.items():
            limit = {"bytegrad": 1e-3, "qadam": 0.1, "onebit-adam": 0.5}.get(name, 0.0)
            assert largest_difference(of_one["weights"], of_one["as"]) <= limit, name


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_with_a_delay_a_step_takes_the_gradients_of_an_earlier_one(backend: str) -> None:
    first, second = late("gradients", backend)
    for found in (first, second):
        for delay in (1, 2):
            assert largest_difference(found[f"hook {delay}"], found[f"by hand {delay}"]) == 0.0
            assert largest_difference(found[f"drained {delay}"], found[f"drained by hand {delay}"]) == 0.0
            assert largest_difference(found[f"resumed {delay}"], found[f"drained {delay}"]) == 0.0
        assert found["skipped"] == 1
    assert largest_difference(first["spoilt"], second["spoilt"]) == 0.0
    assert all(bool(weight.isfinite().all()) for weight in first["spoilt"])


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_late_gradients_are_computed_at_weights_that_a_rank_foretells_by_its_own_ones(backend: str) -> None:
    first, second = late("gradients_at_predicted_weights", backend)
    for found in (first, second):
        for delay in (1, 2):  # its own gradients are the mean
            assert largest_difference(found["alone 0"], found[f"alone {delay}"]) <= 1e-6
        assert largest_difference(found["ahead"], found["before"]) > 1e-3
        assert largest_difference(found["in an evaluation"], found["before"]) == 0.0
        assert largest_difference(found["together"], found["resumed"]) == 0.0
        assert found["skipped"] == 1
        assert all(bool(weight.isfinite().all()) for weight in found["spoilt"])
    assert largest_difference(first["ahead"], second["ahead"]) > 0.0
    for what in ("together", "spoilt"):
        assert largest_difference(first[what], second[what]) == 0.0


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_means_of_weights_are_applied_after_the_optimizers_step_and_some_steps_later(backend: str) -> None:
    for found in late("weights", backend):
        for delay in (0, 1, 3):
            assert largest_difference(found[f"hook {delay}"], found[f"by hand {delay}"]) <= 1e-7, delay


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_a_state_in_which_more_waits_than_the_delay_has_room_for_is_refused(backend: str) -> None:
    """Each step would take a gradient of before for ever, and a mean of weights would be added at the end alone."""
    for gradients, weights in zip(late("gradients", backend), late("weights", backend), strict=True):
        for waiting, delay in ((1, 0), (2, 0), (2, 1)):
            text = gradients[f"{waiting} loaded into {delay}"]
            assert f"{waiting} exchanges wait to be applied, here delay_steps is {delay}" in text
            assert f"load with delay_steps={waiting}" in text
        assert "1 exchanges wait to be applied, here delay_steps is 0" in weights["1 loaded into 0"]
        assert "late gradients are ['another'], here ['0.bias'" in gradients["of another model 2"]


def test_an_algorithm_is_told_the_mean_loss_of_the_last_step_that_counted_and_ranks_that_differ_are_named() -> None:
    first, second = losses()
    means = [(one + other) / 2 for one, other in zip(first["own"], second["own"], strict=True)]
    for found in (first, second):
        assert found["told"][0] != found["told"][0]  # NaN: there is none yet
        assert found["told"][1:] == pytest.approx(means)
        assert found["ranks"] == [1]
        assert found["hosts"] == [first["hosts"][0]] * 2


def test_with_a_delay_what_is_due_follows_from_no_loss_and_a_late_result_is_told_that_of_its_step() -> None:
    first, second = losses()
    means = [(one + other) / 2 for one, other in zip(first["own_late"], second["own_late"], strict=True)]
    for found in (first, second):
        assert all(loss != loss for loss in found["due"])  # NaN: it may come meanwhile, on one rank before another
        assert found["late"] == pytest.approx(means)


def test_an_exchange_of_weights_that_overlaps_is_told_the_loss_of_the_step_before_as_in_a_run() -> None:
    first, second = losses()
    means = [(one + other) / 2 for one, other in zip(first["own_overlapping"], second["own_overlapping"], strict=True)]
    for found in (first, second):
        assert found["overlapping"][0] != found["overlapping"][0]  # NaN: there is none yet
        assert found["overlapping"][1:] == pytest.approx(means[:-1])


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_exchanges_do_not_mix_with_other_calls_of_a_backward_pass(backend: str) -> None:
    first, *others = play("algorithm_scenes", "in_the_midst_of_other_calls", 3, backend)
    for name, weights in first.items():
        assert all(largest_difference(weights, other[name]) == 0.0 for other in others), name


def test_weights_are_exchanged_after_the_steps_of_all_optimizers_in_whatever_order_they_step() -> None:
    ranks = play("algorithm_scenes", "several_optimizers", 2, "dds")
    for found in ranks:
        assert largest_difference(found["two"], found["one"]) == 0
        assert largest_difference(found["other order"], found["one"]) == 0
    first, second = (found["second at the end"] for found in ranks)
    assert largest_difference(first, second) == 0


def test_a_program_that_fails_ends_the_backward_pass_with_its_error() -> None:
    for told in play("algorithm_scenes", "a_failing_program", 2, "dds"):
        assert "ZeroDivisionError: nothing to divide by" in told["error"]


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_a_rank_that_makes_no_exchange_is_waited_for_as_long_as_the_group_allows(backend: str) -> None:
    first, _ = play("algorithm_scenes", "a_rank_that_stands_still", 2, backend)
    assert 2.0 < first["waited_s"] < 30.0


def test_the_order_of_the_ranks_in_a_group_changes_nothing() -> None:
    for found in play("algorithm_scenes", "ranks_in_another_order", 2, "gloo"):
        assert largest_difference(found["[0, 1]"], found["[1, 0]"]) == 0.0


def test_what_cannot_work_is_refused_at_the_start_with_the_reason() -> None:
    for told in play("algorithm_scenes", "refusals", 2, "dds"):
        assert "did you mean 'powersgd'?" in told["unknown"]
        assert "did you mean 'rank'?" in told["option"]
        assert "needs torch.optim.SGD without momentum, got Adam" in told["optimizer"]
        assert "needs torch.optim.SGD without momentum, got SGD" in told["momentum"]
        assert "wrap the model in DistributedDataParallel first" in told["plain"]
        assert "is torch.float64, expected torch.float32" in told["dtype"]
        assert "has the backend 'cuda:gloo', and what is exchanged here is on the CPU" in told["backend"]
        assert "parameter 0.weight is on meta, expected on the CPU" in told["device"]
        assert "parameter 0.weight is on meta, expected on the CPU" in told["device of weights"]
        assert 'all ranks need the same options: rank 0 has {"density": 0.1' in told["differs"]
        assert 'rank 1 {"density": 0.2' in told["differs"]
        assert "did you mean 'topk'?" in told["one rank"]
        assert "all ranks need the same options" in told["order"]
        assert "find_unused_parameters must be False" in told["unused"]
        assert "in a script the ranks add: set route='direct'" in told["aggregator"]
        assert "topk: gradients of '0' are sparse" in told["sparse"]
        assert "the model has a communication hook, powerSGD_hook, and can have one alone" in told["hooked"]
        assert "optimizer 0 (SGD) changes no parameter of this model" in told["another model"]
        assert "hash_every must be a whole number >= 0, got -1" in told["hash"]
        assert "delay_steps must be a whole number >= 0, got -1" in told["delay"]
        assert "set delay_steps=1" in told["prediction without a delay"]
        assert "got Adam and dense" in told["prediction of adam"]
