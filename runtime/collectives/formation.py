"""How ranks become a group: which start of which rank is there, and whether every topic works both ways.

Plain decisions without I/O or a clock: what was received goes in; what to send, and whether all is well, comes out.

1. Every rank announces itself. A rank that has received all announcements knows the members: rank and incarnation of
   each, and a hash.
2. Every rank sends empty frames with that hash over every topic. A rank that has received those of all others is
   *linked*.
3. A rank that has received from all others that they are linked, with the same hash, has *formed* the group.

DDS's own counts of matched readers are not enough: they may include a process that is dead, and the other side may not
have matched yet. A frame that arrived proves one direction; all ranks linked prove all of them. A rank that is started
again has another incarnation, hence another hash: frames of its former life belong to a group that is no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import GroupHello

REPEAT_S = 0.1  # how often at least to repeat what is not new, in a group that is not large
# In a large one every rank receives world^2 hellos each time, which takes some 70 us each: so that many that
# wait for few leave the processors to those few, which are still to start.
REPEAT_PAIR_S = 0.4e-3
MAX_REPEAT_S = 1.0
# How long to wait for more news, times the world: about what a hello costs all others together. Where there is more
# news each time, twice as long, up to REPEAT_PAIR_S for each pair: while many processes start on few cores, every rank
# has news all the time, and with shorter pauses the hellos alone take more than all cores have.
NEWS_S = 0.001


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group.

    Attributes:
        rank: 0 .. world - 1. incarnation: which start of it. host: host name and process id, for people.
    """

    rank: int
    incarnation: int
    host: str

    @property
    def node(self) -> str:
        """The host name alone."""
        return self.host.partition(" ")[0]


@dataclass(slots=True)
class _Peer:
    member: Member
    members: int = 0
    linked: bool = False
    formed: bool = False
    attached: tuple[int, ...] = ()


class Formation:
    """The state of one rank while a group forms."""

    def __init__(self, group: str, me: Member, world: int, options: int, former: Collection[int] = ()) -> None:
        """``former``: incarnations of former ranks of this process on this bus, whose messages may still arrive."""
        self.group = group
        self._former = former
        self.me = me
        self.world = world
        self.options = options
        self._peers: dict[int, _Peer] = {me.rank: _Peer(me)}
        self._digest: int | None = None  # None: to be computed
        self._probes: set[tuple[int, int, int]] = set()  # rank, topic, members
        self.memory = ""  # where this rank's shared memory is, for the others
        self.attached: set[int] = set()  # ranks whose shared memory is mapped here, as they are known
        self.departed: dict[int, str] = {}  # ranks that were here, and the reason that they are not any more

    # Input

    def take_hello(self, rank: int, incarnation: int, hello: GroupHello) -> bool:
        """Take the hello of a rank. Returns whether something has changed.

        Raises:
            ConfigError: it cannot be in one group with this rank; the text says why.
        """
        if hello.group != self.group:
            return False
        if rank == self.me.rank:
            if incarnation == self.me.incarnation or incarnation in self._former:
                return False
            if incarnation > self.me.incarnation:  # it came later: it is the one that gives up
                return False
            raise ConfigError(
                f"group {self.group!r}: rank {rank} is taken by {hello.host}. Give every process its own rank "
                f"(RANK=0 .. {self.world - 1}), or end that one"
            )
        if hello.world != self.world:
            raise ConfigError(
                f"group {self.group!r}: rank {rank} on {hello.host} says world {hello.world}, this process (rank "
                f"{self.me.rank}) says {self.world}. Start all ranks with the same WORLD"
            )
        if hello.options != self.options:
            raise ConfigError(
                f"group {self.group!r}: rank {rank} on {hello.host} runs another version of gradbus or other settings "
                f"of the group. Use the same on all machines"
            )
        if rank >= self.world:
            return False
        known = self._peers.get(rank)
        if known is not None and known.member.incarnation > incarnation:
            return False  # the last messages of a former start
        member = Member(rank, incarnation, hello.host)
        now = _Peer(member, hello.members, hello.linked, hello.formed, tuple(hello.attached))
        if known is None or known.member.incarnation != incarnation:
            self.attached.discard(rank)  # that was its former start's
            self._digest = None
        self._peers[rank] = now
        self.departed.pop(rank, None)
        return known != now

    def knows(self, rank: int, incarnation: int) -> bool:
        """Whether a hello of this start of the rank was received."""
        peer = self._peers.get(rank)
        return peer is not None and peer.member.incarnation == incarnation

    def gone(self, rank: int, incarnation: int, reason: str) -> None:
        """Forget a process that has died or left, but for the reason; its rank has to be started again."""
        known = self._peers.get(rank)
        if known is not None and known.member.incarnation == incarnation and rank != self.me.rank:
            del self._peers[rank]
            self.departed[rank] = reason
            self.attached.discard(rank)
            self._digest = None

    def confirm_linked(self, rank: int) -> None:
        """Note that a rank has formed the group of just these members, hence was linked to all."""
        peer = self._peers[rank]
        peer.members, peer.linked = self.digest, True
        self._digest = None
        for topic in (0, 1):
            self._probes.add((rank, topic, peer.members))

    def probe(self, rank: int, topic: int, members: int) -> bool:
        """Take a frame that a rank has sent over a topic. Returns whether it is new.

        A frame for other members proves nothing: it is repeated when both sides know the same."""
        if (
            members != self.digest
            or rank >= self.world
            or topic not in (0, 1)
            or (rank, topic, members) in self._probes
        ):
            return False
        self._probes = {known for known in self._probes if known[2] == members} | {(rank, topic, members)}
        return True

    # State

    @property
    def members(self) -> tuple[Member, ...]:
        """All ranks that are known, in order."""
        return tuple(self._peers[rank].member for rank in sorted(self._peers))

    @property
    def digest(self) -> int:
        """64 bits that stand for exactly these starts of all ranks; 0 while some are unknown."""
        if self._digest is None:
            self._digest = self._compute_digest()
        return self._digest

    def _compute_digest(self) -> int:
        if len(self._peers) < self.world:
            return 0
        text = f"{self.group}\0{self.world}\0" + ",".join(f"{m.rank}:{m.incarnation:x}" for m in self.members)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1

    @property
    def _others(self) -> list[tuple[int, _Peer]]:
        return [(rank, peer) for rank, peer in sorted(self._peers.items()) if rank != self.me.rank]

    def _is_probed(self, rank: int) -> bool:
        """Whether frames of a rank have come over both topics."""
        return all((rank, topic, self.digest) in self._probes for topic in (0, 1))

    @property
    def linked(self) -> bool:
        """Whether frames of all others have come over both topics."""
        return self.digest != 0 and all(self._is_probed(rank) for rank, _ in self._others)

    @property
    def formed(self) -> bool:
        """Whether all ranks are linked to all."""
        return self.linked and self.all_know and all(peer.linked for _, peer in self._others)

    @property
    def awaiting_probes(self) -> tuple[int, ...]:
        """Ranks that know the same members and have not announced that they are linked: they take probes now."""
        digest = self.digest
        return tuple(rank for rank, peer in self._others if peer.members == digest != 0 and not peer.linked)

    @property
    def all_know(self) -> bool:
        """Whether all others have announced that they know the same members."""
        digest = self.digest
        return digest != 0 and all(peer.members == digest for _, peer in self._others)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which no hello was ever received."""
        return tuple(rank for rank in range(self.world) if rank not in self._peers and rank not in self.departed)

    @property
    def unlinked(self) -> tuple[int, ...]:
        """Ranks whose hello was received but that frames do not get through to, or from."""
        digest = self.digest
        return tuple(
            rank
            for rank, peer in self._others
            if not (peer.linked and peer.members == digest and self._is_probed(rank))
        )

    @property
    def readers(self) -> tuple[int, ...]:
        """Ranks that have mapped this rank's shared memory, and whose memory this rank has mapped. A linked rank
        announces that for the members that it knows, and maps their memory before."""
        digest = self.digest
        return tuple(
            rank
            for rank, peer in self._others
            if rank in self.attached and peer.members == digest and self.me.rank in peer.attached
        )

    def hello_now(self) -> GroupHello:
        """The hello of this rank as it is now."""
        return GroupHello(
            self.group,
            self.world,
            self.digest,
            self.linked,
            self.formed,
            self.options,
            self.me.host[:256],
            self.memory,
            sorted(self.attached),
        )


@dataclass(slots=True)
class HelloScheduler:
    """When a rank of a forming group sends a hello, and to which ranks it sends probes.

    A hello goes to all others. If each answered every one of them, a group of N ranks would cost N^3 messages and more.
    So a rank sends one when it has news or has met a new rank, and the larger the world, the longer it waits for more
    news first. It repeats all, soon and then less and less often, as DDS may have matched one way only at first.

    A probe is worth something where the other knows the same members: then it goes out once, and again when the other
    still announces that it is not linked. Times are seconds of one clock that does not go back.

    Attributes:
        world: ranks in the group. met: a new rank was met, which may not have received a hello of this one.
    """

    world: int
    met: bool = False
    _sent: GroupHello | None = None
    _sent_s: float = float("-inf")
    _repeat_s: float = REPEAT_S
    _news_s: float = 0.0  # how long to wait for more news now
    _digest: int = 0
    _probed: dict[int, float] = field(default_factory=dict)  # rank: when
    _probed_all: bool = False
    _probed_all_s: float = float("-inf")
    _probed_s: float = float("-inf")

    def is_due(self, hello: GroupHello, now_s: float) -> bool:
        """Whether to send this hello now. True counts as sent."""
        if self.wait_s(hello, now_s) > 0.0:
            return False
        has_news = self.met or hello != self._sent
        self._repeat_s = min(self._longest_s, 2 * (self._pause_s if has_news else self._repeat_s))
        was_quiet = now_s >= self._sent_s + 2 * self._most_news_s
        self._news_s = NEWS_S * self.world if was_quiet else min(self._most_news_s, 2 * self._pause_s)
        self._sent, self._sent_s, self.met = hello, now_s, False
        return True

    def wait_s(self, hello: GroupHello, now_s: float) -> float:
        """Seconds until this hello is to be sent, if nothing else happens until then."""
        pause_s = self._pause_s if self.met or hello != self._sent else self._repeat_s
        return max(0.0, self._sent_s + pause_s - now_s)

    @property
    def _pause_s(self) -> float:
        return min(self._longest_s, max(NEWS_S * self.world, self._news_s))

    @property
    def _most_news_s(self) -> float:
        return max(NEWS_S * self.world, min(MAX_REPEAT_S, REPEAT_PAIR_S * self.world**2))

    @property
    def _longest_s(self) -> float:
        return min(MAX_REPEAT_S, max(REPEAT_S, REPEAT_PAIR_S * self.world**2))

    def probe_again(self, rank: int, now_s: float) -> bool:
        """Whether a rank that is not linked gets another probe: perhaps it could not take the first."""
        probed_s = self._probed.get(rank)
        if probed_s is None or now_s < probed_s + self._pause_s:
            return False
        del self._probed[rank]
        # The topic of all serves everybody: each one that asks must not cost one for all others.
        self._probed_all = self._probed_all and now_s < self._probed_all_s + self._pause_s
        return True

    def probes(self, digest: int, awaiting: Sequence[int], *, all_know: bool, now_s: float) -> tuple[list[int], bool]:
        """Choose the topics that probes go to now.

        Args:
            digest: of the members. awaiting: ranks that know these members, too, and have not
                announced that they are linked.
            all_know: whether all ranks know these members.

        Returns:
            Ranks whose own topic gets one, and whether the topic of all does.
        """
        if digest != self._digest or now_s >= self._probed_s + self._longest_s:
            self._digest, self._probed_s, self._probed_all = digest, now_s, False
            self._probed.clear()
        ranks = [rank for rank in awaiting if rank not in self._probed]
        self._probed.update(dict.fromkeys(ranks, now_s))
        to_all = bool(awaiting) and all_know and not self._probed_all
        if to_all:
            self._probed_all, self._probed_all_s = True, now_s
        return ranks, to_all
