"""Federated runs over real DDS with all actors on one loop, each with a bus of its own: many variants, quickly."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from patience import eventually
from structlog.testing import capture_logs

import gradbus
from gradbus import codecs
from gradbus.actors.federated.client import global_model as shared_model_reader
from gradbus.actors.federated.client import last_model
from gradbus.actors.federated.controller import publish
from gradbus.actors.federated.controller.report import RoundTiming
from gradbus.models import NoopTask
from gradbus.runtime.errors import BusClosed, TrainingFailed
from gradbus.runtime.fast_paths import has_memfd
from gradbus.runtime.shm import segment
from gradbus.runtime.transport.channels import ToClients, ToController
from gradbus.runtime.transport.dds.participant import Participant
from gradbus.runtime.wire.control import Leave, UploadRequest
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Identity

DIM = 100_000

_jobs = itertools.count()


class SlowTask(NoopTask):
    """Takes its time in the rounds that the test names, so that another client is first."""

    def __init__(self, slow_rounds: Sequence[int]) -> None:
        super().__init__(DIM, delta="seeded")
        self._slow_rounds = slow_rounds

    def train(self, model: Any, **arguments: Any) -> Any:
        if arguments["round_id"] in self._slow_rounds:
            time.sleep(0.1)  # stands for work: there is nothing to wait for
        return super().train(model, **arguments)


def run(
    config: gradbus.FederatedConfig,
    tasks: Sequence[Any],
    *,
    check: Callable[[gradbus.Bus, gradbus.Controller], None] | None = None,
    network: gradbus.NetworkConfig | None = None,
    client: gradbus.ClientConfig | None = None,
    at_end: Callable[[], None] = lambda: None,
) -> list[gradbus.RoundReport]:
    """A whole run; each client has its task. ``at_end``: called when the controller is done, and clients may not be."""
    job, domain = f"flow-{os.getpid()}-{next(_jobs)}", new_domain()
    config = config.replaced("clients.dead_after_s", 30.0)  # nobody dies here, if a thread stands still, say

    async def one(client_id: int, task: Any) -> None:
        async with gradbus.connect(job=job, domain=domain, network=network or "loopback") as bus:
            await gradbus.Client(bus, task, client_id=client_id, config=client).run()

    async def main() -> list[gradbus.RoundReport]:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain, network=network or "loopback") as bus:
            controller = gradbus.Controller(bus, NoopTask(DIM), config)
            async with asyncio.TaskGroup() as group:
                for client_id, task in enumerate(tasks):
                    group.create_task(one(client_id, task))
                reports = await controller.run()
                at_end()
            if check is not None:
                check(bus, controller)
            return reports

    return asyncio.run(main())


# One of each kind; tests/codecs and the updates of tests/actors/aggregation have all codecs and versions.
@pytest.mark.parametrize(
    ("codec", "version"),
    [("s4", 1), *((name, codecs.get(name).versions[-1]) for name in ("fp32", "q8", "sq8", "loco"))],
)
def test_the_weights_do_not_depend_on_the_order_of_arrival_nor_on_the_way(
    codec: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (publish, segment):
        monkeypatch.setattr(module, "SHARED_BYTES", 1)  # also what a sparse codec makes of this model
    config = gradbus.FederatedConfig(
        rounds=3, clients={"num": 3}, codec={"name": codec, "version": version}, downlink_codec=codec, eval_every=0
    )
    weights = []
    for share, order in (True, ([1, 2], [], [])), (False, ([], [1, 3], [2])):
        network = gradbus.NetworkConfig(shared_memory=share)
        reports = run(config, [SlowTask(slow) for slow in order], network=network)
        assert [report.clients for report in reports] == [(0, 1, 2)] * 3
        for report in reports:
            in_memory = share and has_memfd()
            assert report.bytes_up_shared == in_memory * report.bytes_up
            assert report.bytes_down_shared == in_memory * report.bytes_down
        weights.append([report.weights_crc32 for report in reports])
    assert weights[0] == weights[1]
    assert len(set(weights[0])) == 3


def test_the_global_model_is_there_by_name_while_rounds_run_and_after_the_end() -> None:
    states: list[dict[str, torch.Tensor]] = []

    async def main() -> gradbus.Controller:
        job, domain = f"flow-{os.getpid()}-{next(_jobs)}", new_domain()
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            rules = gradbus.FederatedConfig(rounds=2, clients={"num": 1, "dead_after_s": 30.0}, eval_every=0)
            controller = gradbus.Controller(bus, NoopTask(100), rules)
            with pytest.raises(RuntimeError, match="has not started"):
                await controller.state_dict()
            group.create_task(gradbus.Client(bus, NoopTask(100, delta="seeded"), client_id=0).run())
            states.extend([await controller.state_dict() async for _ in controller.rounds()])
        states.append(await controller.state_dict())
        return controller

    controller = asyncio.run(main())
    fresh = NoopTask(100).build_model()
    fresh.load_state_dict(states[-1], strict=True)
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in fresh.parameters()]), controller.weights)
    assert all(torch.equal(states[-1][name], tensor) for name, tensor in controller.model.state_dict().items())
    assert [state.keys() for state in states] == [states[0].keys()] * 3
    controller.weights.zero_()
    assert all(tensor.any() for state in states for tensor in state.values())  # copies, which rounds do not change


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam"])
def test_every_strategy_runs_and_is_reproducible(strategy: str) -> None:
    options = {} if strategy == "fedavg" else {"lr": 0.5}
    config = gradbus.FederatedConfig(rounds=2, clients={"num": 2}, strategy={"name": strategy, **options}, eval_every=0)
    first, second = (run(config, [SlowTask([]), SlowTask([])]) for _ in range(2))
    assert [report.weights_crc32 for report in first] == [report.weights_crc32 for report in second]


def test_bytes_are_counted_as_they_are_encoded() -> None:
    config = gradbus.FederatedConfig(rounds=2, clients={"num": 2}, codec={"name": "sq8", "version": 1}, eval_every=0)
    (first, second) = run(config, [SlowTask([]), SlowTask([])])
    one_update = 20 + 5 * (DIM // 10) + 4 * 2
    assert first.bytes_up == second.bytes_up == 2 * one_update
    assert first.bytes_down == 2 * 4 * DIM


def test_a_report_tells_where_the_time_of_each_client_went_and_what_the_codecs_owe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted, first_counts = RoundTiming.counted, threading.Semaphore(0)

    def noted(self: RoundTiming, client_id: int, request: UploadRequest) -> None:
        counted(self, client_id, request)
        if client_id == 0:
            first_counts.release()

    class Second(SlowTask):
        def train(self, model: Any, **arguments: Any) -> Any:
            assert first_counts.acquire(timeout=20.0)
            return super().train(model, **arguments)

    monkeypatch.setattr(RoundTiming, "counted", noted)
    config = gradbus.FederatedConfig(
        rounds=2,
        clients={"num": 2},
        codec="sq8",
        downlink_codec="q8",
        eval_every=0,
        limits={"cap_samples": None},  # else nothing counts in the first round before all have trained
    )
    reports = run(config, [SlowTask([]), Second([1, 2])])
    for report in reports:
        fast, slow = report.timeline
        assert (fast.client_id, slow.client_id) == (0, 1)
        assert slow.train_s >= 0.1
        assert slow.offered_s >= slow.train_s + slow.encode_s
        assert fast.counted_s < slow.counted_s <= report.seconds - report.command_s
        assert 0 < report.step_s <= report.aggregate_s
        assert report.downlink_residual_norm
        for client in report.timeline:
            pieces = client.pieces()
            assert {"train", "encode", "decode"} <= {piece.phase for piece in pieces}
            assert (pieces[0].start_s, pieces[-1].end_s) == (0.0, client.counted_s)
            assert client.num_bytes * 2 == pytest.approx(report.bytes_up, rel=0.1)
            assert client.update_norm
            assert client.residual_norm
    lossless = run(gradbus.FederatedConfig(rounds=1, clients={"num": 1}, eval_every=0), [SlowTask([])])
    assert (lossless[0].timeline[0].residual_norm, lossless[0].downlink_residual_norm) == (0.0, 0.0)


def test_the_mean_of_the_clients_differences_is_added_to_the_model() -> None:
    captured: dict[str, torch.Tensor] = {}

    def keep(bus: gradbus.Bus, controller: gradbus.Controller) -> None:
        captured["weights"] = controller.weights.clone()

    config = gradbus.FederatedConfig(rounds=1, clients={"num": 2}, eval_every=0)
    run(config, [SlowTask([]), SlowTask([])], check=keep)
    expected = torch.zeros(DIM, dtype=torch.float64)
    for client_id in (0, 1):
        model = NoopTask(DIM).build_model()
        SlowTask([]).train(
            model, client_id=client_id, round_id=1, epochs=1, lr=0.01, seed=0, subset_size=0, should_stop=lambda: False
        )
        expected += next(model.parameters()).detach().double() / 2
    torch.testing.assert_close(captured["weights"].double(), expected, rtol=0, atol=2e-9)


def test_a_run_survives_ten_percent_packet_loss() -> None:
    network = gradbus.NetworkConfig(profile="network", loss_per_mille=100, shared_memory=False)
    config = gradbus.FederatedConfig(rounds=3, clients={"num": 2}, eval_every=0)
    reports = run(config, [SlowTask([]), SlowTask([])], network=network)
    assert [report.clients for report in reports] == [(0, 1)] * 3


def test_a_training_function_that_never_stops_by_itself_is_called_off_when_the_run_ends() -> None:
    class Endless(NoopTask):
        def train(self, model: Any, **arguments: Any) -> Any:
            while not arguments["should_stop"]():
                time.sleep(0.005)
            raise RuntimeError("called off")

    config = gradbus.FederatedConfig(rounds=1, clients={"num": 2}, round={"quorum": 0.5, "grace_s": 0.0}, eval_every=0)
    (report,) = run(config, [SlowTask([]), Endless(DIM)])
    assert report.clients == (0,)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")
def test_a_client_that_does_not_get_the_last_model_read_before_the_end_says_so_and_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, publish, over = shared_model_reader.read, gradbus.Bus.publish, threading.Event()
    models, said = itertools.count(), list[Any]()

    def late(place: str, size: int) -> memoryview:
        if next(models) == 2:
            assert over.wait(20.0)
        return read(place, size)

    async def heard(self: gradbus.Bus, sender: Identity, body: Any) -> None:
        if sender.sender != CONTROLLER:
            said.append(body)
        await publish(self, sender, body)

    monkeypatch.setattr(shared_model_reader, "read", late)
    monkeypatch.setattr(gradbus.Bus, "publish", heard)
    monkeypatch.setattr(shared_model_reader, "LAST_READ_S", 0.1)
    monkeypatch.setattr(last_model, "LAST_MODEL_S", 0.1)
    config = gradbus.FederatedConfig(rounds=2, clients={"num": 1}, eval_every=0)
    with capture_logs() as lines:
        reports = run(config, [SlowTask([])], at_end=over.set)
    assert [report.clients for report in reports] == [(0,)] * 2
    assert isinstance(said[-1], Leave)
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["last model not received"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("who", ["controller", "client"])
def test_an_actor_whose_bus_has_lost_its_receive_thread_ends_and_says_so(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, fails = Participant.look_around, threading.Event()

    def look_or_fail(participant: Participant) -> bool:
        if fails.is_set():
            raise OSError("dds_waitset_wait returned -1")
        return look(participant)

    monkeypatch.setattr(Participant, "look_around", look_or_fail)  # that thread calls it now and then

    async def main() -> None:
        place = {"job": f"flow-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
        async with asyncio.timeout(60), gradbus.connect(**place) as bus:
            config = gradbus.FederatedConfig(rounds=1, clients={"num": 1})
            controller = gradbus.Controller(bus, NoopTask(DIM), config)
            client = gradbus.Client(bus, NoopTask(DIM), client_id=0)
            running = asyncio.create_task((client if who == "client" else controller).run())
            await eventually(lambda: bus.writes(ToController if who == "client" else ToClients))
            fails.set()
            with pytest.raises(BusClosed, match=r"the receive thread ended with .*dds_waitset_wait returned -1"):
                await running

    asyncio.run(main())


def test_training_that_fails_with_an_error_that_names_a_file_that_is_not_utf_8_ends_the_run_with_that_error() -> None:
    class Unreadable(NoopTask):
        def train(self, model: Any, **arguments: Any) -> Any:
            raise FileNotFoundError("no such file: patients-\udcff.csv")

    async def main() -> list[Any]:
        place = {"job": f"flow-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
        async with asyncio.timeout(60), gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            config = gradbus.FederatedConfig(rounds=1, clients={"num": 1}, round={"max_attempts": 1})
            return await asyncio.gather(
                gradbus.Controller(bus, NoopTask(DIM), config).run(),
                gradbus.Client(other, Unreadable(DIM), client_id=0).run(),
                return_exceptions=True,
            )

    found = asyncio.run(main())
    assert [type(error) for error in found] == [TrainingFailed] * 2
    assert all("no such file: patients-\N{REPLACEMENT CHARACTER}.csv" in str(error) for error in found)


def test_what_is_noted_of_each_round_and_update_is_not_written_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = set[str](), set[str]()
    write = os.write

    def watched(file: int, line: Any) -> int:
        if bytes(line[:8]) == b'{"event"':  # a history's: others write, too
            on_loop = threading.current_thread() is threading.main_thread()
            (here if on_loop else elsewhere).add(json.loads(line)["event"])
        return write(file, line)

    monkeypatch.setattr(os, "write", watched)
    config = gradbus.FederatedConfig(rounds=2, clients={"num": 2}, eval_every=0, codec="sq8", history={"dir": tmp_path})
    run(config, [SlowTask([]), SlowTask([])], client=gradbus.ClientConfig(history={"dir": tmp_path}))
    assert here == {"welcomed", "ended"}
    assert elsewhere == {"started", "commanded", "offered", "counted", "receipt", "committed", "decoded"}


def test_two_jobs_run_side_by_side_in_one_process_and_do_not_mix() -> None:
    config = gradbus.FederatedConfig(rounds=3, clients={"num": 1}, eval_every=0)

    async def one(job: str, domain: int, dim: int) -> list[gradbus.RoundReport]:
        async with gradbus.connect(job=job, domain=domain) as bus, gradbus.connect(job=job, domain=domain) as other:
            controller = gradbus.Controller(bus, NoopTask(dim), config)
            client = gradbus.Client(other, NoopTask(dim, delta="constant"), client_id=0)
            _, reports = await asyncio.gather(client.run(), controller.run())
            return reports

    async def main() -> list[list[gradbus.RoundReport]]:
        domain = new_domain()
        async with asyncio.timeout(30):
            return await asyncio.gather(one("left", domain, 1000), one("right", domain, 2000))

    left, right = asyncio.run(main())
    assert [report.bytes_down for report in left] == [4000] * 3
    assert [report.bytes_down for report in right] == [8000] * 3
    assert [report.dropped for report in left + right] == [{}] * 6


def test_closing_the_report_iterator_ends_the_run_in_order() -> None:
    async def main() -> str:
        place = {"job": f"stop-{os.getpid()}", "domain": new_domain()}
        async with asyncio.timeout(30), gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            controller = gradbus.Controller(bus, NoopTask(DIM), gradbus.FederatedConfig(rounds=1000, eval_every=0))
            client = asyncio.create_task(gradbus.Client(other, NoopTask(DIM), client_id=0).run())
            async for report in controller.rounds():
                if report.round_id == 2:
                    break
            await asyncio.sleep(0)
            phase = controller.progress.phase
            client.cancel()
            await asyncio.wait([client])
            return phase

    assert asyncio.run(main()) != "done"
