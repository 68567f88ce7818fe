"""Where the numbers of a run are followed: TensorBoard, MLflow, Weights & Biases.

Each is an extra, and is imported only where it is asked for. All that may wait for a disk or a network happens in
:meth:`Tracker.open`, :meth:`Tracker.write` and :meth:`Tracker.close`, which a thread calls.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from gradbus.runtime.config.settings import flat
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.foreign_files import clear_way, text_inside
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.needs import how_to_install
from gradbus.runtime.private_folder import make_private

_NOT_IN_NAMES = re.compile(r"[^\w\-. /]", re.ASCII)  # of metrics in MLflow, which on Windows takes no colon, either

_FLUSH_S = 5  # TensorBoard sees what is at most so old
_INIT_TIMEOUT_S = 30.0
_MAX_PARAMS = 100  # in one request to MLflow, by its API
_MAX_PARAM_CHARS = 500
_EXPERIMENT = "gradbus"
_MAX_NOTE_BYTES = 4096


class Tracker(Protocol):
    """One place that numbers of a run go to.

    Attributes:
        name: as its option is called, without the dashes. where: a folder, an address or a project, for the log.
    """

    name: str
    where: str

    def open(self, first: int | None) -> None:
        """Begin, or go on. ``first``: the step at which this start of the run begins, where that is known."""

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        """Finite numbers of a round or of a step, by name."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in one folder. A run that goes on there replaces what was written from its first step on."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        """Import tensorboard, which takes a second: not on an event loop.

        Raises:
            ConfigError: there is none, or the folder cannot be written.
        """
        with _needed("tensorboard", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        try:
            make_private(folder)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"--tensorboard: {folder} cannot be written: {error.strerror}. Name another") from None
        self.where = str(folder)
        self.make_writer = SummaryWriter
        self._writer: Any = None

    def open(self, first: int | None) -> None:
        self._writer = self.make_writer(self.where, purge_step=first, flush_secs=_FLUSH_S)

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=unix_s)

    def close(self) -> None:
        self._writer.close()


class TrackedRun:
    """Holds what a tracker calls a run, and how far it has been told, in a file of the run directory: so a run that is
    continued there continues in the tracker, too. What was told once is not told again: both only ever append."""

    def __init__(self, run_dir: Path, tracker: str) -> None:
        self._path = run_dir / f"tracked-by-{tracker}.json"
        self.run_id: str | None = None
        self.last_step: int | None = None
        with contextlib.suppress(OSError, ValueError):
            found = parse_json(text_inside(run_dir, self._path.name, _MAX_NOTE_BYTES))
            if isinstance(found, dict) and isinstance(found.get("run_id"), str):
                self.run_id = found["run_id"]
                last = found.get("last_step")
                self.last_step = last if isinstance(last, int) else None
        self._told_before = self.last_step

    def is_new(self, step: int) -> bool:
        """No start of the run before this one has told this step."""
        return self._told_before is None or step > self._told_before

    def keep(self, run_id: str, step: int | None = None) -> None:
        """Write the file anew. Raises OSError."""
        self.run_id = run_id
        if step is not None:
            self.last_step = step if self.last_step is None else max(step, self.last_step)
        new = self._path.with_suffix(".new")
        clear_way(new)
        new.write_text(json.dumps({"run_id": self.run_id, "last_step": self.last_step}))
        new.replace(self._path)


class Mlflow:
    """A run of the experiment ``gradbus`` on a tracking server: https://mlflow.org/docs/latest/ml/tracking."""

    name = "mlflow"

    def __init__(self, address: str, job: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Import MLflow, which takes seconds. ``settings``: nested; they become the parameters of the run.

        Raises:
            ConfigError: there is none.
        """
        with _needed("mlflow", "mlflow_skinny"):
            from mlflow import MlflowClient
        self.where = address
        self._make_client = MlflowClient
        self._client: Any = None
        self._job, self._dir, self._settings = job, run_dir, dict(flat(settings))
        self._run_id = ""

    def open(self, first: int | None) -> None:
        self._kept = TrackedRun(self._dir, self.name)
        client = self._client = self._make_client(tracking_uri=self.where)
        if self._kept.run_id is not None:
            self._run_id = self._kept.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        found = client.get_experiment_by_name(_EXPERIMENT)
        experiment = client.create_experiment(_EXPERIMENT) if found is None else found.experiment_id
        tags = {"gradbus.run_directory": str(self._dir.absolute()), "gradbus.host": socket.gethostname()}
        self._run_id = client.create_run(experiment, run_name=self._job, tags=tags).info.run_id
        self._kept.keep(self._run_id)
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_MAX_PARAM_CHARS]) for name, value in self._settings.items()]
        for begin in range(0, len(params), _MAX_PARAMS):
            client.log_batch(self._run_id, params=params[begin : begin + _MAX_PARAMS])

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        if not self._kept.is_new(step):
            return
        from mlflow.entities import Metric

        at_ms = int(unix_s * 1000)
        # It refuses a whole batch for a name with other characters, and clients may have such.
        metrics = [Metric(_NOT_IN_NAMES.sub("_", name), value, at_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
        self._kept.keep(self._run_id, step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class WeightsAndBiases:
    """A run of a project of Weights & Biases: https://docs.wandb.ai. ``WANDB_MODE=offline`` keeps it in the run
    directory until ``wandb sync`` sends it."""

    name = "wandb"

    def __init__(self, project: str, job: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Import wandb, which takes seconds. ``settings``: nested; they become the config of the run.

        Raises:
            ConfigError: there is none, or it would ask for a key on the terminal.
        """
        with _needed("wandb", "wandb"):
            import wandb
        if os.environ.get("WANDB_MODE", "online") == "online" and not _has_wandb_key():
            raise ConfigError(
                "--wandb: no key of Weights & Biases is found here. Run 'wandb login' or set WANDB_API_KEY; or set "
                "WANDB_MODE=offline, and send the run later with 'wandb sync'"
            )
        self.where = project
        self._wandb: Any = wandb
        self._run: Any = None
        self._job, self._dir, self._settings = job, run_dir, dict(settings)

    def open(self, first: int | None) -> None:
        self._kept = TrackedRun(self._dir, self.name)
        run_id = self._kept.run_id or os.urandom(8).hex()
        options = self._wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, init_timeout=_INIT_TIMEOUT_S
        )
        self._run = self._wandb.init(
            project=self.where,
            name=self._job,
            id=run_id,
            resume="allow",
            dir=str(self._dir),
            config=self._settings,
            settings=options,
        )
        self._run.define_metric("*", step_metric="step")  # its own counter of calls is not ours
        self._kept.keep(run_id)

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        if self._kept.is_new(step):
            self._run.log({**values, "step": step, "unix_s": unix_s})
            self._kept.keep(self._run.id, step)

    def close(self) -> None:
        self._run.finish()


@contextlib.contextmanager
def _needed(option: str, project: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        package = project.replace("_", "-")
        raise ConfigError(
            f"--{option} needs {package}, which cannot be imported here ({error}). {how_to_install(project)}"
        ) from None


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return host in netrc.netrc(os.environ.get("NETRC")).hosts
    return False
