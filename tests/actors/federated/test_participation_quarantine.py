"""Strikes: who gets one, how many keep a client out, for how long, and that nobody escapes by starting again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.actors.federated.controller import update_admission as module
from gradbus.actors.federated.controller.participation import FOR_GOOD, MAX_TEXT
from gradbus.actors.federated.controller.update_admission import MAX_REPORTED_STRIKES, Quarantine, Strike


def struck(conduct: Quarantine, client_id: int, *rounds: int) -> None:
    for round_id in rounds:
        assert conduct.strike(client_id, round_id, "malformed", "no codec accepts it") is not None


def test_the_last_strike_keeps_a_client_out_for_the_rounds_that_follow() -> None:
    conduct = Quarantine(3, 2)
    struck(conduct, 7, 1, 2)
    assert conduct.exclusion_reason(7, 3) is None
    struck(conduct, 7, 4)
    assert [conduct.exclusion_reason(7, round_id) is None for round_id in (5, 6, 7)] == [False, False, True]
    assert conduct.excluded(5) == {7: 7}
    assert conduct.excluded(7) == {}
    assert conduct.exclusion_reason(7, 5) == (
        "client 7 is in quarantine, out until round 7 after strike 3 in round 4: malformed, no codec accepts it"
    )
    assert conduct.out_until(8) == 0


def test_without_an_end_it_is_for_good() -> None:
    conduct = Quarantine(1, 0)
    struck(conduct, 7, 1)
    assert conduct.excluded(1_000_000) == {7: FOR_GOOD}
    assert "out for good after strike 1" in (conduct.exclusion_reason(7, 1_000_000) or "")


def test_a_client_that_is_back_is_out_again_with_its_next_strike() -> None:
    conduct = Quarantine(3, 2)
    struck(conduct, 7, 1, 2, 3, 6)
    assert conduct.out_until(7) == 9
    assert [strike.count for strike in conduct.take_new()] == [1, 2, 3, 3]


def test_one_round_brings_one_strike_and_every_client_has_its_own() -> None:
    conduct = Quarantine(2, 5)
    struck(conduct, 1, 1)
    assert conduct.strike(1, 1, "samples", "0 of them") is None
    struck(conduct, 2, 1)
    assert conduct.excluded(2) == {}
    assert [strike.client_id for strike in conduct.take_new()] == [1, 2]
    assert conduct.take_new() == ()


def test_strikes_can_be_switched_off() -> None:
    conduct = Quarantine(0, 5)
    assert [conduct.strike(1, round_id, "samples", "") for round_id in range(1, 9)] == [None] * 8
    assert conduct.excluded(1) == {}


@settings(derandomize=True, deadline=None)
@given(rounds=st.sets(st.integers(1, 60), max_size=40), limit=st.integers(1, 5), span=st.integers(1, 9))
def test_a_restart_in_between_forgives_nothing(rounds: set[int], limit: int, span: int) -> None:
    unbroken, broken = Quarantine(limit, span), Quarantine(limit, span)
    for round_id in sorted(rounds):
        again = Quarantine(limit, span)
        again.load_state(Strike(**entry) for entry in json.loads(json.dumps(broken.state())))
        broken = again
        for conduct in (unbroken, broken):
            if conduct.exclusion_reason(3, round_id) is None:
                conduct.strike(3, round_id, "samples", "0")
        assert unbroken.state() == broken.state()
        assert unbroken.excluded(round_id + 1) == broken.excluded(round_id + 1)


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 4)
    conduct = Quarantine(2, 100)
    struck(conduct, 0, 1, 2)  # kept out: the last to be forgotten
    for client_id in range(1, 50):
        struck(conduct, client_id, 3)
    assert len(conduct.state()) == 4
    assert conduct.excluded(4) == {0: 103}
    for client_id in range(200):
        conduct.strike(client_id, 5, "malformed", "x" * 10_000)
    told = conduct.take_new()
    assert len(told) == MAX_REPORTED_STRIKES
    assert all(len(strike.detail) <= MAX_TEXT for strike in told)


def test_who_switches_strikes_off_and_resumes_keeps_nobody_out() -> None:
    before = Quarantine(1, 0)
    struck(before, 7, 1)
    after = Quarantine(0, 0)
    after.load_state(Strike(**entry) for entry in before.state())
    assert after.excluded(2) == {}
