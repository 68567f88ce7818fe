"""Models that a client reads from the memory of a controller on its machine."""

from __future__ import annotations

import asyncio

from gradbus.actors.federated.model_replica import ModelCopy
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.dds.topics import TOPICS
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SharedMemoryFault, is_here
from gradbus.runtime.shm.shared_payload import PayloadMemory, read
from gradbus.runtime.wire.control import ModelHere
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind
from gradbus.runtime.wire.messages import ModelBlob

LAST_READ_S = 1.0  # so long the controller is kept waiting, and its memory open, for who reads the last model
READ_TRIES = 3  # so often a model is asked for that is not where it is said to be

log = get_logger("client")


class ModelMemory:
    """Reads models where the controller has them, for as long as that works.

    Attributes:
        here: the machine whose memory this client reads, for its Hello; empty: none, so models have to be sent.
    """

    def __init__(self, memory: PayloadMemory, copy: ModelCopy, thread: ComputeThread, client_id: int) -> None:
        """``copy``: what the models are for. ``thread``: where memory is looked for."""
        self._memory = memory
        self._copy = copy
        self._thread = thread
        self._client_id = client_id
        self._missed: tuple[FrameKey, int] | None = None  # what was last not there, and how often
        self._ended = False
        self._reading: set[asyncio.Task[None]] = set()
        self.here = memory.here

    def start(self) -> None:
        """Another controller, or another start of it: what did not work with the one before may work now."""
        self.here, self._missed = self._memory.here, None

    def end(self) -> None:
        """The run is over: the controller gives its memory back, also what is just being read."""
        self._ended = True

    def note(self, reading: asyncio.Task[None]) -> None:
        """A task that reads a model."""
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    async def settle(self) -> None:
        """Wait, not for long, for what is being read."""
        if self._reading:
            await asyncio.wait(self._reading, timeout=LAST_READ_S)

    def expect(self, session: int, said: ModelHere) -> FrameKey | None:
        """The controller of this session has a model in its memory. Its key, if it is to be read."""
        flags = Flags.DELTA if said.delta else Flags.NONE
        key = FrameKey(
            Kind.MODEL, said.run_id, said.round_id, CONTROLLER, session, said.transfer, said.signature
        )  # fmt: skip
        wanted = self.here and is_here(said.memory) and self._copy.expect(key, int(flags), said.total_bytes)
        return key if wanted else None

    async def read(self, key: FrameKey, said: ModelHere) -> memoryview | None:
        """The payload of that model. None: it has to be asked for, if it is still wanted.

        It may be gone, for a newer one or with the controller: that says nothing of the next one. If memory cannot be
        opened from here, or the same model is not there again and again, no other is read that way, which is logged.
        """
        try:
            payload = await self._thread.run(read, said.memory, said.total_bytes)
        except SharedMemoryFault as error:
            if self._copy.give_up(key) and self.here and not self._ended and not self._worth_asking(key, error):
                self.here = ""
                log.warning(
                    "no shared memory", client=self._client_id, of="the controller", reason=str(error),
                    effect="models go over DDS",
                )  # fmt: skip
            return None
        self._memory.read_bytes[TOPICS[ModelBlob].name] += len(payload)
        return payload

    def _worth_asking(self, key: FrameKey, error: SharedMemoryFault) -> bool:
        """Whether this model may yet be found in memory: it is gone, and not for the third time."""
        tries = 1 + (self._missed[1] if self._missed is not None and self._missed[0] == key else 0)
        self._missed = key, tries
        return _is_gone(error) and tries < READ_TRIES


def _is_gone(error: SharedMemoryFault) -> bool:
    """Whether what was there has been closed, and nothing or something else has its number now. If not, the system
    keeps this process from it."""
    cause = error.__cause__ or error.__context__
    return not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError | ProcessLookupError)
