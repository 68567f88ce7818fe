"""The generations of an elastic group on the bus: one process's part, and the Group of each generation.

    async with open_generations(bus, number=0, founders=2, limits=...) as generations:
        while not done:
            async with generations.next_group() as group:  # waits until this process is a member
                ...  # PeerLost: leave the block, and ask for the next one

Who is a member is decided in :mod:`.agreement`, over control messages. The group of a generation is one like any other:
it is formed anew under a name of its own, so frames of an older generation are those of a foreign group.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives.agreement import MAX_MEMBERS, GenerationAgreement, MemberId
from gradbus.runtime.collectives.group import Group, join_group
from gradbus.runtime.errors import (
    BarrierTimeout,
    BusError,
    CollectiveTimeout,
    ConfigError,
    GradbusError,
    PeerLost,
    WriteTimeout,
)
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import GroupView
from gradbus.runtime.wire.messages import Control, Identity, PeerGone, new_incarnation

REPEAT_S = 0.5  # how often a view is repeated that has not changed
BUSY_REPEAT_S = 0.1  # the same while a generation is wanted
FORM_S = 20.0  # for the members of a generation to form its group, before those that do not come are left out
LOST = (PeerLost, CollectiveTimeout, BarrierTimeout, WriteTimeout)
"""Errors of a group after which the next generation goes on without those that are missing."""

log = get_logger("elastic")


class WaitedInVain(BarrierTimeout):
    """There was no generation that goes on with this process for as long as it may wait: the next one is not tried."""


class NoGeneration(GradbusError):
    """There is no generation for this process any more; the text says why.

    Attributes:
        ended: the generation that has come to the end of the run elsewhere; None: none has. left: this process has
            announced that it leaves.
    """

    def __init__(self, text: str, *, ended: int | None = None, left: bool = False) -> None:
        super().__init__(text)
        self.ended = ended
        self.left = left


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticLimits:
    """Sizes and times of an elastic group, equal on all processes.

    Attributes:
        min_world, max_world: members that a generation has at least, and at most.
        wait_s: how long a process waits for a generation that it is in; a spare waits for as long as there are members.
        collective_s: deadline of a collective.
        last_call_s: once ``min_world`` founders are there, process 0 waits for so long for the others of them; who
            comes later joins.
    """

    min_world: int = 1
    max_world: int = MAX_MEMBERS
    wait_s: float = 600.0
    collective_s: float = 60.0
    last_call_s: float = math.inf


class Generations:
    """One process of an elastic group. Made by :func:`open_generations`."""

    def __init__(self, bus: Bus, agreement: GenerationAgreement, limits: ElasticLimits) -> None:
        self._bus = bus
        self._agreement = agreement
        self._limits = limits
        self._identity = Identity(*agreement.me)
        self._inbox = bus.subscribe(Control, only=_concerns)
        self._changed = asyncio.Event()  # what others are to know
        self._moved = asyncio.Event()  # generation or fault
        self._last = 0  # the generation of the last group
        self.has_been_in_all = False
        """Whether this process was a member of every generation since the first, those whose group did not form
        included."""
        self._fault: Exception | None = None
        self._waited_for = ""
        self._forming: asyncio.Timeout | None = None

    # State

    @property
    def number(self) -> int:
        """Return that of the newest generation that this process knows."""
        return self._agreement.generation

    @property
    def members(self) -> tuple[MemberId, ...]:
        """Return those of that generation, in rank order."""
        return self._agreement.members

    @property
    def waiting(self) -> int:
        """Number of processes that want to be members, spares included."""
        return self._agreement.waiting

    @property
    def waits_for(self) -> str:
        """Return what this process waits for, for people; empty: nothing."""
        return self._agreement.waits_for

    @property
    def change_is_wanted(self) -> bool:
        """Whether the members should rest between two steps, so that somebody can join or leave."""
        return self._agreement.change_is_wanted

    # What the process does

    def leave(self) -> None:
        """Announce that this process leaves: the next generation is without it."""
        self._agreement.leaving = True
        self._changed.set()

    def end(self) -> None:
        """Announce that the run has come to its end."""
        self._agreement.ended = True
        self._changed.set()

    def rest(self) -> None:
        """This process stands between two steps, and goes on in the next generation."""
        self._agreement.resting = self._agreement.generation == self._last
        self._changed.set()

    def suspect(self, error: Exception) -> None:
        """A collective has failed: whom it misses, the next generation is to be without."""
        missing = () if isinstance(error, PeerLost) else getattr(error, "missing", ())
        if self._agreement.generation == self._last and self._agreement.is_member:
            self._agreement.suspect([rank for rank in missing if rank < len(self._agreement.members)])
        self.rest()

    @contextlib.asynccontextmanager
    async def next_group(self) -> AsyncIterator[Group]:
        """The group of the next generation, once this process is a member and the group has formed.

        Raises:
            NoGeneration: this process has left, or the run has ended.
            ConfigError: it does not fit the members; the text names what differs.
            WaitedInVain: there is no generation that goes on with this process within ``wait_s``.
        """
        while True:
            await self._until_member()
            agreement, number = self._agreement, self._agreement.generation
            rank, world = agreement.rank, len(agreement.members)
            self.has_been_in_all = number == 1 or (self.has_been_in_all and number == self._last + 1)
            self._last = number
            log.info("generation", generation=number, rank=rank, world=world, members=[m.number for m in self.members])
            async with contextlib.AsyncExitStack() as stack:
                joining = join_group(
                    self._bus,
                    rank=rank,
                    world=world,
                    name=f"{agreement.group}_{number}",
                    timeout_s=FORM_S,
                    collective_timeout_s=self._limits.collective_s,
                )
                group = None
                try:
                    async with asyncio.timeout(None) as self._forming:
                        if agreement.generation == number:
                            group = await stack.enter_async_context(joining)
                except TimeoutError as error:  # another generation has come meanwhile, or some do not come
                    if agreement.generation == number:
                        self.suspect(error)
                finally:
                    self._forming = None
                if group is not None:
                    yield group
                    return

    async def _until_member(self) -> None:
        """Wait until this process is in a generation after the last one."""
        agreement, limits = self._agreement, self._limits
        since_s, patience_s = time.monotonic(), limits.wait_s
        while not (agreement.is_member and agreement.generation > self._last):
            self._check()
            now_s = time.monotonic()
            if agreement.founder_has_died and patience_s == limits.wait_s:
                since_s, patience_s = now_s, min(limits.collective_s, limits.wait_s - (now_s - since_s))
            elif not agreement.founder_has_died and patience_s != limits.wait_s:  # it has been started again
                since_s, patience_s = now_s, limits.wait_s
            if agreement.generation and not agreement.is_member and not agreement.leaving and agreement.hears_members:
                since_s = now_s  # a spare: there is nothing wrong
            if now_s >= since_s + patience_s:
                raise WaitedInVain(
                    f"elastic group {agreement.group!r}, process {agreement.me.number} (waits for "
                    f"{agreement.waits_for or 'the next generation'})",
                    missing=agreement.unreached,
                    ready=agreement.ready,
                    needed=agreement.needed,
                    timeout_s=patience_s,
                    misconfiguration=self._bus.misconfiguration,
                )
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_S):
                    await self._moved.wait()
        self._check()

    def _check(self) -> None:
        agreement = self._agreement
        if self._fault is not None:
            raise self._fault
        if (ended := agreement.ended_generation) is not None:
            raise NoGeneration("the run has come to its end", ended=ended)
        # Alone in a generation that was founded meanwhile, it has nobody to hand its state to; others may need it.
        is_alone = not self._last and len(agreement.members) == 1
        if agreement.leaving and (not agreement.is_member or agreement.waits_for or is_alone):
            raise NoGeneration("this process has left", left=True)
        if misfit := agreement.misfit:
            raise ConfigError(
                f"process {agreement.me.number} cannot join generation {agreement.generation}: its {misfit} differs "
                f"from that of the members. Start it with the same configuration, data and version of gradbus"
            )

    # Over the bus

    async def run(self) -> None:
        """Tell the others, until cancelled."""
        try:
            while True:
                self._agreement.tick(time.monotonic())
                self._look()
                self._changed.clear()
                with contextlib.suppress(WriteTimeout):  # who does not take this one gets the next one
                    await self._bus.publish(self._identity, self._agreement.next_view())
                is_busy = self._agreement.resting or bool(self._agreement.waits_for) or self._agreement.is_bidding
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BUSY_REPEAT_S if is_busy else REPEAT_S):
                        await self._changed.wait()
        except BusError as error:
            self._fail(error)

    async def listen(self) -> None:
        """Take what the others tell, until cancelled."""
        try:
            while True:
                match await self._inbox.get():
                    case Control(sender=number, incarnation=incarnation, body=GroupView() as view):
                        before, member = self._agreement.vote, MemberId(number, incarnation)
                        is_awaited = self._agreement.answers(member, view)
                        self._agreement.receive(member, view)
                        self._agreement.tick(time.monotonic())  # this may have been what it waited for
                        if is_awaited or self._agreement.vote != before:
                            self._changed.set()
                    case PeerGone(sender=number, incarnation=incarnation, certain=certain):
                        self._agreement.lost(MemberId(number, incarnation), certain=certain)
                        self._changed.set()
                self._look()
        except GradbusError as error:
            self._fail(error)
        finally:
            self._inbox.close()

    def _look(self) -> None:
        """Wake who waits for a generation, and end the forming of one that is over."""
        agreement = self._agreement
        if agreement.generation != self._last and self._forming is not None and not self._forming.expired():
            self._forming.reschedule(asyncio.get_running_loop().time())
            self._forming = None
        waits_for = agreement.waits_for
        if waits_for != self._waited_for:
            self._waited_for = waits_for
            if waits_for and not (agreement.ended or agreement.leaving):
                log.warning("waiting", number=agreement.me.number, generation=agreement.generation, waits_for=waits_for)
        self._moved.set()

    def _fail(self, error: Exception) -> None:
        self._fault = error
        self._moved.set()

    async def close(self) -> None:
        """Tell the others once more what is so now."""
        with contextlib.suppress(BusError):
            await self._bus.publish(self._identity, self._agreement.next_view())
            await self._bus.drain(Control, 1.0)


def _concerns(message: object) -> bool:
    return isinstance(message, PeerGone) or (isinstance(message, Control) and isinstance(message.body, GroupView))


@contextlib.asynccontextmanager
async def open_generations(
    bus: Bus,
    *,
    number: int,
    founders: int = 0,
    limits: ElasticLimits,
    traits: Mapping[str, int] | None = None,
    name: str = "world",
) -> AsyncIterator[Generations]:
    """Take part in an elastic group until the end of the block.

    Args:
        bus: from :func:`gradbus.connect`.
        number: of this process, which no other one that runs has.
        founders: number of processes that make the first generation, with the numbers 0 .. founders - 1, of which this
            one is one; 0: it joins. One that takes the place of another joins.
        traits: hashes that must be equal on all members, by what they are of.
        name: of the group, within the job.

    Raises:
        ConfigError: an argument is out of range.
    """
    if not 1 <= limits.min_world <= limits.max_world <= MAX_MEMBERS:
        raise ConfigError(
            f"elastic: expected 1 <= min_world <= max_world <= {MAX_MEMBERS}, got {limits.min_world} and "
            f"{limits.max_world}"
        )
    if founders and not (limits.min_world <= founders <= limits.max_world and 0 <= number < founders):
        raise ConfigError(
            f"elastic: the first generation of {founders} needs {limits.min_world} to {limits.max_world} members, with "
            f"numbers from 0 to {founders - 1}; this process is number {number}. One that joins later has founders=0"
        )
    me = MemberId(number, new_incarnation())
    agreement = GenerationAgreement(
        name,
        me,
        min_world=limits.min_world,
        max_world=limits.max_world,
        founders=founders,
        traits=traits,
        host=f"{socket.gethostname()} (process {os.getpid()})",
    )
    agreement.last_call_s = limits.last_call_s
    bus.open_writer(Control)
    generations = Generations(bus, agreement, limits)
    tasks = [
        asyncio.create_task(generations.listen(), name=f"gradbus-generations-{number}"),
        asyncio.create_task(generations.run(), name=f"gradbus-views-{number}"),
    ]
    try:
        yield generations
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await generations.close()
