"""Requests of this process that wait for their answers, each in a thread of its own."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from gradbus.torch.store_messages import Answer


@dataclass(slots=True, eq=False)
class Slot:
    """Where one thread waits.

    Attributes:
        number: of its request. answer: set before ``event``; None: there will be none.
    """

    number: int
    event: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None


class Pending:
    """All that wait. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._slots: dict[int, Slot] = {}  # in the order of their numbers
        self.ended = False

    def add(self) -> Slot:
        """A new request."""
        with self._lock:
            slot = Slot(next(self._numbers))
            self._slots[slot.number] = slot
            if self.ended:
                slot.event.set()
            return slot

    def remove(self, slot: Slot) -> None:
        """Its answer has come or is not waited for any more."""
        with self._lock:
            self._slots.pop(slot.number, None)

    def up_to(self, slot: Slot) -> list[int]:
        """The numbers that wait, from the oldest to this one."""
        with self._lock:
            return [number for number in self._slots if number <= slot.number]

    def give(self, answer: Answer) -> None:
        """Wake who waits for it, if anybody does."""
        with self._lock:
            slot = self._slots.get(answer.id)
        if slot is not None and not slot.event.is_set():
            slot.answer = answer
            slot.event.set()

    def end(self) -> None:
        """Let nobody wait any more."""
        with self._lock:
            self.ended = True
            slots = list(self._slots.values())
        for slot in slots:
            slot.event.set()
