"""The launcher, with small programs in the place of ranks: real processes, real signals."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# Each rank runs the first argument as a program of its own; -S and -E let Python start in a few milliseconds.
LAUNCH = """
import asyncio, json, sys
from gradbus.commands.launch import launcher as module
from gradbus.commands.launch.launcher import Launch, Launcher
world, grace_s, code, settle_s, restarts = json.loads(sys.argv[1])
module._SETTLE_S = settle_s or module._SETTLE_S
launch = Launch(
    world=world, grace_s=grace_s, restarts=restarts,
    command=lambda rank, again: [sys.executable, "-S", "-E", "-c", code, str(int(again)), str(rank)],
    environment=lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(world), "TAKEN": None},
)
async def main():
    return await Launcher(launch).run()
sys.exit(asyncio.run(main()))
"""
HEAD = """
import os, signal, sys, time
again, rank = map(int, sys.argv[1:])
def say(text): os.write(1, f"{text}\\n".encode())  # not print: signal handlers call it, too
def wait():
    while True: time.sleep(0.05)  # not pause(): a signal right before it would be handled with the next one
"""
FOREVER = "say(f'pid {os.getpid()}'); wait()"

Begin = Callable[..., "subprocess.Popen[str]"]


def arguments(
    code: str, *, world: int = 2, grace_s: float = 20.0, settle_s: float = 0.0, restarts: int = 0
) -> list[str]:
    return [sys.executable, "-P", "-c", LAUNCH, json.dumps([world, grace_s, HEAD + code, settle_s, restarts])]


def as_in_a_terminal() -> None:
    """Tests that were started with nohup have all that they start ignore its signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start a launcher whose ranks run this code; what is left of it is killed with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        code: str, *, world: int = 2, grace_s: float = 20.0, settle_s: float = 0.0, restarts: int = 0, **options: object
    ) -> subprocess.Popen[str]:
        options = {"preexec_fn": as_in_a_terminal, **options}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        command = arguments(code, world=world, grace_s=grace_s, settle_s=settle_s, restarts=restarts)
        process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """Of the ranks, each of which says ``pid N`` once it is ready."""
    assert process.stdout is not None
    found = []
    for line in process.stdout:
        match = re.fullmatch(r"\[rank \d+\] pid (\d+)\n", line)
        if match:
            found.append(int(match[1]))
            if len(found) == count:
                return found
    pytest.fail(f"only {len(found)} of {count} ranks were ready")


class Watched:
    """A process that may end before anybody asks, and that somebody else may not have waited for yet."""

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)
        self._handle = os.pidfd_open(pid)

    def ends(self) -> bool:
        try:
            return bool(select.select([self._handle], [], [], 10)[0])
        finally:
            os.close(self._handle)


def by_rank(process: subprocess.Popen[str], count: int = 2) -> list[Watched]:
    """The ranks, in order, once all of them are ready."""
    return sorted(map(Watched, pids(process, count)), key=lambda rank: int(rank.process.cmdline()[-1]))


def test_every_line_has_its_rank_before_it_and_goes_to_the_same_stream(begin) -> None:
    code = "say(f'out {rank}'); print('err', os.environ['RANK'], os.environ['WORLD_SIZE'], file=sys.stderr)"
    code, out, err = ended(begin(code, world=3))
    assert code == 0
    assert sorted(out.splitlines()) == [f"[rank {rank}] out {rank}" for rank in range(3)]
    assert sorted(err.splitlines()) == [f"[rank {rank}] err {rank} 3" for rank in range(3)]


def test_a_rank_that_is_killed_is_started_again_as_often_as_it_may_be(begin, tmp_path: Path) -> None:
    code = f"""
path = {str(tmp_path / "again")!r}
if rank == 1:
    if not again: os.kill(os.getpid(), signal.SIGKILL)
    open(path, "w").close()
while not os.path.exists(path): time.sleep(0.01)
say(f"done {{again}}")
"""
    code_of_exit, out, err = ended(begin(code, restarts=1))
    assert code_of_exit == 0
    assert sorted(out.splitlines()) == ["[rank 0] done 0", "[rank 1] done 1"]
    assert "rank 1 was killed by SIGKILL" in err
    assert "starting it again, 0 restarts are left" in err
    always = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else wait()"
    code_of_exit, _, err = ended(begin(always, restarts=2))
    assert code_of_exit == 128 + signal.SIGKILL
    assert err.count("starting it again") == 2


def test_ranks_that_need_no_other_go_on_without_one_that_cannot_be_started_again(tmp_path: Path) -> None:
    program = LAUNCH.replace("sys.executable, ", f"{str(tmp_path / 'absent')!r} if again else sys.executable, ")
    program = program.replace("grace_s=grace_s, ", "grace_s=grace_s, goes_on_without=lambda ranks: len(ranks) < 2, ")
    code = """
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("known"): time.sleep(0.01)
"""
    options = json.dumps([2, 20.0, HEAD + code, 0.0, 1])
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program, options], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        try:
            assert process.stderr is not None
            lines = [process.stderr.readline() for _ in range(3)]
            (tmp_path / "known").touch()
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert "starting it again, 0 restarts are left" in lines[0]
    assert "rank 1 could not be started" in lines[1]
    assert lines[2].startswith("gradbus run: rank 1 was killed by SIGKILL")
    assert lines[2].endswith("; the others go on\n")


ENDS = """
def wait_for(path):
    while not os.path.exists(path): time.sleep(0.005)
"""
FAILS = "sys.exit(13) if rank == 0 else wait_for('known')"
KILLED = "if rank == 0: wait_for('known'); os.kill(os.getpid(), signal.SIGKILL)"
VAIN = "if rank == 0: wait_for('known of two'); sys.exit({})"
LEAVES = """
if rank == 0: wait_for("known"); sys.exit(12)
if rank == 2: wait_for("known of two")
"""


@pytest.mark.parametrize(
    ("world", "code", "has_ended", "end", "said"),
    [
        (2, "sys.exit(6) if rank == 0 else wait_for('known')", True, 6, 2 * ["failed with exit code 6"]),
        (2, "if rank == 0: wait_for('known'); sys.exit(12)", True, 12, ["failed with exit code 12"]),
        (2, FAILS, True, 0, ["failed with exit code 13; the others go on"]),
        (2, KILLED, True, 0, []),
        (2, KILLED, False, 137, ["was killed by SIGKILL (was there not enough memory?)"]),
        (3, VAIN.format(4), False, 4, ["failed with exit code 4"]),
        (3, VAIN.format(9), False, 9, ["failed with exit code 9"]),
        (3, VAIN.format(4), True, 0, []),
        (3, LEAVES, True, 0, ["failed with exit code 12; the others go on"]),
    ],
    ids=[
        "of its checkpoints, before the others end",
        "after them",
        "while they train",
        "killed after them",
        "killed when the other has left",
        "waits in vain for two that have left",
        "misses two that have left",
        "waits in vain when the run has ended",
        "while one trains and another has left",
    ],
)
def test_a_rank_that_fails_when_the_run_is_over_decides_the_exit_code_of_those_that_go_on_without_one(
    tmp_path: Path, world: int, code: str, has_ended: bool, end: int, said: list[str]
) -> None:
    more = f"goes_on_without=lambda ranks: len(ranks) < 2, ends_together=True, has_ended=lambda: {has_ended}, "
    program = LAUNCH.replace("grace_s=grace_s, ", f"grace_s=grace_s, {more}")
    program = program.replace(
        "    return await Launcher(launch).run()",
        """
    launcher = Launcher(launch)
    running = asyncio.create_task(launcher.run())
    for number, name in enumerate(("known", "known of two"), 1):
        while len(launcher.ended_s) < number and not running.done():  # then what there is to say of it is said
            await asyncio.sleep(0.005)
        open(name, "w").close()
    return await running""",
    )
    options = json.dumps([world, 20.0, HEAD + ENDS + code, 0.0, 0])
    launched = subprocess.run(
        [sys.executable, "-P", "-c", program, options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=30,
        check=False,
    )
    assert launched.returncode == end, launched.stderr
    lines = [line for line in launched.stderr.splitlines() if line.startswith("gradbus run: rank 0 ")]
    assert [line for line in lines if "printed nothing" not in line] == [f"gradbus run: rank 0 {text}" for text in said]


def test_lines_of_a_rank_keep_their_order_and_stay_whole(begin) -> None:
    """Also between stdout and stderr, where both go to the same place."""
    code = """
for number in range(2000):
    os.write(1 + number % 2, f"{number} ".encode())
    os.write(1 + number % 2, b"x" * (number % 300) + b"\\n")
"""
    code, out, _ = ended(begin(code, world=3, stderr=subprocess.STDOUT))
    assert code == 0
    for rank in range(3):
        mine = [line.split("] ")[1] for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"{number} {'x' * (number % 300)}" for number in range(2000)]


def test_a_variable_can_be_taken_from_the_ranks(begin) -> None:
    code, out, _ = ended(begin("say(os.environ.get('TAKEN'))", world=1, env={**os.environ, "TAKEN": "1"}))
    assert (code, out) == (0, "[rank 0] None\n")


FAILS = """
if rank == 1:
    say("before")
    def inner(): raise RuntimeError("the weights are gone")
    inner()
wait()
"""


STUCK = """
if rank == 1:
    import traceback
    try: 1 / 0
    except ZeroDivisionError: traceback.print_exc()
    open("stuck", "w").close(); wait()
while not os.path.exists("stuck"): time.sleep(0.005)
sys.exit(9)
"""


def test_a_rank_that_failed_but_cannot_end_is_blamed_rather_than_the_one_that_missed_it(begin, tmp_path) -> None:
    code, _, err = ended(begin(STUCK, cwd=tmp_path))
    assert code == 1
    assert "gradbus run: the last lines of rank 1:\n" in err
    assert err.endswith("gradbus run: rank 1 failed, and had to be ended\n")


def test_a_rank_that_fails_ends_the_others_and_its_traceback_is_shown_last(begin) -> None:
    code, out, err = ended(begin(FAILS, world=3))
    assert code == 1
    assert "[rank 1] before" in out
    *_, report = err.partition("rank 1 failed with exit code 1; ending the others\n")
    lines = report.splitlines()
    assert lines[0] == "gradbus run: the last lines of rank 1:"
    assert "  Traceback (most recent call last):" in lines[1:3]
    assert lines[-2:] == ["  RuntimeError: the weights are gone", "gradbus run: rank 1 failed with exit code 1"]


def test_a_rank_that_a_signal_kills_is_named_with_it(begin) -> None:
    code, _, err = ended(begin("if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\nwait()"))
    assert code == 128 + signal.SIGSEGV
    assert err.splitlines()[-2:] == [
        "gradbus run: rank 1 has printed nothing",
        "gradbus run: rank 1 was killed by SIGSEGV",
    ]


def test_the_report_of_a_failure_is_bounded(begin) -> None:
    code = """
for number in range(100_000): print("noise", number)
if rank == 0: sys.exit(7)
"""
    code, _, err = ended(begin(code, stdout=subprocess.DEVNULL))
    assert code == 7
    assert err.count("noise") <= 20
    assert "  noise 99999\n" in err


AFTER_RANK_0 = """
signal.signal(signal.SIGTERM, lambda *_: say("told to end"))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # it may come before this waits for it
say(f"pid {os.getpid()}")
signal.sigwait({signal.SIGUSR1})
if rank == 0: sys.exit(FIRST)
say("my own end")
sys.exit(SECOND)
"""


def end_one_after_the_other(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Rank 0 is gone before rank 1 ends."""
    for rank in by_rank(process):
        rank.process.send_signal(signal.SIGUSR1)
        assert rank.ends()
    return ended(process)


def test_a_rank_that_only_missed_another_is_not_blamed(begin) -> None:
    """Exit code 9 says that another rank was lost: that one may still be busy with its end, for which it has 2 s. Here
    it begins when this process says so, which may come later."""
    process = begin(AFTER_RANK_0.replace("FIRST", "9").replace("SECOND", "3"), settle_s=20.0)
    code, out, err = end_one_after_the_other(process)
    assert code == 3
    assert "told to end" not in out
    assert err.splitlines()[-2:] == ["  my own end", "gradbus run: rank 1 failed with exit code 3"]


def test_a_rank_that_ends_well_before_the_others_ends_nothing(begin) -> None:
    process = begin(AFTER_RANK_0.replace("FIRST", "0").replace("SECOND", "0"))
    assert end_one_after_the_other(process) == (0, "[rank 1] my own end\n", "")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_all_may_end_in_order(begin, signum) -> None:
    code = (
        """
def stop(signum, frame):
    say(f"got {signum}")
    sys.exit(128 + signum)
for signum in (1, 2, 15): signal.signal(signum, stop)
"""
        + FOREVER
    )
    process = begin(code)
    pids(process, 2)
    process.send_signal(signum)
    code, out, err = ended(process)
    assert code == 128 + signum
    assert sorted(out.splitlines()) == [f"[rank {rank}] got {signum.value}" for rank in range(2)]
    assert err.startswith("gradbus run: stopped by ")
    assert len(err.splitlines()) == 1


def test_under_nohup_the_end_of_the_terminal_ends_nothing(begin) -> None:
    process = begin(FOREVER, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    pids(process, 2)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert (code, err) == (143, "gradbus run: stopped by SIGTERM\n")


DEAF = "for signum in (1, 2, 15): signal.signal(signum, lambda *_: say('no'))\n"


def test_the_second_signal_kills(begin) -> None:
    process = begin(DEAF + FOREVER)
    ranks = by_rank(process)
    process.send_signal(signal.SIGINT)
    for _ in range(2):
        assert process.stdout is not None
        assert process.stdout.readline().endswith("no\n")
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert err == "gradbus run: killing rank 0, rank 1\ngradbus run: stopped by Ctrl-C\n"
    assert all(rank.ends() for rank in ranks)


def test_a_rank_that_ignores_the_request_to_end_is_killed_after_the_grace(begin) -> None:
    process = begin(DEAF + FOREVER, grace_s=0.3)
    ranks = by_rank(process)
    ranks[1].process.kill()
    code, _, err = ended(process)
    assert code == 137
    assert "gradbus run: killing rank 0\n" in err
    assert all(rank.ends() for rank in ranks)


def test_no_rank_outlives_a_launcher_that_is_killed(begin) -> None:
    process = begin(DEAF + FOREVER, world=3)
    ranks = by_rank(process, 3)
    process.kill()
    assert all(rank.ends() for rank in ranks)


def test_what_a_rank_has_started_ends_with_it(begin) -> None:
    """It holds the rank's output open, so the launcher would wait for it otherwise."""
    process = begin("if os.fork() == 0: say(f'pid {os.getpid()}')\nwait()")
    left = [Watched(pid) for pid in pids(process, 2)]
    rank = left[1].process.parent()
    assert rank is not None
    rank.kill()
    code, _, err = ended(process)
    assert code == 137
    assert err.endswith("was killed by SIGKILL (was there not enough memory?)\n")
    assert all(process.ends() for process in left)


def test_a_reader_that_does_not_read_stops_no_rank(begin) -> None:
    """What he misses beyond a bound is left out; he is told how much when he reads on."""
    code = """
line = "x" * 10_000
for _ in range(4000): print(line)
print("last")
sys.stdout.flush()
print("through", file=sys.stderr)
"""
    process = begin(code, world=1)
    assert process.stderr is not None
    assert process.stderr.readline() == "[rank 0] through\n"
    code, out, _ = ended(process)
    assert code == 0
    match = re.search(r"^gradbus run: (\d+) lines left out here: they were not read$", out, flags=re.MULTILINE)
    assert match
    assert out.count("\n") - 1 + int(match[1]) == 4001


def test_a_reader_that_goes_away_ends_the_ranks(begin) -> None:
    code = "while True: say('x')"
    process = begin(code)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "gradbus run: stopped by the end of its reader\n"
    assert process.wait(10) == 128 + signal.SIGPIPE


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    code = LAUNCH.replace("sys.executable, ", f"{str(tmp_path / 'absent')!r}, ")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, json.dumps([2, 1.0, "", 0.0, 0])], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        f"rank 0 could not be started: {tmp_path}/absent: No such file or directory"
    )


def test_on_a_terminal_each_rank_has_a_colour() -> None:
    """And Ctrl-C typed there reaches the ranks once: through the launcher alone."""
    master, slave = pty.openpty()
    code = "def stop(*_): say('once'); sys.exit(130)\nsignal.signal(2, stop)\n" + FOREVER
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        arguments(code),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        shown = read_until(master, "", lambda text: text.count("pid ") == 2)
        os.write(master, b"\x03")
        shown = read_until(master, shown, lambda text: "stopped by Ctrl-C" in text)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert "\x1b[36m[rank 0]\x1b[0m pid " in shown
    assert "\x1b[33m[rank 1]\x1b[0m pid " in shown
    assert shown.count("once") == 2


def read_until(fd: int, text: str, condition: Callable[[str], bool]) -> str:
    deadline_s = time.monotonic() + 20
    while not condition(text):
        assert time.monotonic() < deadline_s, text
        text += os.read(fd, 4096).decode()
    return text
