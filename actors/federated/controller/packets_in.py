"""Collecting the packets of updates until each is complete. Pure: no bus, no clock, no tensors.

An update of several packets counts when all of them are here, and none of them before: until then they are kept as
bytes, by their numbers, so that any order will do and a packet that comes twice is kept once. There is one such update
of each client, the one that it began last: with a later one, or a later start of the client, the packets before go.

What is forgotten here is not lost: the client keeps all packets until the update counts, and is asked for those that
are missing when its last packet is here. So packets are kept where there is room. An update that is announced, in one
piece or by its last packet, takes the place of packets whose clients still train: else one client could keep all others
out until the round is over. One of which nothing has come for some time gives up its place, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gradbus.actors.aggregation.packet_sum import max_packet_bytes, max_update_bytes
from gradbus.actors.federated.controller.uploads import RequestedUpload
from gradbus.runtime.wire.control import PacketRequest, PacketsMissing
from gradbus.runtime.wire.frames import FrameKey


class CompleteUpdate(NamedTuple):
    """An update all of whose packets are in.

    Attributes:
        source: the last packet, with the bytes of all. last: the last packet as it was requested. packets: the payloads
            of all, by number.
    """

    source: RequestedUpload
    last: RequestedUpload
    packets: Sequence[memoryview]


@dataclass(slots=True)
class _Incomplete:
    """The packets of one update that have come. ``last``: the number of the last one; 0: not known yet. ``num_bytes``:
    of all that are here. ``progress_s``: when the newest of them came."""

    key: FrameKey
    payloads: dict[int, memoryview] = field(default_factory=dict)
    sources: dict[int, RequestedUpload] = field(default_factory=dict)
    last: int = 0
    num_bytes: int = 0
    progress_s: float = 0.0

    @property
    def missing(self) -> list[int]:
        """Numbers of the packets that are missing, ascending, once the last one is known."""
        return [number for number in range(1, self.last + 1) if number not in self.payloads]


class PacketCollector:
    """The packets of updates that are not complete, at most one update of each client."""

    def __init__(self, dim: int) -> None:
        """``dim``: elements of the model, which limits the bytes of packets."""
        self._max_packet_bytes = max_packet_bytes(dim)
        self._max_bytes = max_update_bytes(dim)
        self._of: dict[int, _Incomplete] = {}  # by client, in the order in which they began

    @property
    def num_bytes(self) -> int:
        """Bytes of all packets that are here."""
        return sum(one.num_bytes for one in self._of.values())

    @property
    def oldest(self) -> int | None:
        """The client whose update began first of those that are not complete; None: there is none."""
        return next(iter(self._of), None)

    def is_outdated(self, update: RequestedUpload) -> bool:
        """Whether its client has begun a later update since."""
        held = self._of.get(update.client_id)
        return held is not None and _age(update.whole_key) < _age(held.key)

    @property
    def announced(self) -> list[RequestedUpload]:
        """Return the last packets of the updates of which others are missing: they have the figures of training."""
        return [held.sources[held.last] for held in self._of.values() if held.last]

    def fault(self, update: RequestedUpload, under_way: Iterable[RequestedUpload] = ()) -> str:
        """Return the reason why no honest client sends this packet beside others of the same update; empty: none.

        Args:
            under_way: uploads of the same client that are requested or granted.
        """
        request = update.request
        assert isinstance(request, PacketRequest)
        if not 0 < request.total_bytes <= self._max_packet_bytes:
            return f"a packet of {request.total_bytes} bytes, at most {self._max_packet_bytes} with this model"
        if request.memory:
            return "a packet in shared memory, from where only updates in one piece are read"
        known = self._known(update, under_way)
        if (same := known.get(request.packet)) is not None:
            is_same = same.repeats(update) and _is_last(same) == request.last
            return "" if is_same else f"packet {request.packet} comes again with other content"
        if any(other.key == update.key for other in known.values()):
            return f"packet {request.packet} has the number of an upload of another one, {request.transfer}"
        highest = max(known, default=0)
        last = next((number for number, other in known.items() if _is_last(other)), 0)
        if (last and request.packet > last) or (request.last and (last or request.packet < highest)):
            return f"packets {request.packet} and {highest}: the last one is number {last or request.packet}"
        num_bytes = request.total_bytes + sum(other.request.total_bytes for other in known.values())
        if num_bytes > self._max_bytes:
            return f"packets of {num_bytes} bytes in all, at most {self._max_bytes} with this model"
        return ""

    def _known(self, update: RequestedUpload, under_way: Iterable[RequestedUpload]) -> dict[int, RequestedUpload]:
        """The packets of the same update by number, those that are here and those that are ``under_way``."""
        held = self._of.get(update.client_id)
        here = () if held is None else held.sources.values()
        return {
            one.request.packet: one
            for one in (*under_way, *here)
            if isinstance(one.request, PacketRequest) and one.whole_key == update.whole_key
        }

    def forget_others(self, update: RequestedUpload) -> None:
        """Forget the packets of any other update of its client, which requests this upload."""
        held = self._of.get(update.client_id)
        if held is not None and held.key != update.whole_key:
            del self._of[update.client_id]

    def has(self, update: RequestedUpload) -> bool:
        """Whether this packet is here."""
        held = self._of.get(update.client_id)
        request = update.request
        return (
            held is not None
            and held.key == update.whole_key
            and isinstance(request, PacketRequest)
            and request.packet in held.payloads
        )

    def add(self, update: RequestedUpload, payload: memoryview, now_s: float = 0.0) -> CompleteUpdate | None:
        """Take a packet, in which :meth:`fault` finds none, at ``now_s``. Returns the update that is complete with it,
        which is forgotten here; None: packets are missing, or this one is here already."""
        self.forget_others(update)
        request = update.request
        assert isinstance(request, PacketRequest)
        held = self._of.setdefault(update.client_id, _Incomplete(update.whole_key))
        if request.packet in held.payloads:
            return None
        held.payloads[request.packet], held.sources[request.packet] = payload, update
        held.num_bytes += len(payload)
        held.progress_s = now_s
        if request.last:
            held.last = request.packet
        if not held.last or held.missing:
            return None
        del self._of[update.client_id]
        last = held.sources[held.last]
        whole = last._replace(request=replace(last.request, total_bytes=held.num_bytes))
        return CompleteUpdate(whole, last, [held.payloads[number] for number in range(1, held.last + 1)])

    def missing(self, update: RequestedUpload) -> PacketsMissing | None:
        """The answer to the last packet of an update of which others are missing; None: it is not the last, or there is
        no such update."""
        held, request = self._of.get(update.client_id), update.request
        if held is None or held.key != update.whole_key or not isinstance(request, PacketRequest) or not request.last:
            return None
        return PacketsMissing(update.client_id, update.incarnation, request.round_id, request.transfer, held.missing)

    def forget(self, client_id: int, incarnation: int) -> bool:
        """Forget the packets of a client that is gone. Returns whether there were any."""
        held = self._of.get(client_id)
        if held is None or held.key.incarnation != incarnation:
            return False
        del self._of[client_id]
        return True

    def discard(self, client_id: int) -> None:
        """Forget the packets of a client whose update is refused."""
        self._of.pop(client_id, None)

    def make_room(self, update: RequestedUpload, *, stalled_at_s: float) -> int | None:
        """Forget the packets of one other client: where this update is announced, of the youngest one that is not; else
        of one of which nothing has come since ``stalled_at_s``. Returns the client; None: all have to be kept."""
        others = [(client_id, held) for client_id, held in self._of.items() if client_id != update.client_id]
        in_training = [client_id for client_id, held in others if update.is_announced and not held.last]
        stalled = [client_id for client_id, held in others if held.progress_s < stalled_at_s]
        found = next(iter([*reversed(in_training), *stalled]), None)
        if found is not None:
            del self._of[found]
        return found

    def keep(self, is_wanted: Callable[[int], bool]) -> None:
        """Forget the updates of all rounds but those that are wanted."""
        self._of = {client_id: held for client_id, held in self._of.items() if is_wanted(held.key.round_id)}


def _is_last(update: RequestedUpload) -> bool:
    return isinstance(update.request, PacketRequest) and update.request.last


def _age(key: FrameKey) -> tuple[int, int]:
    return key.incarnation, key.transfer
