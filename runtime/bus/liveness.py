"""Whether the senders on a bus are still there: plain decisions, without a clock of their own.

Three know something. The *kernel* knows the processes of this machine, without fail. The sender itself says so when its
bus closes. The *transport* says that a writer is gone: when its lease ran out, which is also so where a process was
stopped, had no turn or was cut off; when its process said goodbye; and, on DDS, when anybody has sent the 84 bytes of
such a goodbye in its name, for discovery is not sealed. So what a transport says is a doubt, and becomes a fact when
nothing comes for a lease. A transport over connections also says that the host of a writer has closed its connection,
which is more than a doubt and less than a fact (:class:`~gradbus.runtime.wire.messages.PeerDisconnected`).

Who is on this machine is gone when the kernel says so. The transport counts only where such a process lives on and has
left the bus without announcing it: then nothing comes for a good while, although it runs.

Time is what this process has spent listening. While it was stopped itself, or had no turn, it could not hear anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradbus.runtime.transport import peer_processes
from gradbus.runtime.transport.api import Peer
from gradbus.runtime.wire.frames import is_later
from gradbus.runtime.wire.messages import Control, PeerDisconnected, PeerGone

LONGEST_TURN_S = 1.5  # of listening: what lies between two looks beyond that, this process has not listened
# A process of this machine that runs and whose writers the transport has lost: after a stop, or a lease that ran out in
# a busy moment, it is found again within some seconds.
FOUND_AGAIN_S = 10.0
MAX_SENDERS = 65_536  # remembered, also of one writer: it cannot make us grow without end
DOUBT_S = 1.0  # how often to ask again about those that the transport has lost

Sender = tuple[int, int]  # and which start of it


@dataclass(slots=True)
class _Known:
    """One sender.

    Attributes:
        claim: the process that it says it is in. watched: the kernel reports when that ends.
        last_s: when its last message came. departed_s: since when no writer of it is matched; -1: one is.
        departed: the writers with which it went. is_disconnected: their host has closed its connection.
    """

    claim: str
    watched: bool
    last_s: float
    departed_s: float = -1.0
    departed: frozenset[Peer] = frozenset()
    is_disconnected: bool = False


class Reachability:
    """Tells of one peer that is reached over a topic of its own whether it is gone when none of its readers is
    matched there."""

    def __init__(self, claim: str, lease_s: float) -> None:
        """``claim``: the process that it says it is in."""
        self._claim = claim
        self._lease_s = lease_s
        self._lost_s = -1.0

    @property
    def in_doubt(self) -> bool:
        """Whether the transport has lost it. Then :meth:`is_gone` is to be asked again, once a second or so."""
        return self._lost_s >= 0

    def is_gone(self, matched: bool, now_s: float) -> bool:
        """``matched``: its reader is. ``now_s``: of one clock."""
        if matched:
            self._lost_s = -1.0
            return False
        ended = peer_processes.has_ended(self._claim)
        if not self.in_doubt or peer_processes.is_stopped(self._claim):
            self._lost_s = now_s
        patience_s = self._lease_s if ended is None else max(self._lease_s, FOUND_AGAIN_S)
        return bool(ended) or now_s - self._lost_s >= patience_s


class Liveness:
    """The senders of one bus, and which of them are gone. For the receive thread."""

    def __init__(
        self,
        lease_s: float,
        watch: Callable[[str], bool],
        unwatch: Callable[[str], None],
        is_stopped: Callable[[str], bool],
    ) -> None:
        """Args:
        lease_s: after so long a silence a sender whose writers the transport has lost is gone.
        watch: have the end of a process reported to :meth:`ended`; returns whether that can be. unwatch: no more.
        is_stopped: whether a process stands still because somebody wants it to.
        """
        self._lease_s = lease_s
        self._watch = watch
        self._unwatch = unwatch
        self._is_stopped = is_stopped
        self._registry = WriterRegistry()
        self._known: dict[Sender, _Known] = {}
        self._of_process: dict[str, set[Sender]] = {}  # by claim, of those that are watched
        self._ended: dict[str, None] = {}  # claims of processes that are no more, the last ones
        self._departed: set[Sender] = set()
        self._now_s = 0.0
        self._looked_s: float | None = None

    def writers_on(self, channel: str) -> set[Peer]:
        """Return the writers of a channel through which messages have come."""
        return self._registry.writers_on(channel)

    def look(self, clock_s: float) -> list[PeerGone]:
        """Let time pass. ``clock_s``: of one clock. Returns who is gone by now."""
        self.advance(clock_s)
        if not self._departed:
            return []
        departed = [self._known[sender] for sender in self._departed]
        claims = {known.claim for known in departed if known.watched}
        stopped = set(filter(self._is_stopped, claims))
        for known in departed:
            if known.claim in stopped:
                known.departed_s = self._now_s  # it has all its time when it goes on
        return [PeerGone(*sender) for sender in sorted(self._departed) if self._is_gone(sender) and self._drop(sender)]

    @property
    def is_in_doubt(self) -> bool:
        """Whether the transport has lost somebody of whom it is not known yet whether they are gone."""
        return bool(self._departed)

    def advance(self, clock_s: float) -> None:
        """Let time pass, before something that has a time is noted."""
        if self._looked_s is not None:
            self._now_s += min(max(0.0, clock_s - self._looked_s), LONGEST_TURN_S)
        self._looked_s = clock_s

    def received(self, writer: Peer, message: Control, channel: str) -> None:
        """A message of a sender has come through a writer of a channel."""
        self._registry.received(writer, message, channel)
        sender = (message.sender, message.incarnation)
        known = self._known.get(sender)
        if known is None:
            if len(self._known) >= MAX_SENDERS or message.process in self._ended:
                return
            watched = bool(message.process) and self._watches(message.process)
            known = self._known[sender] = _Known(message.process, watched, self._now_s)
            if watched:
                self._of_process[message.process].add(sender)
        known.last_s = self._now_s
        if known.departed_s >= 0:
            known.departed_s, known.departed, known.is_disconnected = -1.0, frozenset(), False
            self._departed.discard(sender)

    def _watches(self, claim: str) -> bool:
        if claim in self._of_process:
            return True
        self._of_process[claim] = set()  # first: the end may be reported at once
        if self._watch(claim):
            return True
        del self._of_process[claim]
        return False

    def forget(self, channel: str) -> None:
        """Note that a channel is not read any more: nobody is there, or in doubt, for its sake."""
        self._registry.forget(channel)

    def departed(self, writers: Iterable[Peer], channel: str) -> None:
        """The transport does not know these writers of a channel any more. Their senders are in doubt where no writer
        of them is left on any other channel."""
        writers = list(writers)
        sent_through = {writer: self._registry.senders_through(writer, channel) for writer in writers}
        for gone in self._registry.left(writers, channel=channel):
            sender = gone.sender, gone.incarnation
            known = self._known.get(sender)
            if known is not None and known.departed_s < 0:
                known.departed_s = self._now_s
                known.departed = frozenset(writer for writer in writers if sender in sent_through[writer])
                self._departed.add(sender)

    def disconnected(self, writers: Collection[Peer]) -> list[PeerDisconnected]:
        """The transport says that the hosts of these writers, which have departed, have closed their connections.
        Returns which senders are not here, each once; of this machine none, as the kernel knows more."""
        found = []
        for sender in sorted(self._departed):
            known = self._known[sender]
            if not known.is_disconnected and not known.watched and not known.departed.isdisjoint(writers):
                known.is_disconnected = True
                found.append(PeerDisconnected(*sender))
        return found

    def ended(self, claim: str) -> list[PeerGone]:
        """The kernel says that a process is no more. Returns who is gone with it."""
        self._ended[claim] = None
        while len(self._ended) > MAX_SENDERS:
            del self._ended[next(iter(self._ended))]
        senders = sorted(self._of_process.get(claim, ()))
        return [PeerGone(*sender, certain=True) for sender in senders if self._drop(sender)]

    def closed(self, sender: Sender) -> list[PeerGone]:
        """A sender has announced that its bus closes."""
        return [PeerGone(*sender, certain=True)] if self._drop(sender) else []

    def block_writers(self, writers: Iterable[Peer], why: str) -> list[PeerGone]:
        """Nothing is taken from these writers any more. Returns who spoke through them."""
        lost = self._registry.left(writers, why)
        for gone in lost:
            self._drop((gone.sender, gone.incarnation))
        return lost

    def close(self) -> None:
        """Stop watching processes."""
        for claim in list(self._of_process):
            self._unwatch(claim)
        self._of_process.clear()

    def _is_gone(self, sender: Sender) -> bool:
        known = self._known[sender]
        if not known.watched:
            return self._now_s - known.last_s >= self._lease_s
        silent_s = self._now_s - max(known.last_s, known.departed_s)
        return silent_s >= max(self._lease_s, FOUND_AGAIN_S)

    def _drop(self, sender: Sender) -> bool:
        known = self._known.pop(sender, None)
        if known is None:
            return False
        self._departed.discard(sender)
        if known.watched:
            others = self._of_process[known.claim]
            others.discard(sender)
            if not others:
                del self._of_process[known.claim]
                self._unwatch(known.claim)
        return True


@dataclass(slots=True)
class _Sent:
    """Holds what one sender has sent through one writer: how many messages, and the number of the latest."""

    count: int
    newest: int

    def is_outdone_by(self, other: _Sent) -> bool:
        return other.count > self.count or is_later(other.newest, self.newest)


class WriterRegistry:
    """Which senders have sent through which writer, so that the end of a writer tells which sender is gone. For the
    receive thread.

    A sender may write several channels, each through a writer of its own: it is gone when it is gone from all of them.

    A message cannot be forged, but any process can send one again through a writer of its own, and then take that
    writer away. Each is opened once, so it needs messages that did not come here: of those older than this process it
    may have more than this one has received, and it may be faster with the newest. So the end of a writer ends a sender
    on its channel only if no other writer there has brought more, or later, messages of it.
    """

    def __init__(self) -> None:
        self._sent: dict[str, dict[Peer, dict[Sender, _Sent]]] = {}  # by channel and writer
        self._present: dict[Sender, set[str]] = {}  # the channels on which it is there

    def writers_on(self, channel: str) -> set[Peer]:
        """Return the writers of a channel through which a message has come."""
        return set(self._sent.get(channel, ()))

    def senders_through(self, writer: Peer, channel: str) -> Collection[Sender]:
        """Return the senders whose messages have come through this writer of a channel."""
        return self._sent.get(channel, {}).get(writer, {}).keys()

    def received(self, writer: Peer, message: Control, channel: str) -> None:
        """A message has come through this writer of a channel."""
        senders = self._sent.setdefault(channel, {}).setdefault(writer, {})
        sender = message.sender, message.incarnation
        sent = senders.get(sender)
        if sent is not None:
            sent.count += 1
            if is_later(message.number, sent.newest):
                sent.newest = message.number
        elif len(senders) < MAX_SENDERS:
            senders[sender] = _Sent(1, message.number)
        else:
            return
        self._present.setdefault(sender, set()).add(channel)

    def forget(self, channel: str) -> None:
        """Forget the writers of a channel, which nobody reads any more. Their senders go with their other channels."""
        if self._sent.pop(channel, None) is None:
            return
        for sender, channels in list(self._present.items()):
            channels.discard(channel)
            if not channels:
                del self._present[sender]

    def left(self, writers: Iterable[Peer], why: str = "", *, channel: str | None = None) -> list[PeerGone]:
        """These writers are gone, or nothing is taken from them any more: on one channel, None: on all. Returns the
        senders that are gone with them."""
        gone: set[Sender] = set()
        writers = list(writers)
        for one in [name for name in self._sent if channel in (None, name)]:
            for sender in self._left_on(one, writers):
                channels = self._present.get(sender, set())
                channels.discard(one)
                if not channels:
                    self._present.pop(sender, None)
                    gone.add(sender)
        return [PeerGone(*sender, why) for sender in sorted(gone)]

    def _left_on(self, channel: str, writers: Sequence[Peer]) -> list[Sender]:
        """Drop writers of a channel. Returns the senders that are gone from it."""
        by_writer = self._sent[channel]
        lost: dict[Sender, list[_Sent]] = {}
        for writer in writers:
            for sender, sent in by_writer.pop(writer, {}).items():
                lost.setdefault(sender, []).append(sent)
        if not by_writer:
            del self._sent[channel]
        return [sender for sender, sents in lost.items() if not self._goes_on(by_writer, sender, sents)]

    @staticmethod
    def _goes_on(by_writer: Mapping[Peer, Mapping[Sender, _Sent]], sender: Sender, lost: Collection[_Sent]) -> bool:
        others = [senders[sender] for senders in by_writer.values() if sender in senders]
        return any(all(sent.is_outdone_by(other) for sent in lost) for other in others)
