"""Ways to sum gradients compared: a row for each way, number of ranks, loss, memory, number of jobs and seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from pydantic import BaseModel, ConfigDict

from gradbus.commands.simulate.closed_forms import Fabric
from gradbus.commands.simulate.settings import SimulationSettings
from gradbus.commands.simulate.steps import StepWork, overlapped_s, ready_buckets
from gradbus.commands.simulate.ways import (
    ExchangeTimes,
    SimulatedExchange,
    Way,
    closed_form_s,
    is_program,
    messages_of,
    simulate_exchange,
    slots_needed,
)
from gradbus.runtime.errors import ConfigError


class ComparisonRow(BaseModel):
    """One way under one set of conditions. Times in seconds.

    Attributes:
        model: the trace that the gradients are of. memory: None: enough. slots: that this is.
        compute_s: of a step. exchange_s: of all gradients of a step, simulated; None: it was too large, or gave up.
            formula_s: by the closed form; None: there is none.
        step_s, formula_step_s: a step with one or the other; with overlap buckets go while the backward pass goes on.
        samples_s: of all ranks. efficiency: the share of a step in which ranks compute. speed_up: over one rank.
        bytes_out: of a step, that the busiest rank has sent. slot_share, in_network_share: see
            :class:`~.ways.ExchangeTimes`.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    way: Way
    model: str | None
    world: int
    loss: float
    memory: float | None
    slots: int | None
    jobs: int
    seed: int
    compute_s: float
    exchange_s: float | None
    formula_s: float | None
    step_s: float | None
    formula_step_s: float | None
    samples_s: float | None
    efficiency: float | None
    speed_up: float | None
    bytes_out: float | None
    slot_share: float | None
    in_network_share: float | None
    retransmissions: int | None


Condition = tuple[Way, int, float, float | None, int, int]
"""Way, ranks, loss, memory, jobs, seed."""


def conditions(settings: SimulationSettings) -> list[Condition]:
    """All combinations, without those that differ in what a way does not have: memory and jobs of rank programs, and
    seeds where nothing is drawn."""
    asked = settings.compare
    found: dict[Condition, None] = {}
    for way, world, loss, memory, jobs, seed in product(
        asked.ways, settings.worlds, asked.losses, asked.memory, asked.jobs, asked.seeds
    ):
        has_slots = not is_program(way) and way not in ("ps-1", "ring-packets")
        draws = loss > 0 or (jobs > 1 and not is_program(way))
        found[
            way,
            world,
            loss,
            memory if has_slots else None,
            1 if is_program(way) else jobs,
            seed if draws else asked.seeds[0],
        ] = None
    return list(found)


def compare(settings: SimulationSettings, work: StepWork) -> Iterator[ComparisonRow]:
    """Simulate them all, one after the other.

    Raises:
        ConfigError: ranks do not fill hosts, or a way cannot have hosts of several ranks, or memory is too small.
    """
    for condition in conditions(settings):
        yield _row(settings, work, condition)


def _exchange_of(settings: SimulationSettings, work: StepWork, condition: Condition) -> SimulatedExchange:
    """Return the exchange of all gradients of a step."""
    asked, given = settings.compare, settings.topology
    way, world, loss, memory, jobs, seed = condition
    fabric = Fabric(
        world=world,
        network=replace(given.network.spec, loss=loss),
        local=given.local.spec,
        uplink=replace((given.uplink or given.network).spec, loss=loss),
        ranks_per_host=given.ranks_per_host,
        hosts_per_leaf=given.hosts_per_rack,
    )
    if world % given.ranks_per_host:
        raise ConfigError(
            f"simulate.worlds: {world} ranks do not fill hosts of {given.ranks_per_host}: change it, or "
            f"simulate.topology.ranks_per_host"
        )
    return SimulatedExchange(
        way=way,
        fabric=fabric,
        gradient_bytes=work.gradient_bytes,
        blocks=asked.blocks,
        memory=memory,
        jobs=jobs,
        iterations=1 if work.overlap else settings.steps,
        compute_s=0.0 if work.overlap else work.compute_s,
        trees=asked.trees,
        window_blocks=asked.window_blocks,
        seed=seed,
        retransmit_s=None if asked.retransmit_ms is None else 1e-3 * asked.retransmit_ms,
    )


def _row(settings: SimulationSettings, work: StepWork, condition: Condition) -> ComparisonRow:
    whole = _exchange_of(settings, work, condition)
    sizes = [bucket.size_bytes for bucket in ready_buckets(work)] if work.overlap else [whole.gradient_bytes]
    block_bytes = -(-whole.gradient_bytes // whole.blocks)
    fewest = whole.trees if whole.way == "mtina" else 1  # each tree has one
    parts = {size: replace(whole, gradient_bytes=size, blocks=max(fewest, -(-size // block_bytes))) for size in sizes}
    formulas = {size: seconds for size, part in parts.items() if (seconds := closed_form_s(part)) is not None}
    fits = messages_of(whole) <= settings.compare.most_messages
    found = {size: _simulated(part) for size, part in parts.items()} if fits else {}
    step_s = _step_s(work, {size: one.exchange_s for size, one in found.items()})
    formula_step_s = _step_s(work, formulas)
    known_s = step_s if step_s is not None else formula_step_s
    way, world, loss, memory, jobs, seed = condition
    all_found = [found[size] for size in sizes if found]
    return ComparisonRow(
        way=way,
        model=settings.trace,
        world=world,
        loss=loss,
        memory=memory,
        jobs=jobs,
        seed=seed,
        slots=None if memory is None else round(memory * slots_needed(whole)),
        compute_s=work.compute_s,
        exchange_s=sum(one.exchange_s for one in all_found) if found else None,
        formula_s=sum(formulas[size] for size in sizes) if formulas else None,
        step_s=step_s,
        formula_step_s=formula_step_s,
        samples_s=world * work.batch_size / known_s if known_s else None,
        efficiency=work.compute_s / known_s if known_s else None,
        speed_up=world * work.compute_s / known_s if known_s else None,
        bytes_out=sum(one.bytes_out for one in all_found) if found else None,
        slot_share=_mean([one.slot_share for one in all_found]),
        in_network_share=_mean([one.in_network_share for one in all_found]),
        retransmissions=sum(one.retransmissions for one in all_found) if found else None,
    )


def _step_s(work: StepWork, exchange_s: Mapping[int, float]) -> float | None:
    """A step, given the times of its exchanges by their sizes."""
    if not exchange_s:
        return None
    if work.overlap:
        return overlapped_s(work, exchange_s.__getitem__)
    return work.compute_s + sum(exchange_s.values())


def _simulated(exchange: SimulatedExchange) -> ExchangeTimes:
    try:
        return simulate_exchange(exchange)
    except ValueError as error:
        where = "memory" if str(error).startswith("slots") else "ways"
        raise ConfigError(
            f"simulate.compare.{where}: {exchange.way}, {exchange.fabric.world} ranks, {exchange.jobs} jobs: {error}"
        ) from None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None
