"""Processes that stand still, have no turn, or end: who is taken for dead, and how soon the dead are missed.

    python -m gradbus.experiments.pauses                 # some minutes: everything once
    python -m gradbus.experiments.pauses --runs 100      # pauses and starvation until there are so many runs
    python -m gradbus.experiments.pauses --only kill

Groups of 2 and 4 ranks, through shared memory and over DDS alone, call one collective after another. A *run* is one
group and one thing done to it; the same is done to all groups at once. Nobody has died, so nobody may be missed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gradbus
from gradbus.experiments.pauses_rank import burn, play, sit
from gradbus.runtime.dds.discovery import discovery_ports, goodbye
from gradbus.runtime.dds.participant import Node

START_S = 60.0  # for a group to form
STEP_S = 0.02  # between two collectives: several groups share two cores
RECOVER_S = 15.0  # for the next collective after a pause
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Kind:
    """How a group is made."""

    world: int
    shared_memory: bool
    key: str = ""  # of the job, sealed with it

    def __str__(self) -> str:
        sealed = ", psk" if self.key else ""
        return f"{self.world} ranks, {'shared memory' if self.shared_memory else 'DDS only'}{sealed}"


KINDS = tuple(Kind(world, share) for world in (2, 4) for share in (True, False))


@dataclass(slots=True, eq=False)
class RankProcess:
    """One rank as it is seen from outside."""

    process: Any
    pipe: Connection
    formed_s: float = -1.0  # how long it took
    stepped_s: float = 0.0  # time.monotonic of the last collective
    steps: int = 0
    failed: str = ""
    failed_s: float = 0.0
    ended: bool = False

    def look(self) -> None:
        """Take what it has said."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                what, at_s, fact = self.pipe.recv()
                match what:
                    case "formed":
                        self.formed_s = fact
                    case "step":
                        self.stepped_s, self.steps = at_s, fact
                    case "failed":
                        self.failed, self.failed_s = fact, at_s
                    case "ended":
                        self.ended = True

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


@dataclass(slots=True, eq=False)
class GroupRun:
    """A group of rank processes."""

    kind: Kind
    domain: int
    lease_s: float | None = None
    step_s: float = STEP_S
    start_s: float = START_S
    ranks: list[RankProcess] = field(default_factory=list)

    def start(self) -> None:
        """Start all ranks."""
        job = f"pauses-{os.getpid()}-{random.getrandbits(40):x}"
        for rank in range(self.kind.world):
            spec = {
                "job": job, "domain": self.domain, "rank": rank, "world": self.kind.world, "key": self.kind.key,
                "shared_memory": self.kind.shared_memory, "lease_s": self.lease_s, "step_s": self.step_s,
                "start_s": self.start_s,
            }  # fmt: skip
            ours, theirs = _context.Pipe()
            process = _context.Process(target=play, args=(spec, theirs), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(RankProcess(process, ours))

    def look(self) -> None:
        for rank in self.ranks:
            rank.look()

    def wait(self, done: Callable[[RankProcess], bool], timeout_s: float) -> bool:
        """Whether it comes to be so for all ranks."""
        until_s = time.monotonic() + timeout_s
        while True:
            self.look()
            if all(done(rank) for rank in self.ranks):
                return True
            if time.monotonic() > until_s or self.trouble:
                return False
            time.sleep(0.01)

    @property
    def trouble(self) -> str:
        """What went wrong; empty: nothing."""
        self.look()
        failed = [f"rank {number}: {rank.failed}" for number, rank in enumerate(self.ranks) if rank.failed]
        crashed = [
            f"rank {number}: exit code {rank.process.exitcode}" for number, rank in enumerate(self.ranks)
            if rank.process.exitcode not in (None, 0)
        ]  # fmt: skip
        return "; ".join(failed + crashed)

    def end(self) -> None:
        """Kill what is left."""
        for rank in self.ranks:
            if rank.process.exitcode is None:
                rank.process.kill()
        for rank in self.ranks:
            rank.process.join(10.0)
            rank.pipe.close()
        self.ranks.clear()


@contextlib.contextmanager
def groups(kinds: Sequence[Kind], domain: int, **how: Any) -> Iterator[list[GroupRun]]:
    """Groups that have formed."""
    made = [GroupRun(kind, domain, **how) for kind in kinds]
    try:
        for group in made:
            group.start()
        for group in made:
            if not group.wait(lambda rank: rank.steps > 0, START_S + 30.0):
                raise SystemExit(f"no group: {group.kind}: {group.trouble or 'it did not form in time'}")
        yield made
    finally:
        for group in made:
            group.end()


Deed = Callable[[Sequence[GroupRun]], None]


def stop_one(for_s: float) -> Deed:
    """Stop the last rank of each group."""
    return lambda made: _stop([group.ranks[-1] for group in made], for_s)


def stop_all(for_s: float) -> Deed:
    """Stop all ranks at once, as when the machine stands still."""
    return lambda made: _stop([rank for group in made for rank in group.ranks], for_s)


def _stop(ranks: Sequence[RankProcess], for_s: float) -> None:
    for rank in ranks:
        rank.signal(signal.SIGSTOP)
    time.sleep(for_s)
    for rank in ranks:
        rank.signal(signal.SIGCONT)


def hold_one(for_s: float) -> Deed:
    """Have the last rank of each group spend so long in one C call that keeps the GIL."""

    def deed(made: Sequence[GroupRun]) -> None:
        for group in made:
            group.ranks[-1].pipe.send(str(for_s))
        time.sleep(for_s)

    return deed


def starve_one(for_s: float, busy: int = 8) -> Deed:
    """Let the last rank of each group have what ``busy`` others leave over."""

    def deed(made: Sequence[GroupRun]) -> None:
        starved = [group.ranks[-1].process.pid for group in made]
        for process in starved:
            _renice(process, 19)
        burners = [_context.Process(target=burn, args=(for_s + 30.0,), daemon=True) for _ in range(busy)]
        for burner in burners:
            burner.start()
        time.sleep(for_s)
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.join(10.0)
        with contextlib.suppress(PermissionError):
            for process in starved:
                _renice(process, 0)

    return deed


def _renice(process: int, nice: int) -> None:
    for thread in os.listdir(f"/proc/{process}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def forge_goodbyes(times: int, every_s: float) -> Deed:
    """Tell all ranks, in the name of each of them, that it goes: 84 bytes that anybody on the machine can send."""

    def deed(made: Sequence[GroupRun]) -> None:
        domain = made[0].domain
        ranks = {rank.process.pid for group in made for rank in group.ranks}
        node = Node(domain_id=domain, partition="outsider", network=gradbus.NetworkConfig())
        try:
            until_s = time.monotonic() + START_S
            while len(found := _participants(node, ranks)) < len(ranks):
                if time.monotonic() > until_s:
                    raise SystemExit(f"of {len(ranks)} participants {len(found)} were found")
                time.sleep(0.1)
        finally:
            node.close()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaker:
            for _ in range(times):
                for prefix in found:
                    for port in discovery_ports(domain):
                        speaker.sendto(goodbye(prefix), ("127.0.0.1", port))
                time.sleep(every_s)

    return deed


def _participants(node: Node, processes: Collection[int]) -> list[bytes]:
    node.look_around()
    return [prefix for prefix, claim in node.others.items() if int(claim.split()[1]) in processes]


DEEDS: dict[str, Deed] = {
    "one rank stopped for 1.2 s": stop_one(1.2),
    "one rank stopped for 5 s": stop_one(5.0),
    "one rank stopped for 20 s": stop_one(20.0),
    "all ranks stopped for 3 s": stop_all(3.0),
    "all ranks stopped for 10 s": stop_all(10.0),
    "12 s in one C call with the GIL": hold_one(12.0),
    "forged goodbyes of all ranks, 3 times": forge_goodbyes(3, 2.0),
    "nice 19 beside 8 busy processes for 60 s": starve_one(60.0),
}


def survive(made: Sequence[GroupRun], deed: Deed, recover_s: float = RECOVER_S) -> dict[GroupRun, str]:
    """Do something to all groups. Returns what became of each; empty: it goes on."""
    deed(made)
    done_s = time.monotonic()
    found: dict[GroupRun, str] = {}
    for group in made:
        goes_on = group.wait(lambda rank: rank.stepped_s > done_s, max(0.1, done_s + recover_s - time.monotonic()))
        found[group] = group.trouble or ("" if goes_on else f"no collective within {recover_s:g} s")
    return found


def pauses(runs: int, domain: int, seconds_s: float) -> bool:
    """All deeds, again and again until there are so many runs or the time is over."""
    counts: dict[str, list[int]] = {name: [0, 0] for name in DEEDS}
    began_s, total = time.monotonic(), 0
    while total < runs and (total == 0 or time.monotonic() < began_s + seconds_s):
        with groups(KINDS, domain) as made:
            for name, deed in DEEDS.items():
                found = survive(made, deed)
                for group, trouble in found.items():
                    counts[name][0] += 1
                    counts[name][1] += bool(trouble)
                    if trouble:
                        print(f"  {group.kind}, {name}: {trouble}", flush=True)
                total += len(found)
                if any(found.values()):
                    break  # a group is gone: all anew
    for name, (done, dead) in counts.items():
        print(f"{name:44} {done:4} runs, {dead} deaths")
    print(f"{'all':44} {total:4} runs, {sum(dead for _, dead in counts.values())} deaths", flush=True)
    return all(dead == 0 for _, dead in counts.values())


def kills(times: int, domain: int) -> bool:
    """kill -9 of one rank: how long until all others have failed with PeerLost."""
    fine = True
    for kind in (Kind(2, True), Kind(4, True), Kind(4, False), Kind(4, True, "gradbus-key-1 " + "6b" * 32)):
        taken: list[float] = []
        for _ in range(times):
            with groups([kind], domain) as (group,):
                victim, others = group.ranks[-1], group.ranks[:-1]
                killed_s = time.monotonic()
                victim.signal(signal.SIGKILL)
                until_s = killed_s + 30.0
                while not all(rank.failed for rank in others) and time.monotonic() < until_s:
                    time.sleep(0.002)
                    group.look()
                wrong = [rank.failed for rank in others if not rank.failed.startswith("PeerLost")]
                fine &= not wrong
                if wrong:
                    print(f"  {kind}: {wrong}")
                taken += [rank.failed_s - killed_s for rank in others if rank.failed]
        print(
            f"kill -9, {kind!s:34} {times:3} times: PeerLost on all others after {statistics.median(taken):.3f} s "
            f"(median), {max(taken):.3f} s (worst)", flush=True,
        )  # fmt: skip
        fine &= max(taken) <= 0.3
    return fine


def crowds(times: int, world: int, domain: int) -> bool:
    """Many processes on few cores form one group."""
    fine = True
    for _ in range(times):
        group = GroupRun(Kind(world, True), domain, step_s=0.5)
        try:
            began_s = time.monotonic()
            group.start()
            formed = group.wait(lambda rank: rank.formed_s >= 0, START_S + 30.0)
            taken_s = time.monotonic() - began_s
            print(
                f"{world} processes: {'formed' if formed else 'NOT FORMED'} in {taken_s:.1f} s, from the start of the "
                f"first process {group.trouble}", flush=True,
            )  # fmt: skip
            fine &= formed and taken_s <= START_S and not group.trouble
        finally:
            group.end()
    return fine


@contextlib.contextmanager
def idle_buses(count: int, domain: int, lease_s: float | None = None) -> Iterator[list[Any]]:
    """Buses that nobody uses, each in a process of its own, when all are open."""
    pipes, processes = [], []
    try:
        for _ in range(count):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=sit, args=(domain, lease_s, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            with contextlib.suppress(EOFError):  # it has crashed: whoever looks sees that
                pipe.recv()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join(10.0)


def idle(buses: int, domain: int, for_s: float = 10.0) -> bool:
    """What buses cost that nobody uses."""
    with idle_buses(buses, domain) as processes:
        time.sleep(10.0)  # until all have found each other, and have said so for the last time
        before = [_used_s(process) for process in processes]
        time.sleep(for_s)
        shares = [(_used_s(p) - b) / for_s for p, b in zip(processes, before, strict=True)]
    print(f"{buses} idle buses: {statistics.mean(shares):.2%} of a core each, at most {max(shares):.2%}", flush=True)
    return statistics.mean(shares) <= 0.003


def crashes(stops: int, domain: int, lease_s: float | None, buses: int = 32, for_s: float = 1.5) -> bool:
    """Stop all processes, again and again, while they find each other: do some crash?

    Cyclone DDS 11.0.1 registers the lease of a participant that it has found before it notes the address. When that
    lease ends in between, as in a process that was stopped just then for longer, it looks for an address that is not
    there (``ddsi_spdp_unref_locator``): SIGSEGV. With ``lease_s`` below ``for_s`` that is seen; with ours it is not.
    """
    done, crashed = 0, 0
    while done < stops:
        with idle_buses(buses, domain, lease_s) as processes:
            while done < stops and all(process.exitcode is None for process in processes):
                time.sleep(random.uniform(0.0, 0.3))  # they find each other again, all at once
                _signal(processes, signal.SIGSTOP)
                time.sleep(for_s)
                _signal(processes, signal.SIGCONT)
                done += buses
            crashed += sum(process.exitcode not in (None, 0) for process in processes)
    lease = "the lease of the profile" if lease_s is None else f"a lease of {lease_s:g} s"
    print(f"{done} stops of {for_s:g} s with {lease}: {crashed} crashes", flush=True)
    return crashed == 0


def _signal(processes: Sequence[Any], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has crashed
            os.kill(process.pid, number)


def _used_s(process: Any) -> float:
    """Processor time that all threads of a process have used, to the nanosecond."""
    tasks = Path(f"/proc/{process.pid}/task")
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks.iterdir()) / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: all as it should be."""
    parser = argparse.ArgumentParser(prog="python -m gradbus.experiments.pauses", description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("pauses", "kill", "crowd", "idle", "crash"), help="only this part")
    parser.add_argument("--runs", type=int, default=28, help="of pauses (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=900.0, help="that pauses may begin in (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=3, help="of each kind of group (default: %(default)s)")
    parser.add_argument("--crowds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--world", type=int, default=48, help="of a crowd (default: %(default)s)")
    parser.add_argument("--stops", type=int, default=512, help="for a crash (default: %(default)s)")
    parser.add_argument("--lease", type=float, help="of those that are stopped: 1 shows a fault of Cyclone DDS 11.0.1")
    parser.add_argument("--domain", type=int, default=91, help="of DDS (default: %(default)s)")
    asked = parser.parse_args(arguments)
    _context.set_forkserver_preload(["gradbus.experiments.pauses_rank"])
    parts: dict[str, Callable[[], bool]] = {
        "kill": lambda: kills(asked.kills, asked.domain),
        "idle": lambda: idle(12, asked.domain),
        "crash": lambda: crashes(asked.stops, asked.domain, asked.lease),
        "crowd": lambda: crowds(asked.crowds, asked.world, asked.domain),
        "pauses": lambda: pauses(asked.runs, asked.domain, asked.seconds),
    }
    fine = [part() for name, part in parts.items() if asked.only in (None, name)]  # all of them, whatever comes of one
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
