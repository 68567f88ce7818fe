"""Which uploads of a round are admitted, why updates do not count, and the strikes that bad ones bring. Pure.

An update is bad if no honest client can have made it: not what the codec writes, NaN or infinity, more bytes than the
model needs, a number of samples out of range, values that the strategy cannot use. A late or incomplete update, or
failed training, is no strike.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gradbus.actors.federated.controller.participation import FOR_GOOD, MAX_KNOWN, MAX_TEXT
from gradbus.actors.federated.controller.rounds import STALE, Round
from gradbus.actors.federated.controller.uploads import RequestedUpload
from gradbus.runtime.wire.control import PacketRequest, UploadRequest

MAX_STEPS = 0xFFFF_FFFF
# Steps that a client may announce for each sample and epoch: a batch has at least one sample, and a task of one's own
# may have several optimizers, or several steps for a batch.
STEPS_PER_SAMPLE = 16
MAX_REPORTED_STRIKES = 64  # strikes of a round that its report names


class UpdateRefusal(NamedTuple):
    """The reason why an update does not count. ``is_strike``: no honest client sends such an update."""

    reason: str
    text: str
    is_strike: bool = False


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


class UpdateAdmission:
    """Decides which uploads are admitted. Pure: no bus, no clock, no tensors.

    Attributes:
        steps: numbers of optimizer steps that the open round asks for, where it is counted in them.
        steps_per_sample: most optimizer steps that it allows for each announced sample, where it is counted in epochs.
        max_staleness: rounds by which the base of an update may be behind that of the open round.
    """

    def __init__(
        self,
        quarantine: Quarantine,
        *,
        run_id: int,
        max_bytes: int,
        budget_bytes: int,
        max_samples: int,
        max_staleness: int = 0,
    ) -> None:
        """``max_bytes``, ``max_samples``: of an honest update. ``budget_bytes``: of granted updates, one of which is
        always admitted."""
        self.quarantine = quarantine
        self.run_id = run_id
        self._max_bytes = max_bytes
        self.budget_bytes = budget_bytes
        self._max_samples = max_samples
        self.steps: Container[int] = ()
        self.steps_per_sample = MAX_STEPS
        self.max_staleness = max_staleness

    def limit_steps(self, work: Sequence[tuple[int, int]], *, is_proportional: bool) -> None:
        """Set the numbers of optimizer steps that a client may announce: as many as were asked for, or, where rounds
        are counted in epochs, so many for each of its samples.

        Args:
            work: epochs and steps, 0 for as many as the epochs have, of the rounds whose updates count in the open one.
            is_proportional: each client has a number of its own, up to that of the fastest.
        """
        asked = {steps for _, steps in work if steps}
        self.steps = range(1, max(asked) + 1) if is_proportional else asked
        self.steps_per_sample = STEPS_PER_SAMPLE * max((epochs for epochs, steps in work if not steps), default=0)

    def refusal(self, update: RequestedUpload, round_: Round | None) -> UpdateRefusal | None:
        """The reason to refuse this update while this round is open; None: it is admitted."""
        client_id, request = update.client_id, update.request
        if round_ is None or request.run_id != self.run_id or round_.staleness(request.round_id) < 0:
            return UpdateRefusal(STALE, f"round {request.round_id} is not open")
        if (staleness := round_.staleness(request.round_id)) > self.max_staleness:
            return UpdateRefusal(STALE, f"its model is {staleness} rounds old, at most {self.max_staleness} are taken")
        if (why := self.quarantine.exclusion_reason(client_id, request.round_id)) is not None:
            return UpdateRefusal("quarantine", why)
        if (why := round_.may_send(client_id)) is not None:
            return UpdateRefusal("unexpected", f"client {client_id} is {why} in this round")
        if not 1 <= request.num_samples <= self._max_samples:
            return UpdateRefusal("samples", f"{request.num_samples} samples are out of range", True)
        if request.steps > self.steps_per_sample * request.num_samples and request.steps not in self.steps:
            text = f"{request.steps} steps on {request.num_samples} samples: at most {self.steps_per_sample} for each"
            asked = f"{request.steps} steps, which is not what was asked for"
            return UpdateRefusal("steps", text if self.steps_per_sample else asked, True)
        if not 0 < request.total_bytes <= self._max_bytes and not isinstance(request, PacketRequest):
            text = f"{request.total_bytes} bytes, at most {self._max_bytes} with this codec and model"
            return UpdateRefusal("oversized", text, True)
        return None

    def has_room(self, request: UploadRequest, in_flight_bytes: int) -> bool:
        """Return whether an update may be granted beside ``in_flight_bytes`` of granted ones and of packets that are
        here."""
        return not in_flight_bytes or in_flight_bytes + request.total_bytes <= self.budget_bytes
