"""The arbiter of a store: executes once what is said twice, survives what is no message, and lets in who fits."""

from __future__ import annotations

import contextlib
import queue
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import msgpack
import pytest
import torch.distributed as dist
from patience import until
from stores import RawRank, begin, finished, link_of, new_job, open_rank, opened, vanish

from gradbus.runtime.bus import background, liveness
from gradbus.runtime.errors import FrameError
from gradbus.runtime.wire.frames import Kind
from gradbus.torch.store import peer as store_peer
from gradbus.torch.store.messages import (
    ArbiterStatus,
    StoreAnswer,
    StoreLeave,
    StoreRequest,
    StoreStatus,
    decode,
    frame_of,
)
from gradbus.torch.store.peer import StorePeer
from gradbus.torch.store.server import StoreServer
from gradbus.torch.store.store import DdsStore
from gradbus.torch.store.table import StoreTable


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setenv("GRADBUS_BUS__LEASE_S", "0.4")
    return new_job()


@pytest.fixture
def first(job: tuple[int, str]) -> Iterator[DdsStore]:
    """Rank 0 of two."""
    store = open_rank(job, 0, 2)
    yield store
    store.close()
    finished(store)


@pytest.fixture
def raw(job: tuple[int, str], first: DdsStore) -> Iterator[RawRank]:
    """A rank 1 that has joined."""
    with RawRank(job) as rank:
        assert rank.join().state == "joined"
        yield rank


def test_a_request_that_comes_again_is_executed_once_and_answered_each_time(raw: RawRank, first: DdsStore) -> None:
    for _ in range(3):
        raw.ask(1, "add", "n", number=5)
        assert raw.answer() == StoreAnswer(1, "done", [], [], 5, "")
    raw.ask(2, "push", "q", values=[b"1"])
    raw.ask(3, "pop", "q")
    raw.ask(3, "pop", "q")
    assert [raw.answer().id, raw.answer().values, raw.answer().values] == [2, [b"1"], [b"1"]]
    assert first.get("n") == b"5"


def test_a_request_that_comes_late_is_neither_executed_nor_answered(raw: RawRank, first: DdsStore) -> None:
    raw.ask(1, "add", "n", number=5)
    assert raw.answer().number == 5
    raw.ask(3, "add", "n", number=5)  # so the process does not wait for the first one any more
    assert raw.answer().number == 10
    for number in (1, 2):
        raw.ask(number, "add", "n", number=5)
    raw.ask(4, "get", "n")
    assert raw.answer() == StoreAnswer(4, "done", [], [b"10"], 0, "")


def test_a_request_that_waits_may_come_again_while_others_are_executed(raw: RawRank, first: DdsStore) -> None:
    for number in range(2, 5):
        raw.ask(1, "get", "later", wait_s=60.0)
        raw.ask(number, "add", "n", number=1)
        assert raw.answer() == StoreAnswer(number, "done", [], [], number - 1, "")
    first.set("later", "1")
    raw.ask(5, "check")
    assert raw.answer() == StoreAnswer(1, "done", [], [b"1"], 0, "")
    assert raw.answer().id == 5


def test_a_request_waits_for_as_long_as_it_says(raw: RawRank, first: DdsStore) -> None:
    raw.ask(1, "wait", "a", "b", wait_s=0.05)
    assert raw.answer() == StoreAnswer(1, "timeout", ["a", "b"], [], 0, "")


def test_what_is_no_message_does_no_harm(raw: RawRank, first: DdsStore) -> None:
    request = {"id": 1, "op": "set", "keys": ["k"], "values": [b"v"], "number": 0, "wait_s": 0.0}
    raw.body(b"")
    raw.body(b"\xc1 no msgpack")
    raw.body(msgpack.packb(["StoreRequest", request]), Kind.COLLECTIVE)
    for fields in (
        {"op": "format"},
        {"keys": ["k" * 5000]},
        {"keys": ["k"] * 5000},
        {"values": [bytes(4_000_001)]},
        {"keys": [b"k"]},
        {"values": ["v"]},
        {"number": 1 << 63},
        {"wait_s": -1.0},
        {"wait_s": float("nan")},
        {"id": -1},
        {"id": "1"},
    ):
        raw.body(msgpack.packb(["StoreRequest", {**request, **fields}]))
    raw.say(StoreAnswer(1, "done", [], [], 0, ""))
    raw.say(StoreStatus("joined", "here"))
    raw.ask(9, "num_keys")
    assert raw.answer() == StoreAnswer(9, "done", [], [], 0, "")


def test_requests_that_do_not_fit_their_operation_are_errors(raw: RawRank, first: DdsStore) -> None:
    raw.ask(1, "compare_set", "k", values=[b"1"])
    raw.ask(2, "set", "k")
    raw.ask(3, "add")
    assert [raw.answer().text for _ in range(3)] == [
        "compare_set with 1 keys and 1 values",
        "set with 1 keys and 0 values",
        "add with 0 keys and 0 values",
    ]


def test_open_requests_of_a_process_are_bounded(raw: RawRank, first: DdsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_peer, "MAX_WAITING", 3)
    for number in range(1, 5):
        raw.ask(number, "get", "nothing", wait_s=60.0)
    assert raw.answer() == StoreAnswer(4, "error", [], [], 0, "rank 1 has too many requests open at a time")


def test_who_has_not_joined_gets_no_answer(raw: RawRank, job: tuple[int, str]) -> None:
    with RawRank(job) as stranger:
        stranger.arbiter = raw.arbiter
        stranger.ask(1, "set", "k", values=[b"v"])
        assert stranger.join().state == "taken"
        stranger.ask(2, "set", "k", values=[b"v"])
        with pytest.raises(queue.Empty):
            stranger.next(timeout_s=0.2)
    raw.ask(1, "check", "k")
    assert raw.answer().number == 0


def test_who_speaks_another_version_is_refused(job: tuple[int, str], first: DdsStore) -> None:
    with RawRank(job) as rank:
        refused = rank.join(version=99)
        assert refused.state == "refused"
        assert "version 99" in refused.text


def test_a_rank_with_another_world_size_is_refused_at_once(job: tuple[int, str], first: DdsStore) -> None:
    with pytest.raises(dist.DistNetworkError, match=r"rank 1 on .* world_size=3, rank 0 on .* has world_size=2: give"):
        open_rank(job, 1, 3)


@pytest.mark.parametrize("letter", ["h", "\N{EURO SIGN}"])
def test_a_rank_is_refused_whatever_it_calls_itself(job: tuple[int, str], first: DdsStore, letter: str) -> None:
    with RawRank(job) as rank:
        refused = rank.join(world=3, host=letter * (1024 // len(letter.encode())))
        assert refused.state == "refused"
        assert f"rank 1 on {letter}" in refused.text
        assert refused.text.endswith("give all ranks the same")


def test_a_second_process_with_a_rank_is_told_who_has_it(job: tuple[int, str], first: DdsStore) -> None:
    second = open_rank(job, 1, 2)
    with pytest.raises(dist.DistNetworkError, match=r"rank 1 is taken, by .*process \d+\)\. Give each process"):
        open_rank(job, 1, 2)
    second.set("still", "here")
    assert first.get("still") == b"here"
    second.close()
    finished(second)


def test_a_rank_takes_part_once_and_then_waits_for_another_rank_0(job: tuple[int, str], first: DdsStore) -> None:
    second = open_rank(job, 1, 2)
    second.close()
    finished(second)
    text = why_not_in(job, is_heard="took part already")
    assert re.search(r"could not join within .* s: rank 1 took part already.*Start rank 0 anew", text)
    again = begin(open_rank, job, 1, 2)
    first.close()
    new_first = open_rank(job, 0, 2)
    new_second = again.result(20.0)
    new_first.set("new", "1")
    assert new_second.get("new") == b"1"
    for store in (new_second, new_first):
        store.close()
        finished(store)


def why_not_in(job: tuple[int, str], *, is_heard: str) -> str:
    """What rank 1 is told in a short time, or in a longer one, where the machine stands still in the short one."""
    for timeout_s in (0.5, 5.0):
        with pytest.raises(dist.DistNetworkError) as raised:
            open_rank(job, 1, 2, timedelta(seconds=timeout_s))
        if is_heard in str(raised.value):
            break
    return str(raised.value)


def test_without_a_rank_0_the_others_say_so(job: tuple[int, str]) -> None:
    with pytest.raises(dist.DistNetworkError, match=r"rank 1 could not join within 0\.3 s: there is no rank 0\. Start"):
        open_rank(job, 1, 2, timedelta(seconds=0.3))


def test_of_two_processes_with_rank_0_the_second_one_is_told(
    job: tuple[int, str], first: DdsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as apart:
        apart.setattr(background, "jobs", {})  # a bus of its own, as another process has
        the_second_one_is_told(job)
    second = open_rank(job, 1, 2)
    first.set("k", "1")
    assert second.get("k") == b"1"
    second.close()
    finished(second)


def the_second_one_is_told(job: tuple[int, str]) -> None:
    with (
        pytest.raises(dist.DistNetworkError, match=r"there is another rank 0, on .*\(process \d+\)\. If both"),
        contextlib.closing(open_rank(job, 0, 2)) as second,
    ):
        second.get("nothing")
    until(lambda: not background.jobs)  # else its bus would stay


def test_a_store_that_all_ranks_have_joined_goes_on_whoever_comes(raw: RawRank, first: DdsStore) -> None:
    # by its clock it was there first
    before = frame_of(ArbiterStatus(False, "elsewhere"), sender=0, incarnation=1, to=0)
    raw.write(before)
    raw.ask(1, "num_keys")
    assert raw.answer().outcome == "done"
    raw.write(frame_of(ArbiterStatus(True, "elsewhere"), sender=0, incarnation=1, to=0))  # and so has the other one
    assert first.num_keys() == 0


def test_a_store_that_waits_for_ranks_gives_way_to_one_that_does_not(job: tuple[int, str], first: DdsStore) -> None:
    with RawRank(job) as rank:
        rank.write(frame_of(ArbiterStatus(True, "elsewhere"), sender=0, incarnation=(1 << 64) - 1, to=0))
        with pytest.raises(dist.DistNetworkError, match="another rank 0, on elsewhere"):
            first.get("nothing")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ends that leave DDS without a word while their process, which is this one, lives on."""
    monkeypatch.setenv("GRADBUS_BUS__LEASE_S", "0.4")
    monkeypatch.setattr(liveness, "FOUND_AGAIN_S", 0.4)


@pytest.mark.usefixtures("impatient")
def test_when_rank_0_is_gone_the_others_are_told_by_name() -> None:
    with opened(2) as (first, second):
        wait = begin(second.get, "nothing")
        vanish(first)
        with pytest.raises(dist.DistNetworkError, match=r"rank 1: rank 0 on .*\(process \d+\) is gone, and the keys"):
            wait.result(5.0)
        with pytest.raises(dist.DistNetworkError, match="is gone"):
            second.set("k", "v")


def peers_of(store: DdsStore) -> dict[int, StorePeer]:
    """The ends of other ranks, as rank 0 has them."""
    end = link_of(store).end
    assert isinstance(end, StoreServer)
    return end.peers


@pytest.mark.usefixtures("impatient")
def test_when_another_rank_is_gone_nobody_else_minds() -> None:
    with opened(3) as (first, second, third):
        wait = begin(second.get, "k")
        lost = begin(third.queue_pop, "q")
        vanish(third)
        until(lambda: len(peers_of(first)) == 1)
        first.num_keys()  # the loop has had a turn since: what rank 2 waited for is forgotten, too
        first.queue_push("q", "1")
        assert first.queue_len("q") == 1
        first.set("k", "1")
        assert wait.result(5.0) == b"1"
        third.close()
        with pytest.raises(dist.DistNetworkError):
            lost.result(5.0)


def test_a_rank_that_leaves_is_not_waited_for(raw: RawRank, first: DdsStore) -> None:
    raw.say(StoreLeave())
    until(lambda: not peers_of(first))


def test_the_table_is_bounded_and_what_does_not_fit_changes_nothing() -> None:
    table = StoreTable(max_keys=2, max_bytes=1000)
    answers: list[StoreAnswer] = []

    def ask(op: str, *keys: str, values: list[bytes] | None = None) -> StoreAnswer:
        table.submit(StoreRequest(1, op, list(keys), values or [], 0, 0.0), answers.append)  # type: ignore[arg-type]
        return answers[-1]

    assert ask("set", "a", "b", values=[b"1", b"2"]).outcome == "done"
    assert re.match("the store is full: 2 keys", ask("set", "c", values=[b"3"]).text)
    assert "is full" in ask("set", "a", "c", values=[b"x", b"3"]).text
    assert ask("get", "a").values == [b"1"]
    assert "is full" in ask("set", "a", values=[bytes(900)]).text
    assert "is full" in ask("push", "q", values=[bytes(900)]).text
    assert ask("set", "a", values=[bytes(700)]).outcome == "done"
    assert "is full" in ask("append", "a", values=[bytes(300)]).text
    assert ask("delete", "a").number == 1
    assert ask("push", "q", values=[bytes(700)]).outcome == "done"
    assert "is full" in ask("set", "a", values=[bytes(200)]).text
    assert len(ask("pop", "q").values[0]) == 700
    assert ask("set", "a", values=[bytes(700)]).outcome == "done"


def test_every_message_comes_back_as_it_went_and_cut_ones_are_errors() -> None:
    message = StoreRequest(7, "set", ["é", ""], [b"\x00", b""], -1, 2.5)
    _, body = frame_of(message, sender=1, incarnation=2, to=3)
    assert decode(body) == message
    assert decode(msgpack.packb(["StoreLeave", {"unknown": 1}])) == StoreLeave()
    for cut in range(len(body)):
        with pytest.raises(FrameError):
            decode(body[:cut])
    with pytest.raises(ValueError, match="at most"):
        frame_of(replace(message, keys=["k"] * 3, values=[bytes(4_000_000)] * 3), sender=1, incarnation=2, to=3)
