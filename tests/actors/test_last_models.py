"""What the next start of a controller, or of a site, owes its clients: the last model, and receipts that were lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import eventually
from trees import DIM, DiesAfterCommit, UnequalTask, ended, rules, serve_site, site_of, state, tree

import gradbus
from gradbus.actors.federated.client import last_model
from gradbus.actors.federated.controller import liveness
from gradbus.actors.federated.controller.joining import ClientJoining
from gradbus.models import NoopTask


def test_the_next_start_of_the_controller_publishes_it(tmp_path: Path) -> None:
    async def main() -> tuple[torch.Tensor, torch.Tensor]:
        async with tree() as here, asyncio.TaskGroup() as group:
            bus, theirs = [await here.bus("flat") for _ in range(2)]
            client = gradbus.Client(theirs, UnequalTask(), client_id=0)
            running = group.create_task(client.run())
            config = rules(1, rounds=2, **state(tmp_path, "controller"))
            with pytest.raises(ConnectionAbortedError):
                await DiesAfterCommit(bus, NoopTask(DIM), config).dies_after(2).run()
            again = gradbus.Controller(bus, NoopTask(DIM), config)
            await again.run()
            await running
            return (await client.state_dict())["vector"], again.weights

    held, committed = asyncio.run(main())
    assert torch.equal(held, committed)


def test_a_site_that_is_back_after_the_last_round_passes_it_on_and_ends_the_run_for_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "BYE_S", 5.0)  # the next start of the centre ends at once: the site must hear it

    async def main() -> tuple[torch.Tensor, torch.Tensor]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, local, theirs = [await here.bus(name) for name in ("centre", "centre", "site", "site")]
            client = gradbus.Client(theirs, UnequalTask(), client_id=0)
            running = group.create_task(client.run())
            site = site_of(above, local, 0, rules(1, **state(tmp_path, "site")), alone_after_s=1.0)
            group.create_task(site.run())
            top = rules(1, sites=True, rounds=1, **state(tmp_path, "centre"))
            with pytest.raises(ConnectionAbortedError):
                await DiesAfterCommit(centre, NoopTask(DIM), top).dies_after(1).run()
            await eventually(lambda: site.progress.phase == "alone")
            again = gradbus.Controller(centre, NoopTask(DIM), top)
            await again.run()
            await running  # not until its controller_timeout_s
            return (await client.state_dict())["vector"], again.weights

    held, committed = asyncio.run(main())
    assert torch.equal(held, committed)


def test_a_site_that_learns_of_the_end_before_it_is_welcomed_waits_for_the_welcome_and_the_last_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = vars(ClientJoining)["on_hello"]

    async def answer_at_the_end(joining: ClientJoining, *hello: Any) -> None:
        if joining.is_over:
            await answer(joining, *hello)

    async def main() -> tuple[torch.Tensor, torch.Tensor]:
        async with tree() as here, asyncio.TaskGroup() as group:
            centre, above, local, theirs = [await here.bus(name) for name in ("centre", "centre", "site", "site")]
            client = gradbus.Client(theirs, UnequalTask(), client_id=0)
            running = group.create_task(client.run())
            group.create_task(site_of(above, local, 0, rules(1)).run())
            top = rules(1, sites=True, rounds=2, **state(tmp_path, "centre"))
            with pytest.raises(ConnectionAbortedError):
                await DiesAfterCommit(centre, NoopTask(DIM), top).dies_after(2).run()
            monkeypatch.setattr(ClientJoining, "on_hello", answer_at_the_end)
            again = gradbus.Controller(centre, NoopTask(DIM), top)
            await again.run()
            await running
            return (await client.state_dict())["vector"], again.weights

    held, committed = asyncio.run(main())
    assert torch.equal(held, committed)


def test_a_site_that_starts_again_as_the_run_ends_publishes_the_last_model_that_it_has(tmp_path: Path) -> None:
    saved = torch.full((DIM,), 0.5)

    async def main() -> torch.Tensor:
        async with tree() as here, asyncio.TaskGroup() as group:
            local, theirs = [await here.bus("site") for _ in range(2)]
            config = rules(1, **state(tmp_path, "site"))
            before, serving = serve_site(group, local, config)
            before.mark_run_ended()  # no client is here yet
            await before.started.wait()
            await before.adopt(3, saved, {})
            await ended(serving)
            client = gradbus.Client(theirs, UnequalTask(), client_id=0)
            running = group.create_task(client.run())
            again, serving = serve_site(group, local, config)
            await again.started.wait()
            again.end()  # the level above has ended the run, and gone
            await asyncio.gather(serving, running)
            return (await client.state_dict())["vector"]

    assert torch.equal(asyncio.run(main()), saved)


def test_a_controller_that_is_known_by_some_of_its_topics_only_is_not_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, writers = 100.0, 0
    monkeypatch.setattr(last_model, "time", SimpleNamespace(monotonic=lambda: now_s))
    bus: Any = SimpleNamespace(matched_writers=lambda kind: writers)
    deadline = last_model.LastModelDeadline(bus)
    now_s += 0.9 * last_model.CONTROLLER_GONE_S
    assert not deadline.is_over()  # it has just started, and is found topic by topic
    writers = 1
    now_s += last_model.CONTROLLER_GONE_S
    assert not deadline.is_over()
    writers = 0
    now_s += 0.9 * last_model.CONTROLLER_GONE_S
    assert not deadline.is_over()
    now_s += 0.2 * last_model.CONTROLLER_GONE_S
    assert deadline.is_over()


def test_a_last_model_that_makes_progress_is_waited_for_however_long_and_another_one_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began_s = now_s = progressed_s = 100.0
    monkeypatch.setattr(last_model, "time", SimpleNamespace(monotonic=lambda: now_s))
    bus: Any = SimpleNamespace(matched_writers=lambda kind: 1)
    deadline = last_model.LastModelDeadline(bus, lambda: progressed_s)
    for _ in range(20):
        now_s += 0.9 * last_model.LAST_MODEL_S
        assert not deadline.is_over()
        progressed_s = now_s
    assert now_s > began_s + 10 * last_model.LAST_MODEL_S
    now_s += 1.1 * last_model.LAST_MODEL_S
    assert deadline.is_over()


def test_a_client_that_the_next_start_has_welcomed_still_asks_it_for_the_receipt_that_was_lost(tmp_path: Path) -> None:
    async def main() -> int:
        async with tree() as here, asyncio.TaskGroup() as group:
            bus = await here.bus("flat", faults="drop receipt round=2 times=1")
            theirs = await here.bus("flat")
            client = gradbus.Client(theirs, UnequalTask(), client_id=0)
            running = group.create_task(client.run())
            config = rules(1, rounds=3, codec="s4", **state(tmp_path, "controller"))
            with pytest.raises(ConnectionAbortedError):
                await DiesAfterCommit(bus, NoopTask(DIM), config).dies_after(2).run()
            await gradbus.Controller(bus, NoopTask(DIM), config).run()
            await running
            return client.summary.rounds

    assert asyncio.run(main()) == 3
