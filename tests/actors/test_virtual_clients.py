"""Virtual clients over real DDS: bits, deaths of training processes, failures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from patience import eventually
from torch import nn

import gradbus
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.virtual import host as host_module
from gradbus.actors.virtual import pool as pool_module
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.host import ClientHost, HostedClients, HostRun
from gradbus.actors.virtual.local_pool import LocalPool, LocalProcess
from gradbus.actors.virtual.pool import EvaluationWork, RoundWork, TrainingPool
from gradbus.actors.virtual.simulation import run_beside
from gradbus.commands.history.invariants import check
from gradbus.commands.history.reader import read_history
from gradbus.models import ClassificationTask, NoopTask, glyphs
from gradbus.runtime.errors import ConfigError, TrainingFailed
from gradbus.runtime.fast_paths import has_memfd
from gradbus.runtime.shm.segment import SharedMemoryFault, read
from gradbus.runtime.wire.control import EvaluationRequest, Receipt, Welcome
from gradbus.runtime.wire.messages import TrainCmd

DIM = 20_000  # more than fits into a frame that is copied: updates lie in shared memory

_jobs = itertools.count()


def rules(**changed: Any) -> gradbus.FederatedConfig:
    return gradbus.FederatedConfig(**{"rounds": 3, "eval_every": 0, "clients": {"dead_after_s": 30.0}, **changed})


def virtual(task: Any, clients: int, config: gradbus.FederatedConfig, **options: Any) -> gradbus.SimulationResult:
    """A run with virtual clients."""
    chosen = gradbus.SimulationOptions(domain=new_domain(), processes=2, **options)
    return gradbus.simulate(task, clients, config=config, options=chosen)


def deployed(task: Any, clients: int, config: gradbus.FederatedConfig, *, on_a_bus: int = 1) -> list[int]:
    """Checksums of the models of a run in which each client is an actor. ``on_a_bus``: so many of them share one."""
    job, domain = f"deployed-{os.getpid()}-{next(_jobs)}", new_domain()

    async def some(first: int) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            for client_id in range(first, min(first + on_a_bus, clients)):
                group.create_task(gradbus.Client(bus, task, client_id=client_id).run())

    async def main() -> Sequence[gradbus.RoundReport]:
        async with (
            asyncio.timeout(60),
            gradbus.connect(job=job, domain=domain) as bus,
            asyncio.TaskGroup() as group,
        ):
            for first in range(0, clients, on_a_bus):
                group.create_task(some(first))
            return await gradbus.Controller(bus, task, config.replaced("clients.num", clients)).run()

    return [report.weights_crc32 for report in asyncio.run(main())]


def checksums(result: gradbus.SimulationResult) -> list[int]:
    return [report.weights_crc32 for report in result.rounds]


@pytest.mark.parametrize(
    "changed",
    [{}, {"selection": {"name": "uniform", "fraction": 0.5}, "codec": "sq8"}],
    ids=["all of them", "half of them, with residuals"],
)
def test_virtual_clients_make_the_models_of_clients_with_a_process_of_their_own(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    task, config = NoopTask(DIM, delta="seeded"), rules(**changed)
    result = virtual(task, 6, config, state_dir=tmp_path)
    assert checksums(result) == deployed(task, 6, config)
    assert len({*checksums(result)}) == 3, "each round has made another model"
    kept = {path.name for path in tmp_path.iterdir()}
    counted = {f"client-{one}" for report in result.rounds for one in report.clients}
    assert kept == (counted if "codec" in changed else set()), "only what has a state has a directory"


@pytest.mark.slow
def test_a_hundred_virtual_clients_make_the_models_of_a_hundred_deployed_ones() -> None:
    """They train, each on data of its own; the deployed ones are on four buses beside that of the Controller."""
    torch.set_num_threads(1)  # as training processes have it: the last bits of sums depend on it
    task = ClassificationTask(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
        glyphs(train=1000, test=20),
        num_clients=100,
        batch_size=5,
    )
    config = rules(rounds=2, codec="sq8", clients={"dead_after_s": 30.0, "min": 100})
    result = virtual(task, 100, config)
    assert [len(report.clients) for report in result.rounds] == [100] * 2
    assert checksums(result) == deployed(task, 100, config, on_a_bus=25)
    assert len({*checksums(result)}) == 2, "each round has made another model"


class DiesOnce(NoopTask):
    """Its process is killed in the training of client 2 in round 2, as often as there are files to take away."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(DIM, delta="seeded")
        for number in range(times):
            (folder / f"death-{number}").touch()
        self._folder = folder

    def train(self, model: nn.Module, **arguments: Any) -> Any:
        deaths = sorted(self._folder.glob("death-*"))
        if deaths and arguments["client_id"] == 2 and arguments["round_id"] == 2:
            deaths[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(model, **arguments)


def test_a_killed_training_process_is_replaced_and_its_client_trained_again(tmp_path: Path) -> None:
    result = virtual(DiesOnce(tmp_path, 1), 5, rules())
    assert result.replaced == 1
    assert [report.clients for report in result.rounds] == [(0, 1, 2, 3, 4)] * 3
    assert checksums(result) == checksums(virtual(NoopTask(DIM, delta="seeded"), 5, rules()))


def test_the_same_where_the_program_ignores_the_ends_of_its_children(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert virtual(DiesOnce(tmp_path, 1), 5, rules()).replaced == 1
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.skipif(not has_memfd(), reason="updates are not in shared memory")
def test_a_training_process_that_ends_right_after_its_answer_is_replaced_and_its_client_trained_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = LocalProcess._take  # noqa: SLF001 - nothing public is between an answer and what is read of it
    killed: list[bool] = []

    def is_there(place: str, size: int) -> bool:
        try:
            return bool(read(place, size))
        except SharedMemoryFault:
            return False

    async def take(process: LocalProcess, work: Any, update: Any, released: Any) -> Any:
        if not killed:
            killed.append(True)
            process.kill()
            await eventually(lambda: not is_there(update.request.memory, update.request.total_bytes))
        return await taken(process, work, update, released)

    monkeypatch.setattr(LocalProcess, "_take", take)
    result = virtual(NoopTask(DIM), 3, rules(rounds=2))
    assert result.replaced == len(killed) == 1
    assert [report.clients for report in result.rounds] == [(0, 1, 2)] * 2


def test_a_client_whose_training_always_kills_its_process_fails_and_the_others_count(tmp_path: Path) -> None:
    result = virtual(DiesOnce(tmp_path, 3), 4, rules())
    assert [report.clients for report in result.rounds] == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3)]
    assert result.rounds[1].dropped == {"training failed": 1}
    assert result.replaced == 3


class HangsOnce(NoopTask):
    """The first training of client 2 waits for ever, and does not look whether it is still wanted."""

    def __init__(self, folder: Path) -> None:
        super().__init__(DIM, delta="seeded")
        self._flag = folder / "hangs"
        self._flag.touch()

    def train(self, model: nn.Module, **arguments: Any) -> Any:
        if arguments["client_id"] == 2 and self._flag.exists():
            self._flag.unlink()
            while True:
                signal.pause()
        return super().train(model, **arguments)


def test_a_process_whose_client_hangs_is_killed_once_its_round_is_over_and_all_count_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "STUCK_AFTER_S", 0.1)
    result = virtual(HangsOnce(tmp_path), 4, rules(rounds=2, round={"quorum": 0.75, "grace_s": 0.0}))
    assert result.rounds[0].clients == (0, 1, 3)
    assert len(result.rounds[1].clients) >= 3
    assert result.replaced == 1


def test_a_model_is_evaluated_with_what_its_client_had_then_also_where_that_is_brought_to_another_machine() -> None:
    store = ClientStateStore(None, 0)
    store.start_run(7)
    for round_id in (1, 2):  # the controller has gone back to the model of round 1 meanwhile
        store.keep(round_id, {"personal.head": torch.full((1,), float(round_id)), "residual": torch.zeros(3)})
    welcome, request = Welcome(0, 1, 7, 1, "fp32", "{}", 1, 0.5), EvaluationRequest(7, 1, "0", 1.0)
    assert EvaluationWork(1, welcome, request, torch.zeros(3)).needs(store) == {"personal.head": torch.ones(1)}


class FailsSometimes(NoopTask):
    def __init__(self, clients: Sequence[int]) -> None:
        super().__init__(DIM, delta="seeded")
        self._clients = clients

    def train(self, model: nn.Module, **arguments: Any) -> Any:
        if arguments["client_id"] in self._clients:
            raise ValueError("no such file: patients-\udcff.csv")  # a byte of its name that is not UTF-8
        return super().train(model, **arguments)


class EmptyPool(TrainingPool[Any]):
    """A pool that starts no processes. A test adds what is none: publicly a pool has but those that it has started."""

    async def open(self, client_id: int, num_clients: int) -> None: ...

    async def _start(self) -> Any: ...

    def _stop(self, number: int) -> None: ...

    async def close(self) -> None: ...

    def add(self, process: Any) -> None:
        """A process is idle."""
        self._add(process)


class CommandedHost(ClientHost):
    """A host without a controller."""

    def begin(self, group: asyncio.TaskGroup) -> CommandedRun:
        prepared = self._open(self._build(), contextlib.ExitStack())
        clients = HostedClients(self._ids, self._pool, self._state_dir)
        return CommandedRun(self._make_context(group), prepared, self._outbox, self._observer, clients)


class CommandedRun(HostRun):
    """The parts of a round are called by a test, and all clients of the host are asked. In public a host runs whole
    rounds alone, in which no test chooses what comes first."""

    def command(self, command: TrainCmd) -> None:
        self._session.asked = lambda _: frozenset({0, 1})  # type: ignore[method-assign]
        self._session.take(command)
        self._commanded = command, self._session.incarnation

    def to_train(self, command: TrainCmd) -> frozenset[int]:
        return self._session.to_train(command)

    async def train(self, work: RoundWork, group: asyncio.TaskGroup) -> None:
        await self._train_some(work, deque([(0, 0)]), asyncio.Semaphore(1), group)

    async def evaluate(self, work: EvaluationWork) -> None:
        await self._evaluate_some(work, deque([(0, 0)]), {})

    async def deliver(self, update: Any, process: Any) -> None:
        await self._deliver(update, process, asyncio.Semaphore(0))


class Noting:
    """In place of a training process: notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def train(self, *given: Any) -> None:
        self.asked.append("train")

    async def evaluate(self, *given: Any, **named: Any) -> None:
        self.asked.append("evaluate")


def test_work_that_is_stopped_while_it_waits_for_a_process_is_given_to_none(tmp_path: Path) -> None:
    welcome, command = Welcome(0, 1, 7, 1, "fp32", "{}", 2, 0.5), TrainCmd(1, 0, 1, 0.1, 0)

    async def main() -> list[str]:
        async with asyncio.timeout(10), gradbus.connect(f"stopped-{os.getpid()}", domain=new_domain()) as bus:
            pool, process = EmptyPool(1), Noting()
            trained = pool.new_work(RoundInputs(welcome=welcome, command=command, base=torch.zeros(5)))
            evaluated = pool.new_evaluation(welcome, EvaluationRequest(7, 1, "0", 1.0), torch.zeros(5))
            async with asyncio.TaskGroup() as group:
                host = CommandedHost(bus, NoopTask(5), ids=range(2), pool=pool, state_dir=tmp_path).begin(group)
                host.command(command)
                group.create_task(host.train(trained, group))
                group.create_task(host.evaluate(evaluated))
                await asyncio.sleep(0)
                pool.stop(evaluated)
                pool.add(process)
            return process.asked

    assert asyncio.run(main()) == []


@pytest.mark.parametrize("when", ["while it waits for its receipt", "before it is offered"])
def test_a_refusal_that_comes_late_keeps_no_client_out_of_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    now, next_ = TrainCmd(1, 0, 1, 0.1, 0), TrainCmd(2, 0, 1, 0.1, 0)
    refused = Receipt(0, 1, 7, 1, 0, False, "stale")

    async def main() -> frozenset[int]:
        async with (
            asyncio.timeout(10),
            gradbus.connect(f"late-{os.getpid()}", domain=new_domain()) as bus,
            asyncio.TaskGroup() as group,
        ):
            host = CommandedHost(bus, NoopTask(5), ids=range(2), pool=EmptyPool(1), state_dir=tmp_path).begin(group)

            async def deliver(*_: object, **__: object) -> Receipt:
                host.command(next_)
                return refused

            monkeypatch.setattr(host_module.UpdateSender, "deliver", deliver)
            host.command(now if when.startswith("while") else next_)
            update = SimpleNamespace(
                key=SimpleNamespace(sender=0), request=SimpleNamespace(round_id=now.round_id, train_s=0.0)
            )
            process = SimpleNamespace(is_read=lambda _: None)
            await host.deliver(update, process)
            return host.to_train(next_)

    assert asyncio.run(main()) == {0, 1}


def test_a_client_whose_training_raises_is_left_out() -> None:
    result = virtual(FailsSometimes([1]), 3, rules())
    assert [report.clients for report in result.rounds] == [(0, 2)] * 3


def test_a_run_in_which_all_trainings_raise_ends_with_the_error_of_the_task() -> None:
    with pytest.raises(TrainingFailed, match=r"no such file: patients-\N{REPLACEMENT CHARACTER}\.csv"):
        virtual(FailsSometimes([0, 1]), 2, rules())


def test_it_works_where_an_event_loop_runs_as_in_a_notebook() -> None:
    class Tiny(NoopTask):  # of a class that no other process could import
        def __init__(self) -> None:
            super().__init__(7, delta="constant")

    async def cell() -> gradbus.SimulationResult:
        return virtual(Tiny(), 3, rules(rounds=2))

    result = asyncio.run(cell())
    assert torch.allclose(result.model.vector, torch.full((7,), 2e-3))
    assert result.trained == 6
    assert "2 rounds of 3 clients" in repr(result)


def test_ctrl_c_ends_the_run_with_its_buses_and_processes() -> None:
    task = NoopTask(7, delta="constant")
    options = gradbus.SimulationOptions(domain=new_domain(), processes=1)
    own = f"/proc/{os.getpid()}/task/{os.getpid()}/children"

    def children() -> set[str]:
        return set(Path(own).read_text(encoding="ascii").split())

    before, threads = children(), threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        gradbus.simulate(
            task,
            2,
            config=rules(rounds=10_000),
            options=options,
            on_report=lambda report: os.kill(os.getpid(), signal.SIGINT) if report.round_id == 1 else None,
        )
    assert children() == before
    assert threading.active_count() <= threads + 1, "but for the thread itself, which is about to end"


class AddsWhatIsFrozen(NoopTask):
    """Training adds a frozen parameter to the trained ones."""

    def __init__(self, value: float) -> None:
        super().__init__(5)
        self._value = value

    def build_model(self) -> Any:
        model = super().build_model()
        model.frozen = nn.Parameter(torch.full((3,), self._value), requires_grad=False)
        return model

    def train(self, model: Any, **arguments: Any) -> Any:
        with torch.no_grad():
            model.vector += model.frozen[0]
        return super().train(model, **arguments)


def test_a_host_whose_frozen_parameters_differ_takes_those_of_the_controller(tmp_path: Path) -> None:
    job, domain = f"frozen-{os.getpid()}", new_domain()
    pool = LocalPool(AddsWhatIsFrozen(9.0), PoolSettings(state_dir=tmp_path), size=1)

    async def main() -> torch.Tensor:
        async with (
            asyncio.timeout(30),
            gradbus.connect(job, domain=domain) as bus,
            gradbus.connect(job, domain=domain) as other,
            asyncio.TaskGroup() as group,
        ):
            controller = gradbus.Controller(bus, AddsWhatIsFrozen(2.0), rules(clients={"num": 4}))
            host = ClientHost(other, AddsWhatIsFrozen(9.0), ids=range(4), pool=pool, state_dir=tmp_path)
            hosting = group.create_task(host.run())
            await controller.run()
            await hosting
            return controller.weights

    try:
        assert asyncio.run(main()).tolist() == [6.0] * 5
    finally:
        asyncio.run(pool.close())


def test_a_host_notes_what_answers_its_clients_got_and_its_journal_is_of_all_of_them(tmp_path: Path) -> None:
    job, domain, history = f"noted-{os.getpid()}", new_domain(), {"dir": tmp_path / "history"}
    pool = LocalPool(NoopTask(DIM, delta="seeded"), PoolSettings(state_dir=tmp_path / "state"), size=1)

    async def main() -> None:
        async with (
            asyncio.timeout(30),
            gradbus.connect(job, domain=domain) as bus,
            gradbus.connect(job, domain=domain) as other,
            asyncio.TaskGroup() as group,
        ):
            config = rules(rounds=2, clients={"num": 3, "dead_after_s": 30.0}, history=history)
            host = ClientHost(
                other,
                NoopTask(DIM),
                ids=range(1, 4),
                pool=pool,
                state_dir=tmp_path / "state",
                config=gradbus.ClientConfig(history=history),
            )
            group.create_task(host.run())
            await gradbus.Controller(bus, NoopTask(DIM), config).run()

    try:
        asyncio.run(main())
    finally:
        asyncio.run(pool.close())
    run = read_history(tmp_path)
    (start,) = run.clients[1]
    assert sorted(event["client"] for event in start.all("receipt") if event["accepted"]) == [1, 1, 2, 2, 3, 3]
    assert run.without_start == 0
    findings = {finding.name: finding for finding in check(run)}
    assert [finding.violations for finding in findings.values() if finding.violations] == []
    assert findings["I8"].checked == 6


class NoData(NoopTask):
    def prepare(self, client_id: int, num_clients: int) -> None:
        raise FileNotFoundError("images.npy")


def test_a_task_that_cannot_load_its_data_ends_the_run_with_that_error() -> None:
    with pytest.raises(TrainingFailed, match=r"images\.npy"):
        virtual(NoData(3), 2, rules())


@pytest.mark.parametrize(
    ("clients", "changed", "reason"),
    [
        (0, {}, "expected 1"),
        (70_000, {}, "expected 1"),
        (2, {"mode": "asynchronous"}, "asynchronous"),
        (2, {"clients": {"kind": "sites"}}, "sites"),
    ],
)
def test_what_virtual_clients_cannot_do_is_refused_before_anything_starts(
    clients: int, changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        gradbus.simulate(NoopTask(3), clients, config=rules(**changed))


def test_a_first_round_with_more_updates_than_may_wait_is_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"limits\.trust=adversarial"):
        gradbus.simulate(NoopTask(10_000_000), 100, config=gradbus.FederatedConfig(limits={"trust": "adversarial"}))


def test_a_host_whose_first_round_does_not_fit_says_what_to_change_and_only_where_updates_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same check as above, by a host that knows of the controller's rules what it is sent."""
    monkeypatch.setattr(host_module, "WAITING_BYTES", 4 * DIM)

    async def hosted(trust: str) -> None:
        job, domain = f"room-{os.getpid()}-{next(_jobs)}", new_domain()
        pool = LocalPool(NoopTask(DIM), PoolSettings(state_dir=tmp_path), size=1)
        try:
            async with (
                asyncio.timeout(30),
                gradbus.connect(job, domain=domain) as bus,
                gradbus.connect(job, domain=domain) as other,
            ):
                controller = gradbus.Controller(
                    bus, NoopTask(DIM), rules(clients={"num": 4}, rounds=2, limits={"trust": trust})
                )
                host = ClientHost(other, NoopTask(DIM), ids=range(4), pool=pool, state_dir=tmp_path)
                await run_beside(controller.run(), host.run())
        finally:
            await pool.close()

    with pytest.raises(ConfigError, match=r"trust=adversarial: .*4 updates of .*80,000 bytes that may wait"):
        asyncio.run(hosted("adversarial"))
    asyncio.run(hosted("cooperative"))
