"""Asynchronous federated training: clients train without waiting for each other.

A round of the controller is then a buffer: ``asynchronous.buffer`` updates, whatever models they were trained from
(FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022, arXiv:2106.06639,
Algorithm 1). The number of a round stays the version of the model that it makes, and an update names its base by it:
one of round r was trained from model r - 1. Where the open round is r + s, the update is s models stale. All else is as
in synchronous rounds: upload requests, grants and receipts, exact sums, strategies, checkpoints.

What is different:

- A client is not stopped by a newer command. When it is free it takes the newest model. With ``repeats`` it trains from
  the same model again if there is no newer one; its trainings are numbered on, so that the order of its data and its
  residual go on, too.
- An update that comes while a model is computed waits for the next buffer, and is not refused. A full buffer takes no
  more: which updates make a model depends on their order of arrival alone, and the sum of a buffer not even on that.
- A stale update is brought to the newest model: as a difference to its own base, times ``(1 + s)^-p``. The mean is over
  the samples as they were announced, so that a stale update moves the model less, as in the paper, which weighs clients
  alike. Codecs whose messages hold weights need the base itself: the controller keeps those within a bound of bytes.
- The open buffer is not in the checkpoint. A controller that dies goes on from the last model, and the updates of that
  buffer are lost, as are those of clients that die; the clients go on from where they are.

With ``repeats = false`` each client counts once in a buffer, as in synchronous rounds with a quorum, but late updates
are used: decoupled DiLoCo (arXiv:2604.21428) is this, with a minimum quorum (``buffer``), :func:`adaptive_grace_s`,
weights by samples and the strategy ``decoupled``. It differs from the paper: a learner starts from the newest model,
and does not blend it with its own.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor

from gradbus.actors.aggregation.clipping import differences
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.controller.rounds import REPEATED, STALE, Outcome, Round, RoundRules
from gradbus.actors.federated.protocol import PAUSED
from gradbus.codecs import Codec, Parsed
from gradbus.codecs.base import Block
from gradbus.runtime.config.federated import AsynchronousSettings, FederatedConfig
from gradbus.runtime.errors import ConfigError

FASTEST_TIMES_MEDIAN = 10.0


def staleness_factor(staleness: int, power: float) -> float:
    """Return how much an update counts whose base is so many models behind: ``(1 + s)^-p``; Nguyen et al. use
    p = 1/2."""
    return float((1.0 + staleness) ** -power)


def adaptive_grace_s(*, share: float, local_s: float, quorum_s: float, sync_s: float) -> float:
    """Seconds for which a full buffer stays open: ``share * (tau * step_time - quorum_time - sync_time)``, at least 0.

    Args:
        share: gamma, 0 .. 1.
        local_s: tau * step_time, of the training that clients do meanwhile.
        quorum_s: from the first update of the buffer to the last that it needed.
        sync_s: that making and publishing a model takes.
    """
    return max(0.0, share * (local_s - quorum_s - sync_s))


def proportional_steps(most: int, speeds: Mapping[int, float]) -> dict[int, int]:
    """Steps of each client's next training, so that all take about as long: ``most`` for the fastest, for the others
    in proportion to their speed (Liu et al., arXiv:2401.09135, dynamic local updates). Speeds are the clients' word:
    one of more than ``FASTEST_TIMES_MEDIAN`` times the median counts as that, so that the rest go on with their work.

    Args:
        speeds: steps a second, of each client that has reported them; those that are not finite do not count.
    """
    known = {client_id: speed for client_id, speed in speeds.items() if math.isfinite(speed) and speed >= 0}
    if not known or not any(known.values()):
        return {}
    typical = statistics.median(known.values()) * FASTEST_TIMES_MEDIAN
    fastest = min(max(known.values()), typical) or max(known.values())
    return {client_id: max(1, round(most * min(1.0, speed / fastest))) for client_id, speed in known.items()}


class BufferRound(Round):
    """A round that ends with its buffer full, or at the deadline with at least ``rules.minimum`` updates. Pure.

    Attributes:
        updates: that are in the buffer.
    """

    def __init__(
        self,
        round_id: int,
        expected: Iterable[int],
        rules: RoundRules,
        settings: AsynchronousSettings,
        *,
        now_s: float,
        accepted: Iterable[int] = (),
        silent: Iterable[int] = (),
    ) -> None:
        """As for :class:`.rounds.Round`."""
        super().__init__(round_id, expected, rules, now_s=now_s, accepted=accepted, silent=silent)
        self._settings = settings
        self._local_s = self._sync_s = 0.0
        self._first_at_s: float | None = None
        self._full_at_s: float | None = None
        self.updates = 0
        # Where clients may lie the first buffer is held until as many have announced an update as it can have.
        self._quorum, self._grace_s = max(rules.minimum, min(settings.buffer, len(self.expected))), 0.0

    def go_on(self, last: RoundReport | None, *, updates: int) -> None:
        """Note what was before.

        Args:
            last: the report of the round before, for :func:`adaptive_grace_s`; None: there was none.
            updates: that are in the buffer, from an earlier attempt.
        """
        self.updates = updates
        if last is not None:
            self._local_s = statistics.median([one.train_s for one in last.timeline] or [0.0])
            self._sync_s = last.step_s + last.checkpoint_s + last.publish_s
        self._first_at_s = self.opened_at_s if updates else None

    @property
    def open(self) -> set[int]:
        """Clients that may still send an update."""
        waits = set() if self._settings.repeats else self.accepted
        return self.expected - waits - self.failed.keys()

    @property
    def ready(self) -> int:
        return self.updates

    @property
    def needed(self) -> int:
        return self._settings.buffer

    @property
    def is_full(self) -> bool:
        return self._full_at_s is not None and not self._grace_s

    @property
    def fewest_clients(self) -> int:
        # A few clients, each of which may send several updates, fill a buffer as well.
        return min(self.minimum, max(2, len(self.expected))) if self._settings.repeats else self.minimum

    def staleness(self, round_id: int) -> int:
        return self.round_id - round_id

    def may_send(self, client_id: int) -> str | None:
        if client_id in self.accepted and not self._settings.repeats:
            return REPEATED
        return None  # a failure is of one training: the next may count

    def accept(self, client_id: int, now_s: float) -> None:
        self.expected.add(client_id)
        self.failed.pop(client_id, None)
        self.accepted.add(client_id)
        self.updates += 1
        if self._first_at_s is None:
            self._first_at_s = now_s
        if self.updates >= self._settings.buffer and self._full_at_s is None:
            self._full_at_s = now_s
            self._grace_s = adaptive_grace_s(
                share=self._settings.grace_share,
                local_s=self._local_s,
                quorum_s=now_s - self._first_at_s,
                sync_s=self._sync_s,
            )

    def fail(self, client_id: int, reason: str) -> None:
        if reason != STALE:  # from the newest model it will count
            super().fail(client_id, reason)

    def lose(self, client_id: int) -> None:
        self.expected.discard(client_id)
        self.failed.pop(client_id, None)

    def follow_clients(self, present: Collection[int], silent: Collection[int]) -> tuple[list[int], list[int]]:
        """As :meth:`.Round.follow_clients`; clients that come, or that go on after a pause, take part at once."""
        lost, found = super().follow_clients(present, silent)
        for client_id in [one for one, why in self.failed.items() if why == PAUSED and one in present]:
            del self.failed[client_id]
        self.expected.update(set(present) - set(silent))
        return lost, found

    def verdict(self, now_s: float) -> Outcome | None:
        if self._full_at_s is not None and now_s >= self._full_at_s + self._grace_s:
            return Outcome.FULL
        enough = self.updates >= self.minimum
        if now_s >= self.deadline_at_s:
            return Outcome.DEADLINE if enough else Outcome.TOO_FEW
        if not self.open:
            return self._when_all_are_through(self.updates)
        return None

    def next_check_s(self) -> float:
        if self._full_at_s is None:
            return self.deadline_at_s
        return min(self.deadline_at_s, self._full_at_s + self._grace_s)


class BaseGone(ValueError):
    """The model that an update was trained from is no longer kept."""


class Bases:
    """Brings stale updates to the newest model, and keeps the models that this needs."""

    def __init__(self, settings: AsynchronousSettings, codec: Codec, dim: int) -> None:
        """``codec``: of the updates.

        Raises:
            ConfigError: there is no memory for the newest model and one before, and the codec needs them.
        """
        self._settings = settings
        self._needed = codec.version == 1 and not codec.v1_is_delta
        self._models: dict[int, Tensor] = {}  # by the round that starts from it, ascending
        model_bytes = 4 * dim
        room = settings.bases_bytes // max(1, model_bytes) - 1  # one is for the newest, which will be needed as well
        self._most = max(0, min(settings.max_staleness, room)) if self._needed else 0
        if self._needed and settings.max_staleness and not self._most:
            raise ConfigError(
                f"federated.asynchronous.bases_bytes={settings.bases_bytes:,} has no room for two models of "
                f"{model_bytes:,} bytes, the newest and one before, and version 1 of codec {codec.name} sends weights, "
                f"for which the base is needed. Raise it, or set federated.codec.version=2"
            )

    def keep(self, round_id: int, base: Tensor) -> None:
        """Keep a copy of the model that this round starts from, float32, shape (D,), and of as many before as fit."""
        if not self._needed or not self._most:
            return
        for old in sorted(self._models.keys() - {round_id})[: -self._most]:
            del self._models[old]  # before another is made: the bound holds at every moment
        self._models[round_id] = base.clone()

    def brought(self, update: Parsed, round_id: int, staleness: int) -> Parsed:
        """The update, trained from the base of ``round_id``, as it counts ``staleness`` rounds later.

        Raises:
            BaseGone: its base is needed, and not kept any more, or too old by now.
        """
        if not staleness:
            return update
        if staleness > self._settings.max_staleness:
            raise BaseGone(f"its model is {staleness} rounds old by now")
        base = self._models.get(round_id)
        if base is None and not (update.is_delta or update.is_sparse):
            raise BaseGone(
                f"the model before round {round_id} is no longer kept: see federated.asynchronous.bases_bytes"
            )
        factor = staleness_factor(staleness, self._settings.staleness_power)

        def scaled(block_elems: int) -> Iterator[Block]:
            blocks = update.blocks(block_elems) if base is None else differences(update, base, block_elems)
            for block in blocks:
                yield dataclasses.replace(block, values=block.values * factor)

        return update.replaced(scaled, is_sparse=update.is_sparse)


def check_asynchronous(config: FederatedConfig, strategy: Strategy) -> None:
    """Raises ConfigError: this strategy cannot take what comes in asynchronous rounds."""
    if config.mode == "asynchronous" and strategy.sections:
        raise ConfigError(
            f"federated.strategy: {config.strategy.name} takes {', '.join(strategy.sections)} beside the model, which "
            f"cannot be brought to a newer one. Use federated.mode=synchronous"
        )
    if config.mode == "asynchronous" and config.asynchronous.repeats and not strategy.takes_repeats:
        raise ConfigError(
            f"federated.strategy: {config.strategy.name} gives each client one vote, and with "
            f"federated.asynchronous.repeats a fast one would have several. Set it to false"
        )
