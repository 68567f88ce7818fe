"""A process that takes part in a job over a relay, to be killed: ``python session_process.py JSON``."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # this folder is for the import of helpers only
    sys.path.remove(str(Path(__file__).parent))

from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.keys import session_token
from gradbus.runtime.transport.zenoh.session import open_session

OWNER = bytes(range(12))


@dataclass(frozen=True)
class SessionProcess:
    """The process, the id of its session, and the token by which that takes part."""

    process: subprocess.Popen[str]
    session: str
    token: str

    def kill(self) -> None:
        """End it as nobody can prevent: its kernel closes its connection."""
        self.process.kill()


@contextlib.contextmanager
def started(spec: Mapping[str, Any]) -> Iterator[SessionProcess]:
    """Start one, until the end of the block. ``spec``: the job, and ``connect`` and ``lease_s`` of a LinkConfig."""
    command = [sys.executable, __file__, json.dumps(spec)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            session, token = process.stdout.readline().split()
            yield SessionProcess(process, session, token)
        finally:
            process.kill()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    opened = open_session(LinkConfig(connect=tuple(given["connect"]), lease_s=given["lease_s"]))
    name = session_token(given["job"], str(opened.zid()), OWNER)
    shown = opened.liveliness().declare_token(name)
    print(opened.zid(), name, flush=True)
    threading.Event().wait(300)
