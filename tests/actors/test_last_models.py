"""The model after the last round, where the controller has committed it and dies before it can publish it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import eventually
from trees import DIM, DiesAfterCommit, UnequalTask, rules, site_of, state, tree

import gradbus
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
