"""From settings to an open transport on links: its session, and what travels on it."""

from __future__ import annotations

from functools import partial

from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.network.tcp_connections import find_connections
from gradbus.runtime.transport.api import Traits
from gradbus.runtime.transport.zenoh.link_watch import LinkWatch
from gradbus.runtime.transport.zenoh.reach import LinkReach
from gradbus.runtime.transport.zenoh.router import MAX_TOKENS, MEMBER_LIMITS, Router, router_settings
from gradbus.runtime.transport.zenoh.session import open_session, open_side_session
from gradbus.runtime.transport.zenoh.side_links import SideLinks
from gradbus.runtime.transport.zenoh.transport import ZenohTransport
from gradbus.runtime.transport.zenoh.zenoh_session import ZenohSession


def open_on_links(job: str, domain: int, network: NetworkConfig) -> ZenohTransport:
    """Open the transport of a job. Where it listens it has the limits and the rules of access of a relay, as it
    forwards for others. Not for the event loop. Raises as :func:`.session.open_session`."""
    links = network.links
    assert links is not None
    session, name = _open_session(links), _name_of(job, domain)
    try:
        transport = ZenohTransport(
            session,
            name,
            reach=LinkReach(domain=domain, links=links),
            lease_s=links.effective_lease_s,
            traits=Traits(
                leaves_machine=links.is_exposed,
                shared_memory=network.shared_memory,
                has_default_lease=links.lease_s is None,
            ),
        )
        session.show_presence(name, transport.own)
        return transport
    except BaseException:
        session.close()
        raise


def _open_session(links: LinkConfig) -> ZenohSession:
    if links.mode != "router":
        session = open_session(links)
        side_links = SideLinks(session, partial(open_side_session, links)) if links.is_exposed else None
        return ZenohSession(session, side_links=side_links)
    session = open_session(links, more=router_settings(MEMBER_LIMITS, {}))
    try:
        router = Router(session, max_members=MAX_TOKENS * MEMBER_LIMITS.sessions)
        find = partial(find_connections, ports={one.port for one in links.listens})
        return ZenohSession(session, watch=LinkWatch(router, links.effective_lease_s, find))
    except BaseException:
        session.close()
        raise


def _name_of(job: str, domain: int) -> str:
    """Return the name of a job on links. Jobs of two domains do not meet, as on DDS; domain 0 leaves the name as it is,
    so that a relay can know jobs by their names."""
    return f"{job}@{domain}" if domain else job
