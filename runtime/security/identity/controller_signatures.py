"""The controller's signatures on broadcasts, whose key all members share, so that members could forge them.

Broadcasts carry a number and a signature behind the sample. The number grows, so that no member can replay a
broadcast in an envelope of its own. Models are signed as a whole: the name of their frames holds the epoch, the
SHA-256 of the payload and the signature, which clients check before they accept the first frame.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import re
import struct
from collections.abc import Sequence
from typing import Any

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity.key import SIGNATURE_BYTES, NodeKey, verified
from gradbus.runtime.security.streams import ReplayWindow
from gradbus.runtime.wire.frames import Flags, FrameKey

_NUMBER = struct.Struct("<Q")
TRAILER_BYTES = _NUMBER.size + SIGNATURE_BYTES


def _broadcast_text(job: str, topic: str, session: bytes, number: bytes, sample: bytes) -> bytes:
    return b"gradbus/1 broadcast\0" + envelope.associated(job, topic) + session + number + sample


class BroadcastSigner:
    """Signs the broadcasts of one controller. Thread-safe."""

    def __init__(self, job: str, key: NodeKey, session: bytes) -> None:
        self._job = job
        self._key = key
        self._session = session
        self._numbers = itertools.count(1)
        self.last = 0  # number of the newest one of all topics
        self.last_of: dict[str, int] = {}

    def signed(self, topic: str, parts: Sequence[Any]) -> tuple[Any, ...]:
        """Return the sample of ``parts``, followed by its number and signature."""
        self.last = self.last_of[topic] = value = next(self._numbers)
        number = _NUMBER.pack(value)
        sample = b"".join(parts)
        return sample, number, self._key.sign(_broadcast_text(self._job, topic, self._session, number, sample))


class BroadcastVerifier:
    """Verifies the broadcasts of one controller and rejects replays. Only the receive thread uses it."""

    def __init__(self, job: str, public: bytes, session: bytes) -> None:
        """``public``: public key of the controller. ``session``: id of its start."""
        self._job = job
        self._public = public
        self._session = session
        self._windows: dict[str, ReplayWindow] = {}
        self._floors: dict[str, int] = {}

    def start_above(self, topic: str, floor: int) -> None:
        """Reject broadcasts on a topic up to this number: they are older than the admission of this process."""
        self._floors[topic] = floor

    def verify(self, topic: str, data: memoryview) -> memoryview:
        """Return the sample of a verified broadcast. Raises FrameError: ``signature`` or ``replay``."""
        if len(data) < TRAILER_BYTES:
            raise FrameError("signature", f"{len(data)} bytes on {topic} that the controller has not signed")
        at = len(data) - TRAILER_BYTES
        sample, number = data[:at], bytes(data[at : at + _NUMBER.size])
        (value,) = _NUMBER.unpack(number)
        window = self._windows.get(topic) or ReplayWindow()
        if value <= self._floors.get(topic, 0) or not window.is_new(value):
            raise FrameError("replay", f"broadcast {value} of the controller on {topic} is a repetition, or is old")
        text = _broadcast_text(self._job, topic, self._session, number, bytes(sample))
        if not verified(self._public, bytes(data[at + _NUMBER.size :]), text):
            raise FrameError("signature", f"a broadcast on {topic} that a member has forged")
        window.note(value)
        self._windows[topic] = window
        return sample


_NUMBERS = struct.Struct("<IQIQIIQ")  # epoch, run, round, incarnation, transfer, flags, bytes
_NAME = re.compile(r"([0-9a-f]{8})([0-9a-f]{64})([0-9a-f]{128})")


def _model_text(
    job: str, session: bytes, epoch: int, key: FrameKey, flags: int, total_bytes: int, digest: bytes
) -> bytes:
    kind = flags & int(Flags.DELTA)
    numbers = _NUMBERS.pack(epoch, key.job, key.round_id, key.incarnation, key.transfer, kind, total_bytes)
    return b"gradbus/1 model\0" + envelope.associated(job, "") + session + numbers + digest


def sign_model(job: str, signer: NodeKey, session: bytes, epoch: int, key: FrameKey, flags: int, payload: Any) -> str:
    """Return the name of the model's frames: epoch, SHA-256 of the payload and signature, in hexadecimal digits."""
    view = memoryview(payload).cast("B")
    digest = hashlib.sha256(view).digest()
    signature = signer.sign(_model_text(job, session, epoch, key, flags, len(view), digest))
    return f"{epoch:08x}{digest.hex()}{signature.hex()}"


def check_model(
    job: str, public: bytes, session: bytes, newest_epoch: int, key: FrameKey, flags: int, total_bytes: int
) -> None:
    """Raise FrameError ``signature`` unless the controller with this key has published such a model in this start.

    :func:`check_payload` checks the payload.
    """
    match = _NAME.fullmatch(key.name)
    where = f"the model of round {key.round_id}"
    if match is None:
        raise FrameError("signature", f"{where} carries no signature of the controller")
    epoch = int(match[1], 16)
    if epoch > newest_epoch:
        raise FrameError("signature", f"{where} is of epoch {epoch}, the newest one is {newest_epoch}")
    text = _model_text(job, session, epoch, key, flags, total_bytes, bytes.fromhex(match[2]))
    if not verified(public, bytes.fromhex(match[3]), text):
        raise FrameError("signature", f"{where} is not what the controller has signed")


def check_payload(key: FrameKey, payload: Any) -> None:
    """Raise FrameError ``signature`` unless the payload is that of the name of its frames, which :func:`check_model`
    has checked. Hashes the whole payload."""
    match = _NAME.fullmatch(key.name)
    digest = hashlib.sha256(memoryview(payload).cast("B")).digest()
    if match is None or not hmac.compare_digest(digest, bytes.fromhex(match[2])):
        raise FrameError("signature", f"the model of round {key.round_id} is not what the controller has signed")
