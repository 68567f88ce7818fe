"""`gradbus keys`, and what a run is told that would leave the machine without one."""

from __future__ import annotations

import asyncio
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from identities import Identities

from gradbus.commands.buses import check
from gradbus.commands.doctor import security as doctor_security
from gradbus.commands.doctor.machine import Finding, Severity
from gradbus.commands.doctor.settings import settings_of
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.security.identity import allow_list
from gradbus.runtime.security.job_key import JobKey, load_user_key, new_job_key, write_secret_file

# A document of the user in place of interface lo: Cyclone would choose the first real one. Nothing here lets it.
_ELSEWHERE = (
    '<CycloneDDS><Domain><General><Interfaces><NetworkInterface autodetermine="true"/></Interfaces></General></Domain>'
    "</CycloneDDS>"
)


def test_a_new_key_is_for_its_owner_alone_and_is_not_shown(invoke, tmp_path: Path) -> None:
    made = invoke("keys", "new", "job.key")
    assert made.code == 0
    assert stat.S_IMODE((tmp_path / "job.key").stat().st_mode) == 0o600
    secret = (tmp_path / "job.key").read_text().split()[1]
    shown = invoke("keys", "show", "job.key")
    assert shown.out.strip().removeprefix("job key, id ") in made.out
    assert secret not in made.out + made.err + shown.out + shown.err


def test_two_keys_have_two_ids_and_a_copy_has_the_same(invoke, tmp_path: Path, monkeypatch) -> None:
    for name in ("one", "other"):
        invoke("keys", "new", name)
    monkeypatch.setenv("GRADBUS_KEY", (tmp_path / "one").read_text())
    assert invoke("keys", "show").out == invoke("keys", "show", "one").out
    monkeypatch.setenv("GRADBUS_KEY_FILE", str(tmp_path / "other"))  # a file is stronger
    assert invoke("keys", "show").out == invoke("keys", "show", "other").out != invoke("keys", "show", "one").out


def test_a_key_is_never_overwritten(invoke, tmp_path: Path) -> None:
    invoke("keys", "new", "job.key")
    before = (tmp_path / "job.key").read_bytes()
    again = invoke("keys", "new", "job.key")
    assert again.code == 2
    assert "job.key exists: a key is never overwritten" in again.err
    assert (tmp_path / "job.key").read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_a_key_that_others_can_use_is_refused(invoke, tmp_path: Path, mode: int) -> None:
    invoke("keys", "new", "job.key")
    (tmp_path / "job.key").chmod(mode)
    refused = invoke("keys", "show", "job.key")
    assert refused.code == 2
    assert f"job.key has mode {mode:04o}" in refused.err
    assert "chmod 600 job.key" in refused.err


@pytest.mark.parametrize("text", ["", "gradbus-key-1 abcd", "secret", "gradbus-key-1 " + "0" * 63 + "x", "é"])
def test_what_is_no_key_is_refused_and_not_repeated(invoke, tmp_path: Path, text: str) -> None:
    (tmp_path / "job.key").write_text(text)
    (tmp_path / "job.key").chmod(0o600)
    refused = invoke("keys", "show", "job.key")
    assert refused.code == 2
    assert "job.key" in refused.err
    assert "secret" not in refused.err
    assert "abcd" not in refused.err


def test_a_pipe_or_an_endless_file_is_no_key(invoke, tmp_path: Path) -> None:
    assert "expected a regular file" in invoke("keys", "show", "/dev/zero").err
    (tmp_path / "long").write_bytes(b"0" * 5000)
    (tmp_path / "long").chmod(0o600)
    assert "at most 4096 bytes" in invoke("keys", "show", "long").err


@pytest.mark.parametrize("command", [("controller",), ("client", "--id", 0), ("worker", "--rank", 0, "--world", 2)])
def test_nothing_leaves_the_machine_without_a_key_or_a_word(invoke, configs, monkeypatch, command) -> None:
    monkeypatch.setenv("CYCLONEDDS_URI", _ELSEWHERE)
    config = configs / {"controller": "controller", "client": "client", "worker": "ddp"}[command[0]]
    refused = invoke(command[0], f"{config}.conf.json", *command[1:])
    assert refused.code == 2
    assert "this bus leaves the machine" in refused.err
    assert "'gradbus keys new FILE' makes one" in refused.err
    assert "--insecure" in refused.err


def test_a_word_or_a_key_is_enough(monkeypatch) -> None:
    monkeypatch.setenv("CYCLONEDDS_URI", _ELSEWHERE)
    check(BusSettings(insecure=True))
    monkeypatch.setenv("GRADBUS_KEY", new_job_key().text)
    check(BusSettings(security="psk"))
    check(BusSettings())


def test_the_key_of_the_user_does_not_leave_the_machine_unless_it_is_named(invoke, configs, monkeypatch) -> None:
    shown = invoke("keys", "show")
    assert re.fullmatch(r"key of this user, id [0-9a-f]{16}, in (/.*/user\.key)\n", shown.out), shown.out
    monkeypatch.setenv("CYCLONEDDS_URI", _ELSEWHERE)
    refused = invoke("controller", configs / "controller.conf.json")
    assert refused.code == 2
    assert "the key of this user is for this machine alone" in refused.err
    check(BusSettings(key_file=Path(shown.out.split(" in ")[1].strip())))


def test_peers_elsewhere_need_a_key_as_well(invoke, configs) -> None:
    refused = invoke("controller", configs / "controller.conf.json", "--set", 'bus.peers=["192.0.2.10"]')
    assert refused.code == 2
    assert "this bus leaves the machine" in refused.err


def test_psk_without_a_key_says_where_it_is_looked_for(invoke, configs, monkeypatch) -> None:
    for name in ("GRADBUS_KEY", "GRADBUS_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    refused = invoke("client", configs / "client.conf.json", "--id", 0, "--set", "bus.security=psk")
    assert refused.code == 2
    for word in ("bus.key_file", "GRADBUS_KEY_FILE", "GRADBUS_KEY", "gradbus keys new"):
        assert word in refused.err


def test_a_key_that_would_not_be_used_is_an_error(invoke, configs) -> None:
    none_with_key = ("--set", "bus.key_file=job.key", "--set", "bus.security=none")
    refused = invoke("client", configs / "client.conf.json", "--id", 0, *none_with_key)
    assert refused.code == 2
    assert "security is 'none' and would not use it" in refused.err


@pytest.fixture
def _a_late_sample_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not about that: on a busy machine a trip may take seconds."""
    monkeypatch.setattr(doctor_security, "TRIP_S", 60.0)


def doctor_says(domain: int, key_file: Path | None = None) -> Finding:
    settings = settings_of(None, {"domain": domain}, key_file)
    return asyncio.run(doctor_security.security(settings))


def id_of(key: JobKey) -> str:
    return key.id.hex()


@pytest.mark.usefixtures("_a_late_sample_comes_back")
def test_the_doctor_tries_the_key_and_says_its_id_and_never_the_key(tmp_path: Path, monkeypatch, domain) -> None:
    user, origin = load_user_key()
    by_default = doctor_says(domain)
    key = new_job_key()
    write_secret_file(tmp_path / "job.key", key.text)
    given = doctor_says(domain, tmp_path / "job.key")
    monkeypatch.setenv("GRADBUS_KEY", key.text)
    named = doctor_says(domain)
    for found, told in (
        (by_default, f"user, key {id_of(user)}: works, N ms; from {origin}"),
        (given, f"psk, key {id_of(key)}: works, N ms; from {tmp_path / 'job.key'}"),
        (named, f"psk, key {id_of(key)}: works, N ms; from environment variable GRADBUS_KEY"),
    ):
        assert (found.severity, found.cure) == (Severity.OK, "")
        assert re.sub(r"\d+ ms", "N ms", found.value) == told
    monkeypatch.setenv("GRADBUS_BUS__SECURITY", "none")
    unused = doctor_says(domain)
    assert (unused.severity, unused.value) == (Severity.ADVICE, "none, though there is a key")
    assert key.secret.hex() not in f"{by_default}{given}{unused}{named}"


@pytest.mark.parametrize("others", [[], ["someone"]])
def test_the_doctor_advises_against_no_protection_where_there_are_other_users(monkeypatch, domain, others) -> None:
    monkeypatch.setenv("GRADBUS_BUS__SECURITY", "none")
    monkeypatch.setattr(doctor_security, "other_users", lambda: others)
    found = doctor_says(domain)
    assert found.severity is (Severity.ADVICE if others else Severity.OK)
    assert ("other users (someone)" in found.value) == bool(others)


@pytest.mark.usefixtures("network_by_document")
def test_the_doctor_takes_a_network_of_the_document_for_one_whatever_the_interface_of_the_settings(
    monkeypatch, domain
) -> None:
    monkeypatch.setattr(doctor_security, "other_users", lambda: ["someone"])
    settings = BusSettings(domain=domain, security="none", insecure=True)
    assert asyncio.run(doctor_security.security(settings)).value == "none, on a network"
    trusted = asyncio.run(doctor_security.security(settings, trusted=True))
    assert (trusted.severity, "other users" in trusted.value) == (Severity.OK, False)


def test_the_doctor_finds_a_key_bad_that_others_can_read_and_a_sample_that_does_not_come_back(
    tmp_path: Path, monkeypatch, domain
) -> None:
    write_secret_file(tmp_path / "job.key", new_job_key().text)
    (tmp_path / "job.key").chmod(0o644)
    found = doctor_says(domain, tmp_path / "job.key")
    assert found.severity is Severity.BAD
    assert "chmod 600" in found.cure
    (tmp_path / "job.key").chmod(0o600)
    monkeypatch.setattr(doctor_security, "TRIP_S", 0.0)
    found = doctor_says(domain, tmp_path / "job.key")
    assert (found.severity, found.value) == (Severity.BAD, "psk: no sealed sample came back")


@pytest.mark.usefixtures("_a_late_sample_comes_back")
def test_the_doctor_says_who_a_node_is_and_measures_what_its_bus_costs_without_a_controller(
    tmp_path: Path, monkeypatch, domain
) -> None:
    known = Identities(tmp_path)
    for name in ("robot-0", "server"):
        said = known.security(name)
        monkeypatch.setenv("GRADBUS_BUS__SECURITY", "identity")
        for setting in ("key_file", "controller_key", "allow_file"):
            monkeypatch.setenv(f"GRADBUS_BUS__{setting.upper()}", said[setting])
        settings = settings_of(None, {"domain": domain})
        found = asyncio.run(doctor_security.security(settings))
        assert found.severity is Severity.OK
        assert found.value.startswith(f"identity: {name}")
        with doctor_security.measurable(settings) as measured:
            works = asyncio.run(doctor_security.security(measured))
        assert works.value.startswith("psk, key ")
        assert "works" in works.value
    assert re.search(r"is the controller, 2 nodes on its list\. A rank with its key joins it, \d+ ms", found.value)
    monkeypatch.delenv("GRADBUS_BUS__ALLOW_FILE")
    assert "is the controller, no list of others. A rank with its key joins it" in doctor_says(domain).value
    monkeypatch.setenv("GRADBUS_BUS__ALLOW_FILE", str(known.list_file))
    known.list_file.chmod(0o666)
    assert doctor_says(domain).severity is Severity.BAD


def test_a_key_of_a_node_shows_its_public_half_which_is_put_on_a_list_and_taken_off(invoke, tmp_path: Path) -> None:
    made = invoke("keys", "new", "--identity", "robot-7", "robot-7.key")
    assert made.code == 0
    assert stat.S_IMODE((tmp_path / "robot-7.key").stat().st_mode) == 0o600
    private = (tmp_path / "robot-7.key").read_text().split()[2]
    name, public = invoke("keys", "show", "robot-7.key").out.split()
    assert name == "robot-7"
    assert public in made.out
    allowed = invoke("keys", "allow", name, public, "--role", "client", "--ids", "7", "--list", "allow.list")
    assert allowed.code == 0
    assert f"robot-7 client {public} 7" in (tmp_path / "allow.list").read_text()
    assert private not in made.out + made.err + allowed.out + (tmp_path / "allow.list").read_text()
    again = invoke("keys", "allow", name, public, "--ids", "8", "--list", "allow.list")
    assert again.code == 2
    assert "robot-7 is on the list already" in again.err
    assert invoke("keys", "remove", "robot-7", "--list", "allow.list").code == 0
    gone = invoke("keys", "remove", "robot-7", "--list", "allow.list")
    assert gone.code == 2
    assert "'robot-7' is not on the list, which has: nobody" in gone.err


def test_two_who_change_the_list_at_once_do_so_one_after_the_other(invoke, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(allow_list, "LOCK_S", 0.0)
    allow = ["keys", "allow", "robot-1", "ed25519:" + "a" * 64, "--ids", "1", "--list", "allow.list"]
    assert invoke(*allow).code == 0
    with allow_list.changing(tmp_path / "allow.list"):
        for command in (["keys", "remove", "robot-1", "--list", "allow.list"], allow):
            refused = invoke(*command)
            assert refused.code == 2
            assert "is being changed by another process" in refused.err
    assert invoke("keys", "remove", "robot-1", "--list", "allow.list").code == 0
    monkeypatch.setattr(allow_list, "LOCK_S", 10.0)

    def allow_one(number: int) -> None:
        entry = allow_list.Entry(f"robot-{number}", "client", bytes([number + 100]) * 32, ((number, number),))
        path = tmp_path / "allow.list"
        with allow_list.changing(path):
            allow_list.write_allow_list(path, allow_list.with_entry(allow_list.load_allow_list(path), entry))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(allow_one, range(16)))
    assert len(allow_list.load_allow_list(tmp_path / "allow.list").entries) == 16


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["robot", "ed25519:12", "--ids", "1"], "PUBLIC_KEY: expected a public key"),
        (["robot", "ed25519:" + "a" * 64], "client robot: expected the ids that it may use"),
        (["host", "ed25519:" + "a" * 64, "--role", "worker"], "worker host: expected the ranks that it may use"),
        (["desk", "ed25519:" + "a" * 64, "--role", "observer", "--ids", "1"], "expected no ids: clients and workers"),
        (["robot", "ed25519:" + "a" * 64, "--role", "boss"], "--role: role 'boss': expected one of client"),
        (["a b", "ed25519:" + "a" * 64, "--ids", "1"], "name 'a b'"),
    ],
)
def test_what_cannot_be_on_the_list_is_refused_and_makes_no_file(invoke, tmp_path: Path, arguments, why) -> None:
    refused = invoke("keys", "allow", *arguments, "--list", "allow.list")
    assert refused.code == 2
    assert why in refused.err
    assert not (tmp_path / "allow.list").exists()


def test_a_node_with_a_key_of_its_own_is_no_host_of_virtual_clients(invoke, configs) -> None:
    for name in ("server", "robot"):
        invoke("keys", "new", "--identity", name, f"{name}.key")
    server, robot = (invoke("keys", "show", f"{name}.key").out.split()[1] for name in ("server", "robot"))
    invoke("keys", "allow", "robot", robot, "--ids", "0-3", "--list", "allow.list")
    own = ["--set", "bus.security=identity", "--set", f"bus.controller_key={server}"]
    listed = ["--set", "bus.allow_file=allow.list"]
    for command in (
        ["host", configs / "client.conf.json", "--ids", "0-3", "--set", "bus.key_file=robot.key"],
        ["virtual", configs / "controller.conf.json", "--clients", "4", "--set", "bus.key_file=server.key", *listed],
    ):
        refused = invoke(*command, *own)
        assert refused.code == 2
        assert "with security 'identity' no process can speak for several clients" in refused.err


def test_identity_without_what_it_needs_says_which_setting_is_missing(invoke, configs, tmp_path: Path) -> None:
    invoke("keys", "new", "--identity", "server", "server.key")
    public = invoke("keys", "show", "server.key").out.split()[1]
    run = ["controller", configs / "controller.conf.json", "--set", "bus.security=identity"]
    assert "needs controller_key, the public key of the controller" in invoke(*run).err
    run += ["--set", f"bus.controller_key={public}"]
    assert "name its file in bus.key_file or GRADBUS_KEY_FILE" in invoke(*run).err
    run += ["--set", "bus.key_file=server.key"]
    assert "needs bus.allow_file: the list of the nodes" in invoke(*run).err
    assert "allow list nowhere cannot be read" in invoke(*run, "--set", "bus.allow_file=nowhere").err
    refused = invoke("controller", configs / "controller.conf.json", "--set", f"bus.controller_key={public}")
    assert "controller_key and allow_file are for security 'identity'" in refused.err
