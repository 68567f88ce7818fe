"""An outsider without any key who wants to keep others from joining: ``join_flood.py JOB DOMAIN NAME PUBLIC_HEX``.

It knows a name of the allow list and the public key that belongs to it, which can be read on the bus. It sends Hellos
in that name and in names of its own, Welcomes and Refusals to whoever says Hello, and Beacons with the controller's
key, as fast as it can, until its stdin is closed. Then it prints how many of them went out.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from gradbus.runtime.errors import FrameError
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security.identity import handshake
from gradbus.runtime.security.identity.join_messages import (
    STAMP_BYTES,
    Beacon,
    JoinHello,
    JoinRefusal,
    JoinWelcome,
    Message,
    pack,
    parse,
)
from gradbus.runtime.security.identity.join_transport import BEACON, JOIN
from gradbus.runtime.security.identity.key import new_node_key
from gradbus.runtime.transport.dds.participant import Participant

FORGED = random.Random(0).randbytes(64 + STAMP_BYTES)  # signature and stamp


def forged(message: Message) -> bytes:
    return pack(message) + (FORGED if not isinstance(message, Beacon) else FORGED[:64])


def hellos_of_strangers(job: str, server: Beacon) -> list[bytes]:
    """With signatures that are right, of keys that nobody knows."""
    made = []
    for number in range(64):
        key = new_node_key(f"stranger-{number}")
        hello = JoinHello(
            os.urandom(16), server.session, 1, 1, os.urandom(32), os.urandom(32), key.public, server.public, 0, key.name
        )
        made.append(handshake.signed(job, key, hello) + FORGED[:STAMP_BYTES])
    return made


def said(job: str, server: Beacon, name: str, public: bytes, others: list[JoinHello]) -> Iterator[tuple[str, bytes]]:
    strangers = itertools.cycle(hellos_of_strangers(job, server))
    for number in itertools.count():
        some = number.to_bytes(16, "little")
        in_its_name = JoinHello(some, server.session, number, 1, bytes(32), bytes(32), public, server.public, 0, name)
        yield "hello", forged(in_its_name)
        yield "hello", next(strangers)
        yield "beacon", forged(Beacon(some, server.start + number, server.public))
        for other in others[-2:]:
            yield "welcome", forged(JoinWelcome(other.session, server.session, server.start, 1, bytes(32), bytes(32)))
            yield "refusal", forged(JoinRefusal(other.session, server.session, bytes(32), "no"))


def main() -> None:
    job, domain, name, public = sys.argv[1], int(sys.argv[2]), sys.argv[3], bytes.fromhex(sys.argv[4])
    node = Participant(domain_id=domain, partition=job, network=NetworkConfig(), fast=True)
    deaf = {topic.name: replace(topic, ignore_local=True) for topic in (JOIN, BEACON)}
    readers = [node.inlet(topic) for topic in deaf.values()]
    writers = {topic.name: node.outlet(replace(topic, retained=False)) for topic in deaf.values()}
    servers: list[Beacon] = []
    others: list[JoinHello] = []
    over = threading.Event()

    def listen() -> None:
        for reader in readers:
            for raw, _ in reader.take(64):
                try:
                    message = parse(memoryview(reader.decode(raw).data).cast("B")).message
                except FrameError:
                    continue
                if isinstance(message, Beacon):
                    servers.append(message)
                elif isinstance(message, JoinHello):
                    others.append(message)

    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not servers and not over.is_set():
        listen()
    sent: Counter[str] = Counter()
    for kind, data in said(job, servers[0], name, public, others):
        if over.is_set():
            break
        listen()
        with_it = writers[BEACON.name if kind == "beacon" else JOIN.name]
        if with_it.write((), (data,)):
            sent[kind] += 1
        if sum(sent.values()) == 1000:
            print("floods", flush=True)
    print(json.dumps(sent), flush=True)
    node.close()


if __name__ == "__main__":
    main()
