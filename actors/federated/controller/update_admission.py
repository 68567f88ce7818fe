"""Which uploads of a round are admitted, and the reasons for which updates do not count."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from gradbus.actors.aggregation.partial_sum import CountedTwice
from gradbus.actors.aggregation.strategies import NoRoom
from gradbus.actors.federated.controller.asynchronous import BaseGone
from gradbus.actors.federated.controller.participation import Quarantine
from gradbus.actors.federated.controller.rounds import STALE, Round
from gradbus.actors.federated.controller.uploads import RequestedUpload
from gradbus.codecs import CodecError, NonFiniteError
from gradbus.runtime.wire.control import PacketRequest, UploadRequest

MAX_STEPS = 0xFFFF_FFFF
# Steps that a client may announce for each sample and epoch: a batch has at least one sample, and a task of one's own
# may have several optimizers, or several steps for a batch.
STEPS_PER_SAMPLE = 16
_NO_STRIKE: dict[type[Exception], str] = {CountedTwice: "counted twice", BaseGone: STALE, NoRoom: "no room"}


class UpdateRefusal(NamedTuple):
    """The reason why an update does not count. ``is_strike``: no honest client sends such an update."""

    reason: str
    text: str
    is_strike: bool = False


def unusable(error: ValueError | ArithmeticError) -> UpdateRefusal:
    """The refusal of an update that could not be added."""
    if (reason := _NO_STRIKE.get(type(error))) is not None:
        return UpdateRefusal(reason, str(error))
    malformed = "malformed" if isinstance(error, CodecError) else "refused"
    return UpdateRefusal("non-finite" if isinstance(error, NonFiniteError) else malformed, str(error), True)


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
