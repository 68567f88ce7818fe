"""Training processes of this machine: forked from one that has loaded the data, each with a socket pair to the host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.virtual.channel import ChannelClosed, Parcel, receive_soon, send_soon
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.pool import (
    PoolWork,
    ProcessDied,
    RoundWork,
    TrainingPool,
    TrainingProcess,
    check_prepared,
)
from gradbus.actors.virtual.training_process import StopFlag, run_template
from gradbus.runtime.errors import ConfigError, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SharedMemoryFault, read

START_S = 60.0  # a fork and a model; the data are loaded by then
END_S = 5.0

log = get_logger("host")


class LocalProcess(TrainingProcess):
    """A training process of this machine."""

    def __init__(self, end: socket.socket, process: int) -> None:
        """``end``: of the channel to it. ``process``: its number."""
        self._end = end
        self._process = process
        self._work = 0
        self._read: list[int] = []

    async def _begin(self, work: PoolWork) -> None:
        if self._work != work.number:
            with self._whole_messages():
                await send_soon(self._end, work.parcel)
            self._work = work.number

    async def _ask(self, work: PoolWork, do: str, given: Mapping[str, Any]) -> Parcel:
        done, self._read = self._read, []
        with self._whole_messages():
            await send_soon(self._end, Parcel({"do": do, "with": given, "read": done}))
            return await receive_soon(self._end)

    @contextlib.contextmanager
    def _whole_messages(self) -> Iterator[None]:
        """Close the channel where a message ends halfway: it is of no use then. Raises ProcessDied: there is no other
        end."""
        try:
            yield
        except ChannelClosed:
            self.close()
            raise ProcessDied from None
        except BaseException:  # half a message is left in the channel
            self.close()
            raise

    async def _take(self, work: RoundWork, update: EncodedUpdate, released: Any) -> EncodedUpdate:
        """Keep nothing more: the release is in the client's folder already, to which that process writes itself."""
        if not update.request.memory:
            return update
        # It stays here, too, should that process end before the controller has read it.
        try:
            payload = await asyncio.to_thread(read, update.request.memory, update.request.total_bytes)
        except SharedMemoryFault:  # it has ended already, right after its answer
            self.close()
            raise ProcessDied from None
        return replace(update, payload=payload)

    def is_read(self, update: EncodedUpdate) -> None:
        """Note it for that process, which is told with its next question."""
        if update.request.memory:
            self._read.append(update.request.transfer)

    def close(self) -> None:
        """It ends by itself, once it has done what it does."""
        self._end.close()

    def kill(self) -> None:
        # No other process has its number yet: it is another process's child, which waits for it as it forks the next.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)


class LocalPool(TrainingPool[LocalProcess]):
    """Training processes of this machine."""

    def __init__(self, task: FederatedTask, settings: PoolSettings, *, size: int) -> None:
        """Fork the process that they are forked from: before this process has DDS, and while few threads run in it.

        Raises:
            ConfigError: this system has no fork, or this process is connected to Ray.
        """
        if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
            raise ConfigError("virtual clients are trained in forked processes, and this system has no fork: use Linux")
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            raise ConfigError(
                "pool=processes: this process is connected to Ray, whose calls may wait for ever once it has been "
                "forked. Call ray.shutdown() first, or set pool=ray"
            )
        super().__init__(size)
        self._flag = StopFlag()
        self._turn = asyncio.Lock()
        own, other = socket.socketpair()
        self._template = os.fork()
        if not self._template:
            own.close()
            run_template(task, settings, self._flag, other)
        other.close()
        own.setblocking(False)
        self._control = own

    async def open(self, client_id: int, num_clients: int) -> None:
        async with self._turn:
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_sendall(self._control, b"p")
                await send_soon(self._control, Parcel({"client_id": client_id, "num_clients": num_clients}))
                answer = await receive_soon(self._control)
            except (ChannelClosed, OSError):
                raise TrainingFailed("the process that loads the data has ended: is there enough memory?") from None
        check_prepared(answer.head)
        while len(self._all) < self.size:
            self._add(await self._start())

    async def _start(self) -> LocalProcess:
        own, other = socket.socketpair()
        own.setblocking(False)
        try:
            async with self._turn, asyncio.timeout(START_S):
                socket.send_fds(self._control, [b"f"], [other.fileno()])
                answer = await receive_soon(self._control)
        except (ChannelClosed, OSError, TimeoutError):
            own.close()
            raise TrainingFailed("no training process can be started any more: is there enough memory?") from None
        except BaseException:  # the run ends meanwhile
            own.close()
            raise
        finally:
            other.close()
        for process, code in answer.head["ended"].items():
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.warning("training process died", process=int(process), end=end, effect="replaced")
        return LocalProcess(own, int(answer.head["process"]))

    def _stop(self, number: int) -> None:
        self._flag.up_to = number

    async def close(self) -> None:
        for one in self._all:
            one.close()
        self._control.close()
        try:
            async with asyncio.timeout(END_S):
                await asyncio.to_thread(os.waitpid, self._template, 0)
        except ChildProcessError:
            pass  # somebody else has waited for it: its number may be another process's by now
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._template, signal.SIGKILL)
