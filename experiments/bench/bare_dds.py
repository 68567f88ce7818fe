"""Cyclone DDS alone, as a reference for the bus: an echo in a process of its own.

The bus's own calls into libddsc with samples of the same size, and nothing around them: no encryption, no frames, no
threads but DDS's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Self

from gradbus.experiments.bench.processes import LEASE_S, Processes
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.channels import CHANNELS
from gradbus.runtime.transport.dds.participant import Participant, Reader, WaitSet, Writer
from gradbus.runtime.wire.messages import Control

_DOMAIN = 25
_TIMEOUT_S = 20.0
_MEET_S = 0.05  # between two first samples, while the other side has not found this one


class _End:
    def __init__(self, participant: Participant, outgoing: str, incoming: str) -> None:
        topic = CHANNELS[Control]
        self._writer: Writer = participant.outlet(replace(topic, name=f"train/{outgoing}"))
        self._reader: Reader = participant.inlet(replace(topic, name=f"train/{incoming}"))
        self._wait_set = WaitSet(participant)
        self._wait_set.attach(self._reader.arrivals, 1)

    def send(self, sample: bytes) -> None:
        self._writer.write((), (sample,))

    def receive(self, timeout_s: float = _TIMEOUT_S) -> int:
        """Wait for samples. Returns the size of the last one; -1: none has come."""
        self._wait_set.wait(timeout_s)
        taken = self._reader.take(16)
        return len(self._reader.octets(taken[-1][0])) if taken else -1


@contextmanager
def _opened(job: str, outgoing: str, incoming: str) -> Iterator[_End]:
    participant = Participant(domain_id=_DOMAIN, partition=job, network=NetworkConfig(lease_s=LEASE_S))
    try:
        yield _End(participant, outgoing, incoming)
    finally:
        participant.close()


class DdsEcho:
    """The near end. Use it as a context manager; it blocks, so nothing else should have to run meanwhile."""

    def __enter__(self) -> Self:
        job = f"bench-dds-{os.getpid()}"
        with ExitStack() as stack:
            stack.enter_context(Processes()).start("DDS echo", _serve, job)
            self._end = stack.enter_context(_opened(job, "ping", "pong"))
            until_s = time.monotonic() + _TIMEOUT_S
            while self._end.receive(_MEET_S) < 0:
                if time.monotonic() > until_s:
                    raise TimeoutError("the other end of the echo has not come")
                self._end.send(b"hello")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.send(b"")  # the other end ends
        self._stack.close()

    def round_trip_s(self, size: int) -> float:
        """Seconds until so many bytes are there and have come back."""
        sample = bytes(size)
        began_s = time.perf_counter()
        self._end.send(sample)
        while self._end.receive() != size:  # an answer to one of the first samples
            pass
        return time.perf_counter() - began_s


def _serve(job: str) -> None:
    with _opened(job, "pong", "ping") as end:
        while size := end.receive():
            if size > 0:
                end.send(bytes(size))
