"""What is on its way to an inlet grows while nothing is lost, and is halved by a loss."""

from __future__ import annotations

from gradbus.runtime.transport.channels import WINDOW_BYTES
from gradbus.runtime.transport.flight import FIRST_BYTES, LEAST_BYTES, STEP_BYTES, FlightWindow

MIB = 1 << 20


def fill(window: FlightWindow, first: int, now_s: float = 0.0) -> int:
    """Send samples until there is no room. Returns the number of the last one."""
    while window.has_room(MIB):
        window.note_sent(first, MIB, now_s)
        first += 1
    return first - 1


def test_a_window_doubles_with_each_round_trip_until_it_is_as_large_as_what_is_kept() -> None:
    window, last = FlightWindow(), 0
    sizes = []
    for _ in range(4):
        last = fill(window, last + 1)
        window.note_acknowledged(last, 1.0)
        sizes.append(window.window_bytes)
    assert sizes == [2 * FIRST_BYTES, 4 * FIRST_BYTES, WINDOW_BYTES, WINDOW_BYTES]
    assert window.num_bytes == 0


def test_a_loss_halves_the_window_once_for_all_that_is_on_its_way() -> None:
    window = FlightWindow()
    last = fill(window, 1)
    window.note_lost(1, 0.0)
    window.note_lost(last, 0.0)
    assert window.window_bytes == FIRST_BYTES // 2
    window.note_acknowledged(last, 1.0)
    assert FIRST_BYTES // 2 < window.window_bytes <= FIRST_BYTES // 2 + 2 * STEP_BYTES
    last = fill(window, last + 1)
    before = window.window_bytes
    window.note_lost(last, 0.0)
    assert window.window_bytes == before // 2


def test_losses_never_take_the_window_below_what_the_link_carries_in_two_round_trips() -> None:
    window, last, now_s = FlightWindow(), 0, 0.0
    for _ in range(20):  # 5 MB/s, and a loss each time
        first, last = last + 1, fill(window, last + 1, now_s)
        now_s += window.num_bytes / 5e6
        window.note_lost(first, 0.1)
        window.note_acknowledged(last, now_s)
    assert 1_000_000 <= window.window_bytes < FIRST_BYTES


def test_a_window_that_has_come_to_be_too_large_for_a_slower_link_shrinks_once_the_old_rate_is_forgotten() -> None:
    window = FlightWindow()
    last = fill(window, 1, 0.0)
    window.note_acknowledged(last, 0.1)  # 40 MB/s
    for second in range(0, 60, 6):
        first, last = last + 1, fill(window, last + 1, float(second))
        window.note_lost(first, 0.1)
        window.note_acknowledged(last, second + 6.0)
    assert window.window_bytes <= 2 * MIB


def test_a_loss_takes_nothing_from_a_window_that_was_hardly_used() -> None:
    window = FlightWindow()
    window.note_sent(1, 1000, 0.0)
    window.note_lost(1, 0.1)
    assert window.window_bytes == FIRST_BYTES


def test_one_sample_may_always_be_on_its_way() -> None:
    window = FlightWindow()
    for number in range(1, 20):
        assert window.has_room(4 * WINDOW_BYTES)
        window.note_sent(number, 4 * WINDOW_BYTES, 0.0)
        assert not window.has_room(1)
        window.note_lost(number, 0.0)
        window.note_acknowledged(number, 1.0)
    assert window.window_bytes >= LEAST_BYTES


def test_a_new_match_begins_with_nothing_on_its_way() -> None:
    window = FlightWindow()
    fill(window, 1)
    window.clear()
    assert (window.num_bytes, window.has_room(MIB)) == (0, True)
