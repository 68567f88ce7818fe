"""Units of systemd: what stands in them, and which configurations get none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradbus.commands.exit_codes import ExitCode
from gradbus.commands.service.install import write
from gradbus.commands.service.roles import Wanted, unit_of
from gradbus.commands.service.unit import FIRST_LINE, ServiceUnit, plain
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.security.job_key import load_job_key, new_job_key, write_secret_file

CHECKOUT = Path(__file__).resolve().parents[3]


def lines_of(unit: ServiceUnit, key: str) -> list[str]:
    """The values of a key, in their order."""
    return [line.partition("=")[2] for line in unit.text.splitlines() if line.startswith(f"{key}=")]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "job.key"
    write_secret_file(path, new_job_key().text)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for configurations; that of tests is in /tmp, where a service sees another one."""
    monkeypatch.setattr("gradbus.commands.service.roles._HIDDEN", ())
    return tmp_path


def config(place: Path, **sections: Any) -> Path:
    path = place / "config.json"
    path.write_text(json.dumps({"bus": {"job": "cells"}, **sections}))
    path.chmod(0o644)
    return path


def test_a_controller_continues_its_run_and_its_key_is_a_credential(place: Path, key: Path) -> None:
    unit = unit_of(Wanted(config=config(place, federated={"rounds": 3}), key=key))
    assert unit.file_name == "gradbus-controller.service"
    (command,) = lines_of(unit, "ExecStart")
    assert command.endswith("--run-dir %S/gradbus-controller")
    assert lines_of(unit, "StateDirectory") == ["gradbus-controller"]
    assert lines_of(unit, "LoadCredential") == [f"GRADBUS_BUS__KEY_FILE:{key}"]
    assert "GRADBUS_BUS__KEY_FILE=%d/GRADBUS_BUS__KEY_FILE" in lines_of(unit, "Environment")


def test_a_key_that_the_configuration_names_is_a_credential_too(place: Path, key: Path) -> None:
    path = config(place, bus={"job": "cells", "key_file": str(key)}, client={})
    unit = unit_of(Wanted(config=path, client_name="site-1"))
    assert lines_of(unit, "LoadCredential") == [f"GRADBUS_BUS__KEY_FILE:{key}"]
    assert " --name site-1 " in lines_of(unit, "ExecStart")[0]


def test_no_unit_restarts_what_a_person_must_mend(place: Path, key: Path) -> None:
    unit = unit_of(Wanted(config=config(place, federated={}), key=key))
    (codes,) = lines_of(unit, "RestartPreventExitStatus")
    assert {ExitCode(int(code)) for code in codes.split()} == {
        ExitCode.CONFIG,
        ExitCode.REFUSED,
        ExitCode.PACKAGE,
        ExitCode.REPLACED,
    }


def test_a_relay_may_open_port_443_and_nothing_else_that_needs_root(place: Path) -> None:
    for port, rights in ((443, ["CAP_NET_BIND_SERVICE"]), (7447, [""])):
        path = place / "relay.json"
        path.write_text(json.dumps({"relay": {"listen": [f"tcp/127.0.0.1:{port}"], "drain_s": 30}}))
        path.chmod(0o644)
        unit = unit_of(Wanted(config=path))
        assert lines_of(unit, "CapabilityBoundingSet") == rights
        assert lines_of(unit, "TimeoutStopSec") == ["45s"]
        assert lines_of(unit, "StateDirectory") == []


def test_a_unit_of_a_user_runs_as_that_user(place: Path, key: Path) -> None:
    unit = unit_of(Wanted(config=config(place, client={}), key=key, client_id=0, is_user=True))
    assert not lines_of(unit, "DynamicUser") + lines_of(unit, "LoadCredential") + lines_of(unit, "After")
    assert f"GRADBUS_BUS__KEY_FILE={key}" in lines_of(unit, "Environment")
    assert lines_of(unit, "WantedBy") == ["default.target"]


def test_a_gpu_is_reachable_only_for_a_task_that_uses_one(place: Path, key: Path) -> None:
    for device, private in (("cpu", ["yes"]), ("cuda:0", [])):
        unit = unit_of(Wanted(config=config(place, federated={}, task={"device": device}), key=key))
        assert lines_of(unit, "PrivateDevices") == private


@pytest.mark.parametrize(
    ("sections", "options", "words"),
    [
        ({"federated": {"rounds": -1}}, {}, "federated.rounds"),
        ({"federated": {}, "bus": {"job": "cells", "interface": "nowhere7"}}, {}, "nowhere7"),
        ({"client": {}}, {}, "which client is this"),
        ({}, {}, "Add --role"),
        ({"federated": {}}, {"client_id": 1}, "--id and --name are for a client"),
        ({"federated": {}, "bus": {"job": "cells-{user}"}}, {}, "without {user}"),
        ({"federated": {}, "bus": {}}, {}, "without {user}"),
        ({"federated": {}}, {"unit": "a/b"}, "name 'a/b'"),
    ],
)
def test_a_wrong_configuration_gets_no_unit(
    place: Path, key: Path, sections: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        unit_of(Wanted(config=config(place, **sections), key=key, **options))
    assert words in str(error.value)


def test_a_service_without_a_key_a_closed_file_and_a_file_in_tmp_are_refused(
    place: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADBUS_KEY_FILE", raising=False)
    path = config(place, federated={})
    with pytest.raises(ConfigError, match="key_file names none"):
        unit_of(Wanted(config=path))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"chmod a\+r"):
        unit_of(Wanted(config=path, key=key))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="/etc/gradbus"):
        unit_of(Wanted(config=Path("/tmp/controller.json"), role="controller", key=key))


@pytest.mark.parametrize("word", ["two words", "100%", "$HOME", 'a"b', "a\nExecStartPre=/bin/sh", "a;b", ""])
def test_a_word_that_systemd_would_read_otherwise_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="quoted"):
        plain(word)


def test_a_unit_of_others_is_never_replaced_and_our_own_is(tmp_path: Path) -> None:
    unit = ServiceUnit(name="gradbus-x", description="x", command=("/bin/true",), folder=tmp_path)
    file = write(unit, tmp_path / "units")
    assert file.read_text().startswith(f"{FIRST_LINE}\n")
    assert write(unit, tmp_path / "units") == file
    assert [path.name for path in file.parent.iterdir()] == ["gradbus-x.service"]
    file.write_text("[Unit]\n")
    with pytest.raises(ConfigError, match="was not written by gradbus"):
        write(unit, tmp_path / "units")


def test_a_key_that_systemd_lets_a_service_read_is_taken_only_from_its_folder(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key.chmod(0o440)  # as an access control list with one reader looks
    with pytest.raises(ConfigError, match="0440"):
        load_job_key(key)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(key.parent))
    assert load_job_key(key).key.id
    key.chmod(0o444)
    with pytest.raises(ConfigError, match="0444"):
        load_job_key(key)


def test_the_unit_of_a_program_has_the_rights_of_ours(place: Path, key: Path) -> None:
    """deploy/systemd has it to be copied."""
    ours = unit_of(Wanted(config=config(place, federated={}), key=key, unit="gradbus-program")).text.splitlines()
    shipped = (CHECKOUT / "deploy/systemd/gradbus-program.service").read_text(encoding="utf-8").splitlines()
    own = ("Description=", "WorkingDirectory=", "ExecStart=", "LoadCredential=", "Environment=GRADBUS", FIRST_LINE, "#")
    assert sorted(line for line in shipped if not line.startswith(own)) == sorted(
        line for line in ours if not line.startswith(own)
    )
