"""Random schedules, in virtual time, over the parts that decide: members, gathering, rounds, and the exact sum.

A controller made of those parts, with clients that come, die, come back, answer late, twice, or with what belongs to
another round, in whatever order hypothesis thinks of. ``SCHEDULES=2000`` in the environment tries more of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gradbus import codecs
from gradbus.actors.aggregation.exact_sum import ExactMean
from gradbus.actors.federated.controller.clients import ClientRegistry, ExpectedModel, HelloAnswer
from gradbus.actors.federated.controller.rounds import Outcome, Round, RoundRules
from gradbus.actors.federated.controller.selection import StartCondition, StartTrouble
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.wire.control import PROTOCOL, Hello
from gradbus.runtime.wire.messages import Identity

DIM, CLIENTS, LAYOUT = 6, 4, 99
DEAD_AFTER_S, HEARTBEAT_S, DEADLINE_S, GRACE_S = 2.5, 0.5, 6.0, 1.0
who = st.integers(0, CLIENTS - 1)
some = st.just(set(range(CLIENTS))) | st.sets(who, min_size=2)


@dataclass
class Sim:
    """A client as it is: alive or not, which start of it, and what the controller has told it."""

    incarnation: int = 1
    alive: bool = False
    session: int = 0
    next_round: int = -1
    said: list[Hello] = field(default_factory=list)


@dataclass
class Durable:
    """What a controller that dies leaves on the disk."""

    round_id: int = 0
    weights: np.ndarray[tuple[int], np.dtype[np.float32]] = field(default_factory=lambda: np.zeros(DIM, dtype="f4"))


def delta(client_id: int, round_id: int, incarnation: int) -> torch.Tensor:
    """What a client learns in a round; another start of it learns something else."""
    generator = torch.Generator().manual_seed(client_id + 10 * round_id + 1000 * incarnation)
    return torch.randn(DIM, generator=generator)


class Schedules(RuleBasedStateMachine):
    """The controller's script, a step at a time; clients and the network do what they like in between."""

    @initialize(minimum=st.integers(1, 3), quorum=st.sampled_from([0.5, 0.75, 1.0]))
    def begin(self, minimum: int, quorum: float) -> None:
        self.now_s = 0.0
        self.minimum, self.quorum = minimum, quorum
        self.clients = [Sim(alive=True) for _ in range(CLIENTS)]
        self.disk = Durable()
        self.committed: dict[int, bytes] = {}
        self.fp32 = codecs.get("fp32")
        self.session = 0
        self.start_controller()
        self.words_arrive(set(range(CLIENTS)))

    # The controller

    def start_controller(self) -> None:
        self.session += 1
        self.members = ClientRegistry(
            ExpectedModel(DIM, LAYOUT),
            session=self.session,
            dead_after_s=DEAD_AFTER_S,
            duplicate_after_s=2.4 * HEARTBEAT_S,
        )
        self.weights = self.disk.weights.copy()
        self.round_id = self.disk.round_id
        self.round: Round | None = None
        self.mean = ExactMean(DIM)
        self.counted: dict[int, tuple[int, int]] = {}  # client -> incarnation and samples, of the open round
        self.carried: set[int] = set()
        self.gathering: StartCondition | None = None

    def controller_dies_and_comes_back(self) -> None:
        before = self.disk.round_id
        self.start_controller()
        assert self.round_id == before  # I4

    def controller_looks(self, dies_before_commit: bool) -> None:
        """It wakes up with every event."""
        if self.round is None:
            self.try_to_begin_a_round()
        else:
            self.look_whether_the_round_is_over(dies_before_commit)

    def try_to_begin_a_round(self) -> None:
        ready = self.members.ready(self.round_id + 1)
        if self.gathering is None:
            self.gathering = StartCondition(
                minimum=self.minimum,
                expected=range(CLIENTS),
                now_s=self.now_s,
                timeout_s=30.0,
                grace_s=GRACE_S,
                describe=lambda: StartTrouble("x"),
            )
        try:
            may_start = self.gathering.may_start(sorted({*self.carried, *ready}), self.now_s)
        except BarrierTimeout:
            self.gathering = None
            return
        if not may_start:
            assert self.gathering.next_check_s() >= self.now_s or len(ready) < self.minimum
            return
        self.gathering = None
        if not self.carried:
            self.mean.reset()
            self.counted.clear()
        rules = RoundRules(minimum=self.minimum, quorum=self.quorum, deadline_s=DEADLINE_S, grace_s=GRACE_S)
        self.round = Round(
            self.round_id + 1,
            ready,
            rules,
            now_s=self.now_s,
            accepted=self.carried,
            silent=self.members.silent_ids(self.round_id + 1),
        )

    def look_whether_the_round_is_over(self, dies_before_commit: bool) -> None:
        round_ = self.round
        assert round_ is not None
        outcome = round_.verdict(self.now_s)
        if outcome is None:
            assert round_.next_check_s() > self.now_s  # it cannot hang: something will be looked at again
            assert round_.open
            return
        self.round = None
        if outcome is Outcome.TOO_FEW:
            assert len(round_.accepted) < self.minimum
            self.carried = set(round_.accepted)
            self.members.let_into(round_.round_id)
            return
        assert len(round_.accepted) >= self.minimum
        self.finish(round_)
        if dies_before_commit:
            self.start_controller()  # as if the round had never been
            return
        self.disk = Durable(round_.round_id, self.weights.copy())
        assert round_.round_id == max(self.committed, default=0) + 1  # I2
        self.committed[round_.round_id] = self.weights.tobytes()
        self.round_id, self.carried = round_.round_id, set()

    def finish(self, round_: Round) -> None:
        assert set(self.counted) == round_.accepted  # I1
        reference = np.zeros(DIM, dtype=np.int64)
        for client_id, (incarnation, samples) in sorted(self.counted.items()):
            learnt = delta(client_id, round_.round_id, incarnation).numpy().astype("f8")
            reference += np.rint(learnt * (samples * 2.0**30)).astype(np.int64)
        total = sum(samples for _, samples in self.counted.values())
        expected = (reference.astype("f8") * (1.0 / (total * 2.0**30)) + self.weights).astype("f4")
        for place, piece in self.mean.blocks():
            self.weights[place] = (piece.numpy() + self.weights[place]).astype("f4")
        assert self.weights.tobytes() == expected.tobytes()  # I3

    def gone(self, client_id: int) -> None:
        """As the controller does when its table has changed."""
        if self.round is not None:
            round_id = self.round.round_id
            lost, found = self.round.follow_clients(
                self.members.taking_part(round_id), self.members.silent_ids(round_id)
            )
            assert not set(lost) & set(found)

    # Clients, and what the network brings of them

    @rule(client_id=who, what=st.sampled_from(["dies", "dies unseen", "starts", "fails", "controller"]))
    def something_breaks(self, client_id: int, what: str) -> None:
        match what:
            case "starts":
                self.client_starts(client_id)
            case "fails":
                self.training_fails(client_id)
            case "controller":
                self.controller_dies_and_comes_back()
            case _:
                self.client_dies(client_id)
                if what == "dies":
                    self.its_death_is_noticed(client_id)

    def client_starts(self, client_id: int) -> None:
        sim = self.clients[client_id]
        if not sim.alive:
            self.clients[client_id] = Sim(sim.incarnation + 1, alive=True)

    def client_dies(self, client_id: int) -> None:
        self.clients[client_id].alive = False

    def its_death_is_noticed(self, client_id: int) -> None:
        sim = self.clients[client_id]
        if not sim.alive and self.members.remove(client_id, sim.incarnation):
            self.gone(client_id)

    @rule(clients=some)
    def words_arrive(self, clients: set[int]) -> None:
        """Those that live say Hello, hear the answer, and say Hello again: now they are ready."""
        for client_id in clients:
            for _ in range(2):
                self.hello(client_id)
        self.controller_looks(False)

    def hello(self, client_id: int) -> None:
        sim = self.clients[client_id]
        if not sim.alive:
            return
        ready = sim.session == self.session
        hello = Hello(PROTOCOL, DIM, LAYOUT, ready, sim.session, "idle", -1, -1, "here:1", sim.next_round)
        next_round = (self.round.round_id if self.round is not None else self.round_id) + 1
        sim.said.append(hello)
        sender = Identity(client_id, sim.incarnation)
        answer, _ = self.members.answer_hello(sender, hello, len(sim.said), now_s=self.now_s, next_round=next_round)
        self.gone(client_id)  # of an older start of it
        member = self.members.get(client_id, sim.incarnation)
        if answer is HelloAnswer.WELCOME:
            assert member is not None
            sim.session, sim.next_round = self.session, member.from_round

    @rule(client_id=who, nth=st.integers(1, 4))
    def a_word_arrives_that_a_later_one_has_overtaken(self, client_id: int, nth: int) -> None:
        sim = self.clients[client_id]
        known = self.members.get(client_id, sim.incarnation)
        if known is not None:
            known.observe(self.now_s)
        if known is not None and nth < len(sim.said):
            self.gone(client_id)  # or rather found again: any word shows that it lives, and this one nothing else
            ready = self.members.ready(self.round_id + 1)
            sender = Identity(client_id, sim.incarnation)
            answer = self.members.answer_hello(
                sender, sim.said[nth - 1], nth, now_s=self.now_s, next_round=self.round_id + 2
            )
            assert answer == (HelloAnswer.NOTHING, "")
            assert self.members.ready(self.round_id + 1) == ready

    @precondition(lambda self: self.round is not None)
    @rule(clients=some, samples=st.integers(1, 1000))
    def updates_arrive(self, clients: set[int], samples: int) -> None:
        """As they should."""
        for client_id in clients:
            self.update(client_id, 0, False, samples + client_id, 1)
        self.controller_looks(self.now_s % 3 > 2.4)  # now and then it dies at the worst moment

    @rule(
        client_id=who,
        round_offset=st.integers(-1, 1),
        older=st.booleans(),
        samples=st.integers(1, 1000),
        times=st.integers(1, 2),
    )
    def update(self, client_id: int, round_offset: int, older: bool, samples: int, times: int) -> None:
        """Late, early, twice, or of a start that is dead: it counts where it may, and once."""
        incarnation = self.clients[client_id].incarnation - older
        for _ in range(times):
            round_ = self.round
            known = self.members.get(client_id, incarnation)
            if round_ is None or known is None:
                continue
            known.observe(self.now_s)
            self.gone(client_id)  # or rather found again, if it was silent
            if self.round_id + 1 + round_offset != round_.round_id or round_.may_send(client_id) is not None:
                continue
            payload = self.fp32.encode(delta(client_id, round_.round_id, incarnation))
            parsed = codecs.parse(bytearray(payload), expected_dim=DIM)
            self.mean.add(parsed, base=torch.from_numpy(self.weights), num_samples=samples)
            assert client_id not in self.counted
            self.counted[client_id] = (incarnation, samples)
            round_.accept(client_id, self.now_s)
            assert round_.may_send(client_id) == "repeated"

    def training_fails(self, client_id: int) -> None:
        if self.round is not None:
            self.round.fail(client_id, "training failed")

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.5, 3.0, 10.0]), clients=some)
    def time_passes(self, seconds: float, clients: set[int]) -> None:
        self.now_s += seconds
        self.words_arrive(clients)  # in the meantime
        for member in self.members.mark_silent(self.now_s):
            assert self.now_s - member.seen_s > DEAD_AFTER_S
            self.gone(member.client_id)

    # Always

    @invariant()
    def what_is_on_the_disk_is_what_was_committed_last(self) -> None:
        if hasattr(self, "disk"):
            assert self.disk.round_id == max(self.committed, default=0)
            assert self.committed.get(self.disk.round_id, self.disk.weights.tobytes()) == self.disk.weights.tobytes()

    @invariant()
    def nobody_is_waited_for_who_is_not_there(self) -> None:
        if getattr(self, "round", None) is not None:
            assert self.round is not None
            assert self.round.open <= self.members.taking_part(self.round.round_id)
            assert self.round.accepted == set(self.counted)


TestSchedules = pytest.mark.faults(Schedules.TestCase)
TestSchedules.settings = settings(
    max_examples=int(os.environ.get("SCHEDULES", "150")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
