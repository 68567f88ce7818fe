"""Metrics of this process for Prometheus, over HTTP, by threads of prometheus-client: nothing waits for a scrape.

prometheus-client is an extra, and is imported only where it is asked for; what imports torch, once a run begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradbus.experiments.files import MetricsSettings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from gradbus.experiments.report.followed import FollowedClient, FollowedHost, FollowedJob, FollowedRank

_STOP_S = 5.0
_LAST_PORT = 65_535

log = get_logger("metrics")


@contextlib.contextmanager
def controller_metrics(settings: MetricsSettings, job: str) -> Iterator[FollowedJob]:
    """Serve the metrics of the controller that is followed, if a port is set. Raises ConfigError: it cannot be had."""
    from gradbus.experiments.report.followed import FollowedJob

    followed = FollowedJob()
    if settings.port is None:
        yield followed
        return
    from gradbus.experiments.report.metrics import JobCollector

    with _served(JobCollector({job: followed}), settings, settings.port):
        yield followed


@contextlib.contextmanager
def client_metrics(settings: MetricsSettings, job: str, client_id: int) -> Iterator[FollowedClient]:
    """Serve the same of a client."""
    from gradbus.experiments.report.followed import FollowedClient

    followed = FollowedClient()
    if settings.port is None:
        yield followed
        return
    from gradbus.experiments.report.process_metrics import ClientCollector

    with _served(ClientCollector(job, client_id, followed), settings, settings.port):
        yield followed


@contextlib.contextmanager
def host_metrics(settings: MetricsSettings, job: str) -> Iterator[FollowedHost]:
    """Serve the same of a host of virtual clients."""
    from gradbus.experiments.report.followed import FollowedHost

    followed = FollowedHost()
    if settings.port is None:
        yield followed
        return
    from gradbus.experiments.report.process_metrics import HostCollector

    with _served(HostCollector(job, followed), settings, settings.port):
        yield followed


@contextlib.contextmanager
def rank_metrics(settings: MetricsSettings, job: str, rank: int) -> Iterator[FollowedRank]:
    """Serve the same of a rank. All ranks may read one file: each takes the port of the settings plus its rank."""
    from gradbus.experiments.report.followed import FollowedRank

    followed = FollowedRank()
    if settings.port is None:
        yield followed
        return
    from gradbus.experiments.report.process_metrics import RankCollector

    port = settings.port and settings.port + rank  # 0, any free one, stays 0
    with _served(RankCollector(job, rank, followed), settings, port):
        yield followed


@contextlib.contextmanager
def _served(collector: Collector, settings: MetricsSettings, port: int) -> Iterator[None]:
    from prometheus_client import CollectorRegistry, start_http_server

    if port > _LAST_PORT:
        raise ConfigError(
            f"metrics.port: this rank would have port {port}; the last one is {_LAST_PORT}. Set a lower one"
        )
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, settings.host, registry)
    except OSError as error:
        raise ConfigError(
            f"metrics: cannot listen on {settings.host}:{port}: {error.strerror or error}. Set another metrics.port or "
            f"metrics.host"
        ) from None
    log.info("metrics served", url=f"http://{settings.host}:{server.server_port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_STOP_S)
