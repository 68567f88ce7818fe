"""This process as one of an elastic group, for a script without an event loop.

:class:`~gradbus.runtime.collectives.generations.Generations` lives on the event loop of a bus in a thread of its own.
The script waits for a generation, makes torch's default process group of its ranks, and says how it leaves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gradbus.runtime.bus import background
from gradbus.runtime.collectives.generations import LOST, Generations, open_generations
from gradbus.runtime.collectives.group import Group
from gradbus.runtime.errors import BusClosed, ConfigError, GradbusError
from gradbus.runtime.logs import get_logger
from gradbus.torch.elastic.generation_store import GenerationStore
from gradbus.torch.elastic.launched import MemberPlace
from gradbus.torch.groups import WATCH_S, HeldGroup, Watch, acquire_bus
from gradbus.torch.register import NAME
from gradbus.torch.store.address import Address

_LEAVE_S = 30.0  # to leave a group, and to close
_GROUP = "script"  # of all processes of a job

log = get_logger("elastic")


class Departure:
    """How the script leaves a generation: ``error``: why it cannot go on, for the others. ``is_end``: the run is over,
    on all ranks."""

    def __init__(self, error: Exception | None = None, *, is_end: bool = False) -> None:
        self.error = error
        self.is_end = is_end


class _Hold(HeldGroup):
    """One generation's group, as torch's process group holds it: the membership leaves it, not the process group."""

    def __init__(self, thread: background.BusThread, group: Group) -> None:
        self.thread = thread
        self.group = group
        self.watch: Watch = lambda now_s: None
        self.left = asyncio.Event()
        self.departure = Departure()
        self.is_left = threading.Event()

    def watch_with(self, watch: Watch) -> None:
        """See :meth:`.groups.TorchGroup.watch_with`."""
        self.watch = watch

    def end(self, reason: str, *, abruptly: bool, keep_bus: bool) -> None:
        """The process group is destroyed, or the program ends in the midst of a generation."""
        self.watch = lambda now_s: None
        if keep_bus and reason:  # at exit
            self.leave(Departure(GradbusError(reason)))

    def leave(self, departure: Departure) -> None:
        """Leave the group; waits until that is done, for a bounded time."""
        self.departure = departure
        self.thread.call(self.left.set)
        self.is_left.wait(_LEAVE_S)


class ElasticMembership:
    """This process among the members of a script's run, from its start to its end."""

    def __init__(self, place: MemberPlace, layout: int) -> None:
        """Open the bus. ``layout``: a hash of what must be equal on all members.

        Raises:
            ConfigError: a setting is wrong. BusError: DDS cannot be started.
        """
        settings = background.settings_from_environment()
        if settings.security == "identity":
            raise ConfigError(
                "ranks cannot come and go with GRADBUS_BUS__SECURITY=identity: use psk, or torchrun --max-restarts"
            )
        self.number = 0
        self.joins = not place.founders
        self._is_leaving = False
        self._place = place
        self._traits = {"state": layout}
        self._domain, self._job = settings.domain, settings.job
        self._bus_number = hashlib.blake2b(f"elastic {settings.job}".encode(), digest_size=8).hexdigest()
        self._thread = acquire_bus(self._bus_number, place.number)
        self._asked: asyncio.Queue[Future[Group] | None] = asyncio.Queue()
        self._asking: Future[Group] | None = None
        self._generations: Generations | None = None
        self._hold: _Hold | None = None
        self._store: GenerationStore | None = None
        self._task = self._thread.start(self._run())

    goes_on = True
    """Whether there is a next generation when a rank is lost."""

    @property
    def change_is_wanted(self) -> bool:
        """Whether a process wants to join or to leave, as far as this one knows."""
        return self._generations is not None and self._generations.change_is_wanted

    @property
    def writes(self) -> bool:
        """Whether this rank writes the checkpoint."""
        return dist.get_rank() == 0

    def announce_leave(self) -> None:
        """Announce that this process leaves after the next commit. On any thread."""
        self._is_leaving = True  # before the look: the loop may not have opened the group yet
        if self._generations is not None:
            self._thread.call(self._generations.leave)

    def meet(self) -> None:
        """Wait until this process is a member, and make torch's default process group of the generation.

        Raises:
            NoGeneration: the run has ended, or this process has left.
            ConfigError: it does not fit the members. WaitedInVain: no generation goes on with it in time.
        """
        group = self._asking = Future[Group]()
        self._thread.call(self._asked.put_nowait, group)
        either: list[Future[Any]] = [group, self._task]
        wait(either, return_when=FIRST_COMPLETED)
        if not group.done():
            self._task.result()
            raise BusClosed("the bus was closed while this process waited for its generation")
        formed, generations = group.result(), self._generations
        assert generations is not None
        self.number = generations.number
        timeout = timedelta(seconds=self._place.limits.collective_s)
        job = f"{self._job[:40]}-{self._bus_number[:8]}-{self.number}"
        address = Address(self._domain, job, formed.rank, formed.world)
        self._store = GenerationStore(address, self._bus_number, self._held, timeout)
        dist.init_process_group(NAME, store=self._store, rank=formed.rank, world_size=formed.world, timeout=timeout)

    def _held(self) -> tuple[Group, HeldGroup]:
        hold = self._hold
        if hold is None:
            raise BusClosed("the generation was over before its process group was made")
        # torch's process group gives its use of the bus back.
        return hold.group, hold

    def part(self, departure: Departure) -> None:
        """Leave the generation, if this process is in one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        store, self._store = self._store, None
        if store is not None:
            store.close()
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.leave(departure)

    def close(self) -> None:
        """Stop being a member, and give the bus back. Takes a bounded time."""
        self._thread.call(self._asked.put_nowait, None)
        if self._asking is not None and not self._asking.done():
            self._task.cancel()  # interrupted while it waited for a generation, which may take minutes
        elif self._hold is not None:  # interrupted as the generation came
            self._hold.leave(Departure(GradbusError("this process was interrupted")))
        with contextlib.suppress(TimeoutError, CancelledError):
            self._task.exception(_LEAVE_S)
        background.release(self._thread)

    # On the event loop

    async def _run(self) -> None:
        place = self._place
        async with open_generations(
            self._thread.bus,
            number=place.number,
            founders=place.founders,
            limits=place.limits,
            traits=self._traits,
            name=_GROUP,
        ) as self._generations:
            if self._is_leaving:
                self._generations.leave()
            while (asked := await self._asked.get()) is not None:
                await self._one_generation(self._generations, asked)

    async def _one_generation(self, generations: Generations, asked: Future[Group]) -> None:
        hold: _Hold | None = None
        try:
            async with generations.next_group() as group:
                hold = self._hold = _Hold(self._thread, group)
                asked.set_result(group)
                await self._until_left(hold)
                if hold.departure.error is not None:
                    raise hold.departure.error
        except Exception as error:
            if hold is None:
                asked.set_exception(error)
                return
            if error is not hold.departure.error:
                log.warning("left the generation with an error", generation=generations.number, error=str(error))
        self._note(generations, hold.departure)
        hold.is_left.set()

    def _note(self, generations: Generations, departure: Departure) -> None:
        if departure.is_end:
            generations.end()
        elif isinstance(departure.error, LOST):
            generations.suspect(departure.error)
        elif departure.error is not None:
            generations.leave()
        else:
            generations.rest()

    async def _until_left(self, hold: _Hold) -> None:
        while not hold.left.is_set():
            hold.watch(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await hold.left.wait()


class FixedRanks:
    """The ranks that torchrun, or any other launcher, has started together: a rank that is lost ends all of them, and
    it is for the launcher to start them again."""

    number = 1
    goes_on = False
    joins = False
    change_is_wanted = False

    def __init__(self, writes: bool) -> None:
        """``writes``: whether this process writes the checkpoint: one on each machine, which may share no disk."""
        self.writes = writes

    def announce_leave(self) -> None:
        """Raises RuntimeError: there is no one to go on without it."""
        raise RuntimeError(
            "elastic.leave: the ranks of this run are fixed. Start it with 'gradbus run --elastic MIN:MAX -- train.py'"
        )

    def meet(self) -> None:
        """Make torch's default process group, if there is none; without ranks in the environment, of one rank."""
        if dist.is_initialized():
            return
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(NAME)
        else:
            dist.init_process_group(NAME, store=HashStore(), rank=0, world_size=1)

    def part(self, departure: Departure) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def close(self) -> None:
        """There is nothing to close."""
