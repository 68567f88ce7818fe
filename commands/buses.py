"""From settings to a bus."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from gradbus.runtime.bus import transport_factory
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.timeouts import ELASTIC_LEASE_S
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security.settings import Security, level_in_force, rank_security, security_of
from gradbus.runtime.testing.faults import parse_rules

if TYPE_CHECKING:
    from gradbus.runtime.bus.bus import Bus
    from gradbus.runtime.transport.api import Reachable
    from gradbus.runtime.transport.examination import Examination, LinkReport, PeerNames


def check(settings: BusSettings, *, rank: int | None = None) -> None:
    """Check at once what would fail seconds later, when torch and the data are loaded. ``rank``: None in other jobs.

    Raises:
        ConfigError: no such interface, CYCLONEDDS_URI holds no document for Cyclone DDS, the machine would be left
            without protection, a key, certificate or the allow list cannot be read, no key of this user can be made,
            or faults are no rules.
    """
    if settings.faults:
        try:
            parse_rules(settings.faults)
        except ConfigError as error:
            raise ConfigError(f"bus.faults: {error}") from None
    level = level_in_force(security_of(settings), reach_of(settings).is_exposed)
    transport_factory.check_certificates(NetworkConfig.of(settings))
    if level in ("psk", "user"):
        from gradbus.runtime.security.job_key import load_key  # loads cryptography

        load_key(level, settings.key_file)
    if level == "identity":
        from gradbus.runtime.security.identity.opening import read_identity

        read_identity(_security(settings, rank))


def reach_of(settings: BusSettings) -> Reachable:
    """Return who a bus will reach. Raises ConfigError: no such interface, or CYCLONEDDS_URI holds no document for
    Cyclone DDS."""
    return transport_factory.reach_of(settings.domain, NetworkConfig.of(settings))


def place_of(settings: BusSettings) -> str:
    """Return where the processes of a job meet, in words: ``DDS domain 0 on lo``. Raises ConfigError, as
    :func:`reach_of`."""
    reach = reach_of(settings)
    return f"{reach.meeting_place} on {reach.attachment}"


def link_reports(settings: BusSettings) -> list[LinkReport]:
    """Return what is found at the endpoints of a bus and in its certificates; none where it uses DDS. Takes some
    seconds for each endpoint that does not answer. Raises ConfigError: its settings are wrong."""
    links = NetworkConfig.of(settings).links
    return [] if links is None else transport_factory.examine_links(links)


def uses_links(settings: BusSettings) -> bool:
    """Return whether a bus uses links, over Zenoh, else DDS. Raises ConfigError: its settings are wrong."""
    return NetworkConfig.of(settings).links is not None


def examination_of(settings: BusSettings) -> Examination:
    """Return what the transport of a bus asks of this machine. Raises ConfigError: its network is wrong."""
    return transport_factory.examination_of(settings.domain, NetworkConfig.of(settings))


def peer_names_of(settings: BusSettings) -> PeerNames:
    """Return the host names among the peers of a bus. Raises ConfigError, as :func:`reach_of`."""
    return transport_factory.peer_names_of(NetworkConfig.of(settings))


def _security(settings: BusSettings, rank: int | None) -> Security:
    return security_of(settings) if rank is None else rank_security(settings, rank)


def elastic_bus(settings: BusSettings) -> BusSettings:
    """Return the settings of a bus, with the lease of a rank of an elastic run where they set none and other machines
    can be reached. Raises ConfigError, as :func:`reach_of`."""
    is_local = settings.network == "loopback" and not uses_links(settings)
    if settings.lease_s is not None or is_local or not reach_of(settings).leaves_machine:
        return settings
    return settings.model_copy(update={"lease_s": ELASTIC_LEASE_S})


def lease_of(settings: BusSettings) -> float | None:
    """Return the seconds of silence after which a process of another machine counts as dead; None: all are on this
    machine, where the kernel reports an end. Raises ConfigError, as :func:`reach_of`."""
    return NetworkConfig.of(settings).effective_lease_s if reach_of(settings).leaves_machine else None


def open_bus(
    settings: BusSettings, *, observes: bool = False, rank: int | None = None, first_link_s: float | None = None
) -> AbstractAsyncContextManager[Bus]:
    """The bus that the settings describe. ``observes``: to receive only. ``rank``: as for :func:`check`.
    ``first_link_s``: as of :class:`NetworkConfig`."""
    from gradbus.runtime.bus.bus import connect

    security = _security(settings, rank)
    return connect(
        settings.job,
        domain=settings.domain,
        network=replace(NetworkConfig.of(settings), first_link_s=first_link_s),
        stall_timeout_s=settings.stall_timeout_s,
        faults=settings.faults,
        security=replace(security, role="observer") if observes else security,
    )
