"""Whole runs with secure aggregation over real DDS, with all actors on one loop: the model has the bits of a plain run,
whoever drops out when, and on the bus there is nothing from which a single update could be had."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from masking_scene import Scene
from secure_runs import DIM, Moving, Observer, Run, delta_of, plain_weights, replace_masking, restarted
from structlog.testing import capture_logs
from torch import Tensor
from trees import DIM as TREE_DIM
from trees import UnequalTask, rules, site_of, tree

import gradbus
from gradbus.actors.aggregation.partial_sum import PartialSum
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.updates import Facts
from gradbus.actors.federated.client import updates_out
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.update_masks import ClientMasking, MaskingAttempt
from gradbus.actors.federated.controller.controller import ActiveRun
from gradbus.actors.federated.controller.masked_attempt import MaskedAttempt
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.secure_aggregation.keys import Attempt, Roster, TooFewMembers, commitment
from gradbus.actors.secure_aggregation.masked_values import MAGIC, size_of
from gradbus.actors.secure_aggregation.masking_client import MaskingClient
from gradbus.actors.secure_aggregation.shamir import SHARE_BYTES, Interpolation
from gradbus.models import NoopTask
from gradbus.models.task import TrainResult
from gradbus.runtime.errors import ConfigError, JoinRefused, RoundTimeout
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.transport.channels import ToClients
from gradbus.runtime.wire.control import (
    Hello,
    MaskAnswer,
    MaskRoster,
    MaskShares,
    MaskSurvivors,
    TrainingFailure,
    UploadRequest,
    Welcome,
)
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Control, Identity


@pytest.mark.parametrize("shared_memory", [True, False], ids=["in memory", "over DDS"])
def test_the_model_has_the_bits_of_a_run_without_secure_aggregation(shared_memory: bool) -> None:
    controller = Run(range(10), rounds=2, strategy="fedadam", shared_memory=shared_memory)()
    assert torch.equal(controller.weights, plain_weights(10, 2, "fedadam"))
    for report in controller.progress.reports:
        assert report.bytes_up == 10 * size_of(DIM)
        assert report.clients == tuple(range(10))
        assert all(client.update_norm is None for client in report.timeline), "norms of single updates"
        assert (report.attempt, report.loss, report.num_samples) == (1, 1.25, sum(20 + one for one in range(10)))
        assert bool(report.bytes_up_shared) is shared_memory


def test_messages_that_are_lost_are_sent_again() -> None:
    run = Run(range(3), clients={"num": 3, "heartbeat_s": 0.2})
    run.connect = functools.partial(
        run.connect,
        faults="drop round_terms nth=1; drop mask_roster nth=1; drop mask_shares nth=1; drop mask_survivors nth=1;"
        "drop mask_answer p=0.3 times=6; duplicate mask_answer p=0.3; seed=1",
    )
    controller = run()
    (report,) = controller.progress.reports
    assert (report.clients, report.attempt) == ((0, 1, 2), 1)
    assert torch.equal(controller.weights, plain_weights(3))


def test_no_update_is_refused_however_often_it_is_offered_before_the_sum_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updates_out, "REPEAT_AFTER_S", 0.001)
    add, added = FedAvg.add_masked, list[int]()

    def slowly(strategy: FedAvg, partial: PartialSum, facts: Sequence[Facts]) -> None:
        added.append(len(facts))
        time.sleep(0.05)
        add(strategy, partial, facts)

    monkeypatch.setattr(FedAvg, "add_masked", slowly)
    controller = Run(range(4), rounds=2)()
    assert added == [4, 4]
    for report in controller.progress.reports:
        assert (report.clients, report.dropped) == ((0, 1, 2, 3), {})
    assert torch.equal(controller.weights, plain_weights(4, 2))


@pytest.mark.parametrize("phase", [0, 1, 2, 3])
def test_where_three_of_ten_drop_out_the_model_is_that_of_the_plain_sum_of_those_whose_updates_came(phase: int) -> None:
    controller = Run(range(10), quits=dict.fromkeys((7, 8, 9), phase))()
    (report,) = controller.progress.reports
    count = 10 if phase == 3 else 7  # those who drop out in the last one are in the sum already
    assert (report.clients, report.attempt) == (tuple(range(count)), 1)
    assert torch.equal(controller.weights, plain_weights(count))


@pytest.mark.parametrize("phase", [2, 3])
def test_after_an_attempt_with_too_few_nothing_of_it_counts_and_the_next_one_masks_the_same_updates_anew(
    phase: int,
) -> None:
    run = Run(range(5), quits={3: phase, 4: phase}, secure_aggregation={"threshold": 0.75})
    controller = run()
    (report,) = controller.progress.reports
    assert (report.clients, report.attempt) == ((0, 1, 2), 2)
    assert torch.equal(controller.weights, plain_weights(3))
    assert sorted(run.task.trained) == [(one, 1) for one in range(5)], "nobody trains twice for a round"


def test_fewer_than_the_threshold_end_the_run_with_a_clear_error_and_nobody_is_asked_for_shares() -> None:
    run = Run(range(4), quits={2: 2, 3: 2}, round={"max_attempts": 1})
    observer = Observer(run)
    with pytest.raises(
        RoundTimeout, match=r"2 updates where 3 .* 2 masked updates have come, the threshold is 3. Nothing was revealed"
    ):
        run()
    assert observer.all(MaskAnswer, 1)
    assert not observer.all(MaskSurvivors)
    assert not observer.all(MaskAnswer, 3)


@pytest.mark.parametrize(
    ("phase", "left", "reason"),
    [(0, 1, "1 clients have advertised keys, the threshold is 2"), (1, 2, "2 clients have shared their secrets")],
)
def test_too_few_clients_with_keys_or_shares_end_the_run_with_the_reason(phase: int, left: int, reason: str) -> None:
    quits = dict.fromkeys(range(left, 4), phase)
    with pytest.raises(RoundTimeout, match=f"{reason}.*Nothing was revealed"):
        Run(range(4), quits=quits, round={"max_attempts": 1})()


def plain_bytes(client_id: int, round_id: int) -> list[bytes]:
    """Pieces of an update as no Controller may see them: float32, and integers of each width, from its middle."""
    delta, at = delta_of(client_id, round_id), slice(DIM // 2, DIM // 2 + 8)
    integers = np.rint(delta.double().numpy() * (20 + client_id) * 2.0**30).astype("<i8")
    planes = integers.view("<u4")[::2][at], integers.view("<u2")[2::4][at]
    return [delta.numpy()[at].tobytes(), integers[at].tobytes(), planes[0].tobytes()]


@pytest.mark.parametrize("seed", range(3))
def test_on_the_bus_is_no_update_and_never_both_shares_of_a_client_whoever_drops_out(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = np.random.default_rng(seed)
    quits = {int(one): int(drawn.integers(4)) for one in drawn.choice(9, 2, replace=False)}
    run = Run(range(9), quits=quits, shared_memory=False, rounds=2)
    asked = min(set(range(9)) - set(quits))

    def ask_otherwise(bus: Any, message: Control) -> None:
        """A Controller that asks one client, in its own name, for other survivors before the sum is made."""
        body = message.body
        if isinstance(body, UploadRequest) and message.sender == asked and body.round_id not in forged:
            terms = observer.all(MaskShares)[-1][1]
            forged[body.round_id] = terms.senders[:6]
            other = MaskSurvivors(body.run_id, body.round_id, body.attempt, terms.senders[:6])
            session = next(one.incarnation for one in observer.controls if one.sender == CONTROLLER)
            tasks.append(asyncio.ensure_future(bus.publish(Identity(CONTROLLER, session), other)))

    on_request = ClientMasking.on_request

    def on_one_alone(own: ClientMasking, request: Any, welcome: Welcome, *arguments: Any) -> None:
        is_forged = isinstance(request, MaskSurvivors) and request.clients == forged.get(request.round_id)
        if not is_forged or welcome.to == asked:  # to the others the other question is lost
            on_request(own, request, welcome, *arguments)

    monkeypatch.setattr(ClientMasking, "on_request", on_one_alone)
    forged: dict[int, list[int]] = {}
    tasks: list[Any] = []
    observer = Observer(run, ask_otherwise)
    with capture_logs() as lines:
        run()
    refused = {
        line["client"]
        for line in lines
        if line["event"] == "no part in this attempt"
        and any(why in line.get("reason", "") for why in ("second set of survivors", "would show"))
    }
    assert refused == {asked}, "the other question has not arrived"
    assert len(observer.frames) >= 5
    seen = b"".join([*observer.frames, *(one.body.data for one, _ in observer.all(MaskAnswer))])
    for client_id, round_id in itertools.product(range(9), (1, 2)):
        for piece in plain_bytes(client_id, round_id):
            assert piece not in seen
    check_shares(run.job, observer, asked)


def test_in_shared_memory_is_no_update_either(monkeypatch: pytest.MonkeyPatch) -> None:
    put, seen = PayloadMemory.put, list[bytes]()

    def noted(memory: PayloadMemory, *parts: Any) -> Any:
        if (sealed := put(memory, *parts)) is not None:
            seen.extend(bytes(part) for part in parts)
        return sealed

    monkeypatch.setattr(PayloadMemory, "put", noted)
    controller = Run(range(3))()
    assert controller.progress.reports[0].bytes_up_shared
    masked = [one for one in seen if one.startswith(MAGIC)]
    assert len(masked) == 3
    for client_id in range(3):
        assert not any(piece in b"".join(seen) for piece in plain_bytes(client_id, 1))
    Run(range(2), secure=False)()
    assert all(any(plain_bytes(client_id, 1)[0] in one for one in seen) for client_id in range(2))


def test_without_secure_aggregation_the_same_pieces_of_updates_would_be_found_on_the_bus() -> None:
    observer = Observer(run := Run(range(2), secure=False, shared_memory=False))
    run()
    seen = b"".join(observer.frames)
    assert all(plain_bytes(client_id, 1)[0] in seen for client_id in range(2))


def check_shares(job: str, observer: Observer, asked: int) -> None:
    """Of no client both kinds of shares were revealed, by anybody, in an attempt; and what was revealed is what it
    should be: with the threshold of them, the seeds of survivors, and the keys of those that dropped out. ``asked``:
    this client may have answered another question."""
    rosters = {
        (body.round_id, body.attempt): Roster.parse(
            Attempt(job, body.run_id, one.incarnation, body.round_id, body.attempt),
            body.threshold,
            body.members,
            body.cap,
        )
        for one, body in observer.all(MaskRoster)
    }
    senders = {(body.round_id, body.attempt): body.senders for _, body in observer.all(MaskShares)}
    answers: dict[tuple[int, int], dict[int, set[bytes]]] = defaultdict(lambda: defaultdict(set))
    for one, body in observer.all(MaskAnswer, 3):
        answers[body.round_id, body.attempt][one.sender].add(body.data)
    assert answers
    for name, by_client in answers.items():
        assert all(len(different) == 1 for different in by_client.values()), "a client has answered two questions"
        roster = rosters[name]
        for place, sender in enumerate(senders[name]):
            revealed = {
                client_id: next(iter(data))[SHARE_BYTES * place :][:SHARE_BYTES]
                for client_id, data in by_client.items()
                if client_id != asked
            }
            chosen = sorted(revealed)[: roster.threshold]
            secret = Interpolation([roster.points[one] for one in chosen]).secret(
                {roster.points[one]: revealed[one] for one in chosen}
            )
            member = roster.entry_of(sender)
            is_seed = commitment(secret) == member.commitment
            is_key = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == member.masking
            assert is_seed != is_key


def test_a_controller_that_is_started_again_in_mid_round_makes_new_keys_and_comes_to_the_same_model(
    tmp_path: Path,
) -> None:
    run = Run(range(4), checkpoint={"dir": tmp_path})
    observer = Observer(run)
    restarted(run)
    controller = run()
    assert torch.equal(controller.weights, plain_weights(4))
    keys = {(one.sender, body.data) for one, body in observer.all(MaskAnswer, 0)}
    assert len(keys) == 8, "each client has advertised keys of its own to each start of the Controller"
    by_session = {one.incarnation for one, _ in observer.all(MaskRoster)}
    assert len(by_session) == 2


@pytest.mark.parametrize("phase", [0, 1, 2, 3])
def test_a_controller_may_end_in_any_phase_with_two_clients_lost_in_it_as_well(phase: int, tmp_path: Path) -> None:
    run = Run(
        range(5),
        quits={3: phase, 4: phase},
        checkpoint={"dir": tmp_path},
        clients={"num": 5, "min": 3},
        secure_aggregation={"threshold": 0.6},
    )
    restarted(run, phase, grace_s=0.0)
    controller = run()
    (report,) = controller.progress.reports
    assert report.clients == (0, 1, 2)
    assert torch.equal(controller.weights, plain_weights(3))


def test_the_sum_without_one_client_is_not_unmasked_after_that_with_it(tmp_path: Path) -> None:
    run = Run(
        range(4),
        checkpoint={"dir": tmp_path},
        clients={"num": 4, "min": 3},
        round={"max_attempts": 1},
        secure_aggregation={"unmask_timeout_s": 0.6},
    )
    tasks: list[asyncio.Task[None]] = []
    one_client = run.one_client

    async def noted(client_id: int) -> None:
        tasks.append(running := asyncio.ensure_future(one_client(client_id)))
        run.quits.update({client_id: -1} if client_id == 3 else {})
        await asyncio.wait([running])

    run.one_client = noted  # type: ignore[method-assign]
    restarted(run, meanwhile=lambda: tasks[3].cancel(), grace_s=0.0)
    observer = Observer(run)
    with pytest.raises(RoundTimeout, match=r"0 clients have sent their shares to unmask.* The sum was not made"):
        run()
    asked = [body.clients for _, body in observer.all(MaskSurvivors)]
    assert [0, 1, 2, 3] in asked
    assert [0, 1, 2] in asked
    (session,) = {one.incarnation for one, body in observer.all(MaskSurvivors) if body.clients == [0, 1, 2]}
    first = next(place for place, one in enumerate(observer.controls) if one.incarnation == session)
    assert not any(getattr(one.body, "phase", 0) == 3 for one in observer.controls[first:])


def test_a_client_that_is_late_in_a_second_attempt_takes_part_in_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unmask, calls = MaskedAttempt.unmask, itertools.count()

    async def fails_first(attempt: MaskedAttempt) -> Any:
        if not next(calls):
            raise TooFewMembers("none")
        return await unmask(attempt)

    class Late(Client):
        """Offers its first update only once the next round has begun: its session alone knows when that is for it."""

        def __init__(self, bus: Any, *arguments: Any, **options: Any) -> None:
            async def late(identity: Identity, body: Any) -> None:
                command = self._session.command
                if isinstance(body, UploadRequest) and body.round_id == 1 and command and command.round_id == 1:
                    offered.add(body.attempt)
                    return
                await bus.publish(identity, body)

            other: Any = OtherPublish(bus, late)
            super().__init__(other, *arguments, **options)

    offered: set[int] = set()
    monkeypatch.setattr(MaskedAttempt, "unmask", fails_first)
    run = Run(range(4), rounds=2, round={"quorum": 0.7, "grace_s": 0.7})
    run.make_client = lambda bus, task, *, client_id, config: (Late if client_id == 3 else Client)(
        bus, task, client_id=client_id, config=config
    )
    controller = run()
    assert [report.clients for report in controller.progress.reports] == [(0, 1, 2), (0, 1, 2, 3)]
    assert controller.progress.reports[0].attempt == 2
    assert offered == {1, 2}


class OtherPublish:
    """A bus with ``publish`` replaced."""

    def __init__(self, bus: Any, publish: Any) -> None:
        self._bus, self.publish = bus, publish

    @property
    def __class__(self) -> type:  # a proxy passes for what it stands for
        return gradbus.Bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


def test_a_client_that_was_silent_and_is_found_again_gets_its_shares() -> None:
    class Deaf(ClientMasking):
        """Hears no shares before ``hears``."""

        hears = False

        def on_request(self, request: Any, *arguments: Any) -> None:
            if self.hears or not isinstance(request, MaskShares):
                super().on_request(request, *arguments)

    class Losing(gradbus.Controller):
        """Takes client 3 for silent when the others have their shares, until these have waited for a while."""

        is_lost = False

        async def _start(self, *arguments: Any) -> ActiveRun:
            run = await super()._start(*arguments)
            masked, current = run.parts.masked, run.parts.current_round
            assert masked is not None
            on_answer = masked.on_answer

            def answered(client_id: int, incarnation: int, answer: MaskAnswer) -> None:
                on_answer(client_id, incarnation, answer)
                if answer.phase == 2:
                    ready.add(client_id)
                if ready >= {0, 1, 2} and current.round is not None and not self.is_lost:
                    self.is_lost = True
                    current.round.follow_clients({0, 1, 2}, {3})
                    current.notify()
                    asyncio.get_running_loop().call_later(0.05, find)

            def find() -> None:
                assert current.round is not None
                deaf[0].hears = True
                current.round.follow_clients({0, 1, 2, 3}, set())
                current.notify()

            masked.on_answer = answered  # type: ignore[method-assign]
            return run

    class Slow(Moving):
        def train(self, model: Any, **arguments: Any) -> TrainResult:
            time.sleep(0.5)  # the round is still open
            return super().train(model, **arguments)

    deaf: list[Deaf] = []
    ready: set[int] = set()

    def make_client(bus: Any, task: Any, *, client_id: int, config: Any) -> Client:
        client = Client(bus, task, client_id=client_id, config=config)
        if client_id == 3:
            deaf.append(replace_masking(client, Deaf))
        return client

    run = Run(range(4), round={"timeout_s": 25.0})
    run.make_controller, run.make_client, run.task = Losing, make_client, Slow()
    controller = run()
    (report,) = controller.progress.reports
    assert (report.clients, report.outcome) == ((0, 1, 2, 3), "all live clients answered")


def test_a_wrong_answer_is_noticed_and_another_one_asked_for() -> None:
    class Lying(ClientMasking):
        def _answer(self, own: Any, phase: int, data: bytes, group: Any) -> None:
            super()._answer(own, phase, bytes(len(data)) if phase == 3 else data, group)

    def make_client(bus: Any, task: Any, *, client_id: int, config: Any) -> Client:
        client = Client(bus, task, client_id=client_id, config=config)
        if client_id == 1:
            replace_masking(client, Lying)
        return client

    run = Run(range(4))
    run.make_client = make_client
    controller = run()
    assert controller.progress.reports[0].attempt == 1
    assert torch.equal(controller.weights, plain_weights(4))


class Entered(ClientMasking):
    """Takes part in attempts from the point at which the shares have come, with its thread held by a test. Public calls
    begin with the keys, and masks are made by a task that no test could hold."""

    def enter(self, client: MaskingClient) -> MaskingAttempt:
        self._own = MaskingAttempt(client)
        return self._own

    async def make_masks(self, own: MaskingAttempt) -> None:
        await self._make_masks(own, 10)

    async def hold_thread(self, until: threading.Event) -> None:
        await self._compute.run(until.wait)


def test_masks_of_an_attempt_that_is_over_are_not_begun_and_none_are_given_once_a_client_has_answered() -> None:
    async def main() -> None:
        run = Run([1, 2, 3])
        async with run.connect() as bus, asyncio.TaskGroup() as group:
            masking = Entered(bus, Identity(1, 1), least_members=0)
            scene = Scene([1, 2, 3], attempt=Attempt(run.job, 7, 5, 3, 1))
            scene.share({1, 2, 3}, {1, 2, 3})
            own = masking.enter(scene.clients[1])
            await masking.make_masks(own)
            assert own.masks is not None
            assert masking.is_open(own.client.attempt)
            survivors = MaskSurvivors(7, 3, 1, [1, 2, 3])
            masking.on_request(survivors, Welcome(1, 5, 7, 3, "fp32", "{}", 3, 1.0), 10, group)
            await asyncio.sleep(0)
            assert own.masks is None
            assert not masking.is_open(own.client.attempt)
            assert await masking.take(3, lambda: False) is None
            assert own.client.roster is not None
            spent = {3: own.client.roster.terms}
            assert masking.begin_round(7, 3) == spent, "from now on it does not go out in another round"
            assert masking.attempt is not None
            assert masking.begin_round(7, 4) == spent
            assert masking.attempt is None, "nothing is answered for a round before the one that it trains"
            assert masking.begin_round(8, 1) == {}

            other = masking.enter(scene.clients[2])
            going_on = threading.Event()
            busy = asyncio.ensure_future(masking.hold_thread(going_on))
            making = asyncio.ensure_future(masking.make_masks(other))
            await asyncio.sleep(0)
            masking.forget()
            going_on.set()
            await asyncio.gather(busy, making)
            assert other.masks is None
            other.client.mask(np.zeros(10, np.uint64))  # which may be done once
            masking.close()

    asyncio.run(main())


def test_a_client_that_masks_nothing_is_refused_with_the_reason() -> None:
    class Old(Client):
        def _introduction(self, model: FlatModel) -> Hello:
            return dataclasses.replace(super()._introduction(model), masks=False)

    run = Run([0], clients={"num": None, "min": 2, "start_timeout_s": 5.0})
    run.make_client = Old
    with pytest.raises(JoinRefused, match="masked before they leave their client"):
        run()


def test_a_client_that_knows_no_grid_is_refused_where_the_codec_needs_one_and_there_alone() -> None:
    class Old(Client):
        def _introduction(self, model: FlatModel) -> Hello:
            return dataclasses.replace(super()._introduction(model), grids=False)

    run = Run(range(3), codec="q8", clients={"num": None, "start_timeout_s": 5.0})
    run.make_client = Old
    with pytest.raises(JoinRefused, match="the codec q8 all clients round to a common grid, which its version"):
        run()
    run = Run(range(3))
    run.make_client = Old
    assert torch.equal(run().weights, plain_weights(3))


def test_a_client_that_insists_on_being_one_of_many_sends_nothing_otherwise() -> None:
    with pytest.raises(JoinRefused, match=r"not masked, and client.least_members is 3: nothing is sent"):
        Run([0, 1], secure=False, client={"least_members": 3})()
    run = Run([0, 1], client={"least_members": 3}, secure_aggregation={"shares_timeout_s": 60.0})  # it says so at once
    observer = Observer(run)
    with pytest.raises(RoundTimeout, match="secure aggregation: 0 "):
        run()
    assert observer.all(MaskRoster)
    assert {body.data for _, body in observer.all(MaskAnswer, 1)} == {b""}


def test_an_update_that_has_no_room_in_the_sum_is_reported_and_the_others_count() -> None:
    class Huge(Moving):
        def train(self, model: Any, **arguments: Any) -> TrainResult:
            done = super().train(model, **arguments)
            if arguments["client_id"] == 3:
                with torch.no_grad():
                    model.vector[7] = 1e6
            return done

    run = Run(range(4))
    run.task = Huge()
    observer = Observer(run)
    controller = run()
    assert {body.text for _, body in observer.all(TrainingFailure)} == {
        "its update has no room in the sum of all members: see its log"
    }
    (report,) = controller.progress.reports
    assert report.clients == (0, 1, 2)
    assert torch.equal(controller.weights, plain_weights(3))


def test_central_privacy_adds_its_noise_to_the_unmasked_sum() -> None:
    pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")
    privacy = {"name": "central", "noise_multiplier": 0.01, "clip_norm": 0.1, "target_quantile": 0.5}
    controller = Run(range(4), privacy=privacy)()
    (report,) = controller.progress.reports
    assert report.epsilon is not None
    assert report.clients == (0, 1, 2, 3)
    clipped = [delta_of(one, 1) * (0.1 / float(delta_of(one, 1).norm())) for one in range(4)]
    # Noise of 0.01 x 0.1 / 4 on each value of the mean, over all of them.
    noise = float((controller.weights - torch.stack(clipped).mean(0)).norm())
    assert 0.8 < noise / (0.00025 * DIM**0.5) < 1.2


def test_a_site_masks_for_its_own_clients_and_the_tree_has_the_bits_of_a_plain_run() -> None:
    async def run(secure: bool) -> tuple[Tensor, set[str]]:
        async with tree() as place:
            centre = gradbus.Controller(await place.bus("centre"), NoopTask(TREE_DIM), rules(2, sites=True, rounds=2))
            watching = (await place.bus("site-0")).subscribe(ToClients)
            async with asyncio.TaskGroup() as group:
                for number, ids in enumerate(((0, 1, 2), (3, 4))):
                    own = rules(len(ids), secure_aggregation={"enabled": secure and number == 0})
                    level = f"site-{number}"
                    site = site_of(await place.bus("centre"), await place.bus(level), number, own)
                    group.create_task(site.run())
                    for client_id in ids:
                        client = Client(await place.bus(level), UnequalTask(), client_id=client_id)
                        group.create_task(client.run())
                await centre.run()
            seen = [await watching.get() for _ in range(len(watching))]
            kinds = {type(one.body).__name__ for one in seen if isinstance(one, Control)}
            return centre.weights.clone(), kinds

    plain, secure = asyncio.run(run(False)), asyncio.run(run(True))
    assert torch.equal(plain[0], secure[0])
    assert "MaskSurvivors" in secure[1] - plain[1]


def test_more_clients_than_can_mask_for_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="300 clients in a round: at most 255"):
        Run(range(2), clients={"num": 300})()


def test_a_round_that_is_shorter_than_its_keys_and_shares_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"timeout_s is 20: .* keys_timeout_s \+ shares_timeout_s = 20 s"):
        Run(range(2), round={"timeout_s": 20.0})()


def test_clients_beyond_those_that_can_mask_for_each_other_are_refused_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradbus.actors.federated.controller.combinations.MAX_MEMBERS", 2)
    run = Run(range(3), clients={"num": None, "min": 2})
    one_client, refused = run.one_client, list[str]()

    async def may_be_refused(client_id: int) -> None:
        try:
            await one_client(client_id)
        except JoinRefused as error:
            refused.append(str(error))

    run.one_client = may_be_refused  # type: ignore[method-assign]
    controller = run()
    assert len(controller.progress.reports[0].clients) == 2
    assert len(refused) == 1
    assert "has 2 clients already" in refused[0]
