"""Federated runs of real processes that seal what they send, and a process without the key among them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from federation import NOBODY_DIES_S, Federation
from outsider import Outsider

from gradbus.runtime.security.job_key import new_job_key, write_secret_file

pytestmark = pytest.mark.slow

_NETWORK = {"shared_memory": False}  # so that all of it is on the bus
_RULES: dict[str, Any] = {"rounds": 3, "clients__num": 2, "codec": "s4"}


@pytest.fixture
def key(tmp_path: Path) -> str:
    write_secret_file(tmp_path / "key", new_job_key().text)
    return str(tmp_path / "key")


def sealed(key: str) -> dict[str, Any]:
    return {"level": "psk", "key_file": key}


def run(federation: Federation) -> tuple[list[int], dict[str, int]]:
    """The checksums of the weights after each round, and what the controller rejected."""
    controller = federation.controller(**_RULES)
    clients = [federation.client(0), federation.client(1)]
    done = controller.wait_for("done", timeout_s=60.0)
    assert [node.wait() for node in (controller, *clients)] == [0, 0, 0]
    assert [report["clients"] for report in done["reports"]] == [[0, 1]] * 3
    return [report["weights_crc32"] for report in done["reports"]], done["rejected"]


def test_an_outsider_neither_reads_nor_disturbs_a_sealed_run_nor_does_what_it_replays_in_the_next(
    key: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S, network=_NETWORK) as federation:
        quiet, _ = run(federation)
    domain, job = new_domain(), f"sealed-run-{os.getpid()}"
    place: dict[str, Any] = {"domain": domain, "job": job, "silence_s": NOBODY_DIES_S}
    with Outsider(job, domain, echoes=True, lease_s=NOBODY_DIES_S) as outsider:
        with Federation(**place, network=_NETWORK, security=sealed(key)) as federation:
            weights, rejected = run(federation)
        assert weights == quiet
        assert outsider.in_clear == []
        names = {name for name, _ in outsider.heard}
        assert names >= {
            "train/train_cmd_sealed",
            "train/client_update",
            "train/model_blob",
            "train/control/controller",
        }
        assert rejected["replay"] > 0
        assert rejected["tag"] > 0
        recorded = list(outsider.heard)
    with Outsider(job, domain, lease_s=NOBODY_DIES_S) as outsider:  # the same job again, with the same key
        with Federation(**place, network=_NETWORK, security=sealed(key)) as federation:
            controller = federation.controller(**_RULES)
            outsider.wait_for_readers(1)
            outsider.say_all(recorded)
            clients = [federation.client(number, hold={"2": str(gate)}) for number in range(2)]
            for client in clients:
                client.wait_for("training", round=2)
            outsider.say_all(recorded)
            gate.touch()
            done = controller.wait_for("done", timeout_s=60.0)
            assert [node.wait() for node in (controller, *clients)] == [0, 0, 0]
        assert [report["weights_crc32"] for report in done["reports"]] == quiet
        assert done["rejected"]["replay"] > 0


def test_with_another_key_both_sides_say_what_to_compare(key: str, tmp_path: Path) -> None:
    write_secret_file(tmp_path / "other", new_job_key().text)
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S) as federation:
        # Neither hears the other before both are there, and one may be there for seconds before the other is.
        controller = federation.controller(rounds=1, clients__start_timeout_s=5.0, security=sealed(key))
        client = federation.client(0, security=sealed(str(tmp_path / "other")), client={"controller_timeout_s": 5.0})
        for node in (controller, client):
            error = node.wait_for("error")
            assert error["kind"] == "BarrierTimeout"
            assert "has another job key" in error["text"]
            assert "Compare 'gradbus keys show' where each of them runs" in error["text"]


def test_a_key_file_that_others_can_read_is_refused(key: str) -> None:
    Path(key).chmod(0o644)
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S) as federation:
        error = federation.client(0, security=sealed(key)).wait_for("error")
    assert error["kind"] == "ConfigError"
    assert "has mode 0644" in error["text"]
    assert f"chmod 600 {key}" in error["text"]
