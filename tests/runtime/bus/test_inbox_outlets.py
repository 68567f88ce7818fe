"""Outlets to the inboxes of single processes: opened when they are needed, closed when they are not, and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from structlog.testing import capture_logs

from gradbus.runtime.bus.inbox_outlets import UNREAD_S, InboxOutlets
from gradbus.runtime.bus.receiver import ReceivedMessages
from gradbus.runtime.transport.channels import Inbox
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import Control

MOST = 3


class Outlet:
    """Stands for an outlet, of which only the number of its readers is asked."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.matched = 1


class Scene:
    """Outlets with a clock, and what was closed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.closed: list[int] = []
        self.outlets = InboxOutlets(self._opened, self._close, most=MOST, clock=lambda: self.now_s)

    def _opened(self, inbox: Inbox) -> Any:
        return Outlet(inbox)

    def _close(self, outlets: Sequence[Any]) -> None:
        self.closed += [one.inbox.incarnation for one in outlets]

    def address(self, incarnation: int) -> Any:
        return self.outlets.get(Inbox(incarnation))


def test_a_process_that_is_addressed_again_has_the_same_outlet() -> None:
    scene = Scene()
    assert scene.address(1) is scene.address(1)
    assert len(scene.outlets) == 1


def test_a_flood_of_addressees_opens_no_more_outlets_than_there_may_be() -> None:
    scene = Scene()
    for incarnation in range(100):
        scene.address(incarnation)
        scene.address(0)  # a client that is served all the time
        assert len(scene.outlets) <= MOST
    assert 0 not in scene.closed
    assert scene.closed == list(range(1, 98))


def test_more_readers_than_inboxes_are_said_once() -> None:
    scene = Scene()
    with capture_logs() as logs:
        for incarnation in range(10):
            scene.address(incarnation)
    assert [(entry["event"], entry["most"]) for entry in logs] == [("more processes than inboxes", MOST)]


def test_an_outlet_that_no_process_reads_is_closed_when_another_one_is_opened() -> None:
    scene = Scene()
    scene.address(1).matched = 0
    scene.address(2)
    scene.now_s = UNREAD_S + 1
    scene.address(3).matched = 0  # its reader may not have been found yet
    scene.address(4)
    assert scene.closed == [1]
    assert Inbox(3) in scene.outlets


def test_an_outlet_is_closed_once() -> None:
    scene = Scene()
    scene.address(1)
    for _ in range(2):
        scene.outlets.close(Inbox(1))
    assert (scene.closed, len(scene.outlets)) == ([1], 0)


def test_a_message_is_received_once_and_as_many_are_remembered_as_come_again() -> None:
    known = ReceivedMessages(most=2)
    messages = [Control(1, 5, Leave("x"), number) for number in (1, 2, 3)]
    assert [known.is_first(one) for one in (*messages[:2], *messages)] == [True, True, False, False, True]
    assert known.is_first(Control(1, 6, Leave("x"), 3))  # of another start
