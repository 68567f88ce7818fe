"""Ranks that meet at ``dds://``, with no TCP port."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from stores import finished, link_of
from structlog.testing import capture_logs
from torch_node import RankLocation

from gradbus.torch import register
from gradbus.torch.store.client import StoreClient
from gradbus.torch.store.messages import StoreLeave

register()


def address_of(place: RankLocation, job: str) -> str:
    """Of a job that no other test has: its number is that of the test's own store."""
    return f"dds://{os.environ['GRADBUS_BUS__DOMAIN']}/{job}-{place.port}"


def join(place: RankLocation, job: str, backend: str = "dds", timeout_s: float = 30.0) -> Any:
    """Make the process group; rank and world as the rank likes to give them. Returns the store."""
    timeout = timedelta(seconds=timeout_s)
    url = address_of(place, job)
    if place.rank == 1:
        url = f"{url}?rank={place.rank}&world_size={place.world}"
        dist.init_process_group(backend, init_method=url, timeout=timeout)
    else:
        dist.init_process_group(backend, init_method=url, rank=place.rank, world_size=place.world, timeout=timeout)
    return place.store


def use(place: RankLocation) -> list[Any]:
    """What needs the store again later: groups, and a collective of objects of some size."""
    tensor = torch.tensor([place.rank + 1.0])
    dist.all_reduce(tensor)
    group = dist.new_group(list(range(place.world)))
    gc.collect()  # torch's C++ side alone does not keep a store that is written in Python
    objects: list[Any] = [None] * place.world
    dist.all_gather_object(objects, "x" * 100_000 + str(place.rank), group=group)
    dist.barrier()
    return [tensor.item(), [text[-1] for text in objects]]


def threads_of_gradbus() -> list[str]:
    """Once those that are ending have ended. The one that unmaps large memory stays for the process."""
    until_s = time.monotonic() + 10.0
    while found := sorted(
        {one.name for one in threading.enumerate() if one.name.startswith("gradbus")} - {"gradbus-unmap"}
    ):
        if time.monotonic() > until_s:
            break
        time.sleep(0.01)
    return found


def one_rank_keeps_the_store(place: RankLocation) -> list[Any]:
    """The same address again and again, while a variable of one rank holds the stores of the groups before."""
    results: list[Any] = []
    kept = []
    for number in range(4):
        join(place, "kept", ("dds", "gloo")[number % 2])
        if place.rank == number // 2:
            kept.append(dist.distributed_c10d._get_default_store())  # noqa: SLF001 - as torch's own functions do
        results.append(use(place))
        dist.destroy_process_group()
    return [*results, len(kept)]


def farewells_are_lost(place: RankLocation) -> list[Any]:
    """The same address again and again, where what a rank says as it leaves a store does not arrive."""
    send = StoreClient._send  # noqa: SLF001 - where it can be lost

    def lossy(client: StoreClient, message: Any, to: int) -> None:
        if not isinstance(message, StoreLeave):
            send(client, message, to)

    StoreClient._send = lossy  # noqa: SLF001 - the same
    results: list[Any] = []
    for _ in range(3):
        join(place, "farewell", timeout_s=15.0)
        results.append(use(place))
        dist.destroy_process_group()
    return results


def whole_lives(place: RankLocation) -> dict[str, Any]:
    """Groups of both backends, the same address again, and at last rank 0 just ends."""
    results: dict[str, Any] = {"dds": [], "gloo": []}
    for backend in ("dds", "gloo", "dds", "gloo"):
        store = join(place, "first", backend)
        store.set(f"key/{place.rank}", bytes(200_000))
        results[backend] += [use(place), len(store.get(f"key/{place.world - 1 - place.rank}"))]
        del store
        dist.destroy_process_group()
    results["threads"] = threads_of_gradbus()
    store = join(place, "last")
    signs: Any = dist.TCPStore("127.0.0.1", place.port, is_master=False)
    if place.rank == 0:
        store.set("last words", "1")
        signs.set("rank 0 ends", "1")
    else:
        signs.wait(["rank 0 ends"])
        results["last words"] = store.get("last words")
        results["sum"] = store.add("a number", 2)
    return results


def one_after_the_other_dies(place: RankLocation) -> dict[str, Any]:
    """Rank 2 is killed, which no other rank minds; then the test kills rank 0."""
    store = join(place, "deaths", "gloo" if place.options.get("gloo") else "dds")
    if place.rank == 2:
        store.set("rank 2 was here", "1")
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["rank 2 was here"])
    result: dict[str, Any] = {"sum": store.add("n", 1)}
    place.say("waits")
    try:
        store.wait(["never"], timedelta(seconds=60))
    except dist.DistNetworkError as error:
        result["text"] = str(error)
    place.say("failed as it should")
    try:
        store.set("one", "more")
    except dist.DistNetworkError as error:
        result["next"] = str(error)
    return result


def exchange_objects(place: RankLocation) -> list[Any]:
    """Ranks that unpickle what the other one says; rank 1 comes when it may."""
    while place.rank == 1 and not os.path.exists(place.options["gate"]):
        time.sleep(0.01)
    url = place.options["url"]
    dist.init_process_group(
        "dds", init_method=url, rank=place.rank, world_size=place.world, timeout=timedelta(seconds=60)
    )
    got = []
    for step in range(20):
        objects = [step if step % 2 == place.rank else None]
        dist.broadcast_object_list(objects, src=step % 2)
        if not isinstance(objects[0], int):
            raise TypeError(f"step {step} brought {objects[0]!r}")
        got.append(objects[0])
    return got


def exchange_values(place: RankLocation) -> dict[str, Any]:
    """Each rank sets values and gets those of the other one, from when the test lets it.

    Returns:
        ``slowest_s``: of one exchange. ``count``: of foreign readers that were excluded; ``named``: process and user
        of each, as the log has them.
    """
    (store, *_) = next(iter(dist.rendezvous(place.options["url"], place.rank, place.world)))
    store.set(f"here/{place.rank}", "1")
    store.wait([f"here/{rank}" for rank in range(place.world)])
    place.say("is in")
    while not os.path.exists(place.options["gate"]):
        time.sleep(0.01)
    taken_s = []
    with capture_logs() as logs:
        for step in range(30):
            began_s = time.monotonic()
            store.set(f"{step}/{place.rank}", bytes([step]) * (1 << 20))
            assert store.get(f"{step}/{1 - place.rank}") == bytes([step]) * (1 << 20)
            taken_s.append(time.monotonic() - began_s)
        store.set(f"done/{place.rank}", "1")
        store.wait([f"done/{rank}" for rank in range(place.world)])
    lines = [line for line in logs if line["event"] == "foreign readers excluded"]
    result = {
        "slowest_s": max(taken_s), "count": link_of(store).thread.bus.rejected["foreign reader"],
        "named": [(int(line["pid"]), line["user"]) for line in lines],
    }  # fmt: skip
    store.close()
    finished(store)
    return result
