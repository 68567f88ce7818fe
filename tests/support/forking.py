"""Processes that fork while they use the bus, for test_forks.py: ``python forking.py SCENES``. Prints what was seen, as
JSON lines; the children have no output but through a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from bus_helpers import membership_of

import gradbus
from gradbus.runtime.bus.bus import Bus, connect
from gradbus.runtime.collectives import Group
from gradbus.runtime.security import Security
from gradbus.runtime.security.job_key import new_job_key
from gradbus.runtime.wire.control import Status
from gradbus.runtime.wire.messages import Control, Identity

CHILD_S = 20.0  # none of what a child does here takes a second
DOMAIN = 40 + os.getpid() % 60


def say(what: str, **facts: Any) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)


def wait_for(child: int) -> int | str:
    """The exit code of a child; text: it did not end, and was killed."""
    until_s = time.monotonic() + CHILD_S
    while time.monotonic() < until_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it hangs"


def attempts(tries: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What becomes of each: the type of the error and its text."""
    found = {}
    for name, function in tries.items():
        try:
            found[name] = repr(function())
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def in_child(tries: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What becomes of each in a forked child, which ends by sys.exit with all that an interpreter does then."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            json.dump(attempts(tries), out)
        sys.exit(3)
    os.close(writer)
    code = wait_for(child)
    with os.fdopen(reader) as result:
        text = result.read()
    return {**(json.loads(text) if text else {}), "exit": str(code)}


class Loop:
    """An event loop on a thread of its own, as that of the torch backend."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="loop", daemon=True).start()

    def run(self, coroutine: Any, timeout_s: float = 30.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)


async def two_ranks(stack: contextlib.AsyncExitStack, **options: Any) -> tuple[list[Bus], list[Group]]:
    """A group whose ranks are two buses of this process."""
    buses = [await stack.enter_async_context(connect("forks", domain=DOMAIN, **options)) for _ in range(2)]
    joining = [stack.enter_async_context(gradbus.join_group(bus, rank=r, world=2)) for r, bus in enumerate(buses)]
    return buses, list(await asyncio.gather(*joining))


async def still_works(groups: list[Group], name: str) -> bool:
    """A small and a large sum over all ranks."""
    for numel in (8, 1 << 20):
        handles = [g.all_reduce(f"{name} {numel}", torch.full((numel,), g.rank + 1.0)) for g in groups]
        if not all([bool((await handle == 3).all()) for handle in handles]):
            return False
    return True


def bus_and_group() -> None:
    """The parent has a sealed bus and a group open, on another thread; children by fork end in several ways."""
    loop = Loop()
    stack = contextlib.AsyncExitStack()
    os.environ["GRADBUS_KEY"] = new_job_key().text
    buses, groups = loop.run(two_ranks(stack, security=Security(level="psk")))
    seal = membership_of(buses[0]).cipher
    encryptor, early = seal.encryptor("t"), seal.encryptor("t").envelope((b"payload",))
    message = Status(1, 2, "training", 3, 4)
    say("before", works=loop.run(still_works(groups, "before")))
    say(
        "child",
        **in_child(
            {
                "publish": lambda: asyncio.run(buses[0].publish(Identity(1, 2), message)),
                "subscribe": lambda: buses[0].subscribe(Control),
                "all_reduce": lambda: groups[0].all_reduce("in the child", torch.ones(1 << 20)),
                "barrier": lambda: groups[0].barrier(),
                "another bus": lambda: asyncio.run(open_one()),
                "seal": lambda: encryptor.seal((b"payload",)),
                "seal what was begun": lambda: early.octets(),
                "seal another topic": lambda: seal.encryptor("u").seal((b"payload",)),
                "leave": lambda: asyncio.run(
                    groups[0]._membership.close(ok=True, reason="in the child")  # noqa: SLF001 - as its context does
                ),
                "close": lambda: asyncio.run(buses[0].close()),
            }
        ),
    )
    say("after", works=loop.run(still_works(groups, "after")))
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(4,))
    process.start()
    process.join(CHILD_S)
    say("multiprocessing", exit=process.exitcode)
    say("at the end", works=loop.run(still_works(groups, "end")), sealed=len(encryptor.seal((b"payload",))) > 0)
    loop.run(stack.aclose())
    say("closed")
    # Once all is closed, a child may open a bus of its own.
    say("afterwards", **in_child({"a bus": lambda: asyncio.run(open_one())}))


async def open_one() -> str:
    async with connect("another", domain=DOMAIN) as bus:
        return f"open: {bus.job}"


def inside_the_loop() -> None:
    """A fork in the midst of a coroutine. (One that unwinds it in the child, by sys.exit, takes the parent's event loop
    along, with or without a bus: both have one epoll.)"""

    async def script() -> None:
        async with contextlib.AsyncExitStack() as stack:
            _, groups = await two_ranks(stack)
            process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
            process.start()
            process.join(CHILD_S)
            say("child of a coroutine", exit=process.exitcode)
            say("after a coroutine", works=await still_works(groups, "after"))

    asyncio.run(script())


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Enough of it that a worker has something to do."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def torch_backend() -> None:
    """A store, and a process group whose ranks are two processes; one of them forks, and loads data with workers."""
    importlib.import_module("gradbus.torch")  # not where the bus alone is tested: an older torch cannot have it
    rank = int(sys.argv[2])
    os.environ["GRADBUS_BUS__DOMAIN"] = sys.argv[3]
    dist.init_process_group(
        "dds", init_method=f"dds://{sys.argv[3]}/forks", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it

    def works() -> bool:
        total = torch.full((1 << 18,), rank + 1.0)
        dist.all_reduce(total)
        store.set(f"key {rank}", "value")
        return bool((total == 3).all()) and store.get(f"key {rank}") == b"value"

    pending = dist.all_reduce(torch.ones(4), async_op=True)
    assert pending is not None
    say("before", works=works())
    if rank == 0:
        say(
            "child",
            **in_child(
                {
                    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
                    "send": lambda: dist.send(torch.ones(4), 1),
                    "barrier": lambda: dist.barrier(),
                    "store": lambda: store.get("key 0"),
                    "a new group": lambda: dist.new_group([0, 1]),
                    "destroy": lambda: dist.destroy_process_group(),
                }
            ),
        )
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(4,))
        process.start()
        process.join(CHILD_S)
        say("multiprocessing", exit=process.exitcode)
    say("after", works=works())
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=4, num_workers=1, multiprocessing_context="fork", timeout=CHILD_S
    )
    for epoch in range(2):
        seen = 0.0
        for batch in loader:
            dist.all_reduce(batch)
            seen += batch[:, 0].sum().item()
        say("epoch", number=epoch, seen=seen)
    workers = [process.name for process in multiprocessing.active_children()]
    say("workers", left=workers)
    dist.destroy_process_group()
    say("closed")


if __name__ == "__main__":
    if sys.argv[1] == "torch_backend":
        torch_backend()
    else:
        for SCENE in sys.argv[1:]:
            {"bus_and_group": bus_and_group, "inside_the_loop": inside_the_loop}[SCENE]()
