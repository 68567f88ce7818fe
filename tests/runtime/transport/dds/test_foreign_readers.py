"""Readers of somebody without a key, in a process of its own, that take nothing: they do not hold up a sealed job."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import pytest
import torch
from bus_helpers import membership_of, participant_of, readers_in_dds, receiver_of
from dds_domains import new_domain
from identities import Identities
from patience import eventually, run
from structlog.testing import capture_logs
from torch_node import SceneRanks

import gradbus
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security import Security
from gradbus.runtime.security.job_key import new_job_key, write_secret_file
from gradbus.runtime.transport.api import Periodic
from gradbus.runtime.transport.dds import foreign_readers
from gradbus.runtime.transport.dds.libddsc import MatchedReader
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import ModelBlob

pytestmark = pytest.mark.slow
STRANGER = Path(__file__).parents[3] / "support" / "never_takes.py"
MODEL = bytes(4 << 20)
LEASE_S = 20.0  # a busy machine stands still for longer than a short one
_numbers = count()

# A member that only listens, until its standard input is closed.
MEMBER = """
import asyncio, sys
from pathlib import Path
import gradbus
from gradbus.runtime.transport.api import Periodic
from gradbus.runtime.wire.messages import ModelBlob
from gradbus.runtime.security import Security

async def main():
    job, domain, key, lease_s = sys.argv[1:]
    security = Security(level="psk", key_file=Path(key))
    place = {"job": job, "domain": int(domain), "lease_s": float(lease_s)}
    async with gradbus.connect(**place, security=security, load_actors=False) as bus:
        with bus.subscribe(ModelBlob) as inbox:
            print("listens", flush=True)
            drop = asyncio.create_task(forget(inbox))
            await asyncio.to_thread(sys.stdin.read)

async def forget(inbox):
    async for _ in inbox:
        pass

asyncio.run(main())
"""


@pytest.fixture
def place() -> dict[str, Any]:
    number = next(_numbers)
    return {"job": f"beset-{os.getpid()}-{number}", "domain": new_domain(), "lease_s": LEASE_S}


@pytest.fixture
def keyed(place: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    write_secret_file(tmp_path / "key", new_job_key().text)
    return {**place, "security": Security(level="psk", key_file=tmp_path / "key")}


@contextmanager
def stranger(domain: int, participants: int = 2) -> Iterator[subprocess.Popen[str]]:
    """Watches discovery already when this is entered."""
    command = [sys.executable, str(STRANGER), str(domain), str(participants)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "watching\n"
            yield process
        finally:
            process.kill()


async def takes(inbox: Any) -> None:
    async for _ in inbox:
        pass


async def sends_models(bus: Bus, rounds: int) -> list[float]:
    """How long each took to be sent."""
    taken_s = []
    for number in range(1, rounds + 1):
        began_s = time.monotonic()
        await bus.send_model(FrameKey(Kind.MODEL, 1, number, CONTROLLER, 1), MODEL)
        taken_s.append(time.monotonic() - began_s)
    return taken_s


async def goes_on_beside_strangers(one: Bus, other: Bus, process: subprocess.Popen[str], participants: int) -> None:
    """``one`` sends models to ``other``, and strangers read them, too."""
    with other.subscribe(ModelBlob) as inbox:
        taking = asyncio.create_task(takes(inbox))
        one.open_writer(ModelBlob)
        with capture_logs() as logs:
            # Where the two admit each other slowly, strangers hold that up, and are excluded before they read models.
            await one.matched(
                lambda: readers_in_dds(one, ModelBlob) > participants or one.rejected["foreign reader"] > 0,
                timeout_s=20,
            )
            taken_s = await sends_models(one, 20)  # five times as much as DDS keeps for readers that do not take it
            await eventually(lambda: readers_in_dds(one, ModelBlob) >= 1)
        taking.cancel()
    # The process is told when the first of them is excluded. Others that then hold up nothing any more may stay.
    assert 1 <= one.rejected["foreign reader"] <= participants
    told = [line for line in logs if line["event"] == "foreign readers excluded"]
    assert {(line["pid"], line["user"]) for line in told} == {(str(process.pid), os.getuid())}
    assert sum(line["participants"] for line in told) == one.rejected["foreign reader"]
    assert sum(taken_s) < 6 * foreign_readers.GRACE_S  # 0.1 s without strangers, and for ever without a cure


@pytest.mark.parametrize("transport", ["udp", "udp6"])
def test_a_stranger_that_takes_nothing_is_named_and_does_not_hold_up_a_job_with_a_key(
    keyed: dict[str, Any], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = f"<CycloneDDS><Domain><General><Transport>{transport}</Transport></General></Domain></CycloneDDS>"
    monkeypatch.setenv("CYCLONEDDS_URI", document)  # for the stranger, too

    async def main() -> None:
        with stranger(keyed["domain"], 3) as process:
            async with gradbus.connect(**keyed) as one, gradbus.connect(**keyed) as other:
                await goes_on_beside_strangers(one, other, process, 3)

    run(main())


def test_the_same_where_nodes_have_keys_of_their_own(place: dict[str, Any], tmp_path: Path) -> None:
    known = Identities(tmp_path, clients=1)

    def security(name: str) -> Security:
        said = known.security(name)
        return Security(**{key: Path(value) if key.endswith("_file") else value for key, value in said.items()})

    async def main() -> None:
        with stranger(place["domain"], 2) as process:
            async with (
                gradbus.connect(**place, security=security("server")) as server,
                gradbus.connect(**place, security=security("robot-0")) as client,
            ):
                await goes_on_beside_strangers(server, client, process, 2)

    run(main())


@pytest.mark.parametrize("level", ["psk", "identity"])
def test_collectives_over_dds_go_on_beside_a_stranger_and_blame_no_rank(
    place: dict[str, Any], tmp_path: Path, level: str
) -> None:
    network = NetworkConfig(lease_s=LEASE_S, shared_memory=False)
    where = {key: value for key, value in place.items() if key != "lease_s"} | {"network": network}
    write_secret_file(tmp_path / "key", new_job_key().text)
    known = Identities(tmp_path, clients=0)
    known.allow_rank("host-1", 1)
    there = asyncio.Event()

    def security(number: int) -> Security:
        if level == "psk":
            return Security(level="psk", key_file=tmp_path / "key")
        return Security(**known.rank_security("host-1" if number else "server", number))

    async def rank(bus: Bus, number: int, process: subprocess.Popen[str]) -> None:
        values = torch.full((1 << 20,), number + 1.0)
        async with gradbus.join_group(bus, rank=number, world=2, timeout_s=20, collective_timeout_s=20) as group:
            if number == 0:  # its reader of what goes to all, and of what goes to rank 0
                await asyncio.to_thread(reads, process, "train/frame")
                there.set()
            await there.wait()  # a machine that is busy takes its time
            await group.barrier("the stranger is there")
            for step in range(12):  # one of the first waits until the stranger is excluded
                assert torch.all(await group.all_reduce(f"step {step}", values, op="sum") == 3)
            left_s = time.monotonic()
        # It waits until the others have taken over its last words, and strangers do not: 5 s, if they count.
        assert time.monotonic() - left_s < 3

    async def main() -> None:
        with stranger(place["domain"], 1) as process, capture_logs() as logs:
            async with AsyncExitStack() as stack:
                buses = [
                    await stack.enter_async_context(gradbus.connect(**where, security=security(number)))
                    for number in range(2)
                ]
                async with asyncio.TaskGroup() as ranks:
                    for number, bus in enumerate(buses):
                        ranks.create_task(rank(bus, number, process))
                assert sum(bus.rejected["foreign reader"] for bus in buses) > 0
            named = [line for line in logs if line["event"] == "foreign readers excluded"]
            assert {(line["pid"], line["user"]) for line in named} == {(str(process.pid), os.getuid())}

    run(main())


def reads(process: subprocess.Popen[str], topic: str, times: int = 1) -> None:
    """Wait until the stranger has readers of so many topics with this beginning."""
    assert process.stdout is not None
    while times:
        times -= process.stdout.readline().startswith(topic)


def test_a_store_goes_on_beside_a_stranger_and_names_it(tmp_path: Path) -> None:
    """Ranks that meet at ``dds://``, protected by default: what they ask rank 0, and its answers."""
    domain = new_domain()
    url, gate = f"dds://{domain}/beset-{os.getpid()}-{next(_numbers)}", tmp_path / "gate"
    with (
        stranger(domain) as process,
        SceneRanks("rendezvous_scenes", "exchange_values", url=url, gate=str(gate), just_end=True) as ranks,
    ):
        for node in ranks.nodes:
            node.wait_for("is in", 30.0)
        reads(process, "train/store", 2)  # that of rank 0, and that of its answers
        gate.touch()
        results = ranks.results()
        assert sum(result["count"] for result in results) > 0
        assert {(pid, user) for result in results for pid, user in result["named"]} == {(process.pid, os.getuid())}
        assert max(result["slowest_s"] for result in results) < 10  # 0.2 s without a stranger, for ever without a cure


@contextmanager
def another_process(place: dict[str, Any], key_file: Path) -> Iterator[subprocess.Popen[str]]:
    """One that takes models, if it has the key of the job, and samples that it cannot open, if not."""
    command = [sys.executable, "-c", MEMBER, place["job"], str(place["domain"]), str(key_file), str(LEASE_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            yield process
        finally:
            process.kill()


def test_a_member_that_stands_still_is_waited_for_and_not_taken_for_a_stranger(
    keyed: dict[str, Any], tmp_path: Path
) -> None:
    async def main() -> None:
        with another_process(keyed, tmp_path / "key") as member:
            async with gradbus.connect(**keyed) as bus:
                bus.open_writer(ModelBlob)
                await bus.matched(lambda: readers_in_dds(bus, ModelBlob) == 1, timeout_s=20)
                await eventually(lambda: len(membership_of(bus).known()) == 1)
                member.send_signal(signal.SIGSTOP)
                sending = asyncio.create_task(sends_models(bus, 12))
                done, _ = await asyncio.wait([sending], timeout=2 * foreign_readers.GRACE_S)
                assert not done
                member.send_signal(signal.SIGCONT)
                await sending
                assert bus.rejected["foreign reader"] == 0

    run(main())


def test_a_bus_that_closes_does_not_wait_for_a_stranger_for_whom_nothing_has_waited_yet(keyed: dict[str, Any]) -> None:
    async def main() -> None:
        with stranger(keyed["domain"], 1):
            async with gradbus.connect(**keyed) as bus:
                bus.open_writer(ModelBlob)
                await bus.matched(lambda: readers_in_dds(bus, ModelBlob) > 0, timeout_s=20)
                await sends_models(bus, 2)
                await asyncio.sleep(1.5 * foreign_readers.GRACE_S)
                assert bus.rejected["foreign reader"] == 0
            # It was excluded first: to delete a writer takes a second, if DDS waits for a reader that takes nothing.
            assert bus.rejected["foreign reader"] == 1

    run(main())


def test_who_was_excluded_and_takes_again_is_found_again_when_the_time_is_over(
    keyed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_readers, "EXCLUDED_S", 1.0)
    write_secret_file(tmp_path / "other key", new_job_key().text)

    async def main() -> None:
        with another_process(keyed, tmp_path / "other key") as guest:
            async with gradbus.connect(**keyed) as bus:
                bus.open_writer(ModelBlob)
                await bus.matched(lambda: readers_in_dds(bus, ModelBlob) == 1, timeout_s=20)
                await sends_models(bus, 12)
                assert bus.rejected["foreign reader"] == 0  # it takes what it is sent
                guest.send_signal(signal.SIGSTOP)
                await sends_models(bus, 12)
                assert bus.rejected["foreign reader"] == 1
                guest.send_signal(signal.SIGCONT)
                await eventually(lambda: readers_in_dds(bus, ModelBlob) == 0)
                await bus.matched(lambda: readers_in_dds(bus, ModelBlob) == 1, timeout_s=20)

    run(main())


def test_a_member_that_was_excluded_just_before_its_greeting_was_read_is_found_again_at_once(
    keyed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_readers, "EXCLUDED_S", 300.0)

    async def main() -> None:
        with another_process(keyed, tmp_path / "key"):
            async with gradbus.connect(**keyed) as bus:
                bus.open_writer(ModelBlob)
                await bus.matched(lambda: readers_in_dds(bus, ModelBlob) == 1, timeout_s=20)
                await eventually(lambda: len(membership_of(bus).known()) == 1)
                (member,) = membership_of(bus).known()
                exclude = participant_of(bus)._foreign._exclude  # noqa: SLF001 - known as a member, it is excluded no more
                receiver_of(bus).add_periodic(Periodic(lambda: bool(exclude({member: ""}, time.monotonic()))))
                await eventually(lambda: readers_in_dds(bus, ModelBlob) == 0)
                await bus.matched(lambda: bus.matched_readers(ModelBlob) == 1, timeout_s=30)

    run(main())


class _Clock:
    """In place of :mod:`time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


@pytest.mark.parametrize("pause_s", [0.0, 5.0])
def test_a_newcomer_is_not_excluded_for_what_it_sent_while_this_process_stood_still(
    monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """It came just before; its greeting is read as soon as this process goes on. The clock is that of the test."""
    clock, guest = _Clock(), bytes(12)
    writer = Mock(
        channel=SimpleNamespace(name="train/x"),
        awaited_since_s=clock.now_s,
        refused_since_s=0.0,
        throttled_s=0.0,
        readers={1: MatchedReader(guest, True)},
    )
    receiver: Any = SimpleNamespace(rejected=Counter[str](), add_periodic=lambda periodic: None)
    node: Any = SimpleNamespace(writers=[writer], own_prefixes=set, claims=dict, exclusion=lambda: Mock())
    known: set[bytes] = set()
    members: Any = SimpleNamespace(known=lambda: known, knows_all=True)
    monkeypatch.setattr(foreign_readers, "time", clock)
    readers = foreign_readers.ForeignReaders(node, receiver, members)

    def look_for(seconds: float) -> int:
        for _ in range(round(seconds / 0.05)):
            clock.now_s += 0.05
            readers.check()
        return receiver.rejected["foreign reader"]

    assert look_for(0.1) == 0
    clock.now_s += pause_s
    assert look_for(foreign_readers.GRACE_S - foreign_readers.COUNTED_S - 0.2) == 0  # a stranger has so much time left
    if pause_s:
        known.add(guest)
    assert look_for(2.0) == (0 if pause_s else 1)


def deletes_together(monkeypatch: pytest.MonkeyPatch, needed_s: Sequence[float]) -> tuple[list[float], int]:
    """Writers are deleted whose foreign readers, of one participant each, need so long to take the last samples.
    Returns how long was waited for each, and how many participants are excluded."""
    clock, waited_s = _Clock(), list[float]()

    def waiting(ack_s: float) -> Callable[[float], bool]:
        def wait_for_acks(timeout_s: float) -> bool:
            waited_s.append(min(ack_s, timeout_s))
            clock.now_s += waited_s[-1]
            return ack_s <= timeout_s

        return wait_for_acks

    writers: list[Any] = [
        Mock(
            channel=SimpleNamespace(name=f"train/{number}"),
            awaited_since_s=0.0,
            refused_since_s=0.0,
            throttled_s=0.0,
            wait_for_acks=waiting(ack_s),
            readers={1: MatchedReader(bytes([number]) * 12, True)},
        )
        for number, ack_s in enumerate(needed_s, 101)
    ]
    receiver: Any = SimpleNamespace(rejected=Counter[str](), add_periodic=lambda periodic: None)
    node: Any = SimpleNamespace(writers=writers, own_prefixes=set, claims=dict, exclusion=lambda: Mock())
    nobody: Any = SimpleNamespace(known=set, knows_all=True)
    monkeypatch.setattr(foreign_readers, "time", clock)
    monkeypatch.setattr(foreign_readers, "MAX_FOREIGN", 100)
    monkeypatch.setattr(foreign_readers.ForeignReaders, "_all", WeakSet())  # no others, which may know these guests
    readers = foreign_readers.ForeignReaders(node, receiver, nobody)
    readers.check()
    clock.now_s += foreign_readers.GRACE_S + 0.1
    readers.exclude_late(writers)
    return waited_s, receiver.rejected["foreign reader"]


def test_writers_that_are_deleted_together_wait_for_their_late_readers_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited_s, excluded = deletes_together(monkeypatch, [math.inf] * 20)
    assert (len(waited_s), excluded) == (20, 20)
    assert sum(waited_s) == pytest.approx(foreign_readers.ACKS_S + 19 * foreign_readers.LEAST_ACKS_S)


def test_a_reader_that_takes_its_samples_is_not_excluded_for_the_time_that_another_has_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited_s, excluded = deletes_together(monkeypatch, [math.inf, 0.001])
    assert waited_s == pytest.approx([foreign_readers.ACKS_S, 0.001])
    assert excluded == 1


def test_the_io_thread_goes_on_checking_while_a_deletion_waits_for_a_foreign_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, may_end, clock = threading.Event(), threading.Event(), _Clock()

    def wait_for_acks(timeout_s: float) -> bool:
        waits.set()
        assert may_end.wait(30)
        return False

    guest = bytes([201]) * 12
    writer = Mock(
        channel=SimpleNamespace(name="train/x"),
        awaited_since_s=0.0,
        refused_since_s=0.0,
        throttled_s=0.0,
        wait_for_acks=wait_for_acks,
        readers={1: MatchedReader(guest, True)},
    )
    receiver: Any = SimpleNamespace(rejected=Counter[str](), add_periodic=lambda periodic: None)
    node: Any = SimpleNamespace(writers=[writer], own_prefixes=set, claims=dict, exclusion=lambda: Mock())
    nobody: Any = SimpleNamespace(known=set, knows_all=True)
    monkeypatch.setattr(foreign_readers, "time", clock)
    monkeypatch.setattr(foreign_readers.ForeignReaders, "_all", WeakSet())
    readers = foreign_readers.ForeignReaders(node, receiver, nobody)
    readers.check()
    clock.now_s += foreign_readers.GRACE_S + 0.1
    deleting = threading.Thread(target=readers.exclude_late, args=([writer],), daemon=True)
    deleting.start()
    assert waits.wait(30)
    checking = threading.Thread(target=readers.check, daemon=True)
    checking.start()
    checking.join(30)
    assert not checking.is_alive()
    may_end.set()
    deleting.join(30)
    assert receiver.rejected["foreign reader"] == 1


def test_a_reader_that_was_there_before_this_process_became_a_member_is_watched_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(foreign_readers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    stranger, ended = b"f" * 12, list[bytes]()
    writer = Mock(
        channel=SimpleNamespace(name="t"),
        readers={1: MatchedReader(stranger, True)},
        throttled_s=0.0,
        awaited_since_s=40.0,
        refused_since_s=40.0,
        is_acknowledged=False,
    )
    exclusion = SimpleNamespace(end=ended.append, leave=lambda *_: None)
    node: Any = SimpleNamespace(
        writers=[writer], own_prefixes=lambda: {b"o" * 12}, claims=dict, exclusion=lambda: exclusion
    )
    thread: Any = SimpleNamespace(add_periodic=lambda _: None, call_within=lambda *_: None, rejected=Counter())
    members: Any = SimpleNamespace(knows_all=False, known=lambda: None)
    watch = foreign_readers.ForeignReaders(node, thread, members)
    watch.check()
    members.known = lambda: {b"m" * 12}
    for _ in range(40):
        clock[0] += 0.1
        watch.check()
    assert ended[:1] == [stranger]
