"""Requests and replies as bytes, and what does not pass for one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.actors.parameter_server.assignment import assign
from gradbus.actors.parameter_server.messages import Flag, Message, decode, encode, split
from gradbus.runtime.errors import CollectiveError

PARAMETERS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "s": torch.tensor(2.0)}


def test_a_message_comes_back_with_all_of_its_parts() -> None:
    (pieces,) = assign(PARAMETERS, 1)
    message = Message(
        "push", 7, Flag.HAS_GRADIENT | Flag.MEETS, 3, 12, 0.05, meta={"name": "x"}, state={"n": torch.arange(4)}
    )
    found = decode(encode(message, [piece.of(PARAMETERS[piece.tensor]) for piece in pieces]))
    assert (found.kind, found.clock, found.flags, found.epoch, found.updates, found.lr) == (
        "push",
        7,
        Flag.HAS_GRADIENT | Flag.MEETS,
        3,
        12,
        0.05,
    )
    assert found.meta == {"name": "x"}
    assert torch.equal(found.state["n"], torch.arange(4))
    for piece, part in zip(pieces, split(found.packed, pieces), strict=True):
        assert torch.equal(part, PARAMETERS[piece.tensor].reshape(-1))


def test_a_gradient_of_another_size_is_refused_with_both() -> None:
    (pieces,) = assign(PARAMETERS, 1)
    with pytest.raises(CollectiveError, match="expected 34 bytes of 3 tensors, got 8"):
        split(torch.zeros(8, dtype=torch.uint8), pieces)


def test_a_message_of_another_version_is_refused_with_both() -> None:
    data = encode(Message("push"))
    data[4] = 9
    with pytest.raises(CollectiveError, match="version 1, got b'GBps' of version 9"):
        decode(data)


@settings(max_examples=300)
@given(st.data())
def test_any_bytes_are_a_message_or_an_error(data: st.DataObject) -> None:
    whole = encode(Message("meet", 1, meta={"name": "a", "value": [1, 2]}, state={"n": torch.arange(3)}))
    changed = whole.clone()
    for _ in range(data.draw(st.integers(0, 4))):
        changed[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    for candidate in (changed, changed[: data.draw(st.integers(0, len(whole)))], whole.float(), b"text", None):
        with contextlib.suppress(CollectiveError):
            assert isinstance(decode(candidate), Message)
