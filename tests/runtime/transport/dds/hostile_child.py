"""Opens a participant with each of the settings on stdin (JSON), in a child of its own each; prints what came of it.

By fork, before DDS has anything open: a new interpreter for each would take ten times as long.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

DEADLINE_S = 30
RUNS, REFUSED = 10, 11


def _look_up(name: str, port: None, family: int, kind: int) -> list[Any]:
    """Answer with the address that begins a name, as ``0.0.0.0.invalid``: there are servers that say so."""
    address = name.removesuffix(".invalid")
    if name != address and address[0].isdigit():
        return [(family, kind, 17, "", (address.replace("-", ":"), 0))]
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def _open(case: dict[str, Any], domain: int) -> int:
    from gradbus.runtime.errors import ConfigError
    from gradbus.runtime.network.network_config import NetworkConfig
    from gradbus.runtime.transport.dds.participant import Participant

    os.environ.pop("CYCLONEDDS_URI", None)
    if "document" in case:
        os.environ["CYCLONEDDS_URI"] = case["document"]
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in case["network"].items()}
    try:
        participant = Participant(
            domain_id=case.get("domain", domain), partition="hostile", network=NetworkConfig(**settings), fast=False
        )
        until_s = time.monotonic() + 0.05  # its threads begin
        while time.monotonic() < until_s:
            participant.look_around()
            time.sleep(0.01)
        participant.close()
    except ConfigError as error:
        os.write(2, f"{case}: {error}\n".encode(errors="replace"))
        return REFUSED
    return RUNS


def _outcome(case: dict[str, Any], domain: int) -> str:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(DEADLINE_S)
            code = _open(case, domain)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        return signal.Signals(-code).name
    return {RUNS: "runs", REFUSED: "ConfigError"}.get(code, f"exit code {code}")


if __name__ == "__main__":
    import gradbus.runtime.transport.dds.participant  # noqa: F401 - before the forks
    from gradbus.runtime import logs

    logs.configure()  # to stderr
    socket.getaddrinfo = _look_up
    given = json.load(sys.stdin)
    print(json.dumps([_outcome(case, given["domain"]) for case in given["cases"]]))  # noqa: T201 - for the test
