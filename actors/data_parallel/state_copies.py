"""The state of a run: whether a rank has it, and the copies on their way to the ranks of a generation that lack it,
while the others train on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradbus.actors.data_parallel.joining import StateTransfer, copied
from gradbus.actors.data_parallel.replicas import max_state_bytes, model_tensors
from gradbus.actors.data_parallel.state import Position, tensors_with
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.runtime.collectives import Group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import CollectiveError

MAX_BROKEN_COPIES = 3  # of one process that joins, before it gives up


class StateCopies:
    """The copies of one generation, as one of its ranks sees them.

    Attributes:
        generation: its number.
        follows: ranks whose copy is on its way: they get no data.
        joined: ranks that began without the state, until all have compared their parameters.
        source: the rank whose copy this rank gets; None: it has the state.
        held: where the tensors of this rank stand, while its copy is on its way.
    """

    def __init__(
        self,
        group: Group,
        compute: ComputeThread,
        training: ShardTraining,
        generation: int,
        *,
        timeout_s: float,
        sends_to: Mapping[int, Sequence[int]],
        stood: Position,
    ) -> None:
        """
        Args:
            timeout_s: of each message.
            sends_to: of each rank that sends its state those that get it, from :func:`.generation_start.assign_donors`.
            stood: where this rank has stood before the generation.
        """
        self._group = group
        self._compute = compute
        self._training = training
        self.generation = generation
        self._limits: dict[str, Any] = {"timeout_s": timeout_s, "max_bytes": max_state_bytes(training.model)}
        self._to = sends_to.get(group.rank, ())
        self._transfer = StateTransfer(group, **self._limits) if sends_to else None
        self._arriving: asyncio.Task[dict[str, Tensor]] | None = None
        self._waits = 0  # how often ranks have announced that they wait for copies
        self.source = next((donor for donor, to in sends_to.items() if group.rank in to), None)
        self.follows = self.joined = frozenset(rank for to in sends_to.values() for rank in to)
        self.held = None if self.source is None else stood

    @property
    def _are_equal(self) -> bool:
        return self._training.algorithm.equal_replicas

    async def begin(self) -> None:
        """Begin to send and to receive; what the algorithm shares is there when this returns. Raises BrokenCopy."""
        transfer = self._transfer
        if transfer is None:
            return
        tensors = await self._compute.run(lambda: copied(self.state())) if self._to else {}
        shared: dict[str, Tensor] = {}
        if self._are_equal and self._training.algorithm.shared:
            shared = await self._exchange_shared(tensors)
        if self._to:
            transfer.send(tensors, self._to)
        elif self.source is not None:
            if self._are_equal:
                await self._compute.run(self._training.state.load_algorithm, shared)
                await self._compute.run(self._training.begin_recording)
            self._arriving = transfer.receive(self.source)

    async def _exchange_shared(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the algorithm shares, to a rank that lacks it: exchanges of gradients need it from the first one
        on. All ranks wait for it, for as long as it takes. ``tensors``: those that this rank sends.

        Raises:
            BrokenCopy: it is not what was sent.
        """
        transfer = StateTransfer(self._group, name="elastic/shared", **self._limits)
        try:
            if self._to:
                transfer.send(tensors_with("algorithm/", tensors), self._to)
            arriving = None if self.source is None else transfer.receive(self.source)
            await self._wait_for(transfer)
            await transfer.ended()
            return {} if arriving is None else arriving.result()
        finally:
            await transfer.close()

    @property
    def is_there(self) -> bool:
        """Whether this rank's copy has come, and was not loaded yet."""
        return self._arriving is not None and self._arriving.done()

    async def load(self) -> float | None:
        """Wait for this rank's copy, and apply to it what the others have applied since. Returns the seconds that it
        waited, None if no copy is on its way to this rank."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return None
        started_s = time.perf_counter()
        tensors = await arriving
        await self._compute.run(self.take, tensors)
        await self._compute.run(self._training.catch_up)
        await self._compute.run(self._training.begin)
        self.held = None
        return time.perf_counter() - started_s

    async def wait_for_all(self) -> None:
        """Wait until all ranks have their copies. Raises what went wrong on this rank."""
        if self.follows:
            await self._wait_for(self._transfer)

    async def _wait_for(self, transfer: StateTransfer | None) -> None:
        """All wait for all copies, which may take longer than a collective may: so ranks tell one another from time to
        time that they do. Each piece has a deadline."""
        timeout_s = self._limits["timeout_s"]
        are_there = False
        while not are_there:
            self._waits += 1
            is_there = transfer is None or await transfer.is_over_within(timeout_s / 4)
            if transfer is not None and is_there:
                await transfer.ended()  # who sends a copy that is broken would wait for its receiver, and all for both
            of_ranks = await self._group.all_gather(
                "elastic/copies", bytes([is_there]), round_id=self._waits, timeout_s=timeout_s
            )
            are_there = all(map(any, of_ranks))

    async def all_sent(self) -> None:
        """Wait until this rank has sent and received its copies. Raises what went wrong."""
        if self._transfer is not None:
            await self._transfer.ended()

    def start_data(self, ready: set[int]) -> None:
        """Take note that these ranks have their copies, and get data."""
        self.follows -= ready

    def take_held(self) -> Position | None:
        """Return ``held``, once, where the copy will not come: what this rank has is of there."""
        held, self.held = self.held, None
        return held

    def note_equal(self) -> None:
        """Take note that all that have the state have compared their parameters."""
        self.joined &= self.follows

    async def close(self) -> None:
        """Give up what is on its way."""
        transfer, self._transfer, self._arriving = self._transfer, None, None
        if transfer is not None:
            await transfer.close()
        self.follows = frozenset()

    # On the compute thread

    def state(self) -> dict[str, Tensor]:
        """Return what a rank that joins gets, by name, not copied."""
        return model_tensors(self._training.model) | self._training.state.of_joiner()

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Make these this rank's state. Raises CollectiveError: they are of another model."""
        training = self._training
        live = model_tensors(training.model)
        if set(live) - set(tensors) or any(
            (live[name].shape, live[name].dtype) != (tensors[name].shape, tensors[name].dtype) for name in live
        ):
            raise CollectiveError("the state of the run is of another model")
        for name, tensor in live.items():
            tensor.copy_(tensors[name])
        beside = {name: tensor for name, tensor in tensors.items() if name not in live}
        if self.held is not None and self._are_equal:
            training.optimizer.load(beside)  # the algorithm has gone on with the others since the copy was made
        else:
            training.state.load_joiner(beside)


class HeldState:
    """Which state of the run a rank has, over its generations, each of which may bring it a copy.

    Attributes:
        generation: the newest one whose state this rank has; -1: none but that of the model that it has built.
    """

    def __init__(self) -> None:
        self.generation = -1
        self._copies: StateCopies | None = None
        self._broken: list[int] = []  # numbers of the processes that have sent a broken copy

    @property
    def copies(self) -> StateCopies:
        """Return the copies that are on their way in this generation."""
        assert self._copies is not None, "no generation has begun"
        return self._copies

    def hello(self) -> dict[str, Any]:
        """Return what the other ranks of the next generation need to know of it."""
        return {"synced": self.generation, "broken": self._broken}

    def expect(self, copies: StateCopies, *, is_mixed: bool) -> None:
        """Take the copies of a generation that begins. ``is_mixed``: a rank that gets one has parts of it at once, so
        what it has had is not of one step."""
        self._copies = copies
        if copies.source is not None and is_mixed:
            self.lose()

    def note_newest(self) -> None:
        """Take note that this rank has the state of its generation."""
        self.generation = self.copies.generation

    def lose(self) -> None:
        """Take note that what this rank has is the state of no generation."""
        self.generation = -1

    def note_broken(self, number: int) -> bool:
        """Take note that a process has sent a broken copy. Returns whether to try again."""
        self._broken.append(number)
        return len(self._broken) < MAX_BROKEN_COPIES

    def note_equal(self, rank: int) -> None:
        """Take note that all ranks with the state have compared it. ``rank``: this one."""
        self.copies.note_equal()
        if rank not in self.copies.follows:
            self._broken.clear()

    def spoiled(self, hashes: Sequence[int]) -> set[int] | None:
        """Return the ranks whose copy was broken, where the parameters of the ranks differ; None: copies do not explain
        it. Those whose copy is still on its way have other parameters, and are left out. ``hashes``: of the parameters,
        by rank."""
        joined, follows = self.copies.joined, self.copies.follows
        usual = {value for rank, value in enumerate(hashes) if rank not in joined}
        return None if len(usual) > 1 else {rank for rank in joined - follows if hashes[rank] not in usual}

    def give_up(self) -> Position | None:
        """Return where the tensors of this rank stand, once, if its copy will not come; None: as the run does."""
        return None if self._copies is None else self._copies.take_held()

    async def close(self) -> None:
        """Give up what is on its way, if a generation has begun."""
        if self._copies is not None:
            await self._copies.close()
