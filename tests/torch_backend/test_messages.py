"""Messages between ranks that are joined in memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from memory_link import MemoryNet

from gradbus.torch.calls import CollectiveCalls
from gradbus.torch.point_to_point import Messages, message_name
from gradbus.torch.work import WorkQueue


class TellingLock:
    """A lock that tells when a thread asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked: dict[threading.Thread, threading.Event] = {}

    def __enter__(self) -> None:
        if told := self.asked.get(threading.current_thread()):
            told.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_what_comes_while_those_that_wait_are_looked_through_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = MemoryNet(3, inline=1.0)
    queue = WorkQueue(net.engines[0])
    messages = Messages(queue.engine, queue, CollectiveCalls(0, 3))
    net.start(CollectiveCalls(1, 3).send(torch.arange(4.0), 0).operations[0], message_name(1, 0, 7))

    lock, has_come, has_looked = TellingLock(), queue.engine.has_come, threading.Event()

    def receive() -> None:
        net.settle()
        has_looked.set()

    receive_thread = threading.Thread(target=receive)
    lock.asked[receive_thread] = has_looked  # it has looked, or waits for its turn to look

    def nothing_is_here_and_then_it_comes(*message: Any) -> bool:
        found = has_come(*message)
        if receive_thread.ident is None:
            assert not found
            receive_thread.start()
            assert has_looked.wait(10.0)
        return found

    monkeypatch.setattr(messages, "_lock", lock)  # nothing else shows that a thread waits for its turn
    monkeypatch.setattr(queue.engine, "has_come", nothing_is_here_and_then_it_comes)
    received = torch.zeros(4)
    work = messages.receive_from_anyone(received, 7, 60.0)
    receive_thread.join(10.0)
    assert work.is_completed()
    assert (work.source_rank(), received.tolist()) == (1, [0.0, 1.0, 2.0, 3.0])
