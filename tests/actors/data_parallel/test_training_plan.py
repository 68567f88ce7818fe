import pytest

from gradbus.actors.data_parallel.epoch_plan import EpochPlan


def test_ranks_that_run_out_of_data_are_no_longer_active() -> None:
    plan = EpochPlan.of([5, 3, 0], 1)
    assert plan.steps == 5
    assert [plan.active(step) for step in range(5)] == [2, 2, 2, 1, 1]
    assert [plan.batches_in(1, step) for step in range(5)] == [1, 1, 1, 0, 0]


def test_the_last_step_of_a_rank_may_have_fewer_batches() -> None:
    plan = EpochPlan.of([5, 8], 3)
    assert plan.steps == 3
    assert [plan.batches_in(0, step) for step in range(3)] == [3, 2, 0]
    assert [plan.batches_in(1, step) for step in range(3)] == [3, 3, 2]
    assert [plan.active(step) for step in range(3)] == [2, 2, 1]


@pytest.mark.parametrize("batches", [[], [0, 0], [3, -1]])
def test_an_epoch_without_data_is_refused(batches: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        EpochPlan.of(batches, 1)
