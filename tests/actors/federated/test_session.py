"""What a client has been told, in whatever order it came, and what follows from it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from gradbus.actors.federated.client import session as orders_module
from gradbus.actors.federated.client.session import ControllerSession, ControllerStart
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.wire.control import Grant, RepeatedCommand, RunEnded, Status, Welcome
from gradbus.runtime.wire.messages import TrainCmd

WELCOME = Welcome(
    to=0,
    incarnation=1,
    run_id=5,
    next_round=1,
    codec="fp32",
    codec_options="{}",
    num_clients=2,
    heartbeat_s=0.5,
    memory="",
)
SESSION = 100
RUN, OTHER_RUN = WELCOME.run_id, WELCOME.run_id + 1
GRANT = Grant(to=0, incarnation=1, round_id=1, transfer=1)  # says of no run
OVERTAKEN_S = 1000.0  # not so soon that a machine which stands still brings it about


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "OVERTAKEN_S", OVERTAKEN_S)
    monkeypatch.setattr(orders_module, "OLD_SESSION_S", OVERTAKEN_S)


def command(round_id: int) -> TrainCmd:
    return TrainCmd(round_id, subset_size=0, epochs=1, lr=0.1, seed=3)


def welcomed(session: int = SESSION) -> ControllerSession:
    orders = ControllerSession(controller_timeout_s=10.0)
    orders.start_session(session, WELCOME)
    orders.welcome = WELCOME
    return orders


def test_a_command_that_a_newer_one_has_overtaken_is_not_heard() -> None:
    orders = welcomed()
    assert orders.take(command(3))
    assert not orders.take(command(2))
    assert orders.command == command(3)
    assert orders.is_wanted(WELCOME, command(3))


def test_a_command_of_an_earlier_round_counts_when_the_newer_one_is_not_followed_by_anything() -> None:
    orders = welcomed()
    orders.take(command(50))  # of a controller that hung until another one had begun anew
    assert not orders.take(command(2))
    orders.commanded_s -= OVERTAKEN_S
    assert orders.take(command(3))
    assert orders.is_wanted(WELCOME, command(3))


def test_a_command_that_is_given_again_is_done_once_unless_nothing_came_of_it() -> None:
    orders = welcomed()
    first = command(1)
    orders.take(first)
    orders.count(1, SESSION)
    assert not orders.take(command(1))
    assert not orders.is_wanted(WELCOME, command(1))
    orders.take(second := command(2))
    orders.mark_handled(second)
    assert not orders.is_wanted(WELCOME, second)
    orders.take(command(2))
    assert orders.is_wanted(WELCOME, command(2))


def test_a_controller_that_starts_again_may_do_an_earlier_round_again() -> None:
    orders = welcomed()
    orders.take(command(3))
    orders.count(3, SESSION)
    orders.start_session(SESSION + 1, WELCOME)
    assert orders.take(command(3))
    assert orders.is_wanted(WELCOME, command(3))


def test_what_counted_for_one_start_of_the_controller_does_not_count_for_the_next() -> None:
    orders = welcomed()
    orders.take(command(3))
    orders.start_session(SESSION + 1, WELCOME)
    orders.take(command(3))
    orders.count(3, SESSION)  # the receipt came before the welcome, and was looked at after it
    assert orders.is_wanted(WELCOME, command(3))


def test_an_update_is_for_the_start_of_the_controller_that_has_commanded_it() -> None:
    orders = welcomed()
    assert orders.is_current(SESSION)
    orders.start_session(SESSION + 1, WELCOME)
    assert not orders.is_current(SESSION)
    assert orders.is_current(SESSION + 1)


def test_the_same_controller_that_welcomes_again_has_still_said_what_it_said() -> None:
    orders = welcomed()
    orders.take(command(3))
    orders.welcome = None  # another one was heard meanwhile
    orders.start_session(SESSION, WELCOME)
    orders.welcome = WELCOME
    assert orders.command == command(3)
    assert orders.is_wanted(WELCOME, command(3))


def status(run_id: int = RUN) -> Status:
    return Status(run_id, round_id=3, phase="training", ready=0, expected=2)


def test_the_last_words_of_a_controller_that_was_replaced_are_not_believed() -> None:
    orders = welcomed()
    for said in (status(), status(OTHER_RUN), GRANT):
        assert orders.accepts_session(SESSION, said)
        assert not orders.accepts_session(SESSION - 1, said)
    assert orders.accepts_session(SESSION + 1, status())


def test_an_earlier_start_of_the_run_is_not_followed_again_however_long_the_newer_one_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(orders_module, "time", SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s))
    orders = welcomed()
    orders.begin()
    monkeypatch.setattr(orders_module, "OLD_SESSION_S", 3.0)
    for _ in range(12):
        now_s += 1.0
        orders.note_turn()
        assert not orders.accepts_session(SESSION - 1, status())
        assert not orders.accepts_session(SESSION - 1, GRANT)
    with pytest.raises(BarrierTimeout, match="a controller of this run is heard, but it started before the one that"):
        orders.check_controller()


def test_who_has_heard_of_a_later_start_and_has_no_welcome_of_it_takes_nothing_more_of_the_earlier_one() -> None:
    orders = welcomed()
    assert orders.accepts_session(SESSION + 1, status())
    assert not orders.accepts_session(SESSION, status())
    assert not orders.accepts_session(SESSION, WELCOME)
    assert orders.accepts_session(SESSION + 1, GRANT)


def test_a_session_that_goes_on_from_another_one_takes_nothing_of_an_earlier_start_of_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orders_module, "OLD_SESSION_S", 0.0)
    orders = ControllerSession(10.0, ControllerStart(RUN, SESSION))
    assert not orders.accepts_session(SESSION - 1, status())
    assert not orders.accepts_session(SESSION - 1, dataclasses.replace(WELCOME, run_id=RUN))
    assert orders.run_id == 0  # it follows nothing yet
    assert orders.accepts_session(SESSION, status())
    assert orders.accepts_session(SESSION - 2, status(OTHER_RUN))


def test_an_earlier_controller_of_another_run_is_followed_once_the_known_one_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its clock was set back, and it has no state that would say so."""
    now_s = 1000.0
    monkeypatch.setattr(orders_module, "time", SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s))
    orders = welcomed()
    assert not orders.accepts_session(SESSION - 1, status(OTHER_RUN))
    now_s += OVERTAKEN_S
    assert not orders.accepts_session(SESSION - 2, GRANT)  # of which run is not known yet
    assert orders.accepts_session(SESSION - 1, status(OTHER_RUN))
    assert orders.accepts_session(SESSION - 1, GRANT)
    orders.start_session(SESSION - 1, dataclasses.replace(WELCOME, run_id=OTHER_RUN))
    assert orders.accepts_session(SESSION - 1, status(OTHER_RUN))


def test_a_result_is_wanted_until_there_is_another_command_or_the_run_is_over() -> None:
    orders = welcomed()
    orders.take(command(3))
    assert not orders.is_superseded(command(3))
    assert orders.is_superseded(command(2))
    assert orders.is_superseded(dataclasses.replace(command(3), lr=0.2))
    orders.ended = RunEnded(5, True, "all rounds are done")
    assert orders.is_superseded(command(3))
    assert not orders.is_current(SESSION)


def test_a_client_that_could_not_hear_does_not_take_its_controller_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(orders_module, "time", SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s))
    orders = welcomed()
    orders.begin()
    for _ in range(7):
        now_s += 1.0
        orders.note_turn()
    now_s += 3600.0  # its training has held the interpreter
    orders.check_controller(str, not_asked)
    for _ in range(5):
        now_s += 1.0
        orders.note_turn()
    with pytest.raises(BarrierTimeout, match="Start it on this machine"):
        orders.check_controller(str, lambda: "Start it on this machine")


def not_asked() -> str:
    raise AssertionError("to find out what to do takes a while, and nothing is wrong")


def test_a_client_of_a_controller_with_a_slow_heartbeat_still_notices_that_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(orders_module, "time", SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s))
    orders = welcomed()
    orders.begin()
    orders.note_turn(again_within_s=8.0)
    for _ in range(3):
        now_s += 4.0
        orders.note_turn(again_within_s=8.0)
    with pytest.raises(BarrierTimeout):
        orders.check_controller()


def repeated(round_id: int, attempt: int = 1) -> RepeatedCommand:
    return RepeatedCommand(5, round_id, subset_size=0, epochs=1, lr=0.1, seed=3, attempt=attempt)


def test_a_repeated_command_is_as_good_as_the_one_that_was_lost() -> None:
    orders = welcomed()
    assert orders.take_repeated(repeated(3))
    assert orders.command == command(3)
    assert orders.is_wanted(WELCOME, command(3))


@pytest.mark.parametrize("repetitions", [1, 3])
def test_a_repeated_command_has_no_effect_on_a_client_that_has_answered_it(repetitions: int) -> None:
    orders = welcomed()
    orders.take(first := command(3))
    orders.mark_handled(first)
    assert [orders.take_repeated(repeated(3)) for _ in range(repetitions)] == [False] * repetitions
    assert not orders.is_wanted(WELCOME, command(3))
    orders.take(command(3))  # the next attempt
    orders.mark_handled(orders.command or first)
    assert not orders.take_repeated(repeated(3, attempt=2))
    assert not orders.is_wanted(WELCOME, command(3))


def test_a_repeated_command_has_no_effect_where_its_update_counts() -> None:
    orders = welcomed()
    orders.take(command(3))
    orders.count(3, SESSION)
    orders.take_repeated(repeated(3))
    orders.take_repeated(repeated(3, attempt=2))
    assert not orders.is_wanted(WELCOME, command(3))


def test_a_repeated_command_of_a_later_attempt_is_given_again_once() -> None:
    orders = welcomed()
    orders.take(first := command(3))
    orders.mark_handled(first)
    assert not orders.take_repeated(repeated(3, attempt=2))
    assert orders.is_wanted(WELCOME, command(3))
    assert orders.command is not None
    orders.mark_handled(orders.command)
    orders.take_repeated(repeated(3, attempt=2))
    assert not orders.is_wanted(WELCOME, command(3))


def test_the_command_that_comes_after_its_repetition_is_not_another_one() -> None:
    orders = welcomed()  # topics have no order between them
    orders.take_repeated(repeated(3))
    assert orders.command is not None
    orders.mark_handled(orders.command)
    assert not orders.take(command(3))
    assert not orders.is_wanted(WELCOME, command(3))
    orders.take(command(3))  # but the next attempt is
    assert orders.is_wanted(WELCOME, command(3))


def test_a_repetition_of_an_earlier_round_that_comes_late_changes_nothing() -> None:
    orders = welcomed()
    orders.take(second := command(4))
    orders.mark_handled(second)
    assert not orders.take_repeated(repeated(3))
    assert orders.command is second
    assert not orders.is_wanted(WELCOME, second)
