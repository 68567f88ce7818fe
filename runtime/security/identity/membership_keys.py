"""The keys that a node was granted: its pairwise keys with the controller, and the group keys of the epochs."""

from __future__ import annotations

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.envelope import EnvelopeHeader
from gradbus.runtime.security.identity import key_epoch
from gradbus.runtime.security.identity.controller_signatures import BroadcastVerifier
from gradbus.runtime.security.identity.key_epoch import KeyGrant
from gradbus.runtime.security.streams import InboundStreams, OutboundStreams, SharedKey

FORMER_S = 60.0  # the longest that the key of the former epoch is kept, however long a round takes
FORMER_COMMANDS = 2  # it goes with the second command of the new epoch: what belongs to the round before has come then


class MembershipKeys:
    """The keys of one node with one start of the controller.

    Attributes:
        outgoing: encrypts what this node sends to the controller.
    """

    def __init__(
        self, session: bytes, public: bytes, up: SharedKey, down: InboundStreams, former: MembershipKeys | None,
        now_s: float,
    ) -> None:  # fmt: skip
        """Take in the pairwise keys of one handshake.

        Args:
            session: of this node.
            public: public key of the controller.
            up, down: the pairwise keys; the session of ``down`` is the controller's.
            former: the keys granted before. Those of the same start of the controller stay valid for a while, those
                of an earlier start do not.
        """
        controller, job = down.session, up.job
        self.controller = controller
        self.outgoing = OutboundStreams(up, session)
        self._job = job
        self._down = [down]
        self._down_until_s = now_s + key_epoch.GRACE_S
        self._epochs: dict[bytes, InboundStreams] = {}
        self._newest: InboundStreams | None = None
        self._commands = 0  # received in the newest epoch
        self._former_until_s = 0.0
        self._verifier = BroadcastVerifier(job, public, controller)
        self._has_floors = False
        if former is not None and former.controller == controller:
            self._down.append(former._down[0])
            self._epochs, self._newest, self._commands = former._epochs, former._newest, former._commands
            self._former_until_s = former._former_until_s
            self._verifier, self._has_floors = former._verifier, True

    @property
    def epoch(self) -> int:
        """Number of the newest key epoch; 0: there is none."""
        return 0 if self._newest is None else self._newest.key.epoch

    def is_own(self, header: EnvelopeHeader) -> bool:
        """Whether an envelope is under a pairwise key of this node and the controller."""
        return any(streams.key.key_id == header.key_id for streams in self._down)

    def has(self, header: EnvelopeHeader) -> bool:
        """Whether an envelope is under the group key of an epoch that this node has."""
        return header.key_id in self._epochs

    def open_keys(self, topic: str, header: EnvelopeHeader, view: memoryview) -> memoryview:
        """Decrypt an envelope of the controller to this node. Raises FrameError: it is invalid."""
        streams = next(one for one in self._down if one.key.key_id == header.key_id)
        return streams.open(topic, header, view)

    def open_own(self, topic: str, header: EnvelopeHeader, view: memoryview) -> memoryview | None:
        """Decrypt an envelope to this node; None: it is for or from another one. Raises FrameError: it is invalid."""
        return self.open_keys(topic, header, view) if self.is_own(header) else None

    def open_group(self, topic: str, header: EnvelopeHeader, view: memoryview) -> memoryview:
        """Decrypt an envelope of the controller to all, and verify its signature. Raises FrameError: it is invalid."""
        if topic not in key_epoch.TOPICS:
            raise FrameError("level", f"an envelope for all on {topic}, where the controller sends nothing")
        streams = self._epochs[header.key_id]
        plain = streams.open(topic, header, view)
        if topic != key_epoch.MODELS:  # those are signed as a whole
            plain = self._verifier.verify(topic, plain)
        if topic == key_epoch.COMMANDS and streams is self._newest:
            self._commands += 1
            if self._commands >= FORMER_COMMANDS:
                self._drop_former()
        return plain

    def take(self, word: KeyGrant, now_s: float) -> None:
        """Take in the granted group key of an epoch."""
        if not self._has_floors:
            self._has_floors = True
            self._verifier.start_above(key_epoch.COMMANDS, word.said[0])
            self._verifier.start_above(key_epoch.CONTROL, word.said[1])
        key = SharedKey(self._job, envelope.GROUP, word.epoch, word.secret)
        if key.key_id in self._epochs or word.epoch < self.epoch:
            return
        # All members have this key: replays are found by the signed numbers, and for models by those of the frames.
        streams = InboundStreams(key, self.controller, has_window=False)
        for topic, floor in zip(key_epoch.TOPICS, word.floors, strict=True):
            streams.start_above(topic, floor)
        self._drop_former()
        self._epochs[key.key_id] = streams
        self._newest, self._commands = streams, 0
        self._former_until_s = now_s + FORMER_S

    def _drop_former(self) -> None:
        """Drop all epochs but the newest."""
        self._epochs = {key_id: streams for key_id, streams in self._epochs.items() if streams is self._newest}

    def tick(self, now_s: float) -> None:
        """Drop expired keys."""
        if now_s > self._former_until_s and len(self._epochs) > 1:
            self._drop_former()
        if now_s > self._down_until_s and len(self._down) > 1:
            del self._down[1:]
