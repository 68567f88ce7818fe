"""Who a bus will reach, and what its transport asks of this machine: what is known before a bus is open.

Like :mod:`.participant_factory`, which opens the transport, this file knows which one that is. It loads no library of
it: settings are checked before those seconds, and the doctor runs where a library is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradbus.runtime.transport.dds import examination
from gradbus.runtime.transport.dds.missing_peers import Reach

if TYPE_CHECKING:
    from gradbus.runtime.network.network_config import NetworkConfig
    from gradbus.runtime.transport.api import Reachable
    from gradbus.runtime.transport.examination import Examination, PeerNames


def reach_of(domain: int, network: NetworkConfig) -> Reachable:
    """Return who a bus with these settings will reach.

    Raises:
        ConfigError: there is no such interface, or ``CYCLONEDDS_URI`` holds no document for Cyclone DDS.
    """
    return Reach.of(domain, network)


def examination_of(domain: int, network: NetworkConfig) -> Examination:
    """Return what a machine is to be examined for. Raises nothing."""
    return examination.examination_of(domain, network)


def peer_names_of(network: NetworkConfig) -> PeerNames:
    """Return the host names among the peers of a bus. Raises ConfigError, as :func:`reach_of`."""
    return examination.peer_names_of(network)
