"""What has come of each client in this run: how often it counted, of how many samples it is, and why it did not.

A pure table, part of the checkpoint: a restart of the controller changes neither what a client may weigh nor who is
named at the end of the run as never counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

MAX_KNOWN = 65_536  # clients: whoever can make up ids cannot make the table grow without end
MAX_TURNED_AWAY = 1024  # as long as so many are known
MAX_TEXT = 300  # characters of a reason that are kept: part of it comes from the wire
NO_UPDATE = "no update came before the round ended"

_Number = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
Entry = tuple[_Number, _Number, _Number, _Number, Annotated[str, Field(max_length=MAX_TEXT)], _Number]
"""A client in a checkpoint: its id, and the attributes of its :class:`Participant`."""


@dataclass(slots=True)
class Participant:
    """One client.

    Attributes:
        counted: rounds in which an update of it counted. num_samples: of the newest of these.
        missed: rounds in which it was expected and did not count. reason: why, of the newest, ``round_id``; or why it
            was not let in, which has no round: 0.
    """

    counted: int = 0
    num_samples: int = 0
    missed: int = 0
    reason: str = ""
    round_id: int = 0


class Participation:
    """Clients by id."""

    def __init__(self) -> None:
        self._known: dict[int, Participant] = {}

    def commit(self, round_id: int, counted: Mapping[int, int], missed: Mapping[int, str]) -> None:
        """A round is done.

        Args:
            round_id: its number.
            counted: clients whose updates count, and the samples that each has announced.
            missed: those that were expected and do not count, and why.
        """
        for client_id, num_samples in counted.items():
            participant = self._participant(client_id)
            if participant is not None:
                participant.counted += 1
                participant.num_samples = num_samples
        for client_id, reason in missed.items():
            participant = self._participant(client_id)
            if participant is not None and client_id not in counted:
                participant.missed += 1
                participant.reason, participant.round_id = reason[:MAX_TEXT], round_id

    def turned_away(self, client_id: int, reason: str) -> None:
        """A client was not let in."""
        participant = self._participant(client_id, MAX_TURNED_AWAY)
        if participant is not None and not participant.counted:
            participant.reason, participant.round_id = reason[:MAX_TEXT], 0

    def _participant(self, client_id: int, at_most: int = MAX_KNOWN) -> Participant | None:
        if client_id not in self._known and len(self._known) >= at_most:
            return None
        return self._known.setdefault(client_id, Participant())

    def samples(self) -> dict[int, int]:
        """Of each client that has counted, how many samples it has announced last."""
        return {i: participant.num_samples for i, participant in self._known.items() if participant.counted}

    def never_counted(self, expected: Iterable[int]) -> dict[int, str]:
        """Clients of which no update has counted in the whole run, ascending, and why, as a sentence for people.

        ``expected``: ids that should have taken part, known or not.
        """
        ids = sorted({*expected, *self._known})
        return {i: self._why(i) for i in ids if i not in self._known or not self._known[i].counted}

    def _why(self, client_id: int) -> str:
        participant = self._known.get(client_id)
        if participant is None:
            return "it was expected and never took part in a round"
        if not participant.missed:
            return f"it was not let in: {participant.reason}"
        times = f"in {participant.missed} round{'s' * (participant.missed > 1)}"
        return f"expected {times}; in round {participant.round_id}: {participant.reason}"

    def state(self) -> list[Entry]:
        """What a restart has to know, for JSON. From any thread: clients may be turned away meanwhile."""
        known = list(self._known.items())
        return [(i, one.counted, one.num_samples, one.missed, one.reason, one.round_id) for i, one in known]

    def load_state(self, state: Iterable[Entry]) -> None:
        """Put back what :meth:`state` gave."""
        self._known = {e[0]: Participant(e[1], e[2], e[3], e[4], e[5]) for e in state}
