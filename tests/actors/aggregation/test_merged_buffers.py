"""Rules by which buffers of integers and booleans are merged, against NumPy, and the bytes in which they travel."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradbus.actors.aggregation.merged_buffers import (
    MAGIC,
    MERGEABLE,
    BufferLayout,
    BufferMerge,
    MergedBuffer,
    split,
)
from gradbus.codecs import CodecError

BASE = torch.tensor([5, 5, -7])
CLIENTS = [torch.tensor(values) for values in ([6, 4, -7], [9, 5, -9], [5, 5, -7], [7, 1, 0])]
ORACLES: dict[str, Any] = {
    "max": lambda all_: all_.max(0),
    "min": lambda all_: all_.min(0),
    "sum": lambda all_: BASE.numpy() + (all_ - BASE.numpy()).sum(0),
    "median": lambda all_: np.sort(all_, axis=0)[1],
}


def layout_of(rule: str, dtype: torch.dtype = torch.int64, shape: tuple[int, ...] = (3,)) -> BufferLayout:
    return BufferLayout([MergedBuffer("count", dtype, shape, rule)])


def merged(layout: BufferLayout, base: Tensor, clients: list[Tensor], **more: Any) -> Tensor:
    merge = BufferMerge(layout)
    merge.begin({"count": base})
    for one in clients:
        merge.add(layout.changes({"count": base}, {"count": one}), **more)
    return merge.finish()["count"]


@pytest.mark.parametrize("rule", ORACLES)
def test_integers_are_merged_by_their_rule_in_any_order(rule: str) -> None:
    expected = torch.from_numpy(ORACLES[rule](torch.stack(CLIENTS).numpy()))
    for order in itertools.permutations(CLIENTS):
        assert torch.equal(merged(layout_of(rule), BASE, list(order)), expected)


@pytest.mark.parametrize(
    ("rule", "flags", "expected"),
    [
        ("any", [False, True, False], True),
        ("any", [False, False], False),
        ("max", [True, False], True),
        ("all", [True, True], True),
        ("all", [True, False, True], False),
        ("min", [True, True, False], False),
        ("median", [True, True, False], True),
        ("median", [True, False], False),
    ],
)
@pytest.mark.parametrize("base", [False, True])
def test_flags_are_merged_by_their_rule(rule: str, flags: list[bool], expected: bool, base: bool) -> None:
    layout = layout_of(rule, torch.bool, ())
    assert bool(merged(layout, torch.tensor(base), [torch.tensor(one) for one in flags])) is expected


def test_without_an_update_and_without_a_change_a_buffer_stays() -> None:
    assert torch.equal(merged(layout_of("max"), BASE, []), BASE)
    assert torch.equal(merged(layout_of("median"), BASE, [BASE, BASE]), BASE)


@pytest.mark.parametrize("rule", ["max", "min", "sum"])
def test_what_two_sites_merge_merges_as_all_of_their_clients(rule: str) -> None:
    layout, above = layout_of(rule), BufferMerge(layout_of(rule))
    above.begin({"count": BASE})
    for site in (CLIENTS[:1], CLIENTS[1:]):
        merge = BufferMerge(layout)
        merge.begin({"count": BASE})
        for one in site:
            merge.add(layout.changes({"count": BASE}, {"count": one}))
        above.add(layout.unpack(split(memoryview(layout.pack(merge.changes())))[1]))
    assert torch.equal(above.finish()["count"], merged(layout, BASE, CLIENTS))


@pytest.mark.parametrize(("rule", "expected"), [("max", 5), ("min", 3), ("sum", 3)])
def test_an_update_from_an_old_model_takes_nothing_back(rule: str, expected: int) -> None:
    layout = layout_of(rule, shape=())
    assert int(merged(layout, torch.tensor(5), [torch.tensor(3)], staleness=2)) == expected


def test_sums_wrap_as_integers_of_torch_do() -> None:
    most = torch.iinfo(torch.int64).max
    found = merged(layout_of("sum", shape=()), torch.tensor(most - 1), [torch.tensor(most)] * 2)
    assert int(found) == torch.iinfo(torch.int64).min


@pytest.mark.parametrize("dtype", sorted(MERGEABLE, key=str), ids=str)
def test_a_block_has_the_values_of_all_types_bit_for_bit(dtype: torch.dtype) -> None:
    layout = BufferLayout(
        [
            MergedBuffer("a", torch.int64, (2,), "max"),
            MergedBuffer("b", dtype, (2, 2), "max"),
            MergedBuffer("c", dtype, (0,), "max"),
            MergedBuffer("d", dtype, (), "max"),
        ]
    )
    sent = {"b": torch.tensor([[1, 0], [1, 1]]).to(dtype), "d": torch.ones((), dtype=dtype)}
    payload = b"update" + layout.pack(sent)
    assert len(layout.pack(sent)) <= layout.max_bytes
    content, found = layout.split(payload)
    assert bytes(content) == b"update"
    assert found.keys() == sent.keys()
    assert all(torch.equal(found[name], one) and found[name].dtype == dtype for name, one in sent.items())


def test_a_model_without_such_buffers_has_no_block() -> None:
    layout = BufferLayout()
    assert (layout.pack({}), layout.digest, layout.max_bytes, bool(layout)) == (b"", 0, 0, False)
    assert bytes(layout.split(b"update")[0]) == b"update"


def ended(block: bytes) -> bytes:
    return block + struct.pack("<I4s", len(block), MAGIC)


LAYOUT = BufferLayout(
    [
        MergedBuffer("count", torch.int16, (2,), "max"),
        MergedBuffer("flag", torch.bool, (2,), "any"),
    ]
)
WHOLE: Mapping[str, Tensor] = {"count": torch.tensor([3, -4], dtype=torch.int16), "flag": torch.tensor([True, False])}


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "do not end with a block"),
        (b"an update", "do not end with a block"),
        (struct.pack("<I4s", 9, MAGIC), "do not end with a block"),
        (ended(b"\0\0"), "cut short"),
        (ended(struct.pack("<I", 2)), "the model has 2"),
        (ended(struct.pack("<I2sI2s", 1, b"\1\0", 1, b"\1\0")), "buffer 1 after 1"),
        (ended(struct.pack("<I2sIhh", 1, b"\1\0", 0, 3, 4)), "buffer 0 after 1"),
        (ended(struct.pack("<Ih", 0, 3)), "'count' has 2 bytes, expected 4"),
        (ended(struct.pack("<I2s", 1, b"\1\2")), "other bytes than 0 and 1"),
    ],
)
def test_a_block_that_cannot_be_is_refused(payload: bytes, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        LAYOUT.split(payload)


def test_a_block_that_is_cut_short_anywhere_is_refused_or_has_fewer_buffers() -> None:
    block, names = bytes(split(memoryview(LAYOUT.pack(WHOLE)))[1]), set()
    for size in range(len(block)):
        try:
            names.add(tuple(LAYOUT.unpack(block[:size])))
        except CodecError:
            continue
    assert names == {(), ("count",)}
