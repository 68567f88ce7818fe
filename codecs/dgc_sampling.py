"""Which entries of a tensor are sent: about the k largest, without sorting all of them.

Lin et al., "Deep Gradient Compression", ICLR 2018 (arXiv:1712.01887), section 5: the threshold is estimated from a
sample, and the exact selection is made only among the entries above it. The plan (how large a sample, which stride) and
the corrections of the threshold are those of the authors' implementation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradbus.codecs.dgc_config import DgcConfig
from gradbus.codecs.sparse import top_k

_FLT_MAX = float(np.finfo(np.float32).max)


class SamplingPlan(NamedTuple):
    """How the threshold of a tensor of n elements is estimated.

    stride: distance of the sampled entries. num_samples: n where everything is looked at, then the selection is exact.
    top: the threshold is the top-th largest of the sample. k: entries to send.
    """

    stride: int
    num_samples: int
    top: int
    k: int


def plan_sampling(n: int, density: float, sample_ratio: float) -> SamplingPlan:
    """The plan for ``n`` >= 1 elements; cheap, so it is made anew each step and follows every change of the density.

    A sample has at least ``ceil(n * sample_ratio)`` entries, and at least ``ceil(2 / density)``, so that two of the
    entries looked for are expected in it. The authors raise ratios below 0.01 to 0.01; here they count as given.
    The stride is odd: rows of a matrix mostly have an even length, and an odd stride does not stay in one column.
    """
    k = min(n, math.ceil(n * density))
    fewest = math.ceil(min(n, 2 / density))
    enough = max(math.ceil(n * sample_ratio), fewest)
    if sample_ratio >= 1.0 or n <= fewest or k == n:
        return SamplingPlan(1, n, k, k)
    stride = math.ceil(n / enough / 32) * 32 + 1
    while n // stride < enough:  # ends at stride 1 at the latest: n >= enough
        stride -= 8
    num_samples = n // stride
    return SamplingPlan(stride, num_samples, math.ceil(num_samples * density), k)


def select(v: Tensor, plan: SamplingPlan, config: DgcConfig, draw: int) -> Tensor:
    """Indices of at most ``plan.k`` entries of ``v``, the largest by magnitude as far as the threshold tells.

    With a threshold from a sample, between ``lower_bound * k`` and k entries; with "exact", or where the sample would
    be the whole tensor, the top k. More than k above the threshold are cut back to the k largest, among equal ones
    those of lower index. Zeros are never chosen: they say nothing, so a tensor of zeros gives an empty result.

    Args:
        v: float32, shape (n,), finite, any device.
        draw: a random number, 0 <= draw < 2**63: places the sample.

    Returns:
        int64, shape (at most k,), strictly ascending, on the device of ``v``.
    """
    if config.sampling == "exact" or plan.num_samples == v.numel():
        return top_k(v, plan.k).without_zeros().indices
    magnitude = v.abs()
    threshold = _sampled_threshold(magnitude, plan, config, draw)
    chosen = _at_least(magnitude, threshold)
    for _ in range(config.max_iterations):
        count, last = chosen.numel(), threshold
        if count > plan.k:
            if config.resample or count <= config.upper_bound * plan.k:
                break  # cut back below: the exact top k among the chosen
            threshold = _as_float32(threshold * config.upper_bound)
            chosen = chosen[magnitude[chosen] >= threshold]
        elif count < config.lower_bound * plan.k:
            threshold = _as_float32(threshold * config.lower_bound)
            chosen = _at_least(magnitude, threshold) if threshold != last else chosen
        if threshold == last:  # the count is right, or the threshold is 0: more than 1 - density of the entries are
            break
    if chosen.numel() > plan.k:
        chosen = chosen[top_k(magnitude[chosen], plan.k).indices]
    elif not chosen.numel() and threshold > 0:  # raised above everything, as if all entries are equal
        chosen = top_k(magnitude, plan.k).without_zeros().indices
    return chosen


def _sampled_threshold(magnitude: Tensor, plan: SamplingPlan, config: DgcConfig, draw: int) -> float:
    if config.sampling == "strided":
        sample = magnitude[draw % plan.stride :: plan.stride]
    else:
        generator = torch.Generator().manual_seed(draw)
        positions = torch.randint(magnitude.numel(), (plan.num_samples,), generator=generator)
        sample = magnitude[positions.to(magnitude.device)]
    return float(torch.topk(sample, plan.top, sorted=False).values.min())


def _at_least(magnitude: Tensor, threshold: float) -> Tensor:
    """Indices of the entries that reach the threshold and are not 0, ascending."""
    if magnitude.device.type == "cpu":  # numpy compares and counts twice as fast
        array = magnitude.numpy()
        mask = array >= np.float32(threshold) if threshold > 0 else array > 0
        return torch.from_numpy(np.flatnonzero(mask))
    return torch.nonzero(magnitude >= threshold if threshold > 0 else magnitude > 0).squeeze(1)


def _as_float32(threshold: float) -> float:
    """Rounded as the entries are, so that comparing is exact on every device."""
    return float(np.float32(min(threshold, _FLT_MAX)))
