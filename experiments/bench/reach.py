"""Federated rounds of hosts that can only dial out: through a relay, next to a plain forwarder, and to Flower.

Each host is a network namespace, whose link has 100 Mbit/s and 25 ms each way. All but the relay's host reach one port,
of that host, and nothing reaches them. A round is the model to all clients and an update of the same size from each;
nothing is trained. The link of the relay's host carries each client's bytes in both ways, so it is the narrowest.

The same bytes go through a forwarder on the same hosts (:mod:`.forwarder`), over TLS as well, by turns in one
laboratory. Flower's SuperLink is on the host of the relay, with its ServerApp (:mod:`.superlink_hosts`); without ``make
setup-flower`` it is left out. The first round of each launch warms up and does not count.

    make bench PART=reach ARGS="--part reach-8-lossy"
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gradbus
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import Host, Network, enter_host, hosts_on_a_switch, let_dial_only, traffic
from gradbus.experiments.bench.command import Benchmark, Part, add_effort
from gradbus.experiments.bench.federation import RoleWork, note_rounds, run_federation, take_part
from gradbus.experiments.bench.flower import PROGRAMS
from gradbus.experiments.bench.forwarder import ForwardedRounds, control_forwarded, forward, join_forwarded
from gradbus.experiments.bench.processes import Processes
from gradbus.experiments.bench.relay import RelayPlace, TlsFolder, relay_on
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.superlink_hosts import superlink_rounds
from gradbus.experiments.bench.timing import by_turns
from gradbus.models import NoopTask
from gradbus.runtime.security.job_key import new_job_key, write_secret_file

RATE_BIT_S, DELAY_S, PORT = 100e6, 0.025, 443
ROUNDS = 3
LEAST_SHARE = 0.9  # of the forwarder's throughput
TINY_BYTES = 200_000
_TIMEOUT_S = 1_200.0  # of a launch
_ROUND_S = 600.0


class ReachCell(NamedTuple):
    """One row: bytes of the model and of an update, clients, and the share of packets that each link loses."""

    num_bytes: int
    clients: int
    loss: float

    @property
    def title(self) -> str:
        """Return what the figures of the row are called after."""
        return f"{self.num_bytes / 1e6:.3g} MB, {self.clients} clients, {100 * self.loss:g} % lost"


CELLS: Mapping[str, ReachCell] = {
    "reach-2": ReachCell(100_000_000, 2, 0.0),
    "reach-2-lossy": ReachCell(100_000_000, 2, 0.01),
    "reach-8": ReachCell(4_800_000, 8, 0.0),
    "reach-8-lossy": ReachCell(4_800_000, 8, 0.01),
}


class ReachRoundEnd(NamedTuple):
    """When a round has ended, and what the relay's host has sent until then, in bytes with all headers."""

    at_s: float
    sent_bytes: int


class ReachLaunch(NamedTuple):
    """What the rounds of one launch have taken: seconds, and MB that the relay's host has sent. ``remark``: on it."""

    seconds: list[float]
    sent_mb: list[float]
    remark: str = ""


class ReachScene(NamedTuple):
    """Where a cell is measured. ``rounds``: of a launch, with the one that warms up."""

    cell: ReachCell
    network: Network
    files: TlsFolder
    key: Path
    rounds: int

    @property
    def relay_host(self) -> Host:
        """Return the host that the others can dial."""
        return self.network.hosts[0]

    @property
    def controller_host(self) -> Host:
        """Return the host of the controller."""
        return self.network.hosts[1]

    @property
    def client_hosts(self) -> Sequence[Host]:
        """Return the hosts of the clients."""
        return self.network.hosts[2:]

    def over_relay(self) -> ReachLaunch:
        """Run federated rounds through ``gradbus relay``."""
        place = RelayPlace(PORT, self.files.ca, self.key, self.relay_host.address)
        dim = self.cell.num_bytes // 4
        with relay_on(self.files, PORT, self.relay_host.machine_prefix):
            controller = self._on(self.controller_host, control_rounds, place, self.cell, self.rounds, self.relay_host)
            clients = {
                f"client-{number}": self._on(host, join_rounds, place, dim, number)
                for number, host in enumerate(self.client_hosts)
            }
            return launch_of(run_federation(controller, clients, timeout_s=_TIMEOUT_S)[0])

    def over_forwarder(self) -> ReachLaunch:
        """Send the same bytes through a forwarder."""
        plan = ForwardedRounds(self.files, PORT, self.cell.clients, self.cell.num_bytes, self.rounds)
        with Processes() as running:
            running.start("forwarder", on_host, self.relay_host, forward, plan)
            note = (note_end, self.relay_host)
            running.start("controller", on_host, self.controller_host, control_forwarded, plan, *note)
            for number, host in enumerate(self.client_hosts):
                running.start(f"client-{number}", on_host, host, join_forwarded, plan, number)
            algorithm, ends, *_ = running.results(_TIMEOUT_S)
        return launch_of(ends)._replace(remark=str(algorithm))

    def over_superlink(self) -> ReachLaunch:
        """Run Flower's rounds."""
        num_bytes = self.cell.num_bytes
        seconds = superlink_rounds(
            self.files, PORT, self.network.hosts, num_bytes=num_bytes, rounds=self.rounds, timeout_s=_TIMEOUT_S
        )
        return ReachLaunch(seconds[1:], [])

    def _on(self, host: Host, work: Callable[..., Any], *arguments: Any) -> RoleWork:
        return RoleWork(on_host, (host, work, *arguments))


def launch_of(ends: Sequence[ReachRoundEnd]) -> ReachLaunch:
    """Return what each round has taken, but for the first one."""
    seconds = [after.at_s - before.at_s for before, after in pairwise(ends)]
    return ReachLaunch(seconds, [(after.sent_bytes - before.sent_bytes) / 1e6 for before, after in pairwise(ends)])


def on_host(host: Host, work: Callable[..., Any], *arguments: Any) -> Any:
    """Do the work of a process on a host, as on another machine. Return what is awaited there, or what it returns."""
    enter_host(host)  # before any thread of the bus
    return work(*arguments)


def note_end(relay_host: Host, _: gradbus.RoundReport | None = None) -> ReachRoundEnd:
    """Note the end of a round."""
    at_s = time.monotonic()
    return ReachRoundEnd(at_s, traffic(relay_host).sent_bytes)


async def control_rounds(place: RelayPlace, cell: ReachCell, rounds: int, relay_host: Host) -> list[ReachRoundEnd]:
    """Be the controller. Return the ends of the rounds."""
    rules = {
        "rounds": rounds,
        "codec": "fp32",
        "clients": {"num": cell.clients, "min": cell.clients, "start_timeout_s": 120.0},
        "round": {"timeout_s": _ROUND_S},
        "eval_every": 0,
    }
    task = NoopTask(cell.num_bytes // 4)
    return (await note_rounds(place.connect(), task, rules, partial(note_end, relay_host))).rounds


async def join_rounds(place: RelayPlace, dim: int, client_id: int) -> None:
    """Be a client that adds to the model, so that it differs in each round."""
    await take_part(place.connect(), NoopTask(dim, delta="constant"), client_id)


def measure_cell(cell: ReachCell, chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Yield seconds of a round over the relay, against the forwarder and against Flower, and the bytes.

    Raises:
        NoNamespaces: no such network can be made here. ProcessFailed: a process failed.
    """
    if chosen.effort == "tiny":
        cell = cell._replace(num_bytes=TINY_BYTES, clients=2)
    conditions = LinkConditions(rate_bit_s=RATE_BIT_S, delay_s=DELAY_S, loss=cell.loss)
    with (
        hosts_on_a_switch(cell.clients + 2, conditions) as network,
        tempfile.TemporaryDirectory(prefix="gradbus-reach-") as folder,
    ):
        for host in network.hosts[1:]:
            let_dial_only(host, network.hosts[0], PORT)
        key = Path(folder) / "job.key"
        write_secret_file(key, new_job_key().text)
        files = TlsFolder(Path(folder) / "tls", network.hosts[0].address)
        scene = ReachScene(cell, network, files, key, 1 + (1 if chosen.effort == "tiny" else chosen.rounds))
        ways: dict[str, Callable[[], ReachLaunch]] = {"relay": scene.over_relay, "forwarder": scene.over_forwarder}
        if not (PROGRAMS / "flwr").exists():
            print("left out: Flower is not set up here: make setup-flower", file=sys.stderr)
        elif not chosen.without_flower:
            ways["SuperLink"] = scene.over_superlink
        taken = by_turns({way: partial(run_shown, way, run) for way, run in ways.items()}, chosen.launches)
        carrier = carried_by(network)
    yield from figures_of(cell, taken, carrier)


def run_shown(way: str, run: Callable[[], ReachLaunch]) -> ReachLaunch:
    """Run a launch, and print what its rounds took: all of them together take minutes."""
    launch = run()
    print(f"  {way}: {', '.join(f'{one:.1f}' for one in launch.seconds)} s a round", file=sys.stderr, flush=True)
    return launch


def figures_of(cell: ReachCell, taken: Mapping[str, Sequence[ReachLaunch]], carrier: str) -> Iterator[Measurement]:
    """Yield the figures of a cell from its launches by way. ``carrier``: of the packets."""
    seconds = {way: [one for launch in launches for one in launch.seconds] for way, launches in taken.items()}
    sent_mb = {way: [one for launch in launches for one in launch.sent_mb] for way, launches in taken.items()}
    least_s = 2 * 8 * cell.num_bytes * cell.clients / RATE_BIT_S
    algorithm = taken["forwarder"][0].remark
    yield measurement(
        f"round over a relay, {cell.title}",
        "s",
        seconds["relay"],
        against=("forwarder", seconds["forwarder"]),
        at_most=1 / LEAST_SHARE,
        note=f"{least_s:.3g} s by the rate of the relay's link; {algorithm}; {carrier}",
    )
    yield measurement(
        f"sent by the relay's host in a round, {cell.title}",
        "MB",
        sent_mb["relay"],
        against=("forwarder", sent_mb["forwarder"]),
        note="with all headers, and what was sent again",
    )
    if "SuperLink" in taken:
        yield measurement(
            f"round over a relay, next to Flower, {cell.title}",
            "s",
            seconds["relay"],
            against=("SuperLink", seconds["SuperLink"]),
            at_most=1.0,
        )


def carried_by(network: Network) -> str:
    """Return what has carried the packets, and whether it kept up."""
    switch = network.switch
    if switch is None:
        return "carried by the kernel"
    late = switch.counts["late"] / max(1, switch.counts["carried"])
    return f"carried by a process, {100 * late:.2f} % late{', which was the limit' if switch.was_the_limit else ''}"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--launches", type=int, default=1, help="of each way (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of a launch, after the first one (%(default)s)")
    parser.add_argument("--without-flower", action="store_true", help="measure relay and forwarder only")
    add_effort(parser, "the same: use --part")


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        name: Part(partial(measure_cell, cell), f"Behind NAT: {cell.title}", 500 if cell.clients == 2 else 200)
        for name, cell in CELLS.items()
    },
    _options,
)
