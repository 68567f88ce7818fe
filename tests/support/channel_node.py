"""A process with DDS readers and writers that does one thing at a time as it is told: for tests of DDS itself.

:class:`ChannelNode` starts one and talks to it, a line of JSON each way. Samples are numbers, with padding behind them.
"""

from __future__ import annotations

import ctypes as ct
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.api import Transport
from gradbus.runtime.transport.channels import Channel as TransportChannel
from gradbus.runtime.transport.dds import libddsc
from gradbus.runtime.transport.dds.participant import Participant

ANSWER_S = 60.0  # within which any answer comes: a machine may stand still
_NUMBER = struct.Struct("<I")
_FOR_EVER = (1 << 63) - 1  # DDS_INFINITY, in nanoseconds
# A function of Cyclone's for its own tests: the domain neither takes packets nor sends any.
_set_deafmute = libddsc.function("dds_domain_set_deafmute", ct.c_int32, ct.c_int32, ct.c_bool, ct.c_bool, ct.c_int64)


@dataclass(frozen=True)
class Channel:
    """Holds what a channel of :mod:`gradbus.runtime.transport.channels` tells DDS; samples are frames."""

    name: str
    retained: bool = False
    keep_last: bool = False
    reader_samples: int = 0
    overwrites: bool = False
    block_s: float = 0.05

    def opened(self) -> TransportChannel:
        """Return the channel to open."""
        return TransportChannel(
            f"test/{self.name}",
            "Frame",
            self.retained,
            self.keep_last,
            self.reader_samples,
            0,
            self.block_s,
            False,
            lambda sample: sample,
            overwrites=self.overwrites,
        )


class ChannelNode:
    """One process, from the side of the test. Leaving the block kills it.

    Raises (all methods):
        AssertionError: it has not answered in time, or has ended.
    """

    def __init__(self, *, domain: int, job: str, prefix: tuple[str, ...] = (), **network: Any) -> None:
        """``prefix``: a command that starts it elsewhere. ``network``: of :class:`.NetworkConfig`."""
        spec = json.dumps({"domain": domain, "job": job, "network": network})
        self._start([*prefix, sys.executable, __file__, spec])

    def _start(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._ask("ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        readable, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        assert readable, f"no answer to {what} within {ANSWER_S:g} s"
        line = self._process.stdout.readline()
        assert line, f"the process ended at {what}: exit code {self._process.wait(5.0)}"
        return json.loads(line)

    def open_writer(self, channel: Channel, *, key: str = "", retained_samples: int = 1) -> None:
        """Make a writer, which is named by ``key``, by default as its channel."""
        self._ask("writer", key=key or channel.name, channel=vars(channel), retained_samples=retained_samples)

    def open_reader(self, channel: Channel, *, key: str = "") -> None:
        """Make a reader."""
        self._ask("reader", key=key or channel.name, channel=vars(channel))

    def write(self, key: str, *numbers: int, size: int = 64, until_taken: bool = False) -> list[bool]:
        """Write samples of ``size`` bytes, and return for each whether DDS took it. ``until_taken``: one that it does
        not take is written again."""
        answer: list[bool] = self._ask("write", key=key, numbers=numbers, size=size, until_taken=until_taken)
        return answer

    def write_by_turns(self, keys: list[str], *numbers: int, sizes: list[int]) -> None:
        """Write each number with the first of the writers, then with the second, and so on, until DDS takes it."""
        self._ask("turns", keys=keys, numbers=numbers, sizes=sizes)

    def take(self, key: str) -> list[int]:
        """Return the numbers of the samples that are there, in their order."""
        return [number for number, _ in self.take_with_sources(key)]

    def take_with_sources(self, key: str) -> list[tuple[int, int]]:
        """Return the same with the handles of their writers."""
        return [(number, source) for number, source in self._ask("take", key=key)]

    def take_all(self, keys: list[str]) -> list[tuple[str, int]]:
        """Return what comes on several readers in the order in which it comes, until nothing has come for 0.5 s."""
        return [(key, number) for key, number in self._ask("all", keys=keys, quiet_s=0.5)]

    def wait_for(self, key: str, last: int, timeout_s: float = 30.0) -> list[int]:
        """Take until the sample ``last`` is there, and return all numbers in their order."""
        taken: list[int] = []
        _until(lambda: taken.extend(self.take(key)) or last in taken, timeout_s, lambda: f"{key}: {last} of {taken}")
        return taken

    def matched(self, key: str) -> int:
        """Return how many readers or writers of the other side are matched."""
        answer: int = self._ask("matched", key=key)
        return answer

    def wait_matched(self, key: str, count: int, timeout_s: float = 30.0) -> None:
        """Wait until exactly so many are matched."""
        _until(
            lambda: self.matched(key) == count, timeout_s, lambda: f"{key}: matched {self.matched(key)}, not {count}"
        )

    def wait_for_acks(self, key: str, timeout_s: float = 30.0) -> bool:
        """Return whether all matched readers have acknowledged all samples of a writer within this time."""
        answer: bool = self._ask("acks", key=key, timeout_s=timeout_s)
        return answer

    def delete(self, key: str) -> None:
        """Delete a reader or a writer."""
        self._ask("delete", key=key)

    def stop(self) -> None:
        """Stop the process, as a debugger or a swapping machine does."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until all of its threads stand still

    def go_on(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    def cut_off(self) -> None:
        """Let no packet of DDS in or out of the process."""
        self._ask("cut", is_cut=True)

    def reconnect(self) -> None:
        """Let packets in and out again."""
        self._ask("cut", is_cut=False)

    def kill(self) -> None:
        """Kill it: nobody is told."""
        self._process.kill()
        self._process.wait(10.0)


def _until(condition: Callable[[], object], timeout_s: float, state: Callable[[], str]) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"not within {timeout_s:g} s: {state()}"
        time.sleep(0.005)


@dataclass
class Process:
    """The process itself. ``cut`` lets nothing pass between it and others, or everything again."""

    participant: Transport
    set_cut: Callable[[bool], None]
    endpoints: dict[str, Any] = field(default_factory=dict)

    def ready(self) -> bool:
        return True

    def writer(self, key: str, channel: dict[str, Any], retained_samples: int) -> None:
        topic = Channel(**channel).opened()
        self.endpoints[key] = self.participant.outlet(topic, retained_samples=retained_samples)

    def reader(self, key: str, channel: dict[str, Any]) -> None:
        self.endpoints[key] = self.participant.inlet(Channel(**channel).opened())

    def write(self, key: str, numbers: list[int], size: int, until_taken: bool) -> list[bool]:
        return [self._write(key, number, size, until_taken) for number in numbers]

    def turns(self, keys: list[str], numbers: list[int], sizes: list[int]) -> None:
        for number in numbers:
            for key, size in zip(keys, sizes, strict=True):
                self._write(key, number, size, until_taken=True)

    def _write(self, key: str, number: int, size: int, until_taken: bool) -> bool:
        writer = self.endpoints[key]
        parts, until_s = (_NUMBER.pack(number), bytes(size - _NUMBER.size)), time.monotonic() + ANSWER_S / 2
        while not (taken := writer.write((), parts)) and until_taken and time.monotonic() < until_s:
            pass  # each write waits for block_s
        return taken

    def take(self, key: str) -> list[tuple[int, int]]:
        reader = self.endpoints[key]
        found: list[tuple[int, int]] = []
        while taken := reader.take(16):
            samples = [(reader.decode(raw), handle) for raw, handle in taken]
            found += [(_NUMBER.unpack_from(sample.data)[0], handle) for sample, handle in samples if sample is not None]
        return found

    def all(self, keys: list[str], quiet_s: float) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        quiet_from_s = time.monotonic()
        while time.monotonic() < quiet_from_s + quiet_s:
            taken = [(key, number) for key in keys for number, _ in self.take(key)]
            if taken:
                found, quiet_from_s = found + taken, time.monotonic()
        return found

    def matched(self, key: str) -> int:
        self.endpoints[key].refresh()
        return self.endpoints[key].matched

    def acks(self, key: str, timeout_s: float) -> bool:
        writer = self.endpoints[key]
        return writer.wait_for_acks(timeout_s)

    def cut(self, is_cut: bool) -> None:
        self.set_cut(is_cut)

    def delete(self, key: str) -> None:
        self.endpoints.pop(key).close()


def serve(process: Process) -> None:
    """Do what each line asks for until the input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(process, asked.pop("what"))(**asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    process.participant.close()


def main() -> None:
    """Serve with a participant."""
    spec = json.loads(sys.argv[1])
    network = NetworkConfig(shared_memory=False, **spec["network"])
    participant = Participant(domain_id=spec["domain"], partition=spec["job"], network=network)

    def set_cut(is_cut: bool) -> None:
        code = _set_deafmute(libddsc.handle_of(participant.entity), is_cut, is_cut, _FOR_EVER)
        assert code == libddsc.RETCODE_OK, f"dds_domain_set_deafmute returned {code}"

    serve(Process(participant, set_cut))


if __name__ == "__main__":
    main()
