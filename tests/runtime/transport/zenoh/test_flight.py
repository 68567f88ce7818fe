"""What is on its way to an inlet grows while nothing is lost, and is halved by a loss."""

from __future__ import annotations

from gradbus.runtime.transport.channels import WINDOW_BYTES
from gradbus.runtime.transport.zenoh.flight import FIRST_BYTES, LEAST_BYTES, STEP_BYTES, FlightWindow

MIB = 1 << 20


def fill(window: FlightWindow, first: int) -> int:
    """Send samples until there is no room. Returns the number of the last one."""
    while window.has_room(MIB):
        window.note_sent(first, MIB)
        first += 1
    return first - 1


def test_a_window_doubles_with_each_round_trip_until_it_is_as_large_as_what_is_kept() -> None:
    window, last = FlightWindow(), 0
    sizes = []
    for _ in range(4):
        last = fill(window, last + 1)
        window.note_acknowledged(last)
        sizes.append(window.window_bytes)
    assert sizes == [2 * FIRST_BYTES, 4 * FIRST_BYTES, WINDOW_BYTES, WINDOW_BYTES]
    assert window.num_bytes == 0


def test_a_loss_halves_the_window_once_for_all_that_is_on_its_way() -> None:
    window = FlightWindow()
    last = fill(window, 1)
    window.note_lost(1)
    window.note_lost(last)
    assert window.window_bytes == FIRST_BYTES // 2
    window.note_acknowledged(last)
    assert FIRST_BYTES // 2 < window.window_bytes <= FIRST_BYTES // 2 + 2 * STEP_BYTES
    last = fill(window, last + 1)
    before = window.window_bytes
    window.note_lost(last)
    assert window.window_bytes == before // 2


def test_one_sample_may_always_be_on_its_way() -> None:
    window = FlightWindow()
    for number in range(1, 20):
        assert window.has_room(4 * WINDOW_BYTES)
        window.note_sent(number, 4 * WINDOW_BYTES)
        assert not window.has_room(1)
        window.note_lost(number)
        window.note_acknowledged(number)
    assert window.window_bytes >= LEAST_BYTES


def test_a_new_match_begins_with_nothing_on_its_way() -> None:
    window = FlightWindow()
    fill(window, 1)
    window.clear()
    assert (window.num_bytes, window.has_room(MIB)) == (0, True)
