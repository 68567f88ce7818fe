"""Trees of Controllers over real DDS: bits of a flat run, one payload for each site, and sites that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bus_helpers import reads
from patience import eventually
from safetensors.torch import save_file
from structlog.testing import capture_logs
from trees import DIM, DiesAfterCommit, UnequalTask, ended, rules, serve_site, site_of, state, tree

import gradbus
from gradbus.actors import Site
from gradbus.actors.federated.client.session import ControllerStart
from gradbus.actors.federated.controller.saved_run import SavedRun
from gradbus.actors.federated.site import site as site_module
from gradbus.actors.federated.site.site_controller import (
    RoundsAlone,
    SiteSum,
    UpstreamChanged,
)
from gradbus.actors.federated.site.site_member import Followed
from gradbus.actors.federated.site.site_rules import site_config
from gradbus.commands.history.invariants import check
from gradbus.commands.history.reader import read_history
from gradbus.models import NoopTask
from gradbus.models.task import TrainResult
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.config.federated import ClientConfig, UpstreamConfig
from gradbus.runtime.errors import BarrierTimeout, ConfigError, JoinRefused, TrainingFailed
from gradbus.runtime.security import Security
from gradbus.runtime.security.job_key import new_job_key, write_secret_file
from gradbus.runtime.transport.channels import ToClients
from gradbus.runtime.wire.control import Status, Welcome
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Identity, TrainCmd


async def flat_run(clients: int, more_rounds: int = 0, **more: Any) -> list[gradbus.RoundReport]:
    """The same clients with one Controller."""
    async with tree() as here, asyncio.TaskGroup() as group:
        bus = await here.bus("flat")
        theirs = await here.bus("flat")
        for client_id in range(clients):
            group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=client_id).run())
        return await gradbus.Controller(bus, NoopTask(DIM), rules(clients, rounds=3 + more_rounds, **more)).run()


async def tree_run(shape: list[list[int]], **more: Any) -> tuple[list[gradbus.RoundReport], int]:
    """Regions, each with sites of so many clients. Returns the reports of the centre, and its bytes in."""
    async with tree() as here, asyncio.TaskGroup() as group:
        centre, above, number = await here.bus("centre"), await here.bus("centre"), 0
        for region, sites in enumerate(shape):
            regional, below = await here.bus(f"region-{region}"), await here.bus(f"region-{region}")
            group.create_task(site_of(above, regional, region, rules(len(sites), sites=True)).run())
            for site, clients in enumerate(sites):
                local, theirs = await here.bus(f"site-{region}-{site}"), await here.bus(f"site-{region}-{site}")
                group.create_task(site_of(below, local, site, rules(clients)).run())
                for client_id in range(number, number + clients):
                    group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=client_id).run())
                number += clients
        controller = gradbus.Controller(centre, NoopTask(DIM), rules(len(shape), sites=True, rounds=3, **more))
        return await controller.run(), number


# To a strategy the codecs differ in the values of the sum alone, and sq8 rounds what it makes of them, too.
@pytest.mark.parametrize(
    ("strategy", "codec"),
    [("fedavg", "fp32"), *((name, "sq8") for name, kind in STRATEGIES.table.items() if kind.adds_sums)],
)
def test_a_tree_of_two_regions_with_two_sites_each_has_the_bits_of_a_flat_run(strategy: str, codec: str) -> None:
    flat = asyncio.run(flat_run(8, codec=codec, downlink_codec=codec, strategy=strategy))
    found, clients = asyncio.run(tree_run([[2, 2], [1, 3]], codec=codec, downlink_codec=codec, strategy=strategy))
    assert clients == 8
    for above, below in zip(found, flat, strict=True):
        assert above.weights_crc32 == below.weights_crc32
        assert (above.num_samples, above.loss) == (below.num_samples, below.loss)
        assert above.clients == (0, 1)
        assert above.bytes_up <= 2 * 8 * DIM < 8 * 4 * DIM  # two sums, whatever the number of clients
    assert len({report.weights_crc32 for report in found}) == 3


class OneSample(NoopTask):
    """Makes as many steps as it is asked to, over and over on one sample."""

    def train(self, model: Any, *, steps: int, lr: float, **_: Any) -> TrainResult:  # type: ignore[override]
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(steps):
            model.vector.grad = torch.ones(DIM)
            optimizer.step()
        return TrainResult(num_samples=1, loss=0.5)


def test_a_site_takes_as_many_steps_for_a_sample_as_the_top_level_has_asked_for() -> None:
    async def main() -> list[gradbus.RoundReport]:
        async with tree() as here, asyncio.TaskGroup() as group:
            above, local, theirs = [await here.bus(name) for name in ("centre", "site", "site")]
            site = site_of(above, local, 0, rules(1, round={"timeout_s": 5.0, "max_attempts": 1}))
            group.create_task(site.run())
            group.create_task(gradbus.Client(theirs, OneSample(DIM), client_id=0).run())
            config = rules(1, sites=True, rounds=2, training={"steps": 50})
            await gradbus.Controller(await here.bus("centre"), NoopTask(DIM), config).run()
            return list(site.progress.reports)

    reports = asyncio.run(main())
    assert [(report.num_samples, dict(report.strikes)) for report in reports] == [(1, {})] * 2


class Gate:
    """Holds the training of one client in one round until it is opened; the thread tells that it is there."""

    def __init__(self, client_id: int, round_id: int) -> None:
        self._at = client_id, round_id
        self.reached, self._open = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, client_id: int, round_id: int) -> None:
        if (client_id, round_id) == self._at:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._open.wait(20.0)

    def open(self) -> None:
        self._open.set()


def crcs(reports: Sequence[gradbus.RoundReport]) -> list[int]:
    return [report.weights_crc32 for report in reports]


@pytest.mark.parametrize("who", ["site", "centre"])
def test_a_site_or_the_centre_that_starts_again_in_a_round_changes_no_bit(who: str, tmp_path: Path) -> None:
    async def main() -> list[gradbus.RoundReport]:
        async with tree() as here, asyncio.TaskGroup() as group:
            gate = Gate(3, 2)
            centre, above, second = [await here.bus("centre") for _ in range(3)]
            local, theirs = [await here.bus("site-0") for _ in range(2)]
            other, others = [await here.bus("site-1") for _ in range(2)]
            for client_id in range(4):
                bus = theirs if client_id < 2 else others
                group.create_task(gradbus.Client(bus, UnequalTask(hold=gate), client_id=client_id).run())
            group.create_task(site_of(second, other, 1, rules(2)).run())

            def start_site() -> asyncio.Task[Any]:
                config = rules(2, **state(tmp_path, "site"))
                return group.create_task(site_of(above, local, 0, config, alone=False).run())

            def start_centre() -> asyncio.Task[Any]:
                config = rules(2, sites=True, rounds=3, **state(tmp_path, "centre"))
                return group.create_task(gradbus.Controller(centre, NoopTask(DIM), config).run())

            site, controller = start_site(), start_centre()
            await gate.reached.wait()
            if who == "site":  # its own clients may well have counted in its sum, which is gone with it
                await ended(site)
                start_site()
            else:
                await ended(controller)
                controller = start_centre()
            gate.open()
            return list(await controller)

    found = asyncio.run(main())
    assert crcs(found) == crcs(asyncio.run(flat_run(4)))
    assert [report.clients for report in found] == [(0, 1)] * 3


def test_clients_below_a_site_train_by_the_settings_with_which_the_top_level_starts_again(tmp_path: Path) -> None:
    async def main() -> tuple[list[gradbus.RoundReport], list[gradbus.RoundReport], float]:
        async with tree() as here, asyncio.TaskGroup() as group:
            gate = Gate(0, 2)
            centre, above = [await here.bus("centre") for _ in range(2)]
            local, theirs = [await here.bus("site") for _ in range(2)]
            site = site_of(above, local, 0, rules(1, checkpoint={"dir": tmp_path / "site", "resume": False}))
            group.create_task(site.run())
            group.create_task(gradbus.Client(theirs, UnequalTask(hold=gate), client_id=0).run())

            def start_centre(**more: Any) -> asyncio.Task[list[gradbus.RoundReport]]:
                config = rules(1, sites=True, rounds=3, **state(tmp_path, "centre"), **more)
                return group.create_task(gradbus.Controller(centre, NoopTask(DIM), config).run())

            controller = start_centre()
            await gate.reached.wait()
            await ended(controller)
            controller = start_centre(codec="q8", round={"timeout_s": 200.0})
            await eventually(lambda: any(line["event"] == "site begins anew" for line in logs))
            gate.open()
            found = await controller
            deadlines = [line["here_s"] for line in logs if line["event"] == "round deadlines"]
            return found, list(site.progress.reports), deadlines[-1]

    with capture_logs() as logs:
        above, below, deadline_s = asyncio.run(main())
    assert len(above) == len(below) == 3
    assert below[0].bytes_up > 4 * DIM
    assert all(DIM < report.bytes_up < 2 * DIM for report in below[1:])
    assert deadline_s == 0.8 * 200.0


@pytest.mark.parametrize(("rejoin", "resume"), [("drop", False), ("contribute", True)])
def test_a_site_that_is_cut_off_goes_on_alone_and_rejoins(rejoin: str, resume: bool, tmp_path: Path) -> None:
    async def main() -> tuple[list[gradbus.RoundReport], list[Any]]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above = [await here.bus("centre") for _ in range(2)]
            local, theirs = [await here.bus("site") for _ in range(2)]
            gate, kept = Gate(1, 3), {"dir": tmp_path / "history"}
            for client_id in range(2):
                client = gradbus.Client(
                    theirs, UnequalTask(hold=gate), client_id=client_id, config=ClientConfig(history=kept)
                )
                group.create_task(client.run())
            config = rules(2, checkpoint={"dir": tmp_path / "site", "resume": resume}, history=kept)
            site = site_of(above, local, 0, config, alone_after_s=1.0, rejoin=rejoin)
            group.create_task(site.run())
            top = rules(1, sites=True, rounds=4, **state(tmp_path, "centre"))
            with capture_logs() as logs:

                def alone() -> list[Any]:
                    return [line for line in logs if line["event"] == "round alone"]

                controller = group.create_task(gradbus.Controller(centre, NoopTask(DIM), top).run())
                await gate.reached.wait()  # from now on the site has the model of round 2
                await ended(controller)
                gate.open()
                await eventually(lambda: len(alone()) >= 2)
                assert site.progress.phase == "alone"
                reports = await gradbus.Controller(centre, NoopTask(DIM), top).run()
            (back,) = [line for line in logs if line["event"] == "level above is back"]
            assert back["rounds_alone"] >= len(alone())
            assert CheckpointStore.to_read(Path(back["kept"])).rounds()[-1] == back["rounds_alone"]
            return reports, [report.marks for report in site.progress.reports]

    found, marks = asyncio.run(main())
    journals = {one.name: one for one in check(read_history(tmp_path / "history"))}
    assert [one.violations for one in journals.values() if one.violations] == []  # of the rounds alone as well
    assert all(journals[name].checked for name in ("I1", "I2", "I4", "I7", "I8"))
    flat = asyncio.run(flat_run(2, more_rounds=1))
    assert crcs(found)[:2] == crcs(flat)[:2]
    if rejoin == "drop":
        assert crcs(found) == crcs(flat)
        assert not any(marks)
    else:
        assert crcs(found)[2] != crcs(flat)[2]
        assert [report.num_samples - 8 for report in found] == [0, 0, 8, 0]
        assert [bool(mark) for mark in marks] == [False, False, True, False]


def test_rounds_alone_that_went_into_a_sum_are_not_contributed_again_by_a_site_that_is_cut_off_then(
    tmp_path: Path,
) -> None:
    async def main() -> tuple[list[gradbus.RoundReport], list[Path]]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above = [await here.bus("centre") for _ in range(2)]
            local, theirs = [await here.bus("site") for _ in range(2)]
            gate = Gate(0, 2)
            group.create_task(gradbus.Client(theirs, UnequalTask(hold=gate), client_id=0).run())
            config = rules(1, **state(tmp_path, "site"))
            site = site_of(above, local, 0, config, alone_after_s=1.0, rejoin="contribute")
            group.create_task(site.run())
            top = rules(1, sites=True, rounds=3, **state(tmp_path, "centre"))
            with capture_logs() as logs:

                def count(event: str) -> int:
                    return sum(line["event"] == event for line in logs)

                controller = group.create_task(gradbus.Controller(centre, NoopTask(DIM), top).run())
                await gate.reached.wait()
                await ended(controller)
                gate.open()
                await eventually(lambda: count("round alone") >= 1)
                with pytest.raises(ConnectionAbortedError):
                    await DiesAfterCommit(centre, NoopTask(DIM), top).dies_after(2).run()
                await eventually(lambda: count("cut off") == 2 and site.progress.phase == "alone")
                before = count("round alone")
                await eventually(lambda: count("round alone") > before)
                reports = await gradbus.Controller(centre, NoopTask(DIM), top).run()
            return reports, [Path(line["kept"]) for line in logs if line["event"] == "level above is back"]

    reports, kept = asyncio.run(main())
    assert [report.num_samples for report in reports] == [3, 6, 6]  # each sum has one contribution
    runs = [SavedRun.of(CheckpointStore.to_read(path).load_newest(SavedRun.of)).run_id for path in kept]
    assert [path.name for path in kept] == ["alone-after-000001", "alone-after-000001-2"]
    assert len(set(runs)) == 2  # the second one began from the model from above


OF_ROUND_5 = Followed(5, torch.zeros(DIM), TrainCmd(6, 1, 1, 0.1, 0), Welcome(0, 1, 7, 1, "fp32", "{}", 2, 0.5), None)


class Members:
    """Stand in for the upward side of a site, one after the other. Each has the model of round 5.

    Attributes:
        given: what each was given of the one before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Exception) -> None:
        """``ends``: how they end; the one after the last comes to the end of the run."""
        self.given: list[Followed | None] = []
        self._ends = iter(ends)
        monkeypatch.setattr(site_module, "SiteMember", self._make)

    def _make(self, *_: Any, followed: Followed | None, newest: ControllerStart) -> Any:
        self.given.append(followed)
        return SimpleNamespace(controller=None, is_cut_off=True, followed=OF_ROUND_5, newest=newest, run=self._run)

    async def _run(self) -> None:
        for end in self._ends:
            raise end


def cut_off() -> BarrierTimeout:
    return BarrierTimeout("level above", missing=[], ready=0, needed=1, timeout_s=1.0)


async def come_back(level: gradbus.Bus, site: gradbus.Site) -> None:
    """A Controller of the level above is received by a site that is alone."""
    await eventually(lambda: site.progress.phase == "alone")
    await reads(level, ToClients)
    await level.publish(Identity(CONTROLLER, 5), Status(7, 5, "waiting", 0, 1))


def test_a_site_that_is_cut_off_again_after_the_same_round_goes_on_with_its_run_alone_with_resume_off_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[Any]

    Members(monkeypatch, cut_off(), cut_off())

    def count(event: str) -> int:
        return sum(line["event"] == event for line in logs)

    async def alone_for_two_rounds_more(site: gradbus.Site, level: gradbus.Bus) -> None:
        rounds, back = count("round alone"), count("level above is back")
        await eventually(lambda: count("round alone") >= rounds + 2)
        await come_back(level, site)
        await eventually(lambda: count("level above is back") > back)

    async def main() -> None:
        async with tree() as here:
            above, level, local, theirs = [await here.bus(name) for name in ("centre", "centre", "site", "site")]
            site = site_of(above, local, 0, rules(1, checkpoint={"dir": tmp_path, "resume": False}))
            client = asyncio.create_task(gradbus.Client(theirs, UnequalTask(), client_id=0).run())
            running = asyncio.create_task(site.run())
            for _ in range(2):
                await alone_for_two_rounds_more(site, level)
            await running
            await ended(client)

    save_file({"weights": torch.zeros(DIM)}, tmp_path / "round-000005.safetensors")
    with capture_logs() as logs:
        asyncio.run(main())
    first, again = [line["rounds_alone"] for line in logs if line["event"] == "level above is back"]
    assert 2 <= first <= again - 2


@pytest.mark.parametrize("damaged", [False, True], ids=["none", "all-damaged"])
def test_a_site_whose_rounds_alone_could_not_begin_goes_on_with_the_level_above(
    damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Members(monkeypatch, cut_off())
    if damaged:
        (tmp_path / "alone-after-000005").mkdir()
        for kind in ("json", "safetensors"):
            (tmp_path / "alone-after-000005" / f"round-000001.{kind}").write_text("torn")
        save_file({"weights": torch.zeros(DIM)}, tmp_path / "round-000005.safetensors")

    async def main() -> None:
        async with tree() as here:
            above, level, local = [await here.bus(name) for name in ("centre", "centre", "site")]
            site = site_of(above, local, 0, rules(1, checkpoint={"dir": tmp_path}))
            running = asyncio.create_task(site.run())
            await eventually(lambda: any(line["event"] == "rounds alone end" for line in logs))
            await come_back(level, site)
            await running

    with capture_logs() as logs:
        asyncio.run(main())
    (back,) = [line for line in logs if line["event"] == "level above is back"]
    assert back["rounds_alone"] == 0
    assert any(line["event"] == "rounds alone cannot be read" for line in logs) == damaged


def test_rounds_alone_in_a_sum_that_does_not_count_are_named_and_mark_no_later_round(tmp_path: Path) -> None:
    async def main() -> list[gradbus.RoundReport]:
        async with tree() as here, asyncio.TaskGroup() as group:
            local, theirs = [await here.bus("site") for _ in range(2)]
            client = group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=0).run())
            reports: list[gradbus.RoundReport] = []
            controller, serving = serve_site(group, local, rules(1), reports)
            await controller.started.wait()
            controller.contribution = RoundsAlone(7, tmp_path, torch.ones(DIM), 5)
            model = torch.zeros(DIM)
            for round_id in (1, 2):
                await controller.adopt(round_id - 1, model, {})
                samples = (
                    await controller.gather(TrainCmd(round_id, 1, 1, 0.1, 0), time.monotonic() + 20.0)
                ).num_samples
                assert samples == {1: 3 + 5, 2: 3}[round_id]
            controller.counted_round = 2  # and round 1 was committed without this site
            await controller.adopt(2, model, {})
            controller.end()
            await asyncio.gather(serving, client)
            return reports

    with capture_logs() as logs:
        (report,) = asyncio.run(main())
    assert (report.round_id, report.marks) == (2, {})
    (lost,) = [line for line in logs if line["event"] == "rounds alone not contributed"]
    assert (lost["round"], lost["kept"]) == (1, str(tmp_path))


def test_rounds_alone_in_the_sum_of_a_round_that_is_called_off_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with tree() as here, asyncio.TaskGroup() as group:
            local, theirs = [await here.bus("site") for _ in range(2)]
            client = group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=0).run())
            controller, serving = serve_site(group, local, rules(1))
            await controller.started.wait()
            gate, contribute = Gate(0, 1), SiteSum.contribute

            def held(total: SiteSum, difference: torch.Tensor, num_samples: int) -> None:
                contribute(total, difference, num_samples)
                gate(0, 1)

            monkeypatch.setattr(SiteSum, "contribute", held)
            controller.contribution = RoundsAlone(7, tmp_path, torch.ones(DIM), 5)
            await controller.adopt(0, torch.zeros(DIM), {})
            gathering = group.create_task(controller.gather(TrainCmd(1, 1, 1, 0.1, 0), time.monotonic() + 20.0))
            await gate.reached.wait()
            gathering.cancel()
            gate.open()
            await asyncio.wait({gathering})
            assert controller.contribution is None  # it is in a sum, and must not be in another one
            await controller.adopt(1, torch.zeros(DIM), {})  # the level above has gone on without it
            controller.end()
            await asyncio.gather(serving, client)

    with capture_logs() as logs:
        asyncio.run(main())
    (lost,) = [line for line in logs if line["event"] == "rounds alone not contributed"]
    assert (lost["round"], lost["kept"]) == (1, str(tmp_path))


def test_a_site_that_starts_again_below_an_earlier_model_than_its_own_has_its_clients_train_from_that(
    tmp_path: Path,
) -> None:
    async def main() -> int:
        async with tree() as here, asyncio.TaskGroup() as group:
            local, theirs = [await here.bus("site") for _ in range(2)]
            client = group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=0).run())
            config, model = rules(1, **state(tmp_path, "site")), torch.zeros(DIM)
            before, serving = serve_site(group, local, config)
            await before.started.wait()
            await before.adopt(3, model, {})
            await ended(serving)
            controller, serving = serve_site(group, local, config)
            await controller.started.wait()  # its client is welcomed for round 4
            await controller.adopt(1, model, {})  # the level above has gone back
            samples = (await controller.gather(TrainCmd(2, 1, 1, 0.1, 0), time.monotonic() + 10.0)).num_samples
            await controller.adopt(2, model, {})  # else its client waits for the last model, for half a minute
            controller.end()
            await asyncio.gather(serving, client)
            return samples

    assert asyncio.run(main()) == 3


def test_a_round_that_is_called_off_before_it_is_commanded_is_left_open_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> int:
        async with tree() as here, asyncio.TaskGroup() as group:
            local, theirs = [await here.bus("site") for _ in range(2)]
            client = group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=0).run())
            controller, serving = serve_site(group, local, rules(1))
            await controller.started.wait()
            await controller.adopt(0, torch.zeros(DIM), {})
            asked, publish = asyncio.Event(), gradbus.Bus.publish

            async def hang(bus: gradbus.Bus, identity: Identity, body: Any) -> None:
                if isinstance(body, TrainCmd):
                    asked.set()
                    await asyncio.Event().wait()
                await publish(bus, identity, body)

            with monkeypatch.context() as hanging:
                hanging.setattr(gradbus.Bus, "publish", hang)
                first = group.create_task(controller.gather(TrainCmd(1, 1, 1, 0.1, 0), time.monotonic() + 20.0))
                await asked.wait()
                await ended(first)
            assert controller._run.parts.joining.next_round() == 1  # noqa: SLF001 - for whoever comes now
            assert controller._run.parts.receiver._round is None  # noqa: SLF001 - what is sent to it now shows nowhere
            samples = (await controller.gather(TrainCmd(1, 1, 1, 0.1, 0), time.monotonic() + 20.0)).num_samples
            await controller.adopt(1, torch.zeros(DIM), {})  # the last model, for which its client waits
            controller.end()
            await asyncio.gather(serving, client)
            return samples

    assert asyncio.run(main()) == 3


def test_a_client_that_comes_to_a_site_during_an_attempt_that_is_called_off_takes_part_in_the_next_one() -> None:
    async def main() -> int:
        async with tree() as here, asyncio.TaskGroup() as group:
            local, theirs = [await here.bus("site") for _ in range(2)]
            gate = Gate(0, 1)
            group.create_task(gradbus.Client(theirs, UnequalTask(hold=gate), client_id=0).run())
            controller, serving = serve_site(group, local, rules(1))
            await controller.started.wait()
            await controller.adopt(0, torch.zeros(DIM), {})
            command = TrainCmd(1, 1, 1, 0.1, 0)
            first = group.create_task(controller.gather(command, time.monotonic() + 20.0))
            await gate.reached.wait()
            group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=1).run())
            selection = controller._run.parts.selection  # noqa: SLF001 - when it is ready, nothing else shows
            await eventually(lambda: 1 in selection.ready(2))
            await ended(first)  # the level above has begun the round anew
            gate.open()
            samples = (await controller.gather(command, time.monotonic() + 20.0)).num_samples
            await controller.adopt(1, torch.zeros(DIM), {})
            controller.end()
            await serving
            return samples

    assert asyncio.run(main()) == 3 + 5


def test_a_site_that_is_stopped_within_a_round_leaves_no_task_behind() -> None:
    async def main() -> list[str]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, local, theirs = [await here.bus(name) for name in ("centre", "centre", "site", "site")]
            gate = Gate(0, 1)
            client = group.create_task(gradbus.Client(theirs, UnequalTask(hold=gate), client_id=0).run())
            top = group.create_task(gradbus.Controller(centre, NoopTask(DIM), rules(1, sites=True)).run())
            site = group.create_task(site_of(above, local, 0, rules(1)).run())
            await gate.reached.wait()
            await ended(site)
            left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("site")]
            gate.open()
            await ended(client)
            await ended(top)
            return left

    assert asyncio.run(main()) == []


def test_before_its_first_command_a_site_waits_for_the_level_above_as_long_as_any_client_does(tmp_path: Path) -> None:
    alone_after_s = 0.2

    async def main() -> list[gradbus.RoundReport]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, local, theirs = [await here.bus(name) for name in ("centre", "centre", "site", "site")]
            group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=0).run())
            site = site_of(above, local, 0, rules(1, **state(tmp_path, "site")), alone_after_s=alone_after_s)
            group.create_task(site.run())
            first = gradbus.Controller(centre, NoopTask(DIM), rules(2, sites=True, **state(tmp_path, "centre")))
            running = group.create_task(first.run())  # commands nothing: there is one site
            await eventually(lambda: first.progress.clients == (0,))
            await ended(running)
            gone_s = time.monotonic()
            await eventually(lambda: time.monotonic() > gone_s + 5 * alone_after_s)
            top = rules(1, sites=True, rounds=1, **state(tmp_path, "centre"))
            return await gradbus.Controller(centre, NoopTask(DIM), top).run()

    assert [report.clients for report in asyncio.run(main())] == [(0,)]


def test_a_site_that_begins_anew_forgets_the_model_with_which_it_was_cut_off_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone_back = UpstreamChanged("the level above has gone back from round 90 to 89")
    members = Members(monkeypatch, cut_off(), gone_back)

    async def main() -> None:
        async with tree() as here:
            above, level, local = [await here.bus(name) for name in ("centre", "centre", "site")]
            site = site_of(above, local, 0, rules(1, **state(tmp_path, "site")))
            running = asyncio.create_task(site.run())
            await come_back(level, site)
            await running

    asyncio.run(main())
    assert members.given == [None, OF_ROUND_5, None]


def test_a_site_that_is_late_is_left_out_and_back_in_the_next_round() -> None:
    async def main() -> list[gradbus.RoundReport]:
        async with tree() as here, asyncio.TaskGroup() as group:
            gate = Gate(1, 2)
            centre, first, second = [await here.bus("centre") for _ in range(3)]
            for number, above in enumerate((first, second)):
                local, theirs = [await here.bus(f"site-{number}") for _ in range(2)]
                group.create_task(site_of(above, local, number, rules(1)).run())
                group.create_task(gradbus.Client(theirs, UnequalTask(hold=gate), client_id=number).run())
            config = rules(2, sites=True, rounds=4, clients={"min": 1}, round={"quorum": 0.5, "grace_s": 0.2})
            reports = []
            async with contextlib.aclosing(gradbus.Controller(centre, NoopTask(DIM), config).rounds()) as rounds:
                async for report in rounds:
                    reports.append(report)
                    if report.round_id == 2:
                        gate.open()
            return reports

    found = asyncio.run(main())
    assert [report.clients for report in found[:2]] == [(0, 1), (0,)]
    assert found[3].clients == (0, 1)


def test_who_takes_part_is_told_apart_and_refused_by_the_other_kind() -> None:
    async def main(sites: bool) -> str:
        async with tree() as here:
            bus, theirs, local = await here.bus("one"), await here.bus("one"), await here.bus("two")
            running = asyncio.create_task(gradbus.Controller(bus, NoopTask(DIM), rules(1, sites=sites)).run())
            client = gradbus.Client(theirs, UnequalTask(), client_id=0)
            other = client if sites else site_of(theirs, local, 0, rules(1))
            try:
                with pytest.raises(JoinRefused) as refused:
                    await other.run()
            finally:
                await ended(running)
            return str(refused.value)

    assert "let it join the Controller of its site" in asyncio.run(main(sites=True))
    assert "set its clients.kind to sites" in asyncio.run(main(sites=False))


@pytest.mark.parametrize(
    ("config", "above", "text"),
    [
        ({"strategy": "median"}, {}, "strategy is median: a site adds up exact sums"),
        ({"downlink_codec": "q8"}, {}, "a site passes models on unchanged"),
        ({"rounds": 3, "training": {"lr": 0.5}}, {}, "federated.rounds, federated.training: at a site"),
        ({"history": {"payloads": True}}, {}, "cannot be computed again"),
        ({}, {"alone": True}, "needs federated.checkpoint.dir"),
        ({}, {"site": None}, "upstream.site is missing"),
        ({"mode": "asynchronous"}, {}, "is of one round of the level above"),
    ],
)
def test_rules_that_are_not_for_a_site_are_refused_at_its_start(config: Any, above: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Site(
            None,
            None,
            NoopTask(5),
            gradbus.FederatedConfig(**config),  # type: ignore[arg-type]
            UpstreamConfig(**{"site": 0, "alone": False, **above}),
        )


def test_what_needs_single_updates_is_refused_above_sites() -> None:
    for limits in ({"clip_norm": 1.0}, {"cap_samples": 5}):
        with pytest.raises(ConfigError, match="set it at the sites"):
            rules(2, sites=True, limits=limits)

    async def main() -> None:
        async with tree() as here:
            config = rules(5, sites=True, strategy="median")
            await gradbus.Controller(await here.bus("centre"), NoopTask(DIM), config).run()

    with pytest.raises(ConfigError, match="median needs the updates of single clients"):
        asyncio.run(main())


def test_the_deadline_of_a_site_follows_from_that_above_it() -> None:
    welcome = Welcome(0, 1, 2, 1, "fp32", "{}", 2, 0.5, round_s=100.0)

    def deadline_of(**own: Any) -> float:
        return site_config(rules(1, **own), UpstreamConfig(site=0, alone=False), welcome).round.timeout_s

    assert deadline_of() == 80.0
    assert deadline_of(round={"timeout_s": 60}) == 60.0
    with pytest.raises(ConfigError, match=r"timeout_s is 90 s, .* ends after 100 s.* set at most 80 s"):
        deadline_of(round={"timeout_s": 90})


def test_each_level_is_sealed_with_a_key_of_its_own(tmp_path: Path) -> None:
    keys = {level: tmp_path / f"{level}.key" for level in ("centre", "site")}
    for path in keys.values():
        write_secret_file(path, new_job_key().text)

    async def main() -> list[gradbus.RoundReport]:
        async with tree() as here, asyncio.TaskGroup() as group:

            async def sealed(level: str) -> gradbus.Bus:
                return await here.bus(level, security=Security(level="psk", key_file=keys[level]))

            group.create_task(site_of(await sealed("centre"), await sealed("site"), 0, rules(1)).run())
            group.create_task(gradbus.Client(await sealed("site"), UnequalTask(), client_id=0).run())
            config = rules(1, sites=True, rounds=3)
            return await gradbus.Controller(await sealed("centre"), NoopTask(DIM), config).run()

    assert crcs(asyncio.run(main())) == crcs(asyncio.run(flat_run(1)))


def test_a_site_whose_clients_have_other_ids_than_the_first_ones_misses_none() -> None:
    async def main() -> dict[int, str]:
        async with tree() as here, asyncio.TaskGroup() as group:
            site = site_of(await here.bus("centre"), await here.bus("site"), 0, rules(2))
            running, theirs = group.create_task(site.run()), await here.bus("site")
            for client_id in (2, 3):  # unlike those of another site
                group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=client_id).run())
            await gradbus.Controller(await here.bus("centre"), NoopTask(DIM), rules(1, sites=True, rounds=1)).run()
            await running
            return dict(site.progress.never_counted)

    assert asyncio.run(main()) == {}


class Broken(NoopTask):
    def train(self, model: Any, **arguments: Any) -> Any:
        raise RuntimeError("the sensor is unplugged")


def test_training_that_fails_at_a_site_ends_the_run_at_every_level_with_the_reason() -> None:
    async def main() -> list[Any]:
        async with tree() as here:
            centre, above, local, theirs = [await here.bus(name) for name in ("centre", "centre", "site", "site")]
            config = rules(1, sites=True, rounds=3, round={"max_attempts": 1})
            return await asyncio.gather(
                gradbus.Controller(centre, NoopTask(DIM), config).run(),
                site_of(above, local, 0, rules(1, round={"max_attempts": 1})).run(),
                gradbus.Client(theirs, Broken(DIM), client_id=0).run(),
                return_exceptions=True,
            )

    found = asyncio.run(main())
    assert [type(error) for error in found] == [TrainingFailed] * 3
    assert all("the sensor is unplugged" in str(error) for error in found)


def test_a_site_that_was_cut_off_follows_no_earlier_start_of_the_level_above(tmp_path: Path) -> None:
    logs: list[Any]

    def count(event: str) -> int:
        return sum(line["event"] == event for line in logs)

    async def main() -> tuple[list[gradbus.RoundReport], int]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, level, local, theirs = [
                await here.bus(name) for name in ("centre", "centre", "centre", "site", "site")
            ]
            gate = Gate(0, 2)
            group.create_task(gradbus.Client(theirs, UnequalTask(hold=gate), client_id=0).run())
            site = site_of(above, local, 0, rules(1, **state(tmp_path, "site")), alone_after_s=1.0)
            group.create_task(site.run())
            top = rules(1, sites=True, rounds=2, **state(tmp_path, "centre"))
            first = gradbus.Controller(centre, NoopTask(DIM), top)
            running = group.create_task(first.run())
            await gate.reached.wait()
            await ended(running)
            gate.open()
            await eventually(lambda: site.progress.phase == "alone")
            await reads(level, ToClients)
            await level.publish(Identity(CONTROLLER, 1), Status(first.run_id, 1, "training", 0, 1))
            await eventually(lambda: count("earlier start of the level above ignored") == 1)
            back = count("level above is back")
            return await gradbus.Controller(centre, NoopTask(DIM), top).run(), back

    with capture_logs() as logs:
        reports, back = asyncio.run(main())
    assert back == 0
    assert [report.clients for report in reports] == [(0,), (0,)]
    assert count("level above is back") == 1


def test_a_site_whose_run_ends_while_it_waits_for_its_clients_ends_with_it() -> None:
    async def main() -> list[gradbus.RoundReport]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, late_above = [await here.bus("centre") for _ in range(3)]
            local, theirs, late_local = [await here.bus(name) for name in ("site-0", "site-0", "site-1")]
            gate, waits = Gate(0, 1), asyncio.Event()
            group.create_task(gradbus.Client(theirs, UnequalTask(hold=gate), client_id=0).run())
            group.create_task(site_of(above, local, 0, rules(1)).run())
            top = rules(2, sites=True, rounds=2, clients={"min": 1, "start_grace_s": 0.2})
            running = group.create_task(gradbus.Controller(centre, NoopTask(DIM), top).run())
            await gate.reached.wait()
            config = rules(1, clients={"start_timeout_s": 15.0})  # no client of this site ever comes
            member = UpstreamConfig(site=1, alone=False)
            late = Site(late_above, late_local, NoopTask(DIM), config, member, on_open=waits.set)
            ending = group.create_task(late.run())
            await waits.wait()
            gate.open()
            reports = await running
            await ending
            return reports

    assert [report.clients for report in asyncio.run(main())] == [(0,), (0,)]


class FailsOnce(UnequalTask):
    """Fails its first training of the first round."""

    trained = 0

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        self.trained += 1
        if self.trained == 1:
            raise RuntimeError("the data are not there yet")
        return super().train(model, **arguments)


def test_a_client_that_failed_in_all_attempts_of_its_site_trains_when_the_level_above_asks_the_site_again() -> None:
    async def main() -> list[gradbus.RoundReport]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, local, theirs = [await here.bus(name) for name in ("centre", "centre", "site", "site")]
            group.create_task(gradbus.Client(theirs, FailsOnce(), client_id=0).run())
            group.create_task(site_of(above, local, 0, rules(1, round={"max_attempts": 1})).run())
            # A failure is in the next heartbeat, too, and may end another attempt.
            config = rules(1, sites=True, rounds=2, round={"timeout_s": 5.0, "max_attempts": 8})
            return await gradbus.Controller(centre, NoopTask(DIM), config).run()

    found = asyncio.run(main())
    assert [report.clients for report in found] == [(0,), (0,)]
    assert found[0].attempt > 1
