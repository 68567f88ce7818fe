"""From settings to a bus."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from gradbus.runtime.network import NetworkConfig, build_xml
from gradbus.runtime.settings import BusSettings

if TYPE_CHECKING:
    from gradbus.runtime.bus import Bus


def check(settings: BusSettings) -> None:
    """Find out at once what opening the bus would find out seconds later, when torch and the data are loaded.

    Raises:
        ConfigError: no such interface, or CYCLONEDDS_URI holds no document for Cyclone DDS.
    """
    build_xml(_network(settings), user_document=os.environ.get("CYCLONEDDS_URI"))


def open_bus(settings: BusSettings) -> AbstractAsyncContextManager[Bus]:
    """The bus that the settings describe."""
    from gradbus.runtime.bus import connect  # loads DDS

    return connect(
        settings.job,
        domain=settings.domain,
        network=_network(settings),
        stall_timeout_s=settings.stall_timeout_s,
    )


def _network(settings: BusSettings) -> NetworkConfig:
    return NetworkConfig(
        profile=settings.network,
        interface=settings.interface,
        peers=settings.peers,
        multicast=settings.multicast,
        lease_s=settings.lease_s,
        shared_memory=settings.shared_memory,
    )
