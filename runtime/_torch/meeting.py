"""How the ranks of a process group find the name of their group in torch's store, and who may be which rank."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import sys
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from gradbus.runtime.errors import BarrierTimeout, ConfigError

WORLD = "world"  # the label of the group of all
_HANDOVER_S = 2.0  # how long a process that ends may keep the rank that another one takes over
_LOOK_S = 0.05


def agreed_name(store: Store, rank: int, world: int, label: str, timeout_s: float) -> str:
    """A name that no group had before, also not one with the same store: rank 0 makes it up.

    Stores may outlive process groups (torchrun's does), and with them what the groups wrote. So each rank counts how
    often it has been here, and reads the name of that time.

    Raises:
        BarrierTimeout: rank 0 has not come. ConfigError: it says that it is alone.
    """
    time_no = store.add(f"gradbus/times/{rank}", 1)
    key = f"gradbus/name/{time_no}"
    if rank == 0:
        readable = re.sub(r"[^A-Za-z0-9_]", "_", label)[:40]
        store.set(key, f"{readable}_{secrets.token_hex(6)} {world}")
    else:
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except DistStoreError as error:
            again = f", for the {time_no}th time: if another process is rank {rank}, too, give each its own"
            what = f"process group {label!r}, rank {rank}{again if time_no > 1 else ''}"
            raise BarrierTimeout(what, missing=[0], ready=world - 1, needed=world, timeout_s=timeout_s) from error
    name, _, its_world = store.get(key).decode().partition(" ")
    if its_world == "1" and world > 1:  # it will not be met, and could not say so itself
        raise ConfigError(
            f"process group {label!r}: rank 0 says world 1, this process (rank {rank}) says {world}. Start all ranks "
            f"with the same WORLD_SIZE"
        )
    return name


class Claim:
    """A rank that this process has. Another process on this machine that wants to be the same one is told so.

    It is a name among those of the kernel's sockets, which goes with the process, however that ends. Only Linux has it;
    elsewhere, and between machines, the second process waits until its deadline for a group that does not form.
    """

    def __init__(self, store: Store, rank: int, world: int, label: str) -> None:
        """Raises ConfigError: another process has the rank and keeps it."""
        self._socket: socket.socket | None = None
        if not sys.platform.startswith("linux"):
            return
        token = store.compare_set("gradbus/token", "", secrets.token_hex(8)).decode()
        until_s = time.monotonic() + _HANDOVER_S
        while not self._take(f"\0gradbus/{token}/{rank}"):
            if time.monotonic() > until_s:
                holder = store.get(f"gradbus/holder/{rank}").decode()
                raise ConfigError(
                    f"process group {label!r}: rank {rank} is taken by {holder}. Give every process its own rank "
                    f"(RANK=0 .. {world - 1}), or end that one"
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
