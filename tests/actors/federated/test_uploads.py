"""When the receiver of uploads asks for what is missing of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gradbus.actors.federated.controller import uploads
from gradbus.actors.federated.controller.uploads import IncomingUpload, RequestedUpload, Uploads
from gradbus.runtime.wire.control import Body, Grant, RetransmitRequest, UploadRequest
from gradbus.runtime.wire.frames import FrameKey, parse, split
from gradbus.runtime.wire.messages import ClientUpdate

CHUNK, CHUNKS = 1000, 10
STEP_S = 0.1


class Receiver:
    """Takes uploads of ten frames each, at a clock that goes on when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.asked: list[tuple[str, int]] = []  # what was sent, and to whom
        monkeypatch.setattr(uploads, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.uploads: Uploads[IncomingUpload] = Uploads(self._send)

    async def _send(self, body: Body) -> None:
        assert isinstance(body, Grant | RetransmitRequest)
        self.asked.append((type(body).__name__, body.to))

    async def grant(self, client_id: int) -> FrameKey:
        request = UploadRequest(
            run_id=7, round_id=1, transfer=1, total_bytes=CHUNK * CHUNKS, num_samples=5, loss=1.0, train_s=0, encode_s=0
        )
        upload = IncomingUpload(RequestedUpload(client_id, 3, request), self.now_s)
        await self.uploads.grant(upload)
        self.asked.clear()
        return upload.key

    def feed(self, key: FrameKey, *numbers: int) -> None:
        for head, data in split(key, bytes(CHUNK * CHUNKS), chunk_bytes=CHUNK, only=numbers):
            self.uploads.feed(ClientUpdate(key.sender, 1, 5, parse(head + bytes(data))))

    async def later(self, seconds: float = STEP_S) -> None:
        self.now_s += seconds
        await self.uploads.repair()


def test_an_upload_that_waits_behind_another_one_is_asked_for_when_nothing_comes_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        receiver = Receiver(monkeypatch)
        first, _ = await receiver.grant(1), await receiver.grant(2)
        for number in range(CHUNKS):
            receiver.feed(first, number)
            await receiver.later()
        await receiver.later(0.7)
        assert receiver.asked == []  # the first took 0.9 s
        await receiver.later()
        assert receiver.asked == [("Grant", 2)]  # it may be lost

    asyncio.run(test())


def test_an_upload_of_which_nothing_comes_is_soon_asked_for_where_others_are_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        receiver = Receiver(monkeypatch)
        first, _ = await receiver.grant(1), await receiver.grant(2)
        receiver.feed(first, *range(CHUNKS))
        await receiver.later(uploads.REPAIR_AFTER_S + 0.01)
        assert receiver.asked == [("Grant", 2)]

    asyncio.run(test())


def test_an_upload_that_took_a_minute_leaves_no_patience_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        receiver = Receiver(monkeypatch)
        slow = await receiver.grant(1)
        receiver.feed(slow, *range(CHUNKS - 1))
        receiver.now_s += 60.0
        receiver.feed(slow, CHUNKS - 1)
        for client_id in range(2, 6):
            receiver.feed(await receiver.grant(client_id), *range(CHUNKS))
        await receiver.grant(6)
        await receiver.later(uploads.REPAIR_AFTER_S + 0.01)
        assert receiver.asked == [("Grant", 6)]

    asyncio.run(test())


def test_an_upload_that_lacks_a_frame_is_asked_for_it_also_while_frames_of_others_come_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        receiver = Receiver(monkeypatch)
        receiver.feed(await receiver.grant(1), *range(CHUNKS - 1))
        began_s = receiver.now_s
        for client_id in range(2, 9):
            other = await receiver.grant(client_id)
            for number in range(CHUNKS):
                receiver.feed(other, number)
                await receiver.later()
                if receiver.asked:
                    break
            if receiver.asked:
                break
        assert receiver.asked == [("RetransmitRequest", 1)]
        assert uploads.MAX_PATIENCE_S <= receiver.now_s - began_s + 1e-9 < uploads.MAX_PATIENCE_S + 2 * STEP_S

    asyncio.run(test())
