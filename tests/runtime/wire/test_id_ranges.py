"""Sets of ids as text on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradbus.runtime.wire.id_ranges import MAX_CHARS, MAX_ID, format_ids, has_id, parse_ids


@given(st.sets(st.integers(0, 60) | st.integers(0, MAX_ID)))
def test_the_ids_come_back_as_they_were(ids: set[int]) -> None:
    ranges = parse_ids(format_ids(ids))
    assert {number for one in ranges for number in one} == ids
    assert all(has_id(ranges, number) is (number in ids) for number in {*ids, *range(62), MAX_ID})


def test_consecutive_ids_take_a_few_characters() -> None:
    assert format_ids([7, 0, 3, 4, 5]) == "0,3-5,7"
    assert format_ids(range(65_536)) == "0-65535"
    assert format_ids([]) == ""


@pytest.mark.parametrize(
    "text",
    ["x", "1,", "01", "5-3", "3,1", "1,2", "1-3,3-5", "-1", "1--2", "99999999999", "0-2147483648", "1, 2", "٣"],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ids"):
        parse_ids(text)


def test_a_text_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="at most"):
        parse_ids(",".join("7" for _ in range(MAX_CHARS)))
