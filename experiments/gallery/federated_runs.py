"""A federated run in processes of its own: what ``gradbus demo`` starts, and leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gradbus.experiments.gallery.plan import FederatedRun
from gradbus.runtime.errors import GradbusError

_TIMEOUT_S = 3600.0  # on a very busy machine; an idle one takes a minute


class RunFailed(GradbusError):
    """A run ended with an error, or took too long."""


# It is DDS that is measured, not the memory that processes of one machine share. And nobody is to die: where other
# work is going on a client may be silent for seconds.
_SETTINGS = (
    "bus.shared_memory=false",
    "federated.start_timeout_s=1800", "federated.dead_after_s=120", "federated.round_timeout_s=1800", "bus.lease_s=10",
)  # fmt: skip


def command(run: FederatedRun, run_dir: Path) -> list[str]:
    """The arguments of ``gradbus``."""
    return [
        "demo", "--no-live", "--rounds", str(run.rounds), "--clients", str(run.clients), "--samples", str(run.samples),
        "--data", run.data, "--codec", run.codec, "--downlink-codec", run.downlink, "--partition", run.partition,
        "--seed", str(run.seed), "--run-dir", str(run_dir), "--set", f"federated.codec_version={run.version}",
        "--set", f"federated.eval_every={run.eval_every}", *(word for text in _SETTINGS for word in ("--set", text)),
    ]  # fmt: skip


def run_federated(run: FederatedRun, folder: Path) -> None:
    """Do the run; ``rounds.jsonl`` is then in ``folder / "run"``.

    Raises:
        RunFailed: with the last lines of what it said.
    """
    # Settings in the environment would change the run behind the back of its hash; where the data lie does not.
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith("GRADBUS_") or name == "GRADBUS_DATA"
    }
    arguments = [sys.executable, "-P", "-m", "gradbus", *command(run, folder / "run")]
    log = folder / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            code = process.wait(timeout=_TIMEOUT_S)
        except BaseException as error:
            process.terminate()  # it ends its clients
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunFailed(f"{run.label}: not done after {_TIMEOUT_S:g} s; see {log}") from None
            raise
    if code:
        last = " | ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
        raise RunFailed(f"{run.label}: gradbus demo ended with exit code {code}: {last or 'no output'}; see {log}")
    shutil.rmtree(folder / "run" / "state", ignore_errors=True)  # checkpoints: nobody goes on with these runs
