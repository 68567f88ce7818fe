"""Robots at two sites learn the friction of their joints together: DDS inside each site, one TLS port outside.

    python -m gradbus.experiments.examples.robot_fleet --robots 2 --rounds 5

Each site has a DDS domain and a key of its own. Its robots find their site's controller by discovery, and have no route
to anything else. Only the site's controller leaves the site: it dials one TCP port of the central controller, over
TLS, or with ``--relay`` that of a relay, so that the centre opens no port, either. The folder ``fleet`` then has all
keys, configurations, logs and run directories. To go to real machines, copy each configuration to its machine, with
the keys that it names, and put in addresses: docs/trees.md#robots-at-two-sites.

With ``--prepare`` only the folder is made, and with ``--place`` only what belongs to one place is run from it: so each
place can be on a host of its own, as ``gradbus lab --nat`` makes them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gradbus.models import EvalResult, TrainResult, local_sgd, seeded_generator, seeded_global_generator

SITES = 2
_PLACES = ("centre", *(f"site-{site}" for site in range(SITES)))
_GRADBUS = (sys.executable, "-P", "-m", "gradbus")
_SET_UP_S = 60.0  # of a command that makes keys
_END_S = 10.0  # from the request to end to the kill
_OF_BUSES = ("GRADBUS_BUS__", "GRADBUS_RELAY__", "GRADBUS_KEY")
_TASK = {"task": "gradbus.experiments.examples.robot_fleet:JointFriction"}


class JointFriction:
    """The task: predict the torque that a joint needs from its velocity. Each robot has a joint of its own."""

    def __init__(self, samples: int = 256, seed: int = 0) -> None:
        """``samples``: of each robot."""
        self.samples, self.seed = samples, seed
        self._joints: dict[int | str, tuple[Tensor, Tensor]] = {}

    def build_model(self) -> nn.Module:
        """Make a perceptron with one hidden layer, with the same initial weights at every call."""
        with seeded_global_generator(self.seed):
            return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Measure the joint of this robot."""
        self._joint(client_id)

    def _joint(self, robot: int | str) -> tuple[Tensor, Tensor]:
        """Return velocities and torques, float32, shapes (samples, 1). Friction is viscous, and Coulomb's."""
        if robot not in self._joints:
            generator = seeded_generator("joint", self.seed, robot)
            velocity = 2 * torch.rand(self.samples, 1, generator=generator) - 1
            noise = 0.02 * torch.randn(self.samples, 1, generator=generator)
            self._joints[robot] = velocity, 0.5 * velocity + 0.3 * torch.tanh(20 * velocity) + noise
        return self._joints[robot]

    def train(self, model: nn.Module, *, client_id: int, **command: Any) -> TrainResult:
        """Train on what this robot has measured."""
        velocity, torque = self._joint(client_id)
        rows = torch.arange(self.samples)
        return local_sgd(
            model, rows, lambda rows: mse_loss(model(velocity[rows]), torque[rows]), client_id=client_id, **command
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> EvalResult:
        """Evaluate on a joint that no robot has."""
        velocity, torque = self._joint("test")
        loss = float(mse_loss(model(velocity), torque))
        return EvalResult(None, loss, self.samples, {"rmse": loss**0.5})


def write_configurations(
    folder: Path, *, robots: int, rounds: int, host: str, port: int, domains: Sequence[int], over_relay: bool
) -> None:
    """Write the files of all processes into a folder that has the keys.

    Args:
        robots: at each site. host, port: the only open port, and where it is. domains: the DDS domain of each site.
        over_relay: the centre dials the relay as its sites do; otherwise it listens itself.
    """
    tls = {"tls_certificate": str(folder / f"tls/{host}.pem"), "tls_key": str(folder / f"tls/{host}.key")}
    listens = {"listen": [f"tls/{'127.0.0.1' if host == 'localhost' else host}:{port}"], **tls}
    dials = {"connect": [f"tls/{host}:{port}"], "tls_ca": str(folder / "tls/ca.pem")}
    outside = {"job": "fleet", "key_file": str(folder / "fleet.key")}
    files: dict[str, Any] = {
        "centre": {
            "bus": {**outside, **(dials if over_relay else listens)},
            "task": _TASK,
            "federated": {
                "rounds": rounds,
                "clients": {"kind": "sites", "num": SITES, "min": SITES},
                "training": {"epochs": 5, "lr": 0.05},
            },
            "run_dir": str(folder / "centre"),
        }
    }
    if over_relay:
        files["relay"] = {"relay": listens}
    for site, domain in enumerate(domains):
        inside = {"job": f"site-{site}", "domain": domain, "key_file": str(folder / f"site-{site}.key")}
        files[f"site-{site}"] = {
            "bus": inside,
            "upstream": {"site": site, "bus": {**outside, **dials}},
            "task": _TASK,
            "federated": {"clients": {"num": robots, "min": robots}, "eval_every": 0},
            "run_dir": str(folder / f"site-{site}"),
        }
        files[f"robot-{site}"] = {"bus": inside, "task": _TASK}
    for name, sections in files.items():
        (folder / f"{name}.json").write_text(json.dumps(sections, indent=2) + "\n", encoding="utf-8")


def commands_of(folder: Path, robots: int, *, over_relay: bool) -> dict[str, dict[str, list[str]]]:
    """Return, for each place, the command line of each process by its name; the centre is the last place, and a site's
    controller the last of its site. Robots are numbered over all sites."""
    places: dict[str, dict[str, list[str]]] = {}
    if over_relay:
        places["relay"] = {"relay": ["relay", f"{folder}/relay.json"]}
    for site in range(SITES):
        name = f"site-{site}"
        places[name] = {
            f"robot-{robot}": ["client", f"{folder}/robot-{site}.json", "--id", str(robot)]
            for robot in range(site * robots, (site + 1) * robots)
        }
        places[name][name] = ["controller", f"{folder}/{name}.json", "--no-live"]
    return places | {"centre": {"centre": ["controller", f"{folder}/centre.json", "--no-live"]}}


@contextlib.contextmanager
def running(folder: Path, commands: dict[str, list[str]]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Run processes until the end of the block, with the log of each in the folder; the last one's goes to the screen.

    Each configuration names its buses, so what the environment says of buses is left out: ``gradbus lab`` sets it.
    """
    environment = {name: text for name, text in os.environ.items() if not name.startswith(_OF_BUSES)}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as stack:
        try:
            for number, (name, command) in enumerate(commands.items(), start=1):
                is_shown = number == len(commands)
                log = None if is_shown else stack.enter_context((folder / f"{name}.log").open("wb"))
                processes[name] = subprocess.Popen(
                    [*_GRADBUS, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
            yield processes
        finally:
            for process in processes.values():
                process.terminate()
            until_s = time.monotonic() + _END_S
            for process in processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until_s - time.monotonic()))
                process.kill()
                process.wait()


def failed_in(processes: dict[str, subprocess.Popen[bytes]], timeout_s: float) -> list[str]:
    """Wait for the last process, then for those that it ends. Return the names of those that failed, or did not end."""
    failed: list[str] = []
    names = [name for name in reversed(processes) if name != "relay"]
    for name in names:
        try:
            code: int | None = processes[name].wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            failed.append(name)
        timeout_s = 0.0 if names[0] in failed else _END_S
    return failed if names[0] not in failed else [names[0]]


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """Make the folder, with all keys and configurations. Raises FileExistsError: it is there already."""
    folder.mkdir(mode=0o700, parents=True)
    keys = [*_GRADBUS, "keys"]
    for name in ("fleet", *(f"site-{site}" for site in range(SITES))):
        subprocess.run([*keys, "new", f"{folder}/{name}.key"], check=True, timeout=_SET_UP_S, stdout=subprocess.DEVNULL)
    certificate = [*keys, "tls", options.host, "--out", f"{folder}/tls"]
    subprocess.run(certificate, check=True, timeout=_SET_UP_S, stdout=subprocess.DEVNULL)
    write_configurations(
        folder,
        robots=options.robots,
        rounds=options.rounds,
        host=options.host,
        port=options.port,
        domains=options.domains,
        over_relay=options.relay,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the centre, its sites and their robots on this machine, each a process of its own; or one place of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("fleet"), help="Made for the run; %(default)s.")
    parser.add_argument("--robots", type=int, default=2, help="Robots at each site (%(default)s).")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds of the centre (%(default)s).")
    parser.add_argument("--host", default="localhost", help="Name or address of the machine with the open port.")
    parser.add_argument("--port", type=int, default=8443, help="The only port that is open (%(default)s).")
    parser.add_argument("--domains", type=int, nargs=SITES, default=[20, 21], help="DDS domain of each site.")
    parser.add_argument("--relay", action="store_true", help="The centre dials out as well, to a relay.")
    parser.add_argument("--prepare", action="store_true", help="Make the folder, and run nothing.")
    parser.add_argument(
        "--place", choices=_PLACES, metavar="NAME", help=f"Run only this from the folder: {', '.join(_PLACES)}."
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="Most seconds it takes (%(default)s)."
    )
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    if options.place is None:
        try:
            prepare(folder, options)
        except FileExistsError:
            parser.error(f"{folder} is there already: name another with --folder, or remove it")
    if options.prepare:
        return
    places = commands_of(folder, options.robots, over_relay=options.relay)
    chosen = places if options.place is None else [options.place]
    commands = {name: command for place in chosen for name, command in places[place].items()}
    with running(folder, commands) as processes:
        failed = failed_in(processes, options.timeout)
    if failed:
        sys.exit(f"{', '.join(failed)} failed, or did not end in time: the logs are in {folder}")


if __name__ == "__main__":
    main()
