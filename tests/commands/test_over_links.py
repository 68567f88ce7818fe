"""Commands over Zenoh, on links with TLS through one port of loopback: what works over DDS works there."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from tls_scene import HOST, TlsFiles, router

from gradbus.commands.buses import elastic_bus, lease_of
from gradbus.commands.doctor import local_bus, security
from gradbus.commands.exit_codes import ExitCode
from gradbus.commands.run.status import settings_of
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.timeouts import ELASTIC_LEASE_S
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.security.job_key import new_job_key, write_secret_file
from gradbus.runtime.transport.zenoh.router import access_rules
from gradbus.runtime.transport.zenoh.session import open_session

FEW = 'task.data_options={"train": 1000, "test": 100}'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(tmp_path_factory.mktemp("tls"))


@pytest.fixture(autouse=True)
def wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table wraps its lines."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def relay(files: TlsFiles) -> Iterator[LinkConfig]:
    """The links of a relay that runs."""
    links = LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), **files.server())
    with router(links):
        yield links


def write(path: Path, bus: dict[str, Any], **sections: Any) -> Path:
    path.write_text(json.dumps({"bus": {"job": f"links-{path.parent.name}", **bus}, **sections}, default=str))
    return path


def tls(files: dict[str, Path]) -> dict[str, str]:
    """The settings of a certificate."""
    return {"tls_certificate": str(files["certificate"]), "tls_key": str(files["key"])}


@pytest.mark.slow
def test_clients_train_with_a_controller_that_listens_and_asks_for_their_certificates(
    fork, invoke, files: TlsFiles, tmp_path: Path
) -> None:
    """Started before it, too: they wait for its port."""
    port, ca = free_port(), {"tls_ca": str(files.ca)}
    controller = write(
        tmp_path / "controller.json",
        {"listen": [f"tls/{HOST}:{port}"], "tls_clients": True, **ca, **tls(files.server())},
        task={"data": "glyphs", "data_options": {"train": 1000, "test": 100}, "num_clients": 2},
        federated={"rounds": 3, "clients": {"num": 2}, "training": {"subset_size": 200}, "codec": "q8"},
        run_dir="run",
    )
    client = write(
        tmp_path / "client.json",
        {"connect": [f"tls/{HOST}:{port}"], **ca, **tls(files.client())},
        task={"data": "glyphs", "data_options": {"train": 1000, "test": 100}, "num_clients": 2},
    )
    clients = [fork("client", client, "--id", number) for number in range(2)]
    out, err = fork("controller", controller, "--no-live").communicate(timeout=90)
    assert "done: 3 rounds" in out, (out, err)
    for one in clients:
        out, err = one.communicate(timeout=30)
        assert one.returncode == 0, (out, err)
    reports = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert [(report["round_id"], report["clients"]) for report in reports] == [(n, [0, 1]) for n in (1, 2, 3)]
    assert invoke("check", tmp_path / "run").code == 0


@pytest.mark.slow
def test_a_site_has_dds_inside_and_a_link_outside(fork, files: TlsFiles, domain: int, tmp_path: Path) -> None:
    port = free_port()
    task = {"data": "glyphs", "data_options": {"train": 1000, "test": 100}, "num_clients": 2}
    training = {"subset_size": 200}
    centre = write(
        tmp_path / "centre.json",
        {"listen": [f"tls/{HOST}:{port}"], **tls(files.server())},
        task=task,
        federated={"rounds": 2, "clients": {"num": 1, "kind": "sites"}, "training": training},
        run_dir="centre",
    )
    outside = {"job": f"links-{tmp_path.name}", "connect": [f"tls/{HOST}:{port}"], "tls_ca": str(files.ca)}
    inside = {"job": "inside", "domain": domain}
    site = write(
        tmp_path / "site.json",
        inside,
        upstream={"site": 0, "bus": outside},
        task=task,
        federated={"clients": {"num": 2, "min": 2}},
        run_dir="site",
    )
    client = write(tmp_path / "client.json", inside, task=task)
    others = [fork("client", client, "--id", number) for number in range(2)]
    others.append(fork("controller", site, "--no-live"))
    out, err = fork("controller", centre, "--no-live").communicate(timeout=90)
    assert "done: 2 rounds" in out, (out, err)
    for one in others:
        out, err = one.communicate(timeout=30)
        assert one.returncode == 0, (out, err)


@pytest.mark.slow
def test_the_commands_of_the_page_work_with_the_files_that_it_shows(fork, root: Path, tmp_path: Path) -> None:
    """On one machine, with a name that it has, and another port."""
    page = (root / "docs/wan.md").read_text(encoding="utf-8").replace("fed.example.org", "localhost")
    page = page.replace("8443", str(free_port())).replace("0.0.0.0", HOST)
    make, use = (block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL))
    buses = [json.loads(block)["bus"] for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    task = {"data": "glyphs", "data_options": {"train": 1000, "test": 100}, "num_clients": 1}
    federated = {"rounds": 1, "clients": {"num": 1}, "training": {"subset_size": 100}}
    write(tmp_path / "controller.json", buses[0], task=task, federated=federated, run_dir="run")
    write(tmp_path / "client.json", buses[1], task=task)
    for line in make.splitlines():
        made = fork(*shlex.split(line)[1:])
        assert (made.communicate(timeout=60), made.returncode)[1] == 0, line
    (tmp_path / "ca.pem").write_bytes((tmp_path / "tls/ca.pem").read_bytes())  # "copy it to each client"
    listener, dialler, controller, client = (shlex.split(line)[1:] for line in use.splitlines())
    out, _ = fork(*listener).communicate(timeout=90)
    assert "free, TLS" in out, out
    out, _ = fork(*dialler).communicate(timeout=90)
    assert "connection refused" in out, out  # the controller does not listen yet
    running = fork(*client)
    out, err = fork(*controller, "--no-live").communicate(timeout=90)
    assert "done: 1 rounds" in out, (out, err)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 0, (out, err)


@pytest.mark.slow
def test_ranks_of_a_data_parallel_run_meet_through_a_relay(
    fork, files: TlsFiles, relay: LinkConfig, tmp_path: Path
) -> None:
    config = write(
        tmp_path / "ranks.json",
        {"connect": relay.listen, "tls_ca": str(files.ca), "shared_memory": False},
        task={"data": "glyphs", "data_options": {"train": 1000, "test": 100}},
        parallel={"epochs": 1},
        run_dir="run",
    )
    process = fork("run", "-n", 2, "--", config, "--no-live")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert "done: 1 epochs" in out
    assert json.loads((tmp_path / "run/summary.json").read_text())["outcome"] == "done"


@pytest.mark.slow
def test_the_doctor_measures_the_way_through_a_relay(fork, files: TlsFiles, relay: LinkConfig, tmp_path: Path) -> None:
    key_file = tmp_path / "job.key"
    write_secret_file(key_file, new_job_key().text)
    bus = {"connect": relay.listen, "tls_ca": str(files.ca), "key_file": str(key_file)}
    process = fork("doctor", "--config", write(tmp_path / "client.json", bus))
    out, err = process.communicate(timeout=90)
    text = " ".join(out.split())
    for words in ("because bus.connect is set", "Zenoh answers, ", "valid until", f"from {key_file}"):
        assert words in text, (text, err)
    if process.returncode == 0:
        assert "round trip, 64 B" in text
        assert "all well" in text
    else:  # it finds that a busy machine is not well
        assert process.returncode == ExitCode.BUS, (text, err)
        assert "the machine is overloaded" in text, text
    assert "UDP ports" not in text


def test_the_doctor_says_what_is_wrong_with_a_relay(invoke, files: TlsFiles, relay: LinkConfig, tmp_path: Path) -> None:
    found = invoke("doctor", "--connect", relay.listen[0], "--tls-ca", files.strange_ca)
    assert found.code == ExitCode.BUS, found
    assert "signed by another authority than that of bus.tls_ca" in " ".join(found.out.split())
    config = write(tmp_path / "client.json", {"connect": [f"tls/{HOST}:{free_port()}"]})
    found = invoke("doctor", "--config", config)
    assert "connection refused" in " ".join(found.out.split())
    assert "not well: see above" in found.out


def test_the_doctor_of_one_that_listens_looks_at_its_port_and_certificate(
    invoke, files: TlsFiles, tmp_path: Path
) -> None:
    bus = {"listen": [f"tls/{HOST}:{free_port()}"], **tls(files.server(HOST, days=20.5))}
    found = invoke("doctor", "--config", write(tmp_path / "controller.json", bus))
    text = " ".join(found.out.split())
    assert found.code == 0, found
    assert "free, TLS" in text
    assert "it ends in 20 days: make a new one with the same authority" in text


@pytest.mark.parametrize(
    ("bus", "value", "text"),
    [
        ({}, "none, on a network", "anybody there could read the data and join in, so no job starts"),
        ({"security": "none"}, "none, on a network", "so no job starts"),
        ({"key_file": "nowhere.key"}, "user: does not work", "nowhere.key"),
        ({"security": "identity", "controller_key": "wrong"}, "identity: does not work", ""),
    ],
)
def test_the_doctor_of_one_that_listens_refuses_what_the_controller_would_refuse(
    invoke, monkeypatch, tmp_path: Path, bus: dict[str, Any], value: str, text: str
) -> None:
    for name in ("GRADBUS_KEY", "GRADBUS_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    config = write(tmp_path / "controller.json", {"listen": [f"tcp/192.0.2.1:{free_port()}"], "tls": False, **bus})
    found = invoke("doctor", "--config", config)
    shown = " ".join(found.out.split())
    assert (found.code, "not well: see above" in shown) == (ExitCode.BUS, True), found
    assert f"security {value} bad" in shown
    assert text in shown


def test_the_doctor_of_one_that_listens_names_the_key_that_protects_it(invoke, tmp_path: Path) -> None:
    write_secret_file(tmp_path / "job.key", new_job_key().text)
    bus = {"listen": [f"tcp/192.0.2.1:{free_port()}"], "tls": False}
    sealed = invoke("doctor", "--config", write(tmp_path / "a.json", {**bus, "key_file": str(tmp_path / "job.key")}))
    assert re.search(r"security +psk, key [0-9a-f]+ from .*job.key. Joining is not tried +ok", sealed.out), sealed
    trusted = invoke("doctor", "--config", write(tmp_path / "b.json", {**bus, "insecure": True}))
    assert "security none: for a machine of your own" in " ".join(trusted.out.split())
    assert (sealed.code, trusted.code) == (0, 0), (sealed, trusted)


def test_the_doctor_names_the_jobs_of_a_relay_where_its_own_does_not_get_through(
    invoke, monkeypatch, files: TlsFiles
) -> None:
    monkeypatch.setattr(security, "TRIP_S", 1.0)
    monkeypatch.setattr(local_bus, "DEADLINE_S", 1.0)
    links = LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), **files.server())
    with contextlib.closing(open_session(links, "router", more={"access_control": access_rules({"*": ("mnist",)})})):
        found = invoke("doctor", "--connect", links.listen[0], "--tls-ca", files.ca)
    for name in ("security", "discovery"):
        assert re.search(rf"^{name}: .*Where the relay has access.jobs, it passes on the jobs", found.out, re.M), found
    assert "Zenoh answers, " in found.out


def test_the_doctor_refuses_the_configuration_of_a_relay_and_says_how_to_look_at_one(invoke, tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text('[relay]\nlisten = ["tls/0.0.0.0:443"]\n')
    refused = invoke("doctor", "--config", config)
    assert refused.code == 2
    assert "got that of a relay (it has the section relay)" in refused.err
    assert "'gradbus doctor --connect tls/HOST:PORT --tls-ca ca.pem'" in refused.err


@pytest.mark.parametrize("command", ["controller", "client", "worker", "doctor"])
def test_settings_that_contradict_each_other_end_a_command_at_once(invoke, tmp_path: Path, command: str) -> None:
    config = write(tmp_path / "file.json", {"connect": ["tls/relay:443"], "transport": "dds"})
    ranks = ["--rank", 0, "--world", 2] if command == "worker" else []
    arguments = ["--config", config] if command == "doctor" else [config, *ranks]
    refused = invoke(command, *arguments)
    assert refused.code == 2
    assert "bus.transport is 'dds', and bus.connect is set, which only Zenoh has" in refused.err


@pytest.mark.parametrize("command", ["controller", "client"])
def test_a_certificate_that_is_missing_ends_a_command_before_anything_is_loaded(
    invoke, tmp_path: Path, command: str
) -> None:
    bus = {"connect": ["tls/localhost:7447"], "tls_ca": "nowhere.pem"}
    refused = invoke(command, write(tmp_path / "file.json", bus))
    assert refused.code == 2
    assert "bus.tls_ca nowhere.pem cannot be read: No such file or directory" in refused.err


def test_the_status_of_a_controller_that_listens_is_asked_for_as_one_that_dials(invoke, tmp_path: Path) -> None:
    config = write(tmp_path / "controller.json", {"listen": [f"tcp/{HOST}:{free_port()}"]})
    refused = invoke("status", "--config", config)
    assert refused.code == 2
    assert "dial it with --connect tls/HOST:PORT and --tls-ca FILE" in refused.err
    closed = f"tcp/{HOST}:{free_port()}"
    settings = settings_of(config, {"connect": [closed]})
    assert (settings.connect, settings.listen) == ((closed,), ())


@pytest.mark.slow
def test_the_doctor_of_a_site_tries_the_link_to_the_level_above_as_well(
    fork, files: TlsFiles, relay: LinkConfig, domain: int, tmp_path: Path
) -> None:
    def doctor(port: str, ca: Path) -> tuple[int, str]:
        outside = {"job": "centre", "connect": [port], "tls_ca": str(ca)}
        inside = {"domain": domain}
        config = write(tmp_path / "site.json", inside, upstream={"site": 0, "bus": outside})
        process = fork("doctor", "--config", config)
        out, _ = process.communicate(timeout=90)
        return process.returncode, " ".join(out.split())

    _, well = doctor(relay.listen[0], files.ca)
    assert re.search(rf"upstream.bus.connect {relay.listen[0]} Zenoh answers, \d+ ms", well), well
    code, strange = doctor(relay.listen[0], files.strange_ca)
    assert (code, "signed by another authority" in strange) == (ExitCode.BUS, True), strange


def test_the_status_of_a_relay_is_refused_with_how_to_ask_for_a_job_behind_it(invoke, tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text('[relay]\nlisten = ["tls/0.0.0.0:443"]\n')
    refused = invoke("status", "mnist", "--config", config)
    assert refused.code == 2
    assert "got that of a relay (it has the section relay)" in refused.err
    assert "'gradbus status JOB --connect tls/HOST:PORT --tls-ca ca.pem --key-file job.key'" in refused.err


def test_an_endpoint_that_is_no_list_is_answered_with_what_it_must_be(invoke, tmp_path: Path) -> None:
    refused = invoke("status", "--config", write(tmp_path / "client.json", {"connect": "tls/relay:443"}))
    assert refused.code == 2
    assert "bus.connect: expected a list, in brackets, got 'tls/relay:443'" in refused.err


def test_elastic_ranks_have_their_short_lease_over_links_too() -> None:
    far, here = BusSettings(connect=("tls/relay:443",)), BusSettings(connect=(f"tcp/{HOST}:7447",))
    assert (elastic_bus(far).lease_s, elastic_bus(here).lease_s) == (ELASTIC_LEASE_S, None)
    assert elastic_bus(far.model_copy(update={"lease_s": 2.0})).lease_s == 2.0
    assert (lease_of(far), lease_of(here)) == (10.0, None)  # None: the kernel reports it


def test_virtual_clients_need_a_relay_where_their_controller_would_listen(invoke, tmp_path: Path) -> None:
    config = write(tmp_path / "controller.json", {"listen": [f"tcp/{HOST}:{free_port()}"]}, task={"data": "glyphs"})
    refused = invoke("virtual", config, "--clients", 2)
    assert refused.code == 2
    assert "Start a relay ('gradbus relay'), and set bus.connect instead" in refused.err


def test_the_status_of_a_job_behind_a_relay_needs_two_options(invoke, files: TlsFiles, relay: LinkConfig) -> None:
    arguments = ("status", "nobody", "--connect", relay.listen[0], "--tls-ca", files.ca, "--timeout", 0.5)
    none = invoke(*arguments, "--loop", "asyncio")
    assert f"no job 'nobody' was found within 0.5 s: Zenoh on {relay.listen[0]}" in none.err
