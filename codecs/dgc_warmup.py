"""Densities of the first epochs: a network that changes fast tolerates little delay.

Lin et al., ICLR 2018 (arXiv:1712.01887), section 3.3: the share that is sent falls exponentially over the first epochs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradbus.codecs.dgc_config import check_density

# Sparsity 75, 93.75, 98.4375 and 99.6 %, then 99.9 %: a quarter of the share per epoch.
PAPER_WARMUP = (0.25, 0.0625, 0.015625, 0.004)


def warmup_density(epoch: int, *, density: float = 0.001, schedule: Sequence[float] = PAPER_WARMUP) -> float:
    """The density of an epoch: that of the schedule, and after its end the final one.

    Args:
        epoch: from 0.
        density: the final one; entries of the schedule below it are raised to it.
        schedule: one density per epoch of warm-up; empty for none. The paper's by default, or any list, or
            :func:`geometric_warmup`.

    Raises:
        ValueError: a negative epoch, or a density that is not in (0, 1].
    """
    if epoch < 0:
        raise ValueError(f"epoch must be >= 0, got {epoch}")
    check_density(density)
    for step in schedule:
        check_density(step)
    return max(schedule[epoch], density) if epoch < len(schedule) else density


def geometric_warmup(num_epochs: int, *, density: float = 0.001) -> tuple[float, ...]:
    """A schedule of ``num_epochs`` equal factors that would reach ``density`` in the epoch after it.

    Epoch e gets ``density ** ((e + 1) / (num_epochs + 1))``, as the authors' implementation does by default: 0.178,
    0.0316, 0.00562 for three epochs to 0.001.
    """
    if num_epochs < 0:
        raise ValueError(f"num_epochs must be >= 0, got {num_epochs}")
    check_density(density)
    return tuple(density ** ((epoch + 1) / (num_epochs + 1)) for epoch in range(num_epochs))
