"""The membership of one rank in a group: forms it with the others, notices ranks that die or leave, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from gradbus.runtime import forks
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives.engine import Engine, no_shared_memory
from gradbus.runtime.collectives.formation import REPEAT_S, Formation, HelloScheduler, Member
from gradbus.runtime.collectives.link import GroupLink
from gradbus.runtime.collectives.status import StatusReporter
from gradbus.runtime.errors import BarrierTimeout, BusClosed, BusError, ConfigError, GradbusError, WriteTimeout
from gradbus.runtime.fast_paths import shares_memory
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SharedMemoryFault, is_here
from gradbus.runtime.shm.transport import SharedMemoryTransport
from gradbus.runtime.transport.wait_log import WaitLog
from gradbus.runtime.wire.control import MAX_REASON_CHARS, MAX_REASONS, MAX_SEQS, GroupHello, GroupLeave
from gradbus.runtime.wire.frames import CHUNK_BYTES, MAX_DESCRIPTORS, VERSION, Frame
from gradbus.runtime.wire.messages import Control, Identity, Message, PeerGone, new_incarnation

CONFLICT_HELLOS = 3  # DDS may match one way before the other
REPLY_S = 0.05  # how often at most to ranks that have not formed the group yet
DONE = "done"  # the reason of a rank that leaves without an error
MAX_PROBES = 4096  # that wait for the loop; a group of the largest size sends half as many
MAX_DEPARTED = 4  # ranks that were here, in the text of an error
DRAIN_S = 2.0  # how long others get to take over what was sent, when this rank leaves

# The group of all ranks of a job, here and in torch.distributed; in others the ranks have other numbers.
_OF_ALL = re.compile(r"world(_[0-9a-f]{12})?")

# Names of ranks that have not come, for the log, and what to do about them; empty: the usual.
DescribeMissing = Callable[[Sequence[int]], tuple[Sequence[object], str]]

log = get_logger("group")


class Membership:
    """Owns what a rank has in DDS for one group."""

    def __init__(
        self,
        bus: Bus,
        group: str,
        rank: int,
        world: int,
        *,
        early_bytes: int,
        early_age_s: float,
        stall_warning_s: float = 0.0,
    ) -> None:
        """Open topics and listen. Only from inside the event loop of the bus; :meth:`close` undoes it.

        Raises:
            ConfigError, BusError: it cannot be done, and nothing of it is left.
        """
        with contextlib.ExitStack() as undo:
            bus.claim(group)
            undo.callback(bus.release, group)
            self._fault: Exception | None = None
            self._made_in = forks.generation
            self._bus = bus
            self._loop = asyncio.get_running_loop()
            self.identity = Identity(rank, new_incarnation())
            me = Member(rank, self.identity.incarnation, f"{socket.gethostname()} (process {os.getpid()})")
            options = hashlib.blake2b(f"{VERSION} {CHUNK_BYTES} {MAX_DESCRIPTORS}".encode(), digest_size=8).digest()
            self.formation = Formation(group, me, world, int.from_bytes(options, "little"), tuple(bus.incarnations))
            bus.incarnations.append(self.identity.incarnation)
            self._scheduler = HelloScheduler(world)
            self._inbox = bus.subscribe(Control)
            undo.callback(self._inbox.close)
            bus.open_writer(Control)
            self._port = bus.raw_endpoints()
            undo.callback(self._port.abandon)
            self._shared = self._open_shared(rank, world)
            self._link = GroupLink(self._port, group, self.identity, world, self._shared)
            self.engine = Engine(
                group, rank, world, self._link, early_bytes=early_bytes, early_age_s=early_age_s, traffic=bus.traffic
            )
            self.engine.progress = self._link
            self.engine.on_probe = self._note_probe
            if self._shared is not None:
                self.engine.resolve_shared = self._shared.slots.get
                self.formation.memory = self._shared.place
            self._changed = asyncio.Event()
            self._is_formed = False
            self.has_left = False  # by close
            self.gave_up = ""  # how long this rank has waited in vain for the group, and for which ranks
            self._left: set[int] = set()
            # Ranks whose loss another rank has reported first, and the reason that it gave. Written on a thread that
            # takes frames, read on the loop at the end.
            self._told: dict[int, str] = {}
            self._replied_s = 0.0
            self._has_warned = False
            self._probes: deque[tuple[int, int, int]] = deque()  # rank, topic, digest
            self._probes_posted = False
            self.reporter = StatusReporter(bus, self.identity, self.engine, me.host, stall_warning_s=stall_warning_s)
            self._reporting: asyncio.Task[None] | None = None
            self._no_more_refused = bus.access_policy.when_refused(self._on_refused)
            undo.callback(self._no_more_refused)
            self._link.listen(self.engine.receive)  # last: frames may come at once, and need what is above
            undo.pop_all()
        self._watcher = asyncio.create_task(self._watch(), name=f"gradbus-group-{group}-{rank}")

    def _open_shared(self, rank: int, world: int) -> SharedMemoryTransport | None:
        if world == 1 or not self._port.shared_memory or not shares_memory():
            return None
        try:
            return SharedMemoryTransport(rank, world)
        except SharedMemoryFault as error:
            self._warn_not_shared(str(error))
            return None

    def _unshare(self) -> None:
        """Give the shared memory back. A thread that is using it keeps it for so long."""
        self._link.stop_sharing()
        self.engine.resolve_shared = no_shared_memory
        self._shared = None

    def _warn_not_shared(self, reason: str) -> None:
        log.warning("no shared memory", group=self.formation.group, reason=reason, effect="all data goes over DDS")

    def _attach(self, rank: int, place: str) -> None:
        """Map the shared memory of a rank, if it is on this machine."""
        if self._shared is None or rank in self.formation.attached or not is_here(place):
            return
        try:
            self._shared.attach(rank, place)
        except SharedMemoryFault as error:
            if not self._has_warned:
                self._warn_not_shared(f"of rank {rank}: {error}")
            self._has_warned = True
            return
        self.formation.attached.add(rank)

    def calls_may_block(self) -> None:
        """Send more on the thread of the call, and wake no other one: it has no event loop."""
        self._link.inline_bytes = self._link.inline_shared_bytes = 8 << 20

    async def form(self, timeout_s: float, describe_missing: DescribeMissing | None = None) -> None:
        """Wait until all ranks are there and every topic works both ways. ``describe_missing``: for the log.

        Raises:
            BarrierTimeout: they are not within ``timeout_s``; ``.missing``.
            ConfigError: the ranks do not fit together, or this node may not be this one.
            BusError: the bus is closed, or DDS does not take what this rank sends.
            JoinRefused, JobInUse: this process may not take part.
        """
        self._note_change()  # a rank alone has formed its group
        waiting = WaitLog(log, self._bus.reach, group=self.formation.group, rank=self.formation.me.rank)
        matches = asyncio.create_task(self._watch_matches(timeout_s), name="gradbus-group-matches")
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_formed:
                    self._check()
                    if _OF_ALL.fullmatch(self.formation.group):
                        self._bus.access_policy.check_ids(self.formation.me.rank)
                    self._changed.clear()
                    wait_s = await self._send_due()
                    missing, reason = self._missing_and_reason()
                    names, hint = (missing, "") if describe_missing is None else describe_missing(missing)
                    waiting.look(names, reason=reason, misconfiguration=self._bus.misconfiguration, hint=hint)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._changed.wait()
        except WriteTimeout:  # a TimeoutError as well, but not that of the others
            raise
        except TimeoutError:
            self._check()
            error = self._timed_out(timeout_s)
            without = f" without ranks {list(error.missing)}" if error.missing else ""
            self.gave_up = f"gave up after {timeout_s:g} s{without}"
            raise error from None
        except ConfigError:
            for _ in range(CONFLICT_HELLOS):  # so that a rank with other settings finds the same conflict
                await self._send_hello()
                await asyncio.sleep(REPEAT_S)
            raise
        finally:
            matches.cancel()
            await asyncio.wait([matches])
        self._check()
        if self._shared is not None:
            self._shared.enter_group(self.formation.readers, self.engine.receive)
        await self._send_hello()  # the others may only be waiting for this
        name = f"gradbus-pulse-{self.formation.group}-{self.formation.me.rank}"
        self._reporting = asyncio.create_task(self.reporter.run(), name=name)

    async def _send_due(self) -> float:
        """Send the hello and the probes that are due. Returns the seconds until more may be."""
        formation, scheduler = self.formation, self._scheduler
        digest = formation.digest
        if digest and digest != self.engine.group_id:
            self._link.set_group_id(digest)
            self.engine.set_members(digest, {member.rank: member.incarnation for member in formation.members})
        now_s = time.monotonic()
        hello = formation.hello_now()
        if scheduler.is_due(hello, now_s):
            await self._bus.publish(self.identity, hello)
        awaiting = formation.awaiting_probes
        if awaiting and self._link.matched:
            ranks, to_all = scheduler.probes(digest, awaiting, all_know=formation.all_know, now_s=now_s)
            self._link.probe(ranks, to_all=to_all)
        return scheduler.wait_s(hello, time.monotonic())

    async def _watch_matches(self, timeout_s: float) -> None:
        """Repeat hello and probes for ranks that DDS has matched just now: they have not received the earlier ones."""
        with contextlib.suppress(GradbusError):  # form() meets the same error, and raises it
            while True:
                before = self._matched
                await self._bus.matched(lambda known=before: self._matched != known, timeout_s=timeout_s)  # type: ignore[misc]
                self._scheduler.met = True
                self._changed.set()

    @property
    def _matched(self) -> tuple[int, bool]:
        return self._bus.matched_readers(Control), self._link.matched

    async def _send_hello(self) -> None:
        await self._bus.publish(self.identity, self.formation.hello_now())

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _timed_out(self, timeout_s: float) -> BarrierTimeout:
        formation = self.formation
        missing, reason = self._missing_and_reason()
        what = f"group {formation.group!r}, rank {formation.me.rank}" + (f" ({reason})" if reason else "")
        ready = formation.world - len(missing) - len(formation.departed)
        return BarrierTimeout(
            what,
            missing=missing,
            ready=ready,
            needed=formation.world,
            timeout_s=timeout_s,
            misconfiguration=self._bus.misconfiguration,
            hint=self._bus.reach.advice() if missing else "Start all ranks again, within this time of each other",
        )

    def _missing_and_reason(self) -> tuple[list[int], str]:
        """Ranks that have not come, and the reason as far as it is known. If all have come, but not all are here any
        more, none is missing, and the reason names those."""
        missing, unlinked = self.formation.missing, self.formation.unlinked
        departed = sorted(self.formation.departed.items())
        reasons = [f"rank {rank} was here, and {reason}" for rank, reason in departed[:MAX_DEPARTED]]
        if len(departed) > MAX_DEPARTED:
            reasons.append(f"and {len(departed) - MAX_DEPARTED} more have left")
        is_unlinked = not missing and not departed and bool(unlinked)
        if is_unlinked:
            reasons.append(f"ranks {list(unlinked)} have announced themselves, but data does not get through both ways")
        if absence := self._bus.access_policy.absence:
            reasons.append(absence)
        return list(unlinked if is_unlinked else missing), "; ".join(reasons)

    # Incoming messages

    def _note_probe(self, frame: Frame) -> None:
        """On the receive thread, or on one that waits: keep an empty frame for the loop, within a bound. Probes are
        repeated, and any process can send them."""
        if len(self._probes) < MAX_PROBES:
            self._probes.append((frame.key.sender, frame.key.part, frame.key.job))
        if not self._probes_posted:
            self._probes_posted = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_probes)

    def _on_probes(self) -> None:
        self._probes_posted = False  # first: probes that come from now on need another call
        news = False
        for _ in range(len(self._probes)):
            news |= self.formation.probe(*self._probes.popleft())
        if news:
            self._note_change()

    def _note_change(self) -> None:
        """Once the group has formed, nothing undoes that: a rank that leaves then has been a member."""
        self._is_formed = self._is_formed or self.formation.formed
        self._changed.set()

    async def _watch(self) -> None:
        try:
            while True:
                await self._receive(await self._inbox.get())
        except BusError as error:
            self._end(error)
        except Exception as error:
            self._end(error)
            with contextlib.suppress(Exception):  # the log may be what fails: its stream is the host's
                log.exception("group failed", group=self.formation.group)
        finally:
            self._inbox.close()  # an inbox that is not read fills up, and then the whole bus receives nothing any more

    def _end(self, error: Exception) -> None:
        self._fault = error
        self._changed.set()
        self.engine.close(error)

    async def _receive(self, message: Message) -> None:
        match message:
            case Control(sender=rank, incarnation=incarnation, body=GroupLeave() as leave):
                self._on_leave(rank, incarnation, leave)
            case Control(sender=rank, incarnation=incarnation, body=GroupHello() as hello):
                await self._on_hello(rank, incarnation, hello)
            case PeerGone(sender=rank, incarnation=incarnation, why=why):
                self._on_gone(rank, incarnation, why)

    def _on_refused(self, error: GradbusError) -> None:
        """On the receive thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, error)

    def _on_gone(self, rank: int, incarnation: int, why: str) -> None:
        member = self._member(rank, incarnation)
        if member is None or rank == self.identity.sender:
            return
        if not self._is_formed:
            self.formation.gone(rank, incarnation, "its process is gone")
        elif rank not in self._left:
            reason = f"its process on {member.host} is {f'shut out: {why}' if why else 'gone'}"
            self._after_frames(partial(self._lose, rank, reason))
            with contextlib.suppress(Exception):  # as above
                log.warning("rank lost", group=self.formation.group, rank=rank, host=member.host, why=why or "gone")

    def _on_leave(self, rank: int, incarnation: int, leave: GroupLeave) -> None:
        if leave.group != self.formation.group or self._member(rank, incarnation) is None:
            return
        if not self._is_formed and not (leave.ok and leave.members == self.formation.digest):
            reason = "has left" if leave.ok else _sendable(leave.reason, MAX_REASON_CHARS)
            self.formation.gone(rank, incarnation, reason)
            return
        if not self._is_formed:  # it was a member and has ended already: so it was linked to all
            self.formation.confirm_linked(rank)
            self._note_change()
        self._left.add(rank)

        def end() -> None:
            reasons = dict(zip(leave.lost, leave.lost_reasons, strict=False))  # an older program gives none
            for lost in leave.lost:  # before: it is what the others want to know
                why = reasons.get(lost, "gone")
                if lost < self.formation.world and lost not in (rank, self.identity.sender):
                    if lost not in self.engine.dead:
                        self._told.setdefault(lost, why)
                    self._lose(lost, f"{why} (told by rank {rank})")
            how = f"left: {DONE}" if leave.ok and leave.reason == DONE else leave.reason
            (self.engine.leave if leave.ok else self._lose)(rank, how)

        self._after_frames(end)  # it was sent after all frames of that rank: what is missing then stays missing

    def _after_frames(self, then: Callable[[], None]) -> None:
        """Call a function when all frames that are on this machine by now have been taken: on a thread that takes
        them."""

        def drained() -> None:
            mailbox = None if self._shared is None else self._shared.mailbox
            if mailbox is None:
                then()
            else:
                mailbox.after_messages(then)

        self._port.after_drain(drained)

    def _lose(self, rank: int, why: str) -> None:
        shared = self._shared
        if shared is not None:
            shared.lose(rank)
        self.engine.lose(rank, why)

    def _member(self, rank: int, incarnation: int) -> Member | None:
        return next((m for m in self.formation.members if (m.rank, m.incarnation) == (rank, incarnation)), None)

    async def _on_hello(self, rank: int, incarnation: int, hello: GroupHello) -> None:
        if self._is_formed:
            # A rank that has not formed the group yet needs this rank's hello again; so does one that comes too late.
            is_forming = hello.group == self.formation.group and not hello.formed
            if is_forming and time.monotonic() > self._replied_s + REPLY_S:
                self._replied_s = time.monotonic()
                with contextlib.suppress(WriteTimeout):  # a rank that does not take it asks again
                    await self._send_hello()
            return
        try:
            was_known = self.formation.knows(rank, incarnation)
            if self.formation.take_hello(rank, incarnation, hello):
                self._scheduler.met |= not was_known
                self._attach(rank, hello.memory)
                self._note_change()
            elif not hello.linked and self._scheduler.probe_again(rank, time.monotonic()):
                self._changed.set()
        except ConfigError as error:
            self._end(error)

    # The end

    async def _send_leave(self, ok: bool, reason: str) -> None:
        lost = sorted(self.engine.dead.items())[:MAX_SEQS]
        # A reason that another rank has told is sent on as that rank gave it; the receiver adds who told it.
        reasons = [_sendable(self._told.get(rank, why), MAX_REASON_CHARS) for rank, why in lost[:MAX_REASONS]]
        leave = GroupLeave(
            self.formation.group, self.engine.group_id, ok, _sendable(reason, 1000), [rank for rank, _ in lost], reasons
        )
        await self._bus.publish(self.identity, leave)

    async def close(self, *, ok: bool, reason: str) -> None:
        """Leave the group. Takes a bounded time, and longest when others do not take what was sent to them. A child by
        fork does not leave: the rank is its parent's."""
        if self._made_in != forks.generation:
            return
        self.has_left = True
        self._no_more_refused()
        if self._reporting is not None:
            self._reporting.cancel()
        self.engine.close(BusClosed(f"this rank has left group {self.formation.group!r}"))
        drained = False
        try:
            if ok:
                await self._port.drain(DRAIN_S)
            drained = True
            await self._send_leave(ok, reason)
            await self._bus.drain(Control, DRAIN_S)  # else the others may see the end of the process first
        except BusError as error:
            log.debug("left without announcing it", group=self.formation.group, reason=str(error))
        finally:
            try:
                if not drained:  # cancelled meanwhile
                    with contextlib.suppress(BusError):
                        await self._send_leave(False, f"{reason}, in haste")
            finally:
                await self._disband()

    async def _disband(self) -> None:
        """Release everything that the rank has, also when the task that waits for it is cancelled."""
        self._bus.release(self.formation.group)
        self._watcher.cancel()
        self._inbox.close()
        try:
            await asyncio.wait([self._watcher] if self._reporting is None else [self._watcher, self._reporting])
        finally:
            try:
                await self._port.close()
                if self._shared is not None:
                    await self._shared.close()
            finally:
                self._unshare()


def _sendable(reason: str, chars: int) -> str:
    """The reason within a length. It may have a file name that is no text."""
    return reason.encode("utf-8", "replace").decode()[:chars]
