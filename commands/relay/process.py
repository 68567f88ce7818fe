"""The process of a relay that serves: it opens the router and the pages, and ends when a signal asks for it.

What is imported here stays in memory for as long as the relay runs: no pydantic, typer, cryptography, NumPy or torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from gradbus.commands.lifecycle import guard, run_loop
from gradbus.commands.relay.plan import RelayPlan, in_own_words, plan_of
from gradbus.commands.relay.service import Relay
from gradbus.runtime import logs
from gradbus.runtime.errors import BusError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.transport.zenoh.router import open_router

DESCRIPTORS_PER_SESSION = 3  # that of Zenoh, ours, by which bytes are counted, and one of a link that is opening
OTHER_DESCRIPTORS = 128

log = logs.get_logger("relay")


def main() -> None:
    """Serve with the values in the open file whose number is the argument, and exit."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        values = parse_json(file.read().decode())
    sys.exit(guard("relay", lambda: serve(values)))


def serve(values: Mapping[str, Any]) -> int:
    """Serve until a signal ends it; returns the exit code.

    Args:
        values: those of a configuration file, all keys given, and ``log``, with ``level`` and ``style``.

    Raises:
        ConfigError: the HTTP port is taken, or a package is missing. BusError: the relay cannot listen.
    """
    logs.configure(**values["log"])
    plan = plan_of(values)
    _allow_descriptors(plan.limits.sessions)
    with contextlib.ExitStack() as opened:
        try:
            router = open_router(plan.links, plan.limits, plan.jobs)
        except BusError as error:
            raise in_own_words(error) from None
        opened.callback(router.close)
        relay = Relay(
            router,
            max_sessions=plan.limits.sessions,
            drain_s=plan.drain_s,
            lease_s=plan.links.effective_lease_s,
            max_per_node=plan.sessions_per_node,
        )
        url = opened.enter_context(_pages(plan, relay))

        def announce() -> None:
            log.info("relay listens", endpoints=[str(endpoint) for endpoint in plan.links.listens], http=url)

        run_loop(lambda: relay.serve(announce), "asyncio", stop=relay.stop)
    return 0


@contextlib.contextmanager
def _pages(plan: RelayPlan, relay: Relay) -> Iterator[str | None]:
    """Serve the pages of a relay, if a port is set. Raises ConfigError: it cannot be had."""
    if plan.http_port is None:
        yield None
        return
    from gradbus.commands.relay.probes import Answers, serving  # which load http.server

    answers = Answers(lambda: relay.is_ready, relay.render_metrics)
    with serving(plan.http_host, plan.http_port, answers) as url:
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
