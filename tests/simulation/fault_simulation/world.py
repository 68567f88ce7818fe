"""One simulated run: the actors, a controller and clients here, their machines and network, and the faults that hit
them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fault_simulation.admission import Identities, draw_admission_plan
from fault_simulation.disk import Disk
from fault_simulation.excuses import (
    FOUND_AGAIN_S,
    Disturbances,
    had_living_rival,
    is_round_without_time,
    unheard_controller,
)
from fault_simulation.faults import CONTROLLER, MACHINES, OF_NETWORK, Fault, draw_plan
from fault_simulation.findings import BOUNDS, ENDS, EXCEPTIONS, LOGS, MEAN, REPLACED, TASKS, Finding
from fault_simulation.flavours import CALM, FLAVOURS, Circumstances, draw_circumstances
from fault_simulation.kernel import CLOCK, START_S, Killed, VirtualProcess, current, generator, now_s
from fault_simulation.memory import VirtualMemoryNetwork, connected, connected_with_identity, virtual_network
from fault_simulation.relay_faults import on_links
from fault_simulation.relay_network import RelayNetwork
from fault_simulation.seeds import MEMORY, SMALL
from fault_simulation.tasks import DIM, TRAINING_SEED, PacketTask, ReportingTask
from fault_simulation.trace import Trace
from fault_simulation.trees import RETIRED_AFTER_S, TreeOracle, above, draw_tree_plan, number_of, roles_of, run_site
from fault_simulation.virtual_loop import Deadlock, Livelock, VirtualLoop
from gradbus.actors import Client, Controller, Site
from gradbus.actors.federated.client.last_model import LAST_MODEL_S
from gradbus.models import NoopTask
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import ClientConfig, FederatedConfig
from gradbus.runtime.errors import CheckpointError, ControllerReplaced, JoinRefused

ROUND_LIMIT_S = 65.0  # of virtual time, for each round with all faults
COMPUTE_S = 5e-4  # mean cost of a computation that is no training
KERNEL_REPORTS_S = (1e-3, 0.04)  # from the end of a process until the kernel reports it
FULL_S = 10.0  # from a sync that found the disk full until the actor has closed its bus, and ended with that error
LATE_REFUSAL_S = 1.0  # from the end of a client that was refused, and would be admitted now, until its next start
NEVER_LOGGED = ("strike", "history ends", "message not handled", "readers or writers not deleted")
LAST_MODEL_LOST = "last model not received"
MEAN_TOLERANCE = 1e-5  # changes are of some 1e-3, and masked sums on a grid
CHECK_EVERY = 64  # callbacks
STOPPED_S = (0.2, 3.0)  # from an error that says to stop another controller first until that is done
HEARD_S = 6.0  # from the first command of another start until the one that it has replaced must have heard of it


class World:
    """A run of one seed.

    Attributes:
        plan: its faults. findings: what does not hold; empty after a good run. notes: what is allowed.
        happened: the faults of the plan that have happened. crc32_of: clients and model of each reported round.
        ended: the processes that have reached their end, by role. reported: rounds that the controllers reported.
        journal: all decisions, with their process and their facts. calm_s: when the effect of the last fault was over.
    """

    round_limit_s = ROUND_LIMIT_S

    def __init__(
        self,
        seed: int,
        flavour: str,
        *,
        size: tuple[int, int] = SMALL,
        keep: Collection[int] | None = None,
        plan: Sequence[Fault] | None = None,
        is_calm: bool = False,
        transport: str = MEMORY,
    ) -> None:
        """Draw what the seed decides.

        Args:
            size: numbers of clients and of rounds.
            keep: numbers of the faults of its plan that happen, from 0; None: all.
            plan: faults instead of those that the seed draws. is_calm: all clients count in all rounds without faults.
            transport: memory, or zenoh: over a simulated relay.
        """
        clients, rounds = size
        self.seed, self.flavour, self.size, self.rounds = seed, flavour, size, rounds
        self.is_relayed = transport != MEMORY
        self.rules = FLAVOURS[flavour]
        self.roles = self._draw_roles(clients)
        self.rng = generator(seed, "world")
        self.circumstances = draw_circumstances(generator(seed, "circumstances"), flavour, self.roles, MACHINES)
        if is_calm:
            self.circumstances = replace(self.circumstances, minimum=clients, **CALM)
        self.drawn = self._draw_plan(generator(seed, "plan")) if plan is None else tuple(plan)
        if plan is None and self.is_relayed:
            self.drawn = on_links(generator(seed, "links"), self.drawn)
        self.plan = [fault for number, fault in enumerate(self.drawn) if keep is None or number in keep]
        self.trace = Trace()
        self.folder = Path("run")
        self.loop = VirtualLoop(self)
        self.network = self._make_network(self.circumstances)
        self.disk = Disk(self.folder, generator(seed, "disk"), self._at_sync)
        self.by_claim: dict[str, VirtualProcess] = {}
        self.processes: list[VirtualProcess] = []
        self.ended: dict[str, VirtualProcess] = {}
        self.reported: list[int] = []
        self.crc32_of: dict[int, tuple[tuple[int, ...], int]] = {}
        self.happened: list[Fault] = []
        self.journal: list[tuple[VirtualProcess, str, dict[str, Any]]] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.calm_s = START_S
        self.disturbances = Disturbances()
        self.excused_s: dict[str, float] = defaultdict(float)  # until when a role may have missed something
        self.excuses: dict[str, list[tuple[float, float]]] = defaultdict(list)  # and all these times, from and until
        self.virtual_s = 0.0
        self.client_ids: dict[str, int] = {role: number_of(role) for role in self.roles[1:]}
        self.tree = TreeOracle(self) if self.rules.sites else None
        self.identities = Identities(self) if self.rules.has_identities else None
        self.sites: dict[str, Site] = {}  # the newest start of each
        self.retired: set[str] = set()  # sites that were stopped for good, as the run above them is over
        self._now: dict[str, VirtualProcess] = {}
        self._starts: Counter[str] = Counter()
        self._due: Counter[str] = Counter()  # starts that are scheduled
        self._refused: set[str] = set()  # roles off the allow list whose process has ended
        self._pids = itertools.count(1001)
        self._at_steps = sorted(
            (fault for fault in self.plan if fault.moment.kind == "step"), key=lambda one: one.moment.number
        )
        self._at_decisions = [fault for fault in self.plan if fault.moment.kind != "step"]
        self._reached: Counter[tuple[str, str, str, str]] = Counter()
        self._restart_s: dict[str, float | None] = {}  # None: never again
        self._replaced: list[tuple[VirtualProcess, float]] = []  # paused, and for how long each goes on later
        self._changes: dict[tuple[int, int], torch.Tensor] = {}  # by client and round
        self._machines = dict(self.circumstances.machines)

    def _draw_plan(self, rng: random.Random) -> tuple[Fault, ...]:
        if self.rules.sites:
            return draw_tree_plan(rng, self.roles, self.rounds, self.rules.sites)
        if self.rules.has_identities:
            return draw_admission_plan(rng, self.roles, self.rounds)
        return draw_plan(rng, self.roles, self.rounds, replaces=self.rules.replaces)

    def _draw_roles(self, clients: int) -> list[str]:
        """Return the roles of the run. Faults hit the first one most."""
        return roles_of(clients, self.rules.sites)

    def _make_network(self, drawn: Circumstances) -> VirtualMemoryNetwork | RelayNetwork:
        made = RelayNetwork if self.is_relayed else virtual_network
        network = made(self.loop, f"{self.seed}/network", self.trace)
        network.set_circumstances(drawn.base_s, drawn.jitter_s, drawn.loss, drawn.refused, drawn.lease_s)
        return network

    # What is reported to it

    def finding(self, invariant: str, text: str) -> None:
        """Note that something does not hold."""
        self.findings.append(Finding(invariant, now_s() - START_S, text))

    def on_loop_error(self, context: dict[str, Any]) -> None:
        """Note an exception that has reached the loop."""
        error, process = context.get("exception"), current()
        if isinstance(error, Killed) or (process is not None and process.dead):
            return
        text = "".join(traceback.format_exception(error)) if error else ""
        name = process.name if process else "the network"
        self.finding(EXCEPTIONS, f"an exception reached the loop of {name}: {context.get('message')} {error!r}\n{text}")

    def on_log(self, process: VirtualProcess, method: str, event: str, facts: dict[str, Any], error: str) -> None:
        """Take an event that a process has logged."""
        shown = " ".join(f"{name}={value}" for name, value in sorted(facts.items()))
        self.trace.add(f"{process.name} logs {method}: {event} {shown}")
        if self.identities is not None and not process.dead:
            self.identities.on_log(process, event)
        if process.dead or process.replaced or self.disk.is_full(process.role):
            return
        if event == LAST_MODEL_LOST and self.calm_s + LAST_MODEL_S < now_s():
            self.finding(LOGS, f"{process.name} logged {event}, with no fault since it waits: {shown}")
        if self.tree is not None and is_round_without_time(
            self.disturbances, event, facts, now_s=now_s(), lease_s=self.network.lease_s
        ):
            self.notes.append(f"{process.name} had no time for a round of a site: {str(facts['error'])[:100]}")
            return
        is_error = method in ("error", "critical") and event not in self.rules.may_log
        if error or is_error or event in NEVER_LOGGED:
            self.finding(LOGS, f"{process.name} logged {method}: {event} {shown} {error}")

    def on_note(self, process: VirtualProcess, event: str, facts: dict[str, Any], *, is_kept: bool) -> None:
        """Take a decision that a process journals. ``is_kept``: it has a journal, which a site has not as a client."""
        if process.dead or process.replaced:
            return
        if is_kept:
            self.journal.append((process, event, facts))
        if self.identities is not None:
            self.identities.on_note(process, event, facts)
        if self.tree is not None:
            self.tree.on_note(process, event, facts, is_kept=is_kept)
        if event == "commanded":
            self._resume_replaced()
        if event == "committed" and process.role == CONTROLLER and facts["round"] == self.rounds:
            # Who starts only after the end of the run cannot know of the two, and would follow the one that is left.
            for one in self.processes:
                if one.replaced and not one.dead:
                    self.network.at(0.0, self._end_replaced, one, 0.0)
        shown = " ".join(
            f"{name}={value}" for name, value in facts.items() if name in ("round", "client", "clients", "reason")
        )
        self.trace.add(f"{process.name} journals {event} {shown}")

    def compute_cost_s(self, function: Callable[..., Any]) -> float:
        """Return the virtual time that a computation takes."""
        names = [getattr(cell.cell_contents, "__name__", "") for cell in getattr(function, "__closure__", None) or ()]
        is_training = "prepare" in names or "train" in names
        return self.rng.expovariate(1.0) * (self.circumstances.train_s if is_training else COMPUTE_S)

    # Moments

    def before_step(self, steps: int) -> None:
        """Inject the faults of this callback."""
        while self._at_steps and self._at_steps[0].moment.number <= steps:
            self.inject(self._at_steps.pop(0))
        if steps % CHECK_EVERY == 0:
            self._check_bounds()

    def at_decision(self, process: VirtualProcess, kind: str, name: str, when: str, number: int = 0) -> None:
        """Inject the faults of this decision. Raises Killed: they have killed the process that takes it."""
        if process.dead or process.replaced:  # its stack unwinds: nothing that it does has an effect
            return
        reached = (kind, process.role, name, when)
        self._reached[reached] += 1
        number = number or self._reached[reached]
        for fault in list(self._at_decisions):
            moment = fault.moment
            if (moment.kind, moment.role, moment.name, moment.when) == reached and moment.number == number:
                self._at_decisions.remove(fault)
                self.inject(fault)
        if process.dead:
            raise Killed

    def on_decision(self, process: VirtualProcess, name: str, facts: dict[str, Any]) -> None:
        """Take a decision that is in no journal, with what it was about: see :mod:`.decisions`."""
        self.journal.append((process, name, facts))
        shown = " ".join(f"{key}={value}" for key, value in facts.items() if isinstance(value, str | int | tuple))
        self.trace.add(f"{process.name} decides {name} {shown}")

    def _at_sync(self, process: VirtualProcess, when: str) -> None:
        self.at_decision(process, "sync", "", when)

    def inject(self, fault: Fault) -> None:
        """Let a fault happen."""
        self.happened.append(fault)
        self.trace.add(f"FAULT {fault}")
        self.calm_s = max(self.calm_s, now_s() + abs(fault.seconds))
        self.disturbances.add(now_s(), now_s() + fault.lasts_s)
        if fault.action in (*OF_NETWORK, "revoke", "stranger", "twin"):
            self._inject_around(fault)
            return
        process = self._now.get(fault.role)
        if process is None or process.dead:
            return
        match fault.action:
            case "kill" | "power":
                process.lost_power = fault.action == "power"
                self._kill(process, fault.seconds)
                for lost in self.disk.lose_power(process.role) if fault.action == "power" else ():
                    self.trace.add(f"the disk of {process.role} has lost {lost}")
            case "stop":
                self._stop(process, fault.seconds)
            case "pause":
                self._pause(process, fault.seconds)
            case "replace":
                self._replace(process, fault.seconds)
            case "slow":
                process.slow_until_s = now_s() + fault.seconds
                self._excuse([process.role], fault.seconds)
            case "clock":
                process.wall_ns += int(fault.seconds * 1e9)
            case "disk":
                self.disk.fill(process.role, fault.seconds)
            case "lease":
                self._lose_one_side(process, fault)

    def _inject_around(self, fault: Fault) -> None:
        """Let a fault happen that does not need a live process."""
        if fault.action in OF_NETWORK:
            self._excuse(self.roles, fault.seconds)
            self.network.inject(fault, self._now.get(fault.role))
            return
        assert self.identities is not None, "only a flavour with identities has such faults"
        if fault.action == "revoke":
            self.identities.revoke(fault.role)
            self.network.at(fault.seconds, self._admit_again, fault.role)
        elif fault.action == "stranger":
            self.start(fault.role, is_stranger=True)
        elif fault.role in self._now and fault.role not in self.ended:
            self.disk.copy_folder(fault.role)
            self.disk.folder_of(fault.role).mkdir(parents=True, exist_ok=True)  # so that the next copy has another name
            self._machines[fault.role] = self.rng.randrange(MACHINES)
            self.start(fault.role)

    def _admit_again(self, role: str) -> None:
        assert self.identities is not None
        self.identities.admit(role)
        self.calm_s = max(self.calm_s, now_s())
        if role in self._refused:
            self._refused.discard(role)
            self._start_later(0.0, role)

    def _excuse(self, roles: Collection[str], seconds: float) -> None:
        until_s = now_s() + seconds + FOUND_AGAIN_S
        for role in roles:
            self.excused_s[role] = max(self.excused_s[role], until_s)
            self.excuses[role].append((now_s(), until_s))

    def _lose_one_side(self, process: VirtualProcess, fault: Fault) -> None:
        other = self._now.get(fault.other)
        assert isinstance(self.network, VirtualMemoryNetwork), "a relay reports a loss to all"
        if other is not None and not other.dead and other.machine != process.machine:
            self._excuse([fault.role, fault.other], fault.seconds)
            self.network.lose_one_side(process, other, fault.seconds)

    def _pause(self, process: VirtualProcess, seconds: float | None) -> None:
        """Pause a process, for so long; None: until somebody resumes it."""
        if process.paused:
            return
        self._excuse([process.role], seconds or 0.0)
        self.network.pause(process)
        if seconds is not None:
            self.network.at(seconds, self._resume, process)

    def _replace(self, process: VirtualProcess, seconds: float) -> None:
        """Pause a process until another start, with a copy of its state, has given its first command; then let it go
        on beside that one, and kill it after so many seconds."""
        if process.paused:
            return
        self._pause(process, None)
        process.replaced = True
        self._replaced.append((process, seconds))
        self.disk.copy_folder(process.role)
        self._machines[process.role] = self.rng.randrange(MACHINES)
        self.network.at(self.rng.uniform(0.01, 4.0), self.start, process.role)

    def _resume_replaced(self) -> None:
        for process, seconds in self._replaced:
            self.calm_s = max(self.calm_s, now_s() + seconds + self.network.lease_s)
            self._excuse(self.roles, seconds)
            self.network.at(self.rng.uniform(0.0, 0.5), self._resume, process)
            self.network.at(seconds, self._end_replaced, process, seconds)
        self._replaced.clear()

    def _end_replaced(self, process: VirtualProcess, seconds: float) -> None:
        if process.dead:
            return
        if seconds >= HEARD_S and len(self.happened) == 1:  # no other fault has kept the two apart
            self.finding(
                REPLACED, f"{process.name} goes on {seconds:g} s after the first command of the start in its place"
            )
        self.trace.add(f"{process.name} is killed, which was replaced")
        process.killed = True
        self._end(process)

    def _resume(self, process: VirtualProcess) -> None:
        process.paused, process.went_on_s = False, now_s()
        if not process.dead:
            self.trace.add(f"{process.name} goes on")
            self.loop.resume(process)
            self.network.reconnect()

    def _stop(self, process: VirtualProcess, again_s: float) -> None:
        if process.main is not None:
            self._restart_s[process.name] = again_s
            process.context.run(process.main.cancel)

    def _kill(self, process: VirtualProcess, again_s: float) -> None:
        """Kill a process as ``kill -9`` does: its network and files end first, and no code of it runs any more."""
        self.trace.add(f"{process.name} is killed")
        process.killed = True
        self._end(process)
        if not process.replaced:  # else the start in its place is on its way
            self._start_later(again_s, process.role)

    def _start_later(self, seconds: float, role: str) -> None:
        self._due[role] += 1
        self.network.at(seconds, self._start_due, role)

    def _start_due(self, role: str) -> None:
        self._due[role] -= 1
        if not any(one.role == role and not (one.dead or one.replaced or one.is_stranger) for one in self.processes):
            self.start(role)  # else a second process of it, with a copy of its state, runs in its place

    def _end(self, process: VirtualProcess) -> None:
        process.dead, process.ended_s = True, now_s()
        process.parked.clear()
        process.close_files()
        self.network.ended(process)
        for ended, context in process.watchers:
            self.loop.call_later(self.rng.uniform(*KERNEL_REPORTS_S), ended, process.claim, context=context)

    # Actors

    def above(self, role: str) -> str:
        """Return the role whose job another one takes part in."""
        return above(role, self.rules.sites)

    def history_of(self, role: str) -> Path:
        """Return the folder of the journals of the controller, or a site, and of its clients."""
        return self.folder / "history" if role == CONTROLLER else self.folder / role / "history"

    def start(self, role: str, *, is_stranger: bool = False) -> None:
        """Start an actor, unless the run is over for it. ``is_stranger``: or a process that only claims to be that."""
        if role in self.ended:
            return
        self._starts[role] += 1
        machine = self._machines[role]
        process = VirtualProcess(self, role, self._starts[role], machine=machine, pid=next(self._pids))
        process.wall_ns = self.rng.choice([0, self.rng.randrange(10**9)])
        process.is_stranger = is_stranger
        self.by_claim[process.claim] = process
        if not is_stranger:
            self._now[role] = process
        self.processes.append(process)
        self.trace.add(f"{process.name} starts on machine {machine}")
        process.main = process.context.run(
            lambda: self.loop.create_task(self._main(process), name=process.name, context=process.context)
        )

    async def _main(self, process: VirtualProcess) -> None:
        again_s: float | None = None
        try:
            process.result = await self._act(process)
        except asyncio.CancelledError:
            again_s = self._restart_s.pop(process.name)
        except CheckpointError as error:
            if (
                now_s() < self.disk.refused_s.get(process.role, 0.0) + FULL_S
            ):  # somebody makes room, and starts it again
                again_s = 1.0 + self.disk.full_for_s(process.role)
            else:
                process.result = error
        except Exception as error:
            again_s = self._again_after_s(process, error)
            process.result = error if again_s is None else None
        if process.dead:
            raise Killed
        self._check_tasks(process)
        if process.replaced:  # the run is over for its role when it is over for the one in its place
            if isinstance(process.result, Exception) and not isinstance(process.result, ControllerReplaced):
                self.finding(REPLACED, f"{process.name} has ended with {process.result!r}")
        elif again_s is not None:
            self.calm_s = max(self.calm_s, now_s() + again_s)
            self._start_later(again_s, process.role)
        elif not self._is_refused(process):
            self.ended[process.role] = process
        outcome = type(process.result).__name__ if isinstance(process.result, Exception) else "well"
        self.trace.add(f"{process.name} ends, {outcome if again_s is None else 'and starts again'}")
        self._end(process)

    def _is_refused(self, process: VirtualProcess) -> bool:
        """Return whether the controller has told a process to stop that it need not serve: the run is not over for its
        role."""
        if self.identities is None:
            return False
        role = process.role
        if process.is_stranger:
            self.identities.check_stranger(process)
            return True
        if not isinstance(process.result, JoinRefused):
            return False
        others = [one for one in self.processes if one.role == role and one is not process]
        in_its_place = [one for one in others if not one.dead and not one.is_stranger]
        if role in self.ended:
            return True  # the process that has its identity now has come to the end of the run
        if in_its_place:
            self._now[role] = in_its_place[-1]
        elif role not in self.identities.listed:
            self._refused.add(role)
        elif self._would_be_admitted_now(process, others):
            self._start_later(LATE_REFUSAL_S, role)
        else:
            return self._due[role] > 0
        return True

    def _would_be_admitted_now(self, process: VirtualProcess, others: Collection[VirtualProcess]) -> bool:
        """Return whether a client was refused for what is over: it is on the list again, or the process that had its
        key has died."""
        assert self.identities is not None
        if self.identities.was_off_lately(process.role):
            return True
        if self._due[process.role] or not had_living_rival(others, process, process.result, now_s=now_s()):
            return False
        self.notes.append(f"{process.name} is refused for a later process with its key, which has died")
        return True

    def _actor_of(self, role: str) -> Callable[[VirtualProcess], Awaitable[object]]:
        if role == CONTROLLER:
            return self._controller
        return partial(run_site, self) if role.startswith("site") else self._client

    def _retire_sites(self) -> None:
        """Stop the sites that go on alone: the run above has ended while they were cut off, and never comes back."""
        for role, site in self.sites.items():
            process = self._now[role]
            if role not in self.ended and site.progress.phase == "alone" and process.main is not None:
                self.retired.add(role)
                self._restart_s[process.name] = None
                process.context.run(process.main.cancel)
        self.network.at(RETIRED_AFTER_S, self._retire_sites)  # one that is paused now may be alone later

    async def _act(self, process: VirtualProcess) -> object:
        """Run the actor of a process to its end, and return its result."""
        return await self._actor_of(process.role)(process)

    def _again_after_s(self, process: VirtualProcess, error: Exception) -> float | None:
        """Return after how long an actor is started again that has ended with this error; None: it is not."""
        runs = {one.name: facts["run"] for one, event, facts in self.journal if event == "started" and "run" in facts}
        first = unheard_controller(self.processes, runs, process, error)
        if first is None:
            return None
        self.notes.append(f"{first.name} is stopped by hand, as {process.name} asks for: {str(error)[:100]}")
        self._end_replaced(first, 0.0)
        return self.rng.uniform(*STOPPED_S)

    async def _controller(self, process: VirtualProcess) -> list[int]:
        drawn, sites = self.circumstances, self.rules.sites
        participants = sites or self.size[0]
        config = FederatedConfig.model_validate(
            {
                "rounds": self.rounds,
                "seed": TRAINING_SEED,
                "eval_every": 0,
                "clients": {
                    "kind": "sites" if sites else "clients",
                    "num": participants,
                    "min": min(drawn.minimum, participants),
                    "dead_after_s": drawn.dead_after_s,
                    "start_grace_s": 2.0,
                },
                "round": {"timeout_s": 30.0, "quorum": drawn.quorum, "grace_s": 1.0, "max_attempts": 5},
                "checkpoint": {"dir": self.disk.folder_of(CONTROLLER)},
                "history": {"dir": self.history_of(CONTROLLER), "payloads": self.rules.keeps_payloads},
                **self.rules.settings,
            }
        )
        async with self._bus_of(process) as bus:
            controller = Controller(bus, NoopTask(DIM, delta="seeded"), config)
            async for report in controller.rounds():
                if process.replaced:
                    continue
                self.trace.add(
                    f"{process.name} reports round {report.round_id}: clients {list(report.clients)}, "
                    f"{report.outcome}, attempt {report.attempt}, crc32 {report.weights_crc32:08x}"
                )
                self.reported.append(report.round_id)
                counted = report.clients if self.tree is None else self.tree.clients_of[report.round_id]
                self.crc32_of[report.round_id] = counted, report.weights_crc32
            if self.rules.is_mean and not process.replaced:
                self._check_mean(controller)
            if sites:
                self.network.at(RETIRED_AFTER_S, self._retire_sites)
            return [report.round_id for report in controller.progress.reports]

    async def _client(self, process: VirtualProcess) -> object:
        kept: dict[str, Any] = {
            "history": {"dir": self.history_of(self.above(process.role))},
            "state_dir": self.disk.folder_of(process.role),
        }
        if process.is_stranger:
            kept = {}
        config = ClientConfig.model_validate({"controller_timeout_s": 60.0, **kept})
        flavour, number = self.rules, number_of(process.role)
        who: dict[str, Any] = {"name": f"site-{number}"} if flavour.named else {"client_id": number}
        task = PacketTask(DIM) if flavour.packets else ReportingTask(DIM, self._note_change)
        job = self.above(process.role) if flavour.sites else "simulation"
        async with self._bus_of(process, job) as bus:
            client = Client(bus, task, **who, config=config)
            try:
                return await client.run()
            finally:
                if not process.is_stranger:
                    self.client_ids[process.role] = client.client_id

    def _bus_of(self, process: VirtualProcess, job: str = "simulation") -> AbstractAsyncContextManager[Bus]:
        if self.identities is None:
            return connected(process, job)
        return connected_with_identity(process, self.identities.security_of(process), job)

    def _note_change(self, client_id: int, round_id: int, change: torch.Tensor) -> None:
        self._changes[client_id, round_id] = change

    # What must hold at every moment

    def _check_mean(self, controller: Controller) -> None:
        # Of rounds long past, a controller that has resumed does not know the clients any more: its journal has them.
        counted = {report.round_id: report.clients for report in controller.progress.reports}
        for process, event, facts in self.journal:
            if process.role == CONTROLLER and event == "committed":
                counted[facts["round"]] = facts["clients"]
        expected = torch.zeros(DIM)
        for round_id, clients in sorted(counted.items()):
            if clients:
                changes = [self._changes[client_id, round_id] for client_id in clients]
                expected += torch.stack(changes).mean(dim=0)
        error = float((controller.weights - expected).abs().max())
        if not error <= MEAN_TOLERANCE:
            self.finding(MEAN, f"a value of the last model is wrong by {error:g}")

    def _check_tasks(self, process: VirtualProcess) -> None:
        left = [task.get_name() for task in process.tasks if not task.done() and task is not process.main]
        if left:
            self.finding(TASKS, f"{process.name} has ended, and left the tasks {left}")

    def _check_bounds(self) -> None:
        for text in self.network.overfull():
            self.finding(BOUNDS, text)

    # The run

    def run(self) -> str:
        """Run until all actors have ended. Returns the digest of the trace."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.identities is not None:
            self.identities.make_files()
        CLOCK.now_s = START_S
        torch.manual_seed(0)
        random.seed(0)
        try:
            for role in self.roles:
                self.network.at(self.rng.uniform(0, 1.0), self.start, role)
            try:
                limit_s = self.round_limit_s * self.rounds
                if not self.loop.run_until(lambda: len(self.ended) == len(self.roles), START_S + limit_s):
                    self.finding(ENDS, f"{self._missing()} have not ended after {limit_s:g} s")
            except (Deadlock, Livelock) as error:
                self.finding(ENDS, f"{type(error).__name__}, {error}: {self._missing()} have not ended")
            self.virtual_s = now_s() - START_S
            self._judge()
            return self.trace.digest
        finally:
            self._tear_down()
            CLOCK.now_s = None
            shutil.rmtree(self.folder, ignore_errors=True)

    def _judge(self) -> None:
        """Note what does not hold at the end of the run."""
        from fault_simulation import oracles  # which reads worlds

        oracles.judge(self)

    def fixed_crc32(self) -> int | None:
        """Return the CRC-32 of the last model, if all clients counted in all rounds; None: not so, or not known."""
        everyone = tuple(range(self.size[0]))
        known = [self.crc32_of.get(round_id) for round_id in range(1, self.rounds + 1)]
        if not all(one is not None and tuple(sorted(one[0])) == everyone for one in known):
            return None
        return self.crc32_of[self.rounds][1]

    def _missing(self) -> list[str]:
        return [role for role in self.roles if role not in self.ended]

    def _tear_down(self) -> None:
        """Close what is left, in the context of its process: a coroutine that is collected later would run its
        ``finally`` blocks in the midst of another seed."""
        for process in self.processes:
            process.dead = True
        with self.loop.running():  # some of these blocks await
            self._close_tasks()
        self.loop.shut()
        self.network.clear()

    def _close_tasks(self) -> None:
        for process in self.processes:
            for task in process.tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio has no other way to give up a task
                    with contextlib.suppress(BaseException):
                        coroutine: Any = task.get_coro()
                        process.context.run(coroutine.close)
                elif not task.cancelled():
                    task.exception()  # nobody else asks for it
            process.close_files()
            process.tasks.clear()
            process.parked.clear()
