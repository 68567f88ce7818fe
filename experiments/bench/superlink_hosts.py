"""Flower's SuperLink and SuperNodes on hosts of their own: the same echo app as in :mod:`.flower`, over TLS.

The SuperLink, with the ServerApp, is on the host that the others can dial, and ``flwr run`` is on another one. So its
model passes one link less than one that a controller behind a firewall sends through a relay.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from gradbus.commands.lab.namespaces import Host
from gradbus.experiments.bench.flower import flower_environment, process, round_seconds, until_printed, write_app
from gradbus.experiments.bench.relay import TlsFolder

_CONFIG = """
[superlink]
default = "there"
[superlink.there]
address = "{address}"
root-certificates = "{ca}"
"""
_NODE_PORT = 9194


def superlink_rounds(
    files: TlsFolder, port: int, hosts: Sequence[Host], *, num_bytes: int, rounds: int, timeout_s: float
) -> list[float]:
    """Return the seconds of each round.

    Args:
        hosts: of the SuperLink, of ``flwr run``, and of the SuperNodes.

    Raises:
        RuntimeError: Flower has printed fewer rounds.
    """
    link_host, user_host, *node_hosts = hosts
    address = f"{link_host.address}:{port}"
    with tempfile.TemporaryDirectory(prefix="gradbus-superlink-") as name, ExitStack() as stack:
        folder = Path(name)
        app = write_app(folder)
        (folder / "config.toml").write_text(_CONFIG.format(address=address, ca=files.ca), encoding="utf-8")
        environment = flower_environment(folder)
        link = ["flower-superlink", "--disable-runtime-dependency-installation"]
        link += ["--host", link_host.address, "--port", str(port), "--ssl-ca-certfile", str(files.ca)]
        link += ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
        stack.enter_context(process(link, folder / "link.txt", environment, link_host.machine_prefix))
        until_printed(folder / "link.txt", "Uvicorn running")
        for number, host in enumerate(node_hosts):
            node = ["flower-supernode", "--superlink", address, "--root-certificates", str(files.ca)]
            node += ["--host", "127.0.0.1", "--port", str(_NODE_PORT)]
            node += ["--node-config", f"partition-id={number} num-partitions={len(node_hosts)}"]
            stack.enter_context(process(node, folder / f"node-{number}.txt", environment, host.machine_prefix))
        config = f"values={num_bytes // 4} rounds={rounds} nodes={len(node_hosts)}"
        command = ["flwr", "run", str(app), "there", "--stream", "--run-config", config]
        running = stack.enter_context(process(command, folder / "run.txt", environment, user_host.machine_prefix))
        running.wait(timeout_s)
        return round_seconds((folder / "run.txt").read_text(encoding="utf-8"), rounds)
