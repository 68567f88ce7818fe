"""The table of one rank's profile as plain text, and what its lines are called."""

from __future__ import annotations

import math

from gradbus.runtime.profiling.summary import ProfileSummary

PARTS = {
    "step_s": "step",
    "compute_s": "compute",
    "forward_s": "forward",
    "backward_s": "backward",
    "encode_s": "encode",
    "wait_s": "wait (network)",
    "decode_s": "decode, aggregate",
    "apply_s": "apply",
    "other_s": "other",
    "bytes_out": "bytes out",
    "bytes_in": "bytes in",
}
"""Amounts of a step by name, in the order of a table, and what people call them."""
_BESIDE = "_ms"  # of what goes on beside the step, on other threads


def text_table(summary: ProfileSummary) -> str:
    """Return a line for each part of a step: its mean, its longest, and its share of the step."""
    steps = "no steps" if not summary.steps else f"{summary.steps} steps"
    failed = f", {summary.failed_steps} failed" if summary.failed_steps else ""
    lines = [f"{f'rank {summary.rank}, {steps}{failed}':<32}{'mean':>12}{'longest':>12}{'share':>8}"]
    known = {name: label for name, label in PARTS.items() if name in summary.mean}
    others = sorted(set(summary.mean) - set(PARTS))
    for name, label in [*known.items(), *((name, name.removesuffix("_s")) for name in others)]:
        mean, most = (_figure(name, of.get(name, 0.0)) for of in (summary.mean, summary.max))
        lines.append(f"  {_label(name, label):<30}{mean:>12}{most:>12}{_share(summary, name):>8}")
    return "\n".join(line.rstrip() for line in lines)


def _label(name: str, label: str) -> str:
    if name.endswith(_BESIDE):
        return f"{label.removesuffix(_BESIDE)} (beside), ms"
    return f"{label}, ms" if name.endswith("_s") else label


def _figure(name: str, amount: float) -> str:
    if not math.isfinite(amount):
        return str(amount)
    if name.endswith("_s"):
        return f"{amount * 1000:.2f}"
    return f"{amount:.2f}" if name.endswith(_BESIDE) else f"{amount:,.0f}"


def _share(summary: ProfileSummary, name: str) -> str:
    step_s = summary.mean.get("step_s", 0.0)
    if not name.endswith("_s") or not step_s or name == "step_s":
        return ""
    return f"{100 * summary.mean[name] / step_s:.0f} %"
