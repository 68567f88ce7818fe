"""An outlet and an inlet that have matched over the simulated relay, and a stranger beside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from channel_node import Channel
from fault_simulation.simulated_relay import SimulatedSession
from transport_scenes import LONG_LEASE_S, SteppedZenohScene, take

from gradbus.runtime.transport.api import PeerId
from gradbus.runtime.transport.channels import CHANNELS, ToController
from gradbus.runtime.transport.zenoh.keys import ChannelKeys, endpoint_id

VOLATILE = Channel("volatile")
LEASE_S = 10.0


class Joined:
    """An outlet and an inlet, each at a process of its own."""

    def __init__(
        self,
        scene: SteppedZenohScene,
        channel: Channel = VOLATILE,
        loss: float = 0.0,
        *,
        is_reliable: bool = True,
        is_control: bool = False,
        answers: bool = True,
    ) -> None:
        """``is_reliable``: the inlet is. ``answers``: else what it says is lost, and they do not match."""
        self.scene = scene
        self.source, self.target = (scene.join("one", LEASE_S, loss=loss) for _ in range(2))
        if not answers:
            self.target.session.loss = 1.0
        opened = channel.opened()
        if is_control:
            opened = replace(opened, to_message=CHANNELS[ToController].to_message)
        self.outlet: Any = self.source.transport.outlet(opened)
        self.inlet: Any = self.target.transport.inlet(replace(opened, reliable=is_reliable))
        if answers:
            scene.until(lambda: self.outlet.peers() and self.inlet.peers(), "they match")

    def arrive(self, count: int) -> list[int]:
        """Take until so many samples are there."""
        found: list[int] = []
        self.scene.until(lambda: found.extend(take(self.inlet)) or len(found) >= count, f"{count} samples arrive")
        return found


class Stranger:
    """A session of somebody who has not been invited, and says what he likes.

    Attributes:
        id: of an endpoint of his.
    """

    def __init__(self, scene: SteppedZenohScene, channel: Channel = VOLATILE) -> None:
        self.session: SimulatedSession = scene.join("one", LONG_LEASE_S).session
        self.owner: PeerId = b"a stranger's"
        self.id = endpoint_id(self.owner, 1)
        self.keys = ChannelKeys("one", channel.opened().name)


class Members:
    """Knows who belongs to the job."""

    knows_all = True

    def __init__(self, *known: PeerId) -> None:
        self._known = known

    def known(self) -> tuple[PeerId, ...]:
        return self._known


class NoThread:
    """Counts what a transport rejects, and has no thread."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()
