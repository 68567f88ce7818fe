"""The network in memory: what a matched pair gets, and what it may lose when one side does not know the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fault_simulation.kernel import CLOCK, START_S, VirtualProcess, now_s
from fault_simulation.memory import virtual_network
from fault_simulation.trace import Trace
from fault_simulation.virtual_loop import VirtualLoop

from gradbus.runtime.transport.channels import CHANNELS
from gradbus.runtime.transport.memory.transport import MemoryTransport
from gradbus.runtime.wire.messages import ClientUpdate, TrainCmd


class Silent:
    """Observes a loop in which nothing goes wrong."""

    def before_step(self, steps: int) -> None:
        pass

    def on_loop_error(self, context: dict[str, Any]) -> None:
        raise AssertionError(context)


class Scene:
    """A writer on one machine, and a reader on another."""

    def __init__(self, seed: int, kind: type[Any], **settings: Any) -> None:
        self.loop = VirtualLoop(Silent())
        self.network = virtual_network(self.loop, seed, Trace())
        for name, value in settings.items():
            setattr(self.network, name, value)
        self.channel = CHANNELS[kind]
        self.source, self.target = self._process("controller", 0), self._process("client-0", 1)
        self.writer = MemoryTransport(self.network, self.source, "job").outlet(self.channel)
        self.reader = MemoryTransport(self.network, self.target, "job").inlet(self.channel)
        self.got: list[int] = []

    def _process(self, role: str, machine: int) -> VirtualProcess:
        world: Any = SimpleNamespace(seed=0, loop=self.loop, network=self.network)
        return VirtualProcess(world, role, 1, machine=machine, pid=1001 + machine)

    def write(self, *numbers: int) -> None:
        for number in numbers:
            is_command = self.channel is CHANNELS[TrainCmd]
            fields, parts = ((number, 0, 0, 0.0, 0), ()) if is_command else ((0, number, 0), (b"x",))
            assert self.writer.write(fields, parts)

    def pass_time(self, seconds: float) -> None:
        over: list[bool] = []
        self.loop.call_later(seconds, over.append, True)
        assert self.loop.run_until(lambda: bool(over), now_s() + seconds + 1.0)

    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)
        self.got += [sample.round_id for sample, _ in self.reader.take(100)]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLOCK, "now_s", START_S)


def outcomes(scene_of: Callable[[int], Scene], play: Callable[[Scene], None]) -> set[tuple[int, ...]]:
    """What arrives, over many seeds."""
    found = set()
    for seed in range(40):
        CLOCK.now_s = START_S
        scene = scene_of(seed)
        scene.wait(1.0)
        play(scene)
        found.add(tuple(scene.got))
    return found


def test_a_matched_pair_gets_each_sample_once_and_in_order_however_many_packets_are_lost() -> None:
    def play(scene: Scene) -> None:
        scene.write(*range(1, 11))
        scene.wait(30.0)

    found = outcomes(lambda seed: Scene(seed, ClientUpdate, loss=0.5, jitter_s=0.5), play)
    assert found == {tuple(range(1, 11))}


def test_a_partition_shorter_than_the_lease_only_delays() -> None:
    def play(scene: Scene) -> None:
        scene.network.cut(0, 1, 3.0)
        scene.write(1, 2)
        scene.wait(2.0)
        assert scene.got == []
        scene.wait(10.0)

    assert outcomes(lambda seed: Scene(seed, ClientUpdate, lease_s=10.0), play) == {(1, 2)}


def test_a_partition_longer_than_the_lease_loses_what_is_volatile_and_brings_what_is_retained() -> None:
    def play(scene: Scene) -> None:
        scene.network.cut(0, 1, 10.0)
        scene.write(1, 2)
        scene.wait(30.0)

    assert outcomes(lambda seed: Scene(seed, ClientUpdate, lease_s=4.0), play) == {()}
    assert outcomes(lambda seed: Scene(seed, TrainCmd, lease_s=4.0), play) == {(2,)}


def test_a_reader_that_alone_lost_its_writer_may_miss_what_is_volatile_and_has_the_newest_of_what_is_retained() -> None:
    def play(scene: Scene) -> None:
        scene.network.lose_one_side(scene.target, scene.source, 2.0)
        scene.write(1, 2)
        scene.wait(10.0)
        scene.write(3)
        scene.wait(10.0)

    assert outcomes(lambda seed: Scene(seed, ClientUpdate), play) == {(1, 2, 3), (3,)}
    assert outcomes(lambda seed: Scene(seed, TrainCmd), play) == {(2, 3)}


def test_a_full_reader_holds_up_its_writer_and_nothing_is_lost() -> None:
    scene = Scene(0, ClientUpdate)
    scene.wait(1.0)
    written = 0
    while scene.writer.write((0, written + 1, 0), (b"x",)) and written < 1000:
        written += 1
        scene.pass_time(0.01)
    assert scene.channel.reader_samples < written < 1000
    assert len(scene.reader.queue) == scene.channel.reader_samples
    assert scene.source.take_blocked_s() == scene.channel.block_s
    while len(scene.got) < written:
        before = len(scene.got)
        scene.wait(1.0)
        assert len(scene.got) > before
    assert scene.got == list(range(1, written + 1))


def test_a_dead_process_is_lost_at_once_on_its_machine_and_after_a_lease_elsewhere() -> None:
    scene = Scene(0, ClientUpdate, lease_s=4.0)
    scene.wait(1.0)
    assert scene.reader.peers()
    scene.source.dead, scene.source.ended_s = True, now_s()
    scene.network.ended(scene.source)
    scene.wait(1.0)
    assert scene.reader.peers()
    scene.wait(4.0)
    assert not scene.reader.peers()


def test_a_writer_knows_that_all_is_acknowledged_when_the_answer_to_its_last_sample_has_arrived() -> None:
    scene = Scene(0, ClientUpdate, base_s=0.5, jitter_s=0.0)
    scene.wait(1.0)
    assert scene.writer.is_acknowledged
    scene.write(1)
    scene.wait(0.9)
    assert (scene.got, scene.writer.is_acknowledged) == ([1], False)
    scene.wait(0.2)
    assert scene.writer.is_acknowledged


def test_a_writer_waits_for_a_reader_of_a_dead_process_until_it_has_lost_it() -> None:
    scene = Scene(0, ClientUpdate)
    scene.wait(1.0)
    scene.target.dead = True
    scene.network.ended(scene.target)
    scene.write(1)
    scene.wait(1.0)
    assert not scene.writer.is_acknowledged
    scene.wait(scene.network.lease_s + 1.0)
    assert scene.writer.is_acknowledged
