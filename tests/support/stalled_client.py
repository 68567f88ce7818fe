"""A client of a relay, to be stopped: ``python stalled_client.py JSON`` subscribes, prints its id and waits."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

if __name__ == "__main__":  # this folder is for the import of helpers only
    sys.path.remove(str(Path(__file__).parent))

from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.session import open_session

KEY = "gradbus/1/cells/model/all/0"
MESSAGES = 12  # of 1 MiB

if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    session = open_session(LinkConfig(connect=tuple(spec["connect"]), lease_s=spec["lease_s"]))
    received = threading.Event()
    session.declare_subscriber(KEY, lambda _: received.set())
    while not received.is_set():  # by its own message: the relay knows the subscription
        session.put(KEY, b"first")
        received.wait(0.05)
    print(session.zid(), flush=True)
    threading.Event().wait(300)
