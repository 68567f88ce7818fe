"""The network laboratory: what its links do to plain TCP and UDP, and commands on its hosts."""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from patience import until
from turns import have_the_machine

from gradbus.commands.lab import command, conditions, switch
from gradbus.commands.lab.command import environment_of, is_relay, report, split
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import (
    Carrier,
    Host,
    LinkTraffic,
    Network,
    NoNamespaces,
    enter_namespace,
    hosts_on_a_switch,
    let_dial_only,
)
from gradbus.commands.lab.switch import Switch
from gradbus.runtime.errors import ConfigError

netns = pytest.mark.netns


@contextmanager
def network_of(count: int, link: LinkConditions, by: Carrier | None = None) -> Iterator[Network]:
    try:
        with hosts_on_a_switch(count, link, by) as network:
            yield network
    except NoNamespaces as error:
        pytest.skip(str(error))


def made_on(host: Host, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket that is made in the network of a host; it stays there, whichever thread uses it."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def run() -> None:
        enter_namespace(host.name)
        try:
            made.append(make())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    made[0].settimeout(10.0)
    return made[0]


def socket_on(host: Host, kind: socket.SocketKind) -> socket.socket:
    """A socket in the network of a host, bound to its address."""

    def bound() -> socket.socket:
        one = socket.socket(socket.AF_INET, kind)
        one.bind((host.address, 0))
        return one

    return made_on(host, bound)


def took(receiver: socket.socket, size: int) -> int:
    """Receive so many bytes or some more. Returns how many."""
    amount = 0
    while amount < size:
        data = receiver.recv(1 << 17)
        assert data
        amount += len(data)
    return amount


def rate_mbit_s(first: Host, second: Host, size: int) -> float:
    """Of so many bytes over TCP, once the connection has found its window."""
    with socket_on(first, socket.SOCK_STREAM) as listener, socket_on(second, socket.SOCK_STREAM) as sender:
        listener.listen()
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()

        def send() -> None:
            with suppress(OSError):  # the receiver has enough
                while True:
                    sender.sendall(bytes(65536))

        thread = threading.Thread(target=send)
        thread.start()
        with receiver:
            took(receiver, size)
            began_s = time.monotonic()
            amount = took(receiver, size)
            taken_s = time.monotonic() - began_s
        thread.join()
    return 8e-6 * amount / taken_s


def round_trips_ms(first: Host, second: Host, count: int) -> list[float]:
    found = []
    with socket_on(first, socket.SOCK_DGRAM) as near, socket_on(second, socket.SOCK_DGRAM) as far:
        for _ in range(count):
            began_s = time.monotonic()
            near.sendto(b"x" * 100, far.getsockname())
            _, sender = far.recvfrom(2000)
            far.sendto(b"x" * 100, sender)
            near.recv(2000)
            found.append(1e3 * (time.monotonic() - began_s))
    return found


def arrived(first: Host, second: Host, count: int) -> list[int]:
    """Numbers of the datagrams that arrived, of so many."""
    found = []
    with socket_on(first, socket.SOCK_DGRAM) as near, socket_on(second, socket.SOCK_DGRAM) as far:
        near.sendto(b"first", far.getsockname())  # so that no datagram waits for ARP
        far.settimeout(0.3)
        for number in range(count):
            near.sendto(number.to_bytes(4, "big") * 10, far.getsockname())
            if number % 50 == 49:  # no more under way than a socket holds
                found += waiting(far, 0.004)
        return found + waiting(far, 0.1)


def waiting(far: socket.socket, idle_s: float) -> list[int]:
    """Numbers of the datagrams that come until none does for so long."""
    found = []
    far.settimeout(idle_s)
    with suppress(TimeoutError):
        while True:
            data = far.recv(2000)
            if len(data) == 40:
                found.append(int.from_bytes(data[:4], "big"))
    return found


@netns
@pytest.mark.parametrize("by", ["kernel", "switch"])
def test_tcp_has_the_rate_of_the_link(by: Carrier) -> None:
    with network_of(2, LinkConditions(rate_bit_s=50e6), by) as network:
        for attempt in range(6):  # where other work takes the processors a link is idle at times, and its receiver late
            found = rate_mbit_s(*network.hosts, size=1_000_000) * 1514 / 1448  # with the headers of each segment
            if 0.9 * 50 < found < 1.1 * 50:
                return
            assert attempt == 0 or found < 1.1 * 50
            have_the_machine()
    raise AssertionError(found)


@netns
def test_a_round_trip_takes_twice_the_delay() -> None:
    with network_of(3, LinkConditions(rate_bit_s=100e6, delay_s=0.02)) as network:
        found = round_trips_ms(network.hosts[0], network.hosts[2], 15)
    assert min(found) >= 40.0
    assert min(found) < 60.0  # the least of them: where other work takes the processors, most are longer


@netns
def test_the_share_of_packets_that_are_lost_is_as_asked_and_the_same_ones_with_the_same_seed() -> None:
    count, loss = 2000, 0.05
    link = LinkConditions(loss=loss, delay_s=0.001, seed=7)
    with network_of(2, link, "switch") as network:
        found = count - len(arrived(*network.hosts, count))
        assert network.switch is not None
        assert found == pytest.approx(network.switch.counts["lost"], abs=3)  # of ARP, and the first one
    assert abs(found - loss * count) < 4 * math.sqrt(count * loss * (1 - loss))


@netns
def test_packets_of_a_link_with_jitter_overtake_each_other_and_come_twice_where_asked() -> None:
    link = LinkConditions(delay_s=0.01, jitter_s=0.005, duplicate=0.1)
    with network_of(2, link, "switch") as network:
        found = arrived(*network.hosts, 500)
        assert network.switch is not None
        assert network.switch.counts["overtaken"] > 50
    assert 510 < len(found) < 600
    assert set(found) == set(range(500))
    assert found != sorted(found)


@netns
def test_what_does_not_fit_into_the_queue_is_lost() -> None:
    link = LinkConditions(rate_bit_s=1e5, delay_s=0.001, queue_bytes=4000)
    with network_of(2, link) as network:
        assert len(arrived(*network.hosts, 1000)) < 700


WHERE = (
    "import os, socket; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['GRADBUS_BUS__PEERS'], "
    "len({name for _, name in socket.if_nameindex()}), socket.gethostname() == os.uname().nodename)"
)


@netns
def test_a_command_runs_on_each_host_and_the_use_of_its_links_is_told(
    run_gradbus: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = run_gradbus("lab", "--hosts", "2", "--rate", "50mbit", "--", sys.executable, "-c", WHERE)
    if code == 2 and "namespaces" in err:
        pytest.skip(err)
    assert code == 0, err
    peers = '["10.231.77.1", "10.231.77.2"]'
    assert sorted(out.splitlines()) == [f"[host {rank}] {rank} 2 {peers} 2 True" for rank in (0, 1)]
    assert "2 hosts, 50 Mbit/s; carried by the kernel" in err
    sent = [line.split() for line in err.splitlines()[-2:]]
    assert [(words[0], *words[3:5]) for words in sent] == [("0", "0", "B"), ("1", "0", "B")]  # nor does the kernel talk


@netns
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_of_a_lab_is_left_whichever_way_it_ends(signum: signal.Signals) -> None:
    # A process of another session, as daemons are, beside one of the command's own.
    script = "setsid sleep 600 >/dev/null 2>&1 & echo $!; exec sleep 600"
    arguments = [sys.executable, "-P", "-m", "gradbus", "lab", "--delay", "1ms", "--", "sh", "-c", script]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as lab:
        assert lab.stdout is not None
        assert lab.stderr is not None
        lines = [lab.stdout.readline() for _ in range(2)]
        if not all(lines):
            pytest.skip(lab.stderr.read())
        left_behind = [line.split()[-1] for line in lines]
        names = [
            subprocess.run(["ip", "netns", "identify", pid], check=True, capture_output=True, text=True).stdout.strip()
            for pid in left_behind
        ]
        assert all(Path("/run/netns", name).exists() for name in names)
        lab.send_signal(signum)
        assert lab.wait(20.0) == (-signum if signum == signal.SIGKILL else 128 + signum)
    until(lambda: not any(Path("/proc", pid).exists() for pid in left_behind))
    until(lambda: not any(Path("/run/netns", name).exists() for name in names))


@netns
@pytest.mark.slow
def test_ranks_train_on_hosts_of_a_distant_network_and_what_they_computed_is_told(
    run_gradbus: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = {"data": "glyphs", "data_options": {"train": 1000, "test": 100}, "model": "gradbus.models:mnist_mlp"}
    config = {"bus": {"job": "lab"}, "task": task, "parallel": {"max_steps": 2}}
    (tmp_path / "lab.json").write_text(json.dumps(config), encoding="utf-8")
    worker = [sys.executable, "-P", "-m", "gradbus", "worker", "lab.json"]
    code, out, err = run_gradbus("lab", "--rate", "100mbit", "--delay", "5ms", "--", *worker)
    if code == 2 and "namespaces" in err:
        pytest.skip(err)
    assert code == 0, err + out
    assert "computing: " in err
    sent = [line.split() for line in err.splitlines() if line.startswith(("0 ", "1 "))]
    assert [words[4] for words in sent] == ["MB", "MB"]  # over the network, not through shared memory


@pytest.fixture
def run_gradbus() -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        found = subprocess.run(
            [sys.executable, "-P", "-m", "gradbus", *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        return found.returncode, found.stdout, found.stderr

    return run


def test_commands_with_a_plus_between_are_for_one_host_each() -> None:
    assert split(["a", "x", "+", "b"], None) == [["a", "x"], ["b"]]
    assert split(["a"], None) == [["a"], ["a"]]
    assert split(["a"], 3) == [["a"]] * 3
    for arguments, hosts, expected in (
        (["a", "+"], None, "missing"),
        (["a", "+", "b"], 3, "2 commands"),
        (["gradbus", "run", "-n", "2"], None, "all ranks on one machine"),
    ):
        with pytest.raises(ConfigError, match=expected):
            split(arguments, hosts)


def test_tools_of_the_system_are_found_where_users_do_not_look_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("tc", path="/usr/sbin:/sbin") is None:
        pytest.skip("there is no tc in /usr/sbin or /sbin")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    command.need_rights()
    assert shutil.which("tc") is not None


class SwitchOfSockets:
    """A switch between pairs of sockets, which need no rights: the hosts' ends are here."""

    def __init__(self, count: int, link: LinkConditions) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        for far, _ in pairs:
            far.setblocking(False)
        self.hosts = [host for _, host in pairs]
        self.addresses = [bytes((2, 0, 0, 0, 0, number)) for number in range(count)]
        devices = {address: far.detach() for address, (far, _) in zip(self.addresses, pairs, strict=True)}
        self.switch = Switch(devices, link, limits_senders=False)

    def send(self, source: int, target: int, number: int, size: int = 60) -> None:
        self.hosts[source].send(self.addresses[target] + number.to_bytes(4, "big") + bytes(size - 10))

    def take(self, host: int) -> list[int]:
        """Numbers of the frames that are there."""
        found = []
        while select.select([self.hosts[host]], (), (), 0)[0]:
            found.append(int.from_bytes(self.hosts[host].recv(1 << 17)[6:10], "big"))
        return found

    def is_idle(self, sent: int) -> bool:
        counts = self.switch.counts
        return counts["carried"] + counts["lost"] + counts["full"] == sent

    def __enter__(self) -> SwitchOfSockets:
        return self

    def __exit__(self, *_: object) -> None:
        self.switch.close()
        for host in self.hosts:
            host.close()


def test_with_the_same_seed_a_link_loses_the_same_packets_whatever_the_others_carry() -> None:
    def survivors(seed: int, *, others: bool) -> list[int]:
        with SwitchOfSockets(3, LinkConditions(loss=0.2, seed=seed)) as made:
            found: list[int] = []
            for number in range(200):
                made.send(0, 1, number)
                if others:
                    made.send(2, 1, 1_000_000)
                    made.send(1, 0, number)
                until(lambda: made.is_idle((3 if others else 1) * (number + 1)))  # noqa: B023 - it is called at once
                made.take(0)
                found += made.take(1)
            return [number for number in found if number < 1_000_000]

    alone = survivors(1, others=False)
    assert 120 < len(alone) < 190
    assert survivors(1, others=True) == alone
    assert survivors(2, others=False) != alone


def test_what_is_under_way_has_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "MOST_BYTES", 50_000)
    with SwitchOfSockets(2, LinkConditions(delay_s=60.0, mtu=9000)) as made:
        for number in range(10):
            made.send(0, 1, number, 9000)
            until(lambda: len(made.switch.under_way) + made.switch.counts["full"] > number)  # noqa: B023 - it is called at once
        assert made.switch.counts["full"] == 5


def test_a_few_late_packets_do_not_make_the_switch_the_limit() -> None:
    with SwitchOfSockets(2, LinkConditions()) as made:
        made.switch.counts.update(carried=11, late=1)
        assert not made.switch.was_the_limit
        made.switch.counts.update(carried=10_000, late=200)
        assert made.switch.was_the_limit


def test_amounts_are_read_with_their_units_and_others_are_named() -> None:
    assert conditions.bits_per_second("50mbit") == 50e6
    assert conditions.seconds("20ms") == pytest.approx(0.02)
    assert conditions.seconds("0") == conditions.share("0") == 0.0
    assert conditions.share("1.5%") == pytest.approx(0.015)
    assert conditions.num_bytes("64kb") == 64_000
    for read, text in ((conditions.bits_per_second, "50"), (conditions.seconds, "5m"), (conditions.share, "0.1")):
        with pytest.raises(ConfigError, match=r"expected a .* such as"):
            read(text)
    for wrong in (
        {"delay_s": 0.1, "jitter_s": 0.2},
        {"loss": 1.0},
        {"rate_bit_s": 1.0},
        {"mtu": 100},
        {"queue_bytes": 1},
    ):
        with pytest.raises(ConfigError):
            LinkConditions(**wrong)


def test_a_host_gets_its_place_and_a_key_unless_the_user_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (Host("a", "va", "10.0.0.1"), Host("b", "vb", "10.0.0.2"))
    network = Network(hosts, LinkConditions(), None)
    monkeypatch.delenv("GRADBUS_KEY", raising=False)
    monkeypatch.delenv("GRADBUS_KEY_FILE", raising=False)
    found = environment_of(network, 1, "secret")
    assert found["RANK"] == "1"
    assert found["MASTER_ADDR"] == "10.0.0.1"
    assert found["GRADBUS_BUS__INTERFACE"] == "vb"
    assert found["GRADBUS_KEY"] == "secret"
    monkeypatch.setenv("GRADBUS_KEY_FILE", "job.key")
    assert "GRADBUS_KEY" not in environment_of(network, 1, "secret")


def test_hosts_behind_nat_have_a_bus_on_links_and_a_relay_has_neither_bus_nor_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = (Host("a", "va", "10.0.0.1"), Host("b", "vb", "10.0.0.2"))
    network = Network(hosts, LinkConditions(), None)
    monkeypatch.delenv("GRADBUS_KEY", raising=False)
    monkeypatch.delenv("GRADBUS_KEY_FILE", raising=False)
    first, second = (environment_of(network, number, "secret", nat_port=443) for number in (0, 1))
    assert (first["GRADBUS_BUS__LISTEN"], first["GRADBUS_BUS__TLS"]) == ('["tcp/0.0.0.0:443"]', "false")
    assert (second["GRADBUS_BUS__CONNECT"], second["GRADBUS_BUS__TLS"]) == ('["tcp/10.0.0.1:443"]', "false")
    assert (first["GRADBUS_KEY"], second["GRADBUS_KEY"]) == ("secret", "secret")
    assert not [name for name in (*first, *second) if name.endswith(("__PEERS", "__INTERFACE"))]
    relay = environment_of(network, 0, "secret", nat_port=443, is_relay=True)
    assert relay["GRADBUS_RELAY__LISTEN"] == '["tcp/0.0.0.0:443"]'
    assert relay["GRADBUS_KEY"] is None
    assert not [name for name in relay if name.startswith("GRADBUS_BUS__")]


def test_a_relay_among_commands_is_known_however_it_is_started() -> None:
    assert is_relay(["gradbus", "relay"])
    assert is_relay(["/opt/venv/bin/gradbus", "relay", "relay.toml"])
    assert is_relay(["python", "-P", "-m", "gradbus", "relay"])
    assert not is_relay(["gradbus", "client", "relay"])
    assert not is_relay(["cat", "gradbus", "relay"])


@netns
def test_a_host_behind_nat_reaches_one_port_and_nobody_reaches_it() -> None:
    with network_of(3, LinkConditions()) as network:
        first, second, third = network.hosts
        for host in second, third:
            let_dial_only(host, first, 443)

        def listening(host: Host, port: int) -> socket.socket:
            return made_on(host, lambda: socket.create_server((host.address, port)))

        def dial(source: Host, target: Host, port: int) -> socket.socket:
            return made_on(source, lambda: socket.create_connection((target.address, port), 0.5))

        with listening(first, 443) as relay, listening(first, 80), listening(second, 443), listening(second, 80):
            with dial(second, first, 443) as client, relay.accept()[0] as accepted:
                accepted.sendall(b"y" * 100_000)
                assert took(client, 100_000) == 100_000
            for source, target, port in ((second, first, 80), (third, second, 443), (first, second, 443)):
                with pytest.raises(OSError, match=r"timed out|unreachable"):
                    dial(source, target, port)
            dial(second, second, 80).close()


@netns
@pytest.mark.slow
def test_a_federated_run_behind_nat_goes_through_a_relay_which_ends_with_it(
    run_gradbus: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = {"data": "glyphs", "data_options": {"train": 200, "test": 50}, "model": "gradbus.models:mnist_mlp"}
    task["num_clients"] = 1
    rules = {"rounds": 2, "clients": {"num": 1}}
    Path("c.json").write_text(json.dumps({"bus": {"job": "nat"}, "task": task, "federated": rules}), encoding="utf-8")
    Path("d.json").write_text(json.dumps({"bus": {"job": "nat"}, "task": task}), encoding="utf-8")
    gradbus = [sys.executable, "-P", "-m", "gradbus"]
    commands = [*gradbus, "relay", "+", *gradbus, "controller", "c.json", "+", *gradbus, "client", "d.json"]
    code, out, err = run_gradbus("lab", "--nat", "443", "--rate", "100mbit", "--", *commands, "--id", "0")
    if code == 2 and "namespaces" in err:
        pytest.skip(err)
    assert code == 0, err + out
    assert "relay ends" in err
    sent = {words[0]: words[4] for words in map(str.split, err.splitlines()) if words[:1] in (["0"], ["1"], ["2"])}
    assert sent == {"0": "MB", "1": "MB", "2": "MB"}


def test_the_report_has_the_share_of_each_link_that_was_used() -> None:
    network = Network((Host("a", "va", "10.0.0.1"),), LinkConditions(rate_bit_s=8e6), None)
    lines = report(network, [2.0], [LinkTraffic(1_000_000, 500_000, 3)], ["computing: 50.00 %"])
    assert lines[2].split() == ["0", "2.00", "s", "1.00", "MB", "500.00", "kB", "50.0", "%", "25.0", "%"]
    assert lines[3:] == ["computing: 50.00 %", "3 packets found the queue of their host full"]
