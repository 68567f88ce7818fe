"""Who takes part: clients that come, go, come again, or share an id by mistake."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from gradbus.actors.federated.controller.clients import (
    MAX_MEMBERS,
    MAX_NEWCOMERS,
    ClientRegistry,
    ExpectedModel,
    HelloAnswer,
)
from gradbus.runtime.wire.control import PROTOCOL, Hello
from gradbus.runtime.wire.messages import Identity

DIM, LAYOUT, SESSION = 1_199_882, 77, 9
DEAD_AFTER_S = 2.5
RIVAL_AFTER_S = 1.2
GREETING = Hello(PROTOCOL, DIM, LAYOUT, True, 0, "idle", -1, -1, "host-a:1", -1)
_numbers = itertools.count(1)


def new_members(max_members: int = MAX_MEMBERS) -> ClientRegistry:
    return ClientRegistry(
        ExpectedModel(DIM, LAYOUT),
        session=SESSION,
        dead_after_s=DEAD_AFTER_S,
        duplicate_after_s=RIVAL_AFTER_S,
        max_members=max_members,
    )


def greet(
    members: ClientRegistry,
    client_id: int = 0,
    incarnation: int = 100,
    *,
    now_s: float = 0.0,
    next_round: int = 1,
    number: int | None = None,
    is_stalled: bool = False,
    **changes: object,
) -> tuple[HelloAnswer, str]:
    hello = dataclasses.replace(GREETING, **changes)  # type: ignore[arg-type]
    number = next(_numbers) if number is None else number
    sender = Identity(client_id, incarnation)
    return members.answer_hello(sender, hello, number, now_s=now_s, next_round=next_round, is_stalled=is_stalled)


def heard(members: ClientRegistry, client_id: int, incarnation: int, now_s: float) -> bool:
    """A message of this client comes. False: it is no member."""
    member = members.get(client_id, incarnation)
    if member is not None:
        member.observe(now_s)
    return member is not None


def join(members: ClientRegistry, client_id: int = 0, incarnation: int = 100, **options: object) -> None:
    """Hello, welcome, and the hello that confirms it."""
    assert greet(members, client_id, incarnation, **options)[0] is HelloAnswer.WELCOME  # type: ignore[arg-type]
    options["session"] = SESSION
    assert greet(members, client_id, incarnation, **options)[0] is HelloAnswer.NOTHING  # type: ignore[arg-type]


def test_what_is_shared_by_name_is_compared_once_a_client_has_been_told_the_patterns() -> None:
    members = ClientRegistry(
        ExpectedModel(10, 5, "shared"), session=SESSION, dead_after_s=DEAD_AFTER_S, duplicate_after_s=RIVAL_AFTER_S
    )
    for client_id in range(4):
        assert greet(members, client_id) == (HelloAnswer.WELCOME, "")
    told = {"session": SESSION, "shared_dim": 10, "shared_layout": 5}
    assert greet(members, 0, **told) == (HelloAnswer.NOTHING, "")
    assert members.ready(1) == [0]
    for client_id, changed, why in (
        (1, {"shared_dim": 11}, "shares 11 values, here 10"),
        (2, {"shared_layout": 6}, "other names or shapes"),
        (3, {"shared_dim": 0, "shared_layout": 0}, "as an older version does"),
    ):
        answer, text = greet(members, client_id, **(told | changed))  # type: ignore[arg-type]
        assert answer is HelloAnswer.REFUSE
        assert why in text


def test_a_new_client_is_welcomed_until_it_has_heard_it_and_is_ready_from_then_on() -> None:
    members = new_members()
    assert greet(members) == (HelloAnswer.WELCOME, "")
    assert members.ready(1) == []
    assert greet(members) == (HelloAnswer.WELCOME, "")  # the welcome was lost
    assert greet(members, session=SESSION) == (HelloAnswer.NOTHING, "")
    assert members.ready(1) == [0]


def test_a_client_whose_bus_is_not_matched_yet_is_a_member_but_not_ready() -> None:
    members = new_members()
    join(members, ready=False)
    assert len(members) == 1
    assert members.ready(1) == []
    greet(members, session=SESSION, ready=True)
    assert members.ready(1) == [0]


@pytest.mark.parametrize("newest", [7, 0], ids=["", "where the numbers begin anew"])
def test_a_hello_that_a_later_one_has_overtaken_shows_that_its_client_lives_and_nothing_else(newest: int) -> None:
    members = new_members()
    greet(members, number=(newest - 2) & 0xFFFF_FFFF)
    greet(members, session=SESSION, ready=True, now_s=1.0, number=newest)
    overtaken = {"session": SESSION, "ready": False, "number": (newest - 1) & 0xFFFF_FFFF}
    assert greet(members, now_s=2.0, **overtaken) == (HelloAnswer.NOTHING, "")  # type: ignore[arg-type]
    assert members.ready(1) == [0]
    assert members.last_seen_at_s(0) == 2.0
    greet(members, session=SESSION, ready=False, number=newest + 1)
    assert members.ready(1) == []


def test_a_client_that_an_earlier_start_of_the_controller_welcomed_is_welcomed_again() -> None:
    members = new_members()
    assert greet(members, session=SESSION - 1) == (HelloAnswer.WELCOME, "")
    assert greet(members, session=SESSION - 1) == (HelloAnswer.WELCOME, "")
    assert members.ready(1) == []


def test_ready_clients_are_named_in_ascending_order() -> None:
    members = new_members()
    for client_id in (5, 1, 3):
        join(members, client_id)
    assert members.ready(1) == [1, 3, 5]
    assert sorted(member.client_id for member in members) == [1, 3, 5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": PROTOCOL + 1}, f"protocol {PROTOCOL + 1}, this controller {PROTOCOL}"),
        (
            {"protocol": 3},
            f"it speaks protocol 3, as gradbus 0.1 does, this controller {PROTOCOL}: use one version of gradbus",
        ),
        ({"dim": 1000}, "1,000 values, here 1,199,882"),
        ({"layout": LAYOUT + 1}, "other names or shapes"),
    ],
)
def test_a_client_that_does_not_fit_is_refused_with_the_reason(changes: dict[str, int], words: str) -> None:
    members = new_members()
    answer, why = greet(members, **changes)
    assert answer is HelloAnswer.REFUSE
    assert words in why
    assert len(members) == 0


def test_a_late_client_takes_part_from_the_round_after_the_open_one() -> None:
    members = new_members()
    join(members, 0, next_round=1)
    join(members, 1, next_round=4)
    assert members.ready(3) == [0]
    assert members.ready(4) == [0, 1]


def test_a_repeated_hello_does_not_change_the_first_round_of_a_client() -> None:
    members = new_members()
    join(members, next_round=2)
    greet(members, session=SESSION, next_round=7)
    assert members.ready(2) == [0]


def test_a_silent_client_is_not_waited_for_until_it_is_heard_again() -> None:
    members = new_members()
    join(members, 0)
    join(members, 1)
    heard(members, 1, 100, 2.0)
    assert members.mark_silent(DEAD_AFTER_S) == []
    assert [member.client_id for member in members.mark_silent(DEAD_AFTER_S + 0.1)] == [0]
    assert members.ready(1) == [1]
    assert (members.taking_part(1), members.silent_ids(1), members.count_live()) == ({1}, {0}, 1)
    assert members.mark_silent(DEAD_AFTER_S + 0.2) == []  # once is enough
    assert heard(members, 0, 100, 3.0)
    assert (members.ready(1), members.silent_ids(1)) == ([0, 1], set())


@pytest.mark.parametrize("phase", ["training", "preparing"])
def test_a_client_that_says_that_it_trains_may_say_nothing_for_as_long_as_it_likes(phase: str) -> None:
    members = new_members()
    join(members)
    greet(members, session=SESSION, phase=phase, round_id=1)
    assert members.mark_silent(3600.0) == []
    assert (members.ready(1), members.taking_part(1)) == ([0], {0})
    assert (members.ready(2), members.silent_ids(2)) == ([], {0})  # the next round does not begin by waiting for it
    greet(members, session=SESSION, now_s=3601.0)
    assert members.ready(2) == [0]
    assert members.mark_silent(3602.0 + DEAD_AFTER_S) != []  # and from now on it has nothing to do that takes so long


def test_who_may_be_gone_has_a_few_seconds_to_say_something_also_where_it_trained() -> None:
    members = ClientRegistry(
        ExpectedModel(DIM, LAYOUT), session=SESSION, dead_after_s=60.0, duplicate_after_s=RIVAL_AFTER_S
    )
    join(members)
    greet(members, session=SESSION, phase="training", round_id=1)
    members.put_in_doubt(0, 100, 10.0)
    assert members.mark_silent(14.9) == []
    assert [member.client_id for member in members.mark_silent(15.1)] == [0]


def test_with_a_silent_client_that_is_heard_again_its_rival_is_refused() -> None:
    members = new_members()
    join(members, incarnation=100)
    assert greet(members, incarnation=200, now_s=2.4)[0] is HelloAnswer.NOTHING
    assert [member.incarnation for member in members.mark_silent(DEAD_AFTER_S + 0.1)] == [100]
    assert (
        greet(members, incarnation=100, now_s=3.3, session=SESSION)[0] is HelloAnswer.NOTHING
    )  # it had only stood still
    assert greet(members, incarnation=200, now_s=3.7)[0] is HelloAnswer.REFUSE
    assert members.get(0, 100) is not None


def test_while_the_controller_could_not_hear_nobody_is_silent() -> None:
    members = new_members()
    join(members)
    members.excuse_silence(10.0, 10.0)
    assert members.mark_silent(10.0 + DEAD_AFTER_S) == []
    assert members.last_seen_at_s(0) == 0.0
    heard(members, 0, 100, 11.0)  # from here on it can
    assert [member.client_id for member in members.mark_silent(11.1 + DEAD_AFTER_S)] == [0]


def test_a_standstill_is_forgiven_once_who_is_waited_for_included() -> None:
    members = new_members()
    join(members)
    members.put_in_doubt(0, 100, 10.0)  # said to be gone, before the late heartbeat tells of the standstill
    members.excuse_silence(9.5, 10.0)
    assert members.mark_silent(10.0 + DEAD_AFTER_S) == []
    assert [member.client_id for member in members.mark_silent(10.1 + DEAD_AFTER_S)] == [0]


def test_every_message_of_a_client_is_a_sign_of_life() -> None:
    members = new_members()
    join(members)
    for now_s in (2.0, 4.0, 6.0):
        assert heard(members, 0, 100, now_s)
        assert members.mark_silent(now_s + 1.0) == []


def test_words_of_another_start_are_no_sign_of_life() -> None:
    members = new_members()
    join(members)
    assert not heard(members, 0, 99, 2.0)
    assert not heard(members, 0, 101, 2.0)
    assert [member.client_id for member in members.mark_silent(2.6)] == [0]


def test_a_client_that_leaves_is_removed_once_and_only_this_start_of_it() -> None:
    members = new_members()
    join(members)
    assert not members.remove(0, 99)
    assert not members.remove(1, 100)
    assert members.remove(0, 100)
    assert not members.remove(0, 100)
    assert members.ready(1) == []


@pytest.mark.parametrize("phase", ["idle", "training"])
def test_a_second_start_waits_while_the_first_one_lives_and_says_nothing_and_then_takes_its_place(phase: str) -> None:
    members = new_members()
    join(members, incarnation=100, phase=phase)
    assert greet(members, incarnation=200, now_s=1.0, host="host-a:2") == (HelloAnswer.NOTHING, "")
    assert greet(members, incarnation=200, now_s=1.0 + RIVAL_AFTER_S) == (HelloAnswer.NOTHING, "")
    assert greet(members, incarnation=200, now_s=DEAD_AFTER_S) == (HelloAnswer.NOTHING, "")
    assert greet(members, incarnation=200, now_s=DEAD_AFTER_S + 0.1, next_round=5) == (HelloAnswer.WELCOME, "")
    assert members.get(0, 100) is None
    assert members.get(0, 200) is not None
    greet(members, incarnation=200, now_s=3.0, session=SESSION)
    assert members.ready(4) == []
    assert members.ready(5) == [0]


def test_a_restarted_client_is_welcome_at_once_when_its_older_start_was_seen_to_go() -> None:
    members = new_members()
    join(members, incarnation=100)
    assert greet(members, incarnation=200, now_s=1.0)[0] is HelloAnswer.NOTHING
    assert members.remove(0, 100)
    assert greet(members, incarnation=200, now_s=1.1)[0] is HelloAnswer.WELCOME


def test_of_two_live_processes_with_one_id_the_newcomer_is_refused_and_the_older_one_stays() -> None:
    members = new_members()
    join(members, incarnation=100)
    answers = []
    for tick in range(8):
        now_s = 1.0 + 0.25 * tick
        greet(members, incarnation=100, now_s=now_s, session=SESSION)
        answers.append(greet(members, incarnation=200, now_s=now_s, host="host-b:7"))
    refused = [why for answer, why in answers if answer is HelloAnswer.REFUSE]
    assert refused == ["client id 0 is in use by host-a:1: give each its own id"]
    assert members.get(0, 100) is not None
    assert members.ready(1) == [0]


def test_while_the_controller_could_not_hear_no_newcomer_takes_the_place_of_the_older_one() -> None:
    members = new_members()
    join(members, incarnation=100)
    assert greet(members, incarnation=200, now_s=1.0)[0] is HelloAnswer.NOTHING
    # It stood still for 3 s. What the newcomer has said meanwhile is handled first, then what the older one has.
    assert greet(members, incarnation=200, now_s=4.0, is_stalled=True) == (HelloAnswer.NOTHING, "")
    assert heard(members, 0, 100, 4.0)
    heard(members, 0, 100, 4.5 + RIVAL_AFTER_S / 2)
    assert greet(members, incarnation=200, now_s=4.0 + RIVAL_AFTER_S)[0] is HelloAnswer.REFUSE
    assert members.ready(1) == [0]


def test_a_newcomer_with_a_taken_id_is_refused_also_where_the_controller_stands_still_again_and_again() -> None:
    members = new_members()
    join(members, incarnation=100)
    answers, now_s = [], 1.0
    while now_s < 4 * RIVAL_AFTER_S and HelloAnswer.REFUSE not in answers:
        heard(members, 0, 100, now_s)
        answers.append(greet(members, incarnation=200, now_s=now_s, is_stalled=True)[0])
        now_s += RIVAL_AFTER_S / 4
    assert answers[-1] is HelloAnswer.REFUSE
    assert set(answers[:-1]) == {HelloAnswer.NOTHING}
    assert members.ready(1) == [0]


def test_every_further_newcomer_gets_a_wait_of_its_own() -> None:
    members = new_members()
    join(members, incarnation=100)
    assert greet(members, incarnation=200, now_s=2.0)[0] is HelloAnswer.NOTHING
    assert greet(members, incarnation=300, now_s=3.0)[0] is HelloAnswer.NOTHING
    assert greet(members, incarnation=200, now_s=3.1)[0] is HelloAnswer.NOTHING
    assert greet(members, incarnation=300, now_s=3.1)[0] is HelloAnswer.NOTHING
    assert greet(members, incarnation=200, now_s=2.0 + RIVAL_AFTER_S)[0] is HelloAnswer.WELCOME
    assert members.get(0, 200) is not None
    heard(members, 0, 200, 4.0)
    assert greet(members, incarnation=300, now_s=4.3)[0] is HelloAnswer.NOTHING, "it waits for the new one anew"
    heard(members, 0, 200, 5.4)
    assert greet(members, incarnation=300, now_s=4.3 + RIVAL_AFTER_S)[0] is HelloAnswer.REFUSE


def test_several_newcomers_with_the_id_of_a_live_client_are_all_refused() -> None:
    members = new_members()
    join(members, incarnation=100)
    newcomers = range(200, 200 + 2 * MAX_NEWCOMERS)
    refused: list[int] = []
    for tick in range(40):
        heard(members, 0, 100, 0.25 * tick)
        refused += [
            incarnation
            for incarnation in sorted(set(newcomers) - set(refused))
            if greet(members, incarnation=incarnation, now_s=0.25 * tick)[0] is HelloAnswer.REFUSE
        ]
    assert sorted(refused) == list(newcomers)
    assert members.ready(1) == [0]


def test_newcomers_that_say_nothing_more_leave_their_wait_to_others() -> None:
    members = new_members()
    join(members, incarnation=100, phase="training")
    for incarnation in range(200, 200 + MAX_NEWCOMERS):
        greet(members, incarnation=incarnation, now_s=0.1)
    later_s = 0.2 + DEAD_AFTER_S
    greet(members, incarnation=300, now_s=later_s)
    heard(members, 0, 100, later_s + RIVAL_AFTER_S)
    assert greet(members, incarnation=300, now_s=later_s + RIVAL_AFTER_S)[0] is HelloAnswer.REFUSE


def test_a_start_that_seems_older_is_a_rival_too_for_clocks_may_be_set_back() -> None:
    members = new_members()
    join(members, incarnation=200)
    assert greet(members, incarnation=100, now_s=1.0)[0] is HelloAnswer.NOTHING
    assert greet(members, incarnation=100, now_s=DEAD_AFTER_S + 0.1)[0] is HelloAnswer.WELCOME  # the other was silent
    assert members.get(0, 100) is not None


def test_a_start_that_seems_older_is_refused_while_the_other_talks() -> None:
    members = new_members()
    join(members, incarnation=200)
    greet(members, incarnation=100, now_s=1.0, host="host-b:7")
    heard(members, 0, 200, 1.0 + RIVAL_AFTER_S)
    answer, why = greet(members, incarnation=100, now_s=1.0 + RIVAL_AFTER_S, host="host-b:7")
    assert (answer, "in use by host-a:1" in why) == (HelloAnswer.REFUSE, True)
    assert members.get(0, 200) is not None


def test_a_member_that_does_not_know_its_first_round_is_told_again() -> None:
    members = new_members()
    join(members, incarnation=100)
    members.get(0, 100).from_round = 2  # type: ignore[union-attr]
    for known, answer in ((3, HelloAnswer.WELCOME), (2, HelloAnswer.NOTHING)):
        hello = dataclasses.replace(GREETING, session=SESSION, next_round=known)
        assert members.answer_hello(Identity(0, 100), hello, next(_numbers), now_s=1.0, next_round=9)[0] is answer


def test_who_came_during_a_failed_attempt_is_let_into_the_next() -> None:
    members = new_members()
    join(members, incarnation=100)
    members.get(0, 100).from_round = 3  # type: ignore[union-attr]
    assert members.ready(2) == []
    assert [member.client_id for member in members.let_into(2)] == [0]
    assert members.ready(2) == [0]


def test_a_newcomer_with_another_model_does_not_push_out_a_member() -> None:
    members = new_members()
    join(members, incarnation=100)
    assert greet(members, incarnation=200, now_s=1.0, dim=7)[0] is HelloAnswer.REFUSE
    assert members.get(0, 100) is not None


def test_the_table_does_not_grow_without_end() -> None:
    members = new_members(max_members=2)
    join(members, 0)
    join(members, 1)
    answer, why = greet(members, 2)
    assert answer is HelloAnswer.REFUSE
    assert "has 2 clients already" in why
    assert greet(members, 0, session=SESSION)[0] is HelloAnswer.NOTHING  # a member stays one
    members.remove(1, 100)
    assert greet(members, 2)[0] is HelloAnswer.WELCOME


def test_a_client_lacks_a_command_as_long_as_its_hello_names_another_round() -> None:
    members = new_members()
    join(members, 0, round_id=2)
    join(members, 1, round_id=3, phase="training")
    assert members.lacks_command([0, 1], 3, attempt=1)
    assert not members.lacks_command([1], 3, attempt=1)
    assert not members.lacks_command([7], 3, attempt=1)  # it has left
    greet(members, 0, session=SESSION, round_id=3)
    assert not members.lacks_command([0, 1], 3, attempt=1)


def test_in_a_further_attempt_a_client_that_does_nothing_lacks_the_command_too() -> None:
    members = new_members()
    join(members, 0, round_id=3, phase="idle")
    join(members, 1, round_id=3, phase="offering")
    assert members.lacks_command([0, 1], 3, attempt=2)
    assert not members.lacks_command([1], 3, attempt=2)


def test_a_client_that_is_not_welcomed_by_this_start_gets_no_command_again() -> None:
    members = new_members()
    greet(members, 0, round_id=2)
    assert not members.lacks_command([0], 3, attempt=1)


def test_a_client_that_has_disconnected_is_not_waited_for_until_it_sends_again_although_it_trained() -> None:
    members = new_members()
    for client_id in (0, 1):
        join(members, client_id)
        greet(members, client_id, session=SESSION, phase="training", round_id=1)
    assert members.stop_waiting_for(0, 100)
    assert not members.stop_waiting_for(0, 100)
    assert not members.stop_waiting_for(0, 99)
    assert not members.stop_waiting_for(7, 100)
    assert members.ready(1) == [1]
    assert members.silent_ids(1) == {0}
    assert members.mark_silent(100.0) == [], "it is not waited for already, and the other one trains"
    assert heard(members, 0, 100, 101.0)
    assert members.ready(1) == [0, 1]
    assert members.stop_waiting_for(0, 100)


def test_the_end_of_a_run_counts_on_a_client_that_has_only_disconnected() -> None:
    members = new_members()
    join(members)
    members.stop_waiting_for(0, 100)
    assert (members.count_live(), dict(members.live_seen_s())) == (1, {0: 0.0})
    members.remove(0, 100)
    assert members.count_live() == 0


def test_the_next_start_of_a_client_that_has_disconnected_takes_its_place() -> None:
    members = new_members()
    join(members, incarnation=100)
    members.stop_waiting_for(0, 100)
    assert greet(members, incarnation=200, now_s=1.0)[0] is HelloAnswer.NOTHING, "the first one may be back in a moment"
    assert greet(members, incarnation=200, now_s=1.1 + RIVAL_AFTER_S)[0] is HelloAnswer.WELCOME
