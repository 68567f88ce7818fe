"""What a bus asks of whatever carries its bytes: the protocols of a transport.

**Theory of operation.** A :class:`Transport` is one participant of one job. It opens an :class:`Outlet` for each
channel that the bus writes and an :class:`Inlet` for each that it reads (:mod:`.channels`). Outlets and inlets of the
same channel, of all transports of the job, find each other: they *match*. Each side matches the other, and loses it, by
itself. One thread, the bus's I/O thread, sits in :meth:`Waiter.wait`; other threads write.

Rules of a matched pair of one outlet and one inlet, which ``tests/runtime/transport/test_contract.py`` checks:

1. **Order.** Samples arrive in the order of their writes, each once, and some day. What is lost below shows as delay:
   see rule 10. There is no order between outlets, nor between channels.
2. **Retained.** On a retained channel an inlet that matches later gets the newest samples first; on any other it gets
   what is written from then on.
3. **Back-pressure.** An inlet that takes nothing holds a bounded number of samples. Then a write waits for ``block_s``
   of its channel and returns False; that sample is not sent. No sample is dropped and no memory grows, except where the
   channel says that the oldest is overwritten.
4. **Departure.** A transport that is closed is lost at once by those it reaches; one that falls silent, after the
   lease. Either way the waiters of the others report a change. Whether a process is *gone* or only *doubted* is not for
   the transport to say: the kernel knows (a pidfd), a goodbye does, or the lease has passed. In between there is one
   that has *disconnected* (:meth:`Inlet.take_disconnected`): it is not here now, and may come back.
5. **Loss.** What is written while an outlet does not know an inlet is lost to it (volatile), or arrives at the next
   match (retained). Only around the loss of a match are loss and repetition allowed.
6. **Jobs.** Transports of two jobs do not see each other.
7. **Octets in place.** The octets of a sample can be made right where the transport keeps them
   (:meth:`Outlet.write_made`), and read without the rest of it (:meth:`Inlet.octets`): so whatever encrypts can stand
   between the bus and any transport (:mod:`gradbus.runtime.security.sealed`).
8. **Identity.** A transport has a name of its own among those of the job (:attr:`Transport.own`). An outlet tells by
   these names whose its inlets are, if it can.
9. **Threads and forks.** Any thread may write, close, and :meth:`Waiter.wake`. A child by fork uses nothing that it has
   inherited; :meth:`Waiter.wake` and :meth:`Transport.close` do nothing there.
10. **Resending.** An outlet numbers its samples, and keeps each until all matched inlets have acknowledged it. An inlet
    acknowledges what it has received with the first number that it lacks, which stands for all before. The outlet sends
    again what was lost. After a reconnect within the lease the inlet names the first number that it lacks, and the
    outlet goes on from there. A gap is never handed over: samples behind it wait until it is filled. An outlet keeps
    :data:`~.channels.WINDOW_BYTES` for an inlet beyond what the inlet's own bound holds; then a write waits, as for a
    full inlet. Only an inlet that is not reliable, or keeps the last sample, does without what it lacks, and one whose
    outlet keeps the last sample.

The hot path is two calls: :meth:`Outlet.write`, and :meth:`Inlet.take` with :meth:`Inlet.decode`. Nothing is made per
sample beside the pair that ``take`` returns. A sample goes in as the fields before its octets and the octets in parts,
which the transport reads before the write returns; it comes out as an object that has these fields as attributes, and
the octets as ``data`` (:attr:`.channels.Channel.sample_type`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.peer_id import PEER_ID_BYTES as PEER_ID_BYTES
from gradbus.runtime.transport.peer_id import PeerId as PeerId

PERIOD_S = 0.002  # how often the thread of a bus calls what waits for an answer that comes soon

Peer: TypeAlias = Hashable
"""The other end of a match, as one inlet or outlet sees it: equal while the match lasts, and new after a new match. It
has no meaning of its own. Of one process, two inlets may see two peers."""

Trigger: TypeAlias = Any
"""What a :class:`Waiter` of the same transport waits for. It has no meaning elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What the bus needs to know of a transport to choose how to use it.

    Attributes:
        needs_crc: frames need a checksum: the transport has none that covers the whole way.
        leaves_machine: processes of other machines may be reached.
        shared_memory: processes of one machine may pass payloads through its memory.
        frees_gil: whether the interpreter is free while a large sample is written; else ``slow_because``, in words.
        has_default_lease: nobody has chosen ``lease_s``.
    """

    needs_crc: bool = True
    leaves_machine: bool = False
    shared_memory: bool = False
    frees_gil: bool = True
    slow_because: str | None = None
    has_default_lease: bool = True


class Reachable(Protocol):
    """Describes who can be met on a transport: for those that wait for others, and for the choice of protection."""

    @property
    def leaves_machine(self) -> bool:
        """Return whether other machines can be reached at all."""

    @property
    def is_exposed(self) -> bool:
        """Return whether data can reach another machine, or is meant to: others there could read it, and join in."""

    @property
    def meeting_place(self) -> str:
        """Return where processes find each other, in words (``DDS domain 0``): those of another one are never met."""

    @property
    def attachment(self) -> str:
        """Return what joins this process to the others, in a word for an error: a network interface, ``lo``."""

    def hint(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """Return what to look at first while processes do not come, in a few words.

        Args:
            elsewhere: whether they are on other machines; None: nobody knows. one: it is one process that is missing.
        """

    def advice(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """Return what to do about processes that have not come, for an error. Arguments: as for :meth:`hint`."""


class Endpoint(Protocol):
    """What outlets and inlets have in common.

    Attributes:
        channel: what it carries. changes: is on when the matched peers have changed, until :meth:`refresh`.
    """

    channel: Channel
    changes: Trigger

    @property
    def matched(self) -> int:
        """Return the number of matched peers, as of the last :meth:`refresh`. Where the transport asks for a proof that
        they are alive, an outlet counts those that have given it."""

    def refresh(self) -> bool:
        """Return whether the matched peers have changed since the last call. Only the I/O thread calls this."""

    def peers(self) -> AbstractSet[Peer]:
        """Return the peers that are matched now, also those that do not count yet."""

    def close(self) -> None:
        """Leave the channel. Takes up to some seconds where a write is under way, and is done once: see
        :meth:`Transport.close_endpoints` for many."""


class Envelope(Protocol):
    """Makes the octets of one sample: a header, and what is made behind it.

    Attributes:
        header: the first octets. size: number of all octets.
    """

    header: bytes
    size: int

    def seal_into(self, room: memoryview) -> None:
        """Make the octets behind the header in ``room``, which has their size and nothing in it yet."""

    def octets(self) -> bytes:
        """Return all octets, in memory of their own."""


class Outlet(Endpoint, Protocol):
    """Sends the samples of one channel."""

    def receivers(self) -> Collection[PeerId] | None:
        """Return whose the matched inlets are, as of the last :meth:`refresh`, once for each inlet; None: this
        transport cannot tell."""

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """Write one sample, on any thread.

        Args:
            fields: those before the octets.
            parts: the octets, in memory that is read before this returns; empty: the sample has none.

        Returns:
            False: an inlet, or the window for it, was full for the channel's ``block_s``. The sample is not sent.

        Raises:
            BusClosed: the outlet is closed. BusError: the transport refuses the sample.
        """

    def write_made(self, fields: tuple[Any, ...], envelope: Envelope) -> bool:
        """Write one sample whose octets are made, once, in this call. Otherwise as :meth:`write`."""

    @property
    def is_acknowledged(self) -> bool:
        """Return whether all matched inlets have received all that was written. Does not wait."""

    @property
    def acknowledged_samples(self) -> int:
        """Return how many samples inlets have acknowledged so far, each counted for each inlet; 0: this transport does
        not count them."""

    def wait_for_acks(self, timeout_s: float) -> bool:
        """Return whether all matched inlets have received all that was written, within so long. Blocks. Raises
        BusError: the transport has failed."""

    @property
    def refused_since_s(self) -> float:
        """Return ``time.monotonic()`` of the first write that was refused, if none was accepted since; else 0."""

    @property
    def is_writing(self) -> bool:
        """Return whether a thread is in a write."""


class Inlet(Endpoint, Protocol):
    """Receives the samples of one channel.

    Attributes:
        arrivals: is on while there may be samples to take.
    """

    arrivals: Trigger

    def take_disconnected(self) -> AbstractSet[Peer]:
        """Return peers that are lost, once each, and of which the transport knows more: their host has closed its
        connection, as it does when a process ends, and it was not opened again. Only the I/O thread calls this, after
        :meth:`refresh`. Empty where the transport cannot tell."""

    def take(self, limit: int) -> Sequence[tuple[Any, Peer]]:
        """Return up to ``limit`` samples, which is 16 at most, that have arrived, not decoded yet, and their senders.
        Fewer than ``limit``: there are no more now."""

    def decode(self, raw: Any) -> Any:
        """Return a sample that :meth:`take` has returned as an object with its fields; None: it is not for now.

        Raises:
            FrameError, SampleError, ValueError, TypeError, OverflowError: it is damaged or forged.
        """

    def octets(self, raw: Any) -> Any:
        """Return the octets of such a sample, in place where they are, without a look at its fields. Raises as
        :meth:`decode`."""


class Waiter(Protocol):
    """Sleeps until something happens to the endpoints of its transport, and says to which. Endpoints have numbers here,
    from 1."""

    def attach(self, trigger: Trigger, number: int) -> None:
        """Wait for a trigger, too; ``number`` (1 or more) stands for it."""

    def detach(self, trigger: Trigger) -> None:
        """Wait for a trigger no more."""

    def wait(self, timeout_s: float) -> list[int]:
        """Return the numbers of the triggers that are on; wait for one, for so long at most. After :meth:`wake`,
        :data:`WOKEN` is among them. Raises OSError: the transport has failed."""

    def wake(self) -> None:
        """End the wait that is in progress, or else the next one. Any thread may call it; in a child by fork it does
        nothing."""


WOKEN = 0
"""The number that stands for a call of :meth:`Waiter.wake`."""


@dataclass(slots=True, eq=False)
class Periodic:
    """A function that the thread of a bus calls until it returns False. It must not wait.

    Attributes:
        every_s: from one call to the next; the function may change it. due_s: the next call, by ``time.monotonic``.
    """

    function: Callable[[], bool]
    every_s: float = PERIOD_S
    due_s: float = 0.0


class IoThread(Protocol):
    """What a transport's own protocols (joining, liveness challenge, foreign readers) need of the thread that takes
    the samples of its bus. All but ``rejected`` and ``add_periodic`` is for that thread.

    Attributes:
        rejected: counts of dropped samples, by reason.
    """

    rejected: Counter[str]

    def add_writer(self, writer: Any) -> None:
        """Watch for changes of the outlet's matched peers."""

    def add_reader(self, reader: Any) -> None:
        """Take the samples of an inlet that uses them itself, in ``take`` or ``decode``, and hands none over."""

    def receivers(self) -> Collection[PeerId] | None:
        """Return whose inlets match the outlets of the bus; None: its transport cannot tell."""

    def take_again(self) -> None:
        """Take from all inlets again: some hold samples that the transport does not know of."""

    def rematched(self) -> None:
        """Take note that the counts of matched endpoints have changed for another reason than the transport's."""

    def block_writers(self, sources: Collection[Peer], why: str) -> None:
        """Report the senders behind these peers as gone, and take nothing more from them."""

    def add_periodic(self, periodic: Periodic) -> None:
        """Call a function soon, and then again and again until it returns False; once where it is there already."""

    def call_within(self, periodic: Periodic, seconds: float) -> None:
        """Move the next call of a function to an earlier time."""


class JobMembers(Protocol):
    """Tells which transports belong to the job, where not everybody does. Any thread may ask."""

    @property
    def knows_all(self) -> bool:
        """Return whether :meth:`known` are all that belong to it: any other one does not."""

    def known(self) -> Collection[PeerId] | None:
        """Return those of others that belong to it, as far as they are known; None: this process does not belong to it
        itself yet, and cannot tell."""


class Transport(Protocol):
    """One participant of one job. Whoever has made it closes it, once no thread uses what it has opened.

    Attributes:
        own: what it calls itself, see :data:`PeerId`.
        traits: what it can do. reach: who can be met on it. access_policy: what its security says of this process.
        lease_s: after so long a silence a peer elsewhere is lost.
    """

    own: PeerId
    traits: Traits
    access_policy: AccessPolicy
    lease_s: float

    @property
    def reach(self) -> Reachable:
        """Return who can be met on it."""

    def start(self, thread: IoThread, members: JobMembers | None = None) -> None:
        """Have the transport's own protocols run on the I/O thread of its bus from now on. Called once, before any
        endpoint is opened by the bus.

        Args:
            members: who belongs to the job. The others must not hold up an outlet for long. None: everybody does.
        """

    def look_around(self) -> bool:
        """Do what is due once a second, on the I/O thread. Returns True: it is due again."""

    def waiter(self) -> Waiter:
        """Make what waits for the endpoints of this transport. Raises BusError: there is none."""

    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> Outlet:
        """Open an outlet.

        Args:
            retained_samples: how many of the newest a retained channel keeps for late inlets. 0: they can ask for what
                they lack; DDS keeps one all the same.

        Raises:
            ConfigError: this process may not use the channel. BusError: there is none, and nothing is left of it.
        """

    def inlet(self, channel: Channel) -> Inlet:
        """Open an inlet; it fills at once. Raises as :meth:`outlet`."""

    def close_endpoints(self, inlets: Sequence[Any], outlets: Sequence[Any]) -> None:
        """Close inlets and then outlets of this transport together, in a bounded time. Not for the event loop."""

    def close(self) -> None:
        """Close all endpoints and leave the job. May take a moment; not for the event loop. A second call, and one in a
        child by fork, does nothing."""
