"""The reaches of the common grid over rounds: what clients have trained comes through, whoever else is in the sum."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gradbus.actors.aggregation.common_grid import CommonGrid, Rounding, limit_for
from gradbus.actors.aggregation.grid_steps import next_exponents

DIM, ROUNDS, SCALE = 64, 20, 0.01
Changes = NDArray[np.float64]


class Kind:
    """What clients train: the same, and 100 samples each."""

    def __init__(self, clients: int) -> None:
        self.random = np.random.default_rng(clients)
        self.common = self.random.normal(size=DIM) * SCALE
        self.weights = np.full(clients, 100)

    def changes(self, round_id: int) -> Changes:
        """Shape (clients, values)."""
        return np.tile(self.common, (len(self.weights), 1))

    def hostile(self, round_id: int) -> float:
        """What somebody adds to the first value of the sum."""
        return 0.0


class Independent(Kind):
    """Normal values, other ones for each client and in each round."""

    def changes(self, round_id: int) -> Changes:
        return self.random.normal(size=(len(self.weights), DIM)) * SCALE


class Lone(Kind):
    """One client changes all values, the others none."""

    def changes(self, round_id: int) -> Changes:
        found = np.zeros((len(self.weights), DIM))
        found[0] = SCALE
        return found


class Dominant(Kind):
    """One client has a hundred times as many samples."""

    def __init__(self, clients: int) -> None:
        super().__init__(clients)
        self.weights[0] *= 100

    def changes(self, round_id: int) -> Changes:
        found = np.sign(self.random.normal(size=(len(self.weights), DIM))) * SCALE
        found[0] = SCALE
        return found


class HostileOnce(Kind):
    """One client says once that a value has changed by as much as can be said."""

    at = 4

    def hostile(self, round_id: int) -> float:
        return 2.0**22 if round_id == self.at else 0.0


class HostileFirst(HostileOnce):
    at = 1


class Waking(Lone):
    """Changes nothing for 8 rounds but the first value of the first one."""

    def changes(self, round_id: int) -> Changes:
        found = super().changes(round_id)
        if round_id <= 8:
            found[:, round_id == 1 :] = 0.0
        return found


class Found(NamedTuple):
    """Of the values that nobody falsifies, as shares of what was trained.

    Attributes:
        missing: in the end. error: of one round, in the median of the second half.
        quiet: rounds with less than half of what was trained in them. burst: the most of one round.
    """

    missing: float
    error: float
    quiet: int
    burst: float


def simulated(kind: Kind) -> Found:
    clients = len(kind.weights)
    residuals = torch.zeros(clients, DIM)
    exponents = np.zeros(0, np.int8)
    missing, trained, errors, shares = np.zeros(DIM), np.zeros(DIM), [], []
    for round_id in range(1, ROUNDS + 1):
        changes = kind.changes(round_id)
        wanted, total = kind.weights @ changes, np.zeros(DIM)
        if len(exponents):
            grid = CommonGrid(0, DIM, exponents.tobytes())
            residuals += torch.from_numpy(changes)
            out, integers = np.empty(DIM, np.int16), np.zeros(DIM, np.int64)
            for one, weight in enumerate(kind.weights.tolist()):
                Rounding(grid, None, clients, weight, bytes([round_id, one])).round(residuals[one], out)
                integers += out
            step = grid.steps(clients)[0]
            assert np.abs(integers).max() <= 32767
            integers[0] = np.clip(integers[0] + kind.hostile(round_id) / step, -32768, 32767)
            total += integers * step
        else:
            total += wanted
            total[0] += kind.hostile(round_id)
        exponents = next_exponents(exponents, np.array([np.abs(total).max()]), clients)
        missing, trained = missing + wanted - total, trained + wanted
        size = np.linalg.norm(wanted[1:]) or 1.0
        errors.append(np.linalg.norm((total - wanted)[1:]) / size)
        shares.append(np.linalg.norm(total[1:]) / size)
    return Found(
        float(np.linalg.norm(missing[1:]) / np.linalg.norm(trained[1:])),
        float(np.median(errors[10:])),
        sum(share < 0.5 for share in shares),
        max(shares),
    )


@pytest.mark.parametrize(
    ("clients", "missing", "error"),
    [(4, 0.005, 0.03), (17, 0.005, 0.03), (65, 0.01, 0.2), (100, 0.01, 0.2), (255, 0.03, 0.6)],
)
def test_what_all_train_comes_through_with_little_error_in_each_round(
    clients: int, missing: float, error: float
) -> None:
    """Where all rounded in the same direction, a round with 255 clients would err by as much as there is."""
    found = simulated(Kind(clients))
    assert found.missing < missing
    assert found.error < error
    assert found.quiet == 0


@pytest.mark.parametrize("clients", [17, 100])
def test_so_does_what_each_trains_by_itself(clients: int) -> None:
    found = simulated(Independent(clients))
    assert found.missing < 0.02
    assert found.error < 0.15


@pytest.mark.parametrize("clients", [17, 65, 255])
def test_one_client_among_many_that_change_nothing_is_not_held_back(clients: int) -> None:
    found = simulated(Lone(clients))
    assert found.missing < 0.01
    assert found.quiet == 0


@pytest.mark.parametrize("clients", [17, 100, 255])
def test_one_client_with_most_of_the_samples_is_not_held_back(clients: int) -> None:
    found = simulated(Dominant(clients))
    assert found.missing < 0.02
    assert found.error < 0.3


@pytest.mark.parametrize("clients", [4, 100])
def test_after_a_false_value_the_others_are_held_back_for_a_round_at_most(clients: int) -> None:
    found = simulated(HostileOnce(clients))
    assert found.missing < 0.01
    assert found.quiet <= 1
    assert found.burst < 2.0


@pytest.mark.parametrize("clients", [4, 100])
def test_after_a_false_value_in_the_first_round_which_is_exact_they_are_for_two_or_three(clients: int) -> None:
    found = simulated(HostileFirst(clients))
    assert found.missing < 0.01
    assert found.quiet <= 3
    assert found.burst < 4.0


@pytest.mark.parametrize("clients", [4, 100])
def test_a_model_that_nobody_has_trained_for_long_comes_through_when_one_client_does(clients: int) -> None:
    assert simulated(Waking(clients)).missing < 0.01


def test_a_block_that_nobody_trains_stays_where_the_one_is_that_reaches_least_far() -> None:
    exponents = np.array([-3, -8, -8], np.int8)
    for _ in range(20):
        exponents = next_exponents(exponents, np.array([0.0, 2.0**-13, 2.0**-12]), 4)
    assert exponents.tolist() == [-8, -8, -7], "32 times as far as what was changed"


def test_reaches_come_down_by_half_in_a_round_or_at_once_where_they_are_too_large_by_far() -> None:
    now, peaks = np.full(5, 4, np.int8), 2.0 ** np.array([4.1, 2.9, 1.5, -4.0, -20.0])
    assert next_exponents(now, peaks, 100).tolist() == [5, 4, 3, -3, -19]


def test_reaches_rise_by_no_more_than_16_times_in_a_round_and_by_8_at_the_limit_of_one_client() -> None:
    limit = limit_for(100)
    peaks = np.array([100 * 2.0**4, 2.0**4 * limit / (limit + 1)])
    assert next_exponents(np.full(2, 4, np.int8), peaks, 100).tolist() == [8, 7]
    assert next_exponents(np.full(1, 22, np.int8), np.array([1e30]), 4).tolist() == [23]
