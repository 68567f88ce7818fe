"""Lines of Flower's own logger as events of ours, where a coloured text among JSON lines would be in the way."""

from __future__ import annotations

import logging

from gradbus.runtime.logs import get_logger
from gradbus.runtime.plain_text import plain_line

FLOWER_LOGGER = "flwr"


class _AsEvents(logging.Handler):
    """Writes each record as one event, without colours, tabs and blank lines."""

    def __init__(self) -> None:
        super().__init__()
        self._log = get_logger(FLOWER_LOGGER)

    def emit(self, record: logging.LogRecord) -> None:
        text = plain_line(" ".join(record.getMessage().split()))
        if text:
            self._log.log(record.levelno, text)


def take_over_flower_logs() -> None:
    """Send what Flower logs through gradbus's log, from now on. Flower must be imported: it sets its own handler up."""
    import flwr.common.logger  # noqa: F401 - for what the import does

    logger = logging.getLogger(FLOWER_LOGGER)
    logger.handlers[:] = [_AsEvents()]
    logger.propagate = False


__all__ = ["take_over_flower_logs"]
