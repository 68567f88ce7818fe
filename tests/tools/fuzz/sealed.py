"""Targets: envelopes and the samples in them, greetings, and job keys."""

from __future__ import annotations

import functools

from fuzz.target import Target, must, reads_back
from gradbus.runtime.errors import ConfigError, FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.encryption import Opened, PskKeys, SessionCipher, StreamDecryptor
from gradbus.runtime.security.envelope import HEADER_BYTES, EnvelopeHeader
from gradbus.runtime.security.job_key import JobKey, parse_job_key
from gradbus.runtime.security.membership import (
    MAX_ANSWERS,
    MAX_LABEL_BYTES,
    ChallengeMessage,
    pack_challenge,
    parse_challenge,
)
from gradbus.runtime.security.peers import MAX_HELD_EACH
from gradbus.runtime.transport.sample_layout import LAYOUTS, SampleError

_JOB, _TOPIC = "fuzz", "train/client_update"
_CHOSEN_BYTES = 1 + 8 + 4 + 4  # of an input: session, counter, size, moment
_KEPT_BYTES = 64 << 10  # beside the sample: what is remembered of a session


@functools.cache
def _keys() -> PskKeys:
    return PskKeys(_JOB, JobKey(bytes(32)))


def _opened(decryptor: StreamDecryptor, data: bytes) -> Opened | None:
    try:
        return decryptor.open(data)
    except FrameError:
        return None


def _read_envelope(data: bytes) -> None:
    """As it is: nobody has sealed it. Then as a member would seal it, and as one that writes what it likes in the
    header: this opens once at most, and not with a bit changed."""
    sender, receiver = SessionCipher(_keys()), SessionCipher(_keys())
    decryptor = receiver.decryptor(_TOPIC, ignores_own=False)
    must(_opened(decryptor, data) is None, "an envelope that nobody has sealed was opened")
    sealed = bytes(sender.encryptor(_TOPIC).seal((data,)))
    at = len(data) % len(sealed)
    changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
    must(_opened(decryptor, changed) is None, "a bit was changed, and nobody has noticed")
    must(len(receiver.peers) == 1, "a forgery has left something behind")
    opened = _opened(decryptor, sealed)
    must(opened is not None and bytes(opened.data) == data, "what was sealed is not what was opened")
    must(_opened(decryptor, sealed) is None, "an envelope was opened twice")
    _take(receiver, opened)
    while len(data) >= _CHOSEN_BYTES:  # several, so that their counters meet in one window
        size = min(int.from_bytes(data[9:13], "little"), 1 << 30)
        chosen, data = data[:_CHOSEN_BYTES], data[_CHOSEN_BYTES:]
        plain, data = data[: size % 97], data[size % 97 :]
        odd = _member_writes(chosen, plain, size)
        opened = _opened(decryptor, odd)
        if opened is not None:
            must(bytes(opened.data) == plain and opened.header.size == len(plain), "another size than that of its data")
            must(_opened(decryptor, odd) is None, "an envelope was opened twice")
            _take(receiver, opened)


def _member_writes(chosen: bytes, plain: bytes, size: int) -> bytes:
    """An envelope with the right tag, and a header by chance. One time in two the size is right."""
    counter = int.from_bytes(chosen[1:9], "little")
    session = bytes([chosen[0] % 4]) * envelope.SESSION_BYTES
    said = len(plain) if chosen[0] & 0x80 else size
    moment = int.from_bytes(chosen[13:17], "little")
    head = envelope.pack(EnvelopeHeader(envelope.PSK, 0, said, counter, session, _keys().current.key_id, moment))
    key = _keys().current.stream_key(session, _TOPIC, counter >> 32)
    return head + key.encrypt(envelope.nonce(counter), plain, head + envelope.associated(_JOB, _TOPIC))


def _take(receiver: SessionCipher, opened: Opened | None) -> None:
    """As the reader does: a sample of some type, kept until its session is proven."""
    if opened is None:
        return
    for layout in LAYOUTS.values():
        try:
            sample = layout.decode(opened.data)
        except SampleError:
            continue
        must(len(getattr(sample, "data", b"")) <= len(opened.data), "more octets than there are")
        try:
            receiver.peers.hold(opened.peer, _TOPIC, opened.header, sample, 0, lambda sample, source: None)
        except FrameError:
            must(len(opened.peer.held) == MAX_HELD_EACH, "refused, and there was room")
    if opened.header.moment % 2:
        opened.peer.floor = opened.header.counter % 100
        receiver.peers.authenticate(opened.peer)
        must(not opened.peer.held, "a session is proven, and something is still held")


def _envelope_seeds() -> list[bytes]:
    sealed = bytes(SessionCipher(_keys()).encryptor(_TOPIC).seal((b"sample",)))
    fields = {"TrainCmd": (1, 2, 3, 0.5, 4), "ClientUpdate": (1, 2, 3), "ModelBlob": (1,), "Frame": ()}
    samples = [b"".join(LAYOUTS[name].parts(fields[name], (b"octets\0\0",))) for name in fields]
    chosen = [
        bytes([0x80 + number % 2])
        + counter.to_bytes(8, "little")
        + len(sample).to_bytes(4, "little")
        + number.to_bytes(4, "little")
        + sample
        for number, counter in enumerate((1, 2, 5000, 1, 0, 1 << 32, (1 << 32) - 1, 9 << 32))
        for sample in (samples[number % 4],)
    ]
    return [sealed[:-1], sealed[:HEADER_BYTES], b"", bytes(200), *samples, b"".join(chosen), b"".join(chosen[::-1])]


def _check_greeting(greeting: ChallengeMessage) -> None:
    must(len(greeting.answers) <= MAX_ANSWERS and len(greeting.challenge) == 16, "a greeting beyond its limits")
    must(len(greeting.label) <= MAX_LABEL_BYTES, "a label beyond its limit")


def _greeting_seeds() -> list[bytes]:
    answers = {bytes([number]) * 16: number for number in range(3)}
    return [pack_challenge(ChallengeMessage(bytes(16), of, (1, 7), "host 1", bytes(12))) for of in ({}, answers)] + [
        b"",
        bytes(100),
    ]


def _key_seeds() -> list[bytes]:
    text = JobKey(bytes(range(32))).text.encode()
    return [text, text.strip(), text.upper(), text + text, b""]


_GREETING = reads_back(
    lambda data: parse_challenge(memoryview(data)),
    lambda greeting: bytes(pack_challenge(greeting._replace(label=""))),  # cut off, it may end within a character
    FrameError,
    _check_greeting,
)
# No error has the text of a key in it.
_KEY = reads_back(
    lambda data: parse_job_key(data.decode("ascii", "replace"), "here"),
    lambda key: key.text.encode(),
    ConfigError,
    max_error_chars=300,
)

TARGETS = {
    "envelope": Target(_read_envelope, 8 * 4096 + _KEPT_BYTES, _envelope_seeds),
    "greeting": Target(_GREETING, 1 << 20, _greeting_seeds, max_len=(MAX_ANSWERS + 10) * 20),
    "key": Target(_KEY, 1 << 16, _key_seeds),
}
