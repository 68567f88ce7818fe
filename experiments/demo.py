"""``gradbus demo``: a controller and its clients, each a process of its own, train one model over DDS."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradbus.experiments.children import Child, Children
from gradbus.experiments.cli.exit_codes import ClientsGone, ExitCode, NoData
from gradbus.experiments.files import ClientFile, ControllerFile, load
from gradbus.experiments.report.scalars import Scalars
from gradbus.experiments.run.lifecycle import off_the_loop
from gradbus.experiments.run.logfile import readable
from gradbus.experiments.run.screen import Screen
from gradbus.experiments.rundir.directory import RunDirectory, new_path
from gradbus.experiments.rundir.versions import cores
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.logs import get_logger

if TYPE_CHECKING:
    from gradbus.actors import RoundReport

_GLYPHS = 12_000  # samples at most; fewer are drawn if fewer will be used
_FINISH_S = 10.0  # for the clients to end by themselves, once the run is over

log = get_logger("demo")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says. ``samples``: per client and round, 0 for all it has."""

    rounds: int = 5
    clients: int = 2
    samples: int = 2000
    data: str = "auto"
    data_root: Path | None = None
    codec: str = "fp32"
    downlink_codec: str = "fp32"
    partition: str = "iid"
    seed: int = 0
    domain: int = 0
    run_dir: Path | None = None
    overrides: tuple[str, ...] = ()
    loop: str = "uvloop"
    level: str = "info"
    full_traceback: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be run, and one line about the data."""

    controller: ControllerFile
    client: ClientFile
    run_dir: Path
    note: str


def plan(options: DemoOptions) -> Plan:
    """Settle everything that the processes must agree on, before any of them starts.

    Raises:
        ConfigError, NoData.
    """
    job = f"demo-{secrets.token_hex(4)}"
    run_dir = options.run_dir or new_path(job)
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(f"run directory {run_dir} is not empty. A demo starts afresh: name another, or remove it")
    data, note = _choose_data(options)
    bus = {"job": job, "domain": options.domain}
    task = {
        **data, "partition": _partition(options.partition), "num_clients": options.clients, "seed": options.seed,
    }  # fmt: skip
    federated = {
        "rounds": options.rounds, "num_clients": options.clients, "subset_size": options.samples, "lr": 0.02,
        "codec": options.codec, "downlink_codec": options.downlink_codec, "seed": options.seed,
    }  # fmt: skip
    # The controller computes only while its clients wait, so it may take the cores that they leave.
    threads = min(4, cores())
    defaults = {"bus": bus, "task": {**task, "threads": threads}, "federated": federated, "run_dir": str(run_dir)}
    controller = load(ControllerFile, None, defaults=defaults, overrides=options.overrides)
    # An orphan should not wait for long: this is how clients end when the demo itself was killed.
    client = ClientFile.model_validate(
        {
            "bus": controller.bus,
            "task": controller.task.model_copy(update={"threads": 1}),
            "client": {
                "controller_timeout_s": 30.0,
                "history_dir": run_dir / "history",
                "full_traceback": options.full_traceback,
            },
        }
    )
    return Plan(controller, client, run_dir, note)


def _choose_data(options: DemoOptions) -> tuple[dict[str, Any], str]:
    root = None if options.data_root is None else str(options.data_root.absolute())
    name, note = options.data, ""
    if name in ("auto", "mnist"):  # once, here: "auto" may come out differently in another process
        from gradbus import models  # takes seconds, so only if it has to be

        try:
            note = models.mnist(root).note
            name = "mnist"
        except models.DataMissing as missing:
            if name == "mnist":
                raise NoData(str(missing)) from None
            name, note = "glyphs", f"glyphs, digits drawn on the spot, in place of MNIST: {missing}"
        except ValueError as error:
            raise ConfigError(f"MNIST: {error}") from None
    if name != "glyphs":
        return {"data": name, "data_root": root}, note
    wanted = 2 * options.clients * options.samples or _GLYPHS
    train = max(1000, min(_GLYPHS, wanted))
    data_options = {"train": train, "test": max(500, train // 6), "seed": options.seed}
    return {"data": "glyphs", "data_options": data_options}, note or "glyphs, digits drawn on the spot"


def _partition(text: str) -> Any:
    """A kind, or JSON with a kind and its options; ``dirichlet:0.5`` is short for the most usual one."""
    if text.startswith("{"):
        try:
            return parse_json(text)
        except ValueError as error:
            raise ConfigError(f"--partition {text!r} is not valid JSON: {error}") from None
    kind, colon, alpha = text.partition(":")
    if not colon:
        return text
    try:
        return {"kind": kind, "alpha": float(alpha)}
    except ValueError:
        raise ConfigError(f"--partition {text!r}: expected for example dirichlet:0.5") from None


async def run_demo(
    planned: Plan, run: RunDirectory, screen: Screen, options: DemoOptions, scalars: Scalars | None = None
) -> list[RoundReport]:
    """Start the clients, run the controller, end the clients.

    Raises:
        ClientsGone: all clients ended early. Else as run_controller.
    """
    config = run.path / "client.json"
    config.write_text(planned.client.model_dump_json(indent=2, exclude_defaults=True) + "\n", encoding="utf-8")
    # Its clients are its own children: it knows when one of them ends, and that the others are on their way.
    log_file = screen.log_file(run, hidden=["still waiting"])

    async with Children() as children:
        for number in range(options.clients):
            arguments = [
                "client",
                str(config),
                "--id",
                str(number),
                "--loop",
                options.loop,
                "--log-level",
                options.level,
            ]
            await children.start(str(number), arguments, run.path / f"client-{number}.log")

        over = False
        # Importing torch takes seconds: here, beside the clients, which do the same now, and off the loop.
        await off_the_loop(lambda: import_module("gradbus.experiments.run.federated"), "import")
        from gradbus.experiments.run.federated import run_controller

        def ended(child: Child, code: int) -> None:
            if not over:
                end = f"signal {-code}" if code < 0 else f"exit code {code}"
                log.warning("client ended early", client=child.name, end=end, log=str(child.log))
                for line in child.last_lines(3):
                    log_file.show(f"  client {child.name}: {readable(line)}")

        with screen.logging(log_file):
            rounds = asyncio.create_task(
                run_controller(planned.controller, run, screen.display(log_file, planned.controller), scalars=scalars),
                name="rounds",
            )
            watch = asyncio.create_task(children.watch(ended), name="watch")
            try:
                await asyncio.wait([rounds, watch], return_when=asyncio.FIRST_COMPLETED)
                if not rounds.done():
                    await _last_rites(rounds, children, run)
                over = True
                reports = await rounds
            finally:
                over = True
                for task in (rounds, watch):
                    task.cancel()
                await asyncio.wait([rounds, watch])
        await children.finish(_FINISH_S)
    return reports


async def _last_rites(rounds: asyncio.Task[Any], children: Children, run: RunDirectory) -> None:
    """All clients have ended; so has the run, in a moment, or it never will."""
    await asyncio.wait([rounds], timeout=2.0 if _all_well(children) else 0.0)
    if not rounds.done():
        raise ClientsGone(f"all clients have ended before the run has; their logs are client-*.log in {run.path}")


def _all_well(children: Children) -> bool:
    return all(child.process.returncode == ExitCode.OK for child in children.all)
