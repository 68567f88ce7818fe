"""The command that continues a run, for the sentence in which a command says how to go on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

# Settings that would keep the run from being continued, or for which the line has an option.
_LEFT_OUT = {"run_dir", "federated.checkpoint.resume"}
_OF_OPTIONS = {"--clients": "federated.clients.num"}


def command_to_continue(
    command: str,
    config: Path,
    run_dir: Path,
    overrides: Sequence[str],
    *,
    data_root: Path | None = None,
    options: Sequence[object] = (),
    rounds: int = 0,
) -> str:
    """Return a line for a shell that continues a run with the settings that it was started with.

    Args:
        command: of gradbus, such as ``controller``.
        overrides: settings stronger than the file, as KEY=VALUE.
        options: further options of the command, and their values.
        rounds: in place of those that the run has; 0: leave them.
    """
    left_out = _LEFT_OUT | {_OF_OPTIONS[word] for word in map(str, options) if word in _OF_OPTIONS}
    left_out |= {"federated.rounds"} if rounds else set()
    kept = [one for one in overrides if one.partition("=")[0].strip() not in left_out]
    kept += [f"federated.rounds={rounds}"] if rounds else []
    words = ["gradbus", command, os.fspath(config), *map(str, options), "--run-dir", os.fspath(run_dir)]
    words += [] if data_root is None else ["--data-root", os.fspath(data_root)]
    return shlex.join([*words, *(word for one in kept for word in ("--set", one))])
