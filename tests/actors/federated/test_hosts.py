"""Hosts in the registry of clients: one process that speaks for many ids."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradbus.actors.federated.controller.clients import (
    FIRST_HOST,
    MAX_MEMBERS,
    ClientRegistry,
    ExpectedModel,
    HelloAnswer,
)
from gradbus.actors.federated.controller.participation import FOR_GOOD
from gradbus.runtime.wire.control import PROTOCOL, Hello
from gradbus.runtime.wire.id_ranges import common_ids, format_ids, parse_ids
from gradbus.runtime.wire.messages import Identity

SESSION, DEAD_AFTER_S, RIVAL_AFTER_S = 9, 2.5, 1.2
_numbers = itertools.count(1)


def new_registry() -> ClientRegistry:
    return ClientRegistry(
        ExpectedModel(5, 7), session=SESSION, dead_after_s=DEAD_AFTER_S, duplicate_after_s=RIVAL_AFTER_S
    )


def hello(ids: str, session: int = 0) -> Hello:
    return Hello(PROTOCOL, 5, 7, True, session, "idle", -1, -1, "host-a:1", -1, ids=ids)


def greet(
    registry: ClientRegistry,
    ids: str,
    incarnation: int = 100,
    *,
    session: int = 0,
    now_s: float = 0.0,
    out: dict[int, int] | None = None,
) -> tuple[HelloAnswer, str]:
    sender = Identity(FIRST_HOST | int(ids.split(",")[0].split("-")[0]), incarnation)
    return registry.answer_host_hello(
        sender,
        hello(ids, session),
        next(_numbers),
        now_s=now_s,
        next_round=1,
        out_until=lambda one: (out or {}).get(one, 0),
    )


def join(registry: ClientRegistry, ids: str, incarnation: int = 100, **options: object) -> None:
    assert greet(registry, ids, incarnation, **options)[0] is HelloAnswer.WELCOME  # type: ignore[arg-type]
    options["session"] = SESSION
    assert greet(registry, ids, incarnation, **options)[0] is HelloAnswer.NOTHING  # type: ignore[arg-type]


def test_all_clients_of_a_host_are_ready_once_it_has_heard_its_welcome() -> None:
    registry = new_registry()
    assert greet(registry, "3-5,8")[0] is HelloAnswer.WELCOME
    assert registry.ready(1) == []
    assert greet(registry, "3-5,8", session=SESSION)[0] is HelloAnswer.NOTHING
    assert registry.ready(1) == [3, 4, 5, 8]
    assert len(registry) == registry.count_live() == 4


def test_clients_of_a_host_are_silent_with_it_and_one_message_of_one_brings_all_back() -> None:
    registry = new_registry()
    join(registry, "0-99")
    assert [record.client_id for record in registry.mark_silent(DEAD_AFTER_S + 1)] == [FIRST_HOST], "and not 100 times"
    assert registry.ready(1) == []
    member = registry.get(42, 100)
    assert member is not None
    member.observe(DEAD_AFTER_S + 1)
    assert len(registry.ready(1)) == 100


def test_a_host_that_is_gone_takes_its_clients_with_it_and_no_others() -> None:
    registry = new_registry()
    join(registry, "0-4")
    join(registry, "10-12")
    assert registry.clients_of(FIRST_HOST, 100) == [0, 1, 2, 3, 4]
    assert not registry.remove(FIRST_HOST, 99), "another start of it"
    assert registry.remove(FIRST_HOST, 100)
    assert registry.ready(1) == [10, 11, 12]


def test_a_client_in_quarantine_waits_alone_and_one_that_is_out_for_good_is_not_let_in() -> None:
    registry = new_registry()
    join(registry, "0-3", out={1: 7, 2: FOR_GOOD})
    assert registry.ready(1) == [0, 3]
    assert registry.ready(7) == [0, 1, 3]


def test_a_client_that_is_put_in_quarantine_leaves_the_others_of_its_host_ready() -> None:
    registry = new_registry()
    join(registry, "0-3")
    registry.exclude(2, 5)
    assert registry.ready(2) == [0, 1, 3]
    assert greet(registry, "0-3", session=SESSION)[0] is HelloAnswer.NOTHING


def test_a_restarted_host_waits_until_the_older_start_of_it_is_known_to_be_gone() -> None:
    registry = new_registry()
    join(registry, "0-3")
    assert greet(registry, "0-3", 200)[0] is HelloAnswer.NOTHING
    registry.remove(FIRST_HOST, 100)
    join(registry, "0-3", 200)
    assert registry.incarnation_of(2) == 200


def test_clients_of_a_host_that_is_restarted_count_once_among_those_that_a_run_can_have() -> None:
    registry, half = new_registry(), MAX_MEMBERS // 2
    join(registry, f"0-{half - 1}")
    join(registry, f"{half}-{MAX_MEMBERS - 1}")
    assert greet(registry, f"0-{half - 1}", 200)[0] is HelloAnswer.NOTHING
    assert greet(registry, f"1-{half - 1},{MAX_MEMBERS}", 300)[0] is HelloAnswer.REFUSE, "one is new"


def test_a_second_process_with_an_id_of_a_live_host_is_refused_and_the_other_way_round() -> None:
    registry = new_registry()
    join(registry, "0-3")
    for sends in (
        lambda now_s: registry.answer_hello(Identity(2, 200), hello("", 0), next(_numbers), now_s=now_s, next_round=1),
        lambda now_s: greet(registry, "2-9", 300, now_s=now_s),
    ):
        assert sends(0.0)[0] is HelloAnswer.NOTHING
        greet(registry, "0-3", session=SESSION, now_s=RIVAL_AFTER_S)
        answer, why = sends(RIVAL_AFTER_S + 0.1)
        assert answer is HelloAnswer.REFUSE
        assert "in use by host-a:1" in why
    assert registry.ready(1) == [0, 1, 2, 3]


def test_hosts_that_share_the_clients_of_one_that_hangs_all_take_its_place() -> None:
    registry = new_registry()
    join(registry, "0-9")
    now_s, waiting = 0.0, {"0-4": 200, "5-9": 300}
    while waiting and now_s < 4 * DEAD_AFTER_S:
        now_s += RIVAL_AFTER_S / 4
        waiting = {
            ids: one for ids, one in waiting.items() if greet(registry, ids, one, now_s=now_s)[0] is HelloAnswer.NOTHING
        }
    assert not waiting
    assert [registry.incarnation_of(client_id) for client_id in (0, 4, 5, 9)] == [200, 200, 300, 300]
    assert registry.get(FIRST_HOST, 100) is None


def test_clients_that_share_the_ids_of_a_host_that_hangs_do_not_wait_for_each_other() -> None:
    registry = new_registry()
    join(registry, "0-99")

    def come(now_s: float) -> set[HelloAnswer]:
        return {
            registry.answer_hello(Identity(one, 200), hello(""), next(_numbers), now_s=now_s, next_round=1)[0]
            for one in range(100)
        }

    assert come(DEAD_AFTER_S) == {HelloAnswer.NOTHING}
    assert come(DEAD_AFTER_S + RIVAL_AFTER_S) == {HelloAnswer.WELCOME}


@pytest.mark.parametrize(
    ("ids", "sender", "why"),
    [
        (f"0-{MAX_MEMBERS}", FIRST_HOST, "65,536 clients"),
        ("5-7", FIRST_HOST, "expected 2147483653"),
    ],
)
def test_a_host_that_cannot_be_one_is_refused_with_the_reason(ids: str, sender: int, why: str) -> None:
    registry = new_registry()
    answer, text = registry.answer_host_hello(
        Identity(sender, 1), hello(ids), 1, now_s=0.0, next_round=1, out_until=lambda _: 0
    )
    assert answer is HelloAnswer.REFUSE
    assert why in text
    assert not len(registry)


def test_a_host_that_changes_its_clients_has_to_start_anew() -> None:
    registry = new_registry()
    join(registry, "0-3")
    answer, why = greet(registry, "0-4")
    assert answer is HelloAnswer.REFUSE
    assert "0-3 before" in why


def test_clients_that_came_in_a_failed_attempt_are_let_in_and_their_host_alone_is_welcomed_anew() -> None:
    registry = new_registry()
    sender = Identity(FIRST_HOST, 1)
    registry.answer_host_hello(sender, hello("0-9"), 1, now_s=0.0, next_round=5, out_until=lambda _: 0)
    assert [record.client_id for record in registry.let_into(4)] == [FIRST_HOST]
    registry.answer_host_hello(sender, hello("0-9", SESSION), 2, now_s=0.0, next_round=5, out_until=lambda _: 0)
    assert registry.ready(4) == list(range(10))


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_ids_in_common_are_those_of_the_sets(one: set[int], other: set[int]) -> None:
    found = list(common_ids(parse_ids(format_ids(one)), parse_ids(format_ids(other))))
    assert found == sorted(one & other)
