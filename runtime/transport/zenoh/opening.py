"""From settings to an open transport on links: its session, and what travels on it."""

from __future__ import annotations

from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.api import Transport
from gradbus.runtime.transport.zenoh.reach import LinkReach
from gradbus.runtime.transport.zenoh.session import open_session


def open_on_links(job: str, domain: int, network: NetworkConfig) -> Transport:
    """Open the transport of a job. Not for the event loop. Raises as :func:`.session.open_session`.

    Jobs of one name and two domains do not meet, as on DDS; domain 0 leaves the name as it is, so that a relay can be
    told of jobs by their names.
    """
    assert network.links is not None
    session = open_session(network.links)
    try:
        raise NotImplementedError(job, domain, LinkReach(domain=domain, links=network.links))
    except BaseException:
        session.close()
        raise
