"""Makes the stored directories in ``tests/golden/directories``: what a version of gradbus leaves on a disk.

    PYTHONPATH=tests/tools:tests/support .venv/bin/python -P -m golden_runs OUT [--domain N]

OUT is a new folder, such as ``tests/golden/directories/0.3.0``. Later versions must resume, report and export what it
holds, so those of earlier versions stay as they are, and a release that writes other files adds a folder of its own.

The runs go on in a folder of their own and have relative paths. What names this machine is replaced, and the program
fails if any of it is left.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import torch

import gradbus
from gradbus.commands.files import ClientFile, ControllerFile, WorkerFile
from gradbus.commands.rank_environment import RankPlace
from gradbus.commands.run.data_parallel import Output, run_worker
from gradbus.commands.run.federated import run_client, run_controller
from gradbus.commands.run.parameter_server import run_server
from gradbus.commands.rundir.directory import ControllerDirectory
from gradbus.runtime.security.identity.allow_list import AllowList, Entry, with_entry, write_allow_list
from gradbus.runtime.security.identity.key import new_node_key
from gradbus.runtime.security.job_key import new_job_key, write_secret_file

HOST = "golden"
TASK = {"task": "golden_task:GoldenTask", "threads": 1}
CLIENTS = 2
FEDERATED: dict[str, dict[str, Any]] = {
    "federated": {
        "codec": "s4", "downlink_codec": "q8", "strategy": "fedadam",
        "checkpoint": {"keep": 2, "keep_best": "eval_loss"},
    },
    "personal": {"share": {"exclude": ["head.*"]}},
}  # fmt: skip
PARALLEL = {"ranks": 0, "servers": 2}  # with so many parameter servers
_LIMIT_S = 120.0
_NO_DATA = {".lock", ".run", ".rank-0"}  # of processes that run


def federated(name: str, domain: int, **rules: Any) -> None:
    """A run of three rounds, or what is left of it, with the state of its clients in ``NAME-clients``."""
    bus = {"job": f"golden-{name}", "domain": domain}
    rounds = {"rounds": 3, "clients": {"num": CLIENTS, "min": CLIENTS}, "checkpoint": {"keep": 2}}
    controller = {"bus": bus, "task": TASK, "federated": rounds | rules, "run_dir": name}
    kept = {"state_dir": f"{name}-clients", "history": {"dir": f"{name}/history"}}
    client = {"bus": bus, "task": TASK, "client": kept}

    async def lead() -> None:
        with ControllerDirectory(Path(name)) as run:
            await run_controller(ControllerFile.model_validate(controller), run)

    _run(lead(), *(run_client(ClientFile.model_validate(client), number) for number in range(CLIENTS)))


def parallel(name: str, domain: int, *, servers: int = 0, **rules: Any) -> None:
    """A run of two epochs on two ranks, or what is left of it, with or without parameter servers."""
    file = WorkerFile.model_validate(
        {
            "bus": {"job": f"golden-{name}", "domain": domain},
            "task": TASK,
            "run_dir": name,
            "parallel": {
                "epochs": 2,
                "checkpoint": {"keep": 2},
                "profile": {"window_steps": 2},
                "optimizer": {"name": "adamw", "lr": 0.01},
                **rules,
            },
            "parameter_server": {"servers": servers, **({"cut_bytes": 64} if servers else {})},
        }
    )
    workers = (run_worker(file, RankPlace(rank, 2), Output()) for rank in range(2))
    _run(*workers, *(run_server(file, index, 2) for index in range(servers)))


def _run(*parts: Coroutine[Any, Any, Any]) -> None:
    async def together() -> None:
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)

    asyncio.run(together())


def keys(folder: Path) -> None:
    """Key files and an allow list. The keys are random and protect nothing: their names say so."""
    folder.mkdir()
    write_secret_file(folder / "for-tests-only-job.key", new_job_key().text)
    allowed = AllowList()
    for name, role, ids in (("server", "controller", ()), ("robot-7", "client", ((7, 7),)), ("eye", "observer", ())):
        node = new_node_key(name)
        write_secret_file(folder / f"for-tests-only-{name}.key", node.text)
        allowed = with_entry(allowed, Entry(name, role, node.public, ids))  # type: ignore[arg-type]
    write_allow_list(folder / "allow.list", allowed)


def clean(folder: Path) -> None:
    """Remove what is of running processes only, and replace what names this machine in files without checksums."""
    for path in sorted(folder.rglob("*")):
        if path.name in _NO_DATA:
            path.unlink()
        elif path.name == "summary.json":
            values = json.loads(path.read_text())
            values["machine"] = {"cpu": HOST, "cores": 2, "memory_bytes": 1 << 30}
            values["platform"] = HOST
            path.write_text(json.dumps(values, indent=2) + "\n")
    for path, text in _texts(folder):
        path.write_text(text.replace(os.getcwd(), "/golden").replace(socket.gethostname(), HOST))


def _texts(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        is_checked = path.name.startswith("round-") and path.suffix == ".json"
        if path.suffix in (".json", ".jsonl", ".log", ".csv") and path.is_file() and not is_checked:
            yield path, path.read_text()


def check(folder: Path) -> None:
    """Raises SystemExit: a file names this machine."""
    words = {os.getcwd(), str(Path.home()), socket.gethostname(), platform.node(), platform.release(), _user()}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found = [word for word in words if len(word) > 4 and word.encode() in path.read_bytes()]
            if found:
                raise SystemExit(f"{path} names this machine: {found}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--domain", type=int, default=71)
    options = parser.parse_args()
    out: Path = options.out.absolute()
    if out.exists():
        raise SystemExit(f"{out} exists: stored directories stay as they are. Name a new folder")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        os.chdir(temporary)
        for name, rules in FEDERATED.items():
            federated(name, options.domain, **rules)
        for name, servers in PARALLEL.items():
            parallel(name, options.domain, servers=servers)
        keys(Path("keys"))
        clean(Path())
        check(Path())
        os.chdir("/")
        shutil.copytree(temporary, out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: gradbus {gradbus.__version__}, {size:,} bytes")


if __name__ == "__main__":
    main()
