"""Tables of clients in the checkpoint: strikes and quarantine, and how often their updates counted. Pure.

An update is bad if no honest client can have made it: not what the codec writes, NaN or infinity, more bytes than the
model needs, a number of samples out of range, values that the strategy cannot use. A late or incomplete update, or
failed training, is no strike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from gradbus.actors.federated.protocol import PAUSED

FOR_GOOD = 0x7FFF_FFFF  # no round has this number
MAX_TEXT = 300  # characters of a reason that are kept: part of it comes from the wire
MAX_REPORTED_STRIKES = 64  # strikes of a round that its report names
MAX_KNOWN = 65_536  # clients of a table: any process can make up ids
MAX_REFUSED = 1024  # of them, those that were never let in
PREPARING_FAILED = "preparing failed"
HAS_PAUSED = "it had paused"  # why an update of a client never counted
NO_UPDATE = "no update came before the round ended"


@dataclass(frozen=True, slots=True)
class Strike:
    """A bad update, and what follows from it.

    Attributes:
        reason: as in ``RoundReport.dropped``. detail: what exactly was wrong.
        count: strikes of the client, this one included.
        out_until: the first round in which it may take part again; 0: it goes on; FOR_GOOD: none.
    """

    client_id: int
    round_id: int
    reason: str
    detail: str
    count: int
    out_until: int = 0

    @property
    def sentence(self) -> str:
        """For people."""
        what = f"strike {self.count} in round {self.round_id}: {self.reason}, {self.detail}"
        if self.out_until == FOR_GOOD:
            return f"out for good after {what}"
        return f"out until round {self.out_until} after {what}" if self.out_until else what

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class Quarantine:
    """Strikes by client id.

    Back from quarantine a client has one strike less than it takes: the next one puts it back. One round brings a
    client at most one strike, however often it tries.
    """

    def __init__(self, max_strikes: int, quarantine_rounds: int) -> None:
        """With ``max_strikes`` (0: never) a client is out for ``quarantine_rounds`` more rounds (0: for good)."""
        self._max_strikes = max_strikes
        self._quarantine_rounds = quarantine_rounds
        self._last: dict[int, Strike] = {}  # in the order of the last strike
        self._new: list[Strike] = []

    def strike(self, client_id: int, round_id: int, reason: str, detail: str) -> Strike | None:
        """Note a bad update. None: this client has had its strike of this round, or strikes are switched off."""
        last = self._last.get(client_id)
        if not self._max_strikes or (last is not None and last.round_id == round_id):
            return None
        count = 1 if last is None else min(last.count, self._max_strikes - bool(last.out_until)) + 1
        out_until = 0
        if count >= self._max_strikes:
            out_until = min(round_id + 1 + self._quarantine_rounds, FOR_GOOD) if self._quarantine_rounds else FOR_GOOD
        strike = Strike(client_id, round_id, reason, detail[:MAX_TEXT], count, out_until)
        self._last.pop(client_id, None)
        self._last[client_id] = strike
        if len(self._last) > MAX_KNOWN:
            self._forget_one(round_id)
        if len(self._new) < MAX_REPORTED_STRIKES:
            self._new.append(strike)
        return strike

    def _forget_one(self, round_id: int) -> None:
        at_large = (client_id for client_id, strike in self._last.items() if strike.out_until <= round_id)
        del self._last[next(at_large, next(iter(self._last)))]

    def out_until(self, client_id: int) -> int:
        """The first round in which this client may take part; 0: any; FOR_GOOD: none."""
        last = self._last.get(client_id)
        return 0 if last is None else last.out_until

    def exclusion_reason(self, client_id: int, round_id: int) -> str | None:
        """Why this client may not take part in a round; None: it may."""
        last = self._last.get(client_id)
        if last is None or last.out_until <= round_id:
            return None
        return f"client {client_id} is in quarantine, {last.sentence}"

    def excluded(self, round_id: int) -> dict[int, int]:
        """Clients that may not take part in a round, and until which."""
        return {i: strike.out_until for i, strike in sorted(self._last.items()) if strike.out_until > round_id}

    def take_new(self) -> tuple[Strike, ...]:
        """The first MAX_REPORTED_STRIKES strikes since the last call, oldest first."""
        new, self._new = tuple(self._new), []
        return new

    def state(self) -> list[dict[str, Any]]:
        """The table for a checkpoint, as JSON."""
        return [strike.to_json() for strike in list(self._last.values())]

    def load_state(self, state: Iterable[Strike]) -> None:
        """Restore what :meth:`state` gave, unless strikes are switched off by now."""
        if not self._max_strikes:
            return
        self._last = {strike.client_id: strike for strike in state}


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
