"""Relays and sessions of Zenoh on loopback, and a process elsewhere with a transport on Zenoh."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import zenoh
from channel_node import ChannelNode, Process, serve
from ports import free_port
from tcp_proxy import TcpProxy

from gradbus.runtime.transport.zenoh.relay_settings import RELAY_SETTINGS, queue_settings
from gradbus.runtime.transport.zenoh.transport import ZenohTransport
from gradbus.runtime.transport.zenoh.zenoh_session import ZenohSession

LEASE_S = 60.0


def session_config(mode: str, port: int, lease_s: float = LEASE_S) -> zenoh.Config:
    """Return the configuration of a session on a port of 127.0.0.1."""
    more = RELAY_SETTINGS if mode == "router" else queue_settings(lease_s)
    here = [f"tcp/127.0.0.1:{port}"]
    config = zenoh.Config()
    for name, value in {
        "mode": mode,
        "listen/endpoints" if mode == "router" else "connect/endpoints": here,
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "transport/shared_memory/enabled": False,
        "transport/link/tx/lease": round(1e3 * lease_s),
        "transport/link/tx/keep_alive": 4,
        "transport/link/tx/queue/congestion_control/block/wait_before_close": 10_000_000,
        "connect/retry": {"period_init_ms": 50, "period_max_ms": 200, "period_increase_factor": 1.5},
        **more,
    }.items():
        config.insert_json5(name, json.dumps(value))
    return config


class Relay:
    """A router in a process of its own, as it is in use: the sessions of one process share the threads that receive, so
    a router that waits for one of them there would wait for itself.

    Attributes:
        port: where it listens.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, on the same port each time."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, "relay", str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the relay has not started"

    def kill(self) -> None:
        """End it without a goodbye."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10.0)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()

    def stop(self) -> None:
        """Have it stand still."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """Let it run again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def run_relay(port: int) -> None:
    """Run a router until the input ends."""
    router = zenoh.open(session_config("router", port))
    print("ready", flush=True)
    sys.stdin.read()
    router.close()


@dataclass(frozen=True)
class LoopbackReach:
    """Describes who can be met on a relay of loopback."""

    leaves_machine: bool = False
    is_exposed: bool = False
    meeting_place: str = "the relay of the test"
    attachment: str = "lo"

    def hint(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        return "Start them"

    def advice(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        return "Start them"


def transport_at(port: int, job: str, lease_s: float = LEASE_S, *, loss: float = 0.0) -> ZenohTransport:
    """Open a transport whose relay is at a port. ``loss``: share of its messages, each way, that get lost."""
    session = ZenohSession(zenoh.open(session_config("client", port, lease_s)))
    if loss:
        session = LossySession(session, loss)  # type: ignore[assignment]
    return ZenohTransport(session, job, reach=LoopbackReach(), lease_s=lease_s)


class LossySession:
    """Loses a share of messages, each way, by a seed."""

    def __init__(self, below: ZenohSession, loss: float) -> None:
        self._below = below
        self._loss = loss
        self._sent, self._got = random.Random(1), random.Random(2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def publish(self, key: str, message: bytes, *, urgent: bool, apart: bool = False) -> bool:
        return self._sent.random() < self._loss or self._below.publish(key, message, urgent=urgent, apart=apart)

    def subscribe(self, expression: str, received: Callable[[str, bytes], None], *, link: int = 0) -> Any:
        def some(key: str, message: bytes) -> None:
            if self._got.random() >= self._loss:
                received(key, message)

        return self._below.subscribe(expression, some, link=link)


class ZenohNode(ChannelNode):
    """A process with a transport on Zenoh, from the side of the test, behind a proxy of its own."""

    def __init__(self, port: int, job: str, lease_s: float, *, loss: float = 0.0) -> None:
        self._proxy = TcpProxy(port)
        spec = json.dumps({"port": self._proxy.port, "job": job, "lease_s": lease_s, "loss": loss})
        self._start([sys.executable, __file__, spec])

    def cut_off(self) -> None:
        """Let nothing pass, as if a cable were pulled."""
        self._proxy.hold()

    def reconnect(self) -> None:
        """Let everything pass again."""
        self._proxy.let_pass()

    def break_link(self, *, refuse: bool = False) -> None:
        """Break its connection, as a router on the way does. ``refuse``: until :meth:`accept`."""
        self._proxy.break_links(refuse=refuse)

    def accept(self) -> None:
        """Let it connect again."""
        self._proxy.accept()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._proxy.close()


def _no_cut(is_cut: bool) -> None:
    raise AssertionError("a proxy does that")


def main() -> None:
    """Serve with a transport on Zenoh, or be a relay."""
    if sys.argv[1] == "relay":
        run_relay(int(sys.argv[2]))
        return
    spec = json.loads(sys.argv[1])
    serve(Process(transport_at(spec["port"], spec["job"], spec["lease_s"], loss=spec["loss"]), _no_cut))


if __name__ == "__main__":
    main()
