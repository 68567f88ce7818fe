"""Options of a command as overrides of its settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple


class Trackers(NamedTuple):
    """Holds what the options say of the trackers of a run."""

    tensorboard: Path | None
    mlflow: str | None
    wandb: str | None


def settings_of(
    overrides: list[str] | None,
    *,
    insecure: bool = False,
    resume: tuple[str, bool | None] = ("", None),
    run_dir: Path | None = None,
    trackers: Trackers | None = None,
    metrics_port: int | None = None,
    clients: int | None = None,
) -> list[str]:
    """Options as overrides of settings, behind those of ``--set``: the last one is the strongest.

    ``resume``: the name of the setting, and the option. ``clients``: how many a run has. A path like ``2024`` stays a
    text.
    """
    texts = {"run_dir": run_dir, **(trackers._asdict() if trackers is not None else {})}
    key, wanted = resume
    return [
        *(overrides or ()),
        *([] if wanted is None else [f"{key}={json.dumps(wanted)}"]),
        *(f"{name}={json.dumps(os.fspath(text))}" for name, text in texts.items() if text is not None),
        *([] if clients is None else [f"federated.clients.num={clients}"]),
        *([] if metrics_port is None else [f"metrics.port={metrics_port}"]),
        *(["bus.insecure=true"] if insecure else []),
    ]
