"""Merged buffers at the receiver of updates: what counts is merged, and a block that cannot be is a strike."""

from __future__ import annotations

import struct

import pytest
import torch
from intake_hall import DIM, Hall, Sender, deliver, run_with

from gradbus import codecs
from gradbus.actors.aggregation.merged_buffers import MAGIC, BufferLayout, BufferMerge, MergedBuffer
from gradbus.actors.federated.controller.update_sum import UpdateForm

LAYOUT = BufferLayout(
    [
        MergedBuffer("count", torch.int64, (), "max"),
        MergedBuffer("flag", torch.bool, (), "any"),
    ]
)
MODEL = codecs.get("fp32").encode(torch.zeros(DIM))


def receive_buffers(hall: Hall) -> BufferMerge:
    before = {"count": torch.tensor(1), "flag": torch.tensor(False)}
    hall.intake._context.state.buffers = before  # type: ignore[misc]  # noqa: SLF001 - the state of this test
    assert hall.update_sum.buffers is not None
    return hall.update_sum.buffers


def test_buffers_of_updates_that_count_are_merged() -> None:
    async def test(hall: Hall) -> None:
        merge = receive_buffers(hall)
        sent = ({"count": torch.tensor(7)}, {"count": torch.tensor(5), "flag": torch.tensor(True)}, {})
        await deliver(hall, *(Sender(one, payload=MODEL + LAYOUT.pack(said)) for one, said in enumerate(sent)))
        assert hall.bus.receipts == [(0, True), (1, True), (2, True)]
        assert {name: one.item() for name, one in merge.finish().items()} == {"count": 7, "flag": True}

    run_with(test, form=UpdateForm(DIM, LAYOUT))


@pytest.mark.parametrize(
    "block",
    [b"", struct.pack("<I4s", 1 << 31, MAGIC), struct.pack("<I?I4s", 7, True, 5, MAGIC), b"\xff" * 8],
    ids=["none", "longer than it is", "of another buffer", "of noise"],
)
def test_an_update_with_a_block_that_cannot_be_counts_in_nothing_and_is_a_strike(block: bytes) -> None:
    async def test(hall: Hall) -> None:
        merge = receive_buffers(hall)
        good = LAYOUT.pack({"count": torch.tensor(3)})
        await deliver(hall, Sender(0, payload=MODEL + block), Sender(1, payload=MODEL + good))
        assert hall.bus.receipts == [(0, False), (1, True)]
        assert [strike.reason for strike in hall.strikes] == ["malformed"]
        assert hall.strategy.added == [1]
        assert int(merge.finish()["count"]) == 3

    run_with(test, form=UpdateForm(DIM, LAYOUT))
