"""Uploads on their way to a Controller: the frames of those that were granted, and requests for what is missing.

    UploadRequest -> Grant -> frames -> RetransmitRequest, where some are missing -> Receipt

A client requests an upload, and sends on a grant. Which uploads are granted, and when, and what becomes of one that is
complete, is decided by whoever receives them: ``updates_in.py`` the updates of a round, ``cross_site.py`` local models,
the hub of Flower apps their replies. Frames of other uploads are refused before anything is allocated for them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping, ValuesView
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from gradbus.runtime.errors import FrameError
from gradbus.runtime.wire.assembler import Assembler, Verdict
from gradbus.runtime.wire.control import Body, Grant, PacketRequest, Receipt, RetransmitRequest, UploadRequest
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate

REPAIR_AFTER_S = 0.3  # without a new frame, request those that are missing; see Uploads.repair
MAX_PATIENCE_S = 3.0
STALL_AFTER_S = 10.0  # without a new frame, give the place to another client
UNEXPECTED, REPEATED = "unexpected frame", "repeated frame"  # reasons of frames that a network may bring
MAX_REASON_CHARS = 4096


class RequestedUpload(NamedTuple):
    """An upload by its request, the client and its incarnation."""

    client_id: int
    incarnation: int
    request: UploadRequest

    @property
    def key(self) -> FrameKey:
        """The key of its frames."""
        request = self.request
        return FrameKey(
            Kind.UPDATE, request.run_id, request.round_id, self.client_id, self.incarnation, request.transfer
        )

    @property
    def whole_key(self) -> FrameKey:
        """The key by which the whole update is known: that of its first packet; of one that is no packet, its own."""
        request = self.request
        return self.key._replace(transfer=request.update) if isinstance(request, PacketRequest) else self.key

    @property
    def is_announced(self) -> bool:
        """Whether the request has the figures of the training: those of a packet before the last do not count."""
        request = self.request
        return request.last if isinstance(request, PacketRequest) else True

    def repeats(self, other: RequestedUpload) -> bool:
        """Whether the other is a repeated request. The figures of training, which may be NaN, are not compared."""
        names = ("run_id", "round_id", "transfer", "total_bytes", "num_samples", "memory")
        return self.key == other.key and all(getattr(self.request, n) == getattr(other.request, n) for n in names)

    def goes_with(self, other: RequestedUpload) -> bool:
        """Whether both may be on their way: as one request, or as two packets of one update."""
        return self.repeats(other) or (self.whole_key == other.whole_key and self.key != other.key)

    def receipt(self, refusal: str = "") -> Receipt:
        """The answer that ends it. ``refusal``: the reason why it does not count; empty: it does."""
        client_id, incarnation, request = self
        return Receipt(
            client_id,
            incarnation,
            request.run_id,
            request.round_id,
            request.transfer,
            not refusal,
            refusal[:MAX_REASON_CHARS],
        )


@dataclass(slots=True, eq=False)
class IncomingUpload:
    """An upload that was granted, or that is to be read in its client's memory.

    Attributes:
        progress_s: when it began, or its newest frame came, by ``time.monotonic``. granted_s: when it was granted.
            asked_s: when missing frames were requested last; 0: never. frames: so many have come.
        in_memory: it is read in its client's memory. payload: all of it, once it is here.
    """

    source: RequestedUpload
    progress_s: float
    in_memory: bool = False
    granted_s: float = 0.0
    asked_s: float = 0.0
    frames: int = 0
    payload: memoryview | None = None

    @property
    def key(self) -> FrameKey:
        """The key of its frames."""
        return self.source.key

    @property
    def request(self) -> UploadRequest:
        """Return what its client has announced."""
        return self.source.request

    def hold(self, payload: memoryview) -> None:
        """Keep the whole payload."""
        self.payload = payload

    def let_go(self) -> None:
        """Keep the payload no longer."""
        self.payload = None

    def fall_back_to_frames(self) -> None:
        """Note that it cannot be read in its client's memory, and is to come in frames."""
        self.in_memory, self.progress_s = False, time.monotonic()


U = TypeVar("U", bound=IncomingUpload)
V = TypeVar("V")


class Uploads(Generic[U]):
    """The uploads that are granted and not complete. All methods are called on the loop."""

    def __init__(self, publish: Callable[[Body], Awaitable[None]]) -> None:
        """``publish`` sends a message. Where it cannot, that is no error: it is sent again."""
        self._publish = publish
        self._assembler = Assembler()
        self._granted: dict[FrameKey, U] = {}
        self._newest_s = 0.0  # when the newest frame of any came
        self._took_s = 0.0  # from the grant to the last frame: of late

    @property
    def keys(self) -> Collection[FrameKey]:
        """Their keys."""
        return self._granted.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them, once they are complete."""
        return sum(upload.request.total_bytes for upload in self._granted.values())

    @property
    def repair_period_s(self) -> float:
        """Seconds between two calls of :meth:`repair`."""
        return REPAIR_AFTER_S / 2

    @property
    def stall_after_s(self) -> float:
        """Seconds without anything new after which an upload gives its place to another one."""
        return STALL_AFTER_S

    async def grant(self, upload: U) -> None:
        """Have a client send, and take its frames from now on. Also again, as a grant may be lost."""
        self._granted[upload.key] = upload
        upload.granted_s = upload.granted_s or time.monotonic()
        self._assembler.expect(upload.key, max_bytes=upload.request.total_bytes)
        await self._send_grant(upload)

    async def _send_grant(self, upload: U) -> None:
        client_id, incarnation, request = upload.source
        await self._publish(Grant(client_id, incarnation, request.round_id, request.transfer))

    def feed(self, message: ClientUpdate) -> U | None:
        """Take a frame. Returns the upload that is complete with it; None: others are missing.

        Raises:
            FrameError: it belongs to no granted upload, is repeated, or contradicts the request or an earlier frame.
        """
        frame = message.frame
        upload = self._granted.get(frame.key)
        if upload is None:
            raise FrameError(UNEXPECTED, f"frame {frame.seq} of {frame.seq_cnt}: {frame.key} was not granted")
        request = upload.request
        if (message.num_samples, frame.total_bytes) != (request.num_samples, request.total_bytes):
            raise FrameError(
                "mismatch",
                f"frame of {frame.total_bytes} bytes and {message.num_samples} samples: "
                f"{request.total_bytes} and {request.num_samples} were announced",
            )
        verdict = self._assembler.feed(frame)
        if verdict is Verdict.REPEATED:
            raise FrameError(REPEATED, f"frame {frame.seq} of {frame.seq_cnt} is here")
        upload.progress_s = self._newest_s = time.monotonic()
        upload.frames += 1
        if verdict is not Verdict.COMPLETE:
            return None
        self._took_s = min(max(upload.progress_s - upload.granted_s, self._took_s / 2), MAX_PATIENCE_S)
        upload.payload = self._assembler.take(upload.key)
        del self._granted[upload.key]
        return upload

    async def repair(self) -> list[U]:
        """Request what is missing of uploads that stand still, and grant anew those of which nothing has come.

        Frames are not seen before they are there as a whole, and DDS sends its packets again by itself. So what is
        asked for too soon is sent twice, while others wait for the network: it is asked for when it is late beside the
        uploads before it, of which nothing comes any more either, or after MAX_PATIENCE_S.

        Returns:
            Those that have stood still for STALL_AFTER_S, which are dropped: their clients repeat the request when they
            can.
        """
        now_s, stalled = time.monotonic(), []
        patience_s = max(REPAIR_AFTER_S, self._took_s)
        if now_s - self._newest_s <= patience_s:
            patience_s = max(REPAIR_AFTER_S, MAX_PATIENCE_S)
        for upload in list(self._granted.values()):
            silent_s = now_s - max(upload.progress_s, upload.asked_s)
            if silent_s < patience_s or self._granted.get(upload.key) is not upload:
                continue
            if now_s - upload.progress_s > STALL_AFTER_S and upload.asked_s:
                self.drop(upload.key)
                stalled.append(upload)
                continue
            upload.asked_s = now_s
            missing = self._assembler.missing(upload.key)
            if missing is None:
                await self._send_grant(upload)
                continue
            client_id, incarnation, request = upload.source
            await self._publish(
                RetransmitRequest(client_id, incarnation, request.round_id, request.transfer, list(missing))
            )
        return stalled

    def drop(self, key: FrameKey) -> None:
        """Take no more of this upload, and forget what has come."""
        self._granted.pop(key, None)
        self._assembler.forget(key)


class ByClient(MutableMapping[FrameKey, V]):
    """Values by the keys of uploads, in order of insertion, and those of each client without a look at all others.

    Where clients may lie, the updates of all of them are held until the last one is announced. A scan of all for each
    message would then take time in proportion to the square of their number.

    Attributes:
        num_bytes: sum of the sizes of all values.
    """

    def __init__(self, size_of: Callable[[V], int]) -> None:
        """Begin empty. ``size_of``: bytes of a value, which do not change while it is here."""
        self._size_of = size_of
        self._all: dict[FrameKey, V] = {}
        self._of: dict[int, dict[FrameKey, V]] = {}
        self.num_bytes = 0

    def of(self, client_id: int) -> list[V]:
        """Return the values of one client, in order of insertion."""
        return list(self._of.get(client_id, {}).values())

    def __getitem__(self, key: FrameKey) -> V:
        return self._all[key]

    def __setitem__(self, key: FrameKey, value: V) -> None:
        if (before := self._all.get(key)) is not None:
            self.num_bytes -= self._size_of(before)
        self._all[key] = self._of.setdefault(key.sender, {})[key] = value
        self.num_bytes += self._size_of(value)

    def __delitem__(self, key: FrameKey) -> None:
        self.num_bytes -= self._size_of(self._all.pop(key))
        own = self._of[key.sender]
        del own[key]
        if not own:
            del self._of[key.sender]

    def values(self) -> ValuesView[V]:
        """Return a view of all values."""
        return self._all.values()

    def __iter__(self) -> Iterator[FrameKey]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
