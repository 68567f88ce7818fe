"""What a rank does in a process of its own, for :func:`group_node.group_ranks`."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from functools import reduce as fold
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bus_helpers import membership_of
from group_node import Rank
from torch import Tensor

import gradbus
from gradbus.runtime.collectives import ALGORITHMS, Group
from gradbus.runtime.collectives.reductions import shard_bounds
from gradbus.runtime.errors import CollectiveTimeout, JoinRefused, PeerLost
from gradbus.runtime.security.identity import key_epoch

# Every collective


def numbers(rank: int, numel: int, seed: int = 0) -> Tensor:
    """The vector of a rank: others know it, too."""
    spread = np.random.default_rng([rank, numel, seed]).standard_normal(numel) * 100
    return torch.from_numpy(spread.astype(np.float32))


async def every_collective(rank: Rank) -> None:
    """Call every collective with payloads of the sizes given, and compare with what the others must have given."""
    async with rank.join() as group:
        for numel in rank.spec["numels"]:
            await _reductions(group, numel)
            await _moves(group, numel)
        assert await group.barrier() == tuple(range(group.world))
        stats = group.stats
        rank.say("done", pending=stats.pending, early_bytes=stats.early_bytes, dropped=dict(stats.dropped))


async def _reductions(group: Group, numel: int) -> None:
    tensors = [numbers(rank, numel) for rank in range(group.world)]
    mine = tensors[group.rank].clone()
    total = fold(torch.add, tensors)
    sums = [group.all_reduce(f"sum {how}", mine, algorithm=how, round_id=numel) for how in ALGORITHMS]  # type: ignore[arg-type]
    part = group.reduce_scatter("part", mine, op="max", round_id=numel)
    reduced = group.reduce("root", mine, op="mean", root=group.world - 1, round_id=numel)
    for handle in sums:
        assert torch.equal(await handle, total)
    bounds = shard_bounds(numel, group.world)[group.rank : group.rank + 2]
    assert torch.equal(await part, fold(torch.maximum, tensors)[slice(*bounds)])
    at_root = await reduced
    assert (at_root is None) == (group.rank != group.world - 1)
    assert at_root is None or torch.equal(at_root, total * (1 / group.world))
    await group.all_reduce("in place", mine, out=mine, op="min", round_id=numel)
    assert torch.equal(mine, fold(torch.minimum, tensors))


async def _moves(group: Group, numel: int) -> None:
    rank, world = group.rank, group.world
    tensors = [numbers(other, numel + other) for other in range(world)]  # of different sizes
    payloads = [tensor.numpy().tobytes() for tensor in tensors]
    gathered = group.all_gather("tensors", tensors[rank], round_id=numel)
    assert await group.all_gather("bytes", payloads[rank], round_id=numel) == payloads
    assert all(map(torch.equal, await gathered, tensors))
    copy = tensors[0].clone() if rank == 0 else torch.empty_like(tensors[0])
    assert torch.equal(await group.broadcast("model", copy, round_id=numel), tensors[0])
    everything = await group.gather("gather", payloads[rank], root=world - 1, round_id=numel)
    assert everything == (payloads if rank == world - 1 else None)
    assert await group.scatter("scatter", payloads if rank == 0 else None, round_id=numel) == payloads[rank]
    table = await group.all_to_all("all to all", [payloads[rank] + bytes([to]) for to in range(world)], round_id=numel)
    assert table == [payload + bytes([rank]) for payload in payloads]
    if world > 1:
        sent = group.send(f"from {rank}", payloads[rank], to=(rank + 1) % world, round_id=numel)
        before = (rank - 1) % world
        assert await group.recv(f"from {before}", source=before, round_id=numel) == payloads[before]
        await sent
    assert await group.all_gather_object("object", {"rank": rank}) == [{"rank": other} for other in range(world)]


async def beside_gloo(rank: Rank) -> None:
    """The same collectives by torch.distributed over gloo in the same processes; tell how far the results agree."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rank.spec['file']}", rank=rank.rank, world_size=rank.world)
    try:
        async with rank.join() as group:
            for numel in (0, 1, 7, 1000, 300_001):
                for dtype in (torch.float32, torch.float64, torch.int64):
                    mine = (numbers(rank.rank, numel) * 10).to(dtype)
                    for name, (ours, theirs) in (await _both(group, mine)).items():
                        assert ours.dtype == theirs.dtype
                        assert ours.shape == theirs.shape
                        equal = torch.equal(ours, theirs)
                        close = torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-3)
                        rank.say("compared", name=name, numel=numel, dtype=str(dtype), equal=equal, close=close)
            await group.barrier()
            rank.say("done")
    finally:
        dist.destroy_process_group()


async def _both(group: Group, mine: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Ours and gloo's, by name."""
    world, results = group.world, {}
    for op, theirs_op in (("sum", dist.ReduceOp.SUM), ("min", dist.ReduceOp.MIN), ("max", dist.ReduceOp.MAX)):
        theirs = mine.clone()
        dist.all_reduce(theirs, theirs_op)
        for how in ALGORITHMS:
            results[f"all_reduce {op} {how}"] = (
                await group.all_reduce(f"{op} {how}", mine, op=op, algorithm=how),
                theirs,
            )  # type: ignore[arg-type]
        theirs = mine.clone()
        dist.reduce(theirs, 0, theirs_op)
        ours = await group.reduce(op, mine, op=op)  # type: ignore[arg-type]
        if ours is not None:
            results[f"reduce {op}"] = (ours, theirs)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    results["all_gather"] = (torch.cat(await group.all_gather("gather", mine)), torch.cat(parts))
    theirs = mine.clone()
    dist.broadcast(theirs, world - 1)
    results["broadcast"] = (await group.broadcast("model", mine.clone(), root=world - 1), theirs)
    pieces = list(mine.repeat(world).tensor_split(world))
    theirs = torch.empty_like(mine)
    dist.scatter(theirs, [piece + 1 for piece in pieces] if group.rank == 0 else None, 0)
    given = [piece + 1 for piece in pieces] if group.rank == 0 else None
    results["scatter"] = (await group.scatter("scatter", given), theirs)
    whole = mine[: mine.numel() // world * world]
    theirs = torch.empty(whole.numel() // world, dtype=mine.dtype)
    dist.reduce_scatter_tensor(theirs, whole.clone())
    results["reduce_scatter"] = (await group.reduce_scatter("part", whole), theirs)
    theirs = torch.empty_like(whole)
    dist.all_to_all_single(theirs, whole)
    ours = torch.cat(await group.all_to_all("all to all", whole.tensor_split(world)))
    results["all_to_all"] = (ours, theirs)
    return results


# Traffic


async def traffic_of_collectives(rank: Rank) -> None:
    """Tell what leaves by an interface in a broadcast and in a scatter of payloads of the same size, and what leaves by
    all other ones from the beginning.

    Settings: ``interface``, ``size_bytes``.
    """
    interface, sent = rank.spec["interface"], {}
    at_first = sent_octets()
    async with rank.join() as group:
        payload = bytes(rank.spec["size_bytes"])
        for name in ("broadcast", "scatter") * 3:  # the least: a busy machine makes DDS send again what is on its way
            await group.barrier("before")
            before = sent_octets()[interface]
            if name == "broadcast":
                await group.broadcast(name, payload if group.rank == 0 else None)
            else:
                await group.scatter(name, [payload] * group.world if group.rank == 0 else None)
            await group.barrier("after")
            sent[name] = min(sent.get(name, 1 << 62), sent_octets()[interface] - before)
        elsewhere = sum(octets - at_first[name] for name, octets in sent_octets().items() if name != interface)
        rank.say("sent", by_collective=sent, elsewhere=elsewhere)


def sent_octets() -> dict[str, int]:
    """Octets that have left by each interface of this thread's network namespace."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as lines:
        listed = [line.split(":") for line in lines if ":" in line]
    return {name.strip(): int(counters.split()[8]) for name, counters in listed}


# Ends


async def steps_until_the_end(rank: Rank) -> None:
    """All-reduce again and again; tell how that ends, and what becomes of collectives after that.

    Settings: ``numel`` and ``algorithm``; ``steps``: so many, by default without end; ``die_in_step``: be killed there,
    when ``die_after_bytes`` of the vector are sent; ``raise_in_step``; ``block_in_step``: let the event
    loop stand still there, before the call, until the test says a word.
    """
    spec = rank.spec
    async with rank.join() as group:
        vector = torch.ones(spec.get("numel", 1000))
        for step in range(spec.get("steps", 1 << 32)):
            if step == spec.get("block_in_step"):
                rank.say("blocks")
                rank.hear()
            if step == spec.get("raise_in_step"):
                rank.say("raises")
                raise RuntimeError("a mistake of the program")
            if step == spec.get("die_in_step"):
                _die_while_sending(rank, group, spec["die_after_bytes"])
            handle = group.all_reduce("step", vector, round_id=step, algorithm=spec.get("algorithm", "auto"))
            try:
                assert bool((await handle == rank.world).all())
            except (PeerLost, CollectiveTimeout) as error:
                _tell_of(rank, "ended", error, step)
                await _tell_of_later_ones(rank, group)
                return
            if step == 5:
                rank.say("under way")
        rank.say("done")


def _tell_of(rank: Rank, event: str, error: Exception, step: int) -> None:
    ranks = error.ranks if isinstance(error, PeerLost) else error.missing  # type: ignore[attr-defined]
    rank.say(event, kind=type(error).__name__, ranks=list(ranks), text=str(error), step=step)


async def _tell_of_later_ones(rank: Rank, group: Group) -> None:
    for name in ("later", "later still"):
        try:
            await group.all_gather(name, b"", timeout_s=0.5)
        except (PeerLost, CollectiveTimeout) as error:
            _tell_of(rank, name, error, -1)


def shared_of(group: Group) -> Any:
    """The group's shared memory, or None."""
    return group._membership._shared  # noqa: SLF001 - no user of a group sees which way it sends


def _die_while_sending(rank: Rank, group: Group, size_bytes: int) -> None:
    shared = shared_of(group)

    def sent_bytes() -> int:
        return group.bus.sent_bytes.total() + (0 if shared is None else shared.slots.sent_bytes)

    before = sent_bytes()

    def watch() -> None:
        while sent_bytes() - before < size_bytes:
            time.sleep(0.0002)
        rank.say("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


async def lives(rank: Rank) -> None:
    """Join the group under its name again after each loss, until a life has gone well to its end.

    ``die_in_life``: be killed in that one.
    """
    async with gradbus.connect(**rank.spec["place"], network=gradbus.NetworkConfig(**rank.spec["network"])) as bus:
        rank.say("connected")
        for life in itertools.count(rank.spec.get("first_life", 0)):
            try:
                async with gradbus.join_group(bus, rank=rank.rank, world=rank.world, timeout_s=30.0) as group:
                    rank.say("joined", life=life, members=[member.incarnation for member in group.members])
                    for step in range(50):
                        expected = [f"{life} {step} {other}".encode() for other in range(rank.world)]
                        # Names and rounds are the same in each life: only the start of its sender tells a frame's life.
                        assert await group.all_gather("x", expected[rank.rank], round_id=step) == expected
                        if step == 20 and rank.spec.get("die_in_life") == life:
                            os.kill(os.getpid(), signal.SIGKILL)
                    await group.barrier()
                    rank.say("done", life=life, dropped=dict(group.stats.dropped))
                    return
            except PeerLost as error:
                _tell_of(rank, "lost", error, life)


# Security


async def known_ranks(rank: Rank) -> None:
    """All-reduce until that fails, tell how, and then, where rank 0 and 1 are left, go on as a pair until the keys of
    before are worth nothing any more."""
    key_epoch.FORMER_RANKS_S = 4.0  # a process that stands still for seconds goes on with the key of before
    async with rank.join() as group:
        pair = group.subgroup([0, 1]) if rank.rank < 2 else contextlib.nullcontext()
        async with pair as left:
            first_epoch = current_epoch(group)
            rank.say("formed")
            total = float(sum(range(1, group.world + 1)))
            step = 0
            try:
                while True:
                    for size in (10, 300_000):
                        summed = await group.all_reduce("sum", torch.full((size,), rank.rank + 1.0), round_id=step)
                        assert summed.min() == summed.max() == total
                    step += 1
                    if step == 3:
                        rank.say("works", rejected=dict(group.bus.rejected))
            except (PeerLost, JoinRefused) as error:
                rank.say("ended", kind=type(error).__name__, text=str(error), steps=step)
            if left is None:
                return
            for turn in itertools.count():  # not the step: one may have ended a step that the other was lost in
                summed = await left.all_reduce("pair", torch.full((1000,), rank.rank + 1.0), round_id=turn)
                assert summed.min() == summed.max() == 3.0
                has_former = bool(keys_of(group)._former)  # noqa: SLF001 - no call tells that it is forgotten
                more = torch.tensor([float(current_epoch(group) == first_epoch or has_former)])
                if not (await left.all_reduce("more", more, op="max", round_id=turn)).item():
                    break
            rank.say("went on", rejected=dict(group.bus.rejected), key=keys_of(group).current.key_id)


def keys_of(group: Group) -> Any:
    """Of a bus with keys of its own."""
    return membership_of(group.bus).keys


def current_epoch(group: Group) -> int:
    return int(keys_of(group).current.epoch)
