"""What a relay knows of its sessions: counts and bytes by node, limits, metrics, pages, settings."""

from __future__ import annotations

import os
import select
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from patience import until
from prometheus_client.parser import text_string_to_metric_families

from gradbus.commands.relay import metrics
from gradbus.commands.relay.probes import Answers, serving
from gradbus.commands.relay.sessions import MAX_NODES, OTHER_NODES, NodeTotals, Sessions
from gradbus.commands.relay.settings import RelayFile
from gradbus.runtime.config.settings import check_settings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.tcp_connections import CarriedBytes, canonical, find_connections


class Counted:
    """A connection that has carried a given number of bytes."""

    def __init__(self, received_bytes: int, sent_bytes: int) -> None:
        self.now = CarriedBytes(received_bytes, sent_bytes)
        self.ended: list[str] = []

    def traffic(self) -> CarriedBytes:
        return self.now

    def closed_by_peer(self, patience_s: float) -> bool:
        return False

    @property
    def round_trip_s(self) -> float:
        return 0.0

    def hang_up(self) -> None:
        self.ended.append("hung up")

    def close(self) -> None:
        self.ended.append("closed")


def finds(connections: dict[str, Counted]) -> Any:
    def find(addresses: Iterable[str]) -> dict[str, Counted]:
        return {address: connections[address] for address in addresses if address in connections}

    return find


def test_bytes_of_a_node_are_those_of_its_open_and_its_closed_sessions() -> None:
    sessions = Sessions()
    sessions.open("a1", "10.0.0.1:1", "site-1", 0.0)
    sessions.open("a2", "10.0.0.1:2", "site-1", 1.0)
    sessions.open("b1", "10.0.0.2:1", "site-2", 1.0)
    connections = {"10.0.0.1:1": Counted(10, 100), "10.0.0.1:2": Counted(5, 50), "10.0.0.2:1": Counted(1, 2)}
    found = sessions.connect(finds(connections))
    assert [session.peer for session in found] == ["a1", "a2", "b1"]
    closed = sessions.close("10.0.0.1:1")
    assert closed is not None
    assert (closed.peer, closed.traffic) == ("a1", (10, 100))
    connections["10.0.0.1:2"].now = CarriedBytes(6, 60)
    assert sessions.by_node() == {
        "site-1": (1, NodeTotals(opened=2, closed=1, received_bytes=16, sent_bytes=160)),
        "site-2": (1, NodeTotals(opened=1, received_bytes=1, sent_bytes=2)),
    }
    assert sessions.by_node() == sessions.by_node(), "to look must not count"


def test_a_session_without_a_connection_is_looked_for_again_and_one_that_is_found_is_not() -> None:
    sessions = Sessions()
    sessions.open("a", "10.0.0.1:1", "", 0.0)
    assert [one.connection for one in sessions.connect(finds({}))] == [None]
    assert len(sessions.connect(finds({"10.0.0.1:1": Counted(0, 0)}))) == 1
    assert sessions.connect(finds({})) == []


def test_a_session_that_is_closed_twice_counts_once() -> None:
    sessions = Sessions()
    sessions.open("a", "10.0.0.1:1", "n", 0.0)
    assert sessions.close("10.0.0.1:1") is not None
    assert sessions.close("10.0.0.1:1") is None
    assert sessions.by_node() == {"n": (0, NodeTotals(opened=1, closed=1))}


def test_a_node_with_too_many_sessions_is_over_its_limit_and_others_are_not() -> None:
    sessions = Sessions(max_per_node=1)
    first = sessions.open("a", "10.0.0.1:1", "site-1", 0.0)
    assert not sessions.is_over_limit(first)
    assert not sessions.is_over_limit(sessions.open("b", "10.0.0.2:1", "site-2", 0.0))
    assert sessions.is_over_limit(sessions.open("c", "10.0.0.1:2", "site-1", 0.0))
    assert sessions.by_node()["site-1"] == (2, NodeTotals(opened=2, refused=1))
    sessions.close("10.0.0.1:2")
    assert not sessions.is_over_limit(first)


def test_sessions_within_the_limit_of_a_node_stay_although_others_open_at_the_same_time() -> None:
    sessions = Sessions(max_per_node=4)
    opened = [sessions.open(f"p{number}", f"10.0.0.1:{number}", "site-1", 0.0) for number in range(6)]
    assert [sessions.is_over_limit(session) for session in opened] == [False] * 4 + [True] * 2
    sessions.close("10.0.0.1:0")
    again = sessions.open("p6", "10.0.0.1:6", "site-1", 0.0)
    assert not sessions.is_over_limit(again), "those that were refused do not count, though they have not ended yet"
    assert sessions.by_node()["site-1"] == (6, NodeTotals(opened=7, closed=1, refused=2))


class SlowToRead(dict[str, NodeTotals]):
    """Totals after which another thread has time for what it wants to do."""

    def __init__(self, do: Any) -> None:
        super().__init__()
        self._thread = threading.Thread(target=do)

    def items(self) -> Any:
        yield from list(super().items())
        self._thread.start()
        self._thread.join(0.3)  # it ends in this time, unless it has to wait until all is read

    def join(self) -> None:
        self._thread.join()


def test_counters_do_not_fall_when_a_session_closes_while_they_are_read() -> None:
    totals = SlowToRead(lambda: sessions.close("10.0.0.1:1"))
    sessions = Sessions(_totals=totals)
    sessions.open("a", "10.0.0.1:1", "site-1", 0.0)
    sessions.connect(finds({"10.0.0.1:1": Counted(10, 100)}))
    assert sessions.by_node() == {"site-1": (1, NodeTotals(opened=1, received_bytes=10, sent_bytes=100))}
    totals.join()
    assert sessions.count == 0


def test_nodes_beyond_a_bound_are_counted_together() -> None:
    sessions = Sessions()
    for number in range(MAX_NODES + 3):
        sessions.open("p", f"10.0.0.1:{number}", f"node-{number}", 0.0)
    found = sessions.by_node()
    assert len(found) == MAX_NODES + 1
    assert found[OTHER_NODES] == (3, NodeTotals(opened=3))
    sessions.close(f"10.0.0.1:{MAX_NODES + 1}")
    assert sessions.by_node()[OTHER_NODES] == (2, NodeTotals(opened=3, closed=1))


def test_metrics_are_what_prometheus_reads_whatever_a_node_is_called() -> None:
    name = 'a "quoted"\\ one\nand {more}'
    text = metrics.render(
        {name: (2, NodeTotals(3, 1, 4, 10**15, 7)), "": (0, NodeTotals())}, max_sessions=9, is_ready=True
    )
    found = {
        (sample.name, sample.labels.get("node")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    shown = name.replace("\n", " ")
    assert found["gradbus_relay_ready", None] == 1
    assert found["gradbus_relay_sessions_max", None] == 9
    assert found["gradbus_relay_sessions", shown] == 2
    assert found["gradbus_relay_sessions_opened_total", shown] == 3
    assert found["gradbus_relay_sessions_closed_total", shown] == 1
    assert found["gradbus_relay_sessions_refused_total", shown] == 4
    assert found["gradbus_relay_received_bytes_total", shown] == 10**15
    assert found["gradbus_relay_sent_bytes_total", shown] == 7
    assert found["gradbus_relay_sessions", ""] == 0
    assert found["process_cpu_seconds_total", None] > 0
    assert found["process_resident_memory_bytes", None] > 1e6


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_pages_say_whether_the_relay_lives_and_is_ready() -> None:
    ready = [True]
    with serving("127.0.0.1", 0, Answers(lambda: ready[0], lambda: "counts 1\n")) as url:
        assert get(f"{url}/live") == (200, "live\n")
        assert get(f"{url}/ready") == (200, "ready\n")
        assert get(f"{url}/metrics?of=all") == (200, "counts 1\n")
        assert get(f"{url}/")[0] == 404
        ready[0] = False
        assert get(f"{url}/ready")[0] == 503
        assert get(f"{url}/live") == (200, "live\n"), "a supervisor must not kill what drains"


def test_pages_are_served_on_an_ipv6_address() -> None:
    with serving("::1", 0, Answers(lambda: True, str)) as url:
        assert url.startswith("http://[::1]:")
        assert get(f"{url}/live") == (200, "live\n")


def test_a_port_of_the_pages_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"http: cannot listen on 127.0.0.1:{port}: .*http.port"),
            serving("127.0.0.1", port, Answers(lambda: True, str)),
        ):
            pass


def test_the_kernel_counts_the_bytes_of_a_connection_and_ends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, (host, port) = server.accept()
    with client, accepted:
        found = find_connections([f"{host}:{port}", "127.0.0.1:1"])
        connection = found.pop(f"{host}:{port}")
        assert found == {}
        client.sendall(b"x" * 1_000)
        assert len(accepted.recv(1_000, socket.MSG_WAITALL)) == 1_000
        accepted.sendall(b"y" * 300)
        assert len(client.recv(300, socket.MSG_WAITALL)) == 300
        until(lambda: connection.traffic().sent_bytes == 300)  # the acknowledgement is on its way
        connection.hang_up()
        assert client.recv(1) == b""
        connection.close()
        assert connection.traffic() == (1_000, 300), "what was read last stays"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("10.0.0.1:7", "10.0.0.1:7"),
        ("[::ffff:10.0.0.1]:7", "10.0.0.1:7"),
        ("[2001:DB8::1]:7", "[2001:db8::1]:7"),
        ("[fe80::1%eth0]:7", "[fe80::1]:7"),
        ("no address", "no address"),
    ],
)
def test_an_address_has_one_form(written: str, read: str) -> None:
    assert canonical(written) == read


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"access": {"jobs": {"site-1": ["a"]}}}, "access.jobs names 'site-1'.*relay.tls_clients=true"),
        ({"limits": {"sessions_per_node": 2}}, "limits.sessions_per_node counts.*relay.tls_clients=true"),
        (
            {"limits": {"message_bytes": 8 << 20}},
            "limits.message_bytes.*8454144",
        ),  # the largest frame has a header, too
        ({"limits": {"sesions": 2}}, "unknown key 'limits.sesions', did you mean 'sessions'"),
        ({"relay": {"drain_s": -1}}, "relay.drain_s"),
        ({"bus": {}}, "unknown key 'bus'"),
    ],
)
def test_settings_of_a_relay_that_cannot_hold_are_errors_that_say_what_to_do(values: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_settings(RelayFile, values, where="relay.toml")


def test_every_client_may_be_named_without_certificates() -> None:
    file = check_settings(RelayFile, {"access": {"jobs": {"*": ["a", "b"]}}}, where="relay.toml")
    assert file.access.jobs == {"*": ("a", "b")}


def test_defaults_ask_for_no_file() -> None:
    file = check_settings(RelayFile, {}, where="settings")
    assert file.relay.listen == ("tls/0.0.0.0:443",)
    assert file.http.port is None


def closes_by_fin(client: socket.socket, accepted: socket.socket) -> None:
    client.close()
    assert accepted.recv(1) == b""


def closes_by_rst(client: socket.socket, accepted: socket.socket) -> None:
    accepted.sendall(b"not read")
    assert select.select([client], [], [], 30.0)[0]
    client.close()
    with pytest.raises(ConnectionResetError):
        accepted.recv(1)


def closes_here_first(client: socket.socket, accepted: socket.socket) -> None:
    accepted.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""


def stays(client: socket.socket, accepted: socket.socket) -> None:
    client.sendall(b"alive")
    assert accepted.recv(5, socket.MSG_WAITALL) == b"alive"


@pytest.mark.parametrize(
    ("ending", "is_by_peer"),
    [(closes_by_fin, True), (closes_by_rst, True), (closes_here_first, False), (stays, False)],
)
def test_the_kernel_knows_which_end_of_a_connection_has_closed_it_first(
    ending: Callable[[socket.socket, socket.socket], None], is_by_peer: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, (host, port) = server.accept()
    with client, accepted:
        connection = find_connections([f"{host}:{port}"])[f"{host}:{port}"]
        assert not connection.closed_by_peer(60.0)
        assert 0.0 < connection.round_trip_s < 5.0
        ending(client, accepted)
        accepted.close()  # as Zenoh does, before or after the relay looks
        assert connection.closed_by_peer(60.0) is is_by_peer
        connection.close()
        assert not connection.closed_by_peer(60.0)


def test_a_connection_that_was_closed_after_the_relay_stood_still_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, (host, port) = server.accept()
    with client, accepted:
        connection = find_connections([f"{host}:{port}"])[f"{host}:{port}"]
        client.close()
        assert accepted.recv(1) == b""
        assert connection.closed_by_peer(60.0)
        assert not connection.closed_by_peer(0.0), "as if the relay had sent nothing for so long before that"
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_connections_that_are_asked_for_are_duplicated(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """A duplicate keeps the port of another's listener in use, and closing one gives up locks (fcntl) on its file."""
    copied: list[int] = []
    copy = os.dup
    monkeypatch.setattr(os, "dup", lambda number: copied.append(number) or copy(number))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        clients = [socket.create_connection((host, port)) for _ in range(2)]
        accepted = [server.accept() for _ in clients]
        try:
            _, (_, theirs, *_) = accepted[0]
            address = f"[{host}]:{theirs}" if ":" in host else f"{host}:{theirs}"
            assert find_connections([address], ports={port + 1}) == {}
            assert copied == []
            (found,) = find_connections([address], ports={port}).values()
            found.close()
            assert copied == [accepted[0][0].fileno()]
        finally:
            for one in (*clients, *(own for own, _ in accepted)):
                one.close()


def test_a_look_for_connections_leaves_the_sockets_of_others_as_they_are() -> None:
    """Python makes a socket that it wraps non-blocking where a program has set a time for all new ones."""
    one, other = socket.socketpair()
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30.0)
    try:
        find_connections(["127.0.0.1:1"])
    finally:
        socket.setdefaulttimeout(before)
    with one, other:
        assert os.get_blocking(one.fileno())
        assert os.get_blocking(other.fileno())
