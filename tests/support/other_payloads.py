"""Clients that speak the protocol rightly, and send other bytes than they have trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.runtime.shm.segment import SharedPayload
from gradbus.runtime.wire.frames import FrameKey


def send_instead(monkeypatch: pytest.MonkeyPatch, choose: Callable[[FrameKey, bytes], bytes]) -> None:
    """``choose``: gives what goes out, of the key and the bytes of an update."""
    train = LocalTraining.train

    def trained(training: LocalTraining, *arguments: Any) -> EncodedUpdate:
        update = train(training, *arguments)
        honest = bytes(update.payload)
        payload = choose(update.key, honest)
        return update if payload == honest else _with_payload(update, payload)

    monkeypatch.setattr(LocalTraining, "train", trained)


def _with_payload(update: EncodedUpdate, payload: bytes) -> EncodedUpdate:
    """The update with other bytes, in memory if its own were there."""
    request = replace(update.request, total_bytes=len(payload))
    if update.sealed is None:
        return replace(update, request=request, payload=payload)
    update.sealed.hide()
    sealed = SharedPayload(payload)
    return replace(update, request=replace(request, memory=sealed.place), payload=sealed.payload, sealed=sealed)
