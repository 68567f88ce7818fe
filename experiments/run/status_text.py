"""The picture of a job as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradbus.experiments.amounts import percent, ranges, size
from gradbus.runtime.plain_text import plain_line

MAX_LINES = 40  # clients, or ranks of one group, that get a line of their own


def lines_of(picture: Mapping[str, Any]) -> list[str]:
    """All of it, what is waited for first."""
    lines = [f"job {picture['job']}"]
    if "federated" in picture:
        lines += _federated(picture["federated"])
    for group in picture.get("groups", ()):
        lines += _group(group)
    return [plain_line(line) for line in lines]


def _federated(found: Mapping[str, Any]) -> list[str]:
    controller, clients = found["controller"], found["clients"]
    lines = ["no controller was heard: its clients wait for it"] if controller is None else _controller(controller)
    if found["controllers"] > 1:
        lines.append(f"{found['controllers']} controllers were heard: one of them has just been replaced")
    waited_for = [client for client in clients if client["waited_for"]]
    others = [client for client in clients if not client["waited_for"]]
    for client in waited_for[:MAX_LINES]:
        lines.append(f"  waiting for client {client['client']}: {client['why']}" + _at(client))
    if len(waited_for) > MAX_LINES:
        lines.append(f"  and for {len(waited_for) - MAX_LINES} more")
    out = [client["client"] for client in others if "why" in client]
    if others:
        lines.append(f"  clients that nobody waits for: {ranges(client['client'] for client in others)}")
    if out or (controller and controller["kept_out"]):
        lines.append(f"  kept out for bad updates: {ranges(controller['kept_out'] if controller else out)}")
    return lines


def _controller(found: Mapping[str, Any]) -> list[str]:
    of = f"/{found['rounds']}" if found["rounds"] else ""
    lines = [f"{found['phase']}, round {found['round']}{of}, {found['clients']} clients" + _silence(found)]
    if found["phase"] == "training":
        lines.append(
            f"  updates {found['ready']}/{found['expected']} (min {found['minimum']}) after {found['round_s']:.1f} s, "
            f"{found['left_s']:.0f} s until the deadline"
        )
    if found["last_round_s"]:
        accuracy = "" if found["accuracy"] is None else f", accuracy {percent(found['accuracy'])}"
        lines.append(
            f"  last round {found['last_round_s']:.2f} s, up {size(found['bytes_up'])}, down "
            f"{size(found['bytes_down'])}{accuracy}"
        )
    if found["dropped"]:
        lines.append("  not counted: " + ", ".join(f"{reason} {n}" for reason, n in found["dropped"].items()))
    return lines


def _group(found: Mapping[str, Any]) -> list[str]:
    ranks: Sequence[Mapping[str, Any]] = found["ranks"]
    here = sum("host" in rank for rank in ranks)
    lines = [f"group {found['group']}: {here} of {found['world']} ranks were heard"]
    for rank in ranks[:MAX_LINES]:
        parts = [rank["state"]]
        if "waits_for" in rank:
            parts[0] += f" for ranks {rank['waits_for']}" if rank["waits_for"] else ""
        if rank.get("step", -1) >= 0:
            parts.append(f"epoch {rank['epoch'] + 1}, step {rank['step']}, {rank['steps_per_s']:.1f} steps/s")
        if "bytes_out" in rank:
            parts.append(f"sent {size(rank['bytes_out'])}")
        if rank.get("lost"):
            parts.append(f"has lost ranks {rank['lost']}")
        if rank.get("dropped"):
            parts.append("not used: " + ", ".join(f"{reason} {n}" for reason, n in rank["dropped"].items()))
        lines.append(f"  rank {rank['rank']}: " + ", ".join(parts) + _at(rank))
    if len(ranks) > MAX_LINES:
        lines.append(f"  and {len(ranks) - MAX_LINES} more ranks")
    return lines


def _at(found: Mapping[str, Any]) -> str:
    return f" [{found['host']}]" if "host" in found else ""


def _silence(found: Mapping[str, Any]) -> str:
    return f" (silent since {found['silent_s']:.1f} s)" if found["silent_s"] > 2 else ""
