"""Groups whose members change. The cases that PyTorch tests on gloo, by name and meaning, and what they leave open."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

from gradbus.runtime.bus import background
from gradbus.torch.groups import acquire_bus, job_number

LIMIT_S = 30.0


def own_handle() -> Any:
    """What other processes name this one by in their next group."""
    return dist._get_reconfigure_handle()  # noqa: SLF001 - torch has no public name for it


def reconfigure(uuid: int, handles: Sequence[str] | set[str], limit_s: float | None = LIMIT_S) -> None:
    """Make the process group one of these processes. Without a limit that of the group counts."""
    limit = {} if limit_s is None else {"timeout": timedelta(seconds=limit_s)}
    work = dist._reconfigure(uuid, handles, **limit)  # noqa: SLF001 - torch has no public name for it
    work.wait()


class Member:
    """One process of a case: its rank at the start, and how it tells the others its handle."""

    def __init__(self, place: RankLocation, name: str) -> None:
        place.start(prefix=name, enable_reconfigure=True)
        self.rank, self.world = place.rank, place.world
        self.store = place.store
        self.group: Any = dist.group.WORLD
        self.backend: Any = dist.get_backend_impl(self.group, torch.device("cpu"))

    def handles(self, step: str) -> list[str]:
        """Those of all processes, in the order of the ranks at the start."""
        self.store.set(f"{step} {self.rank}", own_handle())
        return [self.store.get(f"{step} {rank}").decode() for rank in range(self.world)]

    def wait_for_all(self, step: str) -> None:
        self.store.set(f"{step} {self.rank}", "")
        self.store.wait([f"{step} {rank}" for rank in range(self.world)])

    def form(self, uuid: int, handles: Sequence[str] | set[str], limit_s: float = LIMIT_S) -> list[int]:
        """Rank and world in the new group."""
        reconfigure(uuid, handles, limit_s)
        return [dist.get_rank(), dist.get_world_size()]


def total() -> float:
    """The sum of rank + 1 over the group."""
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def basic(me: Member) -> Any:
    return me.form(1, me.handles("first"))


def then_all_reduce(me: Member) -> Any:
    return [*me.form(1, me.handles("first")), total()]


def then_send_recv(me: Member) -> Any:
    rank, world = me.form(1, me.handles("first"))
    got = torch.zeros(3)
    works = [
        me.backend.send([torch.full((3,), rank + 1.0)], (rank + 1) % world, 0),
        me.backend.recv([got], (rank - 1) % world, 0),
    ]
    for work in works:
        work.wait()
    return got.tolist()


def shrink_exclude_last(me: Member) -> Any:
    return _shrink(me, me.world - 1)


def shrink_exclude_middle(me: Member) -> Any:
    return _shrink(me, me.world // 2)


def _shrink(me: Member, left_out: int) -> Any:
    me.form(1, me.handles("first"))
    handles = me.handles("second")
    del handles[left_out]
    found: list[Any] = []
    if me.rank != left_out:
        found = [*me.form(2, handles), total()]
        tensor = torch.full((2,), float(me.rank))
        dist.broadcast(tensor, group_src=0)
        found += tensor.tolist()
    me.wait_for_all("end")
    return found


def scale_down_up(me: Member) -> Any:
    alone = me.form(1 + me.rank, [own_handle()])
    all_of_them = me.form(10, me.handles("all"))
    alone_again = me.form(20 + me.rank, [own_handle()])
    me.wait_for_all("end")
    return [alone, all_of_them, alone_again]


def single_to_all(me: Member) -> Any:
    me.form(1 + me.rank, [own_handle()])
    return [*me.form(10, me.handles("all")), total()]


def identity(me: Member) -> Any:
    me.form(1, me.handles("first"))
    return [*me.form(2, me.handles("second")), total()]


def late_join(me: Member) -> Any:
    handles = me.handles("first")
    if me.rank < me.world - 1:
        me.form(1, handles[:-1])
        total()
    return [*me.form(2, me.handles("second")), total()]


def merge_split(me: Member) -> Any:
    handles = me.handles("first")
    half = me.world // 2
    parts = me.form(1, handles[:half]) if me.rank < half else me.form(2, handles[half:])
    part = total()
    return [*parts, part, *me.form(3, me.handles("second")), total()]


def after_abort(me: Member) -> Any:
    me.form(1, me.handles("first"))
    me.backend.abort()
    error = str(me.backend.get_error())
    return [error, *me.form(2, me.handles("second")), total()]


def rejects_reused_uuid(me: Member) -> Any:
    uuid = 1 + me.rank
    me.form(uuid, [own_handle()])
    try:
        me.form(uuid, [own_handle()])
    except RuntimeError as error:
        return "already used" in str(error)
    return False


CASES: Sequence[Callable[[Member], Any]] = (
    basic, then_all_reduce, then_send_recv, shrink_exclude_last, shrink_exclude_middle, scale_down_up, single_to_all,
    identity, late_join, merge_split, after_abort, rejects_reused_uuid,
)  # fmt: skip


@contextlib.contextmanager
def member(place: RankLocation, name: str) -> Iterator[Member]:
    me = Member(place, name)
    yield me
    me.wait_for_all("over")
    dist.destroy_process_group()


def twelve(place: RankLocation) -> dict[str, Any]:
    """Each case with a process group of its own; on one bus, which opens and closes in the other scenes."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as held:
        if place.backend == "dds":
            store = dist.TCPStore("127.0.0.1", place.port, is_master=False)
            held.callback(background.release, acquire_bus(job_number(store), place.rank))
        for case in CASES:
            with member(place, case.__name__) as me:
                found[case.__name__] = case(me)
    place.start(prefix="end")  # the scene's end meets the others in a group
    return found


def beyond(place: RankLocation) -> dict[str, Any]:
    """What the twelve leave open."""
    found: dict[str, Any] = {}
    with member(place, "before it") as me:
        found["before it"] = _error(lambda: dist.all_reduce(torch.ones(1)))
        found["no handle"] = _error(lambda: me.form(1, ["x"]))
        handles = me.handles("first")
        found["without itself"] = _error(lambda: me.form(2, [handles[me.rank - 1]]))
        found["twice"] = _error(lambda: me.form(3, [handles[0]] * 2))
        found["of a set"] = me.form(4, set(handles))
        found["turned round"] = [*me.form(5, handles[::-1]), total()]
        # Its ranks are the other way round now: a set keeps them so, wherever the handles were taken.
        found["of a set again"] = [*me.form(6, set(me.handles("second"))), total()]
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
        found["mean of ddp"] = [parameter.grad.item() for parameter in model.parameters()]
        part = dist.new_group([0, 1])
        found["in a part"] = [dist.get_rank(part), dist.get_world_size(part)]
        begun_s = time.monotonic()
        late = handles[:2] if me.rank == 0 else None  # the one of rank 1 does not come
        found["missing"] = _error(lambda: me.form(7, late, 1.0)) if late else ""
        found["after_s"] = time.monotonic() - begun_s
        me.wait_for_all("gave up")
        found["after a timeout"] = [*me.form(8, me.handles("third")), total()]
    place.start(prefix="ordinary")
    store = place.store
    store.set(f"handle {place.rank}", own_handle())
    handles = [store.get(f"handle {rank}").decode() for rank in range(place.world)]
    dist.all_reduce(torch.ones(1))
    reconfigure(1, handles[::-1], None)
    found["of an ordinary group"] = [dist.get_rank(), total()]
    return found


def a_rank_dies(place: RankLocation) -> dict[str, Any]:
    """Rank 0 is killed, whose process the others named first in all that they had; the two others go on without it."""
    me = Member(place, "")
    handles = me.handles("first")
    me.form(1, handles)
    total()
    if place.rank == 0:
        place.say("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    error = _error(total)
    begun_s = time.monotonic()
    formed = [*me.form(2, handles[1:]), total()]
    return {"error": error, "formed": formed, "after_s": time.monotonic() - begun_s}


def example(place: RankLocation) -> str:
    """The example of a rank that dies, in processes that are ready: what this rank has printed."""
    from gradbus.experiments.examples.torch_elastic import run_rank

    return run_rank(place.options["way"], place.rank, place.port)


def _error(function: Callable[[], Any]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
