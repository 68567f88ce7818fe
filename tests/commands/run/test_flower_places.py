"""Which node a process of ``gradbus flower node`` is: from its options, its config and its name; without Flower."""

from __future__ import annotations

from typing import Any

import pytest

from gradbus.actors.flower.protocol import LAST_NAMED, MAX_NODES, MAX_PARTITIONS, NodePlace
from gradbus.commands.run.flower import place_of
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.id_ranges import MAX_CHARS, format_ids


def test_a_partition_of_the_options_is_in_the_config_beside_its_other_keys() -> None:
    place, config = place_of(1, 4, None, {"dataset-path": "/data"})
    assert place == NodePlace(1, 4)
    assert config == {"dataset-path": "/data", "partition-id": 1, "num-partitions": 4}


def test_a_partition_of_the_config_is_that_of_the_node() -> None:
    config: dict[str, Any] = {"partition-id": 2, "num-partitions": 3, "x": 1.5}
    assert place_of(None, None, None, config) == (NodePlace(2, 3), config)


def test_a_name_gives_the_number_whatever_the_partition() -> None:
    config: dict[str, Any] = {"partition-id": 0, "num-partitions": 2}
    place, found = place_of(None, None, "site-1", config)
    assert found == config
    assert place == place_of(None, None, "site-1", {})[0]
    assert place.num_partitions == 0
    assert MAX_PARTITIONS <= place.number <= LAST_NAMED
    assert place.number != NodePlace.derive_from_name("site-2").number


@pytest.mark.parametrize("config", [{}, {"partition-id": 0}, {"partition-id": True, "num-partitions": 2}])
def test_without_name_and_partition_a_name_is_drawn_at_each_start(config: dict[str, Any]) -> None:
    drawn = {place_of(None, None, None, config)[0] for _ in range(4)}
    assert len({place.name for place in drawn}) == 4
    assert all(place.num_partitions == 0 for place in drawn)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1, None, None, {}), "--partition needs --of"),
        ((None, 2, None, {}), "--of needs --partition"),
        ((2, 2, None, {}), "give one of 0 to 1"),
        ((1, 2, None, {"partition-id": 0}), "node config has partition-id=0, and the options say 1"),
        ((None, None, None, {"partition-id": 5, "num-partitions": 2}), "partition 5 of 2"),
        ((None, None, "a/b", {}), "name 'a/b': expected 1 to 64"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_of(*arguments)


def test_an_instruction_has_room_for_as_many_named_nodes_as_a_run_may_have() -> None:
    assert len(format_ids(range(LAST_NAMED - 2 * MAX_NODES, LAST_NAMED, 2))) <= MAX_CHARS
