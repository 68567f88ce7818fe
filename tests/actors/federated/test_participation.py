"""What has come of each client in a run, and who never counted."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time

from gradbus.actors.federated.controller.participation import MAX_REFUSED, NO_UPDATE, Participation


def test_who_counted_once_is_not_named_and_who_never_did_is_with_the_newest_reason() -> None:
    participation = Participation()
    participation.commit(1, {0: 600, 1: 300}, {2: "client silent"})
    participation.commit(2, {0: 600}, {1: "client lost", 2: "training failed: RuntimeError: no data"})
    assert participation.never_counted([]) == {
        2: "expected in 2 rounds; in round 2: training failed: RuntimeError: no data"
    }


def test_who_was_expected_and_never_came_is_named_too() -> None:
    participation = Participation()
    participation.commit(1, {0: 600}, {})
    assert participation.never_counted(range(2)) == {1: "it was expected and never took part in a round"}


def test_who_was_turned_away_is_named_with_what_it_was_told() -> None:
    participation = Participation()
    participation.note_refused(5, "its model is not the same")
    assert participation.never_counted([]) == {5: "it was not let in: its model is not the same"}
    participation.commit(1, {5: 10}, {})
    participation.note_refused(5, "client id 5 is in use")  # a second process with its id
    assert participation.never_counted([]) == {}


def test_the_samples_are_those_that_a_client_announced_last() -> None:
    participation = Participation()
    participation.commit(1, {0: 600, 1: 300}, {})
    participation.commit(2, {0: 50}, {1: NO_UPDATE})
    assert participation.samples() == {0: 50, 1: 300}


def test_a_restart_knows_it_all() -> None:
    before, after = Participation(), Participation()
    before.commit(1, {0: 600}, {1: NO_UPDATE})
    after.load_state(json.loads(json.dumps(before.state())))
    assert (after.never_counted([]), after.samples()) == (before.never_counted([]), {0: 600})


def test_clients_may_be_turned_away_while_its_state_is_written() -> None:
    participation = Participation()
    for client_id in range(MAX_REFUSED // 2):
        participation.note_refused(client_id, "no")
    newcomers, failed = iter(range(10_000, 10_400)), []

    def write() -> None:
        try:
            for _ in range(400):
                json.dumps(participation.state())
        except RuntimeError as error:  # dictionary changed size during iteration
            failed.append(error)

    def collecting(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)  # other threads go on while the garbage collector has its callbacks called

    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(collecting)
    gc.set_threshold(50)
    try:
        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive():
            if (client_id := next(newcomers, None)) is not None:
                participation.note_refused(client_id, "no")
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collecting)
        sys.setswitchinterval(interval_s)
        writer.join()
    assert failed == []


def test_made_up_ids_do_not_make_it_grow_without_end() -> None:
    participation = Participation()
    for client_id in range(2 * MAX_REFUSED):
        participation.note_refused(client_id, "no")
    assert len(participation.state()) == MAX_REFUSED
    participation.commit(1, {0x7000_0000: 5}, {})
    assert participation.samples() == {0x7000_0000: 5}
