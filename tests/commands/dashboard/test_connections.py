"""Connections to the live pages: bounded by time and by peer, and the owner gets in, whoever else is connected."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from patience import PATIENT_S

from gradbus.commands.dashboard import connections, server
from gradbus.commands.dashboard.connections import IDLE_S, MAX_CONNECTIONS, MAX_FOREIGN, REQUEST_S, Connections
from gradbus.commands.dashboard.server import Dashboard, serving


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    with serving(tmp_path) as found:
        yield found


def connected(dashboard: Dashboard) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(dashboard.url).port or 0), timeout=PATIENT_S)


def ask(connection: socket.socket, path: str) -> None:
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def status_of(connection: socket.socket) -> int:
    """The status of an answer that is read to its end; 0: the connection was closed."""
    with connection.makefile("rb") as file:
        first = file.readline()
        if not first:
            return 0
        lines = iter(file.readline, b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length"))
        for _ in lines:
            pass
        assert len(file.read(length)) == length
    return int(first.split()[1])


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_open_connections_do_not_lock_the_owner_out(dashboard: Dashboard) -> None:
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connected(dashboard)) for _ in range(3 * MAX_CONNECTIONS)]
        for connection in waiting[::2]:
            with contextlib.suppress(OSError):  # it was closed already
                connection.sendall(b"GET / HTTP/1.1\r\nHost: local")  # never more
        own = stack.enter_context(connected(dashboard))
        ask(own, urlsplit(dashboard.url).path)
        assert status_of(own) == 200
        assert is_closed(waiting[0])


def test_a_request_that_comes_byte_by_byte_has_its_time_as_a_whole(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte would begin the timeout of a socket anew."""
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    with connected(dashboard) as slow:
        slow.sendall(b"GET / HT")
        assert is_closed(slow)


def test_a_connection_is_used_again_and_closed_when_it_is_idle(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = urlsplit(dashboard.url).path
    with connected(dashboard) as own:
        for _ in range(2):
            ask(own, path)
            assert status_of(own) == 200
        monkeypatch.setattr(connections, "IDLE_S", 0.2)
        ask(own, path + "body")
        assert status_of(own) == 200
        assert is_closed(own)


def test_connections_of_other_users_are_fewer_and_close_each_other(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(connected(dashboard))
        ask(own, urlsplit(dashboard.url).path)
        assert status_of(own) == 200
        monkeypatch.setattr(server, "is_own", lambda *ports: False)
        others = [stack.enter_context(connected(dashboard)) for _ in range(MAX_FOREIGN + 1)]
        assert is_closed(others[0])
        ask(others[-1], "/")
        assert status_of(others[-1]) == 404  # served, as it does not know the address
        ask(own, urlsplit(dashboard.url).path)
        assert status_of(own) == 200


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    pairs = [socket.socketpair() for _ in range(MAX_CONNECTIONS + 2)]
    yield [one for one, _ in pairs]
    for pair in pairs:
        for one in pair:
            one.close()


def is_shut(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_one_of_another_user_is_closed_before_one_of_the_owner(sockets: list[socket.socket]) -> None:
    known = Connections(Clock())
    *first, foreign, late, last = sockets
    for one in first[: MAX_CONNECTIONS - 1]:
        assert known.admit(one, is_own=True)
    assert known.admit(foreign, is_own=False)
    assert known.admit(late, is_own=True)
    assert [is_shut(foreign), is_shut(first[0])] == [True, False]
    assert not known.admit(last, is_own=False)  # it may not close one of the owner
    assert known.admit(last, is_own=True)
    assert is_shut(first[0])


def test_what_is_being_answered_is_not_closed(sockets: list[socket.socket]) -> None:
    clock = Clock()
    known = Connections(clock)
    for one in sockets[:MAX_CONNECTIONS]:
        known.admit(one, is_own=True)
        known.answering(one)
    assert not known.admit(sockets[-1], is_own=True)
    clock.now_s += REQUEST_S + IDLE_S
    known.close_late()
    assert not any(map(is_shut, sockets))
    known.waiting(sockets[5])
    assert known.admit(sockets[-1], is_own=True)
    assert [is_shut(one) for one in sockets[4:7]] == [False, True, False]
    known.forget(sockets[6])
    assert known.admit(sockets[-2], is_own=True)


def test_time_is_over_for_the_first_request_sooner_than_for_the_next(sockets: list[socket.socket]) -> None:
    clock = Clock()
    known = Connections(clock)
    silent, used = sockets[:2]
    for one in (silent, used):
        known.admit(one, is_own=True)
    known.answering(used)
    known.waiting(used)
    clock.now_s += REQUEST_S
    known.close_late()
    assert [is_shut(silent), is_shut(used)] == [True, False]
    clock.now_s += IDLE_S - REQUEST_S
    known.close_late()
    assert is_shut(used)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's table of sockets")
def test_whose_a_connection_is_stands_in_the_table_of_the_kernel(dashboard: Dashboard, tmp_path: Path) -> None:
    port = urlsplit(dashboard.url).port or 0
    with connected(dashboard) as own:
        peer = own.getsockname()[1]
        assert connections.is_own(peer, port)
        table = tmp_path / "tcp"
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
        number = next(i for i, line in enumerate(lines) if f":{peer:04X} 0100007F:{port:04X}" in line)
        fields = lines[number].split()
        fields[7] = str(os.geteuid() + 4321)
        table.write_text("\n".join([lines[0], " ".join(fields)]))
        assert not connections.is_own(peer, port, table)
        table.write_text(lines[0])
        assert not connections.is_own(peer, port, table)  # it is closed already
        assert connections.is_own(peer, port, tmp_path / "none")
