"""A relay cannot read: neither the model of a federated run nor the key of its job is ever in its memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import marked_client
import pytest
from marked_client import MARKER, MarkedTask, place
from ports import kept_ports
from process_memory import found_in_memory
from relay_scene import RelayProcess, tls_arguments
from tls_scene import TlsFiles

import gradbus
from gradbus.runtime.security.job_key import new_job_key, write_secret_file

pytestmark = pytest.mark.slow

DIM = 262_144  # 1 MiB of weights
ROUNDS = 3
LIMIT_S = 100.0


def test_the_memory_of_a_relay_holds_no_model_and_no_key_and_that_of_a_client_both(tmp_path: Path) -> None:
    files, key = TlsFiles(tmp_path), new_job_key()
    write_secret_file(tmp_path / "job.key", key.text)
    needles = (MARKER, key.secret, key.secret.hex().encode())
    with kept_ports(1) as (port,):
        arguments = ["--listen", f"tls/127.0.0.1:{port}", "--http-port", "0", *tls_arguments(files, clients=False)]
        listen, environment = f"tls/localhost:{port}", {"GRADBUS_KEY": key.text.strip()}  # of a careless operator
        with RelayProcess(*arguments, listen=listen, environment=environment) as relay:
            relay.ready()
            spec = {"job": "secret", "relay": relay.listen, "ca": str(files.ca), "key_file": str(tmp_path / "job.key")}
            spec |= {"dim": DIM}
            client = subprocess.Popen([sys.executable, marked_client.__file__, json.dumps(spec)])
            try:
                of_relay, of_client = asyncio.run(_search(relay, client.pid, spec, needles))
                assert client.wait(LIMIT_S) == 0
            finally:
                client.kill()
                client.wait()
            carried = relay.counts()
    assert of_relay == [0, 0, 0], "model, key, key in hexadecimal digits"
    assert of_client[0] > 0, "the same search finds the model where it is"
    assert of_client[1] + of_client[2] > 0, "and the key"
    assert carried["received_bytes_total "] > (ROUNDS + 1) * 4 * DIM, "all of that went through the relay"


async def _search(
    relay: RelayProcess, client: int, spec: dict[str, object], needles: tuple[bytes, ...]
) -> tuple[list[int], list[int]]:
    """Run some rounds, and look into both processes before the last one. Returns what was found in each."""
    found: tuple[list[int], list[int]] = [], []
    async with asyncio.timeout(LIMIT_S), gradbus.connect(**place(dict(spec))) as bus:
        config = gradbus.FederatedConfig(rounds=ROUNDS, clients={"num": 1}, eval_every=0)
        async for report in gradbus.Controller(bus, MarkedTask(DIM), config).rounds():
            if report.round_id == ROUNDS - 1:
                await asyncio.to_thread(relay.wait_for, "session joined", 2, job=spec["job"])
                of_relay = await asyncio.to_thread(found_in_memory, relay.pid, needles)
                of_client = await asyncio.to_thread(found_in_memory, client, needles)
                found = of_relay, of_client
    return found
