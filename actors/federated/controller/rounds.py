"""One round as a pure object: events in, verdicts out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from gradbus.actors.aggregation.sum_summary import SumSummary, exact_parts, merged, ranges_of
from gradbus.actors.federated.protocol import FAILURES, PAUSED, SAT_OUT, TRAINING_FAILED
from gradbus.runtime.wire.control import MAX_METRICS, UploadRequest

CLIENT_LOST = "client lost"
CLIENT_SILENT = "client silent"
REPEATED = "repeated"  # why an update of a client that counts already does not
UNMASKED = "not unmasked"  # why nothing of an attempt counts, with secure aggregation
SURPLUS = "not needed any more"  # enough others were faster
STALE = "stale"  # its model is too old, or the round is not open


class Outcome(Enum):
    """Why a round is over."""

    ALL = "all live clients answered"
    SOME_FAILED = "all live clients answered or failed"
    QUORUM = "quorum and grace"
    ENOUGH = "enough updates"
    FULL = "buffer full"
    DEADLINE = "deadline"
    NOTHING = "no client had anything to train"
    GIVEN_UP = (
        "given up, as a client broke the protocol"  # with secure aggregation, when it was too late for another sum
    )
    TOO_FEW = "too few updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """When a round is over.

    Attributes:
        minimum: updates that suffice at the deadline.
        quorum: share of the clients expected at the start that suffices after the grace.
        deadline_s: how long it may take. grace_s: what follows the quorum.
        enough: updates that end it at once, where more clients were asked; None: all that were asked are waited for.
    """

    minimum: int
    quorum: float
    deadline_s: float
    grace_s: float
    enough: int | None = None


class Round:
    """The expected and accepted clients of a round, and whether it is over.

    It is over when all expected live clients have answered, when the quorum has been there for ``grace_s``, or at the
    deadline, where ``minimum`` updates suffice. With fewer it has failed, or once no client is left that could answer;
    unless all of them, ``minimum`` or more, have had nothing to train.

    Attributes:
        asked: clients that were asked at the start. answered_s: from the opening to the last update that counted.
    """

    def __init__(
        self,
        round_id: int,
        expected: Iterable[int],
        rules: RoundRules,
        *,
        now_s: float,
        accepted: Iterable[int] = (),
        silent: Iterable[int] = (),
    ) -> None:
        """Open the round at ``now_s``.

        Args:
            expected: ids of the clients that take part.
            accepted: clients whose updates count already, from an earlier attempt at the same round.
            silent: live clients that are expected only once they send something.
        """
        self.round_id = round_id
        self.accepted = set(accepted)
        self.expected = set(expected) | self.accepted
        self.minimum = rules.minimum
        self.failed: dict[int, str] = {}
        self.asked = frozenset(self.expected)
        self.silent = set(silent) - self.expected
        self._enough = rules.enough
        # 0.55 * 100 is 55.00000000000001, and 55 of 100 are that share.
        share = math.ceil(rules.quorum * (rules.enough or len(self.expected)) - 1e-9)
        self._quorum = max(rules.minimum, share)
        self._grace_s = rules.grace_s
        self._quorum_at_s: float | None = None
        self._offered_at_s: float | None = None
        self.answered_s = 0.0
        self.opened_at_s = now_s
        self.deadline_at_s = now_s + rules.deadline_s

    @property
    def open(self) -> set[int]:
        """Clients whose answer is still to come."""
        return self.expected - self.accepted - self.failed.keys()

    @property
    def ready(self) -> int:
        """Updates that count so far."""
        return len(self.accepted)

    @property
    def is_full(self) -> bool:
        """Whether no further update is taken, though more may come."""
        return self._enough is not None and len(self.accepted) >= self._enough

    def staleness(self, round_id: int) -> int:
        """Return how many models the base of an update for ``round_id`` is behind that of this round; negative:
        ahead."""
        return 0 if round_id == self.round_id else -1

    @property
    def needed(self) -> int:
        """Number of updates that can still count: the X of "ready=n/X"."""
        can_count = len(self.expected - self.failed.keys())
        return can_count if self._enough is None else min(can_count, self._enough)

    @property
    def wanted(self) -> int:
        """Number of updates that the round would have had with everybody's help."""
        return len(self.expected) if self._enough is None else min(self._enough, len(self.expected))

    def may_send(self, client_id: int) -> str | None:
        """None if an update of this client would count, else the reason why not."""
        if client_id in self.accepted:
            return REPEATED
        if client_id not in self.expected:
            return "not expected"
        if self.is_full:
            return SURPLUS
        # A reported failure may be of the attempt before: an update outweighs it.
        return "failed" if self.failed.get(client_id, TRAINING_FAILED) not in (*FAILURES, SAT_OUT, PAUSED) else None

    def accept(self, client_id: int, now_s: float) -> None:
        """An update counts, also if its client was lost or failed while it was being added."""
        self.expected.add(client_id)
        self.failed.pop(client_id, None)
        self.accepted.add(client_id)
        self.answered_s = now_s - self.opened_at_s
        if len(self.accepted) >= self._quorum and self._quorum_at_s is None:
            self._quorum_at_s = now_s

    def lose(self, client_id: int) -> None:
        """The client is dead or has left, and not expected any more. An update that counts goes on counting."""
        if client_id not in self.accepted:
            self.expected.discard(client_id)
            self.failed.pop(client_id, None)

    def follow_clients(self, present: Collection[int], silent: Collection[int]) -> tuple[list[int], list[int]]:
        """Follow the registry. Clients that are no longer ``present`` are lost, ``silent`` ones until they send again.

        Returns:
            Those that were lost, and those that were found again, both ascending.
        """
        lost = sorted(self.open - set(present))
        for client_id in lost:
            self.lose(client_id)
            if client_id in silent:
                self.silent.add(client_id)
        found = sorted(self.silent.intersection(present) - set(silent) - self.accepted)
        self.silent.difference_update(found)
        self.expected.update(found)
        return lost, found

    def fail(self, client_id: int, reason: str) -> None:
        """The client is alive, but will not answer in this round."""
        if client_id in self.open or self.failed.get(client_id) in FAILURES:  # that one may still send
            self.failed[client_id] = reason

    def require(self, minimum: int) -> None:
        """No fewer updates than these suffice, at no end."""
        self.minimum = max(self.minimum, minimum)
        self._quorum = max(self._quorum, minimum)
        self._enough = None if self._enough is None else max(self._enough, minimum)

    @property
    def lacks_only_paused(self) -> bool:
        """Return whether no update is missing but those of clients that have paused, at least one."""
        missing = {self.failed.get(client_id) for client_id in self.expected - self.accepted}
        return PAUSED in missing and missing <= {PAUSED, SAT_OUT}

    def fail_all(self, reason: str) -> None:
        """No update counts, not even those that did: the round has failed."""
        for client_id in self.expected - self.failed.keys():
            self.failed[client_id] = reason
        self.accepted.clear()

    def without_enough(self) -> Outcome:
        """Why it is over when all have answered, and too few updates count."""
        have_sat_out = not self.accepted and set(self.failed.values()) == {SAT_OUT}
        return Outcome.NOTHING if have_sat_out and len(self.failed) >= self.minimum else Outcome.TOO_FEW

    def verdict(self, now_s: float) -> Outcome | None:
        """Why the round is over at this time; None while it goes on."""
        if not self.open:
            return self._when_all_are_through(len(self.accepted))
        if self.is_full:
            return Outcome.ENOUGH
        if self._quorum_at_s is not None and now_s >= self._quorum_at_s + self._grace_s:
            return Outcome.QUORUM
        if now_s >= self.deadline_at_s:
            return Outcome.DEADLINE if len(self.accepted) >= self.minimum else Outcome.TOO_FEW
        return None

    def _when_all_are_through(self, updates: int) -> Outcome:
        """Why the round is over once no client is left that could answer, with so many updates."""
        if updates < self.minimum:
            return self.without_enough()
        return Outcome.SOME_FAILED if set(self.failed.values()) - {SAT_OUT, PAUSED} else Outcome.ALL

    def time_at_s(self, share: float) -> float:
        """The time at which this share of the round's is over."""
        return self.opened_at_s + share * (self.deadline_at_s - self.opened_at_s)

    @property
    def fewest_clients(self) -> int:
        """Number of clients below which what they announce decides nothing: with fewer the round fails anyway."""
        return self.minimum

    @property
    def fewest_requests(self) -> int:
        """Requests with fewer than which :meth:`has_enough_requests` is false in the first half of the round."""
        left = len(self.expected) - len(self.accepted) - len(self.failed)
        quorum = self._quorum if self._enough is None else min(self._quorum, self._enough)
        return min(left, quorum - len(self.accepted))

    def has_enough_requests(self, offered: Collection[int], now_s: float) -> bool:
        """Whether updates that are held need wait for no further requests: all expected clients have requested an
        upload, or the quorum has for the grace, or half of the time is over."""
        if self._offered_at_s is None and len(self.accepted.union(offered)) >= self._quorum:
            self._offered_at_s = now_s
        if self._offered_at_s is not None and now_s >= self._offered_at_s + self._grace_s:
            return True
        if self._enough is not None and len(self.accepted.union(offered)) >= self._enough:
            return True
        return self.open <= set(offered) or now_s >= self.time_at_s(0.5)

    def next_check_s(self) -> float:
        """The time at which the verdict may change without an event."""
        if self._quorum_at_s is None:
            return self.deadline_at_s
        return min(self.deadline_at_s, self._quorum_at_s + self._grace_s)


MAX_NAMES = 4 * MAX_METRICS  # of metrics of trainings that a round keeps until it is over


@dataclass(slots=True)
class RoundTotals:
    """Sums over the updates that count. ``bytes_up_shared``: of those that were read in shared memory."""

    bytes_up: int = 0
    bytes_up_shared: int = 0
    num_samples: int = 0
    speeds: dict[int, float] = field(default_factory=dict)  # steps a second, of each client
    loss_of: dict[int, float] = field(default_factory=dict)  # mean training loss, of each client
    staleness: list[int] = field(default_factory=list)  # of each update
    samples: dict[int, int] = field(default_factory=dict)  # of each client, as it announced them
    losses: list[tuple[int, float]] = field(default_factory=list)  # (samples, mean loss)
    # Of each metric of the training: floats with the sum of samples times value, these samples, and how many clients
    # announced it. A mapping for each client would grow with their number.
    metrics: dict[str, tuple[list[float], int, int]] = field(default_factory=dict)
    sums: dict[int, SumSummary] = field(default_factory=dict)  # of each site: what it has reported of its clients
    train_s: float = 0.0
    encode_s: float = 0.0
    aggregate_s: float = 0.0

    def count(
        self,
        client_id: int,
        request: UploadRequest,
        weight: int,
        *,
        from_memory: bool,
        partial: SumSummary | None = None,
        staleness: int = 0,
    ) -> None:
        """Add an update that counts with this weight. ``partial``: it is the sum of a site."""
        self.staleness.append(staleness)
        if request.train_s > 0:  # the quotient may be infinite
            self.speeds[client_id] = request.steps / request.train_s
        self.bytes_up += request.total_bytes
        self.bytes_up_shared += request.total_bytes * from_memory
        self.num_samples += request.num_samples
        self.samples[client_id] = request.num_samples
        if partial is None:
            self.loss_of[client_id] = request.loss
            self.losses.append((weight, request.loss))
            self._add_metrics(weight, request.metrics)
        else:
            self.sums[client_id] = partial
        self.train_s = max(self.train_s, request.train_s)
        self.encode_s = max(self.encode_s, request.encode_s)

    def add_aggregation(self, seconds: float) -> None:
        """Count the time that one update took to be added."""
        self.aggregate_s += seconds

    def loss(self) -> float | None:
        """Mean training loss, weighted by samples, summed in an order that does not depend on arrival."""
        addends, total = self._loss_addends()
        return math.fsum(addends) / total if total else None

    def _add_metrics(self, samples: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a training."""
        for name, value in metrics.items():
            if abs(value) < 1e100 and (name in self.metrics or len(self.metrics) < MAX_NAMES):
                parts, total, clients = self.metrics.get(name, ([], 0, 0))
                self.metrics[name] = exact_parts([*parts, samples * value]), total + samples, clients + 1

    def mean_metrics(self) -> dict[str, float]:
        """Return the mean of each metric of the training over the clients that announced it, as :meth:`loss`, by name:
        of as many as one update may have, those of most clients, so that one client with names of its own hides none.
        Sums of sites have none."""
        most = sorted(self.metrics.items(), key=lambda item: (-item[1][2], item[0]))[:MAX_METRICS]
        return {name: math.fsum(parts) / total for name, (parts, total, _) in sorted(most) if total}

    def loss_parts(self) -> tuple[list[float], int]:
        """The few floats whose exact sum is that of samples times loss over all clients, and the number of these
        samples."""
        addends, total = self._loss_addends()
        return exact_parts(addends), total

    def _loss_addends(self) -> tuple[list[float], int]:
        """Samples times loss of each client, those of sites in parts, and the number of these samples."""
        # Anything beyond is as good as none, and could overflow the sum; NaN is not below it either.
        known = [(samples, loss) for samples, loss in self.losses if abs(loss) < 1e100]
        total = sum(samples for samples, _ in known) + sum(partial.loss_samples for partial in self.sums.values())
        parts = [part for partial in self.sums.values() for part in partial.loss_parts]
        return [*parts, *(samples * loss for samples, loss in known)], total

    def clients(self) -> tuple[range, ...]:
        """Ids of all clients in the sum, those of sites included."""
        if not self.sums:
            return ranges_of(self.samples)
        return merged(each for partial in self.sums.values() for each in partial.clients)
