"""The command ``lab``: which command runs on which host, in which environment, and what the network has carried."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gradbus.commands.amounts import duration, percent, size
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import (
    LinkTraffic,
    Network,
    NoNamespaces,
    hosts_on_a_switch,
    let_dial_only,
    traffic,
)
from gradbus.commands.launch.launcher import Launch, Launcher
from gradbus.commands.rundir.reading import read_run
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.security.job_key import new_job_key

_INSIDE = "GRADBUS_LAB_INSIDE"  # set in a user namespace of ours, so that none is made in it again
_MASTER_PORT = 29500
DEFAULT_PORT = 443  # of a relay
_KEYS = ("GRADBUS_KEY", "GRADBUS_KEY_FILE")
# `ip netns` keeps names below /run, which is root's; here we are root of a namespace, and /run is ours alone.
_OWN_RUN = 'mount -t tmpfs tmpfs /run && exec "$@"'
_NO_RIGHTS = (
    "a lab needs the right to make network namespaces, which this user has neither as root nor in a user namespace. "
    "Start it with sudo; or let users make namespaces (sysctl kernel.unprivileged_userns_clone=1, or "
    "kernel.apparmor_restrict_unprivileged_userns=0); in a container: --cap-add SYS_ADMIN --cap-add NET_ADMIN --device "
    "/dev/net/tun"
)


def split(arguments: Sequence[str], hosts: int | None) -> list[list[str]]:
    """The command of each host: that between two ``+``, or the only one on all hosts, by default 2.

    Raises ConfigError.
    """
    commands: list[list[str]] = [[]]
    for word in arguments:
        if word == "+":
            commands.append([])
        else:
            commands[-1].append(word)
    if not all(commands):
        raise ConfigError("a command is missing: gradbus lab --rate 50mbit -- FIRST COMMAND + SECOND COMMAND")
    for command in commands:
        if os.path.basename(command[0]) == "gradbus" and command[1:2] == ["run"]:
            raise ConfigError(
                "'gradbus run' starts all ranks on one machine. Name the command of a rank, which every host runs: "
                "gradbus lab -- gradbus worker CONFIG, or gradbus lab -- make run-ddp"
            )
    if len(commands) == 1:
        return commands * (2 if hosts is None else hosts)
    if hosts not in (None, len(commands)):
        raise ConfigError(f"--hosts is {hosts}, but there are {len(commands)} commands, each for a host of its own")
    return commands


def run_lab(
    arguments: Sequence[str], hosts: int | None, conditions: LinkConditions, nat_port: int | None = None
) -> int:
    """Run ``gradbus lab``. Returns the exit code of the first command that has failed, else 0.

    Args:
        nat_port: the only port, of the first host, that the others reach; None: all reach all.

    Raises:
        ConfigError: the commands are wrong, or this machine cannot make such a network; the text says what to do.
        LaunchFailed: a command could not be started.
    """
    commands = split(arguments, hosts)
    need_rights()
    try:
        with hosts_on_a_switch(len(commands), conditions) as network:
            if nat_port is not None:
                for host in network.hosts[1:]:
                    let_dial_only(host, network.hosts[0], nat_port)
            return _run(network, commands, nat_port)
    except NoNamespaces as error:
        raise ConfigError(f"{error}. {_NO_RIGHTS}" if "not permitted" in str(error) else str(error)) from None


def need_rights() -> None:
    """Go on in a user namespace where this user is not root; this process then becomes the one in it."""
    if not sys.platform.startswith("linux"):
        raise ConfigError("a lab needs network namespaces, which Linux alone has")
    # Of users these are not on the path everywhere, and the tools lie there.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [name for name in ("ip", "tc", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"a lab needs {', '.join(missing)} (packages iproute2, util-linux and hostname), which are not installed"
        )
    if os.geteuid() == 0 or _INSIDE in os.environ:
        return
    enter = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _OWN_RUN, "sh"]
    try:
        subprocess.run([*enter, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        raise ConfigError(_NO_RIGHTS) from None
    os.environ[_INSIDE] = "1"
    os.execvp(enter[0], [*enter, sys.executable, "-P", "-m", "gradbus", *sys.argv[1:]])


def environment_of(
    network: Network, number: int, key: str, *, nat_port: int | None = None, is_relay: bool = False
) -> dict[str, str | None]:
    """Return what a command on a host finds in its environment: its place among the hosts, and their addresses.

    The hosts share the processors of this machine, so LOCAL_RANK and LOCAL_WORLD_SIZE, by which ranks divide these, are
    those of ranks on one machine.

    Args:
        key: of the job, unless the user has one. nat_port: the only port that is reached; then the bus is on links to
            it. is_relay: the command is that of a relay, which has no bus and no key.
    """
    host, world = network.hosts[number], len(network.hosts)
    found: dict[str, str | None] = {
        "RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": network.hosts[0].address, "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": host.interface, "PYTHONUNBUFFERED": "1", _INSIDE: None,
    }  # fmt: skip
    if is_relay:
        return {**found, **_listening("RELAY", nat_port or DEFAULT_PORT), **dict.fromkeys(_KEYS)}
    if not os.environ.keys() & {*_KEYS, "GRADBUS_BUS__KEY_FILE"}:
        found["GRADBUS_KEY"] = key
    if nat_port is None:
        addresses = json.dumps([one.address for one in network.hosts])
        bus = {"NETWORK": "network", "INTERFACE": host.interface, "PEERS": addresses}
        return {**found, **{f"GRADBUS_BUS__{name}": value for name, value in bus.items()}}
    if number == 0:
        return {**found, **_listening("BUS", nat_port)}
    endpoint = f"tcp/{network.hosts[0].address}:{nat_port}"
    return {**found, "GRADBUS_BUS__CONNECT": json.dumps([endpoint]), "GRADBUS_BUS__TLS": "false"}


def _listening(section: str, port: int) -> dict[str, str]:
    """Return settings of a section that listens there, without TLS: all is on this machine, and sealed anyway."""
    return {f"GRADBUS_{section}__LISTEN": json.dumps([f"tcp/0.0.0.0:{port}"]), f"GRADBUS_{section}__TLS": "false"}


def is_relay(command: Sequence[str]) -> bool:
    """Return whether a command is ``gradbus relay``, or ``python -m gradbus relay``: it never ends by itself."""
    return any(
        os.path.basename(program) == "gradbus" and word == "relay" and before in ("", "-m")
        for before, program, word in zip(["", *command], command, command[1:], strict=False)
    )


def _run(network: Network, commands: Sequence[Sequence[str]], nat_port: int | None) -> int:
    key = new_job_key().text
    runs_before, began_s = _run_directories(), time.monotonic()
    before = [traffic(host) for host in network.hosts]
    launcher = Launcher(
        Launch(
            world=len(commands),
            program="lab",
            name=lambda number: f"host {number}",
            command=lambda number, again: [*network.hosts[number].machine_prefix, *commands[number]],
            environment=lambda number: environment_of(
                network, number, key, nat_port=nat_port, is_relay=is_relay(commands[number])
            ),
            serves=lambda number: is_relay(commands[number]),
        )
    )
    code = asyncio.run(launcher.run())
    taken_s = [launcher.ended_s.get(number, time.monotonic()) - began_s for number in range(len(commands))]
    used = [_between(one, traffic(host)) for one, host in zip(before, network.hosts, strict=True)]
    for line in report(network, taken_s, used, _computing(made) if (made := _run_directories() - runs_before) else []):
        print(line, file=sys.stderr)
    return code


def _between(before: LinkTraffic, after: LinkTraffic) -> LinkTraffic:
    return LinkTraffic(
        after.sent_bytes - before.sent_bytes,
        after.received_bytes - before.received_bytes,
        after.dropped - before.dropped,
    )


def report(
    network: Network, taken_s: Sequence[float], used: Sequence[LinkTraffic], computing: Sequence[str]
) -> list[str]:
    """Return what is printed at the end: conditions, a line for each host, and what the figures are to be read with."""
    conditions, switch = network.conditions, network.switch
    by = "the kernel" if switch is None else "a switch in this process"
    lines = [f"{len(network.hosts)} hosts, {conditions}; carried by {by}"]
    lines.append(f"{'host':<6}{'time':>10}{'sent':>12}{'received':>12}{'link out':>10}{'link in':>10}")
    for number, (seconds, one) in enumerate(zip(taken_s, used, strict=True)):
        shares = ["-", "-"]
        if conditions.rate_bit_s is not None:
            shares = [
                f"{800 * amount / conditions.rate_bit_s / seconds:.1f} %"
                for amount in (one.sent_bytes, one.received_bytes)
            ]
        amounts = f"{size(one.sent_bytes):>12}{size(one.received_bytes):>12}"
        lines.append(f"{number:<6}{duration(seconds):>10}{amounts}{shares[0]:>10}{shares[1]:>10}")
    lines += computing
    dropped = sum(one.dropped for one in used)
    if dropped:
        lines.append(f"{dropped:,} packets found the queue of their host full")
    if switch is not None:
        counts = switch.counts
        lines.append(
            f"packets: {counts['carried']:,} carried, {counts['lost']:,} lost, {counts['full']:,} found a queue full, "
            f"{counts['overtaken']:,} overtaken"
        )
        if switch.was_the_limit:
            late = percent(counts["late"] / max(1, counts["carried"]))
            lines.append(
                f"The switch was the limit, not the network: {late} of all packets left more than 5 ms late. Take a "
                "lower --rate, a larger --mtu, or a machine with more free processors"
            )
    return lines


def _run_directories() -> set[Path]:
    runs = Path("runs")
    return {path for path in runs.iterdir() if path.is_dir()} if runs.is_dir() else set()


def _computing(made: set[Path]) -> list[str]:
    """Return how much of the time of the runs in these directories was computing; for those that say so."""
    found = []
    for path in sorted(made):
        try:
            run = read_run(path)
        except ConfigError:
            continue
        if run.epochs:
            steps = [epoch for epoch in run.epochs if epoch.step_s_mean > 0]
            whole, waited = sum(one.step_s_mean for one in steps), sum(one.wait_s_mean for one in steps)
            what = "of a step of rank 0"
        else:
            whole = sum(one.seconds for one in run.rounds)
            waited = whole - sum(one.train_s + one.encode_s for one in run.rounds)
            what = "of a round, the slowest client's"
        if whole > 0:
            found.append(f"computing: {percent(1 - waited / whole)} {what}, in {path}")
    return found
