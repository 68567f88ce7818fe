"""The settings of a relay after they were checked, as plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gradbus.runtime.errors import ConfigError, GradbusError
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.router import RouterLimits

E = TypeVar("E", bound=GradbusError)
_OWN = re.compile(r"\bbus\.(?=listen|tls|lease_s)")  # bus.connect is a setting of the others


@dataclass(frozen=True, kw_only=True)
class RelayPlan:
    """Holds the settings of a relay; :mod:`.settings` says what each is.

    Attributes:
        jobs: by the name in a certificate. http_port: None: no pages.
    """

    links: LinkConfig
    limits: RouterLimits
    jobs: Mapping[str, Sequence[str]]
    sessions_per_node: int | None
    drain_s: float
    http_host: str
    http_port: int | None


def plan_of(values: Mapping[str, Any]) -> RelayPlan:
    """Return the plan for the values of a configuration file. Raises ConfigError: its links are wrong."""
    limits, http = values["limits"], values["http"]
    return RelayPlan(
        links=links_of(values["relay"]),
        limits=RouterLimits(sessions=limits["sessions"], message_bytes=limits["message_bytes"]),
        jobs=values["access"]["jobs"],
        sessions_per_node=limits["sessions_per_node"],
        drain_s=values["relay"]["drain_s"],
        http_host=http["host"],
        http_port=http["port"],
    )


def links_of(own: Mapping[str, Any]) -> LinkConfig:
    """Return the links that the section ``relay`` describes. Raises ConfigError: they are wrong."""

    def path_of(name: str) -> Path | None:
        return None if own[name] is None else Path(own[name])

    try:
        return LinkConfig(
            listen=tuple(own["listen"]),
            tls=own["tls"],
            ca=path_of("tls_ca"),
            certificate=path_of("tls_certificate"),
            key=path_of("tls_key"),
            requires_client_certificate=own["tls_clients"],
            lease_s=own["lease_s"],
        )
    except ConfigError as error:
        raise in_own_words(error) from None


def in_own_words(error: E) -> E:
    """Return an error about links that names the settings of a relay, whose section is not ``bus``."""
    return type(error)(_OWN.sub("relay.", str(error)))
