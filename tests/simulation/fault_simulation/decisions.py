"""Decisions of actors that write no journal: each is a moment for faults before and after it, and an entry of the
journal of the world."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fault_simulation.kernel import running

Facts = Callable[..., dict[str, Any]]
"""Gets the result of a function, and its arguments; returns what the oracles need to know."""


def deciding(name: str, function: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
    """Return what stands in for a function whose calls are decisions called ``name``."""

    def decided(*args: Any, **kwargs: Any) -> Any:
        process = running()
        world = process.world
        world.at_decision(process, "decision", name, "before")
        result = function(*args, **kwargs)
        world.on_decision(process, name, facts(result, *args, **kwargs))
        world.at_decision(process, "decision", name, "after")
        return result

    return decided


def saving(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands in for the writing of a version, and notes before what is in it: it may be on the disk though
    the process has died just then."""

    def saved(state: Any, step: int, shard: Any, *args: Any, **counts: Any) -> Any:
        process = running()
        pieces = [(piece.start, piece.stop) for piece in shard.pieces]
        weights = [tensor.reshape(-1).clone() for tensor in shard.weights()]
        facts = {"step": step, "updates": counts["updates"], "pieces": pieces, "weights": weights}
        process.world.on_decision(process, "saving", facts)
        return function(state, step, shard, *args, **counts)

    return saved


def asking(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return what stands in for a request of a worker: a decision by its kind, over when all servers have answered."""

    async def asked(servers: Any, kind: str, position: Any, **given: Any) -> Any:
        process = running()
        process.world.at_decision(process, "decision", kind, "before")
        found = await function(servers, kind, position, **given)
        process.world.at_decision(process, "decision", kind, "after")
        return found

    return asked


def dropping(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return what stands in for the end of a worker at a server, which notes why."""

    async def dropped(server: Any, rank: int, error: Exception) -> Any:
        process = running()
        process.world.on_decision(process, "drop", {"worker": rank, "why": type(error).__name__})
        return await function(server, rank, error)

    return dropped


# What the oracles need to know of each


def of_push(decision: Any, clocks: Any, rank: int, clock: int, **_: Any) -> dict[str, Any]:
    """A push was taken."""
    return {"worker": rank, "clock": clock, "apply": decision.apply, "count": decision.count}


def of_ask(decision: Any, clocks: Any, rank: int, kind: str, clock: int) -> dict[str, Any]:
    """A worker has come to a meeting."""
    return {"worker": rank, "kind": kind, "clock": clock}


def of_lose(decision: Any, clocks: Any, rank: int) -> dict[str, Any]:
    """A worker is dropped."""
    return {"worker": rank, "apply": decision.apply, "count": decision.count}


def of_apply(_: None, shard: Any, gradients: Any, count: int, *, step: int, epoch: int) -> dict[str, Any]:
    """Gradients have changed the weights."""
    return {"gradients": len(gradients), "count": count, "step": step}


def of_saved(size: int, state: Any, step: int, *_: Any, **__: Any) -> dict[str, Any]:
    """A version was saved."""
    return {"step": step}


def of_load(found: Any, state: Any, step: int) -> dict[str, Any]:
    """A version was loaded."""
    return {"step": step, "updates": found[1].updates}


def of_generation(_: None, agreement: Any, generation: int, members: Any) -> dict[str, Any]:
    """A process knows of a generation."""
    return {"generation": generation, "members": tuple((one.number, one.incarnation) for one in members)}


def of_view(view: Any, agreement: Any) -> dict[str, Any]:
    """A process tells the others what it has promised and accepted."""
    return {"generation": view.generation, "promised": view.promised, "accepted": view.accepted}


def polls_never(history: Any) -> bool:
    """Stand in for ``PollHistory.next_polls``."""
    return False
