"""The store over DDS does what torch's own stores do, from every rank and any thread, and ends in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from patience import soonest, until
from stores import begin, finished, link_of, new_job, open_rank, opened

from gradbus.torch.store import link as store_link
from gradbus.torch.store.messages import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from gradbus.torch.store.store import DdsStore

SHORT = timedelta(milliseconds=40)

Step = Callable[[Any], Any]

# What every store of torch can do, a step after the other.
STEPS: dict[str, Step] = {
    "set": lambda s: s.set("a", "1"),
    "get": lambda s: s.get("a"),
    "set again": lambda s: s.set("a", b"\x00\xff"),
    "get bytes": lambda s: s.get("a"),
    "set the empty key": lambda s: s.set("", ""),
    "get the empty value": lambda s: s.get(""),
    "get what is not there": lambda s: s.get("nothing"),
    "add": lambda s: s.add("n", 5),
    "add less": lambda s: s.add("n", -7),
    "get the sum": lambda s: s.get("n"),
    "add to text": lambda s: s.add("a", 1),
    "compare_set with no key": lambda s: s.compare_set("c", "x", "y"),
    "and nothing was set": lambda s: s.check(["c"]),
    "compare_set from nothing": lambda s: s.compare_set("c", "", "y"),
    "compare_set from something else": lambda s: s.compare_set("c", "z", "w"),
    "compare_set": lambda s: s.compare_set("c", "y", "w"),
    "compare_set from nothing where there is something": lambda s: s.compare_set("c", "", "v"),
    "compare_set of an empty value": lambda s: s.compare_set("", "", "k"),
    "append": lambda s: s.append("p", "1"),
    "append more": lambda s: s.append("p", "2"),
    "get what was appended": lambda s: s.get("p"),
    "wait": lambda s: s.wait(["a", "p"]),
    "wait for none": lambda s: s.wait([]),
    "wait with a timeout": lambda s: s.wait(["a"], SHORT),
    "wait for what is not there": lambda s: s.wait(["a", "nothing"], SHORT),
    "check": lambda s: s.check(["a", "nothing"]),
    "check none": lambda s: s.check([]),
    "multi_set": lambda s: s.multi_set(["x", "y"], ["1", "2"]),
    "multi_get": lambda s: s.multi_get(["y", "x", "a"]),
    "multi_get none": lambda s: s.multi_get([]),
    "multi_get what is not there": lambda s: s.multi_get(["y", "nothing"]),
    "has_extended_api": lambda s: s.has_extended_api(),
    "barrier": lambda s: s.barrier("b", 1),
    "barrier that is not reached": lambda s: s.barrier("bb", 2, SHORT),
}
# And what torch's PrefixStore does not offer of a store written in Python.
DIRECT_STEPS: dict[str, Step] = {
    "delete": lambda s: s.delete_key("x"),
    "delete again": lambda s: s.delete_key("x"),
    "push": lambda s: s.queue_push("q", "1"),
    "push more": lambda s: s.queue_push("q", b"2"),
    "length": lambda s: s.queue_len("q"),
    "length of none": lambda s: s.queue_len("none"),
    "a queue is there": lambda s: s.check(["q"]),
    "and need not be waited for": lambda s: s.wait(["q"], SHORT),
    "but is no value": lambda s: s.get("q"),
    "and no key": lambda s: s.delete_key("q"),
    "pop": lambda s: s.queue_pop("q"),
    "pop at once": lambda s: s.queue_pop("q", False),
    "pop at once from an empty queue": lambda s: s.queue_pop("q", False),
    "pop from an empty queue": lambda s: s.queue_pop("q"),
    "an empty queue is not there": lambda s: s.check(["q"]),
    "number of keys": lambda s: s.num_keys(),
    "keys": lambda s: sorted(s.list_keys()),
}


def played(store: Any, steps: dict[str, Step]) -> dict[str, Any]:
    """What comes of each step: its value, or that it raised, and what of torch's errors if it is one."""
    results: dict[str, Any] = {}
    for name, step in steps.items():
        try:
            results[name] = step(store)
        except dist.QueueEmptyError:
            results[name] = "empty"
        except (ValueError, dist.DistStoreError) as error:
            results[name] = "late" if "imeout" in str(error) else "not done"
    return results


@pytest.fixture(autouse=True)
def a_loop_that_stands_still_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a call with a short timeout may find no answer in time where there would have been one."""
    monkeypatch.setattr(store_link, "GRACE_S", 20.0)


@pytest.fixture(scope="module")
def stores() -> Iterator[list[DdsStore]]:
    with opened(3) as opened_stores:
        yield opened_stores


@pytest.mark.parametrize("rank", [0, 1])
def test_each_call_does_what_the_store_in_memory_of_torch_does(rank: int) -> None:
    oracle = dist.HashStore()
    oracle.set_timeout(SHORT)
    expected = played(oracle, STEPS | DIRECT_STEPS)
    assert {"late", "not done", "empty"} == {value for value in expected.values() if isinstance(value, str)}
    with opened(2) as ranks:
        ranks[rank].set_timeout(SHORT)
        assert played(ranks[rank], STEPS | DIRECT_STEPS) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_and_the_same_through_the_prefix_store_that_cpp_calls(stores: list[DdsStore], rank: int) -> None:
    oracle = dist.HashStore()
    oracle.set_timeout(SHORT)
    handle = stores[rank].clone()
    handle.set_timeout(SHORT)
    assert played(dist.PrefixStore(f"by {rank}", handle), STEPS) == played(oracle, STEPS)


def test_what_one_rank_sets_the_others_see(stores: list[DdsStore]) -> None:
    for rank, store in enumerate(stores):
        store.set(f"of/{rank}", str(rank))
    for store in stores:
        assert store.multi_get(["of/2", "of/0", "of/1"]) == [b"2", b"0", b"1"]


def test_a_call_waits_until_another_rank_has_set_what_it_waits_for(stores: list[DdsStore]) -> None:
    waits = [
        begin(stores[1].wait, ["soon/1", "soon/2"]), begin(stores[0].get, "soon/2"),
        begin(stores[2].multi_get, ["soon/1", "soon/2"]), begin(stores[1].queue_pop, "soon/3"),
    ]  # fmt: skip
    stores[2].set("soon/1", "a")
    assert not any(wait.done() for wait in waits)
    stores[0].set("soon/2", "b")
    stores[2].queue_push("soon/3", "c")
    assert [wait.result(10.0) for wait in waits] == [None, b"b", [b"a", b"b"], b"c"]


def test_sums_from_all_ranks_and_many_threads_count_each_call_once(stores: list[DdsStore]) -> None:
    each, threads = 25, 4
    sums: list[int] = []

    def count(store: DdsStore) -> None:
        for _ in range(each):
            sums.append(store.add("count", 1))  # noqa: PERF401 - of several threads

    runs = [begin(count, store) for store in stores for _ in range(threads)]
    for run in runs:
        run.result(30.0)
    assert sorted(sums) == list(range(1, len(stores) * threads * each + 1))


def test_of_all_who_compare_and_set_one_wins(stores: list[DdsStore]) -> None:
    tries = [begin(store.compare_set, "winner", "", f"{number}") for number, store in enumerate(stores * 3)]
    found = {result.result(10.0) for result in tries}
    assert found == {stores[0].get("winner")}


def test_each_value_of_a_queue_goes_to_one_rank(stores: list[DdsStore]) -> None:
    pops = [begin(store.queue_pop, "work") for store in stores * 5]
    for number in range(len(pops)):
        stores[number % 3].queue_push("work", str(number))
    assert sorted(int(pop.result(10.0)) for pop in pops) == list(range(len(pops)))


def test_values_of_up_to_four_megabytes_and_more_of_them_than_a_message_holds(stores: list[DdsStore]) -> None:
    large = [os.urandom(MAX_VALUE_BYTES), os.urandom(100_000), os.urandom(MAX_VALUE_BYTES), os.urandom(3_000_000)]
    keys = [f"large/{number}" for number in range(len(large))]
    stores[1].multi_set(keys, large)
    assert stores[2].multi_get(keys) == large
    assert stores[0].multi_get(keys) == large
    assert stores[1].compare_set("large/0", large[0], large[2]) == large[2]
    for key in keys:
        assert stores[2].delete_key(key)


def test_many_keys_are_asked_for_in_parts(stores: list[DdsStore]) -> None:
    keys = [f"many/{number:05d}" for number in range(MAX_KEYS + 200)]
    stores[0].multi_set(keys, ["x"] * len(keys))
    stores[1].wait(keys)
    assert stores[1].check(keys)
    assert not stores[1].check([*keys, "many/none"])
    assert [key for key in stores[1].list_keys() if key.startswith("many/")] == keys


def test_what_is_too_large_is_refused_before_it_is_sent(stores: list[DdsStore]) -> None:
    for store in stores[:2]:
        with pytest.raises(ValueError, match=f"{MAX_VALUE_BYTES + 1} bytes for key 'big', at most {MAX_VALUE_BYTES}"):
            store.set("big", bytes(MAX_VALUE_BYTES + 1))
        with pytest.raises(ValueError, match=f"key of {MAX_KEY_BYTES + 2} bytes"):
            store.get("é" * (MAX_KEY_BYTES // 2 + 1))
        store.set("full", bytes(MAX_VALUE_BYTES))
        with pytest.raises(dist.DistStoreError, match="'full' would have 4000001 bytes"):
            store.append("full", "x")
        assert store.delete_key("full")
        with pytest.raises(ValueError, match="does not fit into 64 bits"):
            store.add("n", 1 << 63)
        with pytest.raises(TypeError, match="value of type int for key 'n': expected str or bytes"):
            store.set("n", 3)  # type: ignore[arg-type]


def test_a_wait_that_ends_says_for_what_it_waited(stores: list[DdsStore]) -> None:
    stores[0].set("there", "1")
    for store in stores[:2]:
        assert 0.2 <= soonest(partial(wait_in_vain, store), 2.0) < 2.0


def wait_in_vain(store: DdsStore) -> float:
    """Seconds of a wait of 0.2 s."""
    began_s = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"dds://.* wait timeout after 200ms, keys: missing$"):
        store.wait(["there", "missing"], timedelta(milliseconds=200))
    return time.monotonic() - began_s


def test_waiting_leaves_the_gil_to_others(stores: list[DdsStore]) -> None:
    wait = begin(stores[1].get, "gil")
    counted = 0
    until_s = time.monotonic() + 0.2
    while time.monotonic() < until_s:
        counted += 1
    assert counted > 1000
    stores[0].set("gil", "1")
    assert wait.result(10.0) == b"1"


def test_a_clone_has_its_own_timeout_on_the_same_connection(stores: list[DdsStore]) -> None:
    clone = stores[1].clone()
    clone.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match="40ms"):
        clone.get("nothing")
    assert stores[1].timeout > SHORT  # type: ignore[attr-defined]
    clone.set("of a clone", "1")
    assert stores[2].get("of a clone") == b"1"
    clone.close()  # it does not count
    assert stores[1].get("of a clone") == b"1"


def test_clones_live_on_when_only_cpp_has_them(stores: list[DdsStore]) -> None:
    prefix = dist.PrefixStore("cpp", stores[1]).clone()
    prefix.set("key", "value")
    assert stores[0].get("cpp/key") == b"value"


def test_a_forked_process_is_told_that_it_has_no_connection(stores: list[DdsStore]) -> None:
    child = os.fork()
    if child == 0:
        try:
            stores[1].get("count")
        except dist.DistNetworkError as error:
            os._exit(7 if "forked" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_ranks_that_have_not_come_are_named() -> None:
    store = open_rank(new_job(), 0, 4)
    with pytest.raises(dist.DistStoreError, match=r"keys: x; ranks \[1, 2, 3\] of 4 have not joined"):
        store.wait(["x"], SHORT)
    store.close()
    finished(store)


def test_who_is_closed_says_so_and_lets_go_of_those_who_wait() -> None:
    with opened(2) as (first, second):
        waits = [begin(second.get, "never"), begin(first.get, "never")]
        second.close()
        with pytest.raises(dist.DistNetworkError, match=r"rank 1: it is closed here"):
            waits[0].result(10.0)
        with pytest.raises(dist.DistNetworkError, match=r"rank 1: it is closed here"):
            second.set("x", "1")
        first.set("x", "1")
        first.close()
        with pytest.raises(dist.DistNetworkError, match=r"rank 0: it is closed here"):
            waits[1].result(10.0)


def test_the_last_handle_closes_the_store_and_nothing_is_left_of_it() -> None:
    before = set(threading.enumerate())
    job = new_job()
    for _ in range(3):  # the same name again, and no rank waits for another one to be gone
        coming = begin(open_rank, job, 1, 2)
        first = open_rank(job, 0, 2)
        second = coming.result(20.0)
        first.set("a", "1")
        assert second.get("a") == b"1"
        assert second.num_keys() == 1
        first.close()
        second.close()
        finished(first, second)
        assert link_of(first).leaving is None  # which has the table
    until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("gradbus")])


def test_rank_0_stays_for_those_who_still_ask() -> None:
    with opened(2) as (first, second):
        wait = begin(second.get, "last")
        first.close()
        second.set("last", "1")
        assert wait.result(10.0) == b"1"
        assert second.add("more", 2) == 2
        assert not link_of(first).finished.is_set()


def test_but_not_for_ever_and_then_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_link, "STAY_S", 0.1)
    with opened(2) as (first, second):
        first.close()
        finished(first)
        with pytest.raises(dist.DistNetworkError, match=r"it has been closed: rank 0 on .* needs it no more"):
            second.get("x")
