"""Every collective in worlds of several sizes against NumPy, also while DDS drops packets."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.experiments.bench_children import ChildFailed
from gradbus.experiments.bench_ddp_process import run_ranks
from gradbus.experiments.bench_rows import Row
from gradbus.runtime.collectives import Group
from gradbus.runtime.collectives.arithmetic import ReduceOp
from gradbus.runtime.collectives.reductions import Algorithm
from gradbus.runtime.dds.network import NetworkConfig

_ALGORITHMS: tuple[Algorithm, ...] = ("auto", "direct", "ring", "shards")
_LOSS_PER_MILLE = 100
_WHOLE = (torch.int32, torch.int64, torch.uint8)


@dataclass(frozen=True, slots=True)
class Case:
    """Tensors that all ranks have, each with its own values. ``layout``: plain, transposed, every second, or scalar."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str = "plain"

    def tensor(self, rank: int, salt: int = 0) -> Tensor:
        """The values of one rank, the same wherever they are made."""
        numbers = np.random.default_rng([rank, salt, *self.shape])
        shape = self.shape[::-1] if self.layout == "transposed" else self.shape
        if self.layout == "every second":
            shape = (2 * shape[0], *shape[1:])
        if self.dtype in _WHOLE:
            made = torch.from_numpy(numbers.integers(0, 30, shape)).to(self.dtype)
        else:
            made = torch.from_numpy(np.asarray(numbers.standard_normal(shape))).to(self.dtype)
        return made.t() if self.layout == "transposed" else made[::2] if self.layout == "every second" else made

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape} {self.layout}"


def cases(large_elems: int) -> list[Case]:
    """Sizes from nothing to several chunks; fewer elements than ranks, and sizes that no world divides."""
    plain = [Case(torch.float32, (size,)) for size in (0, 1, 5, 1009, 40_009, large_elems)]
    strided = [
        Case(torch.float32, (37, 53), "transposed"), Case(torch.float64, (517, 3), "every second"),
        Case(torch.float32, (), "scalar"), Case(torch.float32, (9, 0, 4)),
    ]  # fmt: skip
    others = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
    return plain + strided + [Case(dtype, (3001,)) for dtype in others]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllCollectives:
    """Calls each of them with every case. ``large_elems``: of the largest tensor, float32."""

    world: int
    large_elems: int
    network: NetworkConfig | None = None

    async def run(self, group: Group) -> dict[str, Any]:
        """How many results were right, and the first of those that were not."""
        checks, started_s = _Checks(group), time.perf_counter()
        for case in cases(self.large_elems):
            await checks.tensors(case)
        for size in (0, 1, 1000, 4 * self.large_elems):
            await checks.payloads(size)
        await checks.objects()
        seconds = time.perf_counter() - started_s
        return {"right": checks.right, "asked": checks.asked, "wrong": checks.wrong[:5], "seconds": seconds}


@dataclass(slots=True)
class _Checks:
    """Collectives that were called, with what NumPy says of them. Those of one case run at the same time."""

    group: Group
    right: int = 0
    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    _open: list[tuple[str, Awaitable[Any], Any]] = field(default_factory=list)

    def _expect(self, name: str, handle: Awaitable[Any], value: Any) -> None:
        self._open.append((name, handle, value))

    async def _settle(self) -> None:
        for name, handle, expected in self._open:
            self.asked += 1
            try:
                value = await handle
            except Exception as error:
                self.wrong.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if _same(value, expected):
                self.right += 1
            else:
                self.wrong.append(f"{name}: another result than NumPy's")
        self._open.clear()

    async def tensors(self, case: Case) -> None:
        """All that takes tensors."""
        self._reductions(case)
        self._moves(case)
        await self._settle()

    def _reductions(self, case: Case) -> None:
        group, rank, world = self.group, self.group.rank, self.group.world
        mine, all_of_them = case.tensor(rank), [case.tensor(of) for of in range(world)]
        ops: tuple[ReduceOp, ...] = ("sum", "min", "max") if case.dtype in _WHOLE else ("sum", "mean", "min", "max")
        for op in ops:
            total = reduced(all_of_them, op)
            for algorithm in _ALGORITHMS:
                name = f"all_reduce {op} {algorithm} {case}"
                self._expect(name, group.all_reduce(name, mine, op=op, algorithm=algorithm), total)
            root, name = world - 1 if op == "min" else 0, f"reduce {op} {case}"
            self._expect(name, group.reduce(name, mine, op=op, root=root), total if rank == root else None)
            if mine.dim():
                name = f"reduce_scatter {op} {case}"
                self._expect(name, group.reduce_scatter(name, mine, op=op), total.tensor_split(world)[rank])
        in_place, name = mine.clone(), f"in place {case}"
        self._expect(name, group.all_reduce(name, in_place, out=in_place), reduced(all_of_them, "sum"))

    def _moves(self, case: Case) -> None:
        group, rank, world = self.group, self.group.rank, self.group.world
        mine, all_of_them = case.tensor(rank), [case.tensor(of) for of in range(world)]
        name = f"all_gather {case}"
        self._expect(name, group.all_gather(name, mine), all_of_them)
        for root in sorted({0, world // 2}):
            name, sent = f"broadcast {root} {case}", mine if rank == root else torch.zeros_like(mine)
            self._expect(name, group.broadcast(name, sent, root=root), all_of_them[root])
        name, last = f"gather {case}", world - 1
        self._expect(name, group.gather(name, mine, root=last), all_of_them if rank == last else None)
        name, pieces = f"scatter {case}", [case.tensor(0, salt=1 + to) for to in range(world)]
        self._expect(name, group.scatter(name, pieces if rank == 0 else None), pieces[rank])
        name = f"all_to_all {case}"  # sizes differ
        parts = [_part(mine, to, world) for to in range(world)]
        self._expect(name, group.all_to_all(name, parts), [_part(tensor, rank, world) for tensor in all_of_them])
        # A message has a name of its own: under one name a rank's send and its receive would be two uses of it.
        after, before = (rank + 1) % world, (rank - 1) % world
        name = f"{rank} to {after} {case}"
        self._expect(name, group.send(name, mine, to=after), None)
        name = f"{before} to {rank} {case}"
        self._expect(name, group.recv(name, source=before), all_of_them[before])

    async def payloads(self, size: int) -> None:
        """Bytes, of another size on every rank."""
        group, rank, world = self.group, self.group.rank, self.group.world
        everything = [np.random.default_rng([of, size]).bytes(max(0, size - 13 * of)) for of in range(world)]
        mine, last = everything[rank], world - 1
        name = f"all_gather {size} B"
        self._expect(name, group.all_gather(name, mine), everything)
        name = f"broadcast {size} B"
        self._expect(name, group.broadcast(name, mine if rank == last else None, root=last), everything[last])
        name = f"gather {size} B"
        self._expect(name, group.gather(name, mine), everything if rank == 0 else None)
        name = f"scatter {size} B"
        self._expect(name, group.scatter(name, everything if rank == last else None, root=last), mine)
        name = f"all_to_all {size} B"
        cut = [mine[to::world] for to in range(world)]
        self._expect(name, group.all_to_all(name, cut), [of[rank::world] for of in everything])
        await self._settle()

    async def objects(self) -> None:
        """Plain objects, and barriers."""
        group, rank, world = self.group, self.group.rank, self.group.world
        things = [{"rank": of, "list": [of, None, 0.5, "text"], "bytes": bytes(of)} for of in range(world)]
        mine, after, before = things[rank], (rank + 1) % world, (rank - 1) % world
        self._expect("all_gather_object", group.all_gather_object("all_gather_object", mine), things)
        self._expect("broadcast_object", group.broadcast_object("broadcast_object", mine), things[0])
        at_root = things if rank == 0 else None
        self._expect("gather_object", group.gather_object("gather_object", mine), at_root)
        self._expect("scatter_object", group.scatter_object("scatter_object", at_root), mine)
        name = f"object {rank} to {after}"
        self._expect(name, group.send_object(name, mine, to=after), None)
        name = f"object {before} to {rank}"
        self._expect(name, group.recv_object(name, source=before), things[before])
        for number in range(3):
            self._expect(f"barrier {number}", group.barrier(round_id=number), tuple(range(world)))
        await self._settle()


def reduced(tensors: Sequence[Tensor], op: str) -> Tensor:
    """By NumPy, in rank order; half precision is added in float32 and rounded once."""
    dtype = tensors[0].dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    arrays: list[NDArray[Any]] = [(t.float() if is_half else t).numpy() for t in tensors]
    function: Any = {"min": np.minimum, "max": np.maximum}.get(op, np.add)
    total = arrays[0]
    for array in arrays[1:]:
        total = function(total, array)
    if op == "mean":
        total = total * total.dtype.type(1 / len(arrays))
    return torch.from_numpy(np.array(total)).to(dtype)


def _part(tensor: Tensor, to: int, world: int) -> Tensor:
    return tensor.reshape(-1).tensor_split(world)[to]


def _same(value: Any, expected: Any) -> bool:
    """Equal bits, shapes and types."""
    if isinstance(expected, Tensor):
        return (
            isinstance(value, Tensor) and value.dtype == expected.dtype and value.shape == expected.shape
            and torch.equal(value, expected)
        )  # fmt: skip
    if isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    return bool(value == expected)


def collective_rows(
    worlds: Sequence[int] = (2, 3, 4, 8), *, large_elems: int = 400_009, lossy: bool = False, timeout_s: float = 240.0
) -> tuple[list[Row], dict[str, Any]]:
    """One row per world: results that are right, of all ranks together."""
    # A lost packet must not be taken for a death.
    network = NetworkConfig(loss_per_mille=_LOSS_PER_MILLE, lease_s=10.0) if lossy else None
    rows, taken = [], {}
    for world in worlds:
        name = f"collectives right, world {world}" + (f", {_LOSS_PER_MILLE / 10:g} % of packets lost" if lossy else "")
        role = AllCollectives(world=world, large_elems=large_elems, network=network)
        try:
            found = run_ranks(role, timeout_s=timeout_s)
        except ChildFailed as error:
            rows.append(Row(name, "all", 0, "", False, str(error).splitlines()[-1]))
            continue
        right, asked = (sum(rank[key] for rank in found) for key in ("right", "asked"))
        wrong = [text for rank in found for text in rank["wrong"]]
        note = wrong[0] if wrong else f"{max(rank['seconds'] for rank in found):.1f} s"
        rows.append(Row(name, f"{asked}", right, "", right == asked, note))
        taken[f"collectives_{'lossy_' if lossy else ''}{world}"] = found
    return rows, taken
