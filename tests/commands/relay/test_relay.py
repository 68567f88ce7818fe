"""``gradbus relay`` in a process of its own: who is let in, what is logged and counted, how it ends."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import session_process
import stalled_client
from patience import soonest, until
from ports import kept_ports
from relay_scene import RelayProcess, certificate_of, linked, tls_arguments
from tls_scene import TlsFiles
from zenoh import CongestionControl

from gradbus.runtime.errors import BusError
from gradbus.runtime.network.disconnections import DISCONNECTED
from gradbus.runtime.transport.zenoh.keys import session_token, session_tokens
from gradbus.runtime.transport.zenoh.relay_settings import DROP_LARGE_AFTER_S

pytestmark = pytest.mark.slow

LIMIT_RSS_KIB = 60 << 10
HEAVY = ("torch", "libddsc", "numpy", "pydantic_core", "cryptography")


@pytest.fixture
def port() -> Iterator[int]:
    with kept_ports(1) as (port,):
        yield port


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(tmp_path_factory.mktemp("certificates"))


def plain(port: int, *arguments: str) -> RelayProcess:
    """A relay on loopback, without TLS."""
    endpoint = f"tcp/127.0.0.1:{port}"
    return RelayProcess("--listen", endpoint, "--http-port", "0", *arguments, listen=endpoint)


def with_names(port: int, files: TlsFiles, *arguments: str) -> RelayProcess:
    """A relay that asks for certificates."""
    endpoint = f"tls/localhost:{port}"
    tls = tls_arguments(files, clients=True)
    return RelayProcess("--listen", f"tls/127.0.0.1:{port}", "--http-port", "0", *tls, *arguments, listen=endpoint)


def received(session: Any, keys: str) -> queue.SimpleQueue[tuple[str, bytes]]:
    """Subscribe, and return what arrives: key and content."""
    arrived: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
    session.declare_subscriber(keys, lambda one: arrived.put((str(one.key_expr), one.payload.to_bytes())))
    return arrived


def put_until(session: Any, key: str, content: bytes, arrived: queue.SimpleQueue[tuple[str, bytes]]) -> bytes:
    """Send until it arrives: nothing says when a subscription has reached the relay. Returns what arrived first."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        session.put(key, content)
        try:
            return arrived.get(timeout=0.2)[1]
        except queue.Empty:
            continue
    raise AssertionError(f"nothing arrived for {key}")


@contextlib.contextmanager
def a_stalled_client(relay: RelayProcess) -> Iterator[str]:
    """A client that has subscribed and then takes nothing. Returns the id of its session."""
    spec = json.dumps({"connect": [relay.listen], "lease_s": 600.0})
    with subprocess.Popen([sys.executable, stalled_client.__file__, spec], stdout=subprocess.PIPE) as stalled:
        try:
            assert stalled.stdout is not None
            peer = stalled.stdout.readline().decode().strip()
            stalled.send_signal(signal.SIGSTOP)
            yield peer
        finally:
            stalled.kill()


def send_many(session: Any) -> None:
    """Send the stalled client more than kernel and relay hold."""
    for _ in range(stalled_client.MESSAGES):
        session.put(stalled_client.KEY, bytes(1 << 20), congestion_control=CongestionControl.BLOCK)


def test_a_relay_forwards_and_counts_and_logs_who_came_and_went(port: int) -> None:
    with plain(port) as relay:
        with linked(relay) as sender, linked(relay) as receiver:
            arrived = received(receiver, "gradbus/1/cells/**")
            assert put_until(sender, "gradbus/1/cells/model/all/0", b"x" * 100_000, arrived) == b"x" * 100_000
            opened = [relay.wait_for("session opened", count=count) for count in (1, 2)]
            assert {line["peer"] for line in opened} == {str(sender.zid()), str(receiver.zid())}
            assert all(line["address"].startswith("127.0.0.1:") and line["node"] == "" for line in opened)
            until(lambda: relay.counts()["sent_bytes_total "] > 100_000)
            counts = relay.counts()
            assert (counts["ready"], counts["sessions "], counts["sessions_opened_total "]) == (1, 2, 2)
            peer = str(sender.zid())
        closed = relay.wait_for("session closed", peer=peer)
        assert closed["received_bytes"] > 100_000 > closed["sent_bytes"] > 0
        assert 0 < closed["seconds"] < 60
        relay.wait_for("session closed", count=2)
        until(lambda: relay.counts()["sessions "] == 0)
        assert relay.counts()["sessions_closed_total "] == 2
        assert relay.counts()["received_bytes_total "] >= closed["received_bytes"]


def test_a_session_that_says_what_it_takes_part_in_is_logged_with_its_job_and_its_sender(port: int) -> None:
    sender = bytes(range(12))
    with plain(port) as relay, linked(relay) as session:
        token = session.liveliness().declare_token(session_token("my cells", str(session.zid()), sender))
        joined = relay.wait_for("session joined", peer=str(session.zid()))
        assert (joined["job"], joined["senders"]) == ("my cells", [sender.hex()])
        token.undeclare()


def test_what_is_published_under_the_token_of_a_session_is_the_word_of_the_relay_alone(port: int) -> None:
    token = session_token("cells", "c1", bytes(range(12)))
    with plain(port) as relay, linked(relay) as hostile, linked(relay) as other:
        arrived, reports = received(other, "gradbus/1/cells/**"), received(other, session_tokens("cells"))
        put_until(hostile, "gradbus/1/cells/a/all/0", b"before", arrived)
        hostile.put(token, DISCONNECTED)
        while put_until(hostile, "gradbus/1/cells/a/all/0", b"behind", arrived) != b"behind":
            pass
        assert reports.qsize() == 0


def test_a_relay_tells_the_members_of_a_job_when_the_process_of_one_was_killed(port: int) -> None:
    """It waits for a while whether the session comes back, and says nothing of one that has closed by itself."""
    spec = {"job": "cells", "lease_s": 600.0}
    with plain(port) as relay, linked(relay, lease_s=600.0) as other:
        reports = received(other, session_tokens("cells"))
        for _ in range(3):
            with session_process.started({**spec, "connect": [relay.listen]}) as process:
                relay.wait_for("session joined", peer=process.session)
                process.kill()
                assert reports.get(timeout=60) == (process.token, DISCONNECTED)
        assert reports.qsize() == 0


def test_a_client_takes_part_only_in_the_jobs_of_its_certificate(port: int, files: TlsFiles, tmp_path: Path) -> None:
    config = tmp_path / "relay.json"
    jobs = {"site-1": ["cells", "faces"], "site-2": ["cells"]}
    config.write_text(json.dumps({"access": {"jobs": jobs}, "limits": {"message_bytes": 9_000_000}}))
    with with_names(port, files, str(config)) as relay:
        with (
            linked(relay, **certificate_of(files, "site-1")) as first,
            linked(relay, **certificate_of(files, "site-2")) as second,
        ):
            own = received(second, "gradbus/1/cells/**")
            others = [received(second, keys) for keys in ("gradbus/1/faces/**", "gradbus/**", "other/**")]
            assert put_until(first, "gradbus/1/cells/a/all/0", b"of cells", own) == b"of cells"
            first.put("gradbus/1/faces/a/all/0", b"of faces")
            first.put("other/key", b"of nobody")
            first.put("gradbus/1/cells/a/all/0", b"x" * 9_100_000)  # above limits.message_bytes
            seen = set()
            while (content := put_until(first, "gradbus/1/cells/a/all/0", b"last", own)) != b"last":
                seen.add(content)
            assert seen <= {b"of cells"}, "which was sent until it arrived"
            contents = {one.get()[1] for one in others for _ in range(one.qsize())}
            assert contents <= {b"of cells", b"last"}, "the second job is not for this client, and no other key is"
            router_state = [str(reply.ok.key_expr) for reply in first.get("@/*/router/**", timeout=1.0) if reply.ok]
            assert router_state == [], "the relay's own state is for nobody"
            assert relay.wait_for("session opened", peer=str(second.zid()))["node"] == "site-2"
        assert relay.counts()["sessions_opened_total site-1"] == 1


def test_a_node_with_too_many_sessions_loses_the_newest_and_others_stay(port: int, files: TlsFiles) -> None:
    with (
        with_names(port, files, "--set", "limits.sessions_per_node=1") as relay,
        linked(relay, **certificate_of(files, "site-1")) as kept,
        linked(relay, **certificate_of(files, "site-2")),
    ):
        relay.wait_for("session opened", count=2)
        until(lambda: relay.counts()["received_bytes_total site-1"] > 0)  # its connection is found
        with linked(relay, **certificate_of(files, "site-1")) as refused:
            line = relay.wait_for("session refused")
            assert (line["node"], line["peer"]) == ("site-1", str(refused.zid()))
            relay.wait_for("session closed", peer=str(refused.zid()))
        assert relay.counts()["sessions_refused_total site-1"] >= 1
        assert [
            line for line in relay.lines if line["event"] == "session closed" and line["peer"] == str(kept.zid())
        ] == []


def test_a_relay_that_is_full_says_so_and_refuses_the_next_one(port: int) -> None:
    with plain(port, "--set", "limits.sessions=1") as relay, linked(relay):
        assert relay.wait_for("relay is full")["sessions"] == 1
        with pytest.raises(BusError), linked(relay):
            pass
        assert relay.counts()["sessions_opened_total "] == 1


def test_a_client_that_takes_nothing_does_not_hold_up_who_sends_to_it_and_to_others(port: int) -> None:
    with plain(port) as relay, linked(relay, lease_s=600.0) as sender, linked(relay, lease_s=600.0) as other:
        arrived = received(other, "gradbus/1/cells/other/**")
        put_until(sender, "gradbus/1/cells/other/all/0", b"before", arrived)
        with a_stalled_client(relay) as peer:
            send_many(sender)
            sender.put("gradbus/1/cells/other/all/0", b"behind", congestion_control=CongestionControl.BLOCK)
            while arrived.get(timeout=60)[1] != b"behind":
                pass
            assert not [line for line in relay.lines if line["event"] == "session closed"]
        relay.wait_for("session closed", peer=peer)


def longest_ping_s(port: int) -> float:
    """Return how long messages of one job take at most, in seconds, while two senders of another fill the queue of a
    client that takes nothing."""
    long: dict[str, Any] = {"lease_s": 600.0}
    with (
        plain(port) as relay,
        linked(relay, **long) as one,
        linked(relay, **long) as two,
        linked(relay, **long) as pinger,
        linked(relay, **long) as other,
        a_stalled_client(relay),
    ):
        arrived = received(other, "gradbus/1/faces/**")
        put_until(pinger, "gradbus/1/faces/all/0", b"before", arrived)
        senders = [threading.Thread(target=send_many, args=(session,)) for session in (one, two)]
        for sender in senders:
            sender.start()
        took_s = []
        for number in range(40):  # at least as long as the relay waits with a large message
            began_s = time.monotonic()
            pinger.put("gradbus/1/faces/all/0", b"%d" % number)
            while arrived.get(timeout=60)[1] != b"%d" % number:
                pass
            took_s.append(time.monotonic() - began_s)
            senders[0].join(DROP_LARGE_AFTER_S / 40)
        for sender in senders:
            sender.join()
        return max(took_s)


def test_two_senders_to_a_client_that_takes_nothing_do_not_hold_up_another_job(port: int) -> None:
    limit_s = DROP_LARGE_AFTER_S / 2
    assert soonest(lambda: longest_ping_s(port), limit_s) < limit_s


def test_connections_that_say_nothing_keep_no_client_out(port: int) -> None:
    with plain(port) as relay, contextlib.ExitStack() as held:
        relay.ready()
        for _ in range(120):  # more than the 100 that Zenoh lets open at a time by itself
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        with linked(relay):
            relay.wait_for("session opened")


def test_connections_without_a_handshake_of_tls_keep_no_client_out(port: int, files: TlsFiles) -> None:
    with with_names(port, files) as relay, contextlib.ExitStack() as held:
        relay.ready()
        for _ in range(120):
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        with linked(relay, **certificate_of(files, "site-1")):
            relay.wait_for("session opened")


def test_a_relay_warns_at_its_start_that_its_certificate_ends_soon(port: int, files: TlsFiles) -> None:
    endpoint, own = f"tls/127.0.0.1:{port}", files.server("localhost", days=5)
    arguments = ["--tls-certificate", str(own["certificate"]), "--tls-key", str(own["key"]), "--tls-ca", str(files.ca)]
    with RelayProcess("--listen", endpoint, *arguments) as relay:
        relay.ready()
        warnings = [line for line in relay.lines if line["event"] == "certificate ends soon"]
    assert [(line["level"], line["setting"], line["file"]) for line in warnings] == [
        ("warning", "relay.tls_certificate", str(own["certificate"]))
    ]
    assert warnings[0]["days"] == 4
    assert "restart the relay" in warnings[0]["advice"]


def test_a_client_without_a_certificate_is_not_let_in(port: int, files: TlsFiles) -> None:
    with with_names(port, files) as relay:
        relay.ready()
        with pytest.raises(BusError, match="certificate"), linked(relay, ca=files.ca):
            pass
        assert [line["event"] for line in relay.lines] == ["relay listens"]


def test_sigterm_drains_until_the_last_session_has_gone_and_the_code_is_0(port: int) -> None:
    with plain(port, "--set", "relay.drain_s=60") as relay:
        with linked(relay) as sender, linked(relay) as receiver:
            arrived = received(receiver, "gradbus/1/cells/**")
            put_until(sender, "gradbus/1/cells/a/all/0", b"before", arrived)
            assert relay.get("/ready")[0] == 200
            relay.signal(signal.SIGTERM)
            assert relay.wait_for("relay drains")["sessions"] == 2
            assert (relay.get("/ready")[0], relay.get("/live")[0]) == (503, 200)
            sender.put("gradbus/1/cells/a/all/0", b"while it drains")
            while arrived.get(timeout=20)[1] != b"while it drains":
                pass
        assert relay.ended() == 0
        assert relay.wait_for("relay ends")["sessions"] == 0


def test_a_relay_that_drains_ends_after_its_time_and_at_a_second_sigterm_at_once(port: int) -> None:
    with plain(port, "--set", "relay.drain_s=0.2") as relay, linked(relay):
        relay.wait_for("session opened")
        relay.signal(signal.SIGTERM)
        assert relay.ended() == 0
        assert relay.wait_for("relay ends")["sessions"] == 1
        relay.wait_for("session closed")
    with plain(port, "--set", "relay.drain_s=60") as relay, linked(relay):
        relay.wait_for("session opened")
        relay.signal(signal.SIGTERM)
        relay.wait_for("relay drains")
        relay.signal(signal.SIGTERM)
        assert relay.ended() == 128 + signal.SIGTERM


def test_a_relay_that_is_killed_and_started_again_serves_the_same_links(port: int) -> None:
    with plain(port) as relay:
        relay.ready()
        with linked(relay) as sender, linked(relay) as receiver:
            arrived = received(receiver, "gradbus/1/cells/**")
            put_until(sender, "gradbus/1/cells/a/all/0", b"before", arrived)
            relay.signal(signal.SIGKILL)
            relay.ended()
            with plain(port) as again:  # on the port of connections that the kernel has not forgotten
                for session in sender, receiver:
                    again.wait_for("session opened", peer=str(session.zid()))
                while put_until(sender, "gradbus/1/cells/a/all/0", b"after", arrived) != b"after":
                    pass


def test_a_relay_has_loaded_nothing_heavy_and_is_small(port: int, files: TlsFiles) -> None:
    with with_names(port, files) as relay:
        relay.ready()
        assert relay.get("/ready")[0] == 200
        resident = relay.status("VmRSS")
        loaded = Path(f"/proc/{relay.pid}/maps").read_text()
    assert [name for name in HEAVY if name in loaded] == []
    assert "zenoh" in loaded, "the search would find a library"
    assert resident < LIMIT_RSS_KIB, f"{resident} KiB"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "tls/0.0.0.0:443 needs a certificate: set relay.tls_certificate and relay.tls_key"),
        (["--listen", "udp/127.0.0.1:7"], 2, "expected tls/ or tcp/"),
        (["--listen", "tcp/0.0.0.0:7"], 2, "relay.tls=false"),
        (["nowhere.toml"], 2, "nowhere.toml"),
    ],
)
def test_what_is_wrong_is_one_line_in_the_words_of_the_relay(arguments: list[str], code: int, text: str) -> None:
    with RelayProcess(*arguments) as relay:
        assert relay.ended() == code
    (line, _) = relay.other
    assert line.startswith("gradbus relay: ")
    assert text in line
    assert "bus." not in line


def test_a_port_that_is_taken_is_an_error_that_names_it(port: int) -> None:
    with plain(port) as relay:
        relay.ready()
        with plain(port) as second:
            assert second.ended() == 8
    assert f"listen (relay.listen): tcp/127.0.0.1:{port}: port {port} is taken" in second.other[0]
