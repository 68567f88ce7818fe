"""How ranks become a group: who is there, which start of whom, and whether every topic works both ways.

Plain decisions without I/O: what was heard goes in, what to say and whether all is well comes out.

1. Everybody says who it is. Who has heard all ranks knows the members: rank and incarnation of each, and a hash.
2. Everybody sends empty frames with that hash over every topic. Who has got those of all others is *linked*.
3. Who hears from all others that they are linked, with the same hash, has *formed* the group.

DDS's own counts of matched readers are not enough: they may include a process that is dead, and the other side may not
have matched yet. A frame that arrived proves one direction; all ranks linked prove all of them. A rank that is started
again has another incarnation, hence another hash: frames of its former life belong to a group that is no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import GroupHello


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group.

    Attributes:
        rank: 0 .. world - 1. incarnation: which start of it. host: host name and process id, for people.
    """

    rank: int
    incarnation: int
    host: str


@dataclass(slots=True)
class _Heard:
    member: Member
    members: int = 0
    linked: bool = False
    formed: bool = False
    attached: tuple[int, ...] = ()


class Formation:
    """The state of one rank while a group forms."""

    def __init__(self, group: str, me: Member, world: int, options: int, former: Collection[int] = ()) -> None:
        """``former``: incarnations of ranks that this process has been on the same bus, whose words may still come."""
        self.group = group
        self._former = former
        self.me = me
        self.world = world
        self.options = options
        self._heard: dict[int, _Heard] = {me.rank: _Heard(me)}
        self._digest: int | None = None  # None: to be computed
        self._probes: set[tuple[int, int, int]] = set()  # rank, topic, members
        self.memory = ""  # where this rank's shared memory is, for the others
        self.attached: set[int] = set()  # ranks whose shared memory is mapped here, as they are known

    # What comes in

    def hello(self, rank: int, incarnation: int, said: GroupHello) -> bool:
        """A rank has said hello. True: something has changed.

        Raises:
            ConfigError: it cannot be in one group with this rank; the text says why.
        """
        if said.group != self.group:
            return False
        if rank == self.me.rank:
            if incarnation == self.me.incarnation or incarnation in self._former:
                return False
            if incarnation > self.me.incarnation:  # it came later: it is the one that gives up
                return False
            raise ConfigError(
                f"group {self.group!r}: rank {rank} is taken by {said.host}. Give every process its own rank "
                f"(RANK=0 .. {self.world - 1}), or end that one"
            )
        if said.world != self.world:
            raise ConfigError(
                f"group {self.group!r}: rank {rank} on {said.host} says world {said.world}, this process (rank "
                f"{self.me.rank}) says {self.world}. Start all ranks with the same WORLD"
            )
        if said.options != self.options:
            raise ConfigError(
                f"group {self.group!r}: rank {rank} on {said.host} runs another version of gradbus or other settings "
                f"of the group. Use the same on all machines"
            )
        if rank >= self.world:
            return False
        known = self._heard.get(rank)
        if known is not None and known.member.incarnation > incarnation:
            return False  # last words of a former start
        now = _Heard(Member(rank, incarnation, said.host), said.members, said.linked, said.formed, tuple(said.attached))
        if known is None or known.member.incarnation != incarnation:
            self.attached.discard(rank)  # that was its former start's
            self._digest = None
        self._heard[rank] = now
        return known != now

    def knows(self, rank: int, incarnation: int) -> bool:
        """Whether this start of a rank has been heard."""
        heard = self._heard.get(rank)
        return heard is not None and heard.member.incarnation == incarnation

    def gone(self, rank: int, incarnation: int) -> None:
        """A process is dead; its rank has to be started again."""
        known = self._heard.get(rank)
        if known is not None and known.member.incarnation == incarnation and rank != self.me.rank:
            del self._heard[rank]
            self.attached.discard(rank)
            self._digest = None

    def vouch(self, rank: int) -> None:
        """A rank has shown that it had formed the group of just these members."""
        heard = self._heard[rank]
        heard.members, heard.linked = self.digest, True
        self._digest = None
        for topic in (0, 1):
            self._probes.add((rank, topic, heard.members))

    def probe(self, rank: int, topic: int, members: int) -> bool:
        """A frame of a rank has come over a topic. True: that is new. One for other members says nothing: it is
        repeated when both sides know the same."""
        if (
            members != self.digest
            or rank >= self.world
            or topic not in (0, 1)
            or (rank, topic, members) in self._probes
        ):
            return False
        self._probes = {known for known in self._probes if known[2] == members} | {(rank, topic, members)}
        return True

    # What follows

    @property
    def members(self) -> tuple[Member, ...]:
        """All ranks that are known, in order."""
        return tuple(self._heard[rank].member for rank in sorted(self._heard))

    @property
    def digest(self) -> int:
        """64 bits that stand for exactly these starts of all ranks; 0 while some are unknown."""
        if self._digest is None:
            self._digest = self._compute_digest()
        return self._digest

    def _compute_digest(self) -> int:
        if len(self._heard) < self.world:
            return 0
        text = f"{self.group}\0{self.world}\0" + ",".join(f"{m.rank}:{m.incarnation:x}" for m in self.members)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1

    @property
    def linked(self) -> bool:
        """Whether frames of all others have come over both topics."""
        digest = self.digest
        return digest != 0 and all(
            (rank, topic, digest) in self._probes for rank in range(self.world) if rank != self.me.rank
            for topic in (0, 1)
        )  # fmt: skip

    @property
    def formed(self) -> bool:
        """Whether all ranks are linked to all."""
        digest = self.digest
        return self.linked and all(
            heard.members == digest and heard.linked for rank, heard in self._heard.items() if rank != self.me.rank
        )

    @property
    def owed_probes(self) -> tuple[int, ...]:
        """Ranks that know the same members and have not said that they are linked: they take probes now."""
        digest = self.digest
        return tuple(
            rank
            for rank, heard in self._heard.items()
            if rank != self.me.rank and heard.members == digest != 0 and not heard.linked
        )

    @property
    def all_know(self) -> bool:
        """Whether all others have said that they know the same members."""
        digest = self.digest
        return digest != 0 and all(h.members == digest for rank, h in self._heard.items() if rank != self.me.rank)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not been heard."""
        return tuple(rank for rank in range(self.world) if rank not in self._heard)

    @property
    def unlinked(self) -> tuple[int, ...]:
        """Ranks that have been heard but that frames do not get through to, or from."""
        digest = self.digest
        return tuple(
            rank
            for rank in range(self.world)
            if rank != self.me.rank
            and rank in self._heard
            and not (
                self._heard[rank].linked
                and self._heard[rank].members == digest
                and all((rank, topic, digest) in self._probes for topic in (0, 1))
            )
        )

    @property
    def readers(self) -> tuple[int, ...]:
        """Ranks that have mapped this rank's shared memory, and whose this rank has mapped. Who is linked says so for
        the members that it has heard, and maps before it is."""
        digest = self.digest
        return tuple(
            rank
            for rank in sorted(self.attached)
            if self._heard[rank].members == digest and self.me.rank in self._heard[rank].attached
        )

    def hello_now(self) -> GroupHello:
        """What this rank has to say."""
        return GroupHello(
            self.group, self.world, self.digest, self.linked, self.formed, self.options, self.me.host[:256],
            self.memory, sorted(self.attached),
        )  # fmt: skip
