"""Streams of envelopes, encrypted with AES-256-GCM: one topic of one session under one shared key.

Every stream has a key of its own and counts its envelopes from 1: no nonce is ever used twice, and nothing has to be
remembered over a restart. After 2**32 envelopes a stream continues with the key of its next generation.

A controller has a stream for each process of clients that it ever addresses, which may be any number, so the streams to
inboxes are not kept. All those of a session draw their counters from one count, which is: whenever a stream is made
again, and by whichever thread, its counters are those that no envelope of the session to an inbox has had.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from gradbus.runtime import forks
from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.envelope import HEADER_BYTES, OVERHEAD_BYTES, EnvelopeHeader
from gradbus.runtime.security.job_key import derive
from gradbus.runtime.transport.channels import is_inbox_name

GENERATION_BITS = 32  # a stream key encrypts fewer than 2**32 envelopes
WINDOW = 4096
_WINDOW_MASK = (1 << WINDOW) - 1
_LAST_GENERATION = 1  # without a replay window: the epoch of such a key ends after 2**32 envelopes, or soon after
_SMALL_BYTES = 4096
MAX_INBOX_STREAMS = 1024  # with their keys, of about 4 KiB each: as many inboxes as a bus has outlets to
# Memory of NumPy begins at a multiple of 16. With this padding the payload of a collective lies at such a multiple,
# too, as it does in an envelope that is decrypted in place.
_PAD_BYTES = 4


class StreamKey:
    """The key of one stream, ready for use by any thread; the GIL is free while it encrypts and decrypts.

    Attributes:
        decrypt, decrypt_into: as those of :class:`AESGCM`.
    """

    __slots__ = ("_algorithm", "_encrypt", "_made_in", "decrypt", "decrypt_into")

    def __init__(self, secret: bytes) -> None:
        """``secret``: 32 bytes."""
        aead = AESGCM(secret)
        self._made_in = forks.generation
        self._encrypt = aead.encrypt
        self.decrypt = aead.decrypt
        self.decrypt_into = aead.decrypt_into
        self._algorithm = AES(secret)

    def encrypt(self, nonce: bytes, data: bytes, context: bytes) -> bytes:
        """As that of :class:`AESGCM`. Raises ForkedProcess: a child by fork would repeat the nonces of its parent."""
        if self._made_in != forks.generation:
            raise forks.refusal("a key")
        return self._encrypt(nonce, data, context)

    def encrypt_parts_into(self, nonce: bytes, parts: Sequence[Any], context: bytes, room: memoryview) -> None:
        """Encrypt scattered buffers without joining them first.

        Args:
            nonce: 12 bytes. parts: contiguous buffers. context: bytes that are authenticated with them.
            room: destination, of the size of all parts together and a tag of 16 bytes.

        Raises:
            ForkedProcess: in a child by fork.
        """
        if self._made_in != forks.generation:
            raise forks.refusal("a key")
        encryptor = Cipher(self._algorithm, GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(context)
        at = 0
        for part in parts:
            at += encryptor.update_into(part, room[at:])
        encryptor.finalize()
        room[at:] = encryptor.tag


@dataclass(slots=True, eq=False)
class SharedKey:
    """A secret of several processes that the keys of their streams are derived from.

    Attributes:
        level: PSK, GROUP or MEMBER, see :class:`.envelope.EnvelopeHeader`.
        epoch: its number among those of its kind; 0 for PSK and MEMBER.
        secret: 32 bytes.
        key_id: public identifier of the key.
    """

    job: str
    level: int
    epoch: int
    secret: bytes = field(repr=False)
    key_id: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.key_id = derive(self.secret, b"", b"gradbus/1 key id", envelope.KEY_ID_BYTES)

    @property
    def current(self) -> SharedKey:
        """This key itself, see :class:`EncryptionKeys`."""
        return self

    def check(self, header: EnvelopeHeader) -> None:
        """Raise FrameError ``other key`` unless level, epoch and id of the envelope are those of this key."""
        if (header.level, header.epoch, header.key_id) != (self.level, self.epoch, self.key_id):
            raise FrameError("other key", f"an envelope of key {header.key_id.hex()}, here it is {self.key_id.hex()}")

    def stream_key(self, session: bytes, topic: str, generation: int) -> StreamKey:
        """Derive the key of one topic of one session. ``generation``: its counter, divided by 2**32."""
        numbers = self.epoch.to_bytes(4, "little") + session + generation.to_bytes(4, "little")
        info = b"gradbus/1 frame\0" + numbers + topic.encode()
        return StreamKey(derive(self.secret, envelope.associated(self.job, ""), info))


class EncryptionKeys(Protocol):
    """Gives the key to encrypt with."""

    @property
    def job(self) -> str:
        """The job that the keys belong to."""

    @property
    def current(self) -> SharedKey:
        """The key to encrypt with, read once per envelope: any thread may replace it meanwhile."""


class OutboundEnvelope:
    """One envelope to be written. Implements :class:`~gradbus.runtime.transport.api.Envelope`."""

    __slots__ = ("_context", "_encryptor", "_key", "_plain", "counter", "header", "size")

    def __init__(
        self, encryptor: StreamEncryptor, counter: int, key: StreamKey, header: bytes, plain: tuple[Any, ...], size: int
    ):
        self._encryptor = encryptor
        self._key = key
        self._context = header + encryptor.context
        self.counter = counter
        self.header = header
        self._plain = plain
        self.size = size

    def seal_into(self, room: memoryview) -> None:
        """See :meth:`~gradbus.runtime.transport.api.Envelope.seal_into`. The GIL is free meanwhile."""
        # The small parts before the payload are joined: each call of the cipher has a price of its own.
        parts = self._plain if len(self._plain) < 3 else (b"".join(self._plain[:-1]), self._plain[-1])
        self._key.encrypt_parts_into(envelope.nonce(self.counter), parts, self._context, room)

    def octets(self) -> bytes:
        """See :meth:`~gradbus.runtime.transport.api.Envelope.octets`."""
        sealed = self._key.encrypt(envelope.nonce(self.counter), b"".join(self._plain), self._context)
        return self.header + sealed

    def note_written(self) -> None:
        """Note that the transport has it. Envelopes that it refuses are not among those that it retains."""
        if self._encryptor.retained is not None:
            self._encryptor.retained.append(self.counter)


class StreamEncryptor:
    """Encrypts one topic of one session. Thread-safe.

    Attributes:
        last: counter of the newest envelope; 0: there is none.
        retained: counters of the envelopes that the transport retains for late readers; None: it retains none.
    """

    def __init__(
        self,
        keys: EncryptionKeys,
        session: bytes,
        topic: str,
        *,
        start: int = 1,
        began_s: float | None = None,
        counter: Iterator[int] | None = None,
    ) -> None:
        """``start``: first counter. ``began_s``: start of the session on the monotonic clock; None: now. ``counter``:
        gives the counters, of this stream and of others; None: one of its own."""
        self.context = envelope.associated(keys.job, topic)
        self.last = 0
        self.retained: deque[int] | None = None
        self._began_s = time.monotonic() if began_s is None else began_s
        self._keys = keys
        self._session = session
        self._topic = topic
        self._made_in = forks.generation
        # The next() of a count is one step for the interpreter: no thread gets the number of another one.
        self._counter = itertools.count(start) if counter is None else counter
        self._key = (-1, b"", StreamKey(bytes(32)))

    def envelope(self, plain: tuple[Any, ...]) -> OutboundEnvelope:
        """Return the next envelope, around the concatenated parts of ``plain``.

        Raises:
            ForkedProcess: in a child by fork, whose counter would repeat the nonces of its parent.
        """
        if self._made_in != forks.generation:
            raise forks.refusal(f"the session that seals topic {self._topic!r}")
        counter = next(self._counter)
        self.last = max(self.last, counter)
        moment = int(time.monotonic() - self._began_s)
        key = self._keys.current
        generation, key_id, aead = self._key
        if generation != counter >> GENERATION_BITS or key_id != key.key_id:
            generation, key_id = counter >> GENERATION_BITS, key.key_id
            aead = key.stream_key(self._session, self._topic, generation)
            self._key = (generation, key_id, aead)
        size = sum(map(len, plain))
        header = envelope.head(key.level, key.epoch, size, counter, self._session, key_id, moment)
        return OutboundEnvelope(self, counter, aead, header, plain, size + OVERHEAD_BYTES)

    def seal(self, parts: Sequence[Any]) -> bytes:
        """Return the bytes of the next envelope."""
        return self.envelope(tuple(parts)).octets()

    def track_retained(self, samples: int) -> None:
        """Record the counters of the newest envelopes, as the transport retains so many of them for late readers."""
        self.retained = deque(self.retained or (), samples)

    @property
    def oldest(self) -> int | None:
        """The oldest counter that the transport may still have; None: it retains none."""
        if self.retained is None:
            return None
        # The minimum, not the first: the envelopes of several threads may be written in another order. If none has been
        # written yet, the newest may be on its way.
        return min(tuple(self.retained), default=max(1, self.last))


class OutboundStreams:
    """Encrypts all topics of one session. Thread-safe."""

    def __init__(self, keys: EncryptionKeys, session: bytes, *, most_inboxes: int = MAX_INBOX_STREAMS) -> None:
        """``session``: random id of this start of this process. ``most_inboxes``: streams to inboxes that are kept."""
        self.job = keys.job
        self.session = session
        self._keys = keys
        self._made_in = forks.generation
        self._began_s = time.monotonic()
        self._encryptors: dict[str, StreamEncryptor] = {}
        self._inboxes: OrderedDict[str, StreamEncryptor] = OrderedDict()  # the least recently used first
        self._inbox_counter = itertools.count(1)
        self._most_inboxes = most_inboxes

    @property
    def key(self) -> SharedKey:
        """The key that they encrypt with now."""
        return self._keys.current

    def encryptor(self, topic: str) -> StreamEncryptor:
        """Return the encryptor of a topic; all callers share it and its counter."""
        if self._made_in != forks.generation:
            raise forks.refusal(f"the session that seals topic {topic!r}")
        known = self._encryptors.get(topic)
        if known is None and is_inbox_name(topic):
            return self._inbox_encryptor(topic)
        if known is None:  # setdefault is one step: of two threads both get the encryptor of the first
            made = StreamEncryptor(self._keys, self.session, topic, began_s=self._began_s)
            known = self._encryptors.setdefault(topic, made)
        return known

    def _inbox_encryptor(self, topic: str) -> StreamEncryptor:
        """Return an encryptor of an inbox. Each step here is one for the interpreter. Two threads at once may have two
        encryptors of the same inbox, and one that is no longer kept may still be in use: they have the same key, and
        no two counters that are alike."""
        known = self._inboxes.pop(topic, None)
        if known is None:
            known = StreamEncryptor(self._keys, self.session, topic, began_s=self._began_s, counter=self._inbox_counter)
        self._inboxes[topic] = known
        if len(self._inboxes) > self._most_inboxes:
            with contextlib.suppress(KeyError):  # other threads have made room
                self._inboxes.popitem(last=False)
        return known

    def envelope(self, topic: str, plain: Sequence[Any]) -> OutboundEnvelope:
        """Return the next envelope of a topic, around the concatenated parts of ``plain``."""
        return self.encryptor(topic).envelope(tuple(plain))

    def seal(self, topic: str, plain: Sequence[Any]) -> bytes:
        """Return the bytes of the next envelope of a topic."""
        return self.envelope(topic, plain).octets()

    @property
    def last(self) -> dict[str, int]:
        """The counter of the newest envelope of each topic, inboxes left out."""
        encryptors = self._encryptors.copy()  # makes no object for each item: other threads may add one
        return {topic: encryptor.last for topic, encryptor in encryptors.items()}

    @property
    def retained(self) -> dict[str, int]:
        """The oldest counter that the transport may still have, of each topic that it retains, inboxes left out."""
        encryptors = self._encryptors.copy()
        oldest = {topic: encryptor.oldest for topic, encryptor in encryptors.items()}
        return {topic: counter for topic, counter in oldest.items() if counter is not None}

    @property
    def moment(self) -> int:
        """Whole seconds since this session began."""
        return int(time.monotonic() - self._began_s)


class ReplayWindow:
    """Received counters: the highest one, and which of the 4096 up to it. Older ones count as received.

    Two steps, so that a forgery changes nothing: :meth:`is_new` before the tag is checked, :meth:`note` after.
    """

    __slots__ = ("_bits", "_mark", "highest")

    def __init__(self) -> None:
        self.highest = 0
        # Of the counters from ``_mark`` on, all up to the highest were received. As a rule they come in order: then
        # only ``highest`` changes, and the bits, half a kilobyte that each change makes anew, stay as they are.
        self._mark = 0
        self._bits = 0  # bit n: counter ``_mark - n`` was received

    def is_new(self, counter: int) -> bool:
        """Whether an envelope with this counter may still be accepted."""
        if counter > self.highest:
            return True
        return self.highest - counter < WINDOW and counter <= self._mark and not self._bits >> self._mark - counter & 1

    def note(self, counter: int) -> None:
        """Record the counter of an accepted envelope."""
        ahead = counter - self.highest
        if ahead == 1:
            self.highest = counter
            return
        in_order = min(self.highest - self._mark, WINDOW)
        self._bits = (self._bits << in_order | (1 << in_order) - 1) & _WINDOW_MASK
        if ahead > 0:
            self._bits = (self._bits << min(ahead, WINDOW) | 1) & _WINDOW_MASK
            self.highest = counter
        else:
            self._bits |= 1 << -ahead
        self._mark = self.highest


class InboundStream:
    """Decrypts one topic of one session under one key, each envelope once. Nothing changes before a tag is verified."""

    __slots__ = ("_context", "_key", "_keys", "_newest", "_session", "_topic", "_window")

    def __init__(self, key: SharedKey, session: bytes, topic: str, context: bytes, *, has_window: bool = True) -> None:
        """``has_window``: keep a replay window; not where members that share the key could forge an envelope with a
        high counter and so have all that follow rejected."""
        self._key = key
        self._session = session
        self._topic = topic
        self._context = context
        self._window = ReplayWindow() if has_window else None
        self._newest = -1  # generation
        self._keys: dict[int, StreamKey] = {}  # of the newest generation and the one before

    def open(self, header: EnvelopeHeader, view: memoryview) -> memoryview:
        """Verify and decrypt an envelope into new memory.

        Raises:
            FrameError: ``replay``: it was accepted before, or is old. ``counter``: it is too far ahead. ``tag``.
        """
        counter = header.counter
        if self._window is not None and not self._window.is_new(counter):
            raise FrameError("replay", f"envelope {counter} of {self._topic} was opened before, or is old")
        generation = counter >> GENERATION_BITS
        key = self._keys.get(generation) or self._derive(generation)
        plain = self._decrypt(key, header, view)
        if generation > self._newest:
            self._newest = generation
            self._keys.pop(generation - 2, None)
        self._keys[generation] = key
        if self._window is not None:
            self._window.note(counter)
        return plain

    def _derive(self, generation: int) -> StreamKey:
        if self._window is None:
            is_far = generation > _LAST_GENERATION
        else:
            is_far = bool(self._keys) and generation != self._newest + 1
        if is_far:
            raise FrameError("counter", f"an envelope on {self._topic} is far ahead of the others")
        return self._key.stream_key(self._session, self._topic, generation)

    def _decrypt(self, key: StreamKey, header: EnvelopeHeader, view: memoryview) -> memoryview:
        nonce, sealed = envelope.nonce(header.counter), view[HEADER_BYTES:]
        context = bytes(view[:HEADER_BYTES]) + self._context
        try:
            if header.size <= _SMALL_BYTES:
                return memoryview(key.decrypt(nonce, sealed, context))
            plain = np.empty(_PAD_BYTES + header.size, np.uint8).data[_PAD_BYTES:]
            key.decrypt_into(nonce, sealed, context, plain)
        except InvalidTag:
            raise FrameError("tag", f"an envelope on {self._topic} was changed, or made without the key") from None
        return plain


class InboundStreams:
    """Decrypts the envelopes of one session under one key. Only the receive thread uses it."""

    def __init__(self, key: SharedKey, session: bytes, *, has_window: bool = True) -> None:
        """``session``: of the only process whose envelopes are accepted. ``has_window``: see :class:`InboundStream`."""
        self.key = key
        self.session = session
        self._has_window = has_window
        self._streams: dict[str, InboundStream] = {}
        self._floors: dict[str, int] = {}

    def start_above(self, topic: str, floor: int) -> None:
        """Reject envelopes of a topic up to this counter: they are older than the key grant of this process."""
        self._floors[topic] = floor

    def open(self, topic: str, header: EnvelopeHeader, view: memoryview) -> memoryview:
        """Decrypt an envelope into new memory.

        Raises:
            FrameError: ``other key``, ``unknown sender``, or as :meth:`InboundStream.open`.
        """
        self.key.check(header)
        if header.session != self.session:
            raise FrameError("unknown sender", "an envelope of another start of the process that the key is of")
        if header.counter <= self._floors.get(topic, 0):
            raise FrameError("replay", f"envelope {header.counter} of {topic} is from before this process had the key")
        stream = self._streams.get(topic)
        if stream is None:
            context = envelope.associated(self.key.job, topic)
            stream = InboundStream(self.key, self.session, topic, context, has_window=self._has_window)
        plain = stream.open(header, view)
        self._streams[topic] = stream
        return plain
