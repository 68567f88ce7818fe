"""SlotPool of shared memory: who may use one, when it is free again, and what is refused."""

from __future__ import annotations

import os
import signal
import struct
import threading
from typing import Any

import pytest
from shared_pair import Ranks, chunk, told

from gradbus.runtime.shm.layout import SLOTS
from gradbus.runtime.wire.frames import CHUNK_BYTES, Frame


def number_of(descriptor: bytes | None) -> int:
    assert descriptor is not None
    number, _ = struct.unpack("<II", descriptor)
    return int(number)


def put(ranks: Ranks, value: int, readers: tuple[int, ...] = (1,), size: int = 100) -> bytes:
    """Rank 0 fills a slot. Returns the descriptor."""
    descriptor = ranks.shared[0].slots.put(readers, chunk(value, size))
    assert descriptor is not None
    return descriptor


def get(ranks: Ranks, descriptor: bytes, rank: int = 1, size: int = 100) -> Frame | None:
    frames = ranks.shared[rank].slots.get(told(descriptor, size))
    return frames[0] if frames else None


def data_of(frame: Frame | None) -> bytes:
    assert frame is not None
    return bytes(frame.data)


def test_a_reader_sees_what_the_sender_put_in_the_very_same_memory() -> None:
    ranks = Ranks()
    descriptor = put(ranks, 7, size=CHUNK_BYTES)
    frame = get(ranks, descriptor, size=CHUNK_BYTES)
    assert frame is not None
    assert data_of(frame) == bytes([7]) * CHUNK_BYTES
    assert frame.data.readonly
    start = ranks.layout.slots_at + number_of(descriptor) * CHUNK_BYTES
    ranks.memory(0)[start] = 8
    assert frame.data[0] == 8


def test_a_slot_is_free_again_when_the_last_view_on_it_is_gone() -> None:
    ranks = Ranks()
    frame: Any = get(ranks, put(ranks, 1))
    view = frame.data[10:20]
    del frame
    assert number_of(put(ranks, 2)) == 1
    assert bytes(view) == bytes([1]) * 10
    del view
    assert number_of(put(ranks, 3)) == 0


def test_there_is_no_slot_while_readers_hold_all_of_them() -> None:
    ranks = Ranks()
    held = [get(ranks, put(ranks, value)) for value in range(SLOTS)]
    assert ranks.shared[0].slots.put((1,), chunk(99)) is None
    assert [data_of(frame)[0] for frame in held] == list(range(SLOTS))
    del held[5]
    assert number_of(put(ranks, 99)) == 5


def test_one_frame_tells_of_some_chunks_that_follow_one_another() -> None:
    ranks = Ranks()
    size, last = 1000, 10
    descriptors = b"".join(put(ranks, value, size=size) for value in (5, 6)) + put(ranks, 7, size=last)
    frames = ranks.shared[1].slots.get(told(descriptors, size, total=4 * size + last, seq=2))
    assert [(frame.seq, frame.offset, frame.size) for frame in frames] == [
        (2, 2 * size, size),
        (3, 3 * size, size),
        (4, 4 * size, last),
    ]
    assert [data_of(frame) for frame in frames] == [bytes([5]) * size, bytes([6]) * size, bytes([7]) * last]
    assert ranks.shared[1].slots.get(told(descriptors, size, total=4 * size + last, seq=2)) == []
    del frames[1]
    assert number_of(put(ranks, 8)) == 1


def test_of_a_frame_that_was_partly_here_already_the_rest_is_used() -> None:
    ranks = Ranks()
    first, second = put(ranks, 1), put(ranks, 2)
    held = get(ranks, first)
    (rest,) = ranks.shared[1].slots.get(told(first + second, 100, total=200))
    assert (rest.seq, data_of(rest)) == (1, bytes([2]) * 100)
    assert data_of(held) == bytes([1]) * 100


def test_slots_that_nobody_was_told_of_are_free_again() -> None:
    ranks = Ranks()
    ranks.shared[0].slots.reclaim(put(ranks, 1) + put(ranks, 2))
    assert [number_of(put(ranks, value)) for value in (3, 4)] == [0, 1]


@pytest.mark.parametrize("world", [2, 3, 5, 9, 17])
def test_there_is_a_slot_for_every_reader_also_when_one_takes_all_that_it_can_get(world: int) -> None:
    """Readers hold a chunk until it has come from all ranks: else those who serve each other's readers last would wait
    in a circle."""
    ranks = Ranks(world)
    slots, held = ranks.shared[0].slots, []
    while (descriptor := slots.put((1,), chunk(1))) is not None:
        held.append(get(ranks, descriptor))
    assert len(held) == SLOTS - (world - 2)
    for reader in range(2, world):
        put(ranks, reader, readers=(reader,))
    assert slots.put(tuple(range(1, world)), chunk(1)) is None
    held.pop()
    put(ranks, 1, readers=tuple(range(1, world)))


def test_when_the_last_reader_is_gone_what_was_for_it_still_gets_an_answer() -> None:
    """Its payloads end a moment later."""
    ranks = Ranks()
    slots = ranks.shared[0].slots
    slots.lose(1)
    for _ in range(SLOTS):
        put(ranks, 1)
    assert slots.put((1,), chunk(1)) is None


def test_a_slot_for_two_readers_is_free_when_both_are_through_with_it() -> None:
    ranks = Ranks(3)
    descriptor = put(ranks, 1, readers=(1, 2))
    del_one = get(ranks, descriptor, rank=1)
    del del_one
    assert number_of(put(ranks, 2, readers=(1,))) == 1
    get(ranks, descriptor, rank=2)
    assert number_of(put(ranks, 3)) == 0


def test_a_frame_that_comes_again_is_not_taken_again() -> None:
    ranks = Ranks()
    descriptor = put(ranks, 1)
    frame = get(ranks, descriptor)
    assert get(ranks, descriptor) is None  # while it is in use
    del frame
    assert get(ranks, descriptor) is None  # and after that


def test_a_frame_from_long_ago_is_not_taken_for_the_one_that_the_slot_holds_now() -> None:
    ranks = Ranks()
    old = put(ranks, 1)
    get(ranks, old)
    new = put(ranks, 2)
    assert number_of(new) == number_of(old)
    assert get(ranks, old) is None  # DDS may repeat a frame
    frame = get(ranks, new)
    assert data_of(frame)[0] == 2
    assert get(ranks, old) is None
    del frame
    get(ranks, old)
    assert number_of(put(ranks, 3)) == number_of(new)  # and it is known to be free


def test_generations_begin_anew_after_the_last_one() -> None:
    ranks = Ranks()
    slot = ranks.shared[0].slots._slots[0]  # noqa: SLF001 - to fill it so often takes hours
    slot.generation = ranks.layout.notes(ranks.memory(1))[0 * SLOTS] = 0xFFFF_FFFE
    for value in range(4):  # 2**32 - 1, 0, 1, 2
        descriptor = put(ranks, value)
        assert number_of(descriptor) == 0
        assert data_of(get(ranks, descriptor))[0] == value
        assert get(ranks, descriptor) is None
    assert slot.generation == 2


@pytest.mark.parametrize(
    ("number", "size", "sender"),
    [
        (SLOTS, 100, 0),
        (0xFFFF_FFFF, 100, 0),
        (0, CHUNK_BYTES + 1, 0),
        (0, 8 * CHUNK_BYTES, 0),
        (0, 0, 0),
        (0, 100, 1),
        (0, 100, 7),
    ],
)
def test_what_no_sender_of_ours_says_is_refused(number: int, size: int, sender: int) -> None:
    """A slot that is none, more than a slot holds, nothing at all, this rank itself, a rank that is none."""
    ranks = Ranks()
    slots = ranks.shared[1].slots
    assert slots.get(told(struct.pack("<II", number, 1), size, sender=sender)) == []
    assert slots._leased == {}  # noqa: SLF001 - a lease of a slot that is none shows nowhere else


def test_data_stays_readable_when_all_else_is_gone() -> None:
    ranks = Ranks()
    frame = get(ranks, put(ranks, 5, size=CHUNK_BYTES), size=CHUNK_BYTES)
    del ranks
    assert data_of(frame) == bytes([5]) * CHUNK_BYTES


def test_a_rank_that_is_gone_keeps_its_slots_and_gets_nothing_more() -> None:
    ranks = Ranks(3)
    slots = ranks.shared[0].slots
    put(ranks, 1, readers=(1, 2))
    get(ranks, put(ranks, 2, readers=(2,)), rank=2)
    slots.lose(1)
    assert not slots.reaches([1, 2])
    assert slots.reaches([2])
    assert number_of(put(ranks, 3, readers=(2,))) == 1  # rank 1 may only seem dead, and still look at slot 0


def test_a_slot_that_nobody_heard_of_is_free_again() -> None:
    ranks = Ranks()
    slots = ranks.shared[0].slots
    descriptor = put(ranks, 1)
    slots.reclaim(descriptor)
    assert number_of(put(ranks, 2)) == 0
    slots.reclaim(descriptor)  # this is another one by now
    assert number_of(put(ranks, 3)) == 1


def test_a_copy_that_is_interrupted_leaves_the_slot_free() -> None:
    class Interrupted:
        def __len__(self) -> int:
            return 100

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    ranks = Ranks()
    with pytest.raises(KeyboardInterrupt):
        ranks.shared[0].slots.put((1,), Interrupted())  # type: ignore[arg-type]
    assert number_of(put(ranks, 1)) == 0


def test_a_forked_child_does_not_give_back_what_its_parent_holds() -> None:
    ranks = Ranks()
    frame = get(ranks, put(ranks, 1))
    lock, held, over = ranks.shared[1].slots._lock, threading.Event(), threading.Event()  # noqa: SLF001 - another thread holds it at the fork

    def hold() -> None:
        with lock:
            held.set()
            over.wait(20.0)

    thread = threading.Thread(target=hold)  # the child does not have it, and sees the lock taken for ever
    thread.start()
    held.wait(20.0)
    child = os.fork()
    if not child:
        signal.alarm(10)  # ends it if it hangs
        del frame
        os._exit(0)
    _, status = os.waitpid(child, 0)
    over.set()
    thread.join()
    assert status == 0
    assert number_of(put(ranks, 2)) == 1
    assert data_of(frame)[0] == 1
