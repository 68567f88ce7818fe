"""The deadline of a round by how long the last rounds took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gradbus.actors.aggregation.orders import ClientOrder, RoundOrder
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.federated.controller.deadline import FIRST_ROUNDS, LEAST_S, AskedWork, RoundDeadline, work_of
from gradbus.actors.federated.controller.order_book import OrderBook
from gradbus.runtime.choices import CLIENT_SCHEDULES
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.optimization.schedules import RoundRates

ONE = work_of(1, 0, 0)


class Deadline(RoundDeadline):
    """Of rounds of one epoch, unless a test says otherwise."""

    def seconds(self, work: AskedWork | None = ONE, attempt: int = 1) -> float:
        return super().seconds(work, attempt)


def after(*rounds_s: float, times: float = 2.0, work: AskedWork | None = ONE) -> Deadline:
    deadline = Deadline(times, 300.0)
    for seconds in rounds_s:
        deadline.note_round(seconds, work)
    return deadline


def test_a_round_of_more_epochs_gets_as_many_times_more() -> None:
    deadline = after(*[10.0] * 5)
    assert [deadline.seconds(work_of(epochs, 0, 0)) for epochs in (1, 3, 99)] == [20.0, 60.0, 300.0]
    deadline.note_round(30.0, work_of(3, 0, 0))
    assert deadline.seconds(work_of(1, 0, 0)) == 20.0, "that round does not make the others longer"
    assert after(*[10.0] * 5, work=work_of(4, 0, 0)).seconds() == 20.0, "a part of a round is the same with less work"


def test_work_of_another_kind_is_not_compared() -> None:
    deadline = after(*[10.0] * 5)
    for work in (work_of(1, 50, 0), work_of(1, 0, 100), None):
        assert deadline.seconds(work) == 300.0
    assert after(*[10.0] * 5, work=work_of(1, 50, 0)).seconds(work_of(1, 100, 7)) == 40.0
    assert after(*[10.0] * 5, work=work_of(2, 0, 50)).seconds(work_of(1, 0, 200)) == 40.0


def test_the_work_of_a_round_is_the_most_that_its_order_asks_of_a_client() -> None:
    config = FederatedConfig(training={"epochs": 2, "from_round": {"5": {"epochs": 3}}})
    nothing_on_disk: Any = SimpleNamespace(load_order=lambda _: None, has_orders=False)
    rates = RoundRates(CLIENT_SCHEDULES, config.training.schedule, 0.1, config.rounds)
    book = OrderBook(config, FedAvg(1), nothing_on_disk, rates, has_caller=True)
    assert [book.find_most_work(round_id) for round_id in (1, 5)] == [work_of(2, 0, 0), work_of(3, 0, 0)]
    orders = {
        1: RoundOrder(epochs=7), 2: RoundOrder(each={3: ClientOrder(epochs=9)}), 3: RoundOrder(subset_size=10),
        4: RoundOrder(each={3: ClientOrder(steps=9)}), 6: RoundOrder(steps=4),
    }  # fmt: skip
    found = []
    for round_id, order in orders.items():
        book.decide_order(round_id, order, [0, 1, 2, 3])
        found.append(book.find_most_work(round_id))
    assert found == [
        AskedWork("epochs", 7),
        AskedWork("epochs", 9),
        AskedWork("samples", 20),
        None,
        AskedWork("steps", 4),
    ]


def test_the_first_rounds_have_the_fixed_deadline() -> None:
    assert after(*[10.0] * (FIRST_ROUNDS - 1)).seconds() == 300.0
    assert after(*[10.0] * FIRST_ROUNDS).seconds() == 20.0


def test_it_follows_the_median_of_the_last_five_rounds() -> None:
    assert after(100.0, 100.0, 100.0, 10.0, 12.0, 11.0, 90.0, 8.0).seconds() == 22.0


def test_it_is_never_longer_than_the_fixed_one_and_never_next_to_nothing() -> None:
    assert after(*[200.0] * 5).seconds() == 300.0
    assert after(*[0.001] * 5).seconds() == LEAST_S


def test_another_attempt_at_a_round_has_all_the_time() -> None:
    assert after(*[10.0] * 5).seconds(attempt=2) == 300.0


def test_asynchronous_rounds_which_wait_for_nobody_have_none() -> None:
    with pytest.raises(ConfigError, match="timeout_times_median is of synchronous rounds"):
        FederatedConfig(mode="asynchronous", round={"timeout_times_median": 2.0})
