"""The outlets of a bus to the inboxes of single processes: opened with the first message to each, and bounded.

An outlet is a DDS writer, which all processes of the job discover, so there are no more of them than processes that may
be addressed. The owner closes one when its client has left. Where it cannot know, as for an answer to a client that is
gone, the outlet is closed once no process reads it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradbus.runtime.logs import get_logger
from gradbus.runtime.transport.api import Outlet
from gradbus.runtime.transport.channels import Inbox

MAX_INBOXES = 1024  # processes of clients that a controller addresses at the same time
UNREAD_S = 10.0  # longer than a client's reader takes to match, and than discovery takes to find a lost one again

log = get_logger("bus")


@dataclass(slots=True)
class _Opened:
    outlet: Outlet
    used_s: float


class InboxOutlets:
    """Opens, finds and closes them. For the event loop of the bus."""

    def __init__(
        self,
        open_outlet: Callable[[Inbox], Outlet],
        close_outlets: Callable[[Sequence[Outlet]], None],
        *,
        most: int = MAX_INBOXES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``close_outlets`` closes some, without waiting for the end of it. ``most``: of them at the same time; the one
        that was not used for longest makes room."""
        self._open_outlet = open_outlet
        self._close_outlets = close_outlets
        self._most = most
        self._clock = clock
        self._opened: OrderedDict[Inbox, _Opened] = OrderedDict()  # the least recently used first
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._opened)

    def __contains__(self, inbox: Inbox) -> bool:
        return inbox in self._opened

    def get(self, inbox: Inbox) -> Outlet:
        """Return the outlet to an inbox; open it if there is none. Raises as :meth:`.api.Transport.outlet`."""
        now_s = self._clock()
        opened = self._opened.get(inbox)
        if opened is None:
            self._make_room(now_s)
            opened = self._opened[inbox] = _Opened(self._open_outlet(inbox), now_s)
        opened.used_s = now_s
        self._opened.move_to_end(inbox)
        return opened.outlet

    def close(self, inbox: Inbox) -> None:
        """Close the outlet to an inbox, if there is one."""
        if (opened := self._opened.pop(inbox, None)) is not None:
            self._close_outlets([opened.outlet])

    def _make_room(self, now_s: float) -> None:
        """Close the outlets that no process reads, and the least recently used one where there are too many."""
        over = []
        for inbox, opened in self._opened.items():
            if now_s - opened.used_s < UNREAD_S:
                break  # the others were used later
            if not opened.outlet.matched:
                over.append(inbox)
        left = len(self._opened) - len(over)
        if left >= self._most:
            oldest = next(inbox for inbox in self._opened if inbox not in over)
            over.append(oldest)
            if self._opened[oldest].outlet.matched and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "more processes than inboxes",
                    most=self._most,
                    effect="inboxes are closed and opened again in turns; have each process speak for several clients",
                )
        if over:
            self._close_outlets([self._opened.pop(inbox).outlet for inbox in over])
