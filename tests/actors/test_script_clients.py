"""Clients in three lines of a script, against a controller and real DDS: the scripts run on threads of this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import script_scene
import torch
import warm
from dds_domains import new_domain
from patience import PATIENT_S, until
from structlog.testing import capture_logs
from torch import nn

import gradbus
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.runtime.errors import (
    BarrierTimeout,
    ConfigError,
    JoinRefused,
    OutOfTurn,
    TrainingFailed,
)
from gradbus.runtime.misuse import WrongKeyword

_jobs = itertools.count()

Script = Callable[[str, int, int], Any]  # job, domain, client id


def client(job: str, domain: int, client_id: int) -> gradbus.ScriptClient:
    """A client that gives up where its controller has failed a test."""
    config = gradbus.ClientConfig(controller_timeout_s=PATIENT_S)
    return gradbus.client(job, client_id=client_id, domain=domain, config=config)


def follow(job: str, domain: int, client_id: int) -> list[bool]:
    """The three lines."""
    model, counts = script_scene.build_model(), []
    with client(job, domain, client_id) as fed:
        while fed.receive(model):
            samples, loss = script_scene.train(model, client_id, fed.round.round_id, fed.round.lr)
            counts.append(fed.send(model, samples=samples, loss=loss))
    return counts


def new_job() -> tuple[str, int]:
    """A job of its own, and its domain."""
    return f"scripts-{os.getpid()}-{next(_jobs)}", new_domain()


def run(
    scripts: Sequence[Script],
    *,
    tasks: int = 0,
    scripts_first: bool = False,
    job: tuple[str, int] | None = None,
    **rules: Any,
) -> tuple[list[gradbus.RoundReport], list[Any]]:
    """A run with clients of scripts, and others with a Task behind them, which come, if ``scripts_first``, when the
    scripts have ended: reports, and what each script returned."""
    name, domain = job or new_job()
    clients = {"num": len(scripts) + tasks, "dead_after_s": PATIENT_S, **rules.pop("clients", {})}
    config = gradbus.FederatedConfig(**{"rounds": 3, "eval_every": 0, "clients": clients, **rules})

    async def one(client_id: int, after: Sequence[asyncio.Task[Any]]) -> None:
        if after:
            await asyncio.wait(after)
        async with gradbus.connect(name, domain=domain) as bus:
            await gradbus.Client(bus, script_scene.SceneTask(), client_id=client_id).run()

    async def main() -> tuple[list[gradbus.RoundReport], list[Any]]:
        async with asyncio.timeout(90), gradbus.connect(name, domain=domain) as bus:
            controller = gradbus.Controller(bus, script_scene.SceneTask(), config)
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(asyncio.to_thread(script, name, domain, client_id))
                    for client_id, script in enumerate(scripts)
                ]
                for client_id in range(len(scripts), len(scripts) + tasks):
                    group.create_task(one(client_id, running if scripts_first else []))
                reports = [report async for report in controller.rounds()]
            return reports, [task.result() for task in running]

    return asyncio.run(main())


@pytest.mark.parametrize("rule", ["plain", {"name": "fedprox", "mu": 0.1}, "scaffold"])
@pytest.mark.parametrize("codec", ["fp32", "sq8"])
def test_three_lines_come_to_the_bits_of_a_task(rule: Any, codec: str) -> None:
    rules: dict[str, Any] = {"codec": codec, "training": {"rule": rule, "lr": 0.05}}
    if rule == "scaffold":
        rules["strategy"] = "scaffold"
    by_task, _ = run([], tasks=2, **rules)
    by_script, counts = run([follow, follow], **rules)
    assert [one.weights_crc32 for one in by_script] == [one.weights_crc32 for one in by_task]
    assert len({one.weights_crc32 for one in by_script}) == 3
    assert [one.loss for one in by_script] == [one.loss for one in by_task]
    assert counts == [[True] * 3] * 2


def test_a_script_has_a_name_and_gets_an_id_for_it() -> None:
    def script(job: str, domain: int, client_id: int) -> tuple[Any, Any]:
        model = script_scene.build_model()
        with gradbus.client(job, name=f"site-{client_id}", domain=domain) as fed:
            before = fed.client_id
            while fed.receive(model):
                fed.send(model, samples=7)
            return before, fed.client_id

    reports, ids = run([script, script])
    assert [one.clients for one in reports] == [(0, 1)] * 3
    assert sorted(ids) == [(None, 0), (None, 1)]


def test_another_module_of_the_same_shape_is_loaded_and_read_each_time() -> None:
    def script(job: str, domain: int, client_id: int) -> None:
        with client(job, domain, client_id) as fed:
            while fed.receive(model := script_scene.build_model()):
                samples, loss = script_scene.train(model, client_id, fed.round.round_id, fed.round.lr)
                fed.send(model, samples=samples, loss=loss)

    expected, _ = run([], tasks=1)
    found, _ = run([script])
    assert [one.weights_crc32 for one in found] == [one.weights_crc32 for one in expected]


def test_what_a_script_does_to_the_model_between_send_and_receive_changes_nothing() -> None:
    """As an evaluation with other weights may: the next round is not loaded while the script has the model."""
    seen: list[torch.Tensor] = []

    def script(job: str, domain: int, client_id: int) -> None:
        model = script_scene.build_model()
        with client(job, domain, client_id) as fed:
            while fed.receive(model):
                samples, loss = script_scene.train(model, client_id, fed.round.round_id, fed.round.lr)
                fed.send(model, samples=samples, loss=loss)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                done = threading.Event()
                threading.Timer(0.3, done.set).start()  # the next command comes meanwhile
                done.wait()
                seen.extend(parameter.detach().clone() for parameter in model.parameters())

    expected, _ = run([], tasks=1)
    found, _ = run([script])
    assert [one.weights_crc32 for one in found] == [one.weights_crc32 for one in expected]
    assert not any(bool(one.any()) for one in seen)


def test_a_round_that_is_received_and_not_sent_is_sat_out() -> None:
    def script(job: str, domain: int, client_id: int) -> list[int]:
        model, trained = script_scene.build_model(), []
        with client(job, domain, client_id) as fed:
            while fed.receive(model):
                if fed.round.round_id == 2:
                    continue
                trained.append(fed.round.round_id)
                fed.send(model, samples=7)
        return trained

    reports, (trained,) = run([script], tasks=1, clients={"min": 1})
    assert trained == [1, 3]
    assert [one.clients for one in reports] == [(0, 1), (1,), (0, 1)]
    assert not any(one.strikes or "failed" in one.outcome for one in reports)


def test_training_is_called_off_when_the_round_is_over() -> None:
    """The second client has answered, and the deadline ends the round: the script finds out while it trains."""

    def script(job: str, domain: int, client_id: int) -> list[Any]:
        model, seen = script_scene.build_model(), []
        with client(job, domain, client_id) as fed:
            while fed.receive(model):
                if fed.round.round_id == 1:
                    assert not fed.should_stop
                    until(lambda: fed.should_stop)
                seen.append(fed.send(model, samples=7))
        return seen

    reports, (seen,) = run([script], tasks=1, clients={"min": 1}, round={"timeout_s": 1.0})
    assert reports[0].clients == (1,)
    assert seen[0] is False


def test_an_error_of_the_script_is_why_its_client_leaves() -> None:
    def script(job: str, domain: int, client_id: int) -> None:
        model = script_scene.build_model()
        with client(job, domain, client_id) as fed:
            while fed.receive(model):
                if fed.round.round_id == 2:
                    raise ZeroDivisionError("a bug")
                fed.send(model, samples=7)

    def caught(*arguments: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            script(*arguments)

    with capture_logs() as logs:
        reports, _ = run([caught], tasks=1, clients={"min": 1})
    assert [one.clients for one in reports] == [(0, 1), (1,), (1,)]
    left = [one for one in logs if one["event"] == "client left" and "a bug" in str(one.get("reason"))]
    assert [one["log_level"] for one in left] == ["warning"], [one for one in logs if one["event"] == "client left"]


def test_a_script_may_break_off() -> None:
    def script(job: str, domain: int, client_id: int) -> None:
        model = script_scene.build_model()
        with client(job, domain, client_id) as fed:
            assert fed.receive(model)
            assert fed.send(model, samples=7)

    reports, _ = run([script], tasks=1, clients={"min": 1})
    assert [one.clients for one in reports] == [(0, 1), (1,), (1,)]


def test_calls_out_of_order_say_what_to_call() -> None:
    def script(job: str, domain: int, client_id: int) -> None:
        model = script_scene.build_model()
        fed = client(job, domain, client_id)
        with pytest.raises(OutOfTurn, match="receive was called outside of a 'with' block"):
            fed.receive(model)
        with fed:
            with pytest.raises(OutOfTurn, match="no round before the first receive"):
                _ = fed.round
            with pytest.raises(OutOfTurn, match="Call receive"):
                fed.send(model, samples=1)
            assert fed.receive(model)
            with pytest.raises(ValueError, match="1 or more, got 0"):
                fed.send(model, samples=0)
            with pytest.raises(ConfigError, match=r"'0.weight' has shape \(8, 5\).*Pass the same model"):
                fed.send(nn.Sequential(nn.Linear(5, 8), *list(model)[1:]), samples=1)
            assert fed.send(model, samples=1)
            with pytest.raises(OutOfTurn, match="followed by one send"):  # the run goes on: there is a second round
                fed.send(model, samples=1)
            with pytest.raises(ConfigError, match="are gone"):
                fed.receive(nn.Linear(2, 2))
            while fed.receive(model):
                assert fed.send(model, samples=1)
            assert not fed.receive(model)
            with pytest.raises(OutOfTurn, match="after the end of the run"):
                fed.send(model, samples=1)
        with pytest.raises(OutOfTurn, match="after the 'with' block"):
            fed.receive(model)
        with pytest.raises(OutOfTurn, match="entered before"), fed:
            pass

    run([script], rounds=2)


def test_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(WrongKeyword, match="did you mean 'domain'"):
        gradbus.client("cells", client_id=0, domian=3)
    with pytest.raises(WrongKeyword, match=r"gradbus\.client\(\) has no keyword 'nam': did you mean 'name'"):
        gradbus.client("cells", nam="site-1")
    for job in ("cells", None):
        with pytest.raises(ConfigError, match=r"neither name nor client_id is given.*client\('cells', name='site-1'\)"):
            gradbus.client(job)
    with pytest.raises(ConfigError, match="name"):
        gradbus.client("cells", name="site 1\n")
    with pytest.raises(ConfigError, match=r"peers \(bus.peers\): expected a list of addresses, got the text"):
        gradbus.client("cells", client_id=0, peers="192.0.2.1")
    with pytest.raises(TypeError, match="a name is given as name='site-1'"):
        gradbus.client("cells", client_id="site-1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="domain"), gradbus.client("cells", client_id=0, domain=999):
        pass


def test_without_a_controller_receive_raises() -> None:
    config = gradbus.ClientConfig(controller_timeout_s=0.5)
    with (
        gradbus.client(f"nobody-{os.getpid()}", client_id=0, domain=new_domain(), config=config) as fed,
        pytest.raises(BarrierTimeout, match="controller: 0 of 1 ready"),
    ):
        fed.receive(script_scene.build_model())


def test_a_model_that_the_controller_does_not_have_is_refused() -> None:
    def script(job: str, domain: int, client_id: int) -> None:
        with (
            client(job, domain, client_id) as fed,
            pytest.raises(JoinRefused, match="model"),
        ):
            fed.receive(nn.Linear(3, 3))

    run([script], tasks=1, scripts_first=True, clients={"num": 1})  # else the run may be over before the script comes


def test_receive_raises_where_the_run_has_failed() -> None:
    def script(job: str, domain: int, client_id: int) -> None:
        model = script_scene.build_model()
        with client(job, domain, client_id) as fed:
            while fed.receive(model):
                assert not fed.send(model, samples=1, loss=float("nan"))  # diverged: the update does not count

    def caught(*arguments: Any) -> None:
        with pytest.raises(TrainingFailed):
            script(*arguments)

    with pytest.raises(ExceptionGroup) as failed:
        run([caught], round={"max_attempts": 1})
    assert failed.group_contains(TrainingFailed)


def test_heartbeats_go_on_while_the_script_trains() -> None:
    def script(job: str, domain: int, client_id: int) -> list[bool]:
        model, counts = script_scene.build_model(), []
        with client(job, domain, client_id) as fed:
            while fed.receive(model):
                until_s = time.monotonic() + 2.5
                while time.monotonic() < until_s:
                    script_scene.train(model, client_id, fed.round.round_id, fed.round.lr)  # holds the interpreter
                counts.append(fed.send(model, samples=100_000))  # a few steps for each
        return counts

    _, (counts,) = run([script], rounds=1, clients={"heartbeat_s": 0.2, "dead_after_s": 1.5})
    assert counts == [True]


def test_one_that_is_killed_between_receive_and_send_has_left() -> None:
    job, domain = new_job()
    process, _, events = warm.fork_that_tells(
        script_scene.receive_and_wait, {"job": job, "domain": domain, "client_id": 0}
    )
    seen = iter(events)
    assert next(seen)["event"] == "ready"

    def kill(*_: Any) -> None:
        assert next(seen)["event"] == "received"
        process.kill()

    try:
        with capture_logs() as logs:
            reports, _ = run([kill], tasks=1, rounds=2, job=(job, domain), clients={"min": 1, "num": 2})
    finally:
        process.kill()
        process.join(PATIENT_S)
        process.close()
    assert [one.clients for one in reports] == [(1,), (1,)]
    assert any(one["event"] == "client lost" and one["client"] == 0 for one in logs), logs


def test_a_child_by_fork_cannot_use_it_and_its_parent_goes_on() -> None:
    def script(job: str, domain: int, client_id: int) -> Any:
        process, _, events = warm.fork_that_tells(
            script_scene.fork_in_a_round, {"job": job, "domain": domain, "client_id": client_id}
        )
        found = list(events)
        process.join(PATIENT_S)
        code = process.exitcode
        process.close()
        return code, found

    reports, ((code, found),) = run([script], rounds=2)
    assert [one.clients for one in reports] == [(0,), (0,)]
    assert code == 0
    assert [one["counts"] for one in found] == [True, True]
    for one in found:
        assert one["child"] == 0, "the child has left the block without an effect"
        assert one["error"].startswith("ForkedProcess: the client of job")
        assert "Start processes that use the bus by spawn" in one["error"]


def test_a_script_goes_on_with_a_controller_that_was_started_again(tmp_path: Path) -> None:
    expected, _ = run([follow])
    job, domain = new_job()
    config = gradbus.FederatedConfig(
        rounds=3, eval_every=0, clients={"num": 1, "dead_after_s": PATIENT_S}, checkpoint={"dir": str(tmp_path)}
    )

    async def serve(limit: int) -> list[gradbus.RoundReport]:
        async with gradbus.connect(job, domain=domain) as bus:
            controller = gradbus.Controller(bus, script_scene.SceneTask(), config)
            async with contextlib.aclosing(controller.rounds()) as rounds:
                return [report async for report in _first(rounds, limit)]

    async def main() -> tuple[list[gradbus.RoundReport], list[bool]]:
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            script = group.create_task(asyncio.to_thread(follow, job, domain, 0))
            reports = await serve(1) + await serve(3)
        return reports, script.result()

    reports, counts = asyncio.run(main())
    assert {one.round_id: one.weights_crc32 for one in reports} == {one.round_id: one.weights_crc32 for one in expected}
    assert counts.count(True) == 3


async def _first(reports: AsyncIterator[gradbus.RoundReport], limit: int) -> AsyncIterator[gradbus.RoundReport]:
    """Yield so many at most."""
    left = limit
    async for report in reports:
        left -= 1
        yield report
        if not left:
            return


def test_a_script_pauses_and_resumes_and_is_followed_by_callbacks() -> None:
    told: list[tuple[int, bool, str]] = []
    models: list[int] = []

    class Follower:
        def on_model(self, round_id: int, model: Any) -> None:
            models.append(round_id)
            assert model.keys() == script_scene.build_model().state_dict().keys()

        def on_report(self, report: Any) -> None:
            told.append((report.round_id, report.counted, report.reason))

    def script(job: str, domain: int, client_id: int) -> bool:
        model = script_scene.build_model()
        config = gradbus.ClientConfig(controller_timeout_s=PATIENT_S)
        with gradbus.client(job, client_id=0, domain=domain, config=config, callbacks=[Follower()]) as fed:
            assert fed.receive(model)
            fed.pause()
            with pytest.raises(OutOfTurn, match=r"call resume\(\) first"):
                fed.receive(model)
            until(lambda: fed.should_stop)
            fed.resume()
            while fed.receive(model):
                fed.send(model, samples=7)
            return True

    with capture_logs() as logs:
        reports, _ = run([script], rounds=2, clients={"heartbeat_s": 0.1})
    assert [report.clients for report in reports] == [(0,), (0,)]
    assert told[0] == (1, False, "paused")
    assert [one[:2] for one in told[-2:]] == [(1, True), (2, True)]
    assert models[-1] == 2
    assert {one["event"] for one in logs if one["log_level"] == "warning"} <= {"round goes on"}


def test_a_pause_of_a_script_that_ends_at_once_ends_the_round_that_was_received() -> None:
    def script(job: str, domain: int, client_id: int) -> bool:
        model = script_scene.build_model()
        config = gradbus.ClientConfig(controller_timeout_s=PATIENT_S)
        with gradbus.client(job, client_id=0, domain=domain, config=config) as fed:
            assert fed.receive(model)
            fed.pause()
            fed.resume()
            until(lambda: fed.should_stop)
            while fed.receive(model):
                fed.send(model, samples=7)
            return True

    reports, _ = run([script], rounds=2, clients={"heartbeat_s": 0.1})
    assert [report.clients for report in reports] == [(0,), (0,)]
    assert reports[0].attempt > 1
    assert reports[1].attempt == 1


def _crc32(model: nn.Module) -> int:
    """As reports have it of the global model."""
    return zlib.crc32(FlatModel(model).read().numpy().tobytes())


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"selection": {"name": "round_robin", "count": 1}},
        {"mode": "asynchronous", "asynchronous": {"buffer": 1}, "clients": {"min": 1}},
        {"secure_aggregation": {"enabled": True}, "clients": {"min": 3}},
    ],
    ids=["all", "selected", "asynchronous", "masked"],
)
def test_after_the_run_the_model_is_the_last_global_one(rules: dict[str, Any]) -> None:
    """Also at a client that had no part in the last round."""

    def script(job: str, domain: int, client_id: int) -> int:
        model = script_scene.build_model()
        with client(job, domain, client_id) as fed:
            while fed.receive(model):
                samples, loss = script_scene.train(model, client_id, fed.round.round_id, fed.round.lr)
                fed.send(model, samples=samples, loss=loss)
        return _crc32(model)

    with capture_logs() as logs:
        reports, found = run([script] * 3, **rules)
    assert found == [reports[-1].weights_crc32] * 3
    assert not [one for one in logs if one["event"] == "last model not received"]


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["compile", "DataParallel", "DistributedDataParallel"])
def test_a_wrapped_model_is_exchanged_by_the_names_of_the_inner_one(wrapper: str) -> None:
    def script(job: str, domain: int, client_id: int) -> list[bool]:
        model, counts = script_scene.build_model(), []
        if wrapper == "compile":
            wrapped: Any = torch.compile(model, backend="eager")
        else:
            wrapped = getattr(nn.parallel, wrapper)(model)
        with client(job, domain, client_id) as fed:
            while fed.receive(wrapped):
                samples, loss = script_scene.train(model, client_id, fed.round.round_id, fed.round.lr)
                counts.append(fed.send(wrapped, samples=samples, loss=loss))
        return counts

    expected, _ = run([], tasks=1)
    with _process_group() if wrapper == "DistributedDataParallel" else contextlib.nullcontext():
        found, counts = run([script])
    assert [one.weights_crc32 for one in found] == [one.weights_crc32 for one in expected]
    assert counts == [[True] * 3]


def test_a_receive_may_have_a_deadline_and_be_called_again() -> None:
    others = threading.Event()

    def patient(job: str, domain: int, client_id: int) -> None:
        model = script_scene.build_model()
        with client(job, domain, client_id) as fed:
            with pytest.raises(TimeoutError, match=r"no round has begun within 0.2 s, and the run has not ended"):
                fed.receive(model, timeout_s=0.2)
            with pytest.raises(OutOfTurn, match="send was called without a round"):
                fed.send(model, samples=1)
            others.set()
            while fed.receive(model, timeout_s=PATIENT_S):
                samples, loss = script_scene.train(model, client_id, fed.round.round_id, fed.round.lr)
                fed.send(model, samples=samples, loss=loss)

    def second(job: str, domain: int, client_id: int) -> None:
        assert others.wait(PATIENT_S)
        follow(job, domain, client_id)

    expected, _ = run([], tasks=2)
    found, _ = run([patient, second])
    assert [one.weights_crc32 for one in found] == [one.weights_crc32 for one in expected]


def test_a_second_thread_is_told_to_use_a_client_of_its_own() -> None:
    job, domain = new_job()
    model, ended = script_scene.build_model(), []
    with client(job, domain, 0) as fed:

        def waits() -> None:
            try:
                fed.receive(model, timeout_s=PATIENT_S)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=waits)
        thread.start()
        until(fed._in_use.locked)  # noqa: SLF001 - nothing else tells that the call has begun
        with pytest.raises(OutOfTurn, match="Give each thread a client of its own"):
            fed.receive(model)
        fed.abandon()
        thread.join(PATIENT_S)
    assert isinstance(ended[0], asyncio.CancelledError | OutOfTurn)


def test_numbers_are_read_at_once() -> None:
    def script(job: str, domain: int, client_id: int) -> bool:
        model = script_scene.build_model()
        with client(job, domain, client_id) as fed:
            assert fed.receive(model)
            with pytest.raises(ValueError, match="metrics: expected single numbers by name"):
                fed.send(model, samples=1, metrics={"accuracy": "good"})  # type: ignore[dict-item]
            loss = next(model.parameters()).sum()  # with a graph
            return fed.send(model, samples=1, loss=loss, metrics={"accuracy": torch.tensor([0.5])})  # type: ignore[dict-item]

    reports, counts = run([script], rounds=1)
    assert counts == [True]
    assert reports[0].train_metrics == {"accuracy": 0.5}


def test_an_interrupt_of_the_user_ends_the_client() -> None:
    def interrupted(job: str, domain: int, client_id: int) -> None:
        model = script_scene.build_model()
        with client(job, domain, client_id) as fed:
            assert fed.receive(model)
            raise KeyboardInterrupt

    def script(*who: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            interrupted(*who)

    with capture_logs() as logs:
        reports, _ = run([script], tasks=1, clients={"min": 1})
    assert [one.clients for one in reports] == [(1,)] * 3
    assert [one["reason"] for one in logs if one["event"] == "client left" and one["client"] == 0] == ["stopped"]


@pytest.mark.parametrize("rule", [{"name": "fedprox", "mu": 0.5}, "scaffold"])
def test_a_rule_sees_the_gradients_of_a_closure(rule: Any) -> None:
    """Which are there only when the optimizer has called it, within its step."""

    def script(job: str, domain: int, client_id: int) -> None:
        model = script_scene.build_model()
        with client(job, domain, client_id) as fed:
            while fed.receive(model):
                samples, loss = script_scene.train(
                    model, client_id, fed.round.round_id, fed.round.lr, with_closure=True
                )
                fed.send(model, samples=samples, loss=loss)

    rules: dict[str, Any] = {"training": {"rule": rule, "lr": 0.05}}
    if rule == "scaffold":
        rules["strategy"] = "scaffold"
    expected, _ = run([], tasks=2, **rules)
    found, _ = run([script, script], **rules)
    assert [one.weights_crc32 for one in found] == [one.weights_crc32 for one in expected]
