"""What the collectives of a group give, over real DDS, with one bus for each rank in one process."""

from __future__ import annotations

from functools import reduce as fold
from typing import Any

import numpy as np
import pytest
import torch
from bus_helpers import Run
from group_node import as_ranks
from torch import Tensor

from gradbus.runtime.collectives import ALGORITHMS, Group
from gradbus.runtime.collectives.tensors import as_bytes

both_loops = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)
each_world = pytest.mark.parametrize("world", [1, 2, 3, 4])
FUNCTIONS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int8,
    torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


def vector(rank: int, shape: tuple[int, ...] = (7, 5), dtype: torch.dtype = torch.float32) -> Tensor:
    spread = np.random.default_rng(rank).standard_normal(shape) * 100
    return torch.from_numpy(np.asarray(spread)).to(dtype)


def in_numpy(tensors: list[Tensor], op: str, divisor: int = 1) -> np.ndarray[Any, Any]:
    total = np.asarray(fold(FUNCTIONS[op], [tensor.numpy() for tensor in tensors]))
    return total * total.dtype.type(1 / divisor) if op == "mean" else total


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and bytes(as_bytes(one.contiguous())) == bytes(
        as_bytes(other.contiguous())
    )


@both_loops
@each_world
def test_reductions_give_what_numpy_gives_bit_for_bit(run: Run, place: dict[str, Any], world: int) -> None:
    tensors = [vector(rank) for rank in range(world)]

    async def script(group: Group) -> None:
        mine, root = vector(group.rank), world - 1
        for op in ("sum", "mean", "min", "max"):
            expected = in_numpy(tensors, op, world)
            for algorithm in ALGORITHMS:
                result = await group.all_reduce(f"{op} {algorithm}", mine, op=op, algorithm=algorithm)  # type: ignore[arg-type]
                assert np.array_equal(result.numpy(), expected)
            reduced = await group.reduce(f"{op} root", mine, op=op, root=root)  # type: ignore[arg-type]
            assert (reduced is None) == (group.rank != root)
            assert reduced is None or np.array_equal(reduced.numpy(), expected)
            part = await group.reduce_scatter(f"{op} part", mine, op=op)  # type: ignore[arg-type]
            assert np.array_equal(part.numpy(), np.array_split(expected, world)[group.rank])
        mean = await group.all_reduce("divisor", mine, op="mean", divisor=7)
        assert np.array_equal(mean.numpy(), in_numpy(tensors, "mean", 7))
        assert torch.equal(mine, tensors[group.rank])
        assert (group.stats.pending, group.stats.early_bytes, sum(group.stats.dropped.values())) == (0, 0, 0)

    run(lambda: as_ranks(place, world, script))


@both_loops
@each_world
def test_moved_payloads_arrive_as_they_were_given(run: Run, place: dict[str, Any], world: int) -> None:
    payloads = [bytes([rank]) * (rank * 1000) for rank in range(world)]  # that of rank 0 is empty
    tensors = [vector(rank, (rank, 3)) for rank in range(world)]

    async def script(group: Group) -> None:
        rank, root = group.rank, world // 2
        assert await group.all_gather("bytes", payloads[rank]) == payloads
        assert all(map(same_bits, await group.all_gather("tensors", tensors[rank]), tensors))
        gathered = await group.gather("gather", payloads[rank], root=root)
        assert gathered == (payloads if rank == root else None)
        assert await group.scatter("scatter", payloads if rank == root else None, root=root) == payloads[rank]
        piece = await group.scatter("scatter tensors", tensors if rank == root else None, root=root)
        assert same_bits(piece, tensors[rank])
        assert await group.broadcast("bytes", b"model" if rank == root else None, root=root) == b"model"
        filled = vector(root) if rank == root else torch.zeros(7, 5)
        assert await group.broadcast("tensor", filled, root=root) is filled
        assert same_bits(filled, vector(root))
        mixed = await group.all_to_all("all to all", [bytes([rank, to]) * (rank + to) for to in range(world)])
        assert mixed == [bytes([sender, rank]) * (sender + rank) for sender in range(world)]
        assert await group.barrier() == tuple(range(world))

    async def exchange(group: Group) -> None:
        """Everybody sends to the next rank and receives from the one before, at once."""
        after, before = (group.rank + 1) % world, (group.rank - 1) % world
        sent = group.send(f"from {group.rank}", tensors[group.rank], to=after)
        assert same_bits(await group.recv(f"from {before}", source=before), tensors[before])
        assert await sent is None

    async def both(group: Group) -> None:
        await script(group)
        if world > 1:
            await exchange(group)
        assert (group.stats.pending, group.stats.early_bytes, sum(group.stats.dropped.values())) == (0, 0, 0)

    run(lambda: as_ranks(place, world, both))


OBJECTS: list[Any] = [
    None, True, 7, -(2**63), 2**64 - 1, 2.5, float("inf"), "text ü", b"bytes", [], {}, [1, [2, {"three": [None]}]],
    {"a": 1, 2: "b", b"c": 3},
]  # fmt: skip


def test_objects_arrive_as_msgpack_makes_them(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        rank = group.rank
        for number, value in enumerate(OBJECTS):
            assert await group.all_gather_object("all", [rank, value], round_id=number) == [
                [r, value] for r in range(3)
            ]
        given = OBJECTS if rank == 1 else "not looked at"
        assert await group.broadcast_object("one", given, root=1) == OBJECTS
        assert await group.gather_object("to", rank, root=2) == ([0, 1, 2] if rank == 2 else None)
        assert await group.scatter_object("from", ["a", "b", "c"] if rank == 0 else None) == "abc"[rank]
        assert await group.all_gather_object("tuples become lists", (1, (2, 3))) == [[1, [2, 3]]] * 3
        if rank == 0:
            assert await group.send_object("direct", {"x": 1}, to=1) is None
        elif rank == 1:
            assert await group.recv_object("direct", source=0) == {"x": 1}

    run(lambda: as_ranks(place, 3, script))


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), 2**64, -(2**63) - 1, torch.ones(2), np.float32(1), 1j, "\ud800", lambda: None]
)
def test_an_object_that_has_no_place_in_msgpack_is_refused_at_the_call(
    run: Run, place: dict[str, Any], value: Any
) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)

    async def script(group: Group) -> None:
        for bad in (value, [value], {"a": value}, cycle):
            with pytest.raises(ValueError, match="object"):
                group.all_gather_object("x", bad)
        assert group.stats.pending == 0

    run(lambda: as_ranks(place, 1, script))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_place_and_into_other_memory_give_the_same_and_touch_nothing_else(
    run: Run, place: dict[str, Any], algorithm: Any
) -> None:
    numel = 700_001  # three chunks
    tensors = [vector(rank, (numel,)) for rank in range(3)]
    expected = torch.from_numpy(in_numpy(tensors, "sum"))

    async def script(group: Group) -> None:
        mine = vector(group.rank, (numel,))
        out = torch.empty(numel)
        result = await group.all_reduce("beside", mine, out=out, algorithm=algorithm)
        assert result.data_ptr() == out.data_ptr()
        assert same_bits(out, expected)
        assert same_bits(mine, tensors[group.rank])
        result = await group.all_reduce("in place", mine, out=mine, algorithm=algorithm)
        assert result.data_ptr() == mine.data_ptr()
        assert same_bits(mine, expected)
        room = torch.zeros(numel + 100)
        room[:numel] = tensors[group.rank]
        await group.all_reduce("shifted", room[:numel], out=room[100:], algorithm=algorithm)  # they overlap in part
        assert same_bits(room[100:], expected)

    run(lambda: as_ranks(place, 3, script))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_layout_in_memory_works_going_in_and_coming_out(run: Run, place: dict[str, Any], algorithm: Any) -> None:
    def layouts(rank: int) -> dict[str, Tensor]:
        matrix = vector(rank, (6, 8))
        imaginary = torch.complex(matrix, vector(rank + 10, (6, 8)))
        return {
            "transposed": matrix.t(),
            "strided": matrix[::2, 1::3],
            "scalar": matrix[2, 3],
            "one": matrix[1:2, 3],
            "none": matrix[:0],
            "no columns": matrix[:, :0],
            "imaginary": imaginary.imag,
            "conjugate": imaginary.conj(),
            "negative": imaginary.conj().imag,
            "channels last": vector(rank, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
            "parameter": torch.nn.Parameter(matrix.clone()),
        }

    async def script(group: Group) -> None:
        for name in layouts(0):
            tensor = layouts(group.rank)[name]
            parts = [layouts(rank)[name].detach() for rank in range(2)]
            expected = (parts[0] + parts[1]).resolve_conj().resolve_neg()
            result = await group.all_reduce(name, tensor, algorithm=algorithm)
            assert not result.requires_grad
            assert same_bits(result, expected), name
            assert torch.equal(tensor.detach(), parts[group.rank])
            gathered = await group.all_gather(name, tensor)
            assert [torch.equal(one, other) for one, other in zip(gathered, parts, strict=True)] == [True, True], name
            await group.all_reduce(name, tensor, out=tensor, algorithm=algorithm)
            assert same_bits(tensor.detach().resolve_conj().resolve_neg(), expected), name
            target = layouts(5)[name]
            filled = await group.broadcast(name, target if group.rank else tensor, root=0)
            assert torch.equal(filled.detach(), expected), name

    run(lambda: as_ranks(place, 2, script))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_dtype_is_added_in_rank_order(run: Run, place: dict[str, Any], dtype: torch.dtype) -> None:
    half = dtype in (torch.float16, torch.bfloat16)
    tensors = [vector(rank, (101,)).abs().to(dtype) for rank in range(3)]
    wide = [tensor.float() if half else tensor for tensor in tensors]
    expected = torch.from_numpy(in_numpy(wide, "sum")).to(dtype)

    async def script(group: Group) -> None:
        for algorithm in ALGORITHMS:
            assert same_bits(await group.all_reduce("x", tensors[group.rank], algorithm=algorithm), expected)  # type: ignore[arg-type]
        assert all(map(same_bits, await group.all_gather("y", tensors[group.rank]), tensors))
        part = await group.reduce_scatter("z", tensors[group.rank])
        assert same_bits(part, expected.tensor_split(3)[group.rank])

    run(lambda: as_ranks(place, 3, script))


@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda dtype: str(dtype)[6:])
def test_float8_is_moved_but_not_added(run: Run, place: dict[str, Any], dtype: torch.dtype) -> None:
    async def script(group: Group) -> None:
        tensor = vector(group.rank, (33,)).to(dtype)
        with pytest.raises(ValueError, match="no arithmetic for float8"):
            group.all_reduce("x", tensor)
        assert all(map(same_bits, await group.all_gather("y", tensor), [vector(r, (33,)).to(dtype) for r in range(2)]))
        assert same_bits(await group.broadcast("z", tensor, root=1), vector(1, (33,)).to(dtype))

    run(lambda: as_ranks(place, 2, script))


def test_what_one_rank_gave_it_gets_back_in_memory_of_its_own(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        tensor, numbers = torch.ones(3), np.array(3)
        mine = (await group.all_gather("tensor", tensor))[group.rank]
        tensor[0] = 9
        assert mine.tolist() == [1, 1, 1]
        assert await group.all_gather("a number of NumPy", numbers) == [numbers.tobytes()] * 2  # not three zeros
        assert await group.broadcast("root", np.int64(3) if group.rank == 0 else None) == np.int64(3).tobytes()

    run(lambda: as_ranks(place, 2, script))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_tensors_on_a_gpu_are_copied_to_and_fro(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        mine = vector(group.rank).cuda()
        expected = torch.from_numpy(in_numpy([vector(0), vector(1)], "sum"))
        assert same_bits((await group.all_reduce("new", mine)).cpu(), expected)
        await group.all_reduce("in place", mine, out=mine)
        assert same_bits(mine.cpu(), expected)
        mine = vector(group.rank).cuda()
        reduced = await group.reduce("root", mine, root=1)
        assert (reduced is None) == (group.rank == 0)
        assert reduced is None or (reduced.is_cuda and same_bits(reduced.cpu(), expected))
        # On other threads than this one a copy is made, and on other streams than its own it is used.
        gathered = await group.all_gather("all", mine)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert all(tensor.is_cuda and same_bits(tensor.cpu(), vector(rank)) for rank, tensor in enumerate(gathered))
        assert gathered[group.rank].data_ptr() != mine.data_ptr()

    run(lambda: as_ranks(place, 2, script))
