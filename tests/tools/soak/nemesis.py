"""What breaks things: one fault at a time, chosen by a seed, and noted with its beginning and its end."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from gradbus.commands.lab.namespaces import Host, set_link
from soak.processes import SoakProcess, SoakProcesses

PAUSE_S = (8.0, 16.0)  # between two faults
PATIENCE_S = 30.0  # for who was struck last, beyond the pause: a busy machine takes longer to start a process
SICK = "drop p=0.05; delay p=0.1 seconds=0.3; duplicate p=0.05; reorder p=0.05; corrupt p=0.03; seed={seed}"

LONG_S = 90.0  # a partition after which the transport has forgotten the other side

KINDS = ("kill client", "kill controller", "kill rank", "stop client", "sick client", "partition", "kill relay")
PARTITIONS = ("partition", "long partition")


class Nemesis:
    """Chooses a fault, does it, and undoes it when its time is over."""

    def __init__(
        self,
        processes: SoakProcesses,
        *,
        seed: int,
        far: Host | None,
        log: Path,
        with_long: bool = False,
        is_calm: Callable[[], bool] = lambda: True,
    ) -> None:
        """``far``: whose link can be cut; without it there are no partitions. ``with_long``: the first one is of
        ``LONG_S``. ``is_calm``: all are back after the last fault; the next one waits for that, ``PATIENCE_S`` at most,
        as what is measured is the recovery from one fault."""
        self._processes = processes
        self._random = random.Random(seed)
        self._far = far
        self._log = log
        self._undo_at_s = float("inf")
        self._next_at_s = time.monotonic() + PAUSE_S[0]
        self._now = ("", "")
        self._kinds: list[str] = []
        self._has_long_to_come = with_long
        self._is_calm = is_calm

    def turn(self) -> None:
        """Called now and then."""
        now_s = time.monotonic()
        if now_s >= self._undo_at_s:
            self._undo()
        elif (
            self._undo_at_s == float("inf")
            and now_s >= self._next_at_s
            and (self._is_calm() or now_s >= self._next_at_s + PATIENCE_S)
        ):
            self._strike(now_s)

    def _choose(self) -> str:
        """Each kind once before any comes again, in an order of the seed's."""
        if not self._kinds:
            impossible = set()
            if self._far is None:
                impossible.add("partition")
            if self._processes.relay is None:
                impossible.add("kill relay")
            self._kinds = [kind for kind in KINDS if kind not in impossible]
            self._random.shuffle(self._kinds)
        return self._kinds.pop()

    def _strike(self, now_s: float) -> None:
        kind, processes = self._choose(), self._processes
        victim: SoakProcess = self._random.choice(processes.clients[processes.spared :])
        lasts_s = 0.0
        match kind:
            case "kill controller":
                victim = processes.controller
                victim.send(signal.SIGKILL)
            case "kill rank":
                victim = self._random.choice(processes.ranks)
                victim.send(signal.SIGKILL)
            case "kill relay":
                assert processes.relay is not None
                victim = processes.relay
                victim.send(signal.SIGKILL)
            case "kill client":
                victim.send(signal.SIGKILL)
            case "sick client":
                victim.faults = SICK.format(seed=self._random.randrange(1000))
                victim.send(signal.SIGKILL)
                lasts_s = self._random.uniform(15.0, 25.0)
            case "stop client":
                victim.send(signal.SIGSTOP)
                lasts_s = self._random.uniform(1.0, 6.0)
            case "partition":
                assert self._far is not None
                set_link(self._far, up=False)
                lasts_s = self._random.choice([2.0, 5.0, 8.0])
                if self._has_long_to_come:
                    kind, lasts_s, self._has_long_to_come = "long partition", LONG_S, False
        target = "the far clients" if kind in PARTITIONS else victim.name
        self._now = (kind, target)
        self._note("begins", lasts_s)
        self._undo_at_s = now_s + lasts_s if lasts_s else float("inf")
        self._next_at_s = now_s + lasts_s + self._random.uniform(*PAUSE_S)

    def _undo(self) -> None:
        kind, target = self._now
        self._undo_at_s = float("inf")
        if kind in PARTITIONS and self._far is not None:
            set_link(self._far, up=True)
        for client in self._processes.clients:
            if client.name == target and kind == "stop client":
                client.send(signal.SIGCONT)
            elif client.name == target and kind == "sick client":
                client.faults = ""
                client.send(signal.SIGKILL)
        self._note("ends", 0.0)

    def _note(self, event: str, lasts_s: float) -> None:
        kind, target = self._now
        line = {"event": event, "at_s": time.monotonic(), "kind": kind, "target": target, "lasts_s": round(lasts_s, 2)}
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def rest(self) -> None:
        """Undo what is going on, and do nothing more."""
        if self._undo_at_s < float("inf"):
            self._undo()
        self._next_at_s = float("inf")
