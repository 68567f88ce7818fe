"""The transport on Zenoh: processes that reach one relay meet there, wherever they are."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gradbus.runtime import forks
from gradbus.runtime.errors import BusClosed
from gradbus.runtime.network.disconnections import DISCONNECTED
from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.transport.api import PEER_ID_BYTES, IoThread, JobMembers, Reachable, Traits
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.flags import FlagWaiter
from gradbus.runtime.transport.schedule import NetworkSchedule, ThreadSchedule
from gradbus.runtime.transport.zenoh.inlet import ZenohInlet
from gradbus.runtime.transport.zenoh.keys import owner_in, session_tokens
from gradbus.runtime.transport.zenoh.outlet import ZenohOutlet
from gradbus.runtime.transport.zenoh.place import ZenohEndpoint, ZenohPlace
from gradbus.runtime.transport.zenoh.session_api import LinkSession


class ZenohTransport:
    """One participant of one job, on a session of its own."""

    def __init__(
        self,
        session: LinkSession,
        job: str,
        *,
        reach: Reachable,
        lease_s: float,
        traits: Traits | None = None,
        schedule: NetworkSchedule | None = None,
        node: Any = None,
    ) -> None:
        """Begin to use a session, which :meth:`close` closes.

        Args:
            lease_s: a peer whose link, or ours, is broken for so long is lost.
            traits: None: those of links that are not protected, with a lease that nobody has chosen.
            schedule: when things happen; None: in real time, on a thread of its own. node: whose time passes there.
        """
        self.own = os.urandom(PEER_ID_BYTES)
        self.lease_s = lease_s
        self.reach = reach
        self.traits = traits or Traits(leaves_machine=reach.leaves_machine, shared_memory=True)
        self.access_policy = AccessPolicy()
        self._session = session
        self._schedule = schedule or ThreadSchedule("the transport on Zenoh", thread_name="gradbus-zenoh")
        self._place = ZenohPlace(session, self._schedule, job, self.own, lease_s, node)
        session.subscribe(session_tokens(job), self._disconnection_reported)  # until the session is closed
        self._members: JobMembers | None = None
        self._is_open = True
        self._made_in = forks.generation

    @property
    def rejected(self) -> Counter[str]:
        """Return counts of dropped messages, by reason."""
        return self._place.rejected

    def start(self, thread: IoThread, members: JobMembers | None = None) -> None:
        """Count what is rejected on the thread. No protocol runs there: what others say is handled as it comes."""
        with self._schedule.lock:
            self._members = members
            thread.rejected.update(self._place.rejected)
            self._place.rejected = thread.rejected

    def _disconnection_reported(self, key: str, message: bytes) -> None:
        owner = owner_in(key)
        if owner is not None and owner != self.own and message == DISCONNECTED:
            self._place.post(self._place.note_disconnected, owner, may_drop=True)

    def look_around(self) -> bool:
        """Take note of who belongs to the job. See :meth:`.api.Transport.look_around`."""
        known = None if self._members is None else self._members.known()  # not with the lock: it has one of its own
        with self._schedule.lock:
            self._place.members = None if known is None else frozenset(known)
        return True

    def waiter(self) -> FlagWaiter:
        """See :meth:`.api.Transport.waiter`."""
        return self._place.waiter()

    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> ZenohOutlet:
        """See :meth:`.api.Transport.outlet`."""
        self._check_open(channel)
        outlet = ZenohOutlet(self._place, channel, retained_samples)
        outlet.open()
        return outlet

    def inlet(self, channel: Channel) -> ZenohInlet:
        """See :meth:`.api.Transport.inlet`."""
        self._check_open(channel)
        inlet = ZenohInlet(self._place, channel)
        inlet.open()
        return inlet

    def _check_open(self, channel: Channel) -> None:
        self._place.check_process()
        if not self._is_open:
            raise BusClosed(f"channel {channel.name!r}: its transport is closed, as its bus is")

    def close_endpoints(self, inlets: Sequence[ZenohInlet], outlets: Sequence[ZenohOutlet]) -> None:
        """See :meth:`.api.Transport.close_endpoints`."""
        self._place.close_endpoints([*inlets, *outlets])

    def close(self) -> None:
        """See :meth:`.api.Transport.close`."""
        if self._made_in != forks.generation:
            return
        with self._schedule.lock:
            if not self._is_open:
                return
            self._is_open = False
            left: list[ZenohEndpoint] = list(self._place.endpoints.values())
        self._place.close_endpoints(left)
        self._session.close()
        self._schedule.close()
