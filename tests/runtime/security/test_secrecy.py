"""Secrets stay out of logs and tracebacks."""

from __future__ import annotations

from joining_hall import JOB, ONE, SERVER, TWO, Hall

from gradbus.runtime.security.identity import key_messages
from gradbus.runtime.security.identity.join_client import JoinClient


def test_no_secret_is_in_what_objects_say_of_themselves() -> None:
    hall = Hall(ONE)
    late = JoinClient(JOB, TWO, SERVER.public, "client")
    (hello,) = late.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)
    (welcome,) = hall.controller.receive(memoryview(hello), hall.now_s)
    late.receive(memoryview(welcome), hall.now_s)  # both wait for the last step
    asked = late._asked  # noqa: SLF001 - secrets are nowhere else
    assert asked is not None
    assert asked.secrets is not None
    (waiting,) = hall.controller._pending.values()  # noqa: SLF001 - as above
    group = hall.controller.group.key
    handed = key_messages.parse(
        memoryview(key_messages.pack(key_messages.KeyGrant(group.epoch, group.secret, (1, 2, 3), (4, 5))))
    )
    said = repr([handed, group, waiting, *(vars(party) for party in (hall.controller, late, hall.nodes[0]))])
    for secrets in (asked.secrets, waiting.secrets):
        for secret in (secrets.up, secrets.down, secrets.confirm):
            assert repr(secret)[2:-1] not in said
    assert repr(group.secret)[2:-1] not in said
