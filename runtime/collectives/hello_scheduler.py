"""When a rank of a forming group says hello, and whom it sends probes.

A hello goes to all others. If each answered every one of them, a group of N ranks would cost N^3 messages and more. So
a rank speaks when it has something new to say or has met somebody new, and the larger the world, the longer it waits
for more news first. It says all again, soon and then less and less often, as DDS may have matched one way only when it
said so before. A probe is worth something where the other knows the same members: then it goes out once, and again
when the other still says that it is not linked.

Plain decisions without I/O or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradbus.runtime.wire.control import GroupHello

REPEAT_S = 0.1  # how often at least to say again what is not new, in a group that is not large
# In a large one everybody hears world^2 words each time, which takes all of them some 70 us each: so that many that
# wait for few leave the processors to those few, who are still to start.
REPEAT_PAIR_S = 0.4e-3
MAX_REPEAT_S = 1.0
# How long to wait for more news, times the world: about what a hello costs all others together. Where there is more
# news each time, twice as long, up to REPEAT_PAIR_S for each pair: while many processes start on few cores, every rank
# has news all the time, and with shorter pauses the hellos alone take more than all cores have.
NEWS_S = 0.001


@dataclass(slots=True)
class Introductions:
    """What was said, to whom, and when. Times are seconds of one clock that does not go back.

    Attributes:
        world: ranks in the group. met: somebody was heard for the first time, and may not have heard this rank.
    """

    world: int
    met: bool = False
    _said: GroupHello | None = None
    _said_s: float = float("-inf")
    _repeat_s: float = REPEAT_S
    _news_s: float = 0.0  # how long to wait for more news now
    _digest: int = 0
    _probed: dict[int, float] = field(default_factory=dict)  # rank: when
    _probed_all: bool = False
    _probed_all_s: float = float("-inf")
    _probed_s: float = float("-inf")

    def says(self, hello: GroupHello, now_s: float) -> bool:
        """Whether to say this hello now. True counts as said."""
        if self.wait_s(hello, now_s) > 0.0:
            return False
        has_news = self.met or hello != self._said
        self._repeat_s = min(self._longest_s, 2 * (self._pause_s if has_news else self._repeat_s))
        was_quiet = now_s >= self._said_s + 2 * self._most_news_s
        self._news_s = NEWS_S * self.world if was_quiet else min(self._most_news_s, 2 * self._pause_s)
        self._said, self._said_s, self.met = hello, now_s, False
        return True

    def wait_s(self, hello: GroupHello, now_s: float) -> float:
        """Seconds until this hello is to be said, if nothing else happens until then."""
        pause_s = self._pause_s if self.met or hello != self._said else self._repeat_s
        return max(0.0, self._said_s + pause_s - now_s)

    @property
    def _pause_s(self) -> float:
        return min(self._longest_s, max(NEWS_S * self.world, self._news_s))

    @property
    def _most_news_s(self) -> float:
        return max(NEWS_S * self.world, min(MAX_REPEAT_S, REPEAT_PAIR_S * self.world**2))

    @property
    def _longest_s(self) -> float:
        return min(MAX_REPEAT_S, max(REPEAT_S, REPEAT_PAIR_S * self.world**2))

    def still_owed(self, rank: int, now_s: float) -> bool:
        """A rank says that it is not linked, and perhaps could not take its probe yet. True: it gets another one."""
        probed_s = self._probed.get(rank)
        if probed_s is None or now_s < probed_s + self._pause_s:
            return False
        del self._probed[rank]
        # The topic of all serves everybody: each who says so must not cost one for all others.
        self._probed_all = self._probed_all and now_s < self._probed_all_s + self._pause_s
        return True

    def probes(self, digest: int, owed: Sequence[int], *, all_know: bool, now_s: float) -> tuple[list[int], bool]:
        """Where probes go now.

        Args:
            digest: of the members. owed: ranks that know these members, too, and have not said that they are linked.
            all_know: whether all ranks know these members.

        Returns:
            Ranks whose own topic gets one, and whether the topic of all does.
        """
        if digest != self._digest or now_s >= self._probed_s + self._longest_s:
            self._digest, self._probed_s, self._probed_all = digest, now_s, False
            self._probed.clear()
        ranks = [rank for rank in owed if rank not in self._probed]
        self._probed.update(dict.fromkeys(ranks, now_s))
        to_all = bool(owed) and all_know and not self._probed_all
        if to_all:
            self._probed_all, self._probed_all_s = True, now_s
        return ranks, to_all
