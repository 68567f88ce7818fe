"""What the updates of a round say, together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Sums over the updates that count. Bytes of what came over the bus, and of what was read in shared memory."""

    bytes_up: int = 0
    bytes_up_shared: int = 0
    num_samples: int = 0
    samples: dict[int, int] = field(default_factory=dict)  # of each client, as it announced them
    losses: list[tuple[int, float]] = field(default_factory=list)  # (samples, mean loss)
    train_s: float = 0.0
    encode_s: float = 0.0
    aggregate_s: float = 0.0

    def loss(self) -> float | None:
        """Mean training loss, weighted by samples, summed in an order that does not depend on arrival."""
        # Anything beyond is as good as none, and could overflow the sum; NaN is not below it either.
        known = sorted((samples, loss) for samples, loss in self.losses if abs(loss) < 1e100)
        total = sum(samples for samples, _ in known)
        return math.fsum(samples * loss for samples, loss in known) / total if total else None
