"""Flower apps: their pyproject.toml, their two components, and what answers instructions with a ClientApp."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import flatten_dict, fuse_dicts, get_project_config, parse_config_args
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity

from gradbus.actors.flower.grid import NODE_ID_BASE, message_id
from gradbus.actors.flower.missing_modules import explain_missing_module, explain_missing_name
from gradbus.actors.flower.payload import collect, decode, encode
from gradbus.actors.flower.protocol import NodePlace
from gradbus.runtime.errors import ConfigError, FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.plain_text import plain_line

MAX_OVERRIDES = 32  # as many options a Welcome has
MAX_OVERRIDE_CHARS = 256

log = get_logger("flower")

Value = bool | int | float | str


@dataclass(frozen=True)
class FlowerApp:
    """A folder with a Flower app.

    Attributes:
        path: of the folder. server, client: references to its components, ``module:attribute``.
        config: of ``[tool.flwr.app.config]``, nested keys joined by dots.
        dependencies: requirements of ``[project]``, as ``flwr>=1.41``.
    """

    path: Path
    server: str
    client: str
    config: dict[str, Value]
    dependencies: tuple[str, ...] = ()

    def run_config(self, overrides: Mapping[str, Value]) -> dict[str, Value]:
        """The config of a run. Raises ConfigError: the app has no such key."""
        unknown = sorted(overrides.keys() - self.config.keys())
        if unknown:
            raise ConfigError(
                f"--run-config: {self.path / 'pyproject.toml'} has no key {unknown[0]!r} in [tool.flwr.app.config]; "
                f"it has {', '.join(sorted(self.config)) or 'none'}"
            )
        fused: dict[str, Value] = fuse_dicts(self.config, dict(overrides))
        return fused


def read_app(path: Path) -> FlowerApp:
    """The app in a folder. Raises ConfigError: there is none, or Flower finds its pyproject.toml wrong."""
    if not path.is_dir():
        raise ConfigError(f"{path}: expected the folder of a Flower app, with a pyproject.toml")
    try:
        project = get_project_config(path)
        app = project["tool"]["flwr"]["app"]
        config = flatten_dict(app.get("config", {}))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no Flower app: {plain_line(str(error))}") from None
    components, needs = app["components"], project.get("project", {}).get("dependencies", ())
    return FlowerApp(path.resolve(), components["serverapp"], components["clientapp"], config, tuple(map(str, needs)))


def parse_overrides(texts: list[str]) -> dict[str, Value]:
    """Return what ``--run-config`` says, as ``flwr run`` reads it. Raises ConfigError."""
    overrides = _parse_pairs("--run-config", texts, "num-server-rounds=5 lr=0.1")
    long = [key for key, value in overrides.items() if isinstance(value, str) and len(value) > MAX_OVERRIDE_CHARS]
    if len(overrides) > MAX_OVERRIDES or long or any(len(key) > 64 for key in overrides):
        raise ConfigError(
            f"--run-config: at most {MAX_OVERRIDES} keys of 64 characters with values of {MAX_OVERRIDE_CHARS} reach "
            f"the nodes: write more into the pyproject.toml of the app, on all machines"
        )
    for key, value in overrides.items():
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ConfigError(f"--run-config {key}: an integer has at most 64 bits, from -2^63 to 2^63 - 1")
    return overrides


def parse_node_config(texts: list[str]) -> dict[str, Value]:
    """Return what ``--node-config`` says, as ``flower-supernode`` reads it. Raises ConfigError."""
    return _parse_pairs("--node-config", texts, "partition-id=0 dataset-path='/data/part-0'")


def _parse_pairs(option: str, texts: list[str], example: str) -> dict[str, Value]:
    """Return keys and values in Flower's syntax, or those of a TOML file. Raises ConfigError."""
    try:
        found: dict[str, Value] = parse_config_args(texts)
    except Exception as error:  # of several libraries
        raise ConfigError(f"{option}: {plain_line(str(error))}") from None
    if any(texts) and not found:
        raise ConfigError(f'{option} {texts[0]!r}: expected keys and values, as in "{example}"')
    for key, value in found.items():
        if not isinstance(value, Value):
            raise ConfigError(
                f"{option} {key}: expected text in quotes, a number, true or false, got {type(value).__name__}"
            )
    return found


def load_component(app: FlowerApp, reference: str, kind: type[Any]) -> Any:
    """Import a component, from the app's folder first. Raises ConfigError: it is not there, or something else; and what
    its module raises."""
    module_name, _, attribute = reference.partition(":")
    if str(app.path) not in sys.path:
        sys.path.insert(0, str(app.path))
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(f"{app.path / 'pyproject.toml'}: {reference}: no module {missing!r}") from None
        raise ConfigError(f"{app.path}: {explain_missing_module(missing, app.dependencies)}") from None
    except ImportError as error:
        if (why := explain_missing_name(error, app.dependencies)) is None:
            raise
        raise ConfigError(f"{app.path}: {why}") from None
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, kind):
        raise ConfigError(
            f"{app.path / 'pyproject.toml'}: {reference}: expected a flwr {kind.__name__}, got {type(found).__name__}"
        )
    return found


def load_server_app(app: FlowerApp) -> ServerApp:
    """The ServerApp. Raises as :func:`load_component`."""
    return load_component(app, app.server, ServerApp)


def load_client_app(app: FlowerApp) -> ClientApp:
    """The ClientApp. Raises as :func:`load_component`."""
    return load_component(app, app.client, ClientApp)


class AppNodeConfig(dict[str, Value]):
    """The config of a node for its app. A key that is not there is a KeyError that says where it is set."""

    def __missing__(self, key: object) -> Value:
        raise KeyError(f"the node config has no {key!r}: start this node with --node-config {key}=...")


def make_context(
    app: FlowerApp,
    run_id: int,
    overrides: Mapping[str, Value],
    place: NodePlace | None,
    node_config: Mapping[str, Value] | None = None,
) -> Any:
    """The Context of a component. ``place``: of a node; None: it is that of the ServerApp. ``node_config``: of the
    node. In this process, messages are from this run from now on."""
    node_id = SUPERLINK_NODE_ID if place is None else NODE_ID_BASE + place.number
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, 0
    return Context(
        run_id=run_id,
        node_id=node_id,
        node_config=AppNodeConfig(node_config or {}),
        state=RecordDict(),
        run_config=app.run_config(overrides),
    )


class ClientAppAnswering:
    """Answers instructions with a ClientApp. Its Context, and the state in it, lasts as long as the run."""

    def __init__(
        self, app: FlowerApp, client_app: ClientApp, place: NodePlace, node_config: Mapping[str, Value] | None = None
    ) -> None:
        """``node_config``: what the app finds in ``context.node_config``."""
        self._app = app
        self._client_app = client_app
        self._place = place
        self._node_config = dict(node_config or {})
        self._context: Any = None
        self._used_bytes = 0  # of the message that was answered last

    def begin(self, run_id: int, options: Mapping[str, Value]) -> None:
        """A run begins. ``options``: what its controller sets in place of the app's config. Raises ConfigError."""
        if self._context is None or self._context.run_id != run_id:
            self._context = make_context(self._app, run_id, options, self._place, self._node_config)

    def answer(self, payload: memoryview, number: int) -> list[bytes | memoryview]:
        """The reply of the ClientApp; what it raises becomes a reply with an error, as Flower has it."""
        try:
            message = decode(payload)
        except FrameError as error:
            log.error("message not understood", number=number, reason=str(error))
            return self.refuse(str(error))
        self._used_bytes = len(payload)
        node = self._place.number
        message.metadata.__dict__.update(
            _dst_node_id=NODE_ID_BASE + node, _message_id=message_id(self._context.run_id, number, node)
        )
        stub = Message(metadata=message.metadata, content=RecordDict())
        try:
            reply = self._client_app(message, self._context)
            if not isinstance(reply, Message):
                raise TypeError(f"a ClientApp returns a Message, this one returned {type(reply).__name__}")
            return encode(reply)
        except Exception as error:
            log.error("the ClientApp failed", number=number, error=str(error), traceback=traceback.format_exc())
            reason = f"{type(error).__name__}: {error}"[:8000]
            return encode(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=stub))

    def release(self) -> None:
        """The reply is on its way: let go of the message."""
        collect(self._used_bytes)
        self._used_bytes = 0

    def refuse(self, reason: str) -> list[bytes | memoryview]:
        """A reply with an error. Who it is from, and to what, the controller knows."""
        metadata = Metadata(
            run_id=self._context.run_id,
            message_id="",
            src_node_id=self._context.node_id,
            dst_node_id=SUPERLINK_NODE_ID,
            reply_to_message_id="",
            group_id="",
            created_at=0.0,
            ttl=1.0,
            message_type="query",
        )
        return encode(Message(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason[:8000])))


def without_telemetry() -> None:
    """Flower reports to its makers unless it is told not to: here it does only if the user says so."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
