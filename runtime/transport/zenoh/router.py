"""A router of Zenoh between the links of others: what it bears, who may do what on it, and what it reports.

A relay is a router alone; a controller with ``bus.listen`` is a router and a member at once. This holds for
both. Only this file knows how Zenoh writes them.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradbus.runtime.network.disconnections import DISCONNECTED
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.peer_id import PEER_ID_BYTES
from gradbus.runtime.transport.zenoh.keys import escape, unescape
from gradbus.runtime.transport.zenoh.session import OPEN_S, open_checked_session

if TYPE_CHECKING:
    import zenoh

_ROOT = "gradbus"  # all keys of all versions begin with it
ANY = "*"  # as a name: every client; as a job: every job
# What must not be dropped, such as who subscribes to what, waits so long for room in the queue of a session. Then that
# session is closed: it takes nothing.
_STALL_S = 10.0
_TOKENS = f"{_ROOT}/*/*/session/*/*"  # see .keys.session_token
_TOKEN_PARTS = 6
MAX_TOKENS = 4  # that are remembered, for each session that may be open: who connects may declare any number
_MAX_ANNOUNCED = 16  # of these, those of one session under which its end is published
_MAX_TOKEN_CHARS = 512  # a job has 64 characters, of at most three here each, and a domain
_SESSION = re.compile(r"[0-9a-f]{1,32}")
_SENDER = re.compile(rf"[0-9a-f]{{{2 * PEER_ID_BYTES}}}")
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


MEMBER_LIMITS = RouterLimits(sessions=2_000, message_bytes=16 << 20)
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
    """Says that a session takes part in a job, by a token that its process has declared: nobody vouches for that.

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
    # What is published under the token of a session is the relay's own word. A denial goes before what is allowed.
    rules.append(
        {
            "id": "sessions",
            "permission": "deny",
            "flows": ["ingress"],
            "messages": ["put", "delete"],
            "key_exprs": [f"{_ROOT}/*/*/session/**"],
        }
    )
    subjects.append({"id": "everybody"})
    policies.append({"rules": ["sessions"], "subjects": ["everybody"]})
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": subjects,
        "policies": policies,
    }


class Router:
    """An open router. Close it with :meth:`close`."""

    def __init__(self, session: zenoh.Session, *, max_members: int) -> None:
        """``max_members``: how many of those that take part in jobs are remembered."""
        self._session = session
        self._watch: Any = None
        self._tokens: Any = None
        self._lock = threading.Lock()
        self._members: dict[str, JobMember] = {}  # by token
        self._left: OrderedDict[str, JobMember] = OrderedDict()  # whose token has gone, the newest last
        self._max_members = max_members

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

    def watch_members(self) -> None:
        """Take note of who takes part in what from now on, for :meth:`memberships`.

        The router itself could be asked for tokens and their sessions, but it must not: in zenoh 1.10, it answers
        while it holds the lock of its tables for reading, and takes that once more for each answer. A session that
        declares something meanwhile waits for the lock, the answer for that session, and nothing is forwarded again.
        """
        from zenoh import SampleKind
        from zenoh.handlers import Callback

        def note(sample: Any) -> None:
            token = str(sample.key_expr)
            with self._lock:
                if sample.kind != SampleKind.PUT:
                    if (left := self._members.pop(token, None)) is not None:
                        self._left[token] = left
                        while len(self._left) > self._max_members:
                            self._left.popitem(last=False)
                elif len(self._members) < self._max_members and (member := member_of(token)) is not None:
                    self._left.pop(token, None)
                    self._members[token] = member

        watch = self._session.liveliness().declare_subscriber
        self._tokens = watch(_TOKENS, Callback(note, indirect=False), history=True)

    def memberships(self) -> list[JobMember]:
        """Return which sessions take part in which jobs now, as they say. What is no token of a job is left out."""
        with self._lock:
            return sorted(self._members.values())

    def announce_disconnected(self, peer: str) -> int:
        """Tell the members of its jobs that the host of a session has closed its connection
        (:mod:`~gradbus.runtime.network.disconnections`). May wait for a full queue; not for the event loop.
        Returns the number of jobs that it has said to take part in, which a session may make up."""
        import zenoh

        with self._lock:
            known = [*self._left.items(), *self._members.items()]
            tokens = [token for token, member in known if member.peer == peer][:_MAX_ANNOUNCED]
            for token in tokens:
                self._left.pop(token, None)
        for token in tokens:
            with contextlib.suppress(zenoh.ZError):  # the router is being closed
                self._session.put(
                    token,
                    DISCONNECTED,
                    congestion_control=zenoh.CongestionControl.DROP,
                    priority=zenoh.Priority.INTERACTIVE_HIGH,
                    express=True,
                )
        return len(tokens)

    def close(self) -> None:
        """Close all links, which their other ends notice at once, and stop listening."""
        self._session.close()


def _address_of(link: zenoh.Link) -> str:
    return link.dst.partition("/")[2]


def _keys_of(job: str) -> str:
    """Return the keys of a job, in all versions; :data:`ANY`: of all jobs."""
    return f"{_ROOT}/**" if job == ANY else f"{_ROOT}/*/{escape(job)}/**"


def member_of(token: str) -> JobMember | None:
    """Return who has declared a token (:func:`.keys.session_token`). None: it is another one."""
    parts = token.split("/") if len(token) <= _MAX_TOKEN_CHARS else []
    if len(parts) != _TOKEN_PARTS or (parts[0], parts[3]) != (_ROOT, "session"):
        return None
    if _SESSION.fullmatch(parts[4]) is None or _SENDER.fullmatch(parts[5]) is None:
        return None
    return JobMember(peer=parts[4], job=unescape(parts[2]), sender=parts[5])


def open_router(links: LinkConfig, limits: RouterLimits, jobs: Mapping[str, Sequence[str]]) -> Router:
    """Open a router that listens as ``links`` says, and whose certificates have been checked. Not for the event loop.

    Raises:
        BusError: it cannot listen there. ConfigError: a package is missing.
    """
    session = open_checked_session(links, "router", more=router_settings(limits, jobs))
    return Router(session, max_members=MAX_TOKENS * limits.sessions)
