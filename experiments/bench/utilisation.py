"""Utilisation of ranks behind thin or distant links: what they compute over the time it takes, beside what can be had.

Two hosts on the network laboratory's switch. The curve is that of an exchange without any overhead::

    compute / (compute + bytes * 8 / rate + 2 * delay * round_trips)

of one period: a step, or the H steps up to an exchange. Bytes are what a rank sends; what is computed, codecs included,
is measured in the same run. Round trips: a sum counts as a ring or sharded all-reduce, which needs the shards of all
ranks, and each shard's sum, one after the other: 2 ways, 1 round trip; gathered messages need 1 way, half a one. Two
ranks that send each other their whole messages can be better than that curve: they need half a round trip for a sum,
too, so that there is a stricter curve beside it. What is exchanged while training goes on (``delay``) counts as far as
it takes longer than computing: max in place of the sum. A cell is the median of some runs, one after the other in the
same processes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradbus import models
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import hosts_on_a_switch
from gradbus.experiments.bench.data_parallel import steps_of
from gradbus.experiments.bench.processes import BenchRank, ProcessFailed, run_ranks
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.training import Training

MOST_OF_CURVE = 1.15  # how far below the curve a way may be
_DATAGRAM_BYTES, _PAYLOAD_BYTES = 1_400, 1_316  # of DDS with the profile "network"
_DATAGRAM_TURNS, _PORT = 31, 47_000
WIRED_BYTES = 14_700  # datagrams between machines of one wired network, see docs/operations.md


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeWay:
    """A way to train.

    Attributes:
        algorithm: of the Worker. period: steps from one exchange of everything to the next. periods: of a run, an even
            number: of two ranks the one that comes first to an exchange waits for twice the delay, and the other one,
            which is the first next time, not at all. round_trips: that an exchange takes at least.
    """

    algorithm: dict[str, Any]
    period: int
    periods: int
    round_trips: float

    @property
    def warm_up(self) -> int:
        """Steps before the first run, which do not count: a period, and two steps at least."""
        return max(2, self.period)


_STREAMING = {"name": "diloco", "steps": 128, "fragments": 4, "delay": 16, "codec": "q4"}
WAYS = {
    "DDP": ExchangeWay(algorithm={"name": "dense"}, period=1, periods=2, round_trips=1.0),
    "DGC 0.1 %": ExchangeWay(
        algorithm={"name": "dgc", "density": 0.001, "warmup": "none"}, period=1, periods=10, round_trips=0.5
    ),
    **{
        f"DiLoCo q8, H = {steps}": ExchangeWay(
            algorithm={"name": "diloco", "steps": steps}, period=steps, periods=2, round_trips=1.0
        )
        for steps in (8, 32, 128)
    },
    "streaming q4, H = 128, 4 fragments, 16 late": ExchangeWay(
        algorithm=_STREAMING, period=128, periods=2, round_trips=1.0
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """Holds a period of the slower rank, in seconds and bytes.

    Attributes:
        curve: the share that can be had, by the formula above. strict_curve: the same of two ranks that send each other
            their whole messages. was_the_switch: it has limited what passed.
    """

    wall_s: float
    compute_s: float
    sent_bytes: float
    curve: float
    strict_curve: float
    was_the_switch: bool

    @property
    def share(self) -> float:
        """Computing over wall time."""
        return self.compute_s / self.wall_s


def measure_way(
    way: ExchangeWay, conditions: LinkConditions, runs: int, *, datagram_bytes: int | None = None
) -> list[Utilisation]:
    """Train the MLP on two hosts. Returns one of each run. Raises NoNamespaces, ProcessFailed."""
    steps = way.warm_up + way.period * way.periods * runs
    run = Training(
        model=models.mnist_mlp,
        batch_size=64,
        samples=max(512, 2 * 64 * steps),
        data="glyphs",
        drawn=4096,
        datagram_bytes=datagram_bytes,
        config={
            "algorithm": way.algorithm,
            "epochs": 1,
            "max_steps": steps,
            "eval_every_epochs": 0,
            "hash_every": 0,
            "profile": {"window_steps": 1},
            "optimizer": {"lr": 0.01, "momentum": 0.0},
            "timeouts": {"join_s": 600, "collective_s": 300},
        },
    )
    with hosts_on_a_switch(2, conditions) as network:
        found = steps_of(run, way.warm_up, network.hosts)
        was_the_switch = network.switch is not None and network.switch.was_the_limit
    made = []
    for number in range(runs):
        part = slice(number * way.period * way.periods, (number + 1) * way.period * way.periods)
        walls, waits, sent = (
            [sum(of_rank[part]) / way.periods for of_rank in found[name]] for name in ("step_s", "wait_s", "bytes_out")
        )
        compute_s = max(wall - wait for wall, wait in zip(walls, waits, strict=True))
        curve, strict_curve = (
            compute_s / _best_s(way, conditions, compute_s, max(sent), round_trips)
            for round_trips in (way.round_trips, 0.5)
        )
        made.append(
            Utilisation(
                wall_s=max(walls),
                compute_s=compute_s,
                sent_bytes=max(sent),
                curve=curve,
                strict_curve=strict_curve,
                was_the_switch=was_the_switch,
            )
        )
    return made


def _best_s(
    way: ExchangeWay, conditions: LinkConditions, compute_s: float, sent_bytes: float, round_trips: float
) -> float:
    """Seconds of a period without any overhead."""
    exchanges = way.algorithm.get("fragments", 1)
    sent_s = sent_bytes * 8 / (conditions.rate_bit_s or float("inf"))
    exchange_s = sent_s / exchanges + 2 * conditions.delay_s * round_trips
    meanwhile_s = compute_s * way.algorithm.get("delay", 0) / way.period
    return float(max(compute_s + exchanges * max(0.0, exchange_s - meanwhile_s), sent_s))


async def exchange_datagrams(place: BenchRank) -> list[float]:
    """The role of one of two ranks: seconds in which it has sent and received packets of so many bytes, of each turn.

    They are as many and as large as those of DDS, and nobody looks at them: what this machine can do at most. Its spec:
    the bytes.
    """
    count = math.ceil(place.spec / _PAYLOAD_BYTES)
    own, other = place.hosts[place.rank], place.hosts[1 - place.rank]
    taken = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            link.setsockopt(socket.SOL_SOCKET, option, 2 * place.spec)
        link.bind((own.address, _PORT))
        link.connect((other.address, _PORT))
        link.settimeout(5.0)
        async with place.group() as group:
            for turn in range(_DATAGRAM_TURNS):
                await group.barrier(f"turn {turn}")
                began_s = time.perf_counter()
                await asyncio.gather(
                    asyncio.to_thread(_send_datagrams, link, count), asyncio.to_thread(_take_datagrams, link, count)
                )
                taken.append(time.perf_counter() - began_s)
    return taken[1:]


def _send_datagrams(link: socket.socket, count: int) -> None:
    packet = bytes(_DATAGRAM_BYTES)
    for _ in range(count):
        link.send(packet)


def _take_datagrams(link: socket.socket, count: int) -> None:
    """Raises TimeoutError: some were lost."""
    packet = bytearray(_DATAGRAM_BYTES)
    for _ in range(count):
        link.recv_into(packet)


def measure_datagrams(rate_mbit_s: float, size: int) -> Measurement:
    """Bytes of a dense step as bare packets, both ways at once, beside what the link takes for them."""
    with hosts_on_a_switch(2, LinkConditions(rate_bit_s=1e6 * rate_mbit_s)) as network:
        ranks = run_ranks(exchange_datagrams, 2, size, hosts=network.hosts, timeout_s=120.0)
    taken_ms = [1e3 * max(both) for both in zip(*ranks, strict=True)]
    link = ("payload at this rate", [8e-3 * size / rate_mbit_s] * len(taken_ms))
    return measurement(
        f"{rate_mbit_s:g} Mbit/s, 0 ms: {size / 1e6:.2f} MB as bare datagrams", "ms", taken_ms, against=link
    )


def measure_utilisation(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Every way at every rate and delay; the first one, on the fastest link, with large datagrams as well."""
    rates = {"tiny": (50,), "quick": (50,), "full": (10, 50, 100, 1000)}[chosen.effort]
    delays = {"tiny": (0,), "quick": (0, 50), "full": (0, 50, 100)}[chosen.effort]
    cells = 1 if chosen.effort == "tiny" else len(WAYS)
    at_least = None if chosen.effort == "tiny" else 1 / MOST_OF_CURVE
    for rate, delay, (name, way) in itertools.product(rates, delays, list(WAYS.items())[:cells]):
        found = measure_way(way, LinkConditions(rate_bit_s=1e6 * rate, delay_s=1e-3 * delay), chosen.runs)
        yield from _cell(f"{rate} Mbit/s, {delay} ms: {name}", found, at_least)
    name, way = next(iter(WAYS.items()))
    found = measure_way(way, LinkConditions(rate_bit_s=1e6 * max(rates)), chosen.runs, datagram_bytes=WIRED_BYTES)
    yield from _cell(f"{max(rates)} Mbit/s, 0 ms: {name}, datagrams of {WIRED_BYTES:,} B", found, at_least)
    try:
        yield measure_datagrams(max(rates), int(found[0].sent_bytes))
    except ProcessFailed as error:  # some were lost
        print(f"no line of bare datagrams: {error}. Is net.core.rmem_max 4 MB or more?", file=sys.stderr)


def _cell(name: str, runs: Sequence[Utilisation], at_least: float | None) -> Iterator[Measurement]:
    """The shares beside the curve, and beside the stricter one where that is another, which nobody has to reach."""
    compute_s, wall_s, sent = (
        statistics.median(getattr(run, amount) for run in runs) for amount in ("compute_s", "wall_s", "sent_bytes")
    )
    note = (
        f"{1e3 * compute_s:.1f} ms computing in {1e3 * wall_s:.1f} ms, {sent / 1e3:,.1f} kB"
        f"{'; the switch was the limit' if runs[0].was_the_switch else ''}"
    )
    shares, curve = [run.share for run in runs], [run.curve for run in runs]
    yield measurement(name, "", shares, against=("curve", curve), note=note, at_least=at_least)
    strict = [run.strict_curve for run in runs]
    if strict != curve:
        yield measurement(f"{name}, half a round trip", "", shares, against=("stricter curve", strict))
