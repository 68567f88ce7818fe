"""Every collective on every rank, with frames that come late, doubled and in any order. No DDS, no event loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import reduce as fold
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_link import MAX_BYTES, MemoryNet
from torch import Tensor

from gradbus.runtime.collectives import data_movement, reductions
from gradbus.runtime.collectives import operation as operation_module
from gradbus.runtime.collectives.arithmetic import Arithmetic, ReduceOp
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.reductions import (
    Algorithm,
    ReduceScatterOperation,
    ReduceToRoot,
    all_reduce,
    shard_bounds,
)
from gradbus.runtime.collectives.tensors import as_bytes
from gradbus.runtime.wire import frames

CHUNK_BYTES = 64  # so that small vectors have many chunks; a multiple of the largest element
ALGORITHMS: list[Algorithm] = ["direct", "shards", "ring"]
SEEDS = st.integers(0, 1 << 32)
WORLDS = st.integers(1, 9)
BYTES = st.binary(max_size=5 * CHUNK_BYTES)
quick = settings(derandomize=True, deadline=None, max_examples=25)


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (frames, operation_module, data_movement, reductions):
            patch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
        yield


def net_of(world: int, seed: int = 0) -> MemoryNet:
    """By the seed, all payloads wait until their receiver has called, or those of some size, or what is too much
    together, or none."""
    large_bytes, share_bytes = [0, 100, 1 << 20][seed % 3], [3000, 1 << 30][seed // 3 % 2]
    return MemoryNet(world, seed=seed, repeat=0.2, large_bytes=large_bytes, share_bytes=share_bytes)


def vectors(world: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One for each rank, with values whose sum shows the order of its additions."""
    made = []
    for rank in range(world):
        generator = torch.Generator().manual_seed(1000 * numel + rank)
        spread = torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)
        made.append(spread.to(dtype))
    return made


def in_rank_order(tensors: list[Tensor], divisor: int = 1) -> Tensor:
    half = tensors[0].dtype in (torch.float16, torch.bfloat16)
    total = fold(torch.add, [tensor.float() if half else tensor for tensor in tensors])
    return (total if divisor == 1 else total * (1 / divisor)).to(tensors[0].dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape and one.dtype == other.dtype and as_bytes(one).tobytes() == as_bytes(other).tobytes()
    )


def check_all_reduce(
    net: MemoryNet, tensors: list[Tensor], algorithm: Algorithm, *, in_place: bool = False, op: ReduceOp = "sum"
) -> None:
    world = len(tensors)
    expected = in_rank_order(tensors, world if op == "mean" else 1)
    inputs = [tensor.clone() for tensor in tensors]
    what = Arithmetic(tensors[0].dtype, op, world if op == "mean" else 1)
    operations = [
        all_reduce(tensor, tensor if in_place else None, what, algorithm, rank, world)
        for rank, tensor in enumerate(inputs)
    ]
    for rank, result in enumerate(net.run(*operations)):
        assert same_bits(result, expected), f"rank {rank}"
        assert (result.data_ptr() == inputs[rank].data_ptr()) == in_place or not result.numel()
        assert in_place or same_bits(inputs[rank], tensors[rank])
    net.assert_nothing_is_left()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", range(1, 10))
def test_all_reduce_is_right_for_every_size(algorithm: Algorithm, world: int) -> None:
    for numel in range(41):
        check_all_reduce(net_of(world, numel), vectors(world, numel), algorithm, in_place=bool(numel % 2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("in_place", [False, True])
def test_half_precision_has_the_same_bits_with_every_algorithm(
    algorithm: Algorithm, dtype: torch.dtype, in_place: bool
) -> None:
    """The ring passes float32 on, so the chunks of its sums and of its results differ in size."""
    for world in (2, 3, 5):
        for numel in (1, 15, 16, 17, 31, 32, 33, 100):
            tensors = vectors(world, numel, dtype)
            check_all_reduce(net_of(world, numel), tensors, algorithm, in_place=in_place, op="mean")


@quick
@given(
    world=WORLDS, numel=st.integers(0, 200), seed=SEEDS, algorithm=st.sampled_from(ALGORITHMS), in_place=st.booleans()
)
def test_all_reduce_gives_the_same_bits_in_any_order_of_events(
    world: int, numel: int, seed: int, algorithm: Algorithm, in_place: bool
) -> None:
    check_all_reduce(net_of(world, seed), vectors(world, numel), algorithm, in_place=in_place)


@quick
@given(world=WORLDS, numel=st.integers(0, 100), seed=SEEDS, root=st.integers(0, 8), op=st.sampled_from(["sum", "mean"]))
def test_reduce_gives_the_sum_to_the_root_alone(world: int, numel: int, seed: int, root: int, op: ReduceOp) -> None:
    root %= world
    tensors, what = vectors(world, numel), Arithmetic(torch.float32, op, world if op == "mean" else 1)
    operations = [
        ReduceToRoot(tensor, torch.empty(numel) if rank == root else tensor, root, what, rank, world)
        for rank, tensor in enumerate(tensors)
    ]
    net = net_of(world, seed)
    results = net.run(*operations)
    assert same_bits(results.pop(root), in_rank_order(vectors(world, numel), what.divisor))
    assert results == [None] * (world - 1)
    assert all(map(same_bits, tensors, vectors(world, numel)))
    net.assert_nothing_is_left()


def test_reduce_puts_the_sum_where_the_caller_wants_it() -> None:
    """As on a GPU: not in the memory that it was added up in."""
    tensors, what = vectors(2, 6), Arithmetic(torch.float32, "sum")
    wanted = torch.zeros(3, 2).t()
    root = ReduceToRoot(tensors[0], torch.empty(6), 0, what, 0, 2, wanted=wanted)
    result, nothing = net_of(2).run(root, ReduceToRoot(tensors[1], tensors[1], 0, what, 1, 2))
    assert result is wanted
    assert nothing is None
    assert same_bits(wanted.reshape(-1), in_rank_order(tensors))


@quick
@given(world=WORLDS, rows=st.integers(0, 40), row=st.integers(0, 3), seed=SEEDS)
def test_reduce_scatter_gives_each_rank_its_part_of_a_tensor_split(world: int, rows: int, row: int, seed: int) -> None:
    tensors = [vector.view(rows, row) for vector in vectors(world, rows * row)]
    expected = in_rank_order(tensors).tensor_split(world)
    bounds = [edge * row for edge in shard_bounds(rows, world)]
    what = Arithmetic(torch.float32, "sum")
    operations = [
        ReduceScatterOperation(tensor, torch.empty(expected[rank].shape), bounds, what, rank, world)
        for rank, tensor in enumerate(tensors)
    ]
    net = net_of(world, seed)
    assert all(map(same_bits, net.run(*operations), expected))
    net.assert_nothing_is_left()


def tensor_of(data: bytes, number: int) -> Tensor:
    """A tensor of some dtype and shape with these bytes, or rather the first of them."""
    dtypes = [
        torch.uint8,
        torch.float32,
        torch.float8_e4m3fn,
        torch.uint16,
        torch.complex128,
        torch.bfloat16,
    ]
    dtype = dtypes[number % len(dtypes)]
    size = len(data) // dtype.itemsize
    tensor = torch.empty(size, dtype=dtype)
    as_bytes(tensor)[:] = list(data[: size * dtype.itemsize])
    return tensor.view(1, size, 1) if number % 2 else tensor


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) is bytes and one == other


def all_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(map(same, ones, others))


Make = Callable[[bytes, int], Any]
KINDS = st.sampled_from([lambda data, number: data, tensor_of])


@quick
@given(payloads=st.lists(BYTES, min_size=1, max_size=9), seed=SEEDS, make=KINDS)
def test_all_gather_gives_everybody_everything_whatever_the_sizes(payloads: list[bytes], seed: int, make: Make) -> None:
    world = len(payloads)
    given_ = [make(payload, rank) for rank, payload in enumerate(payloads)]
    net = net_of(world, seed)
    results = net.run(
        *(data_movement.AllGatherOperation(given_[rank], rank, world, MAX_BYTES) for rank in range(world))
    )
    for result in results:
        assert all_same(result, given_)
    net.assert_nothing_is_left()


@quick
@given(payloads=st.lists(BYTES, min_size=1, max_size=9), root=st.integers(0, 8), seed=SEEDS, make=KINDS)
def test_gather_gives_the_root_everything_and_scatter_gives_everybody_its_own(
    payloads: list[bytes], root: int, seed: int, make: Make
) -> None:
    world = len(payloads)
    root %= world
    given_ = [make(payload, rank) for rank, payload in enumerate(payloads)]
    net = net_of(world, seed)
    results = net.run(
        *(data_movement.Gather(given_[rank], root, rank, world, MAX_BYTES) for rank in range(world)), name="g"
    )
    gathered = results.pop(root)
    assert all_same(gathered, given_)
    assert results == [None] * (world - 1)
    scatters = [
        data_movement.Scatter(given_ if rank == root else None, root, rank, world, MAX_BYTES) for rank in range(world)
    ]
    assert all_same(net.run(*scatters, name="s"), given_)
    net.assert_nothing_is_left()


@quick
@given(payload=BYTES, world=WORLDS, root=st.integers(0, 8), seed=SEEDS)
def test_broadcast_fills_tensors_in_their_place_and_makes_bytes_anew(
    payload: bytes, world: int, root: int, seed: int
) -> None:
    root %= world
    net, source = net_of(world, seed), tensor_of(payload, seed)
    tensors = [source if rank == root else torch.zeros_like(source) for rank in range(world)]
    results = net.run(
        *(data_movement.BroadcastOperation(tensors[rank], root, rank, world, MAX_BYTES) for rank in range(world))
    )
    assert all(result is tensor and same_bits(tensor, source) for result, tensor in zip(results, tensors, strict=True))
    results = net.run(
        *(
            data_movement.BroadcastOperation(payload if rank == root else None, root, rank, world, MAX_BYTES)
            for rank in range(world)
        ),
        name="bytes",
    )
    assert results == [payload] * world
    net.assert_nothing_is_left()


@quick
@given(world=WORLDS, seed=SEEDS, make=KINDS)
def test_all_to_all_sorts_what_came_by_its_sender(world: int, seed: int, make: Make) -> None:
    rng = random.Random(seed)
    table = [[make(rng.randbytes(rng.randrange(200)), rng.randrange(9)) for _ in range(world)] for _ in range(world)]
    net = net_of(world, seed)
    results = net.run(*(data_movement.AllToAll(table[rank], rank, world, MAX_BYTES) for rank in range(world)))
    for rank, result in enumerate(results):
        assert all_same(result, [row[rank] for row in table])
    net.assert_nothing_is_left()


@quick
@given(payload=BYTES, seed=SEEDS, make=KINDS)
def test_a_sent_payload_reaches_its_receiver_alone(payload: bytes, seed: int, make: Make) -> None:
    net, sent = net_of(4, seed), make(payload, seed)
    nothing, received = net.run(data_movement.Send(sent, 3, 1, 4), data_movement.Receive(1, 3, 4, MAX_BYTES))
    assert nothing is None
    assert same(received, sent)
    net.assert_nothing_is_left()


@pytest.mark.parametrize("world", range(1, 10))
def test_a_barrier_ends_on_no_rank_before_the_last_one_has_come(world: int) -> None:
    net = net_of(world)
    barriers = [data_movement.Barrier(rank, world) for rank in range(world)]
    for barrier in barriers[:-1]:
        net.start(barrier)
    net.settle()
    assert [barrier.missing for barrier in barriers[:-1]] == [(world - 1,)] * (world - 1)
    net.start(barriers[-1])
    net.settle()
    assert [barrier.value for barrier in barriers] == [tuple(range(world))] * world
    net.assert_nothing_is_left()


@quick
@given(world=st.integers(2, 6), seed=SEEDS, loser=st.integers(0, 5), silent_to=st.integers(0, 5))
def test_who_misses_a_frame_waits_for_its_sender_and_names_it(
    world: int, seed: int, loser: int, silent_to: int
) -> None:
    """One frame of one rank never reaches another one: all others end, and that one names whom it waits for."""
    loser, silent_to = loser % world, silent_to % world
    net = net_of(world, seed)
    net.lost = lambda sender, receiver, frame: (sender, receiver, frame.seq) == (loser, silent_to, 1)
    operations = [
        data_movement.AllGatherOperation(bytes(3 * CHUNK_BYTES), rank, world, MAX_BYTES) for rank in range(world)
    ]
    for operation in operations:
        net.start(operation)
    net.settle()
    for rank, operation in enumerate(operations):
        assert operation.missing == ((loser,) if rank == silent_to != loser else ())
        assert operation.done == (rank != silent_to or loser == silent_to)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("absent", range(4))
def test_all_reduce_without_one_rank_ends_on_none_and_misses_that_rank(algorithm: Algorithm, absent: int) -> None:
    net, tensors = net_of(4), vectors(4, 100)
    operations: list[Operation] = []
    for rank in range(4):
        if rank != absent:
            operations.append(all_reduce(tensors[rank], None, Arithmetic(torch.float32, "sum"), algorithm, rank, 4))
            net.start(operations[-1])
    net.settle()
    assert not any(operation.done for operation in operations)
    assert all(operation.missing for operation in operations)
    if algorithm != "ring":  # whose ranks know of their neighbours alone
        assert all(absent in operation.missing for operation in operations)


@quick
@given(seed=SEEDS, world=st.integers(2, 5))
def test_many_collectives_at_once_started_in_another_order_on_each_rank_do_not_mix(seed: int, world: int) -> None:
    net, rng = net_of(world, seed), random.Random(seed)
    calls = [(f"name {number % 4}", number // 4) for number in range(12)]  # name and round
    tensors = {call: vectors(world, 10 + 17 * number) for number, call in enumerate(calls)}
    operations: dict[tuple[str, int], list[Operation]] = {call: [] for call in calls}
    what = Arithmetic(torch.float32, "sum")
    starts = [(rank, call) for rank in range(world) for call in rng.sample(calls, len(calls))]
    for rank, (name, round_id) in rng.sample(starts, len(starts)):
        operation = all_reduce(tensors[name, round_id][rank], None, what, "auto", rank, world)
        operations[name, round_id].append(net.start(operation, name, round_id))
        net.step()
    net.settle()
    for call in calls:
        assert all(same_bits(operation.value, in_rank_order(tensors[call])) for operation in operations[call])
    net.assert_nothing_is_left()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_a_rank_moves_is_what_the_algorithm_promises(algorithm: Algorithm) -> None:
    world, numel = 4, 4 * CHUNK_BYTES
    size, net = 4 * numel, MemoryNet(world)
    net.run(
        *(
            all_reduce(tensor, None, Arithmetic(torch.float32, "sum"), algorithm, rank, world)
            for rank, tensor in enumerate(vectors(world, numel))
        )
    )
    moved = [(engine.traffic.sent_bytes, engine.traffic.received_bytes) for engine in net.engines]
    if algorithm == "direct":
        assert moved == [(size, 3 * size)] * world  # what goes to all counts once going out
    elif algorithm == "shards":
        assert moved == [(size * 3 // 4 + size // 4, 2 * size * 3 // 4)] * world
    else:
        assert moved == [(2 * size, size), (2 * size, 2 * size), (size, 2 * size), (size, size)]
