"""Named identities: the keys and the allow list of a run, and what must hold for nodes that are on it and not.

The operator takes a client off the list and puts it on again, somebody starts a process whose key is not on the list
under the id of a client, and a client is started on another machine while its first process runs. Whoever is not
admitted never counts; whoever is on the list is never refused, unless another process has its identity.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fault_simulation.faults import CONTROLLER, Fault, draw_decision, draw_plan
from fault_simulation.findings import ADMISSION
from fault_simulation.kernel import generator, now_s
from gradbus.runtime.errors import BarrierTimeout, JoinRefused
from gradbus.runtime.security.identity.allow_list import AllowList, Entry
from gradbus.runtime.security.identity.key import NodeKey, public_text
from gradbus.runtime.security.settings import Security

if TYPE_CHECKING:
    from fault_simulation.kernel import VirtualProcess
    from fault_simulation.world import World

ACTIONS = ("revoke", "revoke", "stranger", "twin")
OUT_S = (0.05, 0.5, 4.0, 8.0)  # for so long a client is off the list
LATE_S = 30.0  # a partition and a lease: so late a client may hear that it is not on the list
READ_S = 3.0  # from a change of the list until the controller has read it: two looks, 0.4 s apart, and its own work
IN_TRANSIT_S = 1.0  # what has come before its sender was removed may be added to the sum for so long


def draw_admission_plan(rng: random.Random, roles: Sequence[str], rounds: int) -> tuple[Fault, ...]:
    """Return the faults of a run: those of every run, and one or two that concern admission."""
    plan = draw_plan(rng, roles, rounds)
    more = []
    for _ in range(rng.choice([1, 1, 2])):
        moment = draw_decision(rng, rng.choice([CONTROLLER, *roles[1:]]), rounds)
        more.append(Fault(moment, rng.choice(ACTIONS), rng.choice(roles[1:]), rng.choice(OUT_S)))
    return (*plan, *more)


class Identities:
    """The keys and the list of one run, and what the controller has read of it.

    Attributes:
        listed: roles that are on the list now.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._folder = world.folder / "keys"
        self.listed = set(world.roles[1:])
        self._in_force: set[str] = set()  # as the controller has read it
        self._out_since_s: dict[str, float] = {}
        self._process_of: dict[int, VirtualProcess] = {}  # by incarnation of a client
        self._public: dict[str, bytes] = {}
        self._revoked_s: dict[str, float] = {}  # when a client was taken off the list
        self._admitted_s: dict[str, float] = {}  # when a client was put on the list again

    def make_files(self) -> None:
        """Write the keys, also one that is never on the list, and the list."""
        self._folder.mkdir(parents=True)
        for role in (*self._world.roles, "stranger"):
            name = "client-0" if role == "stranger" else role  # the name is no secret
            seed = generator("identity", role).randbytes(32)
            key = NodeKey(name, Ed25519PrivateKey.from_private_bytes(seed))
            self._public[role] = key.public
            self._write(role, key.text)
        self._write_list()

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        temporary = path.with_suffix(".new")
        temporary.write_text(text, encoding="ascii")
        temporary.chmod(0o600)
        os.replace(temporary, path)

    def _write_list(self) -> None:
        entries = []
        for number, role in enumerate(self._world.roles[1:]):
            if role in self.listed:
                entries.append(Entry(role, "client", self._public[role], ((number, number),)))
        self._write("allowed", "# nodes of the run\n" + AllowList(tuple(entries)).text)

    def security_of(self, process: VirtualProcess) -> Security:
        """Return how the bus of a process is protected."""
        return Security(
            level="identity",
            key_file=self._folder / ("stranger" if process.is_stranger else process.role),
            controller_key=public_text(self._public[CONTROLLER]),
            allow_file=self._folder / "allowed" if process.role == CONTROLLER else None,
        )

    def revoke(self, role: str) -> None:
        """Take a client off the list."""
        self.listed.discard(role)
        self._revoked_s[role] = now_s()
        self._write_list()

    def was_off_lately(self, role: str) -> bool:
        """Return whether a client may still be told that it is not on the list, though it is."""
        return now_s() - self._admitted_s.get(role, 0.0) < LATE_S

    def check_stranger(self, process: VirtualProcess) -> None:
        """Check the end of a process that was not on the list: it was refused, or it found no controller."""
        if not isinstance(process.result, JoinRefused | BarrierTimeout):
            text = f"{process.name} is not on the allow list, and has ended with {process.result!r}"
            self._world.finding(ADMISSION, text)

    def admit(self, role: str) -> None:
        """Put a client on the list again."""
        self._admitted_s[role] = now_s()
        self.listed.add(role)
        self._write_list()

    def on_log(self, process: VirtualProcess, event: str) -> None:
        """Note that the controller has read the list, at its start or later."""
        if process.role == CONTROLLER and event in ("run starts", "allow list read"):
            self._in_force = set(self.listed)
            for role in self._world.roles[1:]:
                if role in self._in_force:
                    self._out_since_s.pop(role, None)
                else:
                    self._out_since_s.setdefault(role, now_s())

    def on_note(self, process: VirtualProcess, event: str, facts: dict[str, Any]) -> None:
        """Check that an update that counts is of a process that is admitted."""
        if process.role != CONTROLLER:
            if event == "started":
                self._process_of[facts["incarnation"]] = process
            return
        if event != "counted":
            return
        sender = self._process_of.get(facts["incarnation"])
        if sender is None or sender.is_stranger:
            name = "a process without a journal" if sender is None else sender.name
            self._world.finding(ADMISSION, f"an update of {name} counts, which is not on the allow list")
        elif now_s() - self._out_since_s.get(sender.role, now_s()) > IN_TRANSIT_S:
            out_s = now_s() - self._out_since_s[sender.role]
            text = f"an update of {sender.name} counts, {out_s:.1f} s after the controller has read the list without it"
            self._world.finding(ADMISSION, text)
        elif sender.role not in self.listed and sender.role not in self._out_since_s:
            runs_since_s = max(
                process.started_s, self._world.excused_s[CONTROLLER]
            )  # it may have been paused until then
            if now_s() - max(runs_since_s, self._revoked_s[sender.role]) > READ_S:
                self._world.finding(
                    ADMISSION, f"an update of {sender.name} counts: the controller has not read the list"
                )
