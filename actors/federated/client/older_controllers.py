"""A client that finds only a controller of an earlier protocol asks it on the topic of that time, to be refused.

Up to PROTOCOL 3 all control messages were on ``train/control``. Such a controller does not read what this client sends,
and would be waited for in vain; asked there, it answers with the sentence that names both versions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from gradbus.actors.federated.protocol import REPEAT_AFTER_S
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BarrierTimeout, BusError
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.wire.control import Hello, Refused
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, Message

OLDER_AFTER_S = 2.0  # the readers of one controller are found within milliseconds of each other
_LOOK_S = 3600.0


async def ask_older_controller(
    bus: Bus, identity: Identity, describe: Callable[[], Hello], handle: Callable[[Control], None]
) -> None:
    """Ask a controller of an earlier protocol once no other is found. Runs until cancelled, or ``handle`` raises.

    Args:
        describe: gives the Hello. handle: called with a refusal of this client.
    """

    def is_older() -> bool:
        return bus.matched_readers(ClientUpdate) > 0 and not bus.matched_readers(ToController)

    def is_refusal(message: Message) -> bool:
        if not isinstance(message, Control) or message.sender != CONTROLLER or not isinstance(message.body, Refused):
            return False
        return (message.body.to, message.body.incarnation) == (identity.sender, identity.incarnation)

    while True:
        with contextlib.suppress(BarrierTimeout):
            await bus.matched(is_older, timeout_s=_LOOK_S)
        with contextlib.suppress(BarrierTimeout):
            await bus.matched(lambda: not is_older(), timeout_s=OLDER_AFTER_S)
        if not is_older():
            continue
        with bus.subscribe(Control, only=is_refusal, passing=True) as inbox:
            while is_older():
                with contextlib.suppress(BusError):  # sent again
                    await bus.publish(identity, describe(), on=Control)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPEAT_AFTER_S):
                        message = await inbox.get()
                        if isinstance(message, Control):
                            handle(message)
