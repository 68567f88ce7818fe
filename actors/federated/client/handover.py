"""How a round of a client passes to the thread of a script, and its result back.

Three threads meet here. The client's event loop asks whether the script is ready, and says what became of an update.
Its compute thread offers a round, and waits for the result. The script takes the round, trains, and gives the result.

A turn is one round at the script: offered, taken, given back, answered. There is at most one, and the model belongs to
the script from its ``take`` to the answer, and whenever it does not wait in ``take``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gradbus.runtime.errors import OutOfTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRound:
    """Tells what the controller asks for in a round. The loop of a script may follow it or not.

    Attributes:
        round_id: 1 or more. epochs: passes over the data, >= 1. lr: learning rate, > 0.
        steps: optimizer steps in place of epochs, which the controller checks; 0: it counts epochs.
        seed: of the run. subset_size: samples to train on; 0: all.
    """

    round_id: int
    epochs: int
    lr: float
    steps: int
    seed: int
    subset_size: int


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """What a script has trained, as :class:`~gradbus.actors.federated.task.TrainOutcome` has it."""

    num_samples: int
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


NOTHING = ScriptResult(0, None)


class ScriptLeft(Exception):
    """The script has left its client, and gives no result any more."""


@dataclass(slots=True, eq=False)
class _Turn:
    """One round at the script. ``accepted``: whether its update counts; None: that is not known yet."""

    round: TrainingRound
    should_stop: Callable[[], bool]
    is_taken: bool = False
    result: ScriptResult | None = None
    accepted: bool | None = None


class RoundHandover:
    """Passes rounds between the threads of a client and that of a script."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn: _Turn | None = None
        self._is_waiting = False
        self._is_claimed = False  # by the client, which writes to the model and then offers a round
        self._is_open = False  # the bus is
        self._has_taken = False  # a round that the script has neither given a result for nor passed over
        self._is_over = self._has_left = False

    # The script

    def wait_until_open(self) -> None:
        """Wait until the client has its bus, or has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._is_over)

    def leave(self) -> None:
        """Say that the script has left."""
        with self._changed:
            self._has_left = self._is_over = True
            self._changed.notify_all()

    @property
    def has_left(self) -> bool:
        """Whether the script has left."""
        return self._has_left

    def begin_wait(self) -> None:
        """Announce that the script waits for a round from now on. One that it has taken and gives no result for is one
        that it had nothing to train in."""
        with self._changed:
            turn = self._turn
            if turn is not None and turn.is_taken and turn.result is None:
                turn.result = NOTHING
            self._has_taken = False
            self._is_waiting = True
            self._changed.notify_all()

    def take(self, timeout_s: float | None = None) -> TrainingRound | None:
        """Wait for the next round; None: there is none any more. Raises TimeoutError: there is none after so long."""
        with self._changed:
            try:
                is_known = self._changed.wait_for(lambda: self._is_over or self._offered is not None, timeout_s)
                if not is_known:  # the model is the script's again only when the client does not write to it
                    self._changed.wait_for(lambda: self._is_over or not self._is_claimed)
            finally:
                self._is_waiting = False
            turn = self._offered
            if turn is None and not self._is_over:
                raise TimeoutError(f"no round has begun within {timeout_s:g} s, and the run has not ended")
            if turn is None or self._is_over:
                return None
            turn.is_taken = self._has_taken = True
            return turn.round

    def give(self, result: ScriptResult) -> bool:
        """Give the result of the round that was taken, and wait until it is known whether it counts.

        Raises:
            OutOfTurn: no round was taken, or its result was given already.
        """
        with self._changed:
            self.check_taken()
            turn, self._has_taken = self._turn, False
            if turn is None or self._is_over:  # the client has ended while the script trained
                return False
            turn.result = result
            self._changed.notify_all()
            self._changed.wait_for(lambda: turn.accepted is not None or self._is_over)
            return bool(turn.accepted)

    def check_taken(self) -> None:
        """Raises OutOfTurn: the script has no round to give a result for."""
        with self._changed:
            if self._has_taken:
                return
            if self._is_over:
                raise OutOfTurn("send was called after the end of the run: leave the loop when receive returns False")
            raise OutOfTurn(
                "send was called without a round: each receive that returns True is followed by one send. Call "
                "receive(model) first, and train from the weights that it has loaded"
            )

    def should_stop(self) -> bool:
        """Whether the result of the round that was taken is no longer wanted."""
        turn = self._turn
        return self._is_over or (turn is not None and turn.should_stop())

    @property
    def _offered(self) -> _Turn | None:
        return None if self._turn is None or self._turn.is_taken else self._turn

    # The client

    def open(self) -> None:
        """Say that the client has its bus."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def claim(self) -> bool:
        """Claim the model, to write to it, until :meth:`train` or :meth:`answer`. Returns whether the script waits for
        a round, so that this may be."""
        with self._changed:
            self._is_claimed = self._is_waiting
            return self._is_claimed

    @property
    def is_over(self) -> bool:
        """Whether the client has ended, or the script has left it."""
        return self._is_over

    def train(self, offered: TrainingRound, should_stop: Callable[[], bool]) -> ScriptResult:
        """Have the script train, and wait for its result. Called on the compute thread, while the script waits.

        Raises:
            ScriptLeft: there will be none.
        """
        turn = _Turn(offered, should_stop)
        with self._changed:
            self._turn, self._is_claimed = turn, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: turn.result is not None or self._is_over)
            if turn.result is None:
                raise ScriptLeft("the script has left its client in the midst of a round")
            return turn.result

    def answer(self, accepted: bool) -> None:
        """Say whether the update of this turn counts, which ends it."""
        with self._changed:
            if self._turn is not None:
                self._turn.accepted, self._turn = accepted, None
            self._is_claimed = False
            self._changed.notify_all()

    def end(self) -> None:
        """Say that the client has ended: there are no more rounds."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
