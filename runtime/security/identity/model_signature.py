"""The controller's signature under a model, which clients check before they take in the first frame.

Frames of a model are sealed with a key that all members share, so each of them could make some up. Their name carries
a signature that says which model, of which round and epoch, the controller has published, and the hash of the whole.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from typing import Any

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity.key import NodeKey, verified
from gradbus.runtime.wire.frames import Flags, FrameKey

_NUMBERS = struct.Struct("<IQIQIIQ")  # epoch, run, round, incarnation, transfer, flags, bytes
_NAME = re.compile(r"([0-9a-f]{8})([0-9a-f]{64})([0-9a-f]{128})")


def _text(job: str, session: bytes, epoch: int, key: FrameKey, flags: int, total_bytes: int, digest: bytes) -> bytes:
    kind = flags & int(Flags.DELTA)
    numbers = _NUMBERS.pack(epoch, key.job, key.round_id, key.incarnation, key.transfer, kind, total_bytes)
    return b"gradbus/1 model\0" + envelope.associated(job, "") + session + numbers + digest


def sign_model(job: str, signer: NodeKey, session: bytes, epoch: int, key: FrameKey, flags: int, payload: Any) -> str:
    """The name of the model's frames: epoch, SHA-256 of the payload and signature, in hexadecimal digits."""
    view = memoryview(payload).cast("B")
    digest = hashlib.sha256(view).digest()
    signature = signer.sign(_text(job, session, epoch, key, flags, len(view), digest))
    return f"{epoch:08x}{digest.hex()}{signature.hex()}"


def check_model(
    job: str, public: bytes, session: bytes, newest_epoch: int, key: FrameKey, flags: int, total_bytes: int
) -> None:
    """Raise FrameError: ``signature``: the controller with this key has not published such a model in this start.

    That a payload is the one that is meant, :func:`check_payload` says.
    """
    match = _NAME.fullmatch(key.name)
    where = f"the model of round {key.round_id}"
    if match is None:
        raise FrameError("signature", f"{where} carries no signature of the controller")
    epoch = int(match[1], 16)
    if epoch > newest_epoch:
        raise FrameError("signature", f"{where} says epoch {epoch}, the newest one is {newest_epoch}")
    text = _text(job, session, epoch, key, flags, total_bytes, bytes.fromhex(match[2]))
    if not verified(public, bytes.fromhex(match[3]), text):
        raise FrameError("signature", f"{where} is not what the controller has signed")


def check_payload(key: FrameKey, payload: Any) -> None:
    """Raise FrameError: ``signature``: it is not the payload that the name of its frames, which
    :func:`check_model` has found well, speaks of. Takes its time with a large one."""
    match = _NAME.fullmatch(key.name)
    digest = hashlib.sha256(memoryview(payload).cast("B")).digest()
    if match is None or not hmac.compare_digest(digest, bytes.fromhex(match[2])):
        raise FrameError("signature", f"the model of round {key.round_id} is not what the controller has signed")
