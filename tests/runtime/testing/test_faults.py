"""Faults to order: the rules as such, and what they do to samples between two real buses."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from typing import Any

import pytest
from bus_helpers import CHIEF, CLIENT, MODEL, UPDATE, Run, payload_from, reads, writer_of
from patience import PATIENT_S, eventually
from structlog.testing import capture_logs

import gradbus
from gradbus.commands.files import ClientFile, load
from gradbus.runtime.errors import CollectiveTimeout, ConfigError, JobInUse
from gradbus.runtime.security.job_key import new_job_key
from gradbus.runtime.testing.fault_injection import FaultInjector
from gradbus.runtime.testing.faults import Faults, Rule, parse_rules
from gradbus.runtime.transport.api import Outlet
from gradbus.runtime.transport.channels import CHANNELS, Channel, ToController
from gradbus.runtime.transport.dds.participant import Writer
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import MemoryNode
from gradbus.runtime.transport.memory.transport import MemoryTransport
from gradbus.runtime.transport.wrappers import OutletWrapper, TransportWrapper
from gradbus.runtime.wire.control import Leave, ModelRequest, Receipt
from gradbus.runtime.wire.messages import ClientUpdate, Control, TrainCmd

# The rules


def test_a_text_becomes_rules_and_a_seed() -> None:
    rules, seed = parse_rules("drop update p=0.25; delay receipt seconds=0.5 round=3\nseed=9; crash nth=2 times=1;")
    assert rules == [
        Rule("drop", "update", p=0.25),
        Rule("delay", "receipt", seconds=0.5, round=3),
        Rule("crash", nth=2, times=1),
    ]
    assert seed == 9


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("loose update", "expected one of drop, delay, duplicate"),
        ("drop updates", "Expected one of command, update, model"),
        ("drop update p=many", "expected a number, got 'many'"),
        ("drop update nth=1.5", "expected a whole number"),
        ("drop update q=1", "'q=1' is not one of round, p, nth"),
        ("drop update p=2", "within 0 .. 1"),
        ("drop update nth=0", "count from 1, got nth=0"),
        ("drop update times=-1", "count from 1"),
        ("seed=x", "expected a whole number"),
    ],
)
def test_a_wrong_rule_is_an_error_that_says_what_would_be_right(text: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        parse_rules(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("drop=0.02", "Write 'drop p=0.02'. A rule is ACTION"),
        ("drop 0.02", "Write 'drop p=0.02'. A rule is ACTION"),
        ("delay(update, 0.1)", "Write 'delay update seconds=0.1'. A rule is ACTION"),
        ("drop(p=0.02)", "Write 'drop p=0.02'. A rule is ACTION"),
        ("Drop: update p=0.1", "Write 'drop update p=0.1'. A rule is ACTION"),
        ("dropp update p=0.1", "fault 'dropp': did you mean 'drop'? Expected one of drop, delay,"),
        ("corrupt command", "fault corrupt command: a command has no octets to damage; drop or delay it"),
        ("drop updates", "fault 'drop' of 'updates': did you mean 'update'? Expected one of command,"),
        ("loose=0.1", "corrupt, crash. A rule is ACTION [WHAT] [key=value ...], such as 'drop update p=0.02'; rules"),
        ("drop=2", "corrupt, crash. A rule is ACTION"),  # 200 % in no form
    ],
)
def test_a_rule_in_another_form_is_answered_with_the_right_one(text: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rules(f"drop hello nth=1; {text}")
    assert meant in str(caught.value)


def struck(faults: Faults, count: int, *names: str, round_id: int | None = None) -> list[int]:
    return [number for number in range(count) if faults.strike(names, round_id)]


def test_the_seed_alone_decides_which_ones_are_struck_whatever_comes_in_between() -> None:
    alone = struck(Faults("drop update p=0.2; seed=4"), 500, "update")
    among = Faults("delay model p=0.5; drop update p=0.2; seed=4")  # another rule, and others' samples
    mixed = []
    for number in range(500):
        among.strike(("control", "hello"), None)
        if any(rule.action == "drop" for rule, _ in among.strike(("update",), number)):
            mixed.append(number)
    other = struck(Faults("drop update p=0.2; seed=5"), 500, "update")
    assert alone == struck(Faults("drop update p=0.2; seed=4"), 500, "update")
    assert len(mixed) == pytest.approx(100, abs=30)
    assert len(alone) == pytest.approx(100, abs=30)
    assert other != alone


def test_a_rule_can_be_bound_to_a_round_a_number_and_so_many_times() -> None:
    assert struck(Faults("drop update nth=3"), 9, "update") == [2]
    assert struck(Faults("drop update times=2"), 9, "update") == [0, 1]
    assert struck(Faults("drop receipt"), 3, "control", "upload_request") == []
    assert struck(Faults("drop control"), 3, "control", "upload_request") == [0, 1, 2]
    faults = Faults("drop round=7")
    assert (struck(faults, 2, "model", round_id=6), struck(faults, 2, "model", round_id=7)) == ([], [0, 1])
    assert dict(faults.fired) == {"drop any": 2}


def test_processes_get_their_faults_from_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADBUS_BUS__FAULTS", "drop update p=0.1; seed=3")
    assert load(ClientFile, None).bus.faults == "drop update p=0.1; seed=3"
    rule = "delay upload_request seconds=1"
    assert load(ClientFile, None, overrides=[f"bus.faults={rule}"]).bus.faults == rule


# Their effect

LEAVES = [Leave(f"{number}") for number in range(6)]


@pytest.fixture
def place(place: dict[str, Any]) -> dict[str, Any]:
    """Faults are told apart by what they do to frames, before these are encrypted."""
    return {**place, "security": "none"}


def heard(
    run: Run, place: dict[str, Any], rules: str, count: int = 6, *, rejected: int = 0
) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """What arrives of six messages, what fired, and what was rejected. ``count`` and ``rejected`` are waited for."""

    async def main() -> tuple[list[str], dict[str, int], dict[str, int]]:
        async with gradbus.connect(**place) as one, gradbus.connect(**place, faults=rules) as two:
            with one.subscribe(ToController) as inbox:
                await reads(two, ToController)
                for body in LEAVES:
                    await two.publish(CLIENT, body)
                got = []
                for _ in range(count):
                    message = await inbox.get()
                    assert isinstance(message, Control)
                    assert isinstance(message.body, Leave)
                    got.append(message.body.reason)
                await eventually(lambda: sum(one.rejected.values()) >= rejected)
                assert two.faults is not None
                return got, dict(two.faults.fired), dict(one.rejected)

    result: tuple[list[str], dict[str, int], dict[str, int]] = run(main)
    return result


def test_dropped_samples_do_not_arrive_and_are_counted(run: Run, place: dict[str, Any]) -> None:
    got, fired, _ = heard(run, place, "drop leave nth=2; drop leave nth=4", count=4)
    assert got == ["0", "2", "4", "5"]
    assert fired == {"drop leave": 2}


def test_doubled_samples_arrive_twice(run: Run, place: dict[str, Any]) -> None:
    assert heard(run, place, "duplicate leave nth=3", count=7)[0] == ["0", "1", "2", "2", "3", "4", "5"]


def test_a_sample_out_of_turn_is_overtaken_by_the_next_one(run: Run, place: dict[str, Any]) -> None:
    assert heard(run, place, "reorder leave nth=2 seconds=60")[0] == ["0", "2", "1", "3", "4", "5"]


def test_the_last_sample_is_not_held_back_for_ever(run: Run, place: dict[str, Any]) -> None:
    assert heard(run, place, "reorder leave nth=6 seconds=0.05")[0] == ["0", "1", "2", "3", "4", "5"]


def test_a_late_sample_comes_later_and_holds_up_nobody(run: Run, place: dict[str, Any]) -> None:
    for delay_s in (0.2, 5.0):  # the longer one where a busy machine took more time for the others than the shorter one
        got = heard(run, place, f"delay leave nth=1 seconds={delay_s}")[0]
        for thread in threading.enumerate():
            if thread.name == "gradbus-late":
                thread.join(10.0)
                assert not thread.is_alive()
        if got == ["1", "2", "3", "4", "5", "0"]:
            return
    raise AssertionError(got)


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("rule", ["delay leave nth=1 seconds=2", "reorder leave nth=2 seconds=2"])
def test_what_is_late_has_not_been_taken_over_and_so_comes_before_what_waits_for_that(
    rule: str, sealed: bool, run: Run, place: dict[str, Any]
) -> None:
    """Ranks leave when all that they have sent is with the others. One whose last frame is late must not be done then:
    the others would take that frame for lost."""

    if sealed:
        del place["security"]

    async def main() -> list[str]:
        async with gradbus.connect(**place) as one, gradbus.connect(**place, faults=rule) as two:
            with one.subscribe(ToController) as inbox:
                await reads(two, ToController)
                for body in LEAVES[:2]:
                    await two.publish(CLIENT, body)
                assert not await two.drain(ToController, 0.0)
                assert await two.drain(ToController, 30.0)
                await two.publish(CLIENT, LEAVES[2])
                messages = [await inbox.get() for _ in range(3)]
        return [message.body.reason for message in messages if isinstance(message, Control)]  # type: ignore[union-attr]

    assert run(main)[-1] == LEAVES[2].reason


def test_one_that_was_held_back_and_cannot_be_written_is_late_no_more(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Exception):
        pass

    async def main() -> None:
        async with gradbus.connect(**place) as one, gradbus.connect(**place, faults="reorder leave nth=1") as two:
            with one.subscribe(ToController):
                await reads(two, ToController)
                writer = writer_of(two, ToController)
                write_now, writes = writer.write_now, itertools.count()

                def refuse_the_second(sample: Any) -> bool:
                    if next(writes):
                        raise Refused
                    return bool(write_now(sample))

                await two.publish(CLIENT, LEAVES[0])
                assert not writer.wait_for_acks(0.0)
                with monkeypatch.context() as broken:
                    broken.setattr(writer, "write_now", refuse_the_second)
                    with pytest.raises(Refused):
                        await two.publish(CLIENT, LEAVES[1])  # which has overtaken it
                assert writer.wait_for_acks(10.0)

    run(main)


def test_one_that_was_overtaken_is_late_no_more(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with (
            gradbus.connect(**place) as one,
            gradbus.connect(**place, faults="reorder leave nth=1 seconds=60") as two,
        ):
            with one.subscribe(ToController):
                await reads(two, ToController)
                for body in LEAVES[:2]:
                    await two.publish(CLIENT, body)
                assert await two.drain(ToController, 10.0)

    run(main)


def test_a_late_sample_comes_although_its_sender_has_left_meanwhile(run: Run, place: dict[str, Any]) -> None:
    async def main() -> list[str]:
        async with gradbus.connect(**place) as one:
            with one.subscribe(ToController) as inbox:
                async with gradbus.connect(**place, faults="delay leave nth=1 seconds=60") as two:
                    await reads(two, ToController)
                    for body in LEAVES[:2]:
                        await two.publish(CLIENT, body)
                messages = [await inbox.get() for _ in range(2)]
        return [message.body.reason for message in messages if isinstance(message, Control)]  # type: ignore[union-attr]

    assert run(main) == ["1", "0"]


def test_damaged_samples_are_rejected_and_counted_by_who_gets_them(run: Run, place: dict[str, Any]) -> None:
    got, fired, rejected = heard(run, place, "corrupt leave p=0.5; seed=1", count=4, rejected=2)
    assert fired["corrupt leave"] == 6 - len(got) == sum(rejected.values())


def test_a_damaged_update_is_never_put_together_and_a_whole_one_is(run: Run, place: dict[str, Any]) -> None:
    payload = os.urandom(3 << 20)

    async def main() -> None:
        faults = Faults("corrupt update nth=2; duplicate update nth=1; reorder update nth=3; delay model")
        async with gradbus.connect(**place) as one, gradbus.connect(**place, faults=faults) as faulty:
            with one.subscribe(ClientUpdate) as inbox:
                await reads(faulty, ClientUpdate)
                assembling = asyncio.create_task(payload_from(inbox, UPDATE, len(payload)))
                await faulty.send_update(UPDATE, 5, payload)
                await eventually(lambda: one.rejected["crc"])
                assert not assembling.done()
                await faulty.send_update(UPDATE, 5, payload, only=[1])
                assert bytes(await assembling) == payload
            assert faults.fired == {"corrupt update": 1, "duplicate update": 1, "reorder update": 1}

    run(main)


@pytest.mark.parametrize("security", ["none", "psk"])
def test_a_sample_that_dds_takes_later_is_struck_once_and_doubled_once_and_not_kept(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, security: str
) -> None:
    answers = iter([False, True, False, False, True])  # to a full queue it is all the same whose sample it is
    write = Writer.write

    def full_now_and_then(self: Writer, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        if self.channel.name == "train/control/controller":
            return next(answers, True) and write(self, fields, parts)
        return write(self, fields, parts)

    monkeypatch.setattr(Writer, "write", full_now_and_then)
    monkeypatch.setenv("GRADBUS_KEY", new_job_key().text)
    wrap, outlets = OutletWrapper.__init__, []

    def noted(self: OutletWrapper, channel: Channel, below: Outlet) -> None:
        wrap(self, channel, below)
        outlets.append(self)

    monkeypatch.setattr(OutletWrapper, "__init__", noted)
    rules = "duplicate leave nth=1; drop leave nth=2; drop leave nth=5"
    got, fired, rejected = heard(run, {**place, "security": security}, rules, count=5)
    assert got == ["0", "0", "2", "3", "5"]
    assert not rejected  # each copy has an envelope of its own
    assert fired == {"duplicate leave": 1, "drop leave": 2}
    kept = [outlet._tried for outlet in outlets if hasattr(outlet, "_tried")]  # noqa: SLF001 - shows nowhere else
    assert kept
    assert not any(kept)


def test_every_kind_of_sample_is_known_by_its_name_and_round(run: Run, place: dict[str, Any]) -> None:
    names = ("command", "update", "model", "receipt", "model_request")
    rules = "; ".join(f"drop {name} round=3" for name in names)

    async def main() -> dict[str, int]:
        faults = Faults(rules)
        async with gradbus.connect(**place, faults=faults) as faulty:
            for round_id in (2, 3):
                await faulty.publish(CHIEF, TrainCmd(round_id, 0, 1, 0.1, 0))
                await faulty.publish(CHIEF, Receipt(7, 1, 1, round_id, 1, True, ""))
                await faulty.publish(CLIENT, ModelRequest(1, round_id, 0, []))
                await faulty.send_update(UPDATE._replace(round_id=round_id), 5, b"x")
                await faulty.send_model(MODEL._replace(round_id=round_id), b"x")
            return dict(faults.fired)

    assert run(main) == {f"drop {name}": 1 for name in names}


def test_ranks_wait_no_longer_than_they_said_for_a_frame_that_is_lost(run: Run, place: dict[str, Any]) -> None:
    network = gradbus.NetworkConfig(shared_memory=False)

    async def rank(number: int, faults: str, told: asyncio.Event) -> Any:
        async with (
            gradbus.connect(**place, network=network, faults=faults) as bus,
            gradbus.join_group(bus, rank=number, world=2, timeout_s=20) as group,
        ):
            assert await group.all_gather("well", bytes([number])) == [b"\0", b"\1"]
            limit_s = 20.0 if number else 1.0  # rank 1 gets all, however late
            try:
                await group.all_gather("lost", bytes([number]), round_id=5, timeout_s=limit_s)
            except CollectiveTimeout as error:
                told.set()
                return list(error.missing)
            await told.wait()  # who leaves is no longer missing
            return []

    async def main() -> list[Any]:
        told = asyncio.Event()
        return list(await asyncio.gather(rank(0, "", told), rank(1, "drop collective round=5", told)))

    assert run(main) == [[1], []]


def test_a_late_sample_that_security_refuses_is_lost_with_its_reason_and_those_behind_it_go_on() -> None:
    network = MemoryNetwork()
    tried: list[int] = []

    class Refusing(TransportWrapper):
        def outlet(self, channel: Channel, *, retained_samples: int = 1) -> Outlet:
            return RefusingOutlet(channel, super().outlet(channel, retained_samples=retained_samples))

    class RefusingOutlet(OutletWrapper):
        def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
            tried.append(fields[0])
            raise JobInUse("it is held by another")

    injector = FaultInjector("delay update seconds=0.01")
    outlet = injector.over(Refusing(MemoryTransport(network, MemoryNode("node"), "job"))).outlet(CHANNELS[ClientUpdate])
    with capture_logs() as logs:
        for number in (1, 2):
            assert outlet.write((number, 1, 1), (b"octets",))
        assert outlet.wait_for_acks(PATIENT_S)
        injector.close()
    network.close()
    assert tried == [1, 2]
    lost = [entry["reason"] for entry in logs if entry["event"] == "late sample lost"]
    assert lost == ["it is held by another"] * 2
