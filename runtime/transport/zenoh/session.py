"""Sessions of Zenoh: opened with settings of our own, never with Zenoh's defaults, and errors that say why.

Zenoh reports one error for everything that keeps a link from coming up: "unable to connect". So the cause is looked for
here with a few plain sockets (:mod:`.link_probe`).

Zenoh itself writes nothing to stderr unless a process asks it to (``zenoh.init_log_from_env_or``), which gradbus never
does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from gradbus.runtime.errors import BusError, NotReachable
from gradbus.runtime.network.links import LinkConfig, Mode
from gradbus.runtime.transport.zenoh.relay_settings import RELAY_SETTINGS, queue_settings, reserve_forwarding_threads

if TYPE_CHECKING:
    import zenoh

# One attempt to set a link up: TCP, TLS and Zenoh take four round trips. Zenoh's own 10 s would be the time until a
# port that does not answer is reported.
OPEN_S = 5.0
# What declares something waits so long for room in the queue, or for the lease if that is longer; then the session is
# closed. All that time Zenoh cannot close the link, which may have ended (:mod:`.relay_settings`). By its lease a link
# that takes nothing is given up anyway. -1 makes Zenoh panic.
_STALL_S = 10.0
_KEEP_ALIVES = 4  # in a lease: one that is lost is not the end of a link
_RETRY_S = (0.2, 2.0, 1.5)  # of a link that was lost: the first pause, the longest, and the factor between them
_SOURCE = re.compile(r"\s+at /\S+\.rs:\d+\.?")  # paths of the machine that built Zenoh


def session_settings(links: LinkConfig, mode: Mode) -> dict[str, Any]:
    """Return the settings of a session by their names in Zenoh's configuration. ``mode``: a client dials, a router
    listens, and dials other routers where ``links`` says so."""
    first_s, longest_s, factor = _RETRY_S
    listens = links.listens if mode == "router" else ()
    stall_s = max(_STALL_S, links.effective_lease_s)
    schemes = {endpoint.scheme for endpoint in (*links.dials, *listens)}
    return {
        "mode": mode,
        # A certificate for dialling must not make a listening end ask for one, so each endpoint says it for itself.
        "connect/endpoints": [_endpoint(str(one), links.certificate is not None) for one in links.dials],
        "listen/endpoints": [_endpoint(str(one), links.requires_client_certificate) for one in listens],
        "connect/timeout_ms": 0 if mode == "client" else -1,  # a client reports the first failure, a router goes on
        "connect/exit_on_failure": mode == "client",
        "connect/retry": {
            "period_init_ms": round(1e3 * first_s),
            "period_max_ms": round(1e3 * longest_s),
            "period_increase_factor": factor,
        },
        "listen/timeout_ms": 0,
        "listen/exit_on_failure": True,
        # No discovery: links are those that settings name.
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "scouting/delay": 0,  # a router would wait 0.5 s for what it finds
        "timestamping/enabled": False,
        "adminspace/enabled": False,
        "transport/shared_memory/enabled": False,  # gradbus has its own
        "transport/unicast/open_timeout": round(1e3 * OPEN_S),
        "transport/link/protocols": sorted(schemes),
        "transport/link/tx/lease": round(1e3 * links.effective_lease_s),
        "transport/link/tx/keep_alive": _KEEP_ALIVES,
        "transport/link/tx/queue/congestion_control/block/wait_before_close": round(1e6 * stall_s),
        "transport/link/tls": _tls(links),
        **(RELAY_SETTINGS if mode == "router" else queue_settings(links.effective_lease_s)),
    }


def _endpoint(endpoint: str, mutual: bool) -> str:
    return f"{endpoint}#enable_mtls={str(mutual).lower()}" if endpoint.startswith("tls/") else endpoint


def _tls(links: LinkConfig) -> dict[str, Any]:
    """Return Zenoh's settings of TLS. A certificate is shown by both ends of this process."""
    files = {
        "root_ca_certificate": links.ca,
        "listen_certificate": links.certificate,
        "listen_private_key": links.key,
        "connect_certificate": links.certificate,
        "connect_private_key": links.key,
    }
    named = {name: str(path.expanduser().absolute()) for name, path in files.items() if path is not None}
    return {**named, "verify_name_on_connect": True, "close_link_on_expiration": False}


def open_session(
    links: LinkConfig, mode: Mode | None = None, *, more: Mapping[str, Any] | None = None
) -> zenoh.Session:
    """Open a session: one attempt, which takes up to some seconds. Not for the event loop.

    A client that was connected once dials again by itself whenever its link is lost, until it is closed. A router
    listens at once, and dials its own endpoints until they answer.

    Args:
        mode: None: as ``links`` needs it. more: further settings by their names in Zenoh's configuration; they replace
            those of :func:`session_settings`.

    Raises:
        NotReachable: nothing answers at any of the endpoints, which may not have started yet. BusError: another attempt
            would fail as well; the text says why. ConfigError: a certificate or key is missing or wrong.
            ImportError: the package eclipse-zenoh is missing or broken.
    """
    from gradbus.runtime.network.certificates import check_certificates  # loads cryptography

    check_certificates(links)
    return open_checked_session(links, mode, more=more)


def open_checked_session(
    links: LinkConfig, mode: Mode | None = None, *, more: Mapping[str, Any] | None = None
) -> zenoh.Session:
    """Open a session whose certificates have been checked, if need be by another process; else as
    :func:`open_session`."""
    import zenoh

    mode = links.mode if mode is None else mode
    if mode == "router":
        reserve_forwarding_threads()
    try:
        return zenoh.open(_config({**session_settings(links, mode), **(more or {})}))
    except zenoh.ZError as error:
        raise _explained(links, mode, str(error)) from None


def open_side_session(links: LinkConfig) -> zenoh.Session:
    """Open one more session like one that is open. Not for the event loop. Raises ZError, without a look for why."""
    import zenoh

    return zenoh.open(_config(session_settings(links, "client")))


def _config(settings: Mapping[str, Any]) -> zenoh.Config:
    import zenoh

    config = zenoh.Config()
    for name, value in settings.items():
        config.insert_json5(name, json.dumps(value))
    return config


def _explained(links: LinkConfig, mode: Mode, reason: str) -> BusError:
    """Return the error for a session that was not opened. ``reason``: the text of Zenoh."""
    from gradbus.runtime.network.port_probe import why_not_listening
    from gradbus.runtime.transport.zenoh.link_probe import find_fault

    reason = _SOURCE.sub("", reason).strip()
    if mode == "router":
        return BusError(why_not_listening(links.listens) or f"cannot listen on {', '.join(links.listen)}: {reason}")
    with ThreadPoolExecutor(len(links.dials), thread_name_prefix="gradbus-probe") as side_by_side:
        faults = list(side_by_side.map(lambda endpoint: find_fault(endpoint, links), links.dials))
    text = "; ".join(str(fault) for fault in faults)
    # One that may answer later is worth waiting for, whatever is wrong with the others.
    kind = NotReachable if any(fault.may_pass for fault in faults) else BusError
    return kind(f"no link to the others: {text}")


__all__ = ["OPEN_S", "open_session", "session_settings"]
