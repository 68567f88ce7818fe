"""Use the installed wheels where there is no Cyclone DDS: under another Python, or on another processor.

    PYTHONPATH=/packages python3 -P tests/tools/platform_checks.py --python 3.14 imports session round

It needs gradbus and, of this tree, example configurations and a Flower app. ``make nightly PART=python-3.14``,
``PART=arm64`` and ``PART=arm64-torch`` run it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRADBUS = [sys.executable, "-P", "-m", "gradbus"]
START_S = 60.0  # of an interpreter that compiles what it imports
ENDS_S = 240.0  # of a run, emulated ones included
TORCH_ENDS_S = 3600.0  # where torch is emulated: its import alone takes minutes
NEED_AN_EXTRA = ("gradbus.runtime.transport.dds", "gradbus.actors.flower", "gradbus.__main__")
ROUNDS = 2
TRAINING = ["--set", "federated.training.subset_size=2000", "--set", "federated.training.lr=0.02"]
LEAST_ACCURACY = 0.3  # of ten classes; the example in README.md has 0.8 after two rounds of these
NO_SHARED_MEMORY = ["--set", "bus.shared_memory=false"]  # so that everything goes over the link, as between machines
APP_ACCURACIES = (0.9580, 0.9580, 0.9595)  # of numpy-app on x86-64, as docs/flower.md has them
CHECKS = ("imports", "session", "round", "flower", "client", "receive", "send")
APP_TOLERANCE = 0.002  # four samples of 2,000: sums of another processor differ in the last bits


@contextlib.contextmanager
def kept_endpoint() -> Iterator[str]:
    """Yield an endpoint on loopback whose port no other process gets by chance meanwhile."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield f"tcp/127.0.0.1:{kept.getsockname()[1]}"


@contextlib.contextmanager
def relay_at(endpoint: str) -> Iterator[None]:
    """Run ``gradbus relay`` in a process of its own, from when it listens to the end of the block."""
    command = [*GRADBUS, "relay", "--listen", endpoint, "--log-style", "json"]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as relay:
        try:
            host, _, port = endpoint.removeprefix("tcp/").rpartition(":")
            wait_until_open(relay, host, int(port))
            yield
            assert relay.poll() is None, f"the relay has ended with {relay.returncode}"
            relay.terminate()
            assert relay.wait(START_S) == 0, f"after SIGTERM the relay ended with {relay.returncode}"
        except BaseException:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
        finally:
            relay.kill()


def wait_until_open(process: subprocess.Popen[bytes], host: str, port: int) -> None:
    """Wait until a process listens. Raises AssertionError: it has ended, or does not listen in time."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        assert process.poll() is None, f"the process that should listen has ended with {process.returncode}"
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.05)  # nothing else says so to a process that is not its parent's reader
    raise AssertionError(f"nothing listens on {host}:{port} after {START_S:g} s")


def run_together(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None, ends_s: float = ENDS_S
) -> list[str]:
    """Run processes side by side until all have ended. Returns what each printed, on stdout and stderr.

    Raises:
        AssertionError: one ended with another code than 0, or not in time.
    """
    variables = {**os.environ, **(environment or {})}
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        running = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables)
            for command, log in zip(commands, logs, strict=True)
        ]
        until_s = time.monotonic() + ends_s
        try:
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until_s - time.monotonic()))
            codes = [process.poll() for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        for log in logs:
            log.seek(0)
        printed = [log.read() for log in logs]
    for command, code, text in zip(commands, codes, printed, strict=True):
        ended = "has not ended" if code is None else f"ended with {code}"
        assert code == 0, f"{shlex.join(command)} {ended}:\n" + "\n---\n".join(printed or [text])
    return printed


def check_imports() -> str:
    """Import each module of gradbus-core that needs no extra, without Cyclone DDS and before torch."""
    assert importlib.util.find_spec("cyclonedds") is None, (
        "Cyclone DDS is installed here, so nothing shows that it can be absent"
    )
    files = [str(file) for file in importlib.metadata.files("gradbus-core") or []]
    names = [
        re.sub(r"/__init__$", "", file.removesuffix(".py")).replace("/", ".") for file in files if file.endswith(".py")
    ]
    modules = [name for name in names if not name.startswith(NEED_AN_EXTRA)]
    assert modules, "gradbus-core has recorded no modules"
    for name in modules:
        importlib.import_module(name)
    assert "torch" not in sys.modules, "a module of gradbus-core has loaded torch"
    return f"{len(modules)} modules of gradbus-core {importlib.metadata.version('gradbus-core')}"


def check_session() -> str:
    """Send a message from one process to another over a relay."""
    with kept_endpoint() as endpoint, relay_at(endpoint):
        member = [sys.executable, "-P", __file__, "--endpoint", endpoint]
        run_together([[*member, "receive"], [*member, "send"]])
    return "a relay and two processes"


async def exchange(endpoint: str, role: str) -> None:
    """Take one of the two parts of :func:`check_session`."""
    import gradbus
    from gradbus.runtime.wire.frames import CONTROLLER
    from gradbus.runtime.wire.messages import Identity, TrainCmd

    sent = TrainCmd(3, 600, 2, 0.05, 11)
    async with asyncio.timeout(START_S), gradbus.connect("platform", connect=[endpoint], load_actors=False) as bus:
        if role == "receive":
            received = await bus.subscribe(TrainCmd).get()
            assert received == sent, f"sent {sent}, received {received}"
        else:
            bus.open_writer(TrainCmd)
            await bus.matched(lambda: bus.matched_readers(TrainCmd) > 0, timeout_s=START_S)
            await bus.publish(Identity(CONTROLLER, 5), sent)
            assert await bus.drain(TrainCmd, START_S), "the message was not acknowledged"


def check_round() -> str:
    """Train with a controller and two clients, with torch, over a relay."""
    import torch

    configs = ROOT / "experiments" / "configs"
    with tempfile.TemporaryDirectory() as folder, kept_endpoint() as endpoint, relay_at(endpoint):
        common = ["--set", f'bus.connect=["{endpoint}"]', "--set", "task.data=glyphs", *NO_SHARED_MEMORY]
        rules = ["--set", f"federated.rounds={ROUNDS}", *TRAINING]
        run = Path(folder, "run")
        controller = [*GRADBUS, "controller", str(configs / "controller.conf.json"), *common, *rules]
        controller += ["--run-dir", str(run), "--no-live"]
        client = [*GRADBUS, "client", str(configs / "client.conf.json"), *common, "--id"]
        run_together([controller, [*client, "0"], [*client, "1"]], {"OMP_NUM_THREADS": "1"})
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["outcome"], summary["rounds"]) == ("done", ROUNDS), summary
    assert summary["accuracy"] >= LEAST_ACCURACY, summary
    return f"{ROUNDS} rounds, accuracy {summary['accuracy']:.3f}, torch {torch.__version__}"


def check_flower(scene: Path, elsewhere: Sequence[str]) -> str:
    """Run a Flower app: the controller and a node here, another node by the interpreter that ``elsewhere`` starts.

    Args:
        scene: a folder for the key, which the other side finds as /scene; this tree is /gradbus there.
    """
    key, app = scene / "job.key", "tests/flower_apps/numpy-app"
    run_together([[*GRADBUS, "keys", "new", str(key)]])
    with kept_endpoint() as endpoint:
        flower = [*GRADBUS, "flower"]
        common = ["--set", "bus.job=platform", *NO_SHARED_MEMORY, "--log-style", "json"]
        dials = ["--set", f'bus.connect=["{endpoint}"]', "--of", "2", *common]
        listens = ["--set", f'bus.listen=["{endpoint}"]', *common]
        printed = run_together(
            [
                [*flower, "run", str(ROOT / app), *listens],
                [*flower, "node", str(ROOT / app), "--partition", "0", *dials],
                [*elsewhere, "-m", "gradbus", "flower", "node", f"/gradbus/{app}", "--partition", "1", *dials],
            ],
            {"GRADBUS_KEY_FILE": str(key)},
        )
    found = [float(text) for text in re.findall(r"^accuracy ([\d.]+)$", printed[0], re.MULTILINE)]
    near = [abs(one - other) <= APP_TOLERANCE for one, other in zip(found, APP_ACCURACIES, strict=True)]
    assert all(near), f"accuracies {found}, expected {APP_ACCURACIES}:\n{printed[0]}"
    return f"3 rounds with a node here and one elsewhere, accuracies {found}"


def check_client(scene: Path, elsewhere: Sequence[str]) -> str:
    """Train one round: the relay and the controller here, the client by the interpreter that ``elsewhere`` starts.

    Args:
        scene: a folder for the key, which the other side finds as /scene; this tree is /gradbus there.
    """
    key, run = scene / "job.key", scene / "run"
    run_together([[*GRADBUS, "keys", "new", str(key)]])
    tiny = {"model": "gradbus.models:mnist_mlp", "model_options": {"hidden": 16}, "data": "glyphs", "num_clients": 1}
    tiny["data_options"] = {"train": 100, "test": 20}
    patient = {"clients": {"num": 1, "start_timeout_s": TORCH_ENDS_S}, "round": {"timeout_s": TORCH_ENDS_S}}
    training = {"subset_size": 64, "lr": 0.02}
    with kept_endpoint() as endpoint, relay_at(endpoint):
        bus = {"job": "platform", "connect": [endpoint], "shared_memory": False}
        rules = {"rounds": 1, "training": training, **patient}
        sections = {"controller": {"federated": rules, "run_dir": str(run)}, "client": {}}
        for name, more in sections.items():
            (scene / f"{name}.json").write_text(json.dumps({"bus": bus, "task": tiny, **more}), encoding="utf-8")
        client = [*elsewhere, "-m", "gradbus", "client", "/scene/client.json", "--id", "0", "--log-style", "json"]
        run_together(
            [[*GRADBUS, "controller", str(scene / "controller.json"), "--no-live"], client],
            {"GRADBUS_KEY_FILE": str(key)},
            TORCH_ENDS_S,
        )
    (report,) = (json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines())
    assert (report["clients"], report["num_samples"]) == ([0], 64), report
    return f"1 round of a client elsewhere, which trained for {report['train_s']:.1f} s"


def main() -> None:
    """Run checks, or a process of one of them."""
    parser = argparse.ArgumentParser(prog="platform_checks", description=__doc__)
    parser.add_argument("checks", nargs="+", choices=CHECKS)
    parser.add_argument("--python", default="", help="Version of Python that must run this, such as 3.14.")
    parser.add_argument("--machine", default="", help="Processor that must run this, such as aarch64.")
    parser.add_argument("--endpoint", default="", help="Endpoint of the relay, for receive and send.")
    parser.add_argument("--scene", type=Path, help="Folder that both sides of flower and client share.")
    parser.add_argument("--elsewhere", type=shlex.split, help="Command that starts the interpreter of the other side.")
    options = parser.parse_args()
    here = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    assert platform.python_version().startswith(options.python), f"expected Python {options.python}, this is {here}"
    assert platform.machine() == (options.machine or platform.machine()), f"expected {options.machine}, this is {here}"
    checks: dict[str, Callable[[], str]] = {
        "imports": check_imports,
        "session": check_session,
        "round": check_round,
        "flower": lambda: check_flower(options.scene, options.elsewhere),
        "client": lambda: check_client(options.scene, options.elsewhere),
    }
    for name in options.checks:
        if name in ("receive", "send"):
            asyncio.run(exchange(options.endpoint, name))
            continue
        began_s = time.monotonic()
        said = checks[name]()
        print(f"{name}: {said} ({here}), {time.monotonic() - began_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
