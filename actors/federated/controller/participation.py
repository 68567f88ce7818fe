"""The table of clients in the checkpoint: how often their updates counted, and why the newest one did not. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from gradbus.actors.federated.protocol import PAUSED

MAX_TEXT = 300  # characters of a reason that are kept: part of it comes from the wire
MAX_KNOWN = 65_536  # clients of a table: any process can make up ids
MAX_REFUSED = 1024  # of them, those that were never let in
FOR_GOOD = 0x7FFF_FFFF  # until when a client is out that takes part no more: no round has this number
PREPARING_FAILED = "preparing failed"
HAS_PAUSED = "it had paused"  # why an update of a client never counted
NO_UPDATE = "no update came before the round ended"


_Number = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
_Reason = Annotated[str, Field(max_length=MAX_TEXT)]
_Loss = Annotated[float, Field(allow_inf_nan=False)] | None
Entry = (
    tuple[_Number, _Number, _Number, _Number, _Reason, _Number]  # of a version that knew no losses
    | tuple[_Number, _Number, _Number, _Number, _Reason, _Number, _Loss]
)
"""A client in a checkpoint: its id, and the attributes of its :class:`ParticipationRecord`."""


@dataclass(slots=True)
class ParticipationRecord:
    """One client.

    Attributes:
        counted: rounds in which an update of it counted. num_samples: of the newest of these.
        missed: rounds in which it was expected and did not count. reason: of the newest, ``round_id``; or, with round
            0, of its refusal, or why it could not get ready.
        loss: mean training loss of the newest update that counted; None: it was not finite, or none has counted.
    """

    counted: int = 0
    num_samples: int = 0
    missed: int = 0
    reason: str = ""
    round_id: int = 0
    loss: float | None = None


class Participation:
    """Clients by id."""

    def __init__(self) -> None:
        self._known: dict[int, ParticipationRecord] = {}

    def commit(
        self,
        round_id: int,
        counted: Mapping[int, int],
        missed: Mapping[int, str],
        losses: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Note the clients whose updates count in a round, with their samples, and their mean training ``losses``, and
        the ``missed`` ones, with the reasons."""
        for client_id, num_samples in counted.items():
            participant = self._participant(client_id)
            if participant is not None:
                participant.counted += 1
                participant.num_samples = num_samples
                loss = losses.get(client_id, math.nan)
                participant.loss = loss if math.isfinite(loss) else None
        for client_id, reason in missed.items():
            participant = self._participant(client_id)
            if participant is not None and client_id not in counted:
                participant.missed += 1
                participant.reason, participant.round_id = reason[:MAX_TEXT], round_id

    def note_unprepared(self, client_id: int, why: str) -> None:
        """Note a client that could not get ready for its first round."""
        self.note_refused(client_id, f"{PREPARING_FAILED}: {why}")

    def note_refused(self, client_id: int, reason: str) -> None:
        """Note a client that was refused."""
        participant = self._participant(client_id, MAX_REFUSED)
        if participant is not None and not participant.counted:
            participant.reason, participant.round_id = reason[:MAX_TEXT], 0

    def note_paused(self, client_id: int) -> None:
        """Note a client that has paused, which is the reason if none of its updates ever counts."""
        self.note_refused(client_id, PAUSED)

    def _participant(self, client_id: int, at_most: int = MAX_KNOWN) -> ParticipationRecord | None:
        if client_id not in self._known and len(self._known) >= at_most:
            return None
        return self._known.setdefault(client_id, ParticipationRecord())

    def samples(self) -> dict[int, int]:
        """The newest number of samples of each client that has counted."""
        return {i: participant.num_samples for i, participant in self._known.items() if participant.counted}

    def of(self, client_id: int) -> ParticipationRecord:
        """Return what is known of a client; that of a new one if it is not known."""
        return self._known.get(client_id) or ParticipationRecord()

    def never_counted(self, expected: Iterable[int]) -> dict[int, str]:
        """Clients of which no update has counted in the whole run, ascending, with the reasons, for people.
        ``expected``: ids that should have taken part, known or not."""
        ids = sorted({*expected, *self._known})
        return {i: self._why(i) for i in ids if i not in self._known or not self._known[i].counted}

    def _why(self, client_id: int) -> str:
        participant = self._known.get(client_id)
        if participant is not None and participant.reason == PAUSED:
            return HAS_PAUSED
        if participant is None:
            return "it was expected and never took part in a round"
        if not participant.missed:
            is_own = participant.reason.startswith(PREPARING_FAILED)
            return participant.reason if is_own else f"it was not let in: {participant.reason}"
        times = f"in {participant.missed} round{'s' * (participant.missed > 1)}"
        return f"expected {times}; in round {participant.round_id}: {participant.reason}"

    def state(self) -> list[Entry]:
        """Return what a restart needs, for JSON. From any thread: clients may be turned away meanwhile."""
        # A copy makes no object for each item. ``list(items())`` does, which may start the garbage collector and with
        # it another thread, in the midst of the iteration.
        known = self._known.copy()
        return [
            (i, one.counted, one.num_samples, one.missed, one.reason, one.round_id, one.loss)
            for i, one in known.items()
        ]

    def load_state(self, state: Iterable[Entry]) -> None:
        """Restore what :meth:`state` gave."""
        self._known = {e[0]: ParticipationRecord(*e[1:]) for e in state}
