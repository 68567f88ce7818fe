"""A topic on its way in, between the receive thread and the loop."""

from __future__ import annotations

from collections.abc import Callable

from gradbus.runtime.dds.participant import Reader
from gradbus.runtime.wire.frames import Frame
from gradbus.runtime.wire.messages import Message


class Channel:
    """One topic on its way in. The thread counts what it took, the loop what was consumed; nobody needs a lock."""

    def __init__(
        self, reader: Reader, deliver: Callable[[list[Message]], None], *, take: Callable[[Frame], None] | None = None
    ) -> None:
        """``deliver`` gets messages on the loop; ``take``, where given, frames one by one on the receive thread."""
        self.reader = reader
        self.deliver = deliver
        self.take = take
        self.limit = reader.topic.inbox
        self.taken = 0  # written by the thread
        self.consumed = 0  # written by the loop
        self.paused = False  # written by the thread
        self.number = 0  # in the wait set: this one for data, the next one for status
        self.sources: set[int] = set()

    @property
    def room(self) -> int:
        return self.limit - (self.taken - self.consumed)
