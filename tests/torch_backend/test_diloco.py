"""DiLoCo in a script of one's own, on backends "dds" and gloo."""

from __future__ import annotations

import pytest
import torch
from torch_node import play


def test_the_example_ends_with_equal_bits_on_both_backends_and_ranks() -> None:
    found = {backend: play("diloco_scenes", "example", 2, backend) for backend in ("dds", "gloo")}
    reports = [report for of_ranks in found.values() for report in of_ranks]
    assert len({report["weights"] for report in reports}) == 1
    assert len({report["loss"] for report in reports}) == 1
    assert reports[0]["loss"] < 0.3  # 1.1 at the start
    parameters = 16 * 32 + 32 + 32 + 1
    dense = 60 * 4 * parameters
    assert reports[0]["bytes_out"] < dense / 8


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_a_run_goes_on_between_two_exchanges_from_what_was_saved_to_the_same_bits(backend: str) -> None:
    for of_rank in play("diloco_scenes", "resumed", 2, backend):
        for name, found in of_rank.items():
            for way, again in found.items():
                assert all(map(torch.equal, found["whole"], again)), (name, way)


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_of_a_model_in_bfloat16_copies_in_float32_are_exchanged_and_rounding_is_no_training(backend: str) -> None:
    found = play("diloco_scenes", "low_precision", 2, backend)
    for of_rank in found:
        assert of_rank["types"] == {"torch.bfloat16"}
        assert all(map(torch.equal, of_rank["whole"], of_rank["again"]))
        assert of_rank["lacked"] > 0
        assert all(map(torch.equal, of_rank["second"], of_rank["third"]))
    for name, tensor in found[0]["shared"].items():
        assert torch.equal(tensor, found[1]["shared"][name]), name


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_shards_of_fsdp2_are_exchanged_between_hosts_as_whole_models_are(backend: str) -> None:
    found = play("diloco_scenes", "shards", 4, backend)
    for of_rank in found:
        for sharded, whole in zip(of_rank["sharded"], of_rank["whole"], strict=True):
            assert bool(sharded.isfinite().all())
            torch.testing.assert_close(sharded, whole)
        assert all(map(torch.equal, of_rank["sharded"], found[0]["sharded"]))
        assert of_rank["groups of a second run"] == 0


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_an_exchange_that_is_spoilt_in_one_shard_is_dropped_for_all_shards_of_all_copies(backend: str) -> None:
    ranks = play("diloco_scenes", "spoilt_shard", 4, backend)
    assert [of_rank["skipped"] for of_rank in ranks] == [1] * 4
    for of_rank in ranks:
        first, spoilt, last = of_rank["shared"]
        assert all(map(torch.equal, spoilt, first))
        assert not any(map(torch.equal, last, first))
    (theta, went_on, end), (_, went_back, _) = ranks[0]["weights"], ranks[3]["weights"]
    assert all(map(torch.equal, went_back, theta))  # the whole copy, and not the shard alone
    assert not any(map(torch.equal, went_on, theta))
    for of_rank in ranks:
        assert all(map(torch.equal, of_rank["weights"][2], end))
        assert all(bool(one.isfinite().all()) for one in of_rank["weights"][2])


@pytest.mark.parametrize("backend", ["dds", "gloo"])
def test_an_exchange_that_fails_in_one_shard_is_dropped_for_all_shards_and_the_next_one_counts(backend: str) -> None:
    ranks = play("diloco_scenes", "failed_shard", 4, backend)
    told = [(3, "a message that cannot be read")]
    for way, expected in {
        "exchange": [[], [], [], told],
        "agreement of both": [[], [], told, told],
        "agreement of one": [[], [], [], told],
    }.items():
        end = ranks[0][way]
        assert [of_rank[way]["told"] for of_rank in ranks] == expected
        assert [of_rank[way]["skipped"] for of_rank in ranks] == [int(not told) for told in expected]
        for of_rank in ranks:
            first, failed, last = of_rank[way]["shared"]
            assert all(map(torch.equal, failed, first)), way
            assert not any(map(torch.equal, last, first)), way
            assert all(map(torch.equal, of_rank[way]["weights"], end["weights"])), way
    # Nobody can tell the others that it has missed the last word: all shards of its copy stop at the next exchange.
    way = "last agreement"
    assert [[number for number, _ in of_rank[way]["told"]] for of_rank in ranks] == [[], [], [5], [3, 5]]
    assert all("have counted 1 to 2 exchanges" in of_rank[way]["told"][-1][1] for of_rank in ranks[2:])
    assert [of_rank[way]["skipped"] for of_rank in ranks] == [1, 1, 0, 1]


def test_a_saved_state_that_does_not_fit_the_model_is_refused_and_changes_nothing() -> None:
    for told in play("diloco_scenes", "damaged_states", 2, "gloo"):
        assert "weights of 0.weight are [3, 3], here [20, 12]" in told["shape"]
        assert "weights of 0.weight are no tensor" in told["kind"]
        assert "buffers of 1.running_mean are no tensor" in told["buffer"]
        assert "option fragments is 1, here 2" in told["options"]
        assert told["is as before"]


def test_all_ranks_begin_as_the_first_one_and_an_average_is_of_weights_and_running_means() -> None:
    first, second = play("diloco_scenes", "from_the_first_rank", 2, "gloo")
    for name, tensor in first["start"].items():
        assert torch.equal(tensor, second["start"][name])
        if tensor.is_floating_point():
            assert not torch.equal(first["own"][name], second["own"][name])  # each rank has its own meanwhile
            assert torch.equal(first["mean"][name], second["mean"][name])
            assert torch.allclose(first["mean"][name], (first["own"][name] + second["own"][name]) / 2, atol=1e-6)


def test_steps_are_counted_and_exchanged_also_where_the_model_is_not_called_as_a_whole() -> None:
    first, second = play("diloco_scenes", "methods_of_the_model", 2, "gloo")
    for way, found in first.items():
        assert all(map(torch.equal, found["weights"], second[way]["weights"])), way
        assert found["bytes_out"] > 0
        assert found["steps"] == 4
    assert all(map(torch.equal, first["method"]["weights"], first["call"]["weights"]))


def test_an_exchange_that_fails_is_an_error_of_the_step_and_its_change_is_part_of_the_next() -> None:
    for found in play("diloco_scenes", "failed_exchange", 2, "dds"):
        assert all(map(torch.equal, found["weights"], found["longer"]))


def test_an_exchange_that_is_spoilt_on_one_rank_is_taken_back_by_all_and_the_next_one_counts() -> None:
    first, second = play("diloco_scenes", "spoilt_exchanges", 2, "gloo")
    for way, found in first.items():
        for name, tensor in found["shared"].items():
            assert bool(tensor.isfinite().all()), way
            assert torch.equal(tensor, second[way]["shared"][name]), way
        for of_rank in (found, second[way]):
            assert of_rank["steps"] == 4
            assert of_rank["skipped"] == (0 if of_rank["told"] else 1), way
            assert all(bool(tensor.isfinite().all()) for tensor in of_rank["weights"]), way
        assert all(bool(tensor.isfinite().all()) for tensor in found["own"]), way
    assert "cannot be read" in second["failed"]["told"]
    for way, steps in {"with exchange": (4, 2), "before it": (4, 2), "failed": (4, 4)}.items():
        momentum = first[way]["shared"]["momentum/fragment0"]  # of one exchange: what the ranks have changed
        assert torch.allclose(momentum, torch.full_like(momentum, 0.1 * sum(steps) / 2), rtol=0.01), way


def test_weights_that_are_not_finite_are_replaced_once_for_all_late_exchanges_that_had_begun_with_them() -> None:
    ranks = play("diloco_scenes", "restarts", 2, "gloo")
    for found in ranks:
        assert [found[f"skipped{after}"] for after in ("", " after 4", " after 6")] == [2, 2, 2]
    found = ranks[1]
    weights = found["whole"]
    assert torch.equal(weights[4], found["start"])  # when the first of the two is applied
    for number in (5, 6, 7):  # the second one is in step 6
        torch.testing.assert_close(weights[number], weights[number - 1] - 0.1)
    assert all(bool(one.isfinite().all()) for one in weights[4:])
    for count in (4, 6):
        assert all(map(torch.equal, found[f"after {count}"], weights[count:])), count


def test_what_cannot_work_is_refused_at_the_start_with_the_reason() -> None:
    for told in play("diloco_scenes", "refusals", 2, "gloo"):
        assert "is torch.optim.SGD with one group of parameters, got Adam" in told["adam"]
        assert "needs nesterov=True" in told["plain momentum"]
        assert "weight_decay=0.1, expected none" in told["decay"]
        assert "did you mean 'fragments'?" in told["option"]
        assert "wrapped in DistributedDataParallel" in told["wrapped"]
        assert "all ranks need the same options" in told["ranks"]
        assert told["failed"] == "stepped"


def test_a_rank_that_does_not_learn_whether_an_exchange_counts_makes_the_next_one_as_the_others_do() -> None:
    first, second = play("diloco_scenes", "lost_verdict", 2, "gloo")
    assert first == {"told": [], "steps": 6, "skipped": 0}
    assert second["told"] == [(3, "the network was away")]
    assert (second["steps"], second["skipped"]) == (6, 1)
