"""Who takes part in a round: pure selectors, by seed and round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradbus.actors.federated.controller.selection import check_selection
from gradbus.actors.federated.controller.selectors.base import ClientFacts, Draw, Selector, make_selector, selected
from gradbus.runtime.choices import SELECTORS
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError

ROUNDS = 2000


def selector(name: str = "uniform", **options: float) -> Selector:
    return make_selector(FederatedConfig(selection={"name": name, **options}).selection)


def clients(number: int, **facts: Sequence[float | None]) -> list[ClientFacts]:
    return [
        ClientFacts(client_id=one, **{key: values[one] for key, values in facts.items()})  # type: ignore[arg-type]
        for one in range(number)
    ]


def test_uniform_selection_asks_every_client_as_often_by_chi_squared() -> None:
    asked: Counter[int] = Counter()
    for round_id in range(1, ROUNDS + 1):
        asked.update(selector(count=10).select(clients(200), 10, Draw(7, round_id)))
    expected = ROUNDS * 10 / 200
    # Without replacement each count has the variance n p (1 - p), and the sum that of 199 degrees of freedom.
    chi2 = sum((asked[one] - expected) ** 2 for one in range(200)) / (expected * (1 - 10 / 200)) * 199 / 200
    assert 138.0 < chi2 < 273.0  # 0.05 % at each side of 199 degrees of freedom


def test_uniform_selection_asks_every_pair_as_often_by_chi_squared() -> None:
    pairs: Counter[tuple[int, ...]] = Counter()
    for round_id in range(1, ROUNDS + 1):
        pairs[tuple(sorted(selector(count=2).select(clients(8), 2, Draw(1, round_id))))] += 1
    expected = ROUNDS / 28
    chi2 = sum((pairs[a, b] - expected) ** 2 / expected for a in range(8) for b in range(a + 1, 8))
    assert sum(pairs.values()) == ROUNDS
    assert 9.0 < chi2 < 57.0  # 27 degrees of freedom


def test_ids_far_apart_are_drawn_as_evenly_as_consecutive_ones() -> None:
    ids = [one << 24 for one in range(100)]
    first = Counter(Draw(3, round_id).order(ids)[0] for round_id in range(ROUNDS))
    chi2 = sum((first[one] - ROUNDS / 100) ** 2 / (ROUNDS / 100) for one in ids)
    assert 57.0 < chi2 < 157.0  # 99 degrees of freedom


def test_the_same_seed_and_round_select_the_same_and_others_do_not() -> None:
    one = selector(count=10).select(clients(200), 10, Draw(7, 3))
    assert one == selector(count=10).select(clients(200), 10, Draw(7, 3))
    assert one != selector(count=10).select(clients(200), 10, Draw(7, 4))
    assert one != selector(count=10).select(clients(200), 10, Draw(8, 3))


@pytest.mark.parametrize("name", ["uniform", "weighted"])
def test_where_one_is_gone_only_that_one_is_replaced(name: str) -> None:
    everyone = clients(50, num_samples=[100 + 10 * one for one in range(50)])
    before = selector(name, count=10).select(everyone, 10, Draw(7, 3))
    after = selector(name, count=10).select([one for one in everyone if one.client_id != before[4]], 10, Draw(7, 3))
    assert len(set(before) - set(after)) == 1


def test_weighted_selection_of_one_is_in_proportion_to_the_samples() -> None:
    samples = [100, 200, 300, 400]
    asked = Counter(
        selector("weighted", count=1).select(clients(4, num_samples=samples), 1, Draw(5, round_id))[0]
        for round_id in range(ROUNDS)
    )
    chi2 = sum((asked[one] - ROUNDS * n / 1000) ** 2 / (ROUNDS * n / 1000) for one, n in enumerate(samples))
    assert chi2 < 17.8  # 0.05 % of 3 degrees of freedom


def test_who_has_not_counted_yet_weighs_as_the_median_of_the_others() -> None:
    samples = [0, 100, 100, 100]
    asked = Counter(
        selector("weighted", count=1).select(clients(4, num_samples=samples), 1, Draw(5, round_id))[0]
        for round_id in range(ROUNDS)
    )
    assert abs(asked[0] - ROUNDS / 4) < 4 * math.sqrt(ROUNDS * 3 / 16)


def test_in_turn_everybody_is_asked_before_anybody_is_asked_again() -> None:
    rounds = [0] * 10
    turns = []
    for round_id in range(1, 6):
        turn = selector("round_robin", count=4).select(clients(10, rounds=rounds), 4, Draw(0, round_id))
        turns.append(list(turn))
        for one in turn:
            rounds[one] += 1
    assert turns == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_power_of_choice_takes_the_highest_losses_of_its_candidates() -> None:
    losses = [float(one) for one in range(100)]
    everyone = clients(100, loss=losses, rounds=[1] * 100, num_samples=[10] * 100)
    drawn = selector("weighted", count=10).select(everyone, 20, Draw(2, 9))  # its candidates
    chosen = selector("power_of_choice", count=10).select(everyone, 10, Draw(2, 9))
    assert sorted(chosen) == sorted(drawn)[-10:]
    alone = selector("power_of_choice", count=10, candidates=1).select(everyone, 10, Draw(2, 9))
    assert sorted(alone) == sorted(selector("weighted", count=10).select(everyone, 10, Draw(2, 9)))


def test_power_of_choice_asks_first_who_was_never_asked_and_not_for_ever_who_fails() -> None:
    everyone = clients(5, loss=[3.0, None, None, 1.0, 2.0], rounds=[1, 0, 4, 1, 1])
    choice = selector("power_of_choice", count=2, candidates=100)
    assert [choice.select(everyone, 2, Draw(0, round_id)) for round_id in range(1, 20)] == [[1, 0]] * 19


@pytest.mark.parametrize(
    ("options", "ready", "wanted", "asked"),
    [
        ({"fraction": 0.1}, 200, 20, 20),
        ({"fraction": 0.1}, 5, 1, 1),
        ({"fraction": 0.55}, 100, 55, 55),
        ({"count": 10}, 200, 10, 10),
        ({"count": 10}, 4, 4, 4),
        ({"count": 10, "over_select": 1.3}, 200, 10, 13),
        ({"count": 10, "over_select": 1.3}, 11, 10, 11),
        ({}, 7, 7, 7),
    ],
)
def test_how_many_are_wanted_and_asked(options: dict[str, float], ready: int, wanted: int, asked: int) -> None:
    one = selector(**options)
    assert one.wanted(ready) == wanted
    assert one.asked(ready, one.wanted(ready)) == asked
    assert one.partial is bool(options)


def test_a_round_never_wants_fewer_than_its_minimum() -> None:
    assert selector(fraction=0.01).wanted(50, 3) == 3
    assert selector(fraction=0.01).wanted(2, 3) == 2


class Greedy(Selector):
    """Of a user: always the same, whatever is asked for."""

    def select(self, ready: Sequence[ClientFacts], count: int, draw: Draw) -> Sequence[int]:
        return [0, 1, 77]


def test_a_selector_of_the_users_is_made_by_name_and_what_it_selects_is_checked() -> None:
    mine = selector(f"{__name__}:Greedy", count=2)
    assert isinstance(mine, Greedy)
    with pytest.raises(ConfigError, match=r"Greedy\.select gave clients \[0, 1, 77\]: expected 2 of the 9"):
        selected(mine, clients(9), 2, Draw(0, 1))
    with pytest.raises(ConfigError, match="is no selector: inherit"):
        selector(f"{__name__}:Counter")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fraction": 0.1, "count": 3}, "give fraction or count"),
        ({"over_select": 1.3}, "set fraction"),
        ({"fraction": 0.0}, "greater than 0"),
        ({"name": "unifrom"}, "did you mean 'uniform'"),
        ({"candidates": 3}, "this is an option of power_of_choice"),
    ],
)
def test_wrong_options_are_refused_with_what_to_do(options: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FederatedConfig(selection=options)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mode": "asynchronous"}, "Use mode=synchronous"),
        ({"clients": {"kind": "sites"}}, "Leave selection out in trees"),
        ({"downlink_codec": "q8"}, "Set it to fp32"),
        ({"clients": {"num": 20, "min": 3}, "selection": {"count": 2}}, r"2 at most, and federated\.clients\.min is 3"),
    ],
)
def test_runs_in_which_a_part_of_the_clients_cannot_take_part_are_refused(
    settings: dict[str, object], text: str
) -> None:
    config = FederatedConfig(**{"selection": {"fraction": 0.1}, **settings})
    with pytest.raises(ConfigError, match=text):
        check_selection(config, make_selector(config.selection))
    everyone = FederatedConfig(**{**settings, "selection": "uniform"})
    check_selection(everyone, make_selector(everyone.selection))


def test_the_documents_table_is_that_of_the_choices() -> None:
    page = (Path(__file__).parents[3] / "docs/selection.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(f"| `{SELECTORS.key}=")]
    assert rows == [f"| `{SELECTORS.key}={name}` | {text} |" for name, text in SELECTORS.help().items()]
