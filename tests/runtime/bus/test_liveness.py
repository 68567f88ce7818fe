"""Who is gone: what the kernel, the sender itself and DDS say, and how long a silence takes."""

from __future__ import annotations

from gradbus.runtime.bus.liveness import FOUND_AGAIN_S, LONGEST_TURN_S, Liveness, Reachability, WriterRegistry
from gradbus.runtime.transport import peer_processes
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import Control, PeerDisconnected, PeerGone

HERE, ELSEWHERE = "0123456789abcdef 5 7", "fedcba9876543210 5 7"
WRITER = 77
CHANNEL = "train/control/controller"
LEASE_S = 4.0
GONE = [PeerGone(3, 10)]


class World:
    """A liveness with a clock, and a kernel that knows the processes of one machine."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.now_s = 1000.0
        self.watched: list[str] = []
        self.stopped = False
        self.liveness = Liveness(lease_s, self._watch, self.watched.remove, lambda claim: self.stopped)
        self.liveness.look(self.now_s)

    def _watch(self, claim: str) -> bool:
        if claim != HERE:
            return False
        self.watched.append(claim)
        return True

    def says(self, claim: str, writer: int = WRITER, number: int = 1) -> None:
        self.liveness.received(writer, Control(3, 10, Leave("x"), number, claim), CHANNEL)

    def passes(self, seconds: float) -> list[PeerGone]:
        """Time in which the process listens."""
        gone: list[PeerGone] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(self.now_s + 0.5, until_s)
            gone += self.liveness.look(self.now_s)
        return gone


def test_the_kernel_tells_at_once_and_once() -> None:
    world = World()
    world.says(HERE)
    assert world.liveness.ended(HERE) == GONE
    assert world.watched == []
    world.liveness.departed([WRITER], CHANNEL)
    world.says(HERE)  # on its way for longer
    assert world.passes(100.0) == world.liveness.ended(HERE) == []


def test_a_process_of_this_machine_outlives_what_dds_says_and_is_found_again() -> None:
    world = World()
    world.says(HERE)
    world.liveness.departed([WRITER], CHANNEL)
    assert world.passes(FOUND_AGAIN_S - 1) == []
    world.says(HERE, writer=78, number=2)
    assert world.passes(100.0) == []
    assert world.liveness.ended(HERE) == GONE


def test_a_process_that_runs_and_is_not_found_again_has_left_the_bus_without_a_word() -> None:
    world = World()
    world.says(HERE)
    world.liveness.departed([WRITER], CHANNEL)
    assert world.passes(FOUND_AGAIN_S + 1) == GONE
    assert world.watched == []


def test_a_stopped_process_is_waited_for_without_end_and_has_time_when_it_goes_on() -> None:
    world = World()
    world.says(HERE)
    world.liveness.departed([WRITER], CHANNEL)
    world.stopped = True
    assert world.passes(1000.0 + FOUND_AGAIN_S - 1) == []
    world.stopped = False
    assert world.passes(FOUND_AGAIN_S - 1) == []
    assert world.passes(2.0) == GONE


def test_on_another_machine_a_goodbye_is_a_doubt_until_nothing_was_heard_for_a_lease() -> None:
    world = World()
    world.says(ELSEWHERE)
    assert world.passes(1.0) == []
    world.liveness.departed([WRITER], CHANNEL)  # by whomever
    assert world.passes(LEASE_S - 1.5) == []
    world.says(ELSEWHERE, writer=78, number=2)
    assert world.passes(100.0) == []


def test_on_another_machine_the_end_of_a_lease_counts_at_once() -> None:
    world = World()
    world.says(ELSEWHERE)
    assert world.passes(LEASE_S) == []  # DDS still knows it
    world.liveness.departed([WRITER], CHANNEL)
    assert world.passes(0.5) == GONE


def test_time_in_which_this_process_stood_still_is_no_silence_of_others() -> None:
    world = World()
    world.says(ELSEWHERE)
    world.now_s += 60.0  # stopped: the leases of all others have ended meanwhile, as DDS sees it
    assert world.liveness.look(world.now_s) == []
    world.liveness.departed([WRITER], CHANNEL)
    assert world.passes(LEASE_S - LONGEST_TURN_S - 0.5) == []
    world.says(ELSEWHERE, writer=78, number=2)
    assert world.passes(100.0) == []


def test_who_says_that_its_bus_closes_is_gone_and_is_not_told_of_again() -> None:
    world = World()
    world.says(HERE)
    assert world.liveness.closed((3, 10)) == GONE
    world.liveness.departed([WRITER], CHANNEL)
    assert world.liveness.closed((3, 10)) == world.passes(100.0) == []


def test_a_sender_keeps_the_process_that_it_has_named_first() -> None:
    """Of those who share a key, one can speak for another, and name a process that is about to end."""
    world = World()
    world.says(HERE)
    world.says(ELSEWHERE, number=2)
    assert world.liveness.ended(ELSEWHERE) == []
    assert world.liveness.ended(HERE) == GONE


def test_all_senders_of_a_process_go_with_it_and_those_of_others_stay() -> None:
    world = World()
    for sender, claim in ((1, HERE), (2, ELSEWHERE), (3, HERE)):
        world.liveness.received(WRITER + sender, Control(sender, 10, Leave("x"), 1, claim), CHANNEL)
    assert world.watched == [HERE]
    assert world.liveness.ended(HERE) == [PeerGone(1, 10), PeerGone(3, 10)]


def test_when_the_bus_closes_nothing_is_watched_any_more() -> None:
    world = World()
    world.says(HERE)
    world.liveness.close()
    assert world.watched == []


def test_a_peer_with_a_topic_of_its_own_is_gone_when_it_has_ended_or_is_not_found_again() -> None:
    space, number, start = peer_processes.own_claim().split()
    dead = f"{space} {number} {int(start) - 1}"  # who had that number before
    for claim, patience_s in ((dead, 0.0), (ELSEWHERE, LEASE_S), (f"{space} {number} {start}", FOUND_AGAIN_S)):
        peer = Reachability(claim, LEASE_S)
        assert not peer.is_gone(True, 100.0)
        assert peer.is_gone(False, 200.0) is (patience_s == 0.0)
        assert not peer.is_gone(True, 201.0)  # found again
        assert not peer.in_doubt
        peer.is_gone(False, 300.0)
        assert peer.is_gone(False, 300.0 + patience_s - 0.1) is (patience_s == 0.0)
        assert peer.in_doubt
        assert peer.is_gone(False, 300.0 + patience_s)


def test_who_was_last_heard_on_a_channel_that_is_read_no_more_goes_with_its_other_ones() -> None:
    registry = WriterRegistry()
    message = Control(7, 70, Leave("x"), 1)
    registry.received("of the inbox", message, "inbox")
    registry.received("of all", message, "clients")
    registry.forget("inbox")
    assert registry.writers_on("inbox") == set()
    assert registry.left(["of all"], channel="clients") == [PeerGone(7, 70)]


def test_a_process_elsewhere_whose_host_has_closed_its_connection_is_reported_at_once_and_gone_after_the_lease() -> (
    None
):
    world = World()
    world.says(ELSEWHERE)
    assert world.liveness.disconnected({WRITER}) == [], "it is there"
    world.liveness.departed([WRITER], CHANNEL)
    assert world.liveness.disconnected({WRITER + 1}) == []
    assert world.liveness.disconnected({WRITER}) == [PeerDisconnected(3, 10)]
    assert world.liveness.disconnected({WRITER}) == []
    assert world.passes(LEASE_S + 1) == GONE


def test_a_process_that_is_heard_again_after_it_has_disconnected_is_not_gone_and_may_disconnect_again() -> None:
    world = World()
    for writer in (WRITER, WRITER + 1):
        world.says(ELSEWHERE, writer=writer, number=writer)
        world.liveness.departed([writer], CHANNEL)
        assert world.liveness.disconnected({writer}) == [PeerDisconnected(3, 10)]
        assert world.passes(LEASE_S - 1) == []
    world.says(ELSEWHERE, writer=WRITER + 2, number=WRITER + 2)
    assert world.passes(10 * LEASE_S) == []


def test_of_a_process_of_this_machine_the_kernel_knows_more_than_its_connection_says() -> None:
    world = World()
    world.says(HERE)
    world.liveness.departed([WRITER], CHANNEL)
    assert world.liveness.disconnected({WRITER}) == []


def test_a_process_that_another_writer_speaks_for_has_not_disconnected() -> None:
    world = World()
    world.says(ELSEWHERE)
    world.says(ELSEWHERE, writer=WRITER + 1, number=2)
    world.liveness.departed([WRITER], CHANNEL)
    assert world.liveness.disconnected({WRITER}) == []
