"""A true relay that is killed, or stands still, and readers that do: nothing is lost, nothing arrives twice."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from channel_node import Channel
from tcp_proxy import TcpProxy
from transport_scenes import LONG_LEASE_S, ZenohScene, take, write
from turns import have_the_machine
from zenoh_node import Relay, transport_at

from gradbus.runtime.transport.api import Inlet, Outlet
from gradbus.runtime.transport.channels import CHANNELS, WINDOW_BYTES, ToController

RESTARTS = int(os.environ.get("RELAY_KILLS", "8"))  # more of them in the nightly part
PATIENCE_S = 60.0
VOLATILE = Channel("volatile", block_s=0.5)
BOUNDED = Channel("bounded", reader_samples=16, block_s=0.5)
RETAINED = Channel("retained", retained=True, block_s=0.5)
LARGE_BYTES = 1 << 20
SLOW_BYTES_S = 1e6 / 8  # a link of 1 Mbit/s: it takes 8 s for each large sample
HELD_UP_S = 4.0  # a second or two, by DROP_LARGE_AFTER_S

pytestmark = pytest.mark.slow


@pytest.fixture
def relay() -> Iterator[Relay]:
    have_the_machine()  # relays start, and links come back, within seconds only where processors are free
    with Relay() as relay:
        yield relay


@pytest.fixture
def scene(relay: Relay) -> Iterator[ZenohScene]:
    made = ZenohScene(relay.port)
    yield made
    made.close()


class Stream:
    """Writes numbers, one after the other, on a thread of its own, until it is stopped.

    Attributes:
        written: how many were accepted.
    """

    def __init__(self, outlet: Outlet, size: int) -> None:
        self.written = 0
        self._outlet, self._size = outlet, size
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            self.written += write(self._outlet, self.written, size=self._size)[0]
            self._ends.wait(0.002)

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(PATIENCE_S)


def joined(scene: ZenohScene, channel: Channel) -> tuple[Outlet, Inlet]:
    outlet, inlet = scene.open().outlet(channel.opened()), scene.open().inlet(channel.opened())
    scene.until(lambda: outlet.peers() and inlet.peers(), "they match")
    return outlet, inlet


@pytest.mark.timeout(120 + 4 * RESTARTS)
def test_a_relay_that_is_killed_again_and_again_loses_nothing_and_repeats_nothing(
    relay: Relay, scene: ZenohScene
) -> None:
    pairs = [joined(scene, VOLATILE), joined(scene, BOUNDED)]
    peers = [(outlet.peers(), inlet.peers()) for outlet, inlet in pairs]
    streams = [Stream(outlet, size) for (outlet, _), size in zip(pairs, (64, 200_000), strict=True)]
    found: list[list[int]] = [[], []]

    def take_all() -> list[int]:
        for (_, inlet), numbers in zip(pairs, found, strict=True):
            numbers += take(inlet)
        return [len(numbers) for numbers in found]

    for _ in range(RESTARTS):
        relay.kill()
        marks = [stream.written for stream in streams]
        relay.start()
        scene.until(lambda marks=marks: all(a > b for a, b in zip(take_all(), marks, strict=True)), "it goes on")  # type: ignore[misc]
    for stream in streams:
        stream.stop()
    scene.until(lambda: take_all() == [stream.written for stream in streams], "all arrive")
    assert found == [list(range(stream.written)) for stream in streams]
    assert [(outlet.peers(), inlet.peers()) for outlet, inlet in pairs] == peers


def test_a_relay_that_stands_still_loses_nothing(relay: Relay, scene: ZenohScene) -> None:
    outlet, inlet = joined(scene, BOUNDED)
    relay.stop()
    accepted, began_s = 0, time.monotonic()
    while write(outlet, accepted, size=LARGE_BYTES) == [True]:
        accepted += 1
    assert 0 < accepted <= WINDOW_BYTES // LARGE_BYTES
    assert time.monotonic() - began_s < PATIENCE_S / 2  # each write waits for block_s at most
    relay.go_on()
    found: list[int] = []
    scene.until(lambda: found.extend(take(inlet)) or len(found) == accepted, "all arrive")
    assert found == list(range(accepted))


def test_a_stalled_link_that_is_full_of_data_accepts_control_messages(relay: Relay, scene: ZenohScene) -> None:
    source, target = scene.open(), scene.open()
    control = replace(VOLATILE.opened(), name="test/control", to_message=CHANNELS[ToController].to_message)
    channels = [control, *(replace(VOLATILE.opened(), name=f"test/data-{number}", block_s=0.1) for number in range(8))]
    (urgent, *outlets), (urgent_inlet, *inlets) = (list(map(one, channels)) for one in (source.outlet, target.inlet))
    scene.until(lambda: all(one.peers() for one in (urgent, *outlets, urgent_inlet, *inlets)), "they match")
    relay.stop()
    for outlet in outlets:
        while write(outlet, 1, size=LARGE_BYTES) == [True]:
            pass
    assert write(urgent, *range(20)) == [True] * 20
    relay.go_on()
    found: list[int] = []
    scene.until(lambda: found.extend(take(urgent_inlet)) or len(found) == 20, "all arrive")
    assert found == list(range(20))


def test_a_reader_that_stands_still_holds_up_no_other(scene: ZenohScene) -> None:
    remote = scene.remote(LONG_LEASE_S)
    remote.open_reader(VOLATILE)
    outlet, inlet = joined(scene, VOLATILE)
    scene.until(lambda: len(outlet.peers()) == 2, "both match")
    remote.stop()
    count = WINDOW_BYTES // LARGE_BYTES - 1
    assert all(write(outlet, *range(count), size=LARGE_BYTES))
    found: list[int] = []
    scene.until(lambda: found.extend(take(inlet)) or len(found) == count, "all arrive at the other one")
    remote.go_on()
    of_remote: list[int] = []
    scene.until(lambda: of_remote.extend(remote.take(VOLATILE.name)) or len(of_remote) == count, "and at this one")
    assert (found, of_remote) == (list(range(count)), list(range(count)))


def test_a_reader_on_a_slow_link_holds_up_no_other(relay: Relay, scene: ZenohScene) -> None:
    retained, count = replace(RETAINED.opened(), reader_samples=16), 15
    with TcpProxy(relay.port, downlink_bytes_s=SLOW_BYTES_S) as proxy:
        slow = transport_at(proxy.port, scene.job_name("one"))
        slow_inlet = slow.inlet(retained)
        outlet = scene.open().outlet(retained, retained_samples=16)
        inlets = [scene.open().inlet(retained) for _ in range(2)]
        scene.until(lambda: len(outlet.peers()) == 3 and slow_inlet.peers(), "all match")
        began_s, found = time.monotonic(), [0, 0]

        def all_arrive() -> bool:
            for number, inlet in enumerate(inlets):
                found[number] += len(take(inlet))
            return found == [count] * 2

        assert all(write(outlet, *range(count), size=LARGE_BYTES))
        scene.until(all_arrive, "all arrive at the others")
        assert time.monotonic() - began_s < HELD_UP_S
        slow.close()


def test_a_link_that_breaks_and_is_refused_for_a_while_loses_nothing(scene: ZenohScene) -> None:
    remote = scene.remote(LONG_LEASE_S)
    outlet = scene.open().outlet(VOLATILE.opened())
    remote.open_reader(VOLATILE)
    scene.until(lambda: outlet.peers(), "they match")
    written = 0
    for _ in range(5):
        remote.break_link(refuse=True)
        scene.until(lambda: not outlet.peers(), "the inlet is lost")
        assert all(write(outlet, *range(written, written + 10)))
        written += 10
        remote.accept()
        scene.until(lambda: outlet.peers(), "it comes back")
    found: list[int] = []
    scene.until(lambda: found.extend(remote.take(VOLATILE.name)) or len(found) >= written, "all arrive")
    assert found == list(range(written))
