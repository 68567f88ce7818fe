"""The budget of a client: the arithmetic of its pauses by a clock that jumps, and what a training keeps of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from gradbus.actors.federated.client.pacing import CREDIT_S, PacedTraining, Pacer, ShareLimit
from gradbus.runtime.config.federated import BudgetSettings
from gradbus.runtime.errors import ConfigError

WINDOW_S = 10.0


class Machine:
    """A clock that jumps, and the processor time of a training. ``late_s``: how much longer a sleep lasts."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.cpu_s, self.late_s = 1000.0, 50.0, late_s
        self.used: list[tuple[float, float]] = [(self.now_s, self.cpu_s)]

    def compute(self, cpu_s: float, speed: float = 1.0) -> None:
        """Use processor time, on ``speed`` cores at a time."""
        self.now_s += cpu_s / speed
        self.cpu_s += cpu_s
        self.used.append((self.now_s, self.cpu_s))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds + self.late_s
        self.used.append((self.now_s, self.cpu_s))

    def share_of(self, begin_s: float) -> float:
        """The share of a core that was used in the window from then on."""
        return (self._at(begin_s + WINDOW_S) - self._at(begin_s)) / WINDOW_S

    def _at(self, at_s: float) -> float:
        for (left_s, left), (right_s, right) in itertools.pairwise(self.used):
            if left_s <= at_s <= right_s:
                return left + (right - left) * ((at_s - left_s) / (right_s - left_s) if right_s > left_s else 1.0)
        raise AssertionError("outside of what was measured")

    def pacer(self, **budget: object) -> Pacer:
        return Pacer(BudgetSettings(**budget), lambda: self.cpu_s, self.wait, clock=lambda: self.now_s)


def never() -> bool:
    return False


def trained(machine: Machine, training: PacedTraining, batch: Callable[[], None], until_s: float) -> None:
    while machine.now_s < until_s and not training.should_stop():
        batch()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.5])
@pytest.mark.parametrize("late_s", [0.0, 0.004], ids=["exact", "late"])
def test_in_any_ten_seconds_training_takes_its_share_within_ten_percent(share: float, late_s: float) -> None:
    machine, draw = Machine(late_s), random.Random(7)
    training = machine.pacer(core_share=share).begin(never)
    until_s = machine.now_s + 60.0
    trained(machine, training, lambda: machine.compute(draw.uniform(0.001, 0.4 * share), 2.0), until_s)
    starts = [1000.0 + 0.25 * number for number in range(190)]
    shares = [machine.share_of(begin_s) for begin_s in starts]
    assert max(shares) <= 1.1 * share
    assert min(shares) >= 0.9 * share


def test_a_training_that_uses_less_than_its_share_is_not_paused_and_saves_no_more_than_a_credit() -> None:
    machine = Machine()
    training = machine.pacer(core_share=0.5).begin(never)
    for _ in range(100):
        machine.compute(0.1, 0.25)  # it waits for its data most of the time
        before_s = machine.now_s
        assert not training.should_stop()
        assert machine.now_s == before_s
    burst_s = 0.0
    while machine.now_s == before_s + burst_s:
        machine.compute(0.01)
        burst_s += 0.01
        training.should_stop()
    assert burst_s <= 2 * CREDIT_S + 0.02


def test_what_was_owed_at_the_end_of_a_round_is_paid_in_the_next_one_and_other_work_is_not_counted() -> None:
    limit = ShareLimit(0.5)
    limit.resume(0.0, 0.0)
    assert limit.pause_s(4.0, 4.0) == pytest.approx(4.0)
    limit.resume(9.0, 6.0)  # two seconds of the pause are over; 5 s of processor time went into something else
    assert limit.pause_s(9.0, 6.0) == pytest.approx(2.0)
    limit.resume(9.0, 100.0)
    assert limit.pause_s(9.0, 100.0) == 0.0


def test_short_pauses_are_put_together() -> None:
    limit = ShareLimit(0.5)
    limit.resume(0.0, 0.0)
    assert limit.pause_s(0.0005, 0.0005) == 0.0
    assert limit.pause_s(0.002, 0.002) == pytest.approx(0.002)


def test_time_is_over_between_two_batches_and_a_pause_does_not_outlast_it() -> None:
    machine = Machine()
    training = machine.pacer(core_share=0.1, seconds_per_round=60.0).begin(never)
    training.limit_to(1.0)
    batches = 0
    while not training.should_stop():
        machine.compute(1.0)
        batches += 1
    assert batches == 6
    assert training.is_out_of_time
    assert machine.now_s == pytest.approx(1060.0)
    assert training.overtime_s == 0.0


def test_a_training_that_goes_on_after_its_time_keeps_its_share() -> None:
    machine = Machine()
    training = machine.pacer(core_share=0.5, seconds_per_round=5.0).begin(never)
    training.limit_to(1.0)
    while machine.now_s < 1060.0:
        machine.compute(0.2)
        training.pause()  # after a step of its optimizer: it never asks whether to stop
    assert max(machine.share_of(1000.0 + start_s) for start_s in range(45)) <= 0.55


def test_the_model_that_stays_here_has_half_of_the_time_and_the_global_one_what_is_left() -> None:
    machine = Machine()
    training = machine.pacer(seconds_per_round=60.0).begin(never)
    for share, batches in ((0.5, 30), (1.0, 30)):
        training.limit_to(share)
        done = 0
        while not training.should_stop():
            machine.compute(1.0)
            done += 1
        assert done == batches


def test_a_training_that_is_called_off_is_not_out_of_time() -> None:
    machine = Machine()
    off: list[int] = []
    training = machine.pacer(seconds_per_round=1.0).begin(lambda: bool(off))
    training.limit_to(1.0)
    machine.compute(5.0)
    off.append(1)
    assert training.should_stop()
    assert not training.is_out_of_time
    assert training.overtime_s == pytest.approx(4.0)


def test_without_a_budget_nothing_waits_and_no_time_is_over() -> None:
    training = PacedTraining(None, never)
    training.limit_to(1.0)
    assert not training.should_stop()
    assert training.overtime_s == 0.0
    assert not BudgetSettings().is_set
    assert BudgetSettings(cores={2, 3}).is_set


@pytest.mark.parametrize(
    "wrong", [{"core_share": 0.0}, {"cores": [-1]}, {"seconds_per_round": 0}, {"share": 0.5}], ids=str
)
def test_an_impossible_budget_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((ConfigError, TypeError), match="BudgetSettings"):
        BudgetSettings(**wrong)
