"""Exceptions of training functions on clients: each distinct one is shown once with its traceback, then counted."""

from __future__ import annotations

import re
from collections import Counter

from gradbus.actors.federated.rounds import TRAINING_FAILED
from gradbus.runtime.logs import get_logger
from gradbus.runtime.plain_text import plain_text

MAX_DISTINCT = 32  # that are shown in a run; what a client says of its errors is its own invention
MAX_LINE = 1200  # characters of its last line, which says it all
MAX_TEXT = 8000  # characters of a traceback: its end, where the error stands

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")

log = get_logger("controller")


class Failures:
    """What went wrong in the training of clients in this start of the controller."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._newest: dict[int, str] = {}

    def note(self, client_id: int, round_id: int, text: str, reason: str = TRAINING_FAILED) -> None:
        """A client says that nothing came of its training; ``text`` is the traceback. Writes a line into the log."""
        text = plain_text(text[-MAX_TEXT:]).strip()
        key = _ADDRESS.sub("0x", text)
        if key not in self._seen and len(self._seen) >= MAX_DISTINCT:
            key = ""
        self._seen[key] += 1
        error = text.rpartition("\n")[2][:MAX_LINE]
        self._newest[client_id] = error
        facts = {
            "client": client_id, "round": round_id, "reason": reason, "error": error, "times": self._seen[key]
        }  # fmt: skip
        if key and self._seen[key] == 1:
            log.error("training failed on a client", **facts, traceback=text)
        else:
            log.error("training failed on a client", **facts)

    def newest(self, client_id: int) -> str:
        """The last line of what this client said last."""
        return self._newest.get(client_id, "for a reason that it did not tell")
