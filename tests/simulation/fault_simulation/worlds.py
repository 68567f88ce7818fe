"""The world of a flavour: which actors run in it, and what must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fault_simulation.elastic_world import ElasticWorld
from fault_simulation.flavours import FLAVOURS
from fault_simulation.servers_world import ServersWorld
from fault_simulation.world import World

WORLDS: Mapping[str, type[World]] = {"federated": World, "servers": ServersWorld, "elastic": ElasticWorld}


def new_world(seed: int, flavour: str, **options: Any) -> World:
    """Return the world of a run. ``options``: of :class:`.World`."""
    return WORLDS[FLAVOURS[flavour].world](seed, flavour, **options)
