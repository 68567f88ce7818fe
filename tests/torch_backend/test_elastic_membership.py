"""A script's place among members that change: leaving and being interrupted at awkward moments, with a real bus."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch.distributed as dist

from gradbus.runtime.collectives.generations import ElasticLimits, Generations, NoGeneration, open_generations
from gradbus.runtime.collectives.group import Group
from gradbus.torch.elastic import membership as membership_module
from gradbus.torch.elastic.launched import MemberPlace
from gradbus.torch.elastic.membership import Departure, ElasticMembership

WAIT_S = 20.0


@pytest.fixture
def gate(domain: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The group of the members opens once this is set."""
    gate = threading.Event()

    @contextlib.asynccontextmanager
    async def late(*arguments: Any, **options: Any) -> AsyncIterator[Generations]:
        assert await asyncio.to_thread(gate.wait, WAIT_S)
        async with open_generations(*arguments, **options) as generations:
            yield generations

    monkeypatch.setenv("GRADBUS_BUS__DOMAIN", str(domain))
    monkeypatch.setattr(membership_module, "open_generations", late)
    return gate


@pytest.fixture
def member(gate: threading.Event) -> Iterator[ElasticMembership]:
    """The only founder of a group."""
    member = ElasticMembership(MemberPlace(0, 1, ElasticLimits(wait_s=WAIT_S)), layout=1)
    yield member
    gate.set()
    member.part(Departure())
    member.close()


def test_to_leave_before_the_group_is_open_is_to_leave(member: ElasticMembership, gate: threading.Event) -> None:
    member.announce_leave()  # as a handler of SIGTERM does, in a process that has just been started
    gate.set()
    with pytest.raises(NoGeneration, match="this process has left") as left:
        member.meet()
    assert left.value.left
    assert not dist.is_initialized()


def test_a_process_that_is_interrupted_as_its_generation_comes_leaves_it(gate: threading.Event) -> None:
    gate.set()
    member = ElasticMembership(MemberPlace(0, 1, ElasticLimits(wait_s=WAIT_S)), layout=1)
    asked = member._asking = Future[Group]()  # noqa: SLF001 - meet() up to the line where Ctrl-C comes
    member._thread.call(member._asked.put_nowait, asked)  # noqa: SLF001 - likewise
    assert asked.result(WAIT_S).world == 1
    member.close()
    assert member._task.done()  # noqa: SLF001 - it has come to its end by itself
    assert not member._task.cancelled()  # noqa: SLF001 - likewise
