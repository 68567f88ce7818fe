"""Side links of a session, over a true relay: what many send comes side by side, and comes whatever becomes of them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import zenoh
from patience import PATIENT_S, until
from tcp_proxy import TcpProxy
from zenoh_node import Relay, session_config

from gradbus.runtime.transport.zenoh.keys import ChannelKeys
from gradbus.runtime.transport.zenoh.session_api import Declaration
from gradbus.runtime.transport.zenoh.side_links import MAX_BREAKS, SIDE_LINKS, SideLinks
from gradbus.runtime.transport.zenoh.zenoh_session import ZenohSession

KEY = "gradbus/1/a-job/a-channel/all/an-outlet"
KEYS = ChannelKeys("a-job", "a-channel")
LINKS = range(1, SIDE_LINKS + 1)
ROUND_S = 0.3  # for what is sent to arrive, where it does

pytestmark = pytest.mark.slow


class Receiver:
    """A session with side links, whose connections pass a proxy each, and one that sends to it over each of them."""

    def __init__(self, relay: Relay, *, refused: int = 0, side_port: int = 0) -> None:
        """``refused``: side links that the relay does not bear. ``side_port``: where they lead; 0: to the same one."""
        self.proxies = [TcpProxy(side_port or relay.port) for _ in range(SIDE_LINKS)]
        self.opened: list[zenoh.Session] = []
        self._left = iter(self.proxies[: SIDE_LINKS - refused]) if refused else itertools.cycle(self.proxies)
        main = zenoh.open(session_config("client", relay.port))
        self._side_links = SideLinks(main, self._open)
        self._session = ZenohSession(main, side_links=self._side_links)
        self._session.start(lambda _: None, lambda: None)
        self._sender = ZenohSession(zenoh.open(session_config("client", relay.port)))
        self._sender.start(lambda _: None, lambda: None)
        self._arrived: Counter[tuple[int, bytes]] = Counter()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._side_links.open(SIDE_LINKS)
        self.declared = [
            self._session.subscribe(KEYS.to_one("inlet", link=link), partial(self._note, link), link=link)
            for link in LINKS
        ]

    def _open(self) -> zenoh.Session:
        proxy = next(self._left, None)
        if proxy is None:
            raise zenoh.ZError("no more sessions")
        self.opened.append(zenoh.open(session_config("client", proxy.port)))
        return self.opened[-1]

    def _note(self, link: int, _: str, message: bytes) -> None:
        with self._lock:
            self._arrived[link, message] += 1

    def send_round(self) -> Counter[int]:
        """Send once for each link. Return how often that was arrived: as soon as all was, or after a while."""
        content = next(self._numbers).to_bytes(4, "big")
        for link in LINKS:
            self._sender.publish(KEYS.to_one("inlet", "outlet", link), content, urgent=False)
        until_s = time.monotonic() + ROUND_S
        while len(arrived := self._arrived_of(content)) < SIDE_LINKS and time.monotonic() < until_s:
            time.sleep(0.005)
        return arrived

    def counts(self) -> list[int]:
        """Return how often each of what was sent last was arrived."""
        return list(self._arrived_of((next(self._numbers) - 1).to_bytes(4, "big")).values())

    def _arrived_of(self, content: bytes) -> Counter[int]:
        with self._lock:
            return Counter({link: count for (link, what), count in self._arrived.items() if what == content})

    def say(self, key: str, message: bytes, *, apart: bool) -> None:
        self._session.publish(key, message, urgent=False, apart=apart)

    def listen(self, key: str, received: Callable[[str, bytes], None]) -> Declaration:
        """Have the session that sends receive as well."""
        return self._sender.subscribe(key, received)

    def close(self) -> None:
        self._session.close()
        self._sender.close()
        for proxy in self.proxies:
            proxy.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


@pytest.fixture
def receiver(relay: Relay) -> Iterator[Receiver]:
    receiver = Receiver(relay)
    yield receiver
    receiver.close()


def is_in_use(receiver: Receiver, link: int) -> bool:
    """Return whether this side link brings what is sent for it, and nothing else does."""
    proxy = receiver.proxies[link - 1]
    proxy.hold()
    arrived = set(receiver.send_round())
    proxy.let_pass()  # also what opens a link
    return arrived == set(LINKS) - {link}


def find_in_use(receiver: Receiver) -> None:
    """Wait until all side links are in use."""
    for link in LINKS:
        until(lambda link=link: is_in_use(receiver, link))  # type: ignore[misc]


def test_each_side_link_brings_what_is_sent_for_it_once(receiver: Receiver) -> None:
    find_in_use(receiver)
    until(lambda: receiver.send_round() == Counter(LINKS))
    time.sleep(ROUND_S)  # for a second one to come
    assert set(receiver.counts()) == {1}


def test_the_session_receives_for_a_side_link_that_is_broken_until_it_stands_again(receiver: Receiver) -> None:
    find_in_use(receiver)
    proxy = receiver.proxies[1]
    proxy.break_links(refuse=True)
    until(lambda: not is_in_use(receiver, 2))
    until(lambda: receiver.send_round() == Counter(LINKS))
    proxy.accept()
    until(lambda: is_in_use(receiver, 2))


def test_all_comes_where_a_relay_bears_fewer_sessions(relay: Relay) -> None:
    receiver = Receiver(relay, refused=2)
    try:
        until(lambda: is_in_use(receiver, 1))
        until(lambda: receiver.send_round() == Counter(LINKS))
    finally:
        receiver.close()


def test_a_side_link_that_a_relay_ends_again_and_again_is_given_up(receiver: Receiver) -> None:
    find_in_use(receiver)
    proxy = receiver.proxies[0]
    for breaks in range(1, MAX_BREAKS + 1):
        proxy.break_links(refuse=True)
        until(lambda: not is_in_use(receiver, 1))
        proxy.accept()
        if breaks < MAX_BREAKS:
            until(lambda: is_in_use(receiver, 1))
    until(lambda: receiver.send_round() == Counter(LINKS))
    assert not any(is_in_use(receiver, 1) for _ in range(5)), "it does not come back"
    until(lambda: is_in_use(receiver, 2))


def test_a_relay_that_is_restarted_is_no_end_of_side_links(relay: Relay, receiver: Receiver) -> None:
    find_in_use(receiver)
    for _ in range(MAX_BREAKS):
        relay.kill()
        relay.start()
        find_in_use(receiver)


def test_nothing_comes_after_a_subscription_was_taken_back(receiver: Receiver) -> None:
    find_in_use(receiver)
    for one in receiver.declared:
        one.undeclare()
    until(lambda: not receiver.send_round())


def test_a_side_link_to_another_relay_is_not_used(relay: Relay) -> None:
    with Relay() as other:
        receiver = Receiver(relay, side_port=other.port)
        try:
            until(lambda: receiver.opened and receiver.opened[0].is_closed())
            until(lambda: receiver.send_round() == Counter(LINKS))
        finally:
            receiver.close()


def test_a_side_link_that_is_being_opened_is_closed_with_the_others(relay: Relay) -> None:
    main = zenoh.open(session_config("client", relay.port))
    opened: list[zenoh.Session] = []
    is_opening, may_open = threading.Event(), threading.Event()

    def open_session() -> zenoh.Session:
        is_opening.set()
        assert may_open.wait(PATIENT_S)
        opened.append(zenoh.open(session_config("client", relay.port)))
        return opened[-1]

    side_links = SideLinks(main, open_session)
    side_links.open(SIDE_LINKS)
    assert is_opening.wait(PATIENT_S)
    closing = threading.Thread(target=side_links.close)
    closing.start()
    may_open.set()
    closing.join(PATIENT_S)
    assert [one.is_closed() for one in opened] == [True]
    main.close()


def test_large_messages_leave_over_the_first_side_link_and_small_ones_do_not(receiver: Receiver) -> None:
    find_in_use(receiver)
    arrived: Counter[bytes] = Counter()
    subscription = receiver.listen(KEY, lambda _, message: arrived.update([message]))
    numbers = (number.to_bytes(4, "big") for number in itertools.count())

    def arrives(*, apart: bool) -> bool:
        content = next(numbers)
        receiver.say(KEY, content, apart=apart)
        with contextlib.suppress(AssertionError):
            until(lambda: arrived[content], ROUND_S)
        return bool(arrived[content])

    until(lambda: arrives(apart=True) and arrives(apart=False))
    receiver.proxies[0].hold()
    until(lambda: not arrives(apart=True))
    until(lambda: arrives(apart=False))
    receiver.proxies[0].let_pass()
    subscription.undeclare()
