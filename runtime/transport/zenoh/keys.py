"""Keys on Zenoh: under which names the endpoints of a job find each other, and their messages travel.

All begin with ``gradbus/<version>/<job>/<channel>/``, then:

| key | what |
|---|---|
| ``out/<outlet>``, ``in/<inlet>`` | tokens: the endpoint is there |
| ``all/<outlet>`` | from an outlet to all inlets of the channel |
| ``to/<inlet>/<outlet>`` | from an outlet to one inlet |
| ``to/<inlet>/<link>/<outlet>`` | the same, over a side link of the inlet (:mod:`.side_links`) |
| ``ack/<outlet>/<inlet>`` | from an inlet to an outlet |

Beside them stands ``gradbus/<version>/<job>/session/<session>/<transport>``, a token by which a relay knows which of
its sessions take part in which job. A message under the same key is the relay's own: the host of that session has
closed its connection (:mod:`~gradbus.runtime.network.disconnections`).

An endpoint is named after its transport, so others know whose it is: the name of the transport
(:data:`~gradbus.runtime.transport.peer_id.PeerId`) in hexadecimal digits, a dot, and a number.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from gradbus.runtime.transport.peer_id import PEER_ID_BYTES, PeerId

VERSION = 1
"""Version of the keys and of the messages below them. Processes of different versions do not meet."""

_ENDPOINT = re.compile(rf"([0-9a-f]{{{2 * PEER_ID_BYTES}}})\.(0|[1-9][0-9]{{0,9}})")
_OWNER = re.compile(rf"[0-9a-f]{{{2 * PEER_ID_BYTES}}}")


def escape(name: str) -> str:
    """Return a name as one part of a key: letters, digits and ``_.-~`` stand for themselves, all else is ``%XX``.

    So nothing in it is a pattern (``*``, ``$``), a separator, or a part that Zenoh matches only literally (``@``). The
    name of nothing is ``%``: no part of a key may be empty.
    """
    return quote(name, safe="") or "%"


def unescape(part: str) -> str:
    """Return the name that :func:`escape` has made this of."""
    return "" if part == "%" else unquote(part)


def endpoint_id(owner: PeerId, number: int) -> str:
    """Return the name of an endpoint of a transport."""
    return f"{owner.hex()}.{number}"


def owner_of(endpoint: str) -> PeerId | None:
    """Return whose endpoint this is; None: it is no name of an endpoint."""
    found = _ENDPOINT.fullmatch(endpoint)
    return bytes.fromhex(found[1]) if found else None


def last_part(key: str) -> str:
    """Return what is behind the last separator: of each key here, the endpoint that it comes from."""
    return key.rpartition("/")[2]


def session_token(job: str, session: str, owner: PeerId) -> str:
    """Return the token which says that a transport takes part in a job over a session, by its id in Zenoh."""
    return f"gradbus/{VERSION}/{escape(job)}/session/{session}/{owner.hex()}"


def session_tokens(job: str) -> str:
    """Return the expression for the tokens of all sessions of a job."""
    return f"gradbus/{VERSION}/{escape(job)}/session/*/*"


def owner_in(token: str) -> PeerId | None:
    """Return the transport that a token of :func:`session_token` names; None: it names none."""
    name = last_part(token)
    return bytes.fromhex(name) if _OWNER.fullmatch(name) else None


class ChannelKeys:
    """The keys of one channel of one job."""

    def __init__(self, job: str, channel: str) -> None:
        self._base = f"gradbus/{VERSION}/{escape(job)}/{escape(channel)}"

    def token(self, side: str, endpoint: str = "*") -> str:
        """Return the token of an outlet (``side`` is ``out``) or an inlet (``in``); ``*``: of all."""
        return f"{self._base}/{side}/{endpoint}"

    def to_all(self, outlet: str = "*") -> str:
        """Return where an outlet writes for all."""
        return f"{self._base}/all/{outlet}"

    def to_one(self, inlet: str, outlet: str = "*", link: int = 0) -> str:
        """Return where an outlet writes for one inlet. ``link``: a side link of the inlet's, from 1 on."""
        return f"{self._base}/to/{inlet}/{link}/{outlet}" if link else f"{self._base}/to/{inlet}/{outlet}"

    def ack(self, outlet: str, inlet: str = "*") -> str:
        """Return where an inlet answers an outlet."""
        return f"{self._base}/ack/{outlet}/{inlet}"
