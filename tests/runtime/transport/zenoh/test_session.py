"""Sessions of Zenoh over real sockets on loopback, and why one does not come up."""

from __future__ import annotations

import datetime
import ipaddress
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zenoh
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from patience import PATIENT_S, until
from ports import free_port
from tls_scene import HOST, TlsFiles, http, router, server, silent

from gradbus.runtime.errors import BusError, ConfigError, NotReachable
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.security.tls_authority import Issued
from gradbus.runtime.transport.zenoh import link_probe, session
from gradbus.runtime.transport.zenoh.session import open_session, session_settings


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is silent here stays so: a second shows it as well as several."""
    monkeypatch.setattr(session, "OPEN_S", 1.0)
    monkeypatch.setattr("gradbus.runtime.network.tls_probe.HANDSHAKE_S", 1.0)


def relay(files: TlsFiles, **more: Any) -> LinkConfig:
    """The links of a relay on this machine with TLS."""
    return LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), **{**files.server(), **more})


def dialled(endpoint: str, **more: Any) -> None:
    """Open a session as a client, and close it."""
    open_session(LinkConfig(connect=(endpoint,), **more)).close()


def refused(endpoint: str, kind: type[Exception] = BusError, **more: Any) -> str:
    """The error of a session that does not come up, which is of this class and no other."""
    with pytest.raises(kind) as caught:
        dialled(endpoint, **more)
    assert type(caught.value) is kind, caught.value
    assert str(caught.value).startswith(f"no link to the others: {endpoint}: ")
    return str(caught.value)


def passes(one: zenoh.Session, other: zenoh.Session) -> bool:
    """Whether a sample of one session reaches the other."""
    got: list[str] = []
    with other.declare_subscriber("test/way", lambda sample: got.append(sample.payload.to_string())):

        def sent() -> bool:
            one.put("test/way", "here")
            return bool(got)

        until(sent)
    return got[0] == "here"


def test_clients_with_the_certificate_of_the_authority_pass_samples_through_a_relay(files: TlsFiles) -> None:
    links = relay(files)
    with router(links):
        one, other = (open_session(LinkConfig(connect=links.listen, ca=files.ca)) for _ in range(2))
        try:
            assert passes(one, other)
        finally:
            one.close()
            other.close()


def test_who_listens_takes_part_itself(files: TlsFiles) -> None:
    links = relay(files)
    with router(links) as controller:
        client = open_session(LinkConfig(connect=(links.listen[0].replace(HOST, "localhost"),), ca=files.ca))
        try:
            assert passes(client, controller)
            assert passes(controller, client)
        finally:
            client.close()


def test_the_first_endpoint_that_answers_is_used(files: TlsFiles) -> None:
    links = relay(files)
    closed = f"tls/{HOST}:{free_port()}"
    with router(links):
        open_session(LinkConfig(connect=(closed, *links.listen), ca=files.ca)).close()


def test_a_closed_port_may_open_later() -> None:
    port = free_port()
    text = refused(f"tcp/{HOST}:{port}", NotReachable)
    assert f"nothing listens on port {port} there (connection refused). Start what listens there" in text


def test_a_name_without_an_address_may_get_one_later() -> None:
    text = refused("tls/no-such-relay.invalid:443", NotReachable)
    assert "the name no-such-relay.invalid has no address here" in text
    assert "getent hosts no-such-relay.invalid" in text


def test_a_name_whose_first_address_alone_is_dead_is_told_with_the_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Zenoh dials the first alone with TLS, and all with TCP."""
    name, ask = "two-addresses.example.org", socket.getaddrinfo
    found = [(socket.AF_INET, 0, 0, "", (address, 0)) for address in ("127.0.0.2", HOST)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more: found if host == name else ask(host, *more))
    with socket.create_server((HOST, 0)) as listening:
        port = listening.getsockname()[1]
        links = LinkConfig(connect=(f"tls/{name}:{port}",))
        fault = link_probe.find_fault(links.dials[0], links)
        assert "leads to 127.0.0.2 first (connection refused)" in fault.what
        assert f"{HOST} does answer" in fault.what
        assert f"'{HOST} {name}' in /etc/hosts" in fault.cure


def test_a_proxy_of_the_environment_is_named_where_a_relay_elsewhere_does_not_answer(monkeypatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")

    def no_answer(*where: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", no_answer)
    links = LinkConfig(connect=("tls/192.0.2.1:443",))
    fault = link_probe.find_fault(links.dials[0], links)
    assert "TCP port 443 must be open from here to 192.0.2.1" in fault.cure
    assert fault.cure.endswith("HTTPS_PROXY is set here: links do not go through a proxy")
    assert fault.may_pass


def test_another_authority_is_named(files: TlsFiles) -> None:
    links = relay(files)
    with router(links):
        text = refused(links.listen[0], ca=files.strange_ca)
        assert f"signed by another authority than that of bus.tls_ca ({files.strange_ca}), by CN=gradbus ours" in text
        text = refused(links.listen[0])
        assert "signed by another authority than one of those that browsers trust" in text
        assert "Copy ca.pem of the relay here, and set bus.tls_ca to it" in text


def test_a_certificate_for_another_host_is_reported_with_its_names(files: TlsFiles) -> None:
    links = relay(files, **files.server("relay.example.org", "10.0.0.7"))
    with router(links):
        text = refused(links.listen[0], ca=files.ca)
    assert f"its certificate is not for {HOST}, but for relay.example.org, 10.0.0.7" in text
    assert f"'gradbus keys tls {HOST}'" in text


def test_an_expired_certificate_is_reported_with_both_dates(files: TlsFiles) -> None:
    expired = files.server(HOST, days=-3)
    with server(silent, expired) as port:
        text = refused(f"tls/{HOST}:{port}", ca=files.ca)
    assert re.search(r"the certificate ended on \d{4}-\d\d-\d\d \d\d:\d\d UTC, and it is \d{4}-\d\d-\d\d", text)
    assert "set the clock of this machine right" in text
    with pytest.raises(ConfigError, match=r"bus.tls_certificate .*the certificate ended on"):
        open_session(relay(files, **expired))


def test_http_in_place_of_tls_is_told_from_a_relay(files: TlsFiles) -> None:
    for way in ("tls", "tcp"):
        with server(http) as port:
            text = refused(f"{way}/{HOST}:{port}", ca=files.ca)
        assert "it answers with HTTP: a web server, or a proxy on the way" in text
    with server(http, files.server()) as port:  # behind TLS that is well
        assert "it answers with HTTP" in refused(f"tls/{HOST}:{port}", ca=files.ca)


def test_an_endpoint_without_tls_where_the_relay_has_it(files: TlsFiles) -> None:
    links = relay(files)
    with router(links):
        text = refused(links.listen[0].replace("tls/", "tcp/"))
    assert "it expects TLS, and this endpoint has none. Write tls/ instead of tcp/" in text


@pytest.mark.usefixtures("short_waits")
def test_an_endpoint_with_tls_where_the_relay_has_none(files: TlsFiles) -> None:
    endpoint = f"tcp/{HOST}:{free_port()}"
    with router(LinkConfig(listen=(endpoint,))):
        text = refused(endpoint.replace("tcp/", "tls/"), ca=files.ca)
    assert "Zenoh is there without TLS. Have it listen on tls/ there" in text


@pytest.mark.usefixtures("short_waits")
def test_the_look_for_zenoh_without_tls_sends_one_message_and_opens_no_session(files: TlsFiles) -> None:
    sent = []

    def plain_zenoh(connection: socket.socket) -> None:
        data = connection.recv(4096)
        if data[:1] != b"\x16":  # a handshake of TLS, to which it does not answer
            connection.sendall(bytes([5, 0, 0x21, 9, 0xF0]) + b"id")
        while more := connection.recv(4096):
            data += more
        sent.append(data)

    with server(plain_zenoh) as port:
        text = refused(f"tls/{HOST}:{port}", ca=files.ca)
    assert "Zenoh is there without TLS" in text
    (asked,) = [data for data in sent if data[:1] != b"\x16"]
    assert (len(asked), asked[:5]) == (21, bytes([19, 0, 0x01, 9, 0xF2])), "no offer of shared memory, no extension"


@pytest.mark.slow
@pytest.mark.usefixtures("short_waits")
def test_a_port_that_never_answers_is_no_relay_or_one_that_is_too_busy_to_answer_in_time(files: TlsFiles) -> None:
    with server(silent) as port:
        text = refused(f"tls/{HOST}:{port}", NotReachable, ca=files.ca)
        assert "the port is open, and nothing there answers to TLS" in text
        text = refused(f"tcp/{HOST}:{port}", NotReachable)
        assert "the port is open, and no session of Zenoh comes of it" in text
    with server(silent, files.server()) as port:
        text = refused(f"tls/{HOST}:{port}", NotReachable, ca=files.ca)
        assert "the port is open, and no session of Zenoh comes of it" in text


def test_mutual_tls_accepts_only_clients_of_the_authority(files: TlsFiles) -> None:
    links = relay(files, ca=files.ca, requires_client_certificate=True)
    with router(links):
        endpoint = links.listen[0]
        dialled(endpoint, ca=files.ca, **files.client())
        text = refused(endpoint, ca=files.ca)
        assert "it accepts only clients with a certificate" in text
        assert "'gradbus keys tls --client NAME'" in text
        strange = files.write(files.stranger.client("site-1"), "strange")
        text = refused(endpoint, ca=files.ca, **strange)
        assert f"it refuses the certificate of this end, {strange['certificate']}" in text


def test_a_client_with_a_certificate_is_welcome_where_none_is_asked_for(files: TlsFiles) -> None:
    links = relay(files)
    with router(links):
        dialled(links.listen[0], ca=files.ca, **files.client())


def test_the_certificate_of_an_authority_is_refused_at_both_ends(files: TlsFiles) -> None:
    own = {"certificate": files.ca, "key": files.ca.with_suffix(".key")}
    with pytest.raises(ConfigError, match="is the certificate of an authority, which those that dial refuse"):
        open_session(relay(files, **own))
    with server(silent, self_signed(files.folder)) as port:  # as another server would do it
        text = refused(f"tls/{HOST}:{port}", ca=files.folder / "self.pem")
    assert "its certificate is an authority's, which no link accepts" in text


def self_signed(folder: Path) -> dict[str, Path]:
    """A certificate as 'openssl req -x509' makes it: of this host, and an authority's."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
    builder = builder.add_extension(address, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    issued = Issued(builder.sign(key, hashes.SHA256()), key)
    issued.write(folder / "self.pem", folder / "self.key")
    return {"certificate": folder / "self.pem", "key": folder / "self.key"}


def test_a_port_that_is_taken_is_an_error_that_says_so(files: TlsFiles) -> None:
    links = relay(files)
    with router(links), pytest.raises(BusError, match=r"port \d+ is taken already") as caught:
        open_session(links)
    assert "ss -ltnp" in str(caught.value)


def test_an_address_of_another_machine_cannot_be_listened_on(files: TlsFiles) -> None:
    links = LinkConfig(listen=("tls/192.0.2.1:7447",), **files.server())
    with pytest.raises(BusError, match=r"this machine has no address 192.0.2.1"):
        open_session(links)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("missing", "cannot be read: No such file"),
        ("garbage", "expected certificates in PEM"),
        ("other key", "is not the key of bus.tls_certificate"),
        ("password", "is no key that can be used"),
        ("open key", "other users of this machine can read or replace it. Run: chmod 600"),
        ("folder", "expected a regular file"),
    ],
)
def test_files_that_cannot_be_used_are_named_before_anything_is_opened(
    files: TlsFiles, tmp_path: Path, change: str, text: str
) -> None:
    made = TlsFiles(tmp_path)
    given = made.server()
    if change == "missing":
        given["certificate"].unlink()
    elif change == "garbage":
        given["certificate"].write_text("no certificate")
    elif change == "other key":
        given["key"].write_bytes(files.server()["key"].read_bytes())
    elif change == "password":
        given["key"].write_bytes(_with_password(given["key"].read_bytes()))
    elif change == "open key":
        given["key"].chmod(0o644)
    else:
        given["certificate"] = tmp_path
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        open_session(relay(made, **given))
    assert str(caught.value).startswith("bus.tls_")


def _with_password(key: bytes) -> bytes:
    loaded = serialization.load_pem_private_key(key, None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    return loaded.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def test_a_client_whose_relay_comes_back_dials_again_by_itself(files: TlsFiles) -> None:
    links = relay(files)
    with router(links):
        client = open_session(LinkConfig(connect=links.listen, ca=files.ca))
        until(lambda: list(client.info.routers_zid()))
    try:
        until(lambda: not list(client.info.routers_zid()))
        with router(links) as again:
            until(lambda: list(client.info.routers_zid()))
            assert passes(client, again)
    finally:
        client.close()


@pytest.mark.slow
def test_a_silent_peer_is_lost_after_the_lease_that_it_has_set(files: TlsFiles) -> None:
    endpoint = f"tcp/{HOST}:{free_port()}"
    lease_s = 2.0
    program = f"""
import sys
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.session import open_session
session = open_session(LinkConfig(connect=({endpoint!r},), lease_s={lease_s}))
token = session.liveliness().declare_token("test/here")
print("ready", flush=True)
sys.stdin.read()
"""
    seen: list[tuple[bool, float]] = []

    def note(sample: zenoh.Sample) -> None:
        seen.append((sample.kind == zenoh.SampleKind.PUT, time.monotonic()))

    with router(LinkConfig(listen=(endpoint,))) as listening:
        watch = listening.liveliness().declare_subscriber("test/*", note, history=True)
        with subprocess.Popen(
            [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == b"ready\n"
                until(lambda: [alive for alive, _ in seen] == [True])
                child.send_signal(19)  # SIGSTOP: its link stands, and nothing comes
                stopped_s = time.monotonic()
                until(lambda: [alive for alive, _ in seen] == [True, False], PATIENT_S)
            finally:
                child.kill()
        watch.undeclare()
    assert 0.5 * lease_s < seen[-1][1] - stopped_s < lease_s + 5.0  # on a busy machine


def test_settings_switch_off_all_that_looks_for_others_or_drops_a_slow_link() -> None:
    settings = session_settings(LinkConfig(connect=("tls/relay:443",), lease_s=2.0), "client")
    assert settings["scouting/multicast/enabled"] is settings["scouting/gossip/enabled"] is False
    assert settings["transport/shared_memory/enabled"] is settings["adminspace/enabled"] is False
    assert settings["transport/link/tx/lease"] == 2_000
    assert settings["transport/link/tx/queue/congestion_control/block/wait_before_close"] == 10_000_000
    patient = session_settings(LinkConfig(connect=("tls/relay:443",), lease_s=60.0), "client")
    assert patient["transport/link/tx/queue/congestion_control/block/wait_before_close"] == 60_000_000
    assert settings["listen/endpoints"] == []  # by default a router listens on all addresses
    assert settings["transport/link/protocols"] == ["tls"]


def test_zenoh_writes_nothing_to_stderr(files: TlsFiles) -> None:
    program = f"""
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.session import open_session
try:
    open_session(LinkConfig(connect=("tcp/{HOST}:{free_port()}",)))
except Exception as error:
    print(type(error).__name__)
"""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (ended.stdout, ended.stderr) == ("NotReachable\n", "")
