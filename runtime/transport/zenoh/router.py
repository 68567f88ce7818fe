"""A router of Zenoh between the links of others: what it bears, who may do what on it, and what it reports.

A relay is a router alone; a controller with ``bus.listen`` is a router and a member at once. This holds for
both. Only this file knows how Zenoh writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradbus.runtime.json_text import parse_json
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.keys import escape, last_part, owner_of, unescape
from gradbus.runtime.transport.zenoh.session import OPEN_S, open_checked_session

if TYPE_CHECKING:
    import zenoh

_ROOT = "gradbus"  # all keys of all versions begin with it
ANY = "*"  # as a name: every client; as a job: every job
_MAX_STATE_BYTES = 1 << 20
# What must not be dropped, such as who subscribes to what, waits so long for room in the queue of a session. Then that
# session is closed: it takes nothing.
_STALL_S = 10.0
_TOKEN_PARTS = 6  # gradbus, version, job, channel, side, endpoint
# All that a member of a job does on its keys. What is not named here, such as asking for the router's own state, is
# denied, and so is everything on other keys: nobody can use a relay of gradbus for anything else.
_MESSAGES = (
    "put",
    "delete",
    "declare_subscriber",
    "liveliness_token",
    "declare_liveliness_subscriber",
    "liveliness_query",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLimits:
    """Bounds the load of a router.

    Attributes:
        sessions: most sessions at a time; further ones are refused. message_bytes: larger messages are dropped before
            they are put together in memory.
    """

    sessions: int
    message_bytes: int


MEMBER_LIMITS = RouterLimits(sessions=1_000, message_bytes=16 << 20)
"""Limits of a member that listens; a relay has the same ones by default."""


@dataclass(frozen=True, slots=True)
class LinkChange:
    """Says that a link of a router has come up or gone.

    Attributes:
        peer: id of the session at the other end. address: ``HOST:PORT`` of the other end. node: the common name in its
            certificate, which the authority vouches for; empty if it has shown none.
    """

    is_up: bool
    peer: str
    address: str
    node: str


@dataclass(frozen=True, slots=True, order=True)
class JobMember:
    """Says that a session takes part in a job.

    Attributes:
        peer: id of the session. sender: what the transport on it calls itself
            (:data:`~gradbus.runtime.transport.peer_id.PeerId`), in hexadecimal digits.
    """

    peer: str
    job: str
    sender: str


def router_settings(limits: RouterLimits, jobs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the settings of a router beyond those of its links, by their names in Zenoh's configuration.

    Args:
        jobs: names of jobs by the common name in a certificate; :data:`ANY` stands for all. Empty: every client may
            take part in every job.
    """
    return {
        "transport/unicast/max_sessions": limits.sessions,
        # Links that are opening. Zenoh would bear 100, each for 10 s: as many connections that say nothing would keep
        # every client out. After OPEN_S a client of gradbus has given up, too.
        "transport/unicast/accept_pending": limits.sessions,
        "transport/unicast/accept_timeout": round(1e3 * OPEN_S),
        "transport/link/rx/max_message_size": limits.message_bytes,
        "transport/link/tx/queue/congestion_control/block/wait_before_close": round(1e6 * _STALL_S),
        "access_control": access_rules(jobs or {ANY: (ANY,)}),
    }


def access_rules(jobs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return Zenoh's rules of access for these jobs of these clients; all else is denied."""
    rules, subjects, policies = [], [], []
    for number, (name, allowed) in enumerate(sorted(jobs.items())):
        keys = [_keys_of(ANY)] if ANY in allowed else [_keys_of(job) for job in allowed]
        if not keys:
            continue  # a client that may do nothing needs no rule
        rules.append(
            {
                "id": f"jobs-{number}",
                "permission": "allow",
                "flows": ["ingress", "egress"],
                "messages": list(_MESSAGES),
                "key_exprs": keys,
            }
        )
        of_whom = {} if name == ANY else {"cert_common_names": [name]}
        subjects.append({"id": f"client-{number}", **of_whom})
        policies.append({"rules": [f"jobs-{number}"], "subjects": [f"client-{number}"]})
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": subjects,
        "policies": policies,
    }


class Router:
    """An open router. Close it with :meth:`close`."""

    def __init__(self, session: zenoh.Session) -> None:
        self._session = session
        self._watch: Any = None

    def watch_links(self, report: Callable[[LinkChange], None]) -> None:
        """Report every link that is up, and every change from now on, on a thread of Zenoh's. ``report`` must neither
        wait nor fail."""

        def on_event(event: zenoh.LinkEvent) -> None:
            link = event.link
            is_up = str(event.kind).endswith("PUT")
            report(LinkChange(is_up, str(link.zid), _address_of(link), link.auth_identifier or ""))

        self._watch = self._session.info.declare_link_events_listener(on_event, history=True)

    def addresses(self) -> set[str]:
        """Return the other ends of all links that are up. Zenoh reports no end of a link that it has given up for its
        full queue, so whoever watches links has to look as well."""
        return {_address_of(link) for link in self._session.info.links()}

    def memberships(self, timeout_s: float) -> list[JobMember]:
        """Return which sessions take part in which jobs, by the tokens that they have declared. It waits: not for the
        event loop. What is no token of a job is left out, and so is what the router does not answer within the time."""
        import zenoh

        found: set[JobMember] = set()
        tokens = f"@/{self._session.zid()}/router/token/"
        try:
            for reply in self._session.get(f"{tokens}{_ROOT}/**", timeout=timeout_s):
                if (sample := reply.ok) is not None:
                    found |= set(members_of(str(sample.key_expr).removeprefix(tokens), sample.payload.to_bytes()))
        except zenoh.ZError:  # it is being closed
            return []
        return sorted(found)

    def close(self) -> None:
        """Close all links, which their other ends notice at once, and stop listening."""
        self._session.close()


def _address_of(link: zenoh.Link) -> str:
    return link.dst.partition("/")[2]


def _keys_of(job: str) -> str:
    """Return the keys of a job, in all versions; :data:`ANY`: of all jobs."""
    return f"{_ROOT}/**" if job == ANY else f"{_ROOT}/*/{escape(job)}/**"


def members_of(token: str, state: bytes) -> list[JobMember]:
    """Return who has declared a token, by what Zenoh reports of it. Wrong and foreign ones give nobody.

    Args:
        token: its key: of a job it is that of an endpoint. state: JSON, with the sessions as ``clients``.
    """
    parts = token.split("/")
    sender = owner_of(last_part(token))
    if parts[0] != _ROOT or len(parts) != _TOKEN_PARTS or sender is None or len(state) > _MAX_STATE_BYTES:
        return []
    try:
        clients = parse_json(state.decode())["clients"]
    except (ValueError, KeyError, TypeError):
        return []
    if not isinstance(clients, list):
        return []
    return [JobMember(str(peer), unescape(parts[2]), sender.hex()) for peer in clients]


def open_router(links: LinkConfig, limits: RouterLimits, jobs: Mapping[str, Sequence[str]]) -> Router:
    """Open a router that listens as ``links`` says, and whose certificates have been checked. Not for the event loop.

    Raises:
        BusError: it cannot listen there. ConfigError: a package is missing.
    """
    # For Router.memberships; the rules of access keep it from everybody else.
    more = {**router_settings(limits, jobs), "adminspace/enabled": True}
    return Router(open_checked_session(links, "router", more=more))
