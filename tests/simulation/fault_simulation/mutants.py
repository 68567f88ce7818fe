"""Faults that are planted in the product, to see that the simulation finds them.

Each changes one function in this process, as a slip of its author would have: the net is as fine as what it catches.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """A function, by its module, class and name, and the text in it that is replaced."""

    module: str
    owner: str
    name: str
    before: str
    after: str


_IN = "gradbus.actors.federated."
MUTANTS: Mapping[str, Mutant] = {
    "counted is forgotten": Mutant(
        _IN + "updates_in", "UpdateReceiver", "on_request",
        "if self._counted.get(client_id) == update.whole_key:", "if False:",
    ),
    "counted is not saved": Mutant(
        _IN + "state", "RunState", "_meta", "for client_id, key in list(self.counted.items())[-MAX_KNOWN:]",
        "for client_id, key in []",
    ),
    "receipt before the sum": Mutant(
        _IN + "updates_in", "UpdateReceiver", "_fold", "        started_s = time.perf_counter()\n        self.timing",
        "        await self._send_receipt(update)\n        started_s = time.perf_counter()\n        self.timing",
    ),
    "publish before commit": Mutant(
        _IN + "controller", "Controller", "_commit", "        if state.is_durable or self._probe.history.on:\n",
        "        await self._publisher.publish()\n        if state.is_durable or self._probe.history.on:\n",
    ),
    "an update may count twice": Mutant(
        _IN + "rounds", "Round", "may_send", "if client_id in self.accepted:", "if False:",
    ),
    "an old controller is followed": Mutant(
        _IN + "session", "ControllerSession", "accepts_session",
        "if session < self.incarnation and now_s - self._session_seen_s < OLD_SESSION_S:", "if False:",
    ),
    "a restarted controller keeps its incarnation": Mutant(
        _IN + "controller", "Controller", "_open", "Identity(CONTROLLER, max(self._identity.incarnation, again))",
        "Identity(CONTROLLER, self._state.incarnation or self._identity.incarnation)",
    ),
    "the update is not offered again": Mutant(
        _IN + "updates_out", "UpdateSender", "deliver", "asyncio.timeout(wait_s)", "asyncio.timeout(1e6)",
    ),
    "the run id is new after a resume": Mutant(
        _IN + "state", "RunState", "_restore", "        self.run_id = int(saved.run_id, 16)\n", "",
    ),
    "training of the session before is sent": Mutant(
        _IN + "client", "Client", "_train_update",
        "session != current.incarnation or current.superseded(command) or self._is_called_off()", "False",
    ),
    "another start is not asked": Mutant(
        _IN + "client", "Client", "_send_update", "self._context.is_same_run(welcome.run_id)",
        "self._context.is_same_session(session)",
    ),
    "a file is not synced": Mutant("gradbus.runtime.checkpoint", "", "_replacing", "        _sync(temporary)\n", ""),
    "a folder is not synced": Mutant(
        "gradbus.runtime.checkpoint", "CheckpointStore", "save", "_sync(self.directory)", "pass",
    ),
}  # fmt: skip


def plant(name: str) -> None:
    """Change the function of a mutant, for the life of this process.

    Raises:
        ValueError: there is none of this name, or its text is not in the function any more.
    """
    if name not in MUTANTS:
        raise ValueError(f"no mutant {name!r}: expected one of {', '.join(MUTANTS)}")
    mutant = MUTANTS[name]
    module = importlib.import_module(mutant.module)
    owner: Any = getattr(module, mutant.owner) if mutant.owner else module
    function: Callable[..., Any] = inspect.unwrap(getattr(owner, mutant.name))
    source = inspect.getsource(function)
    if mutant.before not in source:
        raise ValueError(f"mutant {name!r}: {mutant.before!r} is not in {mutant.name} any more. Write it anew")
    changed = textwrap.dedent(source.replace(mutant.before, mutant.after, 1))
    names: dict[str, Any] = {}
    code = compile(changed, inspect.getsourcefile(function) or name, "exec")
    exec(code, vars(module), names)  # noqa: S102 - a fault on purpose, in a test
    setattr(owner, mutant.name, names[mutant.name])
