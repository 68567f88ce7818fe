"""How long payloads wait for slots of shared memory, and what they do then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sent_payload import Payload, fill, free_slots
from shared_pair import Ranks

from gradbus.runtime.bus.sender import Pause
from gradbus.runtime.collectives import link
from gradbus.runtime.collectives.link import NEXT_WAIT_S, SLOT_WAIT_S, STARVED
from gradbus.runtime.shm.slots import SlotPool
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import Flags


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_without_shared_memory_nothing_is_waited_for() -> None:
    payload = Payload(None, chunks=9)
    samples = list(payload.sender.samples(lambda: False))
    assert len(samples) == 9
    assert not any(isinstance(sample, Pause) for sample in samples)


def test_slots_that_are_not_given_back_are_not_waited_for_long(ranks: Ranks) -> None:
    free_slots(ranks.shared[0].slots)
    payload = Payload(ranks.shared[0].slots)
    payload.write_rest()
    assert payload.numbers() == [0, 1, 2]
    sent = [frames.parse(b"".join(parts)) for parts in payload.sent]
    assert not any(frame.flags & Flags.SHARED for frame in sent)
    assert b"".join(bytes(frame.data) for frame in sent) == payload.data.tobytes()


class Waiting:
    """A payload that waits for slots, all of which are held. Time is what the test says."""

    def __init__(self, slots: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self._slots = slots
        self._first, *_ = fill(slots)
        self._samples = Payload(slots, chunks=100).sender.samples(lambda: False)

    def goes_on_after(self, seconds: float) -> str | None:
        """How the next chunk goes, so long after the last look, if it does."""
        self.now_s += seconds
        sample = next(self._samples)
        if isinstance(sample, Pause):
            return None
        return "memory" if frames.parse(b"".join(sample[1])).flags & Flags.SHARED else "DDS"

    def release(self) -> None:
        """One slot is free."""
        self._slots.reclaim(self._first)

    def lose_to_another(self) -> None:
        """One slot comes back, and another payload gets it."""
        self.release()
        (self._first,) = fill(self._slots)


def test_when_no_slot_comes_back_a_payload_goes_on_over_dds_chunk_by_chunk(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(ranks.shared[0].slots, monkeypatch)
    assert waiting.goes_on_after(0) is None
    assert waiting.goes_on_after(0.9 * SLOT_WAIT_S) is None
    assert waiting.goes_on_after(0.2 * SLOT_WAIT_S) == "DDS"
    for _ in range(3):
        assert waiting.goes_on_after(0) is None
        assert waiting.goes_on_after(0.9 * NEXT_WAIT_S) is None
        assert waiting.goes_on_after(0.2 * NEXT_WAIT_S) == "DDS"


def test_a_payload_that_went_over_dds_uses_slots_again_when_there_are_some(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(ranks.shared[0].slots, monkeypatch)
    assert [waiting.goes_on_after(seconds) for seconds in (0, 2 * SLOT_WAIT_S)] == [None, "DDS"]
    waiting.release()
    assert waiting.goes_on_after(2 * SLOT_WAIT_S) == "memory"
    assert waiting.goes_on_after(0) is None
    assert waiting.goes_on_after(0.9 * SLOT_WAIT_S) is None
    assert waiting.goes_on_after(0.2 * SLOT_WAIT_S) == "DDS"


def test_while_slots_come_back_a_payload_waits_for_its_turn_but_not_for_ever(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(ranks.shared[0].slots, monkeypatch)
    assert waiting.goes_on_after(0) is None
    looks = 2 * STARVED - 1
    for _ in range(looks):
        waiting.lose_to_another()
        assert waiting.goes_on_after(0.5 * SLOT_WAIT_S) is None
    waiting.lose_to_another()
    assert waiting.goes_on_after(SLOT_WAIT_S) == "DDS"


def test_who_advances_a_payload_waits_for_slots_while_the_writer_thread_does_not_any_more(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all of it would go over DDS, on a thread that has better things to do, while that writes one chunk."""
    monkeypatch.setattr(link, "SLOT_WAIT_S", 0.0)
    free_slots(ranks.shared[0].slots)
    payload = Payload(ranks.shared[0].slots)
    for sample in payload.sender.samples(lambda: False):
        if not isinstance(sample, Pause):
            break
    assert not payload.sender.advance()
