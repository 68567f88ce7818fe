"""A client that has a name and no id asks its controller for one.

:mod:`gradbus.actors.federated.controller.naming` says how it speaks until then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from gradbus.actors.federated.client.older_controllers import ask_older_controller
from gradbus.actors.federated.client.session import ControllerSession
from gradbus.actors.federated.protocol import REPEAT_AFTER_S
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BusClosed, BusError, GradbusError, JoinRefused
from gradbus.runtime.transport.channels import Inbox, ToClients
from gradbus.runtime.wire.control import Hello, Leave, Refused, Welcome
from gradbus.runtime.wire.frames import CONTROLLER, UNASSIGNED
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, Message


async def request_id(
    bus: Bus, incarnation: int, hello: Hello, session: ControllerSession, check: Callable[[], None]
) -> tuple[int, str]:
    """Return the id of this client, and its name.

    Args:
        hello: says its name, and of what model it has.
        session: learns that there is a controller.
        check: called about twice a second; raises BarrierTimeout where there has been none for too long.

    Raises:
        JoinRefused: the controller has refused it.
    """
    identity = Identity(UNASSIGNED, incarnation)

    def concerns(message: Message) -> bool:
        if not isinstance(message, Control) or message.sender != CONTROLLER:
            return False
        return getattr(message.body, "to", UNASSIGNED) == UNASSIGNED

    def refused(message: Control) -> None:
        _answer(message, incarnation, session)

    bus.open_writer(ClientUpdate)  # its reader shows that there is a controller, of whatever protocol
    asking = asyncio.create_task(ask_older_controller(bus, identity, lambda: hello, refused), name="older-controller")
    with bus.subscribe(ToClients, Inbox(incarnation), only=concerns) as inbox:
        try:
            while True:
                with contextlib.suppress(BusError):  # sent again
                    await bus.publish(identity, hello)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPEAT_AFTER_S):
                        while (found := _answer(await inbox.get(), incarnation, session)) is None:
                            pass
                    return found
                if asking.done():
                    asking.result()  # it raises the refusal
                check()
        except BusClosed:
            if inbox.fault:
                raise
            raise BusClosed("the bus was closed under a running client: stop the client first") from None
        except BaseException:
            with contextlib.suppress(GradbusError):
                await bus.publish(identity, Leave("stopped before it had an id"))
            raise
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                asking.exception()  # it is of no use any more


def _answer(message: Message, incarnation: int, session: ControllerSession) -> tuple[int, str] | None:
    """Return id and name where a message says them. Raises JoinRefused: it refuses this client."""
    if not isinstance(message, Control) or not session.accepts_session(message.incarnation, message.body):
        return None
    match message.body:
        case Welcome(incarnation=to) as welcome if to == incarnation and welcome.client_id >= 0:
            return welcome.client_id, welcome.name
        case Refused(incarnation=to) as refused if to == incarnation:
            raise JoinRefused(refused.why)
        case _:
            return None
