"""What goes wrong, what ends, and what begins again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation


def error_of(function: Callable[[], Any]) -> dict[str, Any]:
    """How a call fails: the text, whose error is behind it, and after how long."""
    began_s = time.monotonic()
    try:
        function()
    except RuntimeError as error:
        cause = type(error.__cause__).__name__
        return {"text": str(error), "cause": cause, "after_s": time.monotonic() - began_s}
    return {"text": "", "cause": "", "after_s": time.monotonic() - began_s}


def one_is_killed(place: RankLocation) -> dict[str, Any]:
    """The last rank dies; each of the others waits for it in its own way, and has something pending besides."""
    place.start()
    pair = dist.new_group([0, 1])
    last = place.world - 1
    dist.barrier()
    if place.rank == last:
        place.say("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(4)
    pending = {
        "collective": dist.all_reduce(torch.ones(4), async_op=True),
        "large": dist.all_reduce(torch.ones(3_000_000), async_op=True),
        "receive": dist.irecv(torch.ones(4), last),
        "send": dist.isend(torch.ones(4), last),
        "anyone": dist.irecv(torch.ones(4)),
    }
    if place.rank == 0:
        result = error_of(lambda: dist.all_reduce(tensor))
    else:
        future = dist.all_reduce(tensor, async_op=True).get_future()
        result = error_of(future.wait)
    texts = {name: error_of(work.wait)["text"] for name, work in pending.items() if work is not None}
    place.say("failed as it should")
    texts["next"] = error_of(dist.barrier)["text"]
    texts["next message"] = error_of(lambda: dist.recv(tensor, last))["text"]
    alive = torch.ones(1)
    dist.all_reduce(alive, group=pair)  # a group without it goes on
    return result | {"texts": texts, "without it": alive.item()}


def killed_in_ddp(place: RankLocation) -> dict[str, Any]:
    place.start()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    if place.rank == place.world - 1:
        place.say("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    result = error_of(lambda: model(torch.ones(2, 8)).sum().backward())
    place.say("failed as it should")
    return result


def many_groups(place: RankLocation) -> dict[str, Any]:
    """What the process has more of after 8 groups were made, used and destroyed than before."""
    place.start()

    def use_some(number: int) -> None:
        for _ in range(number):
            group = dist.new_group(list(range(place.world)))
            tensor = torch.ones(300_000)
            dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
            assert tensor[-1] == place.world
            dist.destroy_process_group(group)

    use_some(2)
    dist.barrier()
    before = settled(lambda now, earlier: now == earlier)
    dist.barrier()  # neither looks while the other one makes a group
    use_some(8)
    after = settled(lambda now, _: not more_than(before, now))
    return {what: [text for text in texts if text not in before[what]] for what, texts in after.items()} | {
        "more": more_than(before, after)
    }


def more_than(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, int]:
    """Of what there is more now, and how much."""
    more = {what: len(texts) - len(before[what]) for what, texts in after.items()}
    return {what: number for what, number in more.items() if number > 0}


def settled(enough: Callable[[dict[str, list[str]], dict[str, list[str]]], bool]) -> dict[str, list[str]]:
    """What is held once it is ``enough``, compared with what was held half a second earlier: what is going away
    already, here or because of the other rank, may take a moment."""
    until_s = time.monotonic() + 10.0
    earlier, now = {}, held()
    while not enough(now, earlier) and time.monotonic() < until_s:
        time.sleep(0.5)
        earlier, now = now, held()
    return now


def held() -> dict[str, list[str]]:
    """Threads, open files and memory that is shared, of this process."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        shared = [line.split(maxsplit=5)[5].strip() for line in maps if "memfd:" in line or "/dev/shm" in line]
    names = [thread.name for thread in threading.enumerate()]
    threads = [name for name in names if not name.startswith("asyncio_")]  # a pool of few, which stays
    return {"threads": threads, "files": files, "maps": shared}


def deadlines(place: RankLocation) -> dict[str, Any]:
    """Rank 1 comes too late, by an event and not by chance. A machine that stands still makes single waits longer."""
    place.start()
    store = place.store
    results = {}
    if place.rank == 0:
        group: Any = dist.group.WORLD
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.5)
        waits: dict[str, Callable[[], Any]] = {
            "barrier": lambda: dist.barrier(timeout=timedelta(seconds=0.5)),
            "future": lambda: group.allreduce([torch.ones(1)], options).get_future().wait(),
        }
        for name, wait in waits.items():
            results[name] = error_of(wait)
            for _ in range(2):
                if results[name]["after_s"] >= 2.0:
                    results[name] = error_of(wait)
        monitored = timedelta(seconds=0.5)
        results["monitored"] = error_of(lambda: dist.monitored_barrier(timeout=monitored))
        results["anyone"] = error_of(lambda: dist.irecv(torch.ones(1)).wait(timedelta(seconds=0.3)))
        store.set("go on", "1")
    else:
        store.wait(["go on"])
    return results


def different_calls(place: RankLocation) -> dict[str, Any]:
    """The ranks do not call the same: that is said at once, and not at the deadline."""
    place.start(timeout_s=60.0)
    if place.rank == 0:
        return error_of(lambda: dist.all_reduce(torch.ones(4)))
    return error_of(lambda: dist.broadcast(torch.ones(4), 0))


def again_and_again(place: RankLocation) -> list[float]:
    """Destroyed and made anew with the same store, without waiting for each other."""
    sums = []
    for number in range(3):
        place.start()
        tensor = torch.full((300_000,), float(number))
        dist.all_reduce(tensor)
        sums.append(tensor[-1].item())
        dist.destroy_process_group()
    # The one that unmaps large memory stays for the process.
    left = [one for one in threading.enumerate() if one.name.startswith("gradbus") and one.name != "gradbus-unmap"]
    for thread in left:  # one that has closed the bus may not have ended yet, when the bus is closed
        thread.join(2.0)
    return [*sums, float(sum(thread.is_alive() for thread in left))]


def groups_within(place: RankLocation) -> dict[str, Any]:
    """Groups of some ranks: made by new_group and by split_group, used by turns and at the same time."""
    place.start()
    rank, world = place.rank, place.world
    results: dict[str, Any] = {}
    last_two = dist.new_group([world - 2, world - 1])
    tensor = torch.tensor([float(rank)])
    works = [dist.all_reduce(tensor, async_op=True)]
    other = torch.tensor([float(rank)])
    if rank >= world - 2:
        works.append(dist.all_reduce(other, group=last_two, async_op=True))
    for work in works:
        work.wait()
    results["sums"] = [tensor.item(), other.item()]
    split = dist.split_group(split_ranks=[[0, world - 1]])
    if rank in (0, world - 1):
        assert split is not None
        gathered = [torch.empty(1) for _ in range(2)]
        dist.all_gather(gathered, torch.tensor([float(rank)]), group=split)
        results["split"] = [t.item() for t in gathered]
        if rank == 0:
            dist.send(torch.tensor([7.0]), world - 1, group=split)
        else:
            came = torch.empty(1)
            assert dist.recv(came, group=split) == 0
            results["came"] = came.item()
        dist.destroy_process_group(split)
    again = dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(group=again)
    dist.barrier()
    return results


def callbacks(place: RankLocation) -> dict[str, Any]:
    """Callbacks call collectives and wait for them; the main thread calls others meanwhile, as fast as it can."""
    place.start()
    results = []
    for number in range(40):
        tensor = torch.full((3,), float(number))

        def then(future: Any, number: int = number) -> float:
            inner = torch.full((2,), future.value()[0][0].item() + place.rank)
            dist.all_reduce(inner, dist.ReduceOp.MAX)
            outer = dist.all_reduce(inner, async_op=True).get_future().wait()[0]
            return float(outer[0])

        future = dist.all_reduce(tensor, async_op=True).get_future().then(then)
        plain = torch.full((1,), float(number))
        dist.all_reduce(plain)
        results.append((future, plain.item()))
    return {"inner": [future.wait() for future, _ in results], "plain": [value for _, value in results]}


def a_callback_waits_for_a_later_call(place: RankLocation) -> dict[str, Any]:
    """Which cannot end: it waits for its turn, until the callback has run. Its deadline ends both."""
    place.start()
    group: Any = dist.group.WORLD
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.5)
    both_called = threading.Event()
    later: list[Any] = []

    def then(future: Any) -> str:
        if threading.current_thread() is threading.main_thread():
            return " Timed out "  # it was done by then, so torch calls at once: nobody waits for anybody
        both_called.wait(20.0)
        return error_of(later[0].wait)["text"]

    text = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(then)
    later.append(group.allreduce([torch.ones(1)], options).get_future())
    both_called.set()
    result = {"text": text.wait()}
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return result | {"next": tensor.item()}


def one_leaves_first(place: RankLocation) -> dict[str, Any]:
    """What rank 0 calls then fails at once, and says that the other one has left."""
    place.start()
    dist.barrier()
    if place.rank == 1:
        return {}
    return error_of(lambda: dist.all_reduce(torch.ones(1)))


def from_the_environment(place: RankLocation) -> list[Any]:
    """As torchrun starts it."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.options["port"]),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
    }
    dist.init_process_group("cpu:dds")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return [dist.get_backend(), tensor.tolist()]


def alone(place: RankLocation) -> list[Any]:
    place.start()
    tensor, output = torch.tensor([1.0, 2.0]), torch.empty(2)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    dist.all_gather_into_tensor(output, tensor)
    dist.barrier()
    dist.monitored_barrier()
    return [output.tolist(), threading.active_count()]
