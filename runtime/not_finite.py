"""The warning about an evaluation whose numbers are not finite: no comparison with such a number is true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_NAMED = 8  # metrics in a line of the log


def warn_not_finite(log: Any, found: Mapping[str, Any], **where: Any) -> None:
    """Log a warning if numbers of an evaluation are NaN or infinite.

    Args:
        log: a structlog logger.
        found: by name; what is no number is passed over.
        where: round, epoch or client, for the line.
    """
    names = [name for name, value in found.items() if isinstance(value, float) and not math.isfinite(value)]
    if names:
        log.warning(
            "evaluation is not finite",
            **where,
            metrics={name: found[name] for name in names[:MAX_NAMED]},
            hint="the model may have diverged (lower the learning rate), or the evaluation divides by zero; early "
            "stopping and the best model count such a number as no improvement",
        )
