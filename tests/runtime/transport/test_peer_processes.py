"""What the kernel tells of other processes of this machine."""

from __future__ import annotations

import errno
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from patience import until

from gradbus.runtime.transport.peer_processes import PeerProcesses, claim_of, has_ended, is_stopped, own_claim

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.fixture
def watched() -> PeerProcesses:
    return PeerProcesses()


def watch(watched: PeerProcesses, claim: str) -> tuple[bool, queue.Queue[str]]:
    ended: queue.Queue[str] = queue.Queue()
    return watched.watch(claim, ended.put), ended


def test_the_end_of_a_process_is_told_also_when_nobody_has_waited_for_it_yet(
    process: subprocess.Popen[bytes], watched: PeerProcesses
) -> None:
    claim, before = claim_of(process.pid), set(threading.enumerate())
    (told, ended), (again, also) = watch(watched, claim), watch(watched, claim)
    assert told
    assert again
    process.kill()
    assert ended.get(timeout=10.0) == also.get(timeout=10.0) == claim
    watched.rest()
    assert "gradbus-processes" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_a_stopped_process_lives_and_is_known_to_stand_still(
    process: subprocess.Popen[bytes], watched: PeerProcesses
) -> None:
    claim = claim_of(process.pid)
    _, ended = watch(watched, claim)
    process.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(claim))
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.2)
    process.send_signal(signal.SIGCONT)
    until(lambda: not is_stopped(claim))
    watched.unwatch(claim, ended.put)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is started to watch with."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread} was started"))


@pytest.mark.usefixtures("no_threads")
def test_who_has_ended_before_is_told_of_at_once_and_so_is_who_had_that_number_before(
    process: subprocess.Popen[bytes], watched: PeerProcesses
) -> None:
    space, number, start = claim_of(process.pid).split()
    former = f"{space} {number} {int(start) - 1}"
    told, ended = watch(watched, former)
    assert told
    assert ended.get_nowait() == former
    process.kill()
    process.wait()
    gone = f"{space} {number} {start}"
    assert watch(watched, gone)[1].get_nowait() == gone


@pytest.mark.usefixtures("no_threads")
def test_of_this_process_itself_and_of_others_elsewhere_nothing_is_watched(watched: PeerProcesses) -> None:
    assert watched.watch(own_claim(), pytest.fail)
    _, number, start = own_claim().split()
    for claim in ("", "nonsense", f"{'0' * 16} {number} {start}", f"{own_claim()} 1", f"{own_claim()}\n"):
        assert not watched.watch(claim, pytest.fail)


def test_a_number_that_no_process_can_have_is_nobodys_claim(watched: PeerProcesses) -> None:
    for number in ("9999999999", "4294967297", "2147483648", "١"):
        claim = f"{own_claim().split()[0]} {number} 1"
        assert not watched.watch(claim, pytest.fail)
        assert has_ended(claim) is None


def no_more(*_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def open_files() -> int:
    """Those of the kinds that a watch needs."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("anon_inode:") for link in links if os.path.islink(link))


@pytest.mark.parametrize(("owner", "name"), [(select, "epoll"), (os, "eventfd"), (threading.Thread, "start")])
def test_while_the_system_gives_nothing_to_watch_with_nobody_is_watched_and_nothing_is_left_open(
    process: subprocess.Popen[bytes],
    watched: PeerProcesses,
    owner: object,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim, files = claim_of(process.pid), open_files()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, no_more)
        assert not watched.watch(claim, pytest.fail)
    assert open_files() == files
    told, ended = watch(watched, claim)
    assert told
    process.kill()
    assert ended.get(timeout=10.0) == claim
    watched.rest()


def test_one_process_too_many_is_not_watched_and_the_others_are(
    process: subprocess.Popen[bytes], watched: PeerProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        register = staticmethod(no_more)

    claim = claim_of(process.pid)
    _, ended = watch(watched, claim)
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            with monkeypatch.context() as patch:
                # How many a real one takes, the kernel says: some ten thousand or more.
                patch.setattr(watched, "_epoll", Full())
                assert not watched.watch(claim_of(other.pid), pytest.fail)
        finally:
            other.kill()
    process.kill()
    assert ended.get(timeout=10.0) == claim
    watched.rest()


def test_who_watches_no_more_is_not_told(process: subprocess.Popen[bytes], watched: PeerProcesses) -> None:
    claim = claim_of(process.pid)
    (_, first), (_, second) = watch(watched, claim), watch(watched, claim)
    watched.unwatch(claim, first.put)
    process.kill()
    assert second.get(timeout=10.0) == claim
    assert first.empty()
    watched.rest()


def test_news_of_a_descriptor_that_is_another_processes_by_now_end_nobody(
    process: subprocess.Popen[bytes], watched: PeerProcesses
) -> None:
    claim = claim_of(process.pid)
    _, ended = watch(watched, claim)
    (file,) = watched._files  # noqa: SLF001 - see below
    # As the thread does, 20 ms after news of one that is closed by now: the number may be any.
    watched._tell(file)  # noqa: SLF001
    assert ended.empty()
    process.kill()
    assert ended.get(timeout=10.0) == claim
    watched.rest()


CHILD = """
import os, subprocess, sys
from gradbus.runtime.transport import peer_processes
other = subprocess.Popen(["sleep", "60"])
claim = peer_processes.claim_of(other.pid)
parents = peer_processes.own_claim()
assert peer_processes.watched.watch(claim, print)
child = os.fork()
if child == 0:
    assert not peer_processes.watched._files and peer_processes.watched._thread is None
    assert peer_processes.own_claim() != parents
    assert peer_processes.watched.watch(parents, print)
    peer_processes.watched.unwatch(parents, print)
    peer_processes.watched.rest()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
other.kill()
peer_processes.watched._thread.join(10.0)
"""


def test_a_child_by_fork_is_a_process_of_its_own_and_leaves_its_parents_watch_alone() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("\n") == 1  # the end of the other process, told to the parent
