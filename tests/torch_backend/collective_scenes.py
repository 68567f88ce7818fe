"""Every collective, as small cases: each gives tensors that are compared with those of gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from patience import PATIENT_S
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_node import RankLocation

from gradbus.runtime.collectives import link
from gradbus.runtime.wire.frames import CHUNK_BYTES

Case = Callable[[int, int], list[Tensor]]

FLOATS = (torch.float32, torch.float64, torch.float16)
INTS = (torch.int8, torch.uint8, torch.int32, torch.int64)
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
SIZES = {"one": 1, "odd": 1013, "two chunks": 300_001, "large": 2_200_000}  # float32: of 1 MiB; beyond 8 MiB


coalescing = dist.distributed_c10d._coalescing_manager  # noqa: SLF001 - torch has no public name for it


class Dispatched(TorchDispatchMode):
    """Notes the operators of torch.distributed, which then go through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different on each rank, the same in each run."""
    random = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=random).to(dtype)
    return torch.randint(0, 100, shape, generator=random).to(dtype)


def cases(rank: int, world: int) -> dict[str, Callable[[], list[Tensor]]]:
    """By name. All ranks run all of them in this order."""
    found: dict[str, Callable[[], list[Tensor]]] = {}
    for dtype in (*FLOATS, *INTS):
        for op in OPS[:4] if dtype in FLOATS else OPS:
            found[f"all_reduce {op} {dtype}"] = lambda op=op, dtype=dtype: all_reduce(rank, op, 1013, dtype)
    for size, numel in SIZES.items():
        found[f"all_reduce {size}"] = lambda numel=numel: all_reduce(rank, "SUM", numel)
    for name, function in globals().items():
        if name.startswith("case_"):
            found[name.removeprefix("case_")] = lambda function=function: function(rank, world)
    return found


def every_case(place: RankLocation) -> dict[str, Any]:
    """Results by name; where a case fails, what it said."""
    place.start()
    results: dict[str, Any] = {}
    for name, case in cases(place.rank, place.world).items():
        if place.backend == "gloo" and name in NOT_ON_GLOO:
            continue
        results[name] = case()
    dist.barrier()
    return results


def both_ways(place: RankLocation) -> dict[str, Any]:
    """Results of all cases, alone and with somebody who looks on, and what he saw."""
    place.start()
    alone = {name: case() for name, case in cases(place.rank, place.world).items()}
    with Dispatched() as seen:
        watched = {name: case() for name, case in cases(place.rank, place.world).items()}
    dist.barrier()
    return {"alone": alone, "watched": watched, "seen": sorted(set(seen.names))}


def all_reduce(rank: int, op: str, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    tensor = values(rank, numel, dtype=dtype)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    return [tensor]


def case_all_reduce_of_a_scalar_and_of_nothing(rank: int, world: int) -> list[Tensor]:
    scalar, nothing = torch.tensor(1.5 + rank), torch.empty(0)
    dist.all_reduce(scalar)
    dist.all_reduce(nothing)
    return [scalar, nothing]


def case_all_reduce_of_a_strided_tensor(rank: int, world: int) -> list[Tensor]:
    whole = values(rank, 6, 10)
    dist.all_reduce(whole.t()[::2] if dist.get_backend() == "dds" else whole)
    return [whole.t()[::2].contiguous()]


def case_all_reduce_complex(rank: int, world: int) -> list[Tensor]:
    tensor = torch.complex(values(rank, 7), values(rank + 5, 7))
    dist.all_reduce(tensor)
    return [torch.view_as_real(tensor)]


def case_all_reduce_average(rank: int, world: int) -> list[Tensor]:
    tensors = [values(rank, 9), values(rank, 9, dtype=torch.int64)]
    for tensor in tensors:
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return tensors


def case_all_reduce_with_a_factor(rank: int, world: int) -> list[Tensor]:
    tensor = values(rank, 9)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))  # noqa: SLF001 - torch has no public name for it
    return [tensor]


def case_all_reduce_sparse(rank: int, world: int) -> list[Tensor]:
    indices = torch.tensor([[rank, 3, 3], [0, 1, 1]])
    tensor = torch.sparse_coo_tensor(indices, values(rank, 3, 2), (5, 2, 2), check_invariants=True)
    dist.all_reduce(tensor)
    return [tensor.to_dense()]


def case_many_at_once(rank: int, world: int) -> list[Tensor]:
    tensors = [values(rank, n) for n in (3, 1, 1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


def case_coalesced_all_reduce(rank: int, world: int) -> list[Tensor]:
    tensors = [values(rank, 3), values(rank, 2, 2)]
    with coalescing():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def case_coalesced_all_gather_and_reduce_scatter(rank: int, world: int) -> list[Tensor]:
    gathered = [torch.empty(world * n) for n in (2, 3)]
    with coalescing():
        for output, n in zip(gathered, (2, 3), strict=True):
            dist.all_gather_into_tensor(output, values(rank, n))
    reduced = [torch.empty(n) for n in (2, 3)]
    with coalescing():
        for output, n in zip(reduced, (2, 3), strict=True):
            dist.reduce_scatter_tensor(output, values(rank, world * n))
    return gathered + reduced


def case_coalesced_on_a_device(rank: int, world: int) -> list[Tensor]:
    tensors = [values(rank, 3), values(rank, 2)]
    with coalescing(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, 0, async_op=True)
    manager.wait()
    return tensors


def case_broadcast(rank: int, world: int) -> list[Tensor]:
    tensors = [values(rank, 1000) for _ in range(world)]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, root)
    strided = values(rank, 4, 4)
    dist.broadcast(strided.t() if dist.get_backend() == "dds" else strided, 1)
    return [*tensors, strided]


def case_reduce(rank: int, world: int) -> list[Tensor]:
    tensors = []
    for root in range(world):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            tensor = values(rank, 1000)
            dist.reduce(tensor, root, op)
            tensors += [tensor] * (root == rank)  # elsewhere it holds whatever the backend likes
    return tensors


def case_all_gather(rank: int, world: int) -> list[Tensor]:
    outputs = [torch.empty(3, 5) for _ in range(world)]
    dist.all_gather(outputs, values(rank, 3, 5))
    halves = [torch.empty(4, dtype=torch.bfloat16) for _ in range(world)]
    dist.all_gather(halves, values(rank, 4, dtype=torch.bfloat16))
    return outputs + halves


def case_all_gather_into_tensor(rank: int, world: int) -> list[Tensor]:
    output = torch.empty(world * 7)
    dist.all_gather_into_tensor(output, values(rank, 7))
    in_place = torch.zeros(world * 7)
    own = in_place[rank * 7 : rank * 7 + 7]
    own.copy_(values(rank, 7))
    dist.all_gather_into_tensor(in_place, own)
    if dist.get_backend() == "dds":
        stacked = torch.empty(world, 7)
        dist.all_gather_into_tensor(stacked, values(rank, 7))
        assert torch.equal(stacked.view(-1), output)
    return [output, in_place]


def case_gather_and_scatter(rank: int, world: int) -> list[Tensor]:
    results = []
    for root in range(world):
        outputs = [torch.empty(6) for _ in range(world)] if rank == root else None
        dist.gather(values(rank, 6), outputs, dst=root)
        results += outputs or []
        output = torch.empty(2, 3)
        dist.scatter(output, [values(10 * r, 2, 3) for r in range(world)] if rank == root else None, src=root)
        results.append(output)
    return results


def case_reduce_scatter(rank: int, world: int) -> list[Tensor]:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        output = torch.empty(5)
        dist.reduce_scatter(output, [values(10 * rank + r, 5) for r in range(world)], op)
        results.append(output)
    return results


def case_reduce_scatter_tensor(rank: int, world: int) -> list[Tensor]:
    whole = values(rank, world * 5)
    output, in_place = torch.empty(5), whole.clone()
    dist.reduce_scatter_tensor(output, whole)
    if dist.get_backend() == "dds":
        dist.reduce_scatter_tensor(in_place[rank * 5 : rank * 5 + 5], in_place)
        assert torch.equal(in_place[rank * 5 : rank * 5 + 5], output)
    return [output]


def case_all_to_all_single(rank: int, world: int) -> list[Tensor]:
    even = torch.empty(world * 2, 3)
    dist.all_to_all_single(even, values(rank, world * 2, 3))
    sizes = [1 + (rank + r) % 3 for r in range(world)]  # what rank r sends to this one is as long: symmetric
    uneven = torch.empty(sum(sizes))
    dist.all_to_all_single(uneven, values(rank, sum(sizes)), sizes, sizes)
    return [even, uneven]


def case_all_to_all(rank: int, world: int) -> list[Tensor]:
    outputs = [torch.empty(2) for _ in range(world)]
    dist.all_to_all(outputs, list(values(rank, world * 2).split(2)))
    return outputs


def case_all_to_all_uneven(rank: int, world: int) -> list[Tensor]:
    """Rank r sends r + 1 rows, each its own number."""
    outputs = [torch.empty(r + 1) for r in range(world)]
    dist.all_to_all(outputs, [torch.full((rank + 1,), float(rank)) for _ in range(world)])
    return outputs


def case_all_gather_uneven(rank: int, world: int) -> list[Tensor]:
    outputs = [torch.empty(r + 1) for r in range(world)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    return outputs


def case_objects(rank: int, world: int) -> list[Tensor]:
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, {"rank": rank, "text": "x" * (10 * rank)})
    assert [one["rank"] for one in everybody] == list(range(world))
    told: list[Any] = [rank, "mine"]
    dist.broadcast_object_list(told, src=1)
    assert told == [1, "mine"]
    own: list[Any] = [None]
    dist.scatter_object_list(own, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
    assert own == [f"for {rank}"]
    return []


def case_messages_with_tags(rank: int, world: int) -> list[Tensor]:
    after, before = (rank + 1) % world, (rank - 1) % world
    first, second = torch.empty(3), torch.empty(3)
    works = [dist.isend(values(rank, 3), after, tag=1), dist.isend(values(rank + 7, 3), after, tag=2)]
    works += [dist.irecv(second, before, tag=2), dist.irecv(first, before, tag=1)]
    for work in works:
        work.wait()
    return [first, second]


def case_batch_of_messages(rank: int, world: int) -> list[Tensor]:
    after, before = (rank + 1) % world, (rank - 1) % world
    came = torch.empty(300_000)
    batch = [dist.P2POp(dist.irecv, came, before), dist.P2POp(dist.isend, values(rank, 300_000), after)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [came]


def case_receive_from_anyone(rank: int, world: int) -> list[Tensor]:
    if rank:
        dist.send(torch.full((4,), float(rank)), 0)
        return []
    seen = {}
    for _ in range(world - 1):
        tensor = torch.empty(4)
        source = dist.recv(tensor)
        assert tensor.tolist() == [float(source)] * 4
        seen[source] = tensor
    return [seen[source] for source in sorted(seen)]


def case_barriers(rank: int, world: int) -> list[Tensor]:
    dist.barrier()
    dist.monitored_barrier()
    dist.barrier(async_op=True).wait()
    return []


def case_subgroups(rank: int, world: int) -> list[Tensor]:
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(world)]
    tensor = values(rank, 5)
    dist.all_reduce(tensor, group=alone[rank])
    if rank < 2:
        dist.all_reduce(tensor, group=pair)
        dist.destroy_process_group(pair)
    dist.barrier()
    return [tensor]


NOT_ON_GLOO = {
    "all_reduce_average", "all_reduce_with_a_factor", "all_to_all_uneven", "all_gather_uneven",
    "all_to_all", "coalesced_on_a_device",
}  # fmt: skip


def sums_of_many_chunks(place: RankLocation) -> list[float]:
    """Each shard has more chunks than a rank has slots, and each rank hears from its readers one after the other."""
    link.SLOT_WAIT_S = PATIENT_S  # no way out over DDS
    place.start(timeout_s=PATIENT_S / 2)
    found = []
    for _ in range(4):
        tensor = torch.ones(place.world * 20 * CHUNK_BYTES // 4)
        dist.all_reduce(tensor)
        found += [tensor.min().item(), tensor.max().item()]
    dist.barrier()
    dist.destroy_process_group()
    return found
