"""Controller and nodes without a bus: who is let in, and what is taken from whom."""

from __future__ import annotations

import gc
import itertools
import random
from types import FunctionType, ModuleType

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from joining_hall import CONTROL, JOB, LIST, ONE, SERVER, STRANGER, TWO, UPDATES, Hall, stamped, upload

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity import admission, handshake, join_client, key_messages
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.allow_list import ROLES, WITH_IDS, AllowList, Entry, Role
from gradbus.runtime.security.identity.handshake import Stamps
from gradbus.runtime.security.identity.join_client import ASK_S, JoinClient
from gradbus.runtime.security.identity.join_messages import JOIN_TOPIC, VERSION, Beacon, JoinHello, JoinWelcome, parse
from gradbus.runtime.security.identity.key import NodeKey
from gradbus.runtime.security.identity.key_messages import COMMANDS, MODELS
from gradbus.runtime.security.identity.membership import ControllerMembership
from gradbus.runtime.security.rate_limits import REFUSED_NAME_S
from gradbus.runtime.security.streams import OutboundStreams, SharedKey
from gradbus.runtime.transport.sample_layout import FRAME
from gradbus.runtime.wire import control, frames


def test_members_and_controller_understand_each_other_and_nobody_else() -> None:
    hall = Hall(ONE, TWO)
    one, two = hall.nodes
    assert set(hall.controller.members) == {"robot-1", "robot-2"}
    assert hall.wrong == []
    update = upload(one, b"update")
    assert hall.taken(UPDATES, update) == "robot-1: update"
    assert hall.taken(UPDATES, update) == "replay"
    assert hall.heard(two, CONTROL, upload(one, b"hello", CONTROL)) == "not for it"
    assert hall.heard(two, UPDATES, update) == "not for it"
    for topic in (COMMANDS, MODELS, CONTROL):
        data = hall.tell(topic, b"to all")
        again = "to all" if topic == MODELS else "replay"  # a frame that came twice changes nothing
        assert [hall.heard(node, topic, data) for node in (one, two, two)] == ["to all", "to all", again]
    data = hall.tell(CONTROL, b"to one", to=2)
    assert [hall.heard(node, CONTROL, data) for node in (one, two, one)] == ["to one", "not for it", "replay"]
    assert hall.controller.seal(CONTROL, (b"x",), 5) is None


def test_an_update_cannot_be_made_by_another_client_nor_moved_to_another_topic_or_direction() -> None:
    hall = Hall(ONE, TWO)
    one, two = hall.nodes
    assert two.keys is not None
    theirs = OutboundStreams(two.keys.outgoing.key, one.session)  # its own key, and the other's session
    assert hall.taken(UPDATES, bytes(theirs.encryptor(UPDATES).seal((b"x",)))) == "unknown sender"
    group = hall.controller.group.key  # which both have
    for session in (one.session, two.session, hall.controller.session):
        forged = bytes(OutboundStreams(group, session).encryptor(UPDATES).seal((b"x",)))
        assert hall.taken(UPDATES, forged) in ("no key", "its own")
    update = upload(one, b"update")
    assert hall.taken(CONTROL, update) == "tag"
    for bit in random.Random(0).sample(range(8 * len(update)), 200):
        changed = bytearray(update)
        changed[bit // 8] ^= 1 << bit % 8
        assert hall.taken(UPDATES, bytes(changed)) not in ("robot-1: update", "its own")
    assert hall.taken(UPDATES, update) == "robot-1: update"
    assert hall.heard(one, CONTROL, upload(one, b"back", CONTROL)) == "not for it"


def entry(key: NodeKey, role: Role = "client", ids: tuple[tuple[int, int], ...] = ((0, 0),)) -> AllowList:
    return AllowList((Entry(key.name, role, key.public, ids if role in WITH_IDS else ()),))


@pytest.mark.parametrize(
    ("allowed", "role", "pinned", "why"),
    [
        (LIST, "client", SERVER, "stranger is not on the allow list of the controller"),
        (entry(NodeKey("stranger", ONE.private)), "client", SERVER, "the allow list of the controller has another key"),
        (entry(STRANGER, "observer"), "client", SERVER, "on the allow list as observer, and wants to join as client"),
        (entry(STRANGER, "worker"), "client", SERVER, "is on the allow list as worker"),
        (entry(STRANGER, "worker"), "worker", SERVER, "and this is a federated run, which has no ranks"),
        (entry(STRANGER, "controller"), "controller", SERVER, "is on the allow list as controller"),
        (entry(STRANGER), "client", TWO, "expects another key of the controller, here it is ed25519:"),
    ],
)
def test_who_is_not_let_in_leaves_nothing_behind_and_both_sides_know_why(
    allowed: AllowList, role: Role, pinned: NodeKey, why: str
) -> None:
    hall = Hall(allowed=allowed)
    told: list[str] = []
    hall.controller.events.refused = lambda name, text: told.append(text)
    node = JoinClient(JOB, STRANGER, pinned.public, role)
    hall.nodes.append(node)
    hall.meet(node)
    assert any(why in text for text in told)
    assert "stranger" not in hall.controller.members
    assert not hall.controller.is_busy
    assert node.keys is None
    if pinned is SERVER:
        assert why in node.refusal
    else:
        assert "compare bus.controller_key with 'gradbus keys show'" in node.misconfiguration
        assert not node.refusal
    for _ in range(20):
        hall.later(1.0)
    assert node.seal(UPDATES, (b"x",)) is None


def test_a_member_that_sends_as_a_client_that_is_not_its_own_is_told_so_and_the_log_only_now_and_then() -> None:
    hall, told = Hall(ONE, TWO), []
    hall.controller.events.refused = lambda name, text: told.append((name, text))
    one = hall.controller.members["robot-1"].entry
    why = "robot-1 sends as client 8, and the allow list of the controller gives it 0-3"
    for _ in range(20):
        hall.controller.refuse_sender(one, 8, hall.now_s)
    hall.later(0.1)
    assert told == [("robot-1", why)]
    assert [node.refusal for node in hall.nodes] == [why, ""]
    said = len(hall.said)
    hall.later(0.1)
    assert len(hall.said) == said, "it is told once"
    hall.later(REFUSED_NAME_S)
    hall.controller.refuse_sender(one, 8, hall.now_s)
    assert told == [("robot-1", why)] * 2


def test_a_hello_in_the_name_of_another_costs_no_check_and_no_memory_and_takes_nothing_from_it() -> None:
    hall = Hall()
    one = JoinClient(JOB, ONE, SERVER.public, "client")
    (hello,) = one.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)
    for number in range(2000):
        forged = bytearray(hello)
        forged[-1 - number % 80] ^= 1 + number // 80
        with pytest.raises(FrameError) as caught:
            hall.controller.receive(memoryview(forged), hall.now_s)
        assert caught.value.reason == "stamp"
    assert not hall.controller.is_busy
    assert hall.controller.receive(memoryview(hello), hall.now_s)


def test_hellos_of_strangers_are_checked_within_bounds_and_take_nothing_from_those_on_the_list() -> None:
    hall = Hall()
    stranger = JoinClient(JOB, STRANGER, SERVER.public, "client")
    (hello,) = stranger.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)
    reasons = []
    for number in range(admission.OTHERS_AT_ONCE + 50):
        forged = bytearray(hello)
        forged[-17 - number % 64] ^= 1 + number // 64
        with pytest.raises(FrameError) as caught:
            hall.controller.receive(memoryview(forged), hall.now_s)
        reasons.append(caught.value.reason)
    assert set(reasons[: admission.OTHERS_AT_ONCE]) == {"signature"}
    assert set(reasons[admission.OTHERS_AT_ONCE :]) == {"busy"}
    hall.nodes.append(JoinClient(JOB, ONE, SERVER.public, "client"))
    hall.meet(hall.nodes[0])
    assert hall.nodes[0].keys is not None
    assert not hall.controller.is_busy


def test_a_node_on_the_list_that_has_turned_uses_up_no_more_than_its_own_share_of_checks() -> None:
    hall = Hall()
    turned = JoinClient(JOB, TWO, SERVER.public, "client")
    (hello,) = turned.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)
    reasons = []
    for number in range(admission.SHARE_AT_ONCE + 10):
        forged = stamped(TWO, hello[:-80] + number.to_bytes(64, "little"))  # it can make stamps, and need not sign
        with pytest.raises(FrameError) as caught:
            hall.controller.receive(memoryview(forged), hall.now_s)
        reasons.append(caught.value.reason)
    assert reasons == ["signature"] * admission.SHARE_AT_ONCE + ["busy"] * 10
    hall.nodes.append(JoinClient(JOB, ONE, SERVER.public, "client"))
    hall.meet(hall.nodes[0])
    assert hall.nodes[0].keys is not None


def test_welcomes_that_others_make_up_do_not_keep_a_node_from_taking_the_true_one() -> None:
    hall = Hall()
    node = JoinClient(JOB, ONE, SERVER.public, "client")
    (first,) = node.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)
    (former,) = hall.controller.receive(memoryview(first), hall.now_s)  # which is recorded, and comes too late
    hall.now_s += 1.0
    (hello,) = node.tick(hall.now_s)
    (welcome,) = hall.controller.receive(memoryview(hello), hall.now_s)
    for number in range(4 * join_client.CHECKS_AT_ONCE):
        forged = former if number % 2 else welcome[:-80] + number.to_bytes(80, "little")
        with pytest.raises(FrameError, match="not made with the key"):
            node.receive(memoryview(forged), hall.now_s)
    assert len(node.receive(memoryview(welcome), hall.now_s)) == 1


def test_beacons_that_one_writer_makes_up_do_not_hide_that_of_the_controller() -> None:
    hall = Hall()
    node = JoinClient(JOB, ONE, SERVER.public, "client")
    for number in range(4 * join_client.CHECKS_AT_ONCE):
        forged = handshake.signed(JOB, STRANGER, Beacon(number.to_bytes(16, "little"), number, SERVER.public))
        with pytest.raises(FrameError):
            node.receive_beacon(memoryview(forged), 99, hall.now_s)
    assert len(node.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)) == 1


def test_recordings_of_hellos_are_answered_once_and_few_wait_for_their_confirm() -> None:
    hall = Hall()
    recorded = []
    for _ in range(10):
        node = JoinClient(JOB, ONE, SERVER.public, "client")
        recorded += node.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)
    for hello in recorded:
        assert hall.controller.receive(memoryview(hello), hall.now_s)
        with pytest.raises(FrameError, match="received before"):
            hall.controller.receive(memoryview(hello), hall.now_s)
    assert len(hall.controller._pending) == admission.MAX_PENDING_EACH  # noqa: SLF001 - their memory is meant
    hall.later(admission.PENDING_S + 0.1)
    assert not hall.controller.is_busy
    assert hall.controller.members == {}


def test_a_recording_of_a_whole_joining_and_of_a_round_is_worth_nothing() -> None:
    hall = Hall(ONE)
    one = hall.nodes[0]
    said = [*hall.said, upload(one, b"update"), upload(one, b"hello", CONTROL)]
    told = [hall.tell(COMMANDS, b"go"), hall.tell(MODELS, b"model"), hall.tell(CONTROL, b"all")]
    for data in said[-2:]:
        hall.taken(UPDATES if data is said[-2] else CONTROL, data)
    keys, session = one.keys, hall.controller.members["robot-1"].session
    for data in hall.said:
        for party in (hall.controller, one):
            try:
                party.receive(memoryview(data), hall.now_s)
            except FrameError as error:
                assert error.reason in {"replay", "signature", "unknown sender"}  # noqa: PT017 - most raise nothing
    assert one.keys is keys
    assert hall.controller.members["robot-1"].session == session
    assert hall.taken(UPDATES, said[-2]) == hall.taken(CONTROL, said[-1]) == "replay"
    again = Hall(ONE)  # the next start of the controller, and of the node
    for data in said:
        try:
            again.controller.receive(memoryview(data), again.now_s)
        except FrameError as error:
            assert error.reason in {"replay", "no key", "join"}  # noqa: PT017 - what is for others raises nothing
    assert again.taken(UPDATES, said[-2]) == again.taken(CONTROL, said[-1]) == "no key"
    assert [
        again.heard(again.nodes[0], topic, data) for topic, data in zip(key_messages.TOPICS, told, strict=True)
    ] == ["no key"] * 3


def test_a_node_that_was_restarted_replaces_its_former_start_whose_envelopes_die() -> None:
    hall = Hall(ONE)
    old = hall.nodes.pop()
    new = JoinClient(JOB, ONE, SERVER.public, "client")
    new.start = old.start + 1
    hall.nodes.append(new)
    hall.meet(new)
    assert hall.taken(UPDATES, upload(old, b"x")) == "no key"
    assert hall.taken(UPDATES, upload(new, b"x")) == "robot-1: x"
    older = JoinClient(JOB, ONE, SERVER.public, "client")  # a second process with the same key file
    older.start = old.start - 1
    hall.nodes.append(older)
    hall.meet(older)
    hall.later(1.0)
    assert not older.refusal  # the other one may have died
    assert hall.taken(UPDATES, upload(new, b"y")) == "robot-1: y"
    hall.later(1.0)
    assert "started later: one process, one key" in older.refusal
    hall.now_s += admission.SILENT_S + 1
    late = JoinClient(JOB, ONE, SERVER.public, "client")  # the other one is gone, and the clock was set back
    late.start = 1
    hall.nodes = [late]
    hall.meet(late)
    assert late.keys is not None


def test_a_node_that_was_killed_and_starts_again_by_a_clock_that_was_set_back_is_admitted() -> None:
    hall = Hall(ONE)
    killed = hall.nodes.pop()
    again = JoinClient(JOB, ONE, SERVER.public, "client")
    again.start = killed.start - 1
    hall.nodes.append(again)
    hall.meet(again)
    for _ in range(12):
        hall.later(0.5)
        hall.meet(again)
    assert not again.refusal
    assert hall.taken(UPDATES, upload(again, b"x")) == "robot-1: x"


def test_of_two_processes_with_one_key_file_the_earlier_one_is_told_that_it_is_out() -> None:
    hall = Hall(ONE)
    earlier = hall.nodes[0]
    later = JoinClient(JOB, ONE, SERVER.public, "client")
    later.start = earlier.start + 1
    hall.nodes.append(later)
    hall.meet(later)
    assert earlier.refusal == "robot-1 has joined with another process: one process, one key"
    assert not later.refusal
    attempt = hall.controller.members["robot-1"].attempt
    hall.controller.events.joined = lambda name, role: pytest.fail("it is the same process")
    later.lacks_key = True  # it joins anew, and stays in
    hall.later(3.0)
    assert hall.controller.members["robot-1"].attempt == attempt + 1
    assert not later.refusal
    assert hall.taken(UPDATES, upload(later, b"x")) == "robot-1: x"


def test_a_node_that_is_made_to_think_that_it_lacks_a_key_asks_less_and_less_often() -> None:
    hall = Hall(ONE)
    one = hall.nodes[0]
    member = hall.controller.members["robot-1"]
    asked_s, attempt = [], member.attempt
    while len(asked_s) < 6:
        one.note_lack()
        hall.later(0.5)
        if hall.controller.members["robot-1"].attempt != attempt:
            attempt = hall.controller.members["robot-1"].attempt
            asked_s.append(hall.now_s)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked_s)]
    for pause, least in zip(pauses, (4.0, 8.0, 16.0, 16.0, 16.0), strict=True):
        assert least <= pause < least + 2.0
    hall.controller.rotation.begin({"robot-1"}, hall.now_s, "a test")
    hall.later(1.0)
    one.note_lack()
    asked_s.append(hall.now_s)
    hall.later(ASK_S + 1.0)
    assert hall.controller.members["robot-1"].attempt == attempt + 1


def test_a_controller_that_was_restarted_is_joined_at_once_and_its_former_start_forgotten() -> None:
    hall = Hall(ONE)
    one = hall.nodes[0]
    former = hall.controller
    hall.controller = Admission(JOB, SERVER, LIST, now_s=hall.now_s)
    beacon = memoryview(hall.controller.beacon)
    assert one.receive_beacon(beacon, 2, hall.now_s) == []  # the former one still talks, as far as it knows
    hall.pass_on(one.tick(hall.now_s + 0.2, lambda source: source == 2), one)  # DDS has lost it
    assert one.keys is not None
    assert one.keys.controller == hall.controller.session
    assert hall.taken(UPDATES, upload(one, b"x")) == "robot-1: x"
    said = former.seal(COMMANDS, (b"go",), None)
    assert said is not None
    assert hall.heard(one, COMMANDS, said.octets()) == "no key"
    assert hall.heard(one, COMMANDS, hall.tell(COMMANDS, b"go")) == "go"
    assert hall.controller.group.key.key_id != former.group.key.key_id


def test_a_second_controller_hears_who_holds_the_job_and_the_first_goes_on() -> None:
    hall = Hall(ONE)
    second = Admission(JOB, SERVER, LIST, label="desk:2", now_s=hall.now_s)
    second.start = hall.controller.start + 1
    (probe,) = second.receive(memoryview(hall.controller.beacon), hall.now_s)
    (refusal,) = hall.controller.receive(memoryview(probe), hall.now_s)
    assert second.receive(memoryview(refusal), hall.now_s) == []
    assert second.refusal == "the job is held by the controller desk:1"
    assert hall.controller.receive(memoryview(second.beacon), hall.now_s) == []
    assert not hall.controller.refusal
    assert hall.nodes[0].receive_beacon(memoryview(second.beacon), 2, hall.now_s) == []


def test_what_a_controller_says_to_one_is_sealed_for_that_one_without_being_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hall = Hall(ONE, TWO)
    member = ControllerMembership(hall.controller)
    monkeypatch.setattr(control, "decode", lambda data: pytest.fail("a join, a CRC and a check of what is known"))

    def heard(body: control.Body) -> list[bool]:
        key = frames.FrameKey(frames.Kind.CONTROL, 0, 0, frames.CONTROLLER, 1, 1)
        ((head, data),) = frames.split(key, control.encode(body))
        sealed = member.encrypt(CONTROL, (FRAME.prefix(len(head) + len(data)), head, data))
        assert sealed is not None
        opened = [node.open(CONTROL, sealed.octets(), hall.now_s) for node in hall.nodes]
        return [plain is not None and bytes(data) in bytes(plain) for plain in opened]

    assert heard(control.Receipt(7, 1, 1, 1, 1, True, "")) == [False, True]
    assert heard(control.Refused(0, 1, "no")) == [True, False]
    assert heard(control.RunEnded(1, True, "done")) == [True, True]


def test_another_level_of_security_is_told_of() -> None:
    hall = Hall(ONE)
    psk = bytes(OutboundStreams(SharedKey(JOB, envelope.PSK, 0, bytes(32)), bytes(16)).encryptor(CONTROL).seal((b"x",)))
    assert hall.taken(CONTROL, psk) == hall.heard(hall.nodes[0], CONTROL, psk) == "other level"
    assert hall.taken(CONTROL, b"AG2\0" + bytes(100)) == "not sealed"


def test_a_welcome_is_taken_once_and_only_for_the_hello_that_it_answers() -> None:
    hall = Hall()
    one = JoinClient(JOB, ONE, SERVER.public, "client")
    (hello,) = one.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)
    (welcome,) = hall.controller.receive(memoryview(hello), hall.now_s)
    message, asked = parse(memoryview(welcome)).message, parse(memoryview(hello))
    assert isinstance(message, JoinWelcome)
    forged, _ = handshake.answer(
        JOB, TWO, asked, session=message.session, start=message.start, epoch=1, nonce=bytes(32)
    )
    with pytest.raises(FrameError, match="not made with the key"):
        one.receive(memoryview(Stamps(JOB, TWO).stamped(forged, ONE.public, asked)), hall.now_s)
    with pytest.raises(FrameError, match="not signed with the key"):  # the server stamps what it has not signed
        one.receive(memoryview(Stamps(JOB, SERVER).stamped(forged, ONE.public, asked)), hall.now_s)
    assert len(one.receive(memoryview(welcome), hall.now_s)) == 1
    with pytest.raises(FrameError, match="second welcome"):
        one.receive(memoryview(welcome), hall.now_s)
    other = asked.message
    assert isinstance(other, JoinHello)
    assert ROLES[other.role] == "client"


def test_bytes_on_the_topic_of_joining_that_are_none_are_counted_and_nothing_more() -> None:
    hall = Hall(ONE)
    rng = random.Random(1)
    for _ in range(300):
        data = rng.choice((b"GBJ\0" + bytes([VERSION]), b"GBS\0\1\3", b"")) + rng.randbytes(rng.randrange(400))
        for party in (hall.controller, hall.nodes[0]):
            try:
                assert party.receive(memoryview(data), hall.now_s) == []
            except FrameError as error:
                assert error.reason  # noqa: PT017 - what is for others raises nothing
    assert JOIN_TOPIC not in hall.controller.group._encryptors  # noqa: SLF001 - what is left of it shows nowhere else


def everything_in(root: object) -> list[object]:
    """All objects that it leads to, but for what the program consists of."""
    seen: dict[int, object] = {}
    queue = [root]
    while queue:
        one = queue.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen[id(one)] = one
            queue += gc.get_referents(one)
    return list(seen.values())


def test_the_keys_of_an_exchange_are_gone_as_soon_as_it_has_been_used() -> None:
    hall = Hall()
    node = JoinClient(JOB, ONE, SERVER.public, "client")
    (hello,) = node.receive_beacon(memoryview(hall.controller.beacon), 1, hall.now_s)
    (private,) = (one for one in everything_in(node) if isinstance(one, X25519PrivateKey))
    (welcome,) = hall.controller.receive(memoryview(hello), hall.now_s)
    assert not [one for one in everything_in(hall.controller) if isinstance(one, X25519PrivateKey)]
    said = parse(memoryview(welcome)).message
    assert isinstance(said, JoinWelcome)
    shared = private.exchange(X25519PublicKey.from_public_bytes(said.ephemeral))
    (confirm,) = node.receive(memoryview(welcome), hall.now_s)
    assert not [one for one in everything_in(node) if isinstance(one, X25519PrivateKey)]
    with pytest.raises(FrameError, match="a second welcome"):
        node.receive(memoryview(welcome), hall.now_s)
    (handed,) = hall.controller.receive(memoryview(confirm), hall.now_s)
    node.receive(memoryview(handed), hall.now_s)
    assert node.keys is not None
    for party in (node, hall.controller):
        left = everything_in(party)
        assert not [one for one in left if isinstance(one, X25519PrivateKey | handshake.Secrets)]
        assert shared not in left


def test_each_of_two_earlier_processes_with_the_key_of_a_live_one_is_refused_once_that_one_is_heard() -> None:
    hall = Hall(ONE)
    live = hall.nodes[0]
    twins = [JoinClient(JOB, ONE, SERVER.public, "client") for _ in range(2)]
    for number, twin in enumerate(twins, 1):
        twin.start = live.start - number
        hall.nodes.append(twin)
        hall.meet(twin)
    for _ in range(8):
        hall.later(0.25)
        assert hall.taken(UPDATES, upload(live, b"x")) == "robot-1: x"
    assert all("started later: one process, one key" in twin.refusal for twin in twins)
    assert not live.refusal
