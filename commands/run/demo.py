"""``gradbus demo``: a controller and its clients, each a process of its own, train one model over DDS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradbus.commands.choices import LogLevel, LoopName
from gradbus.commands.exit_codes import ClientsGone, ExitCode, NoData
from gradbus.commands.files import ClientFile, ControllerFile, load
from gradbus.commands.lifecycle import before_abort, off_the_loop
from gradbus.commands.report.scalars import Scalars
from gradbus.commands.run.console import Screen, readable
from gradbus.commands.run.live import round_display
from gradbus.commands.rundir.directory import ControllerDirectory, new_path
from gradbus.runtime.cores import usable_cores
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.logs import get_logger

if TYPE_CHECKING:
    from gradbus.actors import RoundReport
    from gradbus.actors.federated.controller.combinations import CheckedChoices
    from gradbus.commands.report.followed import FollowedJob

_GLYPHS = 12_000  # samples at most; fewer are drawn if fewer will be used
_FINISH_S = 10.0  # for the clients to end by themselves, once the run is over, and for the run where they have
_KILL_AFTER_S = 3.0  # from the request to end to the kill

log = get_logger("demo")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of the command. ``samples``: per client and round, 0 for all it has."""

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
    loop: LoopName = "uvloop"
    level: LogLevel = "info"
    full_traceback: bool = False


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The settings of both sides, and one line about the data. ``choices``: what those of the controller name, where
    that is checked by now."""

    controller: ControllerFile
    client: ClientFile
    run_dir: Path
    note: str
    choices: CheckedChoices | None = None


def plan(options: DemoOptions) -> DemoPlan:
    """Settle everything that the processes must agree on, before any of them starts.

    Raises:
        ConfigError, NoData.
    """
    job = f"demo-{secrets.token_hex(4)}"
    data, note = _choose_data(options)
    bus = {"job": job, "domain": options.domain}
    task = {
        **data,
        "partition": _partition(options.partition),
        "num_clients": options.clients,
        "seed": options.seed,
    }
    federated = {
        "rounds": options.rounds, "clients": {"num": options.clients},
        "training": {"subset_size": options.samples, "lr": 0.02}, "codec": options.codec,
        "downlink_codec": options.downlink_codec, "seed": options.seed,
    }  # fmt: skip
    # The controller computes only while its clients wait, so it may take the cores that they leave.
    threads = min(4, usable_cores())
    defaults = {"bus": bus, "task": {**task, "threads": threads}, "federated": federated}
    controller = load(ControllerFile, None, defaults=defaults, overrides=options.overrides)
    run_dir = options.run_dir or controller.run_dir or new_path(controller.bus.job)
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(f"run directory {run_dir} is not empty. A demo starts afresh: name another, or remove it")
    controller = controller.model_copy(update={"run_dir": run_dir})
    own = (controller.federated.strategy, controller.federated.training.rule)
    choices = None
    if any(":" in choice.name for choice in own):
        from gradbus.actors.federated.controller.combinations import (
            check_combination,  # takes seconds, so only if it has to be
        )

        choices = check_combination(controller.federated)
    # An orphan should not wait for long: this is how clients end when the demo itself was killed.
    client = ClientFile.model_validate(
        {
            "bus": controller.bus,
            "task": controller.task.model_copy(update={"threads": 1}),
            "client": {
                "controller_timeout_s": 30.0,
                "history": {"dir": run_dir / "history"},
                "full_traceback": options.full_traceback,
            },
        }
    )
    return DemoPlan(controller, client, run_dir, note, choices)


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
    planned: DemoPlan,
    run: ControllerDirectory,
    screen: Screen,
    options: DemoOptions,
    scalars: Scalars | None = None,
    followed: FollowedJob | None = None,
) -> list[RoundReport]:
    """Start the clients, run the controller, end the clients.

    Raises:
        ClientsGone: all clients ended early. Else as run_controller.
    """
    config = run.path / "client.json"
    config.write_text(planned.client.model_dump_json(indent=2, exclude_defaults=True) + "\n", encoding="utf-8")
    # Its clients are its own children: it knows when one of them ends, and that the others are on their way.
    log_file = screen.log_file(run.log, hidden=["still waiting"])
    over = False

    async def client(number: int) -> int:
        """A client process, which does not outlive this: its exit code."""
        flags = ["--id", str(number), "--loop", options.loop, "--log-level", options.level]
        output = run.path / f"client-{number}.log"
        code = await run_process(["client", str(config), *flags], output)
        if not over and code != ExitCode.OK:  # one with 0 has received the end of the run, which arrives here later
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.warning("client ended early", client=str(number), end=end, log=str(output))
            for line in _last_lines(output, 3):
                log_file.show(f"  client {number}: {readable(line)}")
        return code

    display = round_display(
        screen, log_file, f"job {planned.controller.bus.job}", planned.controller.federated.clients.num or 0
    )
    clients = [asyncio.create_task(client(number), name=f"client-{number}") for number in range(options.clients)]
    run_tasks: list[asyncio.Task[Any]] = []
    try:
        # Importing torch takes seconds: here, beside the clients, which do the same now, and off the loop.
        await off_the_loop(lambda: import_module("gradbus.commands.run.federated"), "import")
        from gradbus.commands.run.federated import run_controller

        with screen.logging_to(log_file):
            rounds = asyncio.create_task(
                run_controller(
                    planned.controller, run, display, scalars=scalars, followed=followed, choices=planned.choices
                )
            )
            all_ended = asyncio.create_task(asyncio.wait(clients))
            run_tasks += [rounds, all_ended]
            await asyncio.wait(run_tasks, return_when=asyncio.FIRST_COMPLETED)
            if not rounds.done():
                # With these a client ends when the Controller has told it that the run is over: it ends soon, too.
                told = any(task.result() in (ExitCode.OK, ExitCode.OWN_CODE) for task in clients)
                await asyncio.wait([rounds], timeout=_FINISH_S if told else 0.0)
                if not rounds.done():
                    logs = f"their logs are client-*.log in {run.path}"
                    raise ClientsGone(f"all clients have ended before the run has; {logs}")
            over = True
            reports = await rounds
        await asyncio.wait(clients, timeout=_FINISH_S)
        return reports
    finally:
        over = True
        for tasks in (run_tasks, clients):  # the controller first, else it would miss its clients
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)


async def run_process(arguments: Sequence[str], log_file: Path) -> int:
    """Run ``gradbus ARGUMENTS`` in a new process, its output in ``log_file``. Returns its exit code.

    Cancelled, this ends the process. That has a session of its own, so that Ctrl-C in the terminal reaches the parent
    alone. Settings of the environment are in the file that the parent has written for it.
    """
    environment = {key: text for key, text in os.environ.items() if not (key.startswith("GRADBUS_") and "__" in key)}
    with log_file.open("wb") as output:
        # -P: Python would put the current directory in front of everything that is installed.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "gradbus",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )

    def kill() -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    before_abort.append(kill)
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            async with asyncio.timeout(_KILL_AFTER_S):
                await process.wait()
        raise
    finally:
        kill()
        await process.wait()
        before_abort.remove(kill)


def _last_lines(path: Path, count: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        return file.read().decode(errors="replace").splitlines()[-count:]
