"""Ranks of a group joined in memory: each write and each arrival of a frame is a step, in an order that a seed decides.

Frames are made and parsed as on the wire, copied when they are written (as DDS does), and may overtake each other, come
again, or never.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gradbus.runtime.collectives.data_movement import AllGatherOperation
from gradbus.runtime.collectives.engine import Engine, wire_name
from gradbus.runtime.collectives.operation import Finished, Operation, OperationKey, OutgoingPart
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import Frame, FrameKey, Kind

GROUP_ID = 0xABC
INCARNATION = 1 << 40  # rank r has this plus r
MAX_BYTES = 1 << 30


@dataclass(eq=False)
class Job:
    """A payload whose chunks are written one by one."""

    rank: int
    to: int | None
    samples: Iterator[bytes]
    finished: Finished
    sent: int = 0
    cancelled: bool = False

    def cancel(self) -> int:
        self.cancelled = True
        return self.sent


@dataclass
class MemoryLink:
    """The way out of one rank. Implements ``operation.PayloadTransport``."""

    net: MemoryNet
    rank: int
    group_id: int = GROUP_ID
    refuses: Exception | None = None  # writing fails with it

    def send(self, key: OperationKey, outgoing: OutgoingPart, finished: Finished) -> Job | None:
        to, part, payload, signature, meta, only, written = outgoing
        frame_key = self.key(key, part, wire_name(key.name, signature, meta))
        chunk_bytes = frames.CHUNK_BYTES
        count = frames.chunk_count(len(payload), chunk_bytes)
        numbers = list(range(count)) if only is None else list(only)
        split = frames.split(frame_key, payload, chunk_bytes=chunk_bytes, world=self.net.world, only=numbers)

        def samples() -> Iterator[bytes]:
            for number, (head, data) in zip(numbers, split, strict=True):
                yield head + bytes(data)
                if written is not None:
                    written(number)

        job = Job(self.rank, to, samples(), finished)
        if len(numbers) == 1 and self.refuses is None and self.net.rng.random() < self.net.inline:
            while self.net.write(job):
                pass
            return None
        self.net.jobs.append(job)
        return job

    def key(self, key: OperationKey, part: int, name: str) -> FrameKey:
        """Key of a frame of this rank."""
        return FrameKey(
            Kind.COLLECTIVE, self.group_id, key.round_id, self.rank, INCARNATION + self.rank, key.call, name, part
        )


@dataclass
class MemoryNet:
    """All ranks of one group.

    Attributes:
        world: number of ranks. seed: decides the order of everything.
        repeat: share of frames that arrive once more. inline: share of single frames that are written at once.
        lost: which frames (sender, receiver, frame) never arrive. large_bytes: what is larger waits for its receiver.
        share_bytes: what a rank may send to each other one before that has called. make_link: the way out of a rank.
    """

    world: int
    seed: int = 0
    repeat: float = 0.0
    inline: float = 0.5
    lost: Callable[[int, int, Frame], bool] = lambda sender, receiver, frame: False
    early_bytes: int = 1 << 20
    early_age_s: float = 60.0
    large_bytes: int = 1 << 30
    share_bytes: int = 1 << 30
    make_link: Callable[[MemoryNet, int], MemoryLink] = MemoryLink
    rng: random.Random = field(init=False)
    jobs: list[Job] = field(default_factory=list)
    flying: list[tuple[int, bytes]] = field(default_factory=list)  # to whom, and the bytes

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.links = [self.make_link(self, rank) for rank in range(self.world)]
        self.engines = [
            Engine("group", link.rank, self.world, link, early_bytes=self.early_bytes, early_age_s=self.early_age_s)
            for link in self.links
        ]
        for engine in self.engines:
            engine.rendezvous_bytes = self.large_bytes
            engine.credit.share_bytes = self.share_bytes
            engine.set_members(GROUP_ID, {rank: INCARNATION + rank for rank in range(self.world)})

    def start(self, operation: Operation, name: str = "x", round_id: int = 0) -> Operation:
        """Start a collective on its rank."""
        self.engines[operation.rank].start(operation, name, round_id)
        return operation

    def write(self, job: Job) -> bool:
        """Write the next chunk of a payload. False: there was none."""
        refuses = self.links[job.rank].refuses
        data = None if job.cancelled or refuses is not None else next(job.samples, None)
        if data is None:
            job.finished(job.sent if refuses is None else refuses)
            return False
        frame = frames.parse(data)
        job.sent += len(frame.data)
        for receiver in range(self.world) if job.to is None else [job.to]:
            if receiver != job.rank and not self.lost(job.rank, receiver, frame):
                self.flying.append((receiver, data))
        return True

    def step(self) -> bool:
        """Let one thing happen. False: nothing is left to happen."""
        number = self.rng.randrange(max(1, len(self.jobs) + len(self.flying)))
        if number < len(self.jobs):
            job = self.jobs[number]
            if not self.write(job):
                self.jobs.remove(job)
        elif self.flying:
            number -= len(self.jobs)
            receiver, data = self.flying[number]
            if self.rng.random() >= self.repeat:
                self.flying[number] = self.flying[-1]
                self.flying.pop()
            self.engines[receiver].receive(frames.parse(data))
        return bool(self.jobs or self.flying)

    def settle(self) -> None:
        """Let happen what can happen."""
        while self.step():
            pass

    def run(self, *operations: Operation, name: str = "x", round_id: int = 0) -> list[Any]:
        """Start one collective on all ranks, in an order that the seed decides, with others' frames coming in between.

        Returns:
            What each rank got, in the order given.
        """
        for operation in self.rng.sample(operations, len(operations)):
            for _ in range(self.rng.randrange(4)):
                self.step()
            self.start(operation, name, round_id)
        self.settle()
        for operation in operations:
            if operation.error is not None:
                raise operation.error
            assert operation.done, f"rank {operation.rank} waits for {operation.missing}"
        return [operation.value for operation in operations]

    def assert_nothing_is_left(self, *, but_early_frames_of: int | None = None) -> None:
        """No rank holds anything for a collective any more; one that has not called it may hold frames for it."""
        for engine in self.engines:
            assert engine.pending == 0
            assert engine.credit.used_bytes == (0,) * self.world
            if engine.rank != but_early_frames_of:
                unexpected = engine._unexpected  # noqa: SLF001 - an empty entry that stays shows nowhere else
                assert (engine.early_bytes, len(unexpected)) == (0, 0)
                assert not unexpected._messages  # noqa: SLF001 - likewise


def net_of(world: int, **options: Any) -> MemoryNet:
    """Ranks that write at once what is small, as over DDS."""
    return MemoryNet(world, **{"inline": 1.0, **options})


def gather(rank: int, payload: bytes = b"", world: int = 2) -> Operation:
    """An all_gather of bytes."""
    return AllGatherOperation(payload, rank, world, MAX_BYTES)


def frame(**changes: Any) -> Frame:
    """A frame of rank 1 for the all_gather "x"; ``changes`` of its key, and ``world``."""
    world = changes.pop("world", 2)
    key = {
        "job": GROUP_ID,
        "round_id": 0,
        "sender": 1,
        "incarnation": INCARNATION + 1,
        "transfer": 0,
        "name": wire_name("x", "all_gather bytes", ""),
        **changes,
    }
    ((head, data),) = frames.split(FrameKey(Kind.COLLECTIVE, **key), b"payload", world=world)
    return frames.parse(head + bytes(data))
