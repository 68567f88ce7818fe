"""What the training processes of one machine do, and the one that they are forked from.

The *template* is forked from the user's process before that has DDS, so that it has the task without a copy: any
object, from a notebook as well. It loads the data once and forks the training processes, which share that memory. It
has one thread and no DDS: a training process that has died is replaced by another fork of it, at any time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

import torch

from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.virtual.channel import ChannelClosed, Parcel, receive, send
from gradbus.actors.virtual.client_trainer import ClientTrainer, PoolSettings, open_state, prepare_task
from gradbus.runtime.forks import die_with_parent
from gradbus.runtime.user_errors import traceback_with_place


class StopFlag:
    """A number in memory that the host and its training processes share: work up to it is no longer wanted."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    @property
    def up_to(self) -> int:
        """The number of the last work that is not wanted."""
        return int(struct.unpack("<Q", self._memory[:8])[0])

    @up_to.setter
    def up_to(self, number: int) -> None:
        self._memory[:8] = struct.pack("<Q", number)


def _serve(task: FederatedTask, settings: PoolSettings, stop: StopFlag, host: socket.socket) -> None:
    """The life of a training process: answer the host's messages, one after the other, until it closes its end."""
    trainer = ClientTrainer(task, settings, lambda: stop.up_to)

    def open_kept(client_id: int, to_write: bool) -> ClientStateStore:
        return open_state(settings.state_dir, client_id, to_write=to_write)

    with contextlib.suppress(ChannelClosed):
        while True:
            parcel = receive(host)
            for transfer in parcel.head.get("read", ()):
                trainer.release(transfer)
            if "with" in parcel.head:
                send(host, trainer.answer(parcel.head["do"], parcel.head["with"], open_kept))
            else:
                trainer.begin(parcel.head, parcel.parts)


class _Template:
    """Loads the data, and forks."""

    def __init__(self, task: FederatedTask, settings: PoolSettings, stop: StopFlag, host: socket.socket) -> None:
        self._task = task
        self._settings = settings
        self._stop = stop
        self._host = host
        self._children: set[int] = set()

    def serve(self) -> None:
        """Until the host closes its end; then no training process is left."""
        try:
            while True:
                try:
                    data, files, _, _ = socket.recv_fds(self._host, 1, 1)
                except ConnectionError:  # it has closed its end before it has read the last answer
                    return
                if not data:
                    return
                if files:
                    self._fork(files[0])
                else:
                    self._prepare(**receive(self._host).head)
        except ChannelClosed:
            pass
        finally:
            for child in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)

    def _prepare(self, client_id: int, num_clients: int) -> None:
        """Load data, so that the training processes share it."""
        found = prepare_task(self._task, client_id, num_clients, full_traceback=self._settings.full_traceback)
        send(self._host, Parcel(found))

    def _fork(self, file: int) -> None:
        ended = {}
        for child in list(self._children):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                ended[str(child)] = os.waitstatus_to_exitcode(status)
                self._children.discard(child)
        arm = die_with_parent()  # a client's code may hang, and then it does not notice that the host is gone
        child = os.fork()
        if not child:
            if arm is not None:
                arm()
            self._children.clear()
            self._host.close()
            own = socket.socket(fileno=file)
            run_and_exit(lambda: _serve(self._task, self._settings, self._stop, own))
        os.close(file)
        self._children.add(child)
        send(self._host, Parcel({"process": child, "ended": ended}))


def run_template(task: FederatedTask, settings: PoolSettings, stop: StopFlag, host: socket.socket) -> None:
    """The life of the template, in a process that was just forked for it. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the user's process, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # where the user's process ignores it, nobody learns how a child ended
    torch.set_num_threads(settings.threads)
    run_and_exit(_Template(task, settings, stop, host).serve)


def run_and_exit(function: Callable[[], Any]) -> None:
    """Call it, and end this process without what the user's process would do at its end."""
    code = 1
    try:
        function()
        code = 0
    except BaseException as error:  # nothing may return to what called in the process that this one was forked from
        os.write(2, f"gradbus: a training process has failed: {traceback_with_place(error, full=True)}\n".encode())
    finally:
        os._exit(code)
