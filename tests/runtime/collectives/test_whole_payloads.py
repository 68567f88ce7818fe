"""Whatever sizes a peer states: what ends well has every byte of its payloads, and nothing else is passed on.

One rank of each collective gets the frames that the others send, of which some state other sizes, offsets or totals.
Their bytes are those of the true payload at the place that they state. So to take such a frame does no harm as long as
nothing is missed, and a rank that misses a byte has the pattern there that its memory began with.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from backend_support import needs_torch_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_link import GROUP_ID, INCARNATION, MAX_BYTES, MemoryNet
from torch import Tensor

from gradbus.runtime.collectives import data_movement, operation, reductions
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.collectives.operation import Finished, Operation, OperationKey, OutgoingPart
from gradbus.runtime.collectives.reductions import ReduceScatterOperation, ReduceToRoot, all_reduce, shard_bounds
from gradbus.runtime.collectives.tensors import as_bytes
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import Frame, chunk_count

CHUNK_BYTES = 64
NUMEL = 150  # of int32: ten chunks, and four in each of three shards
PATTERN = 0xEE
WORLD = 3
EXAMPLES, RUNS = 25, 30  # of each of the cases below: more than 10,000 runs in all


def patterned(memory: Any) -> Any:
    as_bytes(memory)[:] = PATTERN
    return memory


@pytest.fixture(scope="module", autouse=True)
def small_chunks_in_memory_with_a_pattern() -> Iterator[None]:
    describe = data_movement.empty_like_described
    with pytest.MonkeyPatch.context() as patch:
        for module in (frames, operation, data_movement, reductions):
            patch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
        filled = SimpleNamespace(
            empty=lambda size, dtype: np.full(size, PATTERN, dtype), frombuffer=np.frombuffer, uint8=np.uint8
        )
        patch.setattr(data_movement, "np", filled)
        patch.setattr(data_movement, "empty_like_described", lambda *given: patterned(describe(*given)))
        yield


# The collectives, on every rank


def vector(rank: int, numel: int = NUMEL, dtype: torch.dtype = torch.int32) -> Tensor:
    generator = torch.Generator().manual_seed(numel + rank)
    return torch.randint(-1000, 1000, (numel,), generator=generator).to(dtype)


def payload(rank: int, size: int = 150) -> bytes:
    return random.Random(rank).randbytes(size)


def blank(numel: int = NUMEL, dtype: torch.dtype = torch.int32) -> Tensor:
    return patterned(torch.empty(numel, dtype=dtype))


SUM = Arithmetic(torch.int32, "sum")
HALF = Arithmetic(torch.float16, "sum")


def reduced(algorithm: reductions.Algorithm, rank: int) -> Operation:
    return all_reduce(vector(rank), blank(), SUM, algorithm, rank, WORLD)


def in_place(algorithm: reductions.Algorithm, rank: int) -> Operation:
    tensor = vector(rank)
    return all_reduce(tensor, tensor, SUM, algorithm, rank, WORLD)


def half(rank: int) -> Operation:
    return all_reduce(vector(rank, dtype=torch.float16), blank(dtype=torch.float16), HALF, "ring", rank, WORLD)


def scattered(rank: int) -> Operation:
    return ReduceScatterOperation(vector(rank), blank(NUMEL // WORLD), shard_bounds(NUMEL, WORLD), SUM, rank, WORLD)


def sent(kind: type, rank: int) -> Operation:
    what = payload(1) if kind is bytes else vector(1)
    return data_movement.Send(what, 0, 1, WORLD) if rank else data_movement.Receive(1, 0, WORLD, MAX_BYTES)


def exchanged(rank: int) -> Operation:
    from gradbus.torch.tensor_exchange import TensorExchange

    into = {other: blank() for other in range(WORLD)}
    operation = TensorExchange("all_gather", rank, WORLD, to=vector(rank), into=into)
    operation.convert = lambda value: [into[other] for other in range(WORLD) if other != rank]
    return operation


def exchanged_from_root(rank: int) -> Operation:
    from gradbus.torch.tensor_exchange import TensorExchange

    if rank == 1:
        return TensorExchange("broadcast 1", rank, WORLD, to=vector(1), receipts=True)
    into = blank()
    operation = TensorExchange("broadcast 1", rank, WORLD, into={1: into}, receipts=True)
    operation.convert = lambda value: into
    return operation


@dataclass(frozen=True)
class Case:
    """A collective on all ranks, and the one that is sent wrong sizes."""

    make: Callable[[int], Operation]
    victim: int = 0
    ranks: Sequence[int] = range(WORLD)
    free: bool = False  # its senders decide how much they send


CASES = {
    "all_gather": Case(lambda r: data_movement.AllGatherOperation(payload(r), r, WORLD, MAX_BYTES), free=True),
    "all_gather, one chunk": Case(
        lambda r: data_movement.AllGatherOperation(payload(r, 60), r, WORLD, MAX_BYTES), free=True
    ),
    "all_gather of tensors": Case(lambda r: data_movement.AllGatherOperation(vector(r), r, WORLD, MAX_BYTES)),
    "broadcast": Case(
        lambda r: data_movement.BroadcastOperation(payload(1) if r == 1 else None, 1, r, WORLD, MAX_BYTES), free=True
    ),
    "broadcast of a tensor": Case(
        lambda r: data_movement.BroadcastOperation(vector(1) if r == 1 else blank(), 1, r, WORLD, MAX_BYTES)
    ),
    "gather": Case(lambda r: data_movement.Gather(payload(r), 0, r, WORLD, MAX_BYTES), free=True),
    "scatter": Case(
        lambda r: data_movement.Scatter([payload(i) for i in range(WORLD)] if r == 1 else None, 1, r, WORLD, MAX_BYTES),
        free=True,
    ),
    "all_to_all": Case(
        lambda r: data_movement.AllToAll([payload(10 * r + i) for i in range(WORLD)], r, WORLD, MAX_BYTES), free=True
    ),
    "recv": Case(partial(sent, bytes), ranks=(0, 1), free=True),
    "recv of a tensor": Case(partial(sent, Tensor), ranks=(0, 1)),
    "direct": Case(partial(reduced, "direct")),
    "direct, in place": Case(partial(in_place, "direct"), victim=1),
    "shards": Case(partial(reduced, "shards")),
    "shards, in place": Case(partial(in_place, "shards"), victim=1),
    "ring, first": Case(partial(reduced, "ring")),
    "ring, between": Case(partial(reduced, "ring"), victim=1),
    "ring, last": Case(partial(reduced, "ring"), victim=2),
    "ring, in place": Case(partial(in_place, "ring"), victim=1),
    "ring of float16": Case(half, victim=1),
    "ring of float16, last": Case(half, victim=2),
    "reduce": Case(lambda r: ReduceToRoot(vector(r), blank() if r == 1 else vector(r), 1, SUM, r, WORLD), victim=1),
    "reduce, not the root": Case(lambda r: ReduceToRoot(vector(r), vector(r), 1, SUM, r, WORLD)),
    "reduce_scatter": Case(scattered),
    "barrier": Case(lambda r: data_movement.Barrier(r, WORLD)),
    "torch's all_gather": Case(exchanged),
    "torch's broadcast": Case(exchanged_from_root),
}


# What the rank gets, and what it does with it


class Notes:
    """The way out of the rank: takes everything at once, and notes what it was."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int | None, int, int], bytes] = {}  # by receiver, part and number of the chunk

    def send(self, key: OperationKey, outgoing: OutgoingPart, finished: Finished) -> None:
        to, part, payload, _, _, only, written = outgoing
        numbers = range(chunk_count(len(payload), CHUNK_BYTES)) if only is None else only
        for number in numbers:
            self.sent[to, part, number] = payload[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES].tobytes()
            if written is not None:
                written(number)
        finished(len(payload))


def frames_for(case: Case) -> list[Frame]:
    """Those that come to the rank when nobody does anything wrong."""
    net, taken = MemoryNet(WORLD, inline=0.0), []
    engine = net.engines[case.victim]
    receive = engine.receive

    def note(frame: Frame) -> None:
        taken.append(frame)
        receive(frame)

    engine.receive = note  # type: ignore[method-assign]
    net.run(*map(case.make, case.ranks))
    return taken


def run(case: Case, taken: Sequence[Frame]) -> tuple[Operation, Notes]:
    notes = Notes()
    engine = Engine("group", case.victim, WORLD, notes, early_bytes=1 << 20, early_age_s=60.0)
    engine.set_members(GROUP_ID, {rank: INCARNATION + rank for rank in range(WORLD)})
    operation = case.make(case.victim)
    engine.start(operation, "x", 0)
    for frame in taken:
        engine.receive(frame)
    return operation, notes


def plain(value: Any) -> list[bytes]:
    """The bytes of a result, of each part of it."""
    values = value if isinstance(value, list) else [value]
    return [as_bytes(one).tobytes() if isinstance(one, Tensor) else one for one in values]


Key = tuple[int, int]  # sender and part


def payloads_of(taken: Sequence[Frame]) -> dict[Key, bytes]:
    """What each sender sends, and behind it what it might have sent."""
    found: dict[Key, bytearray] = {}
    for frame in taken:
        whole = found.setdefault((frame.key.sender, frame.key.part), bytearray(frame.total_bytes))
        whole[frame.offset : frame.offset + frame.size] = frame.data
    return {key: bytes(whole) + random.Random(repr(key)).randbytes(4 * CHUNK_BYTES) for key, whole in found.items()}


# Wrong sizes


def near(dice: random.Random, number: int) -> int:
    return max(0, number + dice.choice((-CHUNK_BYTES, -17, -2, -1, 0, 1, 2, 17, CHUNK_BYTES)))


def changed(frame: Frame, true: bytes, dice: random.Random) -> Frame:
    """The frame with other sizes, and the bytes that belong there."""
    seq, count, total, offset, size = frame.seq, frame.seq_cnt, frame.total_bytes, frame.offset, frame.size
    match dice.randrange(7):
        case 0:  # too short or too long
            size = near(dice, size)
        case 1:  # other chunks, as many, which is what the parser lets through
            chunk = dice.randint(-(-total // count), max(-(-total // count), CHUNK_BYTES + 20))
            offset, size = seq * chunk, max(0, min(chunk, total - seq * chunk))
        case 2:  # another payload
            total = near(dice, total)
            count = chunk_count(total, CHUNK_BYTES)
            size = max(0, min(CHUNK_BYTES, total - offset))
        case 3:
            offset = near(dice, offset)
        case 4:
            seq = dice.randrange(count + 2)
            offset = dice.choice((offset, seq * CHUNK_BYTES))
        case 5:
            count = max(1, count + dice.choice((-1, 1)))
        case _:  # nothing at all where there should be something, or all at once
            size = dice.choice((0, 1, total, CHUNK_BYTES - 1, CHUNK_BYTES + 1))
    data = true[offset : offset + size]
    if not dice.randrange(10):
        data = data[: dice.randrange(len(data) + 1)]
    return frame._replace(seq=seq, seq_cnt=count, total_bytes=total, offset=offset, size=size, data=memoryview(data))


def with_wrong_sizes(taken: Sequence[Frame], true: dict[Key, bytes], dice: random.Random) -> list[Frame]:
    """The frames in some order, one or more of them changed, and perhaps the right ones as well, before or after."""
    mine = list(taken)
    for number in dice.sample(range(len(mine)), min(len(mine), dice.choice((1, 1, 2, 5)))):
        wrong = changed(mine[number], true[mine[number].key.sender, mine[number].key.part], dice)
        if dice.random() < 0.3:
            mine.append(wrong)
        else:
            mine[number] = wrong
    if dice.random() < 0.7:
        dice.shuffle(mine)
    return mine


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_torch_backend) if name.startswith("torch's") else name for name in CASES]
)
def test_what_ends_well_has_every_byte_and_what_is_passed_on_is_right(name: str) -> None:
    case = CASES[name]
    honest = frames_for(case)
    true = payloads_of(honest)
    operation, expected = run(case, honest)
    assert operation.done
    assert operation.error is None
    value = plain(operation.value) if operation.value is not None else None
    ends: Counter[str] = Counter()

    @settings(derandomize=True, deadline=None, max_examples=EXAMPLES)
    @given(seed=st.integers(0, 1 << 32))
    def check(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(RUNS):
            operation, notes = run(case, with_wrong_sizes(honest, true, dice))
            for place, chunk in notes.sent.items():
                assert expected.sent.get(place, b"") == chunk, f"passed on to, part, chunk: {place}"
            if not operation.done or operation.error is not None:
                assert operation.error is None or isinstance(operation.error, CollectiveError)
                ends["refused" if operation.done else "waits"] += 1
                continue
            ends["well"] += 1
            if value is None or not case.free:
                assert value == (None if operation.value is None else plain(operation.value))
                continue
            for one in plain(operation.value):
                assert any(sent.startswith(one) for sent in (*true.values(), *value))

    check()
    assert ends.total() >= EXAMPLES * RUNS
    assert ends["well"]
    assert ends["refused"]


def test_a_first_chunk_that_is_too_short_is_refused_with_both_sizes() -> None:
    case = CASES["all_gather"]
    honest = frames_for(case)
    short = [
        one._replace(size=60, data=one.data[:60]) if one.seq == 0 and one.key.sender == 1 else one for one in honest
    ]
    operation, _ = run(case, short)
    with pytest.raises(CollectiveError, match=r"rank 1 sent 60 bytes as chunk 0 of 3 .* where 64 were expected"):
        raise operation.error  # type: ignore[misc]
