"""The bytes of a bucket: what is refused, and why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradbus.runtime.errors import CollectiveError
from gradbus.torch.hooks import wire

OURS = wire.BucketHeader(hook=0, rank=1, step=7, parameters=11, options=12)


def message(header: wire.BucketHeader) -> Tensor:
    sent = torch.zeros(40, dtype=torch.uint8)
    wire.write_header(sent, header)
    return sent


def test_a_header_of_the_same_bucket_passes() -> None:
    wire.check_header(message(OURS._replace(rank=2)), OURS, 2)
    endless = OURS._replace(step=(1 << 32) + 7)
    wire.check_header(message(endless._replace(rank=2)), endless, 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hook": 1}, "rank 2 has registered hook top_k, this rank dgc"),
        ({"hook": 99}, "hook number 99"),
        ({"options": 13}, "other options"),
        ({"parameters": 13}, "other parameters in this bucket"),
        ({"step": 8}, "is at step 8, this rank at 7"),
        ({"rank": 3}, "claims to be rank 3"),
    ],
)
def test_another_header_is_refused_with_the_difference(change: dict[str, int], text: str) -> None:
    with pytest.raises(CollectiveError, match=text):
        wire.check_header(message(OURS._replace(rank=2)._replace(**change)), OURS, 2)


def test_other_bytes_are_no_header() -> None:
    with pytest.raises(CollectiveError, match="starts with"):
        wire.check_header(torch.full((40,), 7, dtype=torch.uint8), OURS, 2)


@pytest.mark.parametrize(("is_absent", "is_finite"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("payload", [b"", b"abc", b"x" * 16])
def test_a_payload_comes_back_with_its_marks(payload: bytes, is_absent: bool, is_finite: bool) -> None:
    section = torch.zeros(wire.payload_section_bytes(16), dtype=torch.uint8)
    wire.write_payload(section, payload, is_absent=is_absent, is_finite=is_finite)
    found = wire.read_payload(section)
    assert (bytes(found.data), found.is_absent, found.is_finite) == (payload, is_absent, is_finite)


@pytest.mark.parametrize("start", [b"\x11\0\0\0\0\0\0\0", b"\xff\xff\xff\xff\0\0\0\0", b"\x01\0\0\0\x04\0\0\0"])
def test_a_length_beyond_the_section_and_unknown_marks_are_refused(start: bytes) -> None:
    section = torch.zeros(wire.payload_section_bytes(16), dtype=torch.uint8)
    section[:8] = torch.tensor(list(start), dtype=torch.uint8)
    with pytest.raises(CollectiveError, match="newer peer"):
        wire.read_payload(section)


def test_sections_are_aligned_and_messages_have_a_limit() -> None:
    assert wire.lay_out([3, 8, 9]) == (32, 40, 48, 64)
    with pytest.raises(ValueError, match="smaller bucket_cap_mb"):
        wire.lay_out([1 << 31, 1 << 31])
