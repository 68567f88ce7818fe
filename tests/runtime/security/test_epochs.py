"""What the controller says to all, without a bus: its signatures, and what a new epoch means."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from identities import Identities
from joining_hall import CONTROL, JOB, LIST, ONE, SERVER, TWO, UPDATES, Hall, upload

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import Security
from gradbus.runtime.security.identity import key_epoch
from gradbus.runtime.security.identity.admission import SILENT_S, Admission
from gradbus.runtime.security.identity.allow_list import Role, without
from gradbus.runtime.security.identity.controller_signatures import check_model, check_payload, sign_model
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.key_messages import COMMANDS, MODELS
from gradbus.runtime.security.identity.membership import ControllerMembership, RankMembership
from gradbus.runtime.security.identity.opening import identity_membership
from gradbus.runtime.security.streams import OutboundStreams, StreamEncryptor
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind


def test_a_member_cannot_say_what_only_the_controller_may_say() -> None:
    hall = Hall(ONE, TWO)
    one, two = hall.nodes
    key = hall.controller.group.key
    forger = OutboundStreams(key, hall.controller.session)  # as if it were the controller
    for topic in (COMMANDS, CONTROL):
        genuine = hall.tell(topic, b"word")
        assert hall.heard(one, topic, genuine) == "word"
        signed = hall.controller.group.key
        assert signed is key
        forged = forger.encryptor(topic)
        for _ in range(3):  # counters that the controller has not used yet
            forged.seal((b"skipped",))
        assert hall.heard(one, topic, bytes(forged.seal((b"x" * 100,)))) == "signature"
        assert hall.heard(one, topic, bytes(forged.seal((b"short",)))) == "signature"
        replayed = two.open(topic, genuine, hall.now_s)
        assert replayed is not None
        whole = bytes(replayed) + (1000).to_bytes(8, "little") + bytes(64)
        assert hall.heard(two, topic, bytes(forged.seal((whole,)))) == "signature"


def test_what_the_controller_has_signed_once_cannot_be_said_again_by_a_member() -> None:
    hall = Hall(ONE)
    one = hall.nodes[0]
    assert one.keys is not None
    sample = hall.controller.signer.signed(CONTROL, (b"the run is over",))
    forger = OutboundStreams(hall.controller.group.key, hall.controller.session).encryptor(CONTROL)
    assert hall.heard(one, CONTROL, bytes(forger.seal(sample))) == "the run is over"
    assert hall.heard(one, CONTROL, bytes(forger.seal(sample))) == "replay"
    late = JoinClient(JOB, TWO, SERVER.public, "client")
    hall.nodes.append(late)
    hall.meet(late)
    for _ in range(5):
        forger.seal((b"skipped",))
    assert hall.heard(late, CONTROL, bytes(forger.seal(sample))) == "replay"  # from before it came
    assert hall.heard(late, COMMANDS, bytes(hall.tell(COMMANDS, b"new"))) == "new"


@pytest.mark.parametrize("counter", [1 << 31, (1 << 32) + 5, 1 << 40])
@pytest.mark.parametrize("topic", [COMMANDS, CONTROL, MODELS])
def test_a_member_keeps_nobody_out_with_an_envelope_of_a_high_counter(topic: str, counter: int) -> None:
    hall = Hall(ONE, TWO)
    one, two = hall.nodes
    forged = StreamEncryptor(hall.controller.group.key, hall.controller.session, topic, start=counter).seal(
        (b"x" * 200,)
    )
    assert hall.heard(two, topic, forged) in {"signature", "x" * 200, "counter"}
    said = hall.tell(topic, b"honest")
    assert [hall.heard(node, topic, said) for node in (one, two)] == ["honest", "honest"]
    again = JoinClient(JOB, TWO, SERVER.public, "client")
    hall.nodes.append(again)
    hall.meet(again)
    assert hall.heard(again, topic, hall.tell(topic, b"still honest")) == "still honest"


def test_a_model_counts_only_with_the_controllers_signature_over_all_that_it_is() -> None:
    hall = Hall(ONE)
    keys = hall.nodes[0].keys
    assert keys is not None
    payload = os.urandom(100_000)
    key = FrameKey(Kind.MODEL, 5, 3, CONTROLLER, 9, 2)
    name = sign_model(JOB, SERVER, hall.controller.session, keys.epoch, key, 1, payload)
    signed = key._replace(name=name)

    def check(
        public: bytes = SERVER.public,
        session: bytes = keys.controller,
        newest: int = keys.epoch,
        key: FrameKey = signed,
        flags: int = 1,
        payload: bytes = payload,
        job: str = JOB,
    ) -> None:
        check_model(job, public, session, newest, key, flags, len(payload))
        check_payload(key, payload)

    check()
    changed = bytearray(payload)
    changed[500] ^= 1
    for wrong in (
        {"payload": bytes(changed)},
        {"payload": payload[:-1]},
        {"flags": 0},
        {"job": "other"},
        {"public": ONE.public},
        {"session": bytes(16)},
        {"newest": keys.epoch - 1},
        {"key": key},
        {"key": signed._replace(round_id=4)},
        {"key": signed._replace(job=6)},
        {"key": signed._replace(transfer=3)},
        {"key": signed._replace(incarnation=8)},
        {"key": signed._replace(name=name[:-1])},
        {"key": signed._replace(name="0" * 8 + name[8:])},
        {"key": signed._replace(name=name[:8] + hashlib.sha256(changed).hexdigest() + name[72:]), "payload": changed},
        {"key": signed._replace(name=sign_model(JOB, ONE, hall.controller.session, keys.epoch, key, 1, payload))},
    ):
        with pytest.raises(FrameError) as caught:
            check(**wrong)  # type: ignore[arg-type]
        assert caught.value.reason == "signature"


def test_who_is_taken_off_the_list_is_told_so_and_cannot_read_on() -> None:
    hall = Hall(ONE, TWO)
    one, two = hall.nodes
    before = hall.controller.group.key
    hall.pass_on(hall.controller.allow(without(LIST, "robot-1"), hall.now_s), hall.controller)
    hall.later(0.0)
    assert hall.controller.group.key.epoch == before.epoch + 1
    assert "taken off the allow list" in one.refusal
    assert hall.taken(UPDATES, upload(one, b"x")) == "no key"
    data = hall.tell(COMMANDS, b"go")
    assert hall.heard(one, COMMANDS, data) == "no key"
    assert hall.heard(two, COMMANDS, data) == "go"
    hall.later(30.0)
    assert "robot-1" not in hall.controller.members


def test_what_was_sealed_in_the_former_epoch_is_taken_for_one_round_more() -> None:
    hall = Hall(ONE)
    one = hall.nodes[0]
    forms = [hall.tell(MODELS, b"model %d" % number) for number in range(3)]
    hall.controller.rotation.begin({"robot-1"}, hall.now_s, "a test")
    hall.later(0.1)
    hall.later(0.1)
    assert hall.heard(one, MODELS, forms[0]) == "model 0"
    assert hall.heard(one, COMMANDS, hall.tell(COMMANDS, b"go")) == "go"
    assert hall.heard(one, MODELS, forms[1]) == "model 1"
    assert hall.heard(one, COMMANDS, hall.tell(COMMANDS, b"go on")) == "go on"
    assert hall.heard(one, MODELS, forms[2]) == "no key"
    assert hall.heard(one, MODELS, hall.tell(MODELS, b"new")) == "new"


def test_a_new_epoch_waits_for_members_that_have_not_got_its_key_but_not_for_ever() -> None:
    hall = Hall(ONE, TWO)
    one, two = hall.nodes
    hall.nodes = [one]  # the other one hears nothing
    before = hall.controller.group
    hall.now_s += key_epoch.EPOCH_S + 1
    hall.later(0.0)
    assert hall.controller.group is before
    assert hall.heard(two, COMMANDS, hall.tell(COMMANDS, b"go")) == "go"
    hall.later(key_epoch.SWITCH_S + 0.1)
    assert hall.controller.group.key.epoch == before.key.epoch + 1
    assert hall.heard(two, COMMANDS, hall.tell(COMMANDS, b"go")) == "no key"
    hall.nodes.append(two)
    hall.later(0.3)  # and so it asks for it
    assert hall.heard(two, COMMANDS, hall.tell(COMMANDS, b"go")) == "go"
    assert hall.taken(UPDATES, upload(two, b"x")) == "robot-2: x"
    assert hall.taken(UPDATES, upload(one, b"x")) == "robot-1: x"


def written(hall: Hall, text: bytes) -> bytes:
    """A frame of a model that DDS has taken."""
    sealed = hall.controller.seal(MODELS, (text,), None)
    assert sealed is not None
    sealed.note_written()
    return sealed.octets()


def test_who_comes_late_takes_the_models_that_dds_retains_however_many_writes_it_has_refused() -> None:
    hall = Hall(ONE)
    ControllerMembership(hall.controller).retain(MODELS, 3)
    for late in (TWO, ONE):  # the latter is in the epoch that began after the writer was opened
        words = [b"0", b"1", b"2", b"3", b"4"]
        frames = [written(hall, word) for word in words]
        for _ in range(4):
            hall.tell(MODELS, b"refused by DDS, as the queue of a reader is full")
        node = JoinClient(JOB, late, SERVER.public, "client")
        hall.nodes = [node]
        hall.later(SILENT_S)
        hall.meet(node)
        assert [hall.heard(node, MODELS, frame) for frame in frames] == ["replay", "replay", "2", "3", "4"]
        before = hall.controller.group
        hall.controller.rotation.begin(set(hall.controller.members), hall.now_s, "a test")
        hall.later(key_epoch.SWITCH_S)
        hall.later(key_epoch.SWITCH_S)
        assert hall.controller.group is not before


def test_an_epoch_ends_before_its_counters_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_epoch, "EPOCH_FRAMES", 10)
    hall = Hall(ONE)
    before = hall.controller.group.key.epoch
    for _ in range(10):
        hall.tell(MODELS, b"x")
    hall.later(0.1)
    hall.later(0.1)
    assert hall.controller.group.key.epoch == before + 1


@pytest.mark.parametrize("role", ["client", "worker"])
def test_a_start_on_a_machine_that_has_been_up_for_days_changes_no_keys_until_a_day_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, role: Role
) -> None:
    up_s = 100 * key_epoch.EPOCH_S
    monkeypatch.setattr(time, "monotonic", lambda: up_s)
    security = Security(**Identities(tmp_path, clients=1).rank_security("server", 0, role=role, gives_keys=None))
    membership = identity_membership(JOB, security)
    assert isinstance(membership, ControllerMembership | RankMembership)
    controller = membership.party
    assert isinstance(controller, Admission)
    key = controller.group.key
    for passed_s in (1.0, 2.0, key_epoch.EPOCH_S):
        controller.tick(up_s + passed_s)
        assert controller.group.key is key
    controller.tick(up_s + key_epoch.EPOCH_S + 1.0)
    assert controller.group.key.epoch == key.epoch + 1
