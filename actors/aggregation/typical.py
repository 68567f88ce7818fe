"""Medians of numbers that clients announce. Pure, and without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gradbus.runtime.config.federated import LimitSettings


def lower_median(values: Iterable[float]) -> float | None:
    """Return the value in the middle, of an even number the lower of the two; None: there are none."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def most_samples(limits: LimitSettings, known: Collection[int]) -> int | None:
    """Return the largest number that samples count as where clients are selected, or evaluate, by numbers that are
    ``known``; None: there is no limit."""
    if limits.cap_samples is not None or not limits.is_adversarial:
        return limits.cap_samples
    typical = lower_median(known)
    return None if typical is None else max(1, int(limits.cap_times_median * typical))
