"""The tree of errors. The facts are attributes, not only text, so that a caller can act on them."""

from __future__ import annotations

from collections.abc import Sequence


class GradbusError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(GradbusError, ValueError):
    """A setting is wrong; the text names it, what was expected, what was found and what to do."""


class BusError(GradbusError):
    """DDS refused something: the text names the call, the return code and the likely cause."""


class BusClosed(BusError):
    """The bus is closed or closing; nothing more can be sent or received."""


class WriteTimeout(BusError, TimeoutError):
    """Data could not be handed to DDS in time: some matched reader does not take its data.

    Attributes:
        topic: name of the DDS topic.
        timeout_s: how long no progress was made.
    """

    def __init__(self, topic: str, timeout_s: float) -> None:
        super().__init__(
            f"topic {topic!r}: no progress for {timeout_s:g} s; a matched reader does not take its data. "
            f"It is dropped when its lease ends; see the peers with 'gradbus doctor'"
        )
        self.topic = topic
        self.timeout_s = timeout_s


class FrameError(GradbusError, ValueError):
    """Bytes from the wire are not a frame that can be accepted.

    Attributes:
        reason: one short word, used as the key when rejected frames are counted.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class CheckpointError(GradbusError):
    """A checkpoint is missing, damaged, or does not fit; the text names the file."""


class JoinRefused(GradbusError):
    """The controller does not let this client take part; ``why`` is its reason, in words."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the controller refused this client: {why}")
        self.why = why


class BarrierTimeout(GradbusError, TimeoutError):
    """Not everybody was there in time.

    Attributes:
        missing: ids that did not come, where the ids are known.
        ready: how many were ready.
        needed: how many had to be.
    """

    def __init__(self, what: str, *, missing: Sequence[int], ready: int, needed: int, timeout_s: float) -> None:
        names = f", missing {list(missing)}" if missing else ""
        super().__init__(
            f"{what}: {ready} of {needed} ready after {timeout_s:g} s{names}. Start the missing ones, and check that "
            f"all use the same job, domain and network interface ('gradbus doctor' shows them)"
        )
        self.missing = tuple(missing)
        self.ready = ready
        self.needed = needed


class RoundTimeout(GradbusError, TimeoutError):
    """A round ended with too few updates, as often as the configuration allows.

    Attributes:
        round_id: the round.
        got: updates that arrived.
        minimum: updates that were needed.
    """

    def __init__(self, round_id: int, got: int, minimum: int, attempts: int) -> None:
        super().__init__(
            f"round {round_id}: {got} updates where {minimum} are needed, after {attempts} attempts. The last "
            f"committed model is safe; start clients and run the controller again to continue"
        )
        self.round_id = round_id
        self.got = got
        self.minimum = minimum
