"""The bus that a doctor examines: that of a configuration, with the options of the command above it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradbus.commands.doctor.settings import JOB, settings_of
from gradbus.commands.doctor.timeouts import job_of, timeouts
from gradbus.runtime.errors import ConfigError


def write(folder: Path, **bus: Any) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps({"bus": {"job": "cells", **bus}}))
    return path


def test_a_configuration_on_dds_gives_the_doctor_its_domain_network_peers_and_key(tmp_path: Path) -> None:
    of_file = {"domain": 7, "network": "network", "interface": "eth3", "peers": ["192.0.2.1"], "lease_s": 9.0}
    found = settings_of(write(tmp_path, **of_file, key_file="job.key", multicast=True, datagram_bytes=1300), {})
    assert {name: getattr(found, name) for name in of_file} == of_file | {"peers": ("192.0.2.1",)}
    assert (found.key_file, found.multicast, found.datagram_bytes) == (Path("job.key"), True, 1300)


def test_options_are_stronger_than_the_environment_and_that_is_stronger_than_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, domain=7, interface="eth3", peers=["192.0.2.1"], key_file="job.key")
    monkeypatch.setenv("GRADBUS_BUS__DOMAIN", "8")
    monkeypatch.setenv("GRADBUS_BUS__INTERFACE", "eth4")
    found = settings_of(path, {"domain": 9, "peers": []}, Path("other.key"))
    assert (found.domain, found.interface, found.peers) == (9, "eth4", ())
    assert (found.security, found.key_file) == ("psk", Path("other.key"))


def test_doctors_meet_in_a_job_of_their_own_unless_an_option_names_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert settings_of(path, {}).job == JOB
    assert settings_of(path, {"job": "cells"}).job == "cells"


def test_a_configuration_without_protection_is_examined_and_its_faults_are_not_injected(tmp_path: Path) -> None:
    found = settings_of(write(tmp_path, security="none", faults="drop 1.0"), {})
    assert (found.security, found.insecure, found.faults) == ("none", True, "")


def test_an_option_that_a_bus_cannot_have_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bus\.network"):
        settings_of(write(tmp_path), {"network": "token-ring"})


@pytest.mark.usefixtures("network_by_document")
def test_the_timeouts_of_a_configuration_are_those_on_the_examined_bus(tmp_path: Path) -> None:
    path = write(tmp_path, lease_s=9.0)
    job = job_of(path).model_copy(update={"bus": settings_of(path, {"network": "network"})})
    assert "lease 9 s" in timeouts(job)[0].value
    assert (
        "lease 10 s"
        in timeouts(job_of(None).model_copy(update={"bus": settings_of(None, {"network": "network"})}))[0].value
    )
