"""Process groups whose members change: the handles of the processes, and the rank that each of them gets.

The interface is torch's ``_reconfigure``, which torch calls experimental: every process gives its handle to the others,
by whatever way it has, and then all that are to be in the group call it with the same handles and the same number.
The store that the process group was made with is not used for it, as its process may be the one that is gone.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch._C import _distributed_c10d
from torch.distributed import DistBackendError, Work
from torch.futures import Future

from gradbus.runtime.collectives.group import MAX_WORLD
from gradbus.torch.untraced import untraced

HAS_RECONFIGURE = hasattr(_distributed_c10d, "ReconfigureOptions")
_HANDLE = re.compile(r"dds:(\d{1,9}):([0-9a-f]{16}):([0-9a-f]{16}):([^\n]{1,200})")
_NO_LIMIT = timedelta(0)


def check_supported() -> None:
    """Raise RuntimeError: this torch has no reconfigure."""
    if not HAS_RECONFIGURE:
        raise RuntimeError(
            f"reconfigure needs torch 2.15 or newer, this is {torch.__version__}. Destroy the process group and make a "
            f"new one, with a new prefix of the store"
        )


@dataclass(frozen=True, slots=True, order=True)
class MemberHandle:
    """Holds what others know of a process. They sort by these fields, in this order, where ranks are free to choose.

    Attributes:
        rank: of its group before. token: of this process group in this process alone. job: number of its bus.
        host: host name and process id, for people.
    """

    rank: int
    token: str
    job: str
    host: str

    @classmethod
    def make(cls, rank: int, job: str) -> Self:
        """A new one, of this process."""
        return cls(rank, secrets.token_hex(8), job, f"process {os.getpid()} on {socket.gethostname()[:100]}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError: it is no handle of this backend."""
        found = _HANDLE.fullmatch(text)
        if found is None:
            raise ValueError(
                f"no reconfigure handle of backend dds: {text[:100]!r}. They come from _get_reconfigure_handle"
            )
        return cls(int(found[1]), *found.groups()[1:])

    def __str__(self) -> str:
        return f"dds:{self.rank}:{self.token}:{self.job}:{self.host}"


@dataclass(frozen=True, slots=True)
class Members:
    """Who is to be in the group: ``handles[r]`` is rank r. ``rank``: of this process."""

    handles: Sequence[MemberHandle]
    rank: int

    @classmethod
    def of(cls, texts: Collection[str], own: MemberHandle) -> Self:
        """Those of a list keep their order; those of a set get theirs by the ranks that they had.

        Raises:
            ValueError: something in it is no handle, or is there twice; or this process is not among them.
        """
        if not 0 < len(texts) <= MAX_WORLD:
            raise ValueError(f"reconfigure: expected 1 to {MAX_WORLD} handles, got {len(texts)}")
        handles = [MemberHandle.parse(text) for text in texts]
        if not isinstance(texts, list | tuple):
            handles.sort()
        tokens = [handle.token for handle in handles]
        if len(set(tokens)) != len(tokens):
            raise ValueError("reconfigure: one process is among the handles twice")
        if own.token not in tokens:
            raise ValueError(f"reconfigure: the handle of this process is not among the {len(tokens)}: {own}")
        return cls(handles, tokens.index(own.token))

    def group_name(self, uuid: int) -> str:
        """That of the group: other handles, another order or another number make another group."""
        text = f"{uuid} {' '.join(handle.token for handle in self.handles)}"
        return f"reconfigured_{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"

    def describe(self, ranks: Sequence[int]) -> str:
        """Who the ranks are, for people."""
        named = [(rank, self.handles[rank]) for rank in ranks[:8] if rank < len(self.handles)]
        return ", ".join(f"rank {rank} is {handle.host}, before rank {handle.rank}" for rank, handle in named)


@untraced
class ReconfigureWork(Work):
    """A group that forms meanwhile."""

    def __init__(self, form: Callable[[], None]) -> None:
        """Call ``form`` on a thread of its own; it ends in bounded time."""
        super().__init__()
        self._form = form
        self._error: Exception | None = None
        self._future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, name="gradbus-torch-reconfigure", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._form()
        except Exception as error:
            self._error = error
            self._future.set_exception(error)
        else:
            self._future.set_result([torch.empty(0)])

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until the group has formed. ``timeout``: give up waiting earlier than it itself does.

        Raises:
            DistBackendError: it has not formed; the text says who is missing.
        """
        self._thread.join(timeout.total_seconds() or None)
        if self._thread.is_alive():
            raise DistBackendError(f"reconfigure still under way after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def is_success(self) -> bool:
        """Whether the group has formed."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return what went wrong, as far as is known."""
        return self._error

    def result(self) -> list[Any]:
        """There are no tensors."""
        return []

    def get_future(self) -> Future[Any]:
        """A future that is done when the group has formed."""
        return self._future
