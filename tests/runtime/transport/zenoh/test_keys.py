"""Keys on Zenoh hold any name, and tell whose an endpoint is."""

from __future__ import annotations

import pytest
import zenoh
from hypothesis import given
from hypothesis import strategies as st

from gradbus.runtime.transport.zenoh.keys import ChannelKeys, endpoint_id, escape, last_part, owner_of, unescape

OWNER = bytes(range(12))


@given(st.text())
def test_any_name_is_one_part_of_a_key_and_comes_back(name: str) -> None:
    part = escape(name)
    key = zenoh.KeyExpr(f"gradbus/{part}/all")  # raises where it is none
    assert str(key).split("/") == ["gradbus", part, "all"]
    assert unescape(part) == name


@pytest.mark.parametrize("name", ["*", "**", "$*", "a/b", "a?b", "#", "@x", "", "train/frame/*"])
def test_a_name_matches_itself_only(name: str) -> None:
    keys = ChannelKeys("job", name)
    assert not zenoh.KeyExpr(keys.to_all()).intersects(ChannelKeys("job", "other").to_all(endpoint_id(OWNER, 1)))
    assert zenoh.KeyExpr(keys.to_all()).includes(keys.to_all(endpoint_id(OWNER, 1)))


def test_an_endpoint_tells_whose_it_is() -> None:
    key = ChannelKeys("job", "channel").to_one(endpoint_id(OWNER, 3), endpoint_id(OWNER, 7))
    assert last_part(key) == endpoint_id(OWNER, 7)
    assert owner_of(last_part(key)) == OWNER


@pytest.mark.parametrize("other", ["", "x", OWNER.hex(), f"{OWNER.hex()}.", f"{OWNER.hex()}.01", f"{OWNER.hex()}.1 "])
def test_what_is_no_endpoint_has_no_owner(other: str) -> None:
    assert owner_of(other) is None
