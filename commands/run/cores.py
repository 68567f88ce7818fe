"""Cores of their own for the ranks of a machine: what the machine has, which share each rank gets, how it is bound.

A rank that is moved between cores loses its caches, and on a machine of several NUMA nodes its memory becomes remote.
What it sends crosses to the node of the network card, so the cores of that node are given away first.
A binding that exists is left as it is: one of this process alone, or of OpenMP's variables. One that a launcher and all
of its ranks have, by ``taskset`` or a cpuset, is divided among them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradbus.commands.choices import BindMode
from gradbus.runtime.errors import ConfigError

CORES_PER_RANK = 2  # below that the threads of the bus would take their time from the one that trains
_OPENMP = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system calls; libc has no function for it
_MPOL_PREFERRED = 1  # another node's memory where this one's is used up; MPOL_BIND would end the process there
_MOST_NODES = 1024
_MOST_LAYERS = 4  # of interfaces on top of each other: a VLAN on a bond of cards


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: those of its logical processors (SMT siblings) that may be used, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """What a machine has for its ranks.

    Attributes:
        cores: sorted by node and number. quota: how many processors' time a control group grants; may be inf.
        card_nodes: NUMA nodes of the network cards that the run uses, by the cards' names; only those that are known.
    """

    cores: tuple[Core, ...]
    quota: float = float("inf")
    card_nodes: Mapping[str, int] = field(default_factory=dict)

    @property
    def nodes(self) -> dict[int, tuple[Core, ...]]:
        """Return the cores of each NUMA node that has any, nodes with a network card first."""
        found: dict[int, list[Core]] = defaultdict(list)
        for core in self.cores:
            found[core.node].append(core)
        by_distance = sorted(found, key=lambda node: (node not in self.card_nodes.values(), node))
        return {node: tuple(found[node]) for node in by_distance}

    def beside_cards(self) -> CpuTopology:
        """Return the part of the machine that shares a NUMA node with one of the network cards."""
        near = set(self.card_nodes.values())
        return replace(self, cores=tuple(core for core in self.cores if core.node in near))

    @property
    def most_ranks(self) -> int:
        """So many ranks at most are bound by ``auto``."""
        by_cores = sum(len(cores) // CORES_PER_RANK for cores in self.nodes.values())
        return min(by_cores, int(min(self.quota, len(self.cores)) // CORES_PER_RANK))

    def share(self, number: int, ranks: int) -> tuple[Core, ...]:
        """The cores of one of ``ranks`` ranks: disjoint, each share within a node, and all of one size, as the ranks
        wait for the slowest of them. Empty where there are fewer cores than ranks."""
        for size in range(len(self.cores) // ranks, 0, -1):
            slots = [
                cores[first : first + size]
                for cores in self.nodes.values()
                for first in range(0, len(cores) - size + 1, size)
            ]
            if len(slots) >= ranks:
                return slots[number]
        return ()


def read_topology(allowed: Collection[int], root: Path = Path("/"), interface: str | None = "") -> CpuTopology:
    """Return the machine as Linux describes it under ``/sys`` and ``/proc``.

    Args:
        allowed: logical processors that this process may run on, from ``sched_getaffinity``, which knows of cpusets.
        root: another folder than ``/`` with these two in it.
        interface: that the run sends by. Empty, or without a card, as ``lo``: by no card. None: by any card that has a
            cable.

    What cannot be read, as a quota of cgroup v1, is taken for the simplest case: each processor a core, one
    node, no quota.
    """
    system = root / "sys/devices/system"
    online = _numbers(system / "cpu/online")
    usable = set(allowed) & online if online else set(allowed)
    node_of: dict[int, int] = {}
    for folder in system.glob("node/node[0-9]*"):
        for cpu in _numbers(folder / "cpulist"):
            node_of[cpu] = int(folder.name.removeprefix("node"))
    cores: set[Core] = set()
    for cpu in usable:
        topology = system / f"cpu/cpu{cpu}/topology"
        siblings = _numbers(topology / "core_cpus_list") or _numbers(topology / "thread_siblings_list")
        cores.add(Core(tuple(sorted(usable & (siblings | {cpu}))), node_of.get(cpu, 0)))
    in_order = tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))
    return CpuTopology(in_order, _quota(root), _card_nodes(root / "sys/class/net", interface))


def _card_nodes(network: Path, interface: str | None) -> dict[str, int]:
    """Return the NUMA nodes of network cards, by the cards' names.

    Cards have ``device/numa_node``, which is -1 where the machine does not say. Virtual interfaces have no device: a
    bond, a bridge or a VLAN names those below it, ``lower_NAME``.
    """
    try:
        known = sorted(one.name for one in network.iterdir())
    except OSError:  # not Linux
        return {}
    names = {name for name in known if name == interface}
    if interface is None:
        names = {name for name in known if _text(network / name / "operstate") in ("up", "unknown")}
    found: dict[str, int] = {}
    for _ in range(_MOST_LAYERS):
        below: set[str] = set()
        for name in names:
            node = _text(network / name / "device/numa_node")
            if node.isdecimal():
                found[name] = int(node)
            below.update(one.name.removeprefix("lower_") for one in (network / name).glob("lower_*"))
        names = below & set(known)
    return dict(sorted(found.items()))


def _text(file: Path) -> str:
    """Return what a small file of the kernel says; "" where it cannot be read."""
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # numa_node of a card that is being removed; a carrier of an interface that is down
        return ""


def _numbers(file: Path) -> set[int]:
    """``0-3,8`` as numbers; empty where there is no such file."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in file.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def _quota(root: Path) -> float:
    """The least ``cpu.max`` of the control group of this process and of those around it (cgroup v2)."""
    least = float("inf")
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        top = root / "sys/fs/cgroup"
        for folder in (top / own, *(top / own).parents):
            if folder == top.parent:
                break
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                granted, period = (folder / "cpu.max").read_text(encoding="ascii").split()
                least = min(least, int(granted) / int(period))
    return least


@dataclass(frozen=True, slots=True)
class Binding:
    """``cpus`` that a rank is to be bound to, all of NUMA node ``node``; none where it is not, and ``why``."""

    cpus: tuple[int, ...] = ()
    node: int = 0
    why: str = ""


def decide(mode: BindMode, environment: Mapping[str, str], topology: CpuTopology, *, is_bound: bool) -> Binding:
    """Which cores this rank gets.

    Args:
        environment: LOCAL_RANK and LOCAL_WORLD_SIZE, of ``gradbus run`` and torchrun, say who shares the machine.
        is_bound: this process may run on other processors than the one that has started it.

    Raises:
        ConfigError: ``cores``, or those of the network card, are asked for and cannot be had.
    """
    if mode == "none":
        return Binding(why="--bind none")
    openmp = [
        f"{name}={environment[name]}" for name in _OPENMP if environment.get(name, "").lower() not in ("", "false")
    ]
    number, ranks = (environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    why = ""
    if openmp:
        why = f"{openmp[0]} binds its threads"
    elif is_bound:
        why = "it has been bound by what has started it"
    elif not (number.isdecimal() and ranks.isdecimal() and int(number) < int(ranks)):
        why = "LOCAL_RANK and LOCAL_WORLD_SIZE, which 'gradbus run' and torchrun set, do not say who shares the machine"
    elif mode == "auto" and int(ranks) > topology.most_ranks:
        quota = "" if topology.quota == float("inf") else f" and a quota of {topology.quota:g}"
        why = f"{len(topology.cores)} cores{quota} are fewer than {CORES_PER_RANK} for each of {ranks} ranks"
    elif mode == "network" and not topology.card_nodes:
        why = "no network card behind bus.interface names its NUMA node (/sys/class/net/*/device/numa_node)"
    else:
        chosen = topology.beside_cards() if mode == "network" else topology
        share = chosen.share(int(number), int(ranks))
        if share:
            return Binding(tuple(sorted(cpu for core in share for cpu in core.cpus)), share[0].node)
        beside = f" beside {', '.join(topology.card_nodes)}" if mode == "network" else ""
        why = f"{len(chosen.cores)} cores{beside} are fewer than {ranks} ranks"
    if mode in ("cores", "network"):
        raise ConfigError(f"--bind {mode}: this rank cannot get cores of its own, as {why}. Use --bind auto or none")
    return Binding(why=why)


def bind(mode: BindMode, interface: str | None = "") -> Binding:
    """Bind this process, and what it starts, to its share of the cores, and have it prefer the memory beside them.

    ``interface``: as for :func:`read_topology`.

    To be called before torch is loaded: it makes as many threads as there are cores then. Where the system has no such
    calls, or refuses them, nothing is bound, and ``why`` says so. Raises ConfigError as :func:`decide`.
    """
    if not hasattr(os, "sched_setaffinity"):
        if mode in ("cores", "network"):
            raise ConfigError(f"--bind {mode}: this system has no sched_setaffinity. Use --bind auto or none")
        return Binding(why="this system has no sched_setaffinity")
    allowed = starters = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # it has ended
        starters = os.sched_getaffinity(os.getppid())
    topology = read_topology(allowed, interface=interface)
    found = decide(mode, os.environ, topology, is_bound=starters != allowed)
    if not found.cpus:
        return found
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), found.cpus)
    except OSError as error:
        return Binding(why=f"the system refuses it: {error.strerror}")
    return Binding(found.cpus, found.node, prefer_memory(found.node) if len(topology.nodes) > 1 else "")


def prefer_memory(node: int) -> str:
    """Have this thread, and those it starts, take new memory from a NUMA node first. Returns "", or why it does not."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"memory: no system call is known for {platform.machine()}"
    words = (ctypes.c_ulong * (_MOST_NODES // 64))()
    words[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong)
    if call(number, _MPOL_PREFERRED, ctypes.byref(words), _MOST_NODES) != 0:
        return f"memory: the system refuses it: {os.strerror(ctypes.get_errno())}"
    return ""


def as_ranges(cpus: Collection[int]) -> str:
    """``0-3,8``, as the kernel writes it."""
    found: list[list[int]] = []
    for cpu in sorted(cpus):
        if found and found[-1][1] == cpu - 1:
            found[-1][1] = cpu
        else:
            found.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)
