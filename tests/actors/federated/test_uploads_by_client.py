"""A mapping by the keys of uploads, and of each client by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradbus.actors.federated.controller.uploads import ByClient
from gradbus.runtime.wire.frames import FrameKey, Kind


def key(client_id: int, transfer: int) -> FrameKey:
    return FrameKey(Kind.UPDATE, 1, 1, client_id, 100, transfer)


ACTIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2), st.integers(0, 99)))


@given(ACTIONS)
def test_it_is_a_dict_that_knows_the_values_of_each_client_and_their_bytes(
    actions: list[tuple[bool, int, int, int]],
) -> None:
    found: ByClient[int] = ByClient(lambda value: value)
    plain: dict[FrameKey, int] = {}
    for is_added, client_id, transfer, value in actions:
        one = key(client_id, transfer)
        if is_added:
            found[one] = plain[one] = value
        else:
            assert found.pop(one, None) == plain.pop(one, None)
        assert list(found.items()) == list(plain.items())
        assert list(found.values()) == list(plain.values())
        for each in range(3):
            assert sorted(found.of(each)) == sorted(value for one, value in plain.items() if one.sender == each)
        assert found.num_bytes == sum(plain.values())
    found.clear()
    assert (len(found), found.num_bytes, found.of(0)) == (0, 0, [])
