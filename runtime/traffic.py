"""How many bytes of payload a process exchanges: the one count that statistics, profiles, reports and summaries share.

Every bus has a :class:`Traffic`, and each group on it one of its own that adds to it. So groups that follow one another
(the generations of an elastic run) and groups beside each other (workers with aggregators, or with parameter servers)
are all in the count of their bus.

Counted is payload: tensors and objects as they are sent, that is after compression. Not counted are the headers and
names of frames, encryption, frames that are sent again, and what has no payload: hellos, probes, RTS, CTS and ACK. Data
counts the same whether it travels over DDS or through shared memory. What goes to all other ranks at once counts once
going out, and once at each receiver coming in.
"""

# ruff: noqa: SLF001 - a count and those that it is part of are one idea

from __future__ import annotations

import threading


class Traffic:
    """Payload bytes so far. Any thread may count and read.

    Attributes:
        sent_bytes: handed to the transport, also for collectives that have failed since.
        received_bytes: put in their place, each frame once. What comes for a collective that has ended is not counted.
    """

    __slots__ = ("_lock", "_parent", "received_bytes", "sent_bytes")

    def __init__(self, parent: Traffic | None = None) -> None:
        """``parent``: gets everything, too."""
        self._parent = parent
        self._lock: threading.Lock = threading.Lock() if parent is None else parent._lock
        self.sent_bytes = 0
        self.received_bytes = 0

    def count_sent(self, size_bytes: int) -> None:
        """Add what was handed to the transport."""
        one: Traffic | None = self
        with self._lock:
            while one is not None:
                one.sent_bytes += size_bytes
                one = one._parent

    def count_received(self, size_bytes: int) -> None:
        """Add what has arrived."""
        one: Traffic | None = self
        with self._lock:
            while one is not None:
                one.received_bytes += size_bytes
                one = one._parent
