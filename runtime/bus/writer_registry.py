"""Who is heard through which DDS writer, so that the end of a writer tells whose process is gone.

Nobody can seal in the name of another, but anybody can say again, through a writer of his own, what he has heard of
others, and then take that writer away. A word is opened once, so he needs words that did not come here. Of those that
are older than this process he may have more than it has heard; and by chance he is faster with the newest. So a writer
takes a sender along only if no other one that is still there has said more of that sender, or something later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView
from dataclasses import dataclass

from gradbus.runtime.wire.messages import Control, PeerGone, is_later

_MAX_SENDERS = 65_536  # remembered for one writer: it cannot make us grow without end
_Sender = tuple[int, int]  # and which start of it


@dataclass(slots=True)
class _Said:
    """Of one sender, through one writer."""

    words: int
    newest: int  # number of the latest word

    def is_outdone_by(self, other: _Said) -> bool:
        return other.words > self.words or is_later(other.newest, self.newest)


class Speakers:
    """Of one bus. Only the receive thread uses it."""

    def __init__(self) -> None:
        self._said: dict[int, dict[_Sender, _Said]] = {}  # by handle of the writer

    @property
    def writers(self) -> KeysView[int]:
        """Handles of those through which somebody was heard."""
        return self._said.keys()

    def heard(self, writer: int, message: Control) -> None:
        """A word has come through this writer."""
        senders = self._said.setdefault(writer, {})
        said = senders.get((message.sender, message.incarnation))
        if said is not None:
            said.words += 1
            if is_later(message.number, said.newest):
                said.newest = message.number
        elif len(senders) < _MAX_SENDERS:
            senders[message.sender, message.incarnation] = _Said(1, message.number)

    def left(self, writers: Iterable[int], why: str = "") -> list[PeerGone]:
        """These writers are gone, or nothing is taken from them any more: who is gone with them."""
        lost: dict[_Sender, list[_Said]] = {}
        for writer in writers:
            for sender, said in self._said.pop(writer, {}).items():
                lost.setdefault(sender, []).append(said)
        return [PeerGone(*sender, why) for sender in sorted(lost) if not self._goes_on(sender, lost[sender])]

    def _goes_on(self, sender: _Sender, lost: Collection[_Said]) -> bool:
        others = [senders[sender] for senders in self._said.values() if sender in senders]
        return any(all(said.is_outdone_by(other) for said in lost) for other in others)
