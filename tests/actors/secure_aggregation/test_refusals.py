"""What secure aggregation cannot work with is refused at the start, with the reason and what to do."""

from __future__ import annotations

from typing import Any

import pytest

import gradbus
from gradbus.actors.aggregation.clipping import CAPPED, LimitedStrategy
from gradbus.actors.aggregation.partial_sum import PartialSum
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.sum_summary import SumSummary
from gradbus.actors.aggregation.updates import Facts
from gradbus.actors.federated.controller.combinations import check_combination
from gradbus.actors.federated.controller.rounds import Outcome, Round, RoundRules
from gradbus.actors.virtual.simulation import choices_of
from gradbus.runtime.errors import ConfigError

SECURE: dict[str, Any] = {"secure_aggregation": {"enabled": True}, "clients": {"num": 10, "min": 3}}


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_strategies_that_need_the_sum_alone_are_fine(strategy: str) -> None:
    for codec in ("fp32", "q8", "s4", "sq8"):
        check_combination(gradbus.FederatedConfig(**SECURE, strategy=strategy, codec=codec))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"strategy": "median"}, "strategy median needs the updates of single clients"),
        ({"strategy": "scaffold", "training": {"rule": "scaffold"}}, "strategy scaffold needs"),
        ({"codec": "q4"}, "codec q4: its scales are of each update by itself, .* Use fp32, or q8, s4 or sq8"),
        ({"codec": {"name": "q8", "version": 1}}, "codec q8 of version 1: .* Leave codec.version out"),
        ({"mode": "asynchronous"}, "Use mode = synchronous"),
        ({"clients": {"num": 3, "min": 2, "kind": "sites"}}, "Set it at the sites"),
        ({"limits": {"clip_norm": 1.0}}, "the controller sees none. Leave it out"),
        ({"history": {"payloads": True}}, "history.payloads: .* Leave it out"),
        ({"clients": {"num": 10}}, "clients.min is 1: the sum of one update is that update. Set it to 2 or more"),
        ({"clients": {"num": 256, "min": 2}}, "256 clients in a round: at most 255"),
        (
            {"clients": {"num": 900, "min": 2}, "selection": {"name": "uniform", "count": 250, "over_select": 1.1}},
            "275 clients in a round: at most 255",
        ),
    ],
)
def test_a_setting_that_does_not_go_with_it_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"federated.secure_aggregation: .*{reason}"):
        check_combination(gradbus.FederatedConfig(**{**SECURE, **settings}))


def test_virtual_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="one process speaks for all virtual clients"):
        choices_of(gradbus.FederatedConfig(**SECURE), 10, None)


def test_a_round_ends_at_no_time_with_fewer_updates_than_it_is_required_to_have() -> None:
    rules = RoundRules(minimum=2, quorum=0.2, deadline_s=10.0, grace_s=1.0, enough=2)
    round_ = Round(1, range(6), rules, now_s=0.0)
    round_.require(4)
    for client_id in range(3):
        round_.accept(client_id, 1.0)
    assert round_.verdict(5.0) is None
    assert round_.verdict(11.0) is Outcome.TOO_FEW
    round_.accept(3, 2.0)
    assert round_.verdict(2.0) is Outcome.ENOUGH
    round_.fail_all("none of them counts")
    assert (round_.verdict(2.0), round_.ready, set(round_.failed)) == (Outcome.TOO_FEW, 0, set(range(6)))


def test_clients_that_weigh_less_than_they_have_announced_are_marked_in_the_report() -> None:
    class Noted(FedAvg):
        def add_sum(self, partial: PartialSum) -> None:
            assert partial.summary.num_samples == 25

    strategy = LimitedStrategy(Noted(1), cap_samples=20)
    partial = PartialSum(SumSummary(25, 2, (), (), 0), None, None)  # type: ignore[arg-type]
    strategy.add_masked(partial, [Facts(client_id=3, num_samples=90), Facts(client_id=4, num_samples=5)])
    assert strategy.marks() == {CAPPED: (3,)}
