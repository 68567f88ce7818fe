"""Sealing and opening without a bus: what is accepted once, and everything that is not."""

from __future__ import annotations

import gc
import hashlib
import hmac
import threading
from collections import Counter

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.encryption import PskKeys, SessionCipher
from gradbus.runtime.security.envelope import HEADER_BYTES, OVERHEAD_BYTES, TAG_BYTES, EnvelopeHeader
from gradbus.runtime.security.job_key import new_job_key
from gradbus.runtime.security.streams import WINDOW, OutboundStreams, ReplayWindow, StreamEncryptor
from gradbus.runtime.transport.channels import Inbox, channel_of

KEY = new_job_key()
JOB, TOPIC = "mnist", "train/control"


def make(job: str = JOB) -> SessionCipher:
    return SessionCipher(PskKeys(job, KEY))


def reason(decryptor: object, data: bytes) -> str:
    try:
        decryptor.open(data)  # type: ignore[attr-defined]
    except FrameError as error:
        return error.reason
    return "opened"


def test_what_is_sealed_is_opened_by_another_process_with_the_key() -> None:
    ours, theirs = make(), make()
    for parts in ((b"",), (b"a" * 5, b"b"), (b"h" * 80, memoryview(bytes(range(256)) * 4096))):
        opened = theirs.decryptor(TOPIC, ignores_own=False).open(bytes(ours.encryptor(TOPIC).seal(parts)))
        assert bytes(opened.data) == b"".join(map(bytes, parts))
        assert opened.peer.session == ours.session


def test_what_is_sealed_where_it_goes_is_the_same_as_what_is_sealed_apart() -> None:
    payload = memoryview(bytes(range(256)) * 4096)
    for parts in ((b"",), (b"a" * 5, b"b"), (b"p" * 8, b"h" * 80, payload)):
        ours = make()
        apart, there = (StreamEncryptor(ours.keys, ours.session, TOPIC) for _ in range(2))
        made = there.envelope(parts)
        room = bytearray(made.size - len(made.header))
        made.seal_into(memoryview(room))
        assert made.header + room == apart.seal(parts)


def test_the_page_on_the_wire_is_enough_to_open_an_envelope() -> None:
    def hkdf(salt: bytes, info: bytes, size: int) -> bytes:
        secret = hmac.digest(salt or bytes(32), KEY.secret, "sha256")
        return hmac.digest(secret, info + b"\1", "sha256")[:size]

    ours = make()
    encryptor = ours.encryptor(TOPIC)
    for counter in (1, 2):
        sealed = bytes(encryptor.seal((b"sample ", b"in parts")))
        assert sealed[:16] == b"GBS\0" + bytes([1, 1, 0, 0, 0, 0, 0, 0]) + (15).to_bytes(4, "little")
        assert sealed[16:24] == counter.to_bytes(8, "little")
        session = sealed[24:40]
        assert session == ours.session
        assert sealed[40:48] == hkdf(b"", b"gradbus/1 key id", 8)
        about = hashlib.sha256(b"gradbus/1 envelope\0mnist\0train/control").digest()
        salt = hashlib.sha256(b"gradbus/1 envelope\0mnist\0").digest()
        key = hkdf(salt, b"gradbus/1 frame\0" + bytes(4) + session + bytes(4) + b"train/control", 32)
        plain = AESGCM(key).decrypt(counter.to_bytes(12, "big"), sealed[56:], sealed[:56] + about)
        assert plain == b"sample in parts"


def test_an_envelope_shows_nothing_of_what_is_in_it() -> None:
    sealed = bytes(make().encryptor(TOPIC).seal((b"the weights of the model",)))
    assert len(sealed) == OVERHEAD_BYTES + 24
    assert b"weights" not in sealed
    assert KEY.secret not in sealed


def test_every_bit_of_header_ciphertext_and_tag_counts() -> None:
    ours, theirs = make(), make()
    decryptor = theirs.decryptor(TOPIC, ignores_own=False)
    sealed = bytes(ours.encryptor(TOPIC).seal((b"sample",)))
    found: Counter[str] = Counter()
    for bit in range(8 * len(sealed)):
        forged = bytearray(sealed)
        forged[bit // 8] ^= 1 << bit % 8
        found[reason(decryptor, bytes(forged))] += 1
    assert "opened" not in found
    assert found["tag"] >= 8 * (len(sealed) - HEADER_BYTES + 8 + 16) - 8  # sealed bytes and tag, counter and session
    assert len(theirs.peers) == 1, "a forgery leaves nothing behind"
    assert reason(decryptor, sealed) == "opened"


def test_a_cut_or_longer_envelope_is_refused_at_every_length() -> None:
    decryptor = make().decryptor(TOPIC, ignores_own=False)
    sealed = bytes(make().encryptor(TOPIC).seal((b"sample",)))
    assert {reason(decryptor, sealed[:end]) for end in range(OVERHEAD_BYTES)} == {"short"}
    assert {reason(decryptor, sealed[:end]) for end in range(OVERHEAD_BYTES, len(sealed))} == {"limits"}
    assert reason(decryptor, sealed + b"\0") == "limits"


@pytest.mark.parametrize(
    ("sealed_with", "opened_with"),
    [(make(), make("other")), (make("mnis"), make("mnist")), (make(), SessionCipher(PskKeys("other", KEY)))],
)
def test_an_envelope_of_another_job_is_not_opened(sealed_with: SessionCipher, opened_with: SessionCipher) -> None:
    sealed = bytes(sealed_with.encryptor(TOPIC).seal((b"sample",)))
    assert reason(opened_with.decryptor(TOPIC, ignores_own=False), sealed) == "tag"


def test_an_envelope_for_another_topic_or_another_rank_is_not_opened() -> None:
    sealed = bytes(make().encryptor("train/frame/g/1").seal((b"sample",)))
    for topic in ("train/frame/g/2", "train/frame/g", "train/control"):
        assert reason(make().decryptor(topic, ignores_own=False), sealed) == "tag"


def test_an_envelope_made_with_another_key_says_which_two_keys_differ() -> None:
    other = new_job_key()
    sealed = bytes(SessionCipher(PskKeys(JOB, other)).encryptor(TOPIC).seal((b"sample",)))
    with pytest.raises(FrameError, match=f"{other.id.hex()}, here it is {KEY.id.hex()}. Compare") as caught:
        make().decryptor(TOPIC, ignores_own=False).open(sealed)
    assert caught.value.reason == "other key"


def test_an_envelope_of_another_epoch_is_not_opened() -> None:
    ours = make()
    ours.keys.current.epoch = 1
    assert reason(make().decryptor(TOPIC, ignores_own=False), bytes(ours.encryptor(TOPIC).seal((b"x",)))) == "other key"


def test_a_process_does_not_take_its_own_envelopes_back_where_it_does_not_hear_itself() -> None:
    ours = make()
    sealed = bytes(ours.encryptor(TOPIC).seal((b"sample",)))
    assert reason(ours.decryptor(TOPIC, ignores_own=True), sealed) == "own"
    assert reason(ours.decryptor(TOPIC, ignores_own=False), sealed) == "opened"


def test_every_envelope_is_opened_once_in_whatever_order_they_come() -> None:
    ours, decryptor = make(), make().decryptor(TOPIC, ignores_own=False)
    encryptor = ours.encryptor(TOPIC)
    sealed = [bytes(encryptor.seal((bytes([n]),))) for n in range(100)]
    order = sealed[50:] + sealed[:50][::-1]
    assert {reason(decryptor, one) for one in order} == {"opened"}
    assert {reason(decryptor, one) for one in order} == {"replay"}


def test_two_writers_of_a_topic_share_one_counter() -> None:
    ours, decryptor = make(), make().decryptor(TOPIC, ignores_own=False)
    assert reason(decryptor, bytes(ours.encryptor(TOPIC).seal((b"same",)))) == "opened"
    assert reason(decryptor, bytes(ours.encryptor(TOPIC).seal((b"same",)))) == "opened"


def test_what_is_older_than_the_window_counts_as_seen() -> None:
    window = ReplayWindow()
    window.note(WINDOW + 10)
    assert not window.is_new(10)
    assert window.is_new(11)
    window.note(11)
    assert not window.is_new(11)
    window.note(10**12)
    assert not window.is_new(WINDOW + 11)


@given(st.lists(st.tuples(st.integers(1, 3 * WINDOW), st.sampled_from((1, 1, 2, 30, WINDOW + 1))), max_size=30))
def test_a_window_takes_what_a_set_of_all_that_was_seen_would_take(runs: list[tuple[int, int]]) -> None:
    window, seen, highest = ReplayWindow(), {0}, 0
    for counter in (number for start, length in runs for number in range(start, start + length)):
        assert window.is_new(counter) == (counter not in seen and counter > highest - WINDOW)
        if window.is_new(counter):
            window.note(counter)
            seen.add(counter)
            highest = max(highest, counter)


def test_a_stream_goes_on_with_another_key_after_two_to_the_32_envelopes() -> None:
    ours, decryptor = make(), make().decryptor(TOPIC, ignores_own=False)
    encryptor = StreamEncryptor(ours.keys, ours.session, TOPIC, start=(1 << 32) - 2)
    sealed = [bytes(encryptor.seal((b"sample",))) for _ in range(4)]
    assert [reason(decryptor, one) for one in (sealed[0], sealed[2], sealed[1], sealed[3])] == ["opened"] * 4
    far = StreamEncryptor(ours.keys, ours.session, TOPIC, start=9 << 32)
    assert reason(decryptor, bytes(far.seal((b"sample",)))) == "counter"


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_for_a_reason_and_leave_nothing(data: bytes) -> None:
    seal = make()
    assert reason(seal.decryptor(TOPIC, ignores_own=False), data) in {"short", "not sealed", "version", "limits"}
    assert len(seal.peers) == 1


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        EnvelopeHeader,
        st.integers(0, 255),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        st.binary(min_size=16, max_size=16),
        st.one_of(st.just(KEY.id), st.binary(min_size=8, max_size=8)),
        st.integers(0, 2**32 - 1),
    ),
    st.binary(max_size=200),
)
def test_any_header_is_refused_before_memory_is_taken_for_it(header: EnvelopeHeader, body: bytes) -> None:
    seal = make()
    assert reason(seal.decryptor(TOPIC, ignores_own=False), envelope.pack(header) + body) != "opened"
    fitting = header._replace(size=len(body), level=envelope.PSK, epoch=0, key_id=KEY.id, counter=header.counter or 1)
    data = envelope.pack(fitting) + body + bytes(TAG_BYTES)
    assert reason(seal.decryptor(TOPIC, ignores_own=False), data) == "tag"
    assert len(seal.peers) == 1


def inbox(incarnation: int) -> str:
    return channel_of(Inbox(incarnation)).name


def pair_of(topic: str, made: bytes) -> tuple[str, int, int]:
    """What the key of an envelope is derived from, beside the secret and the session, and its nonce."""
    counter = envelope.parse(memoryview(made)).counter
    return topic, counter >> 32, counter


def test_no_key_meets_a_nonce_twice_however_often_the_stream_to_an_inbox_is_made_again() -> None:
    keys, there = PskKeys(JOB, KEY), make()
    ours = OutboundStreams(keys, bytes(range(16)), most_inboxes=3)
    readers = {topic: there.decryptor(topic, ignores_own=False) for topic in map(inbox, range(10))}
    pairs = []
    for number in range(200):
        topic = inbox(number * 7 % 10 if number % 3 else 0)  # one is addressed again and again, the others in turns
        made = bytes(ours.encryptor(topic).seal((b"x",)))
        pairs.append(pair_of(topic, made))
        assert bytes(readers[topic].open(made).data) == b"x"
    assert len(set(pairs)) == len(pairs)


def test_no_key_meets_a_nonce_twice_where_threads_address_the_same_inboxes_and_none_is_kept() -> None:
    ours = OutboundStreams(PskKeys(JOB, KEY), bytes(range(16)), most_inboxes=1)
    pairs: list[tuple[str, int, int]] = []
    start = threading.Barrier(4)

    def address() -> None:
        start.wait(timeout=60)
        for number in range(300):
            topic = inbox(number % 3)
            pairs.append(pair_of(topic, bytes(ours.encryptor(topic).seal((b"x",)))))

    threads = [threading.Thread(target=address) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(pairs) == 4 * 300
    assert len(set(pairs)) == len(pairs)


def test_an_encryptor_that_is_no_longer_kept_goes_on_with_counters_of_its_own() -> None:
    ours = OutboundStreams(PskKeys(JOB, KEY), bytes(range(16)), most_inboxes=1)
    held = ours.encryptor(inbox(1))  # by a thread that has no turn meanwhile
    ours.encryptor(inbox(2))
    again = ours.encryptor(inbox(1))
    assert again is not held
    pairs = [pair_of(inbox(1), bytes(one.seal((b"x",)))) for one in (again, held, again, held)]
    assert len(set(pairs)) == 4


def test_of_the_streams_to_inboxes_no_more_are_kept_than_there_may_be() -> None:
    ours = OutboundStreams(PskKeys(JOB, KEY), bytes(range(16)), most_inboxes=8)
    gc.collect()
    before = sum(type(one) is StreamEncryptor for one in gc.get_objects())
    for incarnation in range(1000):
        ours.encryptor(inbox(incarnation)).seal((b"x",))
    gc.collect()
    assert sum(type(one) is StreamEncryptor for one in gc.get_objects()) - before == 8
    assert ours.last == ours.retained == {}


def test_other_topics_keep_a_count_of_their_own() -> None:
    ours = OutboundStreams(PskKeys(JOB, KEY), bytes(range(16)))
    for topic in (TOPIC, inbox(1), TOPIC, inbox(2)):
        ours.encryptor(topic).seal((b"x",))
    assert ours.last == {TOPIC: 2}
