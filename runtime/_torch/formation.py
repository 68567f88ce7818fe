"""How the ranks of a process group find the name of their group in torch's store; no two processes have one rank."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistBackendError, DistNetworkError

from gradbus.runtime.errors import BarrierTimeout, ConfigError
from gradbus.runtime.fast_paths import IS_LINUX
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.logs import get_logger
from gradbus.runtime.transport.api import Reachable
from gradbus.runtime.transport.peer_processes import network_place
from gradbus.runtime.transport.wait_log import EVERY_S, WaitLog

WORLD = "world"  # the label of the group of all
_HANDOVER_S = 2.0  # how long a process that ends may keep the rank that another one takes over
_LOOK_S = 0.05
_MAX_PLACE_BYTES = 4096

_OUTLIVES = (
    "A store has to outlive the process groups that are made with it: make one, and give it to each "
    "init_process_group(store=...), or use init_method='dds://DOMAIN/JOB' (docs/torch.md, destroy and init again)"
)

log = get_logger("torch")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one process group meet.

    Attributes:
        store: of this process group alone. rank, world: of this process in it, and how many there are.
        label: what people call the group. timeout_s: how long to wait for the others.
        job_rank: the rank of this process among all of the job.
        name: of the group, where all ranks know it; else rank 0 makes it up, and the others find it in the store.
        job: number of the bus, where it is known.
    """

    store: Store
    rank: int
    world: int
    label: str
    timeout_s: float
    job_rank: int
    name: str = ""
    job: str = ""


def agreed_name(place: Rendezvous, reach: Reachable | None = None) -> str:
    """A name that no group had before, also not one with the same store: rank 0 makes it up.

    Stores may outlive process groups (torchrun's does), and with them what the groups wrote. So each rank counts how
    often it has been here, and reads the name of that time.

    Args:
        reach: of the bus that will be opened, for the log and the error while rank 0 does not come.

    Raises:
        BarrierTimeout: rank 0 has not come. ConfigError: its world has one rank.
    """
    store, rank, world = place.store, place.rank, place.world
    time_no = store.add(f"gradbus/times/{rank}", 1)
    key = f"gradbus/name/{time_no}"
    if rank == 0:
        readable = re.sub(r"[^A-Za-z0-9_]", "_", place.label)[:40]
        store.set(key, f"{readable}_{secrets.token_hex(6)} {world}")
    else:
        waiting = None if reach is None else WaitLog(log, reach, group=place.label, rank=rank)
        if not _has_come(store, key, place.timeout_s, waiting):
            again = (
                f", time {time_no} with this store: if another process is rank {rank}, too, give each its own; if rank "
                f"0 has made another store meanwhile: {_OUTLIVES}"
            )
            raise BarrierTimeout(
                f"process group {place.label!r}, rank {rank}{again if time_no > 1 else ''}",
                missing=[0],
                ready=world - 1,
                needed=world,
                timeout_s=place.timeout_s,
                hint="" if reach is None else reach.advice(),
            )
    name, _, its_world = store.get(key).decode().partition(" ")
    if its_world == "1" and world > 1:  # it will not be met, so it gives no error itself
        raise ConfigError(
            f"process group {place.label!r}: rank 0 has world 1, this process (rank {rank}) has {world}. Start all "
            f"ranks with the same WORLD_SIZE"
        )
    return name


def root_of(store: Store) -> Store:
    """The store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


@contextlib.contextmanager
def store_needed(store: Store, rank: int, label: str) -> Iterator[None]:
    """Raise DistBackendError, with the next step, where the server of torch's own store goes while a group forms."""
    try:
        yield
    except DistNetworkError as error:
        root = root_of(store)
        if not isinstance(root, TCPStore):  # the others have a text of their own
            raise
        why = str(error).partition("\n")[0]
        raise DistBackendError(
            f"[Rank {rank}] process group {label!r}: the store at {root.host}:{root.port} has gone before the group "
            f"has formed ({why}). Its process, rank 0 with MASTER_ADDR, has ended, or has destroyed an earlier process "
            f"group, and that one's store with it, which this rank had found there once more. {_OUTLIVES}"
        ) from error


def _has_come(store: Store, key: str, timeout_s: float, waiting: WaitLog | None) -> bool:
    """Wait for a key, and log now and then that rank 0 has not written it. Returns whether it is there in time."""
    until_s = time.monotonic() + timeout_s
    while (left_s := until_s - time.monotonic()) > EVERY_S:
        if _is_there(store, key, EVERY_S):
            return True
        if waiting is not None:
            waiting.look([0], reason="the store is there, and rank 0 has not begun this process group")
    return _is_there(store, key, max(0.001, left_s))


def _is_there(store: Store, key: str, timeout_s: float) -> bool:
    """Wait so long for a key. Returns whether it is there.

    Stores do not agree on how they say that it is not: TCPStore, HashStore and that of gradbus raise DistStoreError,
    FileStore a RuntimeError of no class of its own, and other ones what they like. So an error after the time counts as
    that, if the store can still be asked; the error of a store that cannot, or one that comes at once, is raised.

    Raises:
        RuntimeError: the store does not work. DistNetworkError, a RuntimeError, too: its server is gone.
    """
    began_s = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except DistNetworkError:
        raise
    except RuntimeError:
        if time.monotonic() - began_s < timeout_s / 2:  # stores measure time in their own way, some in milliseconds
            raise
        return bool(store.check([key]))
    return True


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank is, as it writes it to the store for the others.

    Attributes:
        host: host name and process id, for people. network: see :func:`network_place`.
        meeting_place, leaves_machine, attachment: of its bus, see
            :class:`~gradbus.runtime.transport.api.Reachable`.
    """

    host: str
    network: str
    meeting_place: str
    leaves_machine: bool
    attachment: str

    @classmethod
    def here(cls, reach: Reachable) -> RankLocation:
        """Return that of this process."""
        host = f"{socket.gethostname()} (process {os.getpid()})"
        return cls(host, network_place(), reach.meeting_place, reach.leaves_machine, reach.attachment)

    def never_meets(self, other: RankLocation) -> bool:
        """Whether it is certain that the buses of the two cannot find each other."""
        apart = bool(self.network and other.network) and self.network != other.network
        return self.meeting_place != other.meeting_place or (
            apart and not (self.leaves_machine and other.leaves_machine)
        )


class RankLocations:
    """Where the ranks of a process group are: found out while it does not form, for the case that it never will."""

    def __init__(self, place: Rendezvous, name: str, reach: Reachable) -> None:
        """Announce where this rank is. ``name``: of the group, one that no group had before."""
        self._place = place
        self._key = f"gradbus/place/{name}"
        self._reach = reach
        self._unknown = [other for other in range(place.world) if other != place.rank]
        self._own = RankLocation.here(reach)
        place.store.set(f"{self._key}/{place.rank}", json.dumps(asdict(self._own)))

    def check(self) -> None:
        """Raise ConfigError: some rank will never be met."""
        apart: dict[int, RankLocation] = {}
        store, own = self._place.store, self._own
        try:
            for rank in list(self._unknown):
                if store.check([f"{self._key}/{rank}"]):
                    self._unknown.remove(rank)
                    text = store.get(f"{self._key}/{rank}")[:_MAX_PLACE_BYTES].decode()
                    location = RankLocation(**parse_json(text))
                    if own.never_meets(location):
                        apart[rank] = location
        except (RuntimeError, TypeError, ValueError):  # whose store is gone finds out elsewhere
            return
        if not apart:
            return
        rank, other = next(iter(apart.items()))
        its_place = own_place = ""
        advice = self._reach.advice(elsewhere=True)
        if other.meeting_place != own.meeting_place:
            its_place, own_place = (f" in {one.meeting_place}" for one in (other, own))
            same_transport = len({one.meeting_place.partition(" ")[0].rstrip(",") for one in (other, own)}) == 1
            what = "the same GRADBUS_BUS__DOMAIN on all"
            advice = f"Set {what if same_transport else 'GRADBUS_BUS__CONNECT on all, or on none'}"
        elif own.leaves_machine:
            advice = (
                "Give it the settings of this one (GRADBUS_BUS__INTERFACE, GRADBUS_BUS__NETWORK, the peers and key)"
            )
        raise ConfigError(
            f"process group {self._place.label!r}: ranks {sorted(apart)} cannot be met. Rank {rank} is on "
            f"{other.host}, its bus on {other.attachment}{its_place}; rank {self._place.rank} is on {own.host}, its "
            f"bus on {own.attachment}{own_place}. {advice}"
        )


class RankLock:
    """A rank that this process has. Another process on this machine that wants to be the same one gets an error.

    It is a name among those of the kernel's sockets, which goes with the process, however that ends. Only Linux has it;
    elsewhere, and between machines, the second process waits until its deadline for a group that does not form.
    """

    def __init__(self, place: Rendezvous) -> None:
        """Raises ConfigError: another process has the rank and keeps it."""
        store, rank = place.store, place.rank
        self._socket: socket.socket | None = None
        if not IS_LINUX:
            return
        token = store.compare_set("gradbus/token", "", secrets.token_hex(8)).decode()
        until_s = time.monotonic() + _HANDOVER_S
        while not self._take(f"\0gradbus/{token}/{rank}"):
            if time.monotonic() > until_s:
                key = f"gradbus/holder/{rank}"  # which that process may not have written yet
                holder = store.get(key).decode() if store.check([key]) else "another process"
                raise ConfigError(
                    f"process group {place.label!r}: rank {rank} is taken by {holder}. Give every process its own rank "
                    f"(RANK=0 .. {place.world - 1}), or end that one"
                )
            time.sleep(_LOOK_S)
        store.set(f"gradbus/holder/{rank}", f"{socket.gethostname()} (process {os.getpid()})")

    def _take(self, name: str) -> bool:
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            taken.bind(name)
        except OSError as error:  # other errors: there are no such names here
            taken.close()
            return error.errno != errno.EADDRINUSE
        self._socket = taken
        return True

    def release(self) -> None:
        """Another process may have it from now on."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
