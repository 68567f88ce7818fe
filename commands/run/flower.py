"""``gradbus flower run`` and ``gradbus flower node``: a Flower app over the bus."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from gradbus.commands.amounts import size
from gradbus.commands.buses import check, open_bus
from gradbus.commands.choices import LogStyle
from gradbus.commands.lifecycle import abandoned, off_the_loop
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.settings import Positive, Settings, load_settings
from gradbus.runtime.errors import ConfigError, TrainingFailed
from gradbus.runtime.logs import get_logger, writes_json
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.tasks import TaskGroup, single_error
from gradbus.runtime.user_errors import traceback_with_place

if TYPE_CHECKING:
    from gradbus.actors.flower.apps import FlowerApp, Value
    from gradbus.actors.flower.grid import BusGrid
    from gradbus.actors.flower.hub import MessageHub
    from gradbus.actors.flower.node import NodeSummary
    from gradbus.actors.flower.protocol import NodePlace

log = get_logger("flower")


class FlowerSettings(Settings):
    """Holds the settings of a Flower app; see docs/flower.md."""

    max_bytes: Annotated[int, Field(ge=1 << 10, le=1 << 40)] = 8 << 30
    """The largest message that is accepted, bytes. At most so many bytes of replies are under way at the same time."""
    controller_timeout_s: Positive = 120.0
    """Seconds without a message of a controller after which a node gives up."""
    dead_after_s: Positive = 30.0
    """Silence, in seconds, after which a node that has nothing to do gets no new messages."""
    node_config: Annotated[dict[str, bool | int | float | str], Field(max_length=256)] = Field(default_factory=dict)
    """What the app finds in ``context.node_config`` of this node; ``--node-config`` adds to it."""


class FlowerFile(Settings):
    """Settings of ``gradbus flower``."""

    bus: BusSettings = Field(default_factory=BusSettings)
    flower: FlowerSettings = Field(default_factory=FlowerSettings)


def read_flower_file(path: Path | None, overrides: Sequence[str]) -> FlowerFile:
    """Settings from a file, the environment and ``--set``. Raises ConfigError."""
    ours = ("GRADBUS_BUS__", "GRADBUS_FLOWER__")
    environment = {name: text for name, text in os.environ.items() if name.upper().startswith(ours)}
    file = load_settings(FlowerFile, path, overrides=overrides, environment=environment)
    check(file.bus)
    return file


def open_app(path: Path) -> FlowerApp:
    """The Flower app in a folder. Raises ConfigError: there is none, or no Flower."""
    if find_spec("flwr") is None:
        raise ConfigError(
            "gradbus flower needs the package flwr, which is not installed here. It asks for older packages than "
            "gradbus does, so give it an environment of its own, with the extra gradbus[flower], or "
            "gradbus-core[flower] for an app without torch: in a checkout, make setup-flower, then "
            ".venv-flower/bin/gradbus; see docs/flower.md"
        )
    from gradbus.actors.flower.apps import read_app, without_telemetry

    without_telemetry()
    return read_app(path)


def configure_flower_logs(style: LogStyle) -> None:
    """Have Flower's lines go through our log, unless both are for a terminal."""
    if writes_json(style) or not sys.stderr.isatty():
        from gradbus.actors.flower.flower_logs import take_over_flower_logs

        take_over_flower_logs()


async def run_server(file: FlowerFile, app: FlowerApp, server_app: Any, overrides: dict[str, Any]) -> str:
    """Run a ServerApp for the nodes of the job. Returns a summary.

    Raises:
        JobInUse: the job has a controller. TrainingFailed: the ServerApp has raised something, or no reply of a round
        was good.
    """
    from flwr.supercore.run import Run

    from gradbus.actors.flower.apps import make_context
    from gradbus.actors.flower.grid import BusGrid
    from gradbus.actors.flower.hub import MessageHub

    run_id = secrets.randbits(62) + 1
    context = make_context(app, run_id, overrides, None)
    async with open_bus(file.bus) as bus:
        hub = MessageHub(
            bus,
            run_id=run_id,
            options=overrides,
            max_bytes=file.flower.max_bytes,
            dead_after_s=file.flower.dead_after_s,
        )
        grid = BusGrid(hub, bus.memory, asyncio.get_running_loop(), Run.create_empty(run_id))
        try:
            async with TaskGroup() as group:
                serving = group.create_task(hub.run(), name="hub")
                await hub.started.wait()
                log.info("waiting for nodes", job=bus.job, run=f"{run_id:016x}")
                try:
                    await off_the_loop(lambda: server_app(grid=grid, context=context), "serverapp")
                except Exception as error:  # also where it is Flower that raises: what the app does is the reason
                    what = f"the ServerApp failed: {type(error).__name__}: {error}"
                    log.error("the ServerApp failed", traceback=traceback_with_place(error))
                    await hub.end(ok=False, reason=what)
                    raise TrainingFailed(plain_line(what)) from None
                failure = grid.tally.failure
                await hub.end(ok=not failure, reason=failure or "the ServerApp has ended")
                if failure:
                    raise TrainingFailed(f"the ServerApp has ended, but {failure}. {_sums(hub, grid)}")
                serving.cancel()
        except BaseExceptionGroup as errors:
            raise single_error(errors) from None
        return _sums(hub, grid)


def _sums(hub: MessageHub, grid: BusGrid) -> str:
    return f"messages down {size(hub.bytes_down)}, up {size(hub.bytes_up)}; {grid.tally}"


PARTITION_KEYS = ("partition-id", "num-partitions")  # of a node's config, by Flower's convention


def place_of(
    partition: int | None, of: int | None, name: str | None, node_config: Mapping[str, Value]
) -> tuple[NodePlace, dict[str, Value]]:
    """Return which node this is, and its config for the app.

    A node with a name has a number that follows from the name. One without has its partition's, which the options or
    the config give; with neither a name is drawn, as Flower draws the ids of its nodes.

    Raises:
        ConfigError: options that do not fit together, or a name or a partition that there is not.
    """
    from gradbus.actors.flower.protocol import NodePlace
    from gradbus.runtime.names import check_name

    if (partition is None) != (of is None):
        given, missing = ("--partition", "--of") if of is None else ("--of", "--partition")
        raise ConfigError(f"{given} needs {missing}: give both, or neither where the app uses no partitions")
    config = dict(node_config)
    if partition is not None and of is not None:
        for key, value in zip(PARTITION_KEYS, (partition, of), strict=True):
            if config.setdefault(key, value) != value:
                raise ConfigError(f"the node config has {key}={config[key]}, and the options say {value}: give it once")
    if name is not None:
        return NodePlace.derive_from_name(check_name(name)), config
    number, count = map(config.get, PARTITION_KEYS)
    if type(number) is int and type(count) is int:  # True is none
        return NodePlace.of_partition(number, count), config
    host = "".join(one if one.isascii() and one.isalnum() else "-" for one in socket.gethostname()).strip("-")
    return NodePlace.derive_from_name(check_name(f"{host[:48] or 'node'}-{secrets.token_hex(4)}")), config


async def run_node(
    file: FlowerFile, app: FlowerApp, client_app: Any, place: NodePlace, node_config: Mapping[str, Value]
) -> NodeSummary:
    """Run a node until the run has ended. Raises as :meth:`.MessageNode.run`."""
    from gradbus.actors.flower.apps import ClientAppAnswering
    from gradbus.actors.flower.node import MessageNode

    async with open_bus(file.bus) as bus:
        node = MessageNode(
            bus,
            ClientAppAnswering(app, client_app, place, node_config),
            place=place,
            controller_timeout_s=file.flower.controller_timeout_s,
            max_bytes=file.flower.max_bytes,
        )
        if place.name:
            log.info("node named", node=place.number, name=place.name)
        try:
            return await node.run()
        finally:
            if node.summary.left_call:
                abandoned.set()
