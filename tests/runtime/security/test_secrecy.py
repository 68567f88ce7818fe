"""Secrets stay out of logs and tracebacks."""

from __future__ import annotations

from joining_hall import JOB, ONE, SERVER, TWO, Hall

from gradbus.runtime.security.identity import key_epoch
from gradbus.runtime.security.identity.join_client import Applicant


def test_no_secret_is_in_what_objects_say_of_themselves() -> None:
    hall = Hall(ONE)
    late = Applicant(JOB, TWO, SERVER.public, "client")
    (hello,) = late.hear_beacon(memoryview(hall.door.beacon), 1, hall.now_s)
    (welcome,) = hall.door.hear(memoryview(hello), hall.now_s)
    late.hear(memoryview(welcome), hall.now_s)  # both wait for the last step
    assert late._asked is not None
    assert late._asked.secrets is not None
    (waiting,) = hall.door._waiting.of(late.session)
    group = hall.door.group.key
    handed = key_epoch.parse(memoryview(key_epoch.pack(key_epoch.Handed(group.epoch, group.secret, (1, 2, 3), (4, 5)))))
    said = repr([handed, group, waiting, *(vars(party) for party in (hall.door, late, hall.nodes[0]))])
    for secrets in (late._asked.secrets, waiting.secrets):
        for secret in (secrets.up, secrets.down, secrets.confirm):
            assert repr(secret)[2:-1] not in said
    assert repr(group.secret)[2:-1] not in said
