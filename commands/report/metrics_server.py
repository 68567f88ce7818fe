"""Metrics of this process for Prometheus, over HTTP, by threads of prometheus-client: nothing waits for a scrape.

prometheus-client is an extra, and is imported only where it is asked for; what imports torch, once a run begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gradbus.commands.files import MetricsSettings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from gradbus.commands.report.followed import FollowedClient, FollowedHost, FollowedJob, FollowedRank

T = TypeVar("T")

_STOP_S = 5.0
_LAST_PORT = 65_535

log = get_logger("metrics")


def controller_metrics(
    settings: MetricsSettings, job: str, run_dir: Path | None = None
) -> AbstractContextManager[FollowedJob]:
    """Serve the metrics of the controller that is followed, if a port is set. Raises ConfigError: it cannot be had."""
    from gradbus.commands.report.followed import FollowedJob

    def collector(followed: FollowedJob) -> Collector:
        from gradbus.commands.report.metrics import JobCollector

        return JobCollector({job: followed}, {} if run_dir is None else {job: run_dir})

    return _served(FollowedJob(), collector, settings)


def client_metrics(
    settings: MetricsSettings, job: str, client_id: int | None, name: str = ""
) -> AbstractContextManager[FollowedClient]:
    """Serve the same of a client, which has a name, an id, or both."""
    from gradbus.commands.report.followed import FollowedClient

    def collector(followed: FollowedClient) -> Collector:
        from gradbus.commands.report.process_metrics import ClientCollector

        return ClientCollector(job, client_id, followed, name)

    return _served(FollowedClient(), collector, settings)


def host_metrics(settings: MetricsSettings, job: str) -> AbstractContextManager[FollowedHost]:
    """Serve the same of a host of virtual clients."""
    from gradbus.commands.report.followed import FollowedHost

    def collector(followed: FollowedHost) -> Collector:
        from gradbus.commands.report.process_metrics import HostCollector

        return HostCollector(job, followed)

    return _served(FollowedHost(), collector, settings)


def rank_metrics(settings: MetricsSettings, job: str, rank: int) -> AbstractContextManager[FollowedRank]:
    """Serve the same of a rank. All ranks may read one file: each takes the port of the settings plus its rank."""
    from gradbus.commands.report.followed import FollowedRank

    def collector(followed: FollowedRank) -> Collector:
        from gradbus.commands.report.process_metrics import RankCollector

        return RankCollector(job, rank, followed)

    return _served(FollowedRank(), collector, settings, rank)


@contextlib.contextmanager
def _served(followed: T, collector: Callable[[T], Collector], settings: MetricsSettings, rank: int = 0) -> Iterator[T]:
    if settings.port is None:
        yield followed
        return
    from prometheus_client import CollectorRegistry, start_http_server

    port = settings.port and settings.port + rank  # 0, any free one, stays 0
    if port > _LAST_PORT:
        raise ConfigError(
            f"metrics.port: this rank would have port {port}; the last one is {_LAST_PORT}. Set a lower one"
        )
    registry = CollectorRegistry()
    registry.register(collector(followed))
    try:
        server, thread = start_http_server(port, settings.host, registry)
    except OSError as error:
        raise ConfigError(
            f"metrics: cannot listen on {settings.host}:{port}: {error.strerror or error}. Set another metrics.port or "
            f"metrics.host"
        ) from None
    log.info("metrics served", url=f"http://{settings.host}:{server.server_port}/metrics")
    try:
        yield followed
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_STOP_S)
