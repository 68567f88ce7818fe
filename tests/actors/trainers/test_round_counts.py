"""Samples, epochs and losses of a round, as a trainer shows them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gradbus.actors.federated.client.handover import TrainingRound
from gradbus.actors.trainers.federated_rounds import RoundLength, numbers_of
from gradbus.actors.trainers.round_counts import RoundCounts, batch_size_of, distinct_samples, length_of
from gradbus.runtime.errors import ConfigError


@dataclass
class Batch:
    weight: float
    points: Tensor


class Graphs:
    num_graphs = 5


ROWS = torch.zeros(7, 3)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (ROWS, 7),
        ([ROWS, torch.zeros(7)], 7),
        ((torch.tensor(3.0), ROWS), 7),
        ({"scale": 2, "points": ROWS}, 7),
        (UserDict({"input_ids": ROWS}), 7),
        ([{"points": ROWS}, {"points": torch.zeros(2, 2)}], 7),
        (Batch(1.0, ROWS), 7),
        (["a text", "another", "one more"], 3),
        (Graphs(), 5),
    ],
)
def test_a_batch_has_as_many_samples_as_its_first_tensor_has_rows(batch: Any, expected: int) -> None:
    assert batch_size_of(batch) == expected


@pytest.mark.parametrize("batch", [None, 3, {}, [torch.tensor(1.0)], [[[[[ROWS]]]]], object()])
def test_a_batch_without_rows_asks_for_a_function(batch: Any) -> None:
    with pytest.raises(ConfigError, match="Pass samples_in, a function that returns the number of samples"):
        batch_size_of(batch)


@pytest.mark.parametrize(
    ("seen", "largest_epoch", "epochs", "dataset", "expected"),
    [
        (100, 0, 0, None, 100),
        (100, 0, 0, 60, 60),
        (200, 100, 2, None, 100),  # the same twice
        (120, 100, 1, 1000, 100),  # the end of an epoch and the beginning of the next
        (80, 100, 0, None, 80),  # within an epoch
    ],
)
def test_samples_are_distinct_ones(
    seen: int, largest_epoch: int, epochs: int, dataset: int | None, expected: int
) -> None:
    assert distinct_samples(seen, largest_epoch, epochs, dataset) == expected


def test_counts_of_a_round_begin_anew_and_those_of_an_epoch_go_on() -> None:
    counts = RoundCounts()
    counts.add_batch(20, torch.tensor(1.0))
    counts.start()
    counts.add_batch(10, torch.tensor(3.0))
    counts.add_batch(30)  # without a loss
    counts.add_epoch()
    assert counts.totals() == (40, 60, 30.0, 10)
    assert counts.epochs == 1
    counts.start()
    counts.add_epoch()
    assert counts.epochs == 0, "an epoch in which the round has not trained"
    assert counts.totals() == (0, 60, 0.0, 0)


def test_the_length_of_a_round_is_that_of_the_argument_or_the_controllers() -> None:
    asked = TrainingRound(round_id=1, epochs=2, lr=0.1, steps=0, seed=0, subset_size=0)
    of_steps = TrainingRound(round_id=1, epochs=2, lr=0.1, steps=5, seed=0, subset_size=0)
    plain = RoundLength.of_arguments(None, None)
    assert [plain.is_reached(100, epochs, asked) for epochs in (1, 2)] == [False, True]
    assert [plain.is_reached(steps, 9, of_steps) for steps in (4, 5)] == [False, True]
    assert [RoundLength.of_arguments(3, None).is_reached(100, epochs, of_steps) for epochs in (2, 3)] == [False, True]
    assert [RoundLength.of_arguments(None, 7).is_reached(steps, 9, asked) for steps in (6, 7)] == [False, True]


def test_metrics_are_the_single_numbers_that_are_named() -> None:
    metrics = {"loss": torch.tensor([0.5]), "epoch": 3, "text": "a", "matrix": ROWS, "lr": 0.1}
    assert numbers_of(metrics, None) == {"loss": 0.5, "epoch": 3.0, "lr": 0.1}
    assert numbers_of(metrics, frozenset({"loss", "matrix", "none"})) == {"loss": 0.5}


def test_the_length_of_a_data_set_is_known_or_not() -> None:
    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(())

    assert length_of(DataLoader(TensorDataset(ROWS))) == 7
    assert length_of(DataLoader(Endless())) is None
    assert length_of(None) is None
