"""``gradbus export``: the trained model of a run as named tensors, from its newest checkpoint.

A checkpoint of a federated run holds vectors, in an order of its own; one of data-parallel ranks holds tensors under
names of its own. What is written here has the names and shapes that ``model.state_dict()`` has, frozen parameters and
buffers among them, so that ``model.load_state_dict(...)`` takes it as it is.

A run directory is data, and people send them to each other: what ``config.json`` names is neither imported nor run.
With ``trust`` the model is built as that file says. Then tensors are there, too, that no checkpoint has: where some are
personal (``federated.share``), those of ``build_model``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from gradbus.actors.federated.controller.best_model import SavedBest
from gradbus.actors.federated.controller.saved_run import SavedRun
from gradbus.commands.amounts import size
from gradbus.commands.rundir.directory import check_named, replaced
from gradbus.commands.rundir.saved_models import FoundModel, RunCheckpoints, checkpoint_of_client, state_of
from gradbus.runtime.complex_pairs import is_inexact
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.saved_state import SavedState
from gradbus.runtime.torch_compat import uncompiled_names

Format = Literal["safetensors", "torch"]

_SUFFIXES: dict[str, Format] = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_NAMED = 5  # tensors that a message names
TRUST_WARNING = "--trust would build the model for the rest, which runs the code that config.json names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The file that was written.

    Attributes:
        unit, number: the round or step after which the model was saved. tensors: how many there are. why: that one.
        personal: names of tensors that are not the run's. client: whose they are; empty: each client has its own.
        absent: those of ``personal``, left_out: other names of the model's state, that are not in the file.
        unknown: what a checkpoint of an earlier version lacks, as parts of a sentence.
    """

    path: Path
    format: Format
    unit: str
    number: int
    tensors: int
    num_bytes: int
    why: str = ""
    personal: Sequence[str] = ()
    client: str = ""
    absent: Sequence[str] = ()
    left_out: Sequence[str] = ()
    unknown: Sequence[str] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all of the model's state is in the file."""
        return not (self.absent or self.left_out or self.unknown)

    @property
    def text(self) -> str:
        """For the user: what it is, what is not in it, and how to load it."""
        about = ""
        if self.client:
            about = f", {len(self.personal)} of them of {plain_line(self.client)}"
        elif self.personal and not self.absent:
            about = (
                f"; {len(self.personal)} of them are personal, and as the model was built: each client has its own "
                f"(--client DIRECTORY)"
            )
        lines = [
            f"written to {plain_line(str(self.path))} ({size(self.num_bytes)}): {self.tensors} tensors, after "
            f"{self.unit} {self.number}{plain_line(self.why)}{about}",
            *self._missing(),
            f"to use it: model.load_state_dict({self._load}{'' if self.is_whole else ', strict=False'})",
        ]
        return "\n".join(lines)

    def _missing(self) -> list[str]:
        lines = []
        if self.absent:
            lines.append(
                f"left out, as each client has its own: {_some(self.absent)}; --client DIRECTORY gives those of one"
            )
        if self.left_out:
            lines.append(f"left out, as the checkpoint has no values of them: {_some(self.left_out)}")
        if self.unknown:
            lines.append(f"saved by an earlier version, whose checkpoints lack {'; '.join(self.unknown)}")
        return [*lines, TRUST_WARNING] if lines else []

    @property
    def _load(self) -> str:
        if self.format == "safetensors":
            return f"safetensors.torch.load_file({str(self.path)!r})"
        return f"torch.load({str(self.path)!r}, weights_only=True)"


def export(
    run: Path,
    to: Path | None = None,
    form: Format | None = None,
    number: int | None = None,
    *,
    best: bool = False,
    client: Path | None = None,
    trust: bool = False,
) -> Exported:
    """Write the model of a run, from the checkpoint of round or step ``number``, by default the newest one.

    Args:
        run: its directory; the run may be going on.
        best: the best model of a run with ``federated.checkpoint.keep_best``, in place of the newest.
        to: the file; by default ``model.safetensors`` or ``model.pt`` there. form: of it; by default by its suffix.
        client: the directory of a client's state, such as ``state/client-3``: write the model of that client.
        trust: build the model. This runs the code that ``config.json`` of the run names.

    Raises:
        ConfigError: it is no run directory, the model cannot be made, or the file cannot be written.
        CheckpointError: there is no checkpoint, it is damaged, or it does not fit the model.
    """
    if to is not None:
        check_named(to, "--to")
    form = form or _SUFFIXES.get("" if to is None else to.suffix.lower(), "safetensors")
    name = "model" if client is None else f"model-{_name_of(client)}"
    target = to or run / (f"{name}.safetensors" if form == "safetensors" else f"{name}.pt")
    if best and number is not None:
        raise ConfigError("give --best or --round, not both")
    checkpoints = RunCheckpoints(run, trust=trust)
    if client is not None and checkpoints.kind != "federated":
        raise ConfigError("--client: a run of data-parallel ranks has no clients, and one model for all")
    found = checkpoints.best() if best else checkpoints.newest(number)
    state = _state_of(found, client, exactly=best or number is not None, trust=trust)
    about = _metadata(found, state, client)
    _write(state.tensors, target, form, about)
    why = ""
    if best:
        kept = SavedBest.of(found.checkpoints[0]).best
        why = f", the {kept.mode}imum of {kept.metric}: {kept.value:.6g}"
    return Exported(
        path=target,
        format=form,
        unit=found.unit,
        number=found.number,
        tensors=len(state.tensors),
        num_bytes=target.stat().st_size,
        why=why,
        personal=state.personal,
        client=about.get("client", ""),
        absent=[name for name in state.personal if name not in state.tensors],
        left_out=state.left_out,
        unknown=state.unknown,
    )


def _state_of(found: FoundModel, client: Path | None, *, exactly: bool, trust: bool) -> SavedState:
    own = None
    if client is not None:
        run_id = SavedRun.of(found.checkpoints[0]).run_id
        own = checkpoint_of_client(client, run_id, found.number, exactly=exactly)
    if not trust:
        return _uncompiled(state_of(found, own))
    from gradbus.commands.rundir.trusted_model import built_state  # nothing else here can run what a run names

    return _uncompiled(built_state(found, own))


def _uncompiled(state: SavedState) -> SavedState:
    """Name the tensors as the model has them before ``torch.compile``: so other programs can load them."""
    names = uncompiled_names([*state.tensors, *state.personal, *state.left_out])
    return replace(
        state,
        tensors={names[name]: one for name, one in state.tensors.items()},
        personal=[names[name] for name in state.personal],
        left_out=[names[name] for name in state.left_out],
    )


def _metadata(found: FoundModel, state: SavedState, client: Path | None) -> dict[str, str]:
    about = {found.unit: str(found.number), "format": "pt"}
    if client is not None:
        about["client"] = _name_of(client)
    if state.personal:
        own = set(state.personal)
        shared = [name for name, one in state.tensors.items() if name not in own and is_inexact(one.dtype)]
        about["personal"], about["shared"] = json.dumps(state.personal), json.dumps(shared)
    return about


def _name_of(client: Path) -> str:
    """Return the name of a client's directory, which may have been given as ``.``."""
    return client.resolve().name or "client"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:100]) for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED:,} more" if len(names) > _NAMED else shown


def _write(state: Mapping[str, Any], target: Path, form: Format, about: dict[str, str]) -> None:
    """Whole or not at all."""
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd and form == "safetensors":
        raise ConfigError(f"{odd[0]!r} of the model's state is no tensor; write it with --format torch")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced(target) as temporary:
            if form == "torch":
                torch.save(dict(state), temporary)
            else:
                save_file(dict(state), temporary, metadata=about)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}. Name another (--to)") from None
    except KeyError as error:  # of the library of safetensors, which has no name for it
        raise ConfigError(
            f"the file cannot be written as safetensors, which has no {str(error.args[0]).removeprefix('torch.')}; "
            f"write it with --format torch"
        ) from None
