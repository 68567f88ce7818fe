"""The checkpoints of a run directory, and the models in them, from safetensors and JSON alone.

A run directory is data: none of the code that its ``config.json`` names is imported or run here, and no place outside
of it is read. :mod:`.trusted_model` does both.
"""

from __future__ import annotations

import contextlib
import os.path
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradbus.actors.data_parallel.saved_state import saved_state as state_of_ranks
from gradbus.actors.data_parallel.state import SavedRank
from gradbus.actors.federated.client.client_state import SavedClient
from gradbus.actors.federated.controller.best_model import FOLDER, SavedBest
from gradbus.actors.federated.controller.saved_run import SavedRun
from gradbus.actors.federated.controller.saved_state import saved_state as state_of_rounds
from gradbus.actors.federated.model.own_tensors import own_tensors
from gradbus.actors.parameter_server.saved_state import saved_state as state_of_servers
from gradbus.actors.parameter_server.state import has_servers, newest_version
from gradbus.commands.rundir.reading import MAX_FILE_BYTES, Kind, kind_of
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.foreign_files import is_there, text_inside
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.saved_state import SavedState

_UNITS: dict[Kind, str] = {"federated": "round", "parallel": "step"}


@dataclass(frozen=True, slots=True, eq=False)
class FoundModel:
    """Holds the checkpoint that a model is taken from.

    Attributes:
        run: the directory of the run. kind: of the run.
        checkpoints: one; of parameter servers, one of each. beside: where the frozen parameters of a federated run are.
    """

    run: Path
    kind: Kind
    checkpoints: Sequence[Checkpoint]
    beside: CheckpointStore
    of_servers: bool = False

    @property
    def number(self) -> int:
        """The round, or step, after which it was saved."""
        return self.checkpoints[0].round_id

    @property
    def unit(self) -> str:
        """What ``number`` counts."""
        return _UNITS[self.kind]


class RunCheckpoints:
    """Finds the checkpoints of a run."""

    def __init__(self, run: Path, *, trust: bool) -> None:
        """``trust``: also read where its ``config.json`` says, outside of ``run``. Raises ConfigError: it is no run."""
        self.run = run
        self.kind, self._config = kind_of(run), _config_in(run)
        self._trust = trust
        named = self.setting("dir", str) or self.setting("state_dir", str, group="")  # of earlier versions
        self._named = None if not named or "\0" in named else Path(named)

    def setting(self, key: str, kind: type, *, group: str = "checkpoint") -> Any:
        """Return a setting of the checkpoints as ``config.json`` has it; None: it has none of this kind."""
        found: Any = self._config.get(self.kind)  # the section has the name of the kind
        for step in (group, key) if group else (key,):
            found = found.get(step) if isinstance(found, Mapping) else None
        return found if isinstance(found, kind) else None

    def best(self) -> FoundModel:
        """Return the best model of a federated run. Raises ConfigError, CheckpointError: there is none."""
        if self.kind != "federated":
            raise ConfigError(
                f"--best is for federated runs, with federated.checkpoint.keep_best; {self.run} is of ranks"
            )
        hint = "" if self.setting("keep_best", str) else ": the run has no federated.checkpoint.keep_best"
        place = self._place(FOLDER, "no best model in", hint)
        checkpoint = self._store(place / FOLDER).load_newest(SavedBest.of)
        assert checkpoint is not None
        return FoundModel(self.run, self.kind, [checkpoint], self._store(place))

    def newest(self, number: int | None) -> FoundModel:
        """Return the newest checkpoint, or that of round or step ``number``. Raises CheckpointError: there is none."""
        hint = ": the run has ended before its first one, or its checkpoints were moved away"
        if self.kind == "parallel" and (place := self._servers()) is not None:
            version = newest_version(place, number, inside=self._root(place))
            return FoundModel(self.run, self.kind, version, self._store(place), of_servers=True)
        is_federated = self.kind == "federated"
        check: Callable[[Checkpoint], object] = SavedRun.of if is_federated else SavedRank.of
        folder = "" if is_federated else "rank-0"
        store = self._store(self._place(folder, "no checkpoint in", hint) / folder)
        if number is not None and number not in store.rounds():
            raise CheckpointError(f"{store.directory} has no checkpoint of {number}, it has those of {store.rounds()}")
        checkpoint = store.load_newest(check) if number is None else store.load(number, check)
        assert checkpoint is not None
        return FoundModel(self.run, self.kind, [checkpoint], store)

    def _servers(self) -> Path | None:
        """Return where the parameter servers have their checkpoints; None: the run has none."""
        section = self._config.get("parameter_server")
        count = section.get("servers") if isinstance(section, Mapping) else None
        if count == 0:
            return None
        for place in self._places():
            with contextlib.suppress(FileNotFoundError):
                if has_servers(place, inside=self._root(place)):
                    return place
        return self.run / "state" if count else None

    def _root(self, place: Path) -> Path | None:
        """Return the run directory, if the place is in it: no link below it is followed."""
        return self.run if place.is_relative_to(self.run) else None

    def _store(self, place: Path) -> CheckpointStore:
        return CheckpointStore.to_read(place, inside=self._root(place))

    def _places(self) -> list[Path]:
        """Return where checkpoints may be: ``state`` in the run directory, and where the settings say."""
        if self._named is None:
            return [self.run / "state"]
        # By its text alone: to follow a path that somebody else has written may mount what it leads to.
        named, run = Path(os.path.abspath(self._named)), Path(os.path.abspath(self.run))
        for root in (run, self.run.resolve()):
            if named.is_relative_to(root):
                return [self.run / "state", self.run / named.relative_to(root)]
        return [self.run / "state", *([self._named] if self._trust else [])]

    def _place(self, folder: str, what: str, hint: str) -> Path:
        """Return the first place that has checkpoints, in a ``folder`` of it. Raises CheckpointError: none has."""
        places = self._places()
        for place in places:
            if is_there(place, folder) and self._store(place / folder).rounds():
                return place
        searched = " nor in ".join(dict.fromkeys(str(place / folder) for place in places))
        if self._named is not None and len(places) == 1:
            hint = (
                f". Its config.json names another place, {str(self._named)[:200]!r}, outside of the run directory: "
                f"--trust would read it, and run the code that config.json names"
            )
        raise CheckpointError(f"{what} {searched}{hint}")


def _config_in(run: Path) -> Mapping[str, Any]:
    """Return the configuration of a run as it was written, unchecked; {}: it was not. Raises ConfigError: it cannot be
    read."""
    if not is_there(run, "config.json"):
        return {}
    try:
        found = parse_json(text_inside(run, "config.json", MAX_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run / 'config.json'} cannot be read: {error}. Restore it, or remove it") from None
    return found if isinstance(found, Mapping) else {}


def checkpoint_of_client(client: Path, run_id: str, round_id: int, *, exactly: bool) -> Checkpoint:
    """Return the state of a client that goes with a model.

    Args:
        client: the directory of its states.
        round_id: of the shared part. The client's newest state that is not newer is taken, and, unless ``exactly``,
            else its newest one: in asynchronous runs its numbers are not those of rounds.

    Raises:
        ConfigError: there is no such directory.
        CheckpointError: it has none, or those of another run, or keeps no tensors of the model.
    """
    if not client.is_dir():
        raise ConfigError(f"{client} is no directory. Name that of a client, in its client.state_dir: .../client-3")
    store = CheckpointStore.to_read(client)
    rounds = store.rounds()
    until = max((known for known in rounds if known <= round_id), default=None)
    if until is None and exactly and rounds:
        raise CheckpointError(
            f"{client} has no state as old as the model of round {round_id}, it has those of {rounds}: a client keeps "
            f"its last three. Export one of these rounds, or leave --client out"
        )
    checkpoint = store.load_newest(SavedClient.of) if until is None else store.load(until, SavedClient.of)
    if checkpoint is None or SavedClient.of(checkpoint).run_id != run_id:
        raise CheckpointError(f"{client} has no state of run {run_id}. Name the directory that its clients have used")
    if not own_tensors(checkpoint.tensors):
        raise CheckpointError(
            f"{client} keeps no tensors of the model: nothing of it is personal (federated.share), and its rule trains "
            f"no model of its own. Leave --client out"
        )
    return checkpoint


def state_of(found: FoundModel, client: Checkpoint | None) -> SavedState:
    """Return the model as named tensors. Raises CheckpointError: the checkpoint, or the client's, does not fit."""
    try:
        if found.of_servers:
            return state_of_servers(found.checkpoints)
        (checkpoint,) = found.checkpoints
        if found.kind == "federated":
            return state_of_rounds(checkpoint, found.beside.load_constant, client)
        return state_of_ranks(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint of {found.unit} {found.number} in {found.beside.directory}: {error}"
        ) from None
