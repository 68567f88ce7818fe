"""Models that a client reads from the memory of a controller on its machine."""

from __future__ import annotations

from gradbus.actors.model_copy import ModelCopy
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.control import ModelHere
from gradbus.runtime.frames import CONTROLLER, Flags, FrameKey, Kind
from gradbus.runtime.logs import get_logger
from gradbus.runtime.messages import ModelBlob
from gradbus.runtime.sealed_memory import PayloadMemory, read
from gradbus.runtime.shared_memory import SharedMemoryFault, is_here
from gradbus.runtime.topics import TOPICS

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
        self.here = memory.here

    def start(self) -> None:
        """Another controller, or another start of it: what did not work with the one before may work now."""
        self.here = self._memory.here

    def expect(self, session: int, said: ModelHere) -> FrameKey | None:
        """The controller of this session has a model in its memory. Its key, if it is to be read."""
        flags = Flags.DELTA if said.delta else Flags.NONE
        key = FrameKey(Kind.MODEL, said.run_id, said.round_id, CONTROLLER, session, said.transfer)
        wanted = self.here and is_here(said.memory) and self._copy.expect(key, int(flags), said.total_bytes)
        return key if wanted else None

    async def read(self, key: FrameKey, said: ModelHere) -> memoryview | None:
        """The payload of that model. None: it cannot be read. If it is still wanted no other is read that way, which is
        logged: the controller has to send what it had."""
        try:
            payload = await self._thread.run(read, said.memory, said.total_bytes)
        except SharedMemoryFault as error:
            # One that is no longer wanted may be gone for that reason: a newer one has taken its place.
            if self._copy.give_up(key) and self.here:
                self.here = ""
                log.warning(
                    "no shared memory", client=self._client_id, of="the controller", reason=str(error),
                    effect="models go over DDS",
                )  # fmt: skip
            return None
        self._memory.read_bytes[TOPICS[ModelBlob].name] += len(payload)
        return payload
