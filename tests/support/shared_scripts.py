"""What a rank that shares memory does in a process of its own, for :func:`group_node.group_ranks`."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import zlib

import torch
from group_node import Rank
from group_scripts import numbers, shared_of
from memory_maps import left_over, mapped, open_files
from torch import Tensor

from gradbus.runtime.collectives import Group
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.reductions import all_reduce
from gradbus.runtime.errors import PeerLost

KIB, MIB = 1 << 10, 1 << 20
SIZES = (16 * KIB - 4, 16 * KIB, MIB, MIB + 4)  # bytes of float32
LARGE_SIZES = (8 * MIB, 8 * MIB + 4, 64 * MIB)


def sum_on_this_thread(group: Group, name: str, tensor: Tensor, round_id: int = 0) -> Tensor:
    """Sum a tensor in place on a thread without an event loop, and wait as calls of torch.distributed do."""
    operation = all_reduce(tensor, tensor, Arithmetic(tensor.dtype, "sum", 1), "auto", group.rank, group.world)
    ended = threading.Event()
    engine, until_s = group._engine, time.monotonic() + 20.0  # noqa: SLF001 - as the process group of torch has it

    def end(_: Operation) -> None:
        ended.set()
        engine.progress.wake_inline()

    operation.on_end.append(end)
    engine.start(operation, name, round_id)
    engine.progress.poll_inline(ended.is_set, until_s)
    assert ended.wait(max(0.0, until_s - time.monotonic()))
    if operation.error is not None:
        raise operation.error
    return tensor


async def every_size(rank: Rank) -> None:
    """Sums and gathers of all sizes: by awaiting, and on a thread that waits. Tell of the results' bytes.

    ``sizes``: in bytes.
    """
    gc.collect()
    gc.disable()
    before = mapped(), open_files()
    async with rank.join() as group:
        digest = 0
        for size in rank.spec["sizes"]:
            mine = numbers(rank.rank, min(size, MIB) // 4).repeat(64)[: size // 4].contiguous()
            results = [await group.all_reduce("sum", mine, round_id=size)]
            if size < 64 * MIB:
                results += [await group.broadcast("model", mine.clone(), root=1, round_id=size)]
                results += [await group.all_reduce("ring", mine, algorithm="ring", round_id=size)]
                results += await group.all_gather("gather", mine, round_id=size)
                results += await group.all_to_all("all to all", list(mine.tensor_split(rank.world)), round_id=size)
            results.append(await asyncio.to_thread(sum_on_this_thread, group, "waiting", mine, size))
            for result in results:
                digest = zlib.crc32(result.numpy(), digest)
        await asyncio.to_thread(_many_small_ones, group)
        await group.barrier()
        shared = shared_of(group)
        facts = {"slots": 0 if shared is None else shared.slots.sent_bytes}
        facts["letters"] = 0 if shared is None or shared.mailbox is None else shared.mailbox.sent
        inside, dropped = mapped() - before[0], dict(group.stats.dropped)
        del shared
    after = left_over(*before)
    rank.say("done", digest=digest, inside=inside, after=after, dropped=dropped, **facts)


def _many_small_ones(group: Group) -> None:
    for step in range(200):
        assert float(sum_on_this_thread(group, "small", torch.ones(5), step)[4]) == group.world


async def killed_while_it_sends(rank: Rank) -> None:
    """Steps until rank 1 is killed in the midst of one. Tell what is left of the shared memory in the others."""
    gc.collect()
    gc.disable()
    before = mapped(), open_files()
    try:
        async with rank.join() as group:
            await asyncio.to_thread(_steps, rank, group)
    except PeerLost as error:
        lost = list(error.ranks)
    after = left_over(*before)
    tracked = "multiprocessing.shared_memory" in sys.modules
    rank.say("survived", lost=lost, after=after, tracked=tracked, children=len(multiprocessing.active_children()))


def _steps(rank: Rank, group: Group) -> None:
    def watch() -> None:
        while shared_of(group).slots.sent_bytes < 20 * MIB:
            time.sleep(0.0002)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank.rank == 1:
        threading.Thread(target=watch, daemon=True).start()
    for step in range(1 << 30):
        sum_on_this_thread(group, "step", torch.ones(MIB), step)


async def beside_one_that_stands_still(rank: Rank) -> None:
    """Rank 2 stands still for a while, with slots of rank 0 that it has not given back. Ranks 0 and 1 go on."""
    async with rank.join() as group:
        await group.barrier()
        rank.say("ready")
        await asyncio.to_thread(rank.hear)  # that rank 2 stands still, and rank 2 that it may go on
        gathers = [group.all_gather("all", torch.full((MIB // 4,), rank.rank), round_id=step) for step in range(20)]
        if rank.rank == 0:
            await group.send("meanwhile", numbers(0, MIB), to=1)
        elif rank.rank == 1:
            assert torch.equal(await group.recv("meanwhile", source=0), numbers(0, MIB))
        rank.say("went on", pending=sum(not handle.done() for handle in gathers))
        for handle in gathers:
            assert [int(part[-1]) for part in await handle] == [0, 1, 2]
        await group.barrier()
        rank.say("done")
