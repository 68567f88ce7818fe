"""The way out over DDS: one topic that all ranks of a group read, and one inbox for each rank.

What is small leaves at once, on the thread that has it; everything else goes to the writer thread of the bus. A dead
rank can hold up the common topic for as long as its lease; the group has failed by then anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gradbus.runtime import frames
from gradbus.runtime.collectives.engine import wire_name
from gradbus.runtime.collectives.operation import Finished, OperationKey, Sending
from gradbus.runtime.collectives.tensors import Bytes
from gradbus.runtime.dds import Writer
from gradbus.runtime.frame_port import FramePort, Parts
from gradbus.runtime.frames import Frame, FrameKey, Kind
from gradbus.runtime.messages import Identity
from gradbus.runtime.topics import collective_topic

INLINE_BYTES = 64 * 1024  # to write so much takes less time than to wake another thread
PROBE_ALL, PROBE_INBOX = 0, 1  # parts of the frames that prove that a topic works


class DdsLink:
    """Readers and writers of one rank of one group. Implements :class:`.operation.Link`."""

    def __init__(
        self, port: FramePort, group: str, identity: Identity, world: int, take: Callable[[Frame], None]
    ) -> None:
        self._port = port
        self._identity = identity
        self._world = world
        self._group_id = 0
        # On one machine the bytes pass through its memory alone, as those of any other program do. To check them would
        # take a quarter of the time of a collective of some MB.
        self._flags = frames.Flags.NONE if port.leaves_machine else frames.Flags.HEAD_CRC
        rank = identity.sender
        self._readers = [port.open_reader(collective_topic(name), take) for name in (group, f"{group}/{rank}")]
        self._all = port.open_writer(collective_topic(group))
        self._inboxes: dict[int, Writer] = {
            other: port.open_writer(collective_topic(f"{group}/{other}")) for other in range(world) if other != rank
        }

    def admit(self, group_id: int) -> None:
        """The group that frames belong to from now on."""
        self._group_id = group_id

    @property
    def matched(self) -> bool:
        """Whether every topic has as many readers and writers as there are other ranks. DDS says so from its own view:
        it may still count one that is dead, and the other side may not have noticed yet. Hence the probes."""
        others = self._world - 1
        return (
            all(channel.reader.matched >= others for channel in self._readers)
            and self._all.matched >= others
            and all(writer.matched >= 1 for writer in self._inboxes.values())
        )

    def probe(self) -> None:
        """Send an empty frame over every topic. What does not leave now is sent again next time."""
        key = OperationKey(0, 0, "")
        for part, writers in ((PROBE_ALL, [self._all]), (PROBE_INBOX, list(self._inboxes.values()))):
            for writer in writers:
                (frame,) = frames.split(self._frame_key(key, part, ""), b"", flags=self._flags, world=self._world)
                self._port.write(writer, frame)

    def send(
        self, key: OperationKey, to: int | None, part: int, payload: Bytes, *, signature: str, meta: str = "",
        only: Sequence[int] | None = None, written: Callable[[int], None] | None = None, finished: Finished,
    ) -> Sending | None:  # fmt: skip
        """See :class:`.operation.Link`."""
        writer = self._all if to is None else self._inboxes[to]
        frame_key = self._frame_key(key, part, wire_name(key.name, signature, meta))
        numbers = range(frames.chunk_count(len(payload))) if only is None else only
        parts = frames.split(frame_key, payload, flags=self._flags, world=self._world, only=numbers)
        if len(numbers) == 1 and min(len(payload), frames.CHUNK_BYTES) <= INLINE_BYTES:
            (frame,) = parts
            if self._port.write(writer, frame):
                if written is not None:
                    written(numbers[0])
                finished(len(frame[1]))
                return None
            parts = iter([frame])

        def report() -> Iterator[Parts]:
            for number, frame in zip(numbers, parts, strict=True):
                yield frame
                if written is not None:
                    written(number)  # DDS has its own copy: the writer thread asks for the next frame

        def payload_finished(outcome: int | Exception) -> None:
            finished(sizes if isinstance(outcome, int) else outcome)

        sizes = sum(min(frames.CHUNK_BYTES, len(payload) - number * frames.CHUNK_BYTES) for number in numbers)
        return self._port.submit(writer, report(), payload_finished)

    def _frame_key(self, key: OperationKey, part: int, name: str) -> FrameKey:
        return FrameKey(
            Kind.COLLECTIVE, self._group_id, key.round_id, self._identity.sender, self._identity.incarnation, key.call,
            name, part,
        )  # fmt: skip
