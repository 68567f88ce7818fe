"""What DDS asks of a machine: the UDP ports of a domain, the buffers of its sockets, addresses for its peers."""

from __future__ import annotations

import os

from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.dds.network import (
    RECEIVE_BUFFER_BYTES,
    SEND_BUFFER_BYTES,
    build_xml,
    names_in,
    port_range,
    uses_ipv6,
)
from gradbus.runtime.transport.examination import Examination, PeerNames

_DOMAINS = 233


def examination_of(domain: int, network: NetworkConfig) -> Examination:
    """Return what to examine a machine for. Looks at nothing of this machine, and raises nothing."""
    return Examination(
        ports=port_range(domain),
        spare_ports=_spare_ports(domain),
        spare_ports_elsewhere=tuple(_spare_ports(other)[0] for other in range(_DOMAINS) if other != domain),
        receive_buffer_bytes=RECEIVE_BUFFER_BYTES,
        send_buffer_bytes=None if network.profile == "loopback" else SEND_BUFFER_BYTES,
    )


def peer_names_of(network: NetworkConfig) -> PeerNames:
    """Return the host names among the peers that settings and ``CYCLONEDDS_URI`` name.

    Raises:
        ConfigError: there is no such interface, or the variable holds no document for Cyclone DDS.
    """
    document = build_xml(network, user_document=os.environ.get("CYCLONEDDS_URI"))
    return PeerNames(tuple(names_in(document)), uses_ipv6(document))


def _spare_ports(domain: int) -> tuple[int, int]:
    last = int(port_range(domain).partition("-")[2])
    return last - 1, last
