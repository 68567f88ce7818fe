"""The command ``relay``: from its settings to a relay that serves, until a signal ends it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradbus.commands.lifecycle import run_loop
from gradbus.commands.relay.service import Relay
from gradbus.commands.relay.settings import HttpSettings, RelayFile
from gradbus.runtime.config.settings import load_settings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.router import RouterLimits, open_router

DESCRIPTORS_PER_SESSION = 2  # that of Zenoh, and ours, by which bytes are counted
OTHER_DESCRIPTORS = 128

log = get_logger("relay")


def load_relay(path: Path | None, overrides: Iterable[str]) -> tuple[RelayFile, LinkConfig]:
    """Return the settings of a relay, and its links. Raises ConfigError: some are wrong."""
    file = load_settings(RelayFile, path, overrides=overrides)
    own = file.relay
    try:
        links = LinkConfig(
            listen=own.listen,
            tls=own.tls,
            ca=own.tls_ca,
            certificate=own.tls_certificate,
            key=own.tls_key,
            requires_client_certificate=own.tls_clients,
            lease_s=own.lease_s,
        )
    except ConfigError as error:
        raise ConfigError(str(error).replace("bus.", "relay.")) from None  # in the words of this file
    return file, links


def run_relay(path: Path | None, overrides: Iterable[str]) -> None:
    """Run ``gradbus relay`` until a signal ends it.

    Raises:
        ConfigError: a setting is wrong, or a certificate, or the HTTP port is taken. BusError: the relay cannot listen.
    """
    file, links = load_relay(path, overrides)
    limits = RouterLimits(
        sessions=file.limits.sessions,
        message_bytes=file.limits.message_bytes,
        stall_timeout_s=file.limits.stall_timeout_s,
    )
    _allow_descriptors(file.limits.sessions)
    with contextlib.ExitStack() as opened:
        router = open_router(links, limits, file.access.jobs)
        opened.callback(router.close)
        relay = Relay(file, router)
        url = opened.enter_context(_pages(file.http, relay))
        log.info("relay listens", endpoints=[str(endpoint) for endpoint in links.listens], http=url)
        run_loop(relay.serve, "asyncio", stop=relay.stop)


@contextlib.contextmanager
def _pages(settings: HttpSettings, relay: Relay) -> Iterator[str | None]:
    """Serve the pages of a relay, if a port is set. Raises ConfigError: it cannot be had."""
    if settings.port is None:
        yield None
        return
    from gradbus.commands.relay.probes import Answers, serving  # which load http.server

    answers = Answers(lambda: relay.is_ready, relay.render_metrics)
    with serving(settings.host, settings.port, answers) as url:
        yield url


def _allow_descriptors(sessions: int) -> None:
    """Raise the limit of open files of this process as far as it goes, and say so if it is too low for the sessions."""
    try:
        import resource  # not on Windows
    except ImportError:
        return
    wanted = DESCRIPTORS_PER_SESSION * sessions + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        log.warning(
            "too few open files allowed",
            allowed=limit,
            needed=wanted,
            advice="raise the hard limit (ulimit -Hn), or lower limits.sessions",
        )
