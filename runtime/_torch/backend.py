"""The backend: torch's calls in, works out. Collectives come from C++, which finds them here by their names."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, Store
from torch.distributed import DistBackendError

from gradbus.runtime.bus import background
from gradbus.runtime.collectives.status import StallLog
from gradbus.runtime.errors import BarrierTimeout, BusError, ConfigError, JobInUse, JoinRefused
from gradbus.runtime.user_errors import user_error
from gradbus.torch.calls import CollectiveCall, CollectiveCalls, together
from gradbus.torch.formation import WORLD, Rendezvous, store_needed
from gradbus.torch.groups import TorchGroup, acquire_bus, job_number
from gradbus.torch.observed import observed
from gradbus.torch.point_to_point import Messages, monitored_barrier
from gradbus.torch.reconfigure import HAS_RECONFIGURE, MemberHandle, Members, ReconfigureWork, check_supported
from gradbus.torch.untraced import untraced
from gradbus.torch.work import CoalescedWork, DdsWork, WorkQueue

STALL_VARIABLE = "GRADBUS_STALL_WARNING_S"
STALL_WARNING_S = 60.0
_ORDERED = "c"  # all collectives share a name: where ranks call different ones, that is noticed at once

# torch's C++ side does not always keep the Python object of a backend, and without it the methods here are gone.
_alive: set[DdsBackend] = set()


def warning_from_environment(environment: Mapping[str, str] = os.environ) -> float:
    """After how many seconds a stalled collective is logged. Raises ConfigError."""
    text = environment.get(STALL_VARIABLE, "")
    try:
        return checked_warning_s(float(text)) if text else STALL_WARNING_S
    except ValueError:
        raise ConfigError(f"{STALL_VARIABLE}: expected seconds, 0 for no report, got {text!r}") from None


def checked_warning_s(warning_s: float) -> float:
    """Return the same number. Raises ValueError: no time that can be waited for."""
    if not 0 <= warning_s < float("inf"):
        raise ValueError(f"stall_warning_s must be a number of seconds, 0 for no report, got {warning_s}")
    return warning_s


def timeout_of(options: Backend.Options) -> timedelta:
    """The timeout that a group was made with."""
    return options._timeout  # noqa: SLF001 - torch has no public name for it


def _leave_all() -> None:
    """A program that ends without destroy_process_group leaves gracefully all the same: what it has sent arrives."""
    for backend in list(_alive):
        backend.leave_at_exit()


def first_errors() -> list[BaseException]:
    """Return the first error of each group that this process has not left: torch's C++ code hands on texts only."""
    queues = [backend.queue for backend in list(_alive) if "queue" in vars(backend)]
    return [queue.first_error for queue in queues if queue.first_error is not None]


# Before atexit's functions: by their time no executor takes work any more, not even one that is idle.
getattr(threading, "_register_atexit", atexit.register)(_leave_all)


@untraced
class DdsBackend(Backend):
    """One rank of one process group.

    Attributes:
        group: the group of gradbus. queue: its works. calls: makes what can be started.
        messages: sends and receives. optimizers: numbers the distributed ones.
        stalls: logs collectives that wait too long.
    """

    group: TorchGroup
    queue: WorkQueue
    calls: CollectiveCalls
    messages: Messages
    stalls: StallLog

    def __init__(
        self, store: Store, rank: int, size: int, options: Backend.Options, *, forms_later: bool = False
    ) -> None:
        """Form the group, unless ``forms_later``: then :meth:`reconfigure` does.

        Raises:
            DistBackendError: not all ranks have come, or DDS refuses something; the cause is an error of gradbus.
            ConfigError: the ranks do not fit together, or a setting is wrong.
        """
        super().__init__(rank, size)
        self._warning_s = warning_from_environment()
        self._process = os.getpid()
        self._options = options
        self._timeout_s = timeout_of(options).total_seconds()
        self._rank, self._size = rank, size
        all_ranks = options.global_ranks_in_group
        label = str(options.group_name) if all_ranks else WORLD
        # The number of the job is asked for now: later the process that has the store may be gone.
        with store_needed(store, rank, label):
            job = job_number(store)
        job_rank = all_ranks[rank] if all_ranks else rank
        self._place = Rendezvous(store, rank, size, label, self._timeout_s, job_rank, job=job)
        self._handle: MemberHandle | None = None
        self._uuids: set[int] = set()
        self._forming: ReconfigureWork | None = None
        self._called_off = ""
        self.optimizers = itertools.count()
        self._coalescing = threading.local()
        if not forms_later:
            self._form(self._place)
        _alive.add(self)

    def _form(self, place: Rendezvous) -> None:
        try:
            with store_needed(place.store, place.rank, place.label):
                group = TorchGroup.form(place, self._check_wanted)
        except (BarrierTimeout, BusError, JoinRefused, JobInUse) as error:
            raise DistBackendError(f"[Rank {place.rank}] {error}") from error
        stalls = StallLog(group.name, place.rank, place.world, self._warning_s)
        queue = WorkQueue(group.engine, group.later, stalls)
        group.watch_with(queue.watch)
        self._rank, self._size = place.rank, place.world
        self.queue, self.stalls = queue, stalls
        self.calls = CollectiveCalls(place.rank, place.world)
        self.messages = Messages(group.engine, queue, self.calls)
        self.group = group  # the last one: who finds it finds the others

    def _check_wanted(self) -> None:
        if self._called_off:
            raise DistBackendError(f"the process group was called off while it formed: {self._called_off}")

    def __getattr__(self, name: str) -> Any:
        """Reached for what is not there: what belongs to a group, where none has formed."""
        if name in DdsBackend.__annotations__:
            raise DistBackendError(
                "the process group has not formed: call torch.distributed._reconfigure, and wait for it, before "
                "collectives"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # What it is. The properties must be here: those of the base class call themselves for ever.

    supports_splitting = property(lambda self: True)
    supports_coalescing = property(lambda self: False)  # nothing is gained by it
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: HAS_RECONFIGURE)
    supports_window = property(lambda self: False)
    _supports_time_estimate = property(lambda self: False)

    def rank(self) -> int:
        """Return that of this process in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    @property
    def options(self) -> Backend.Options:
        """With which it was made."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """For messages."""
        return self._options.backend

    def _get_backend_name(self) -> str:
        return self._options.backend

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of collectives without one of their own."""
        self._timeout_s = timeout.total_seconds()
        # Groups that are made of this one take it from there.
        self._options._timeout = timeout  # noqa: SLF001 - torch has no public name for it

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.queue.issued

    def _set_sequence_number_for_group(self) -> None:
        """Every rank counts from 0; there is nothing to agree on."""

    # Life

    def split(self, store: Store, ranks: Sequence[int], options: Backend.Options) -> DdsBackend | None:
        """A backend of some of the ranks; None on the others."""
        if self.rank() not in ranks:
            return None
        parents = self._options.global_ranks_in_group
        options.global_ranks_in_group = [parents[rank] for rank in ranks] if parents else list(ranks)
        return DdsBackend(PrefixStore("dds/", store), list(ranks).index(self.rank()), len(ranks), options)

    def get_reconfigure_handle(self) -> str:
        """Return what the others need of this process for :meth:`reconfigure`. Raises RuntimeError: torch has none."""
        check_supported()
        if self._handle is None:
            self._handle = MemberHandle.make(self._rank, self._place.job)
        return str(replace(self._handle, rank=self._rank))

    def reconfigure(self, opts: Any) -> ReconfigureWork:
        """Leave the group, and form another one with those whose handles are given, at once or as they come.

        Hints are ignored: torch has none that all backends know.

        Raises:
            DistBackendError: the number was used before, or another reconfigure is under way.
            ValueError: the handles are wrong, or this process is not among them.
        """
        own = MemberHandle.parse(self.get_reconfigure_handle())
        uuid: int = opts.uuid
        if uuid in self._uuids:
            raise DistBackendError(f"reconfigure: uuid {uuid} was already used; each reconfigure needs a new one")
        if self._forming is not None and not self._forming.is_completed():
            raise DistBackendError("reconfigure: another one is under way; wait for it first")
        members = Members.of(opts.handles, own)
        self._uuids.add(uuid)
        limit_s = self._timeout_s if opts.timeout is None else self._limit_s(opts.timeout)
        place = replace(
            self._place,
            rank=members.rank,
            world=len(members.handles),
            timeout_s=limit_s,
            name=members.group_name(uuid),
            job=members.handles[0].job,
        )
        self._called_off = ""
        held = vars(self)
        group, queue = held.get("group"), held.get("queue")
        for name in DdsBackend.__annotations__:
            held.pop(name, None)
        self._forming = ReconfigureWork(partial(self._reform, place, members, group, queue))
        return self._forming

    def _reform(self, place: Rendezvous, members: Members, old: TorchGroup | None, queue: WorkQueue | None) -> None:
        """On a thread of its own."""
        # Held over the change: opening a bus takes longer than all the rest.
        bus = acquire_bus(place.job, place.job_rank) if place.world > 1 else None
        try:
            if old is not None and queue is not None:
                # Those that are gone take nothing any more: there is no use in waiting for them.
                old.close(f"rank {old.rank} reconfigures the group", abruptly=bool(old.engine.dead))
                queue.close()
            self._form(place)
        except DistBackendError as error:
            missing = getattr(error.__cause__, "missing", None)
            if not missing:
                raise
            raise DistBackendError(
                f"{error}. Missing: {members.describe(missing)}. All must be given the same handles, in the same "
                f"order, and the same uuid"
            ) from error.__cause__
        finally:
            if bus is not None:
                background.release(bus)
        _alive.add(self)
        if self._called_off:
            self._leave(self._called_off)

    def shutdown(self) -> None:
        """Leave the group. What is under way fails. If there is an exception, the others get it as the reason."""
        error = sys.exception()
        self._leave("" if error is None else f"failed with {user_error(error)}", abruptly=False)

    def abort(self) -> None:
        """Leave the group because something is wrong: what the others have under way fails, too."""
        self._leave(f"rank {self._rank} has aborted it")

    def leave_at_exit(self) -> None:
        """Leave the group, and no more: the process takes the rest with it, and new threads may not be had any more.

        The interpreter keeps the exception that ended the program. Where there is none, the program ended without
        destroy_process_group, by sys.exit or at its last line.
        """
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        if error is not None:
            self._leave(f"failed with {user_error(error)}", keep_bus=True)
        else:
            self._leave("its program has ended without destroy_process_group", abruptly=False, keep_bus=True)

    def _leave(self, reason: str, *, abruptly: bool = True, keep_bus: bool = False) -> None:
        self._called_off = reason or "destroyed"
        if self not in _alive:
            return
        _alive.discard(self)
        if self._process == os.getpid() and "group" in vars(self):  # a forked child has none of the threads
            self.group.close(reason, abruptly=abruptly, keep_bus=keep_bus)
            self.queue.close()

    # Collectives, with the names and arguments of torch; CollectiveCalls has what they do.

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> DdsWork:
        return self._submit([self.calls.broadcast(tensor, opts.rootRank) for tensor in tensors], opts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> DdsWork:
        return self._submit([self.calls.all_reduce(tensor, opts.reduceOp) for tensor in tensors], opts)

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> DdsWork:
        return self._submit([self.calls.all_reduce_coalesced(tensors, opts.reduceOp)], opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> DdsWork:
        return self._submit([self.calls.reduce(tensor, opts.reduceOp, opts.rootRank) for tensor in tensors], opts)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any) -> DdsWork:
        return self._submit([self.calls.all_gather(*pair) for pair in zip(outputs, tensors, strict=True)], opts)

    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any) -> DdsWork:
        return self._submit([self.calls.all_gather_lists(outputs, tensors)], opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> DdsWork:
        return self._submit([self.calls.all_gather_single(output, tensor)], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any) -> DdsWork:
        return self._submit([self.calls.all_gather_single(*pair) for pair in zip(outputs, tensors, strict=True)], opts)

    def gather(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any) -> DdsWork:
        return self._submit([self.calls.gather(outputs[0] if outputs else [], tensors[0], opts.rootRank)], opts)

    def scatter(self, outputs: Sequence[Tensor], tensors: Sequence[Sequence[Tensor]], opts: Any) -> DdsWork:
        return self._submit([self.calls.scatter(outputs[0], tensors[0] if tensors else [], opts.rootRank)], opts)

    def reduce_scatter(self, outputs: Sequence[Tensor], tensors: Sequence[Sequence[Tensor]], opts: Any) -> DdsWork:
        pairs = zip(outputs, tensors, strict=True)
        return self._submit([self.calls.reduce_scatter(out, parts, opts.reduceOp) for out, parts in pairs], opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> DdsWork:
        return self._submit([self.calls.reduce_scatter_single(output, tensor, opts.reduceOp)], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any
    ) -> DdsWork:
        pairs = zip(outputs, tensors, strict=True)
        return self._submit([self.calls.reduce_scatter_single(*pair, opts.reduceOp) for pair in pairs], opts)

    def alltoall(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any) -> DdsWork:
        return self._submit([self.calls.all_to_all(outputs, tensors)], opts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int], opts: Any
    ) -> DdsWork:
        return self._submit([self.calls.all_to_all_single(output, tensor, output_sizes, sizes)], opts)

    def barrier(self, opts: Any) -> DdsWork:
        return self._submit([self.calls.barrier()], opts)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """The same; rank 0 names ranks that do not come."""
        monitored_barrier(self.messages, self.rank(), self.size(), self._limit_s(opts.timeout), wait_all_ranks)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> DdsWork:
        """A message to a rank."""
        return self._note(self.messages.send(_only(tensors), to, tag, self._timeout_s))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> DdsWork:
        """A message from a rank."""
        return self._note(self.messages.receive(_only(tensors), source, tag, self._timeout_s))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> DdsWork:
        """A message from any rank."""
        return self._note(self.messages.receive_from_anyone(_only(tensors), tag, self._timeout_s))

    def start_coalescing(self) -> None:
        """Remember the works of this thread's calls until :meth:`end_coalescing`."""
        self._coalescing.works = []

    def end_coalescing(self) -> CoalescedWork:
        """One work for all of them."""
        works, self._coalescing.works = getattr(self._coalescing, "works", None) or [], None
        return CoalescedWork(works)

    # Inside

    def start(self, call: CollectiveCall, name: str) -> DdsWork:
        """Start a call that is matched by its name, whatever the order of the calls. On any thread."""
        work = self.queue.start(DdsWork(self.queue, call, name, self._timeout_s, ordered=False))
        self.group.engine.progress.wake_io_thread()
        return work

    def _submit(self, calls: Sequence[CollectiveCall], opts: Any) -> DdsWork:
        if opts.asyncOp:
            self.group.engine.progress.wake_io_thread()
        call = together(calls)
        if (observer := observed.observer) is not None:
            observer.submitted()
        work = DdsWork(self.queue, call, _ORDERED, self._limit_s(opts.timeout), ordered=True)
        return self._note(self.queue.submit(work))

    def _limit_s(self, timeout: timedelta) -> float:
        limit_s = timeout.total_seconds()
        return limit_s if limit_s > 0 else self._timeout_s  # -1 ms stands for: not given

    def _note(self, work: DdsWork) -> DdsWork:
        works = getattr(self._coalescing, "works", None)
        if works is not None:
            works.append(work)
        return work


def _only(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"a message is one tensor, got {len(tensors)}")
    return tensors[0]
