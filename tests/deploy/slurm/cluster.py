"""A cluster of Slurm on one machine: slurmctld, and three nodes with slurmd, which share the disk.

Each node has a network, a host name, processes and shared memory of its own, as namespaces of the kernel make them.
They lie in namespaces that the caller has made (slurm.sh): links, mounts and processes are gone when these end.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

SCRIPTS = Path(__file__).resolve().parents[3] / "deploy" / "slurm"
NODES = 3
DEADLINE_S = 300.0
_COMMAND_S = 300.0

_SETTINGS = """
ClusterName=test
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
ReturnToService=2
JobRequeue=1
KillWait=2
SlurmdTimeout=12
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MailProg=/bin/true
SchedulerParameters=bf_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n[0-{last}] CPUs=1 RealMemory=100 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
# cred_expire: a requeued job is held for so long. SlurmdTimeout: a node that is silent for so long is lost.

# The shell stays as the init of the node: it takes processes whose parents have ended.
_NODE = """
hostname "$1"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cat /proc/sys/kernel/random/uuid >"boot.$1"
mount --bind "boot.$1" /proc/sys/kernel/random/boot_id
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip addr add "$2/24" dev eth0
ip link set eth0 up
slurmd -D & wait $!
"""
_NAMESPACES = ("--mount", "--net", "--uts", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child")


def wait_until(what: str, holds: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Wait until it holds. Raises AssertionError: it does not within ``deadline_s``."""
    until_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until_s, f"waited in vain for {deadline_s:g} s until {what}"
        time.sleep(0.2)


def output_of(*command: str | Path, **variables: str) -> str:
    """Run a command to its end. Raises AssertionError: it failed."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


class Cluster:
    """A context manager: all nodes are idle at its begin, and all processes have ended at its end.

    Args:
        folder: is where jobs run and daemons write, on the disk that the nodes share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        folder = self.folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(_SETTINGS.format(folder=folder, last=NODES - 1))
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        with ExitStack() as stack:
            stack.callback(self._end)
            self._lay_network()
            files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
            self._daemon(stack, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
            wait_until("munged listens", (folder / "munge.socket").exists)
            self._daemon(stack, "slurmctld", "-D")
            for name in self.names:
                self.switch_on(name)
            wait_until("all nodes are idle", lambda: self.node_states() == {"idle"})
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """The nodes."""
        return [f"n{number}" for number in range(NODES)]

    def _lay_network(self) -> None:
        """Make the switch of all nodes, with an address for this process, and names for all."""
        addresses = {"127.0.0.1": "localhost", "10.77.0.254": "login"}
        addresses |= {self._address(name): name for name in self.names}
        hosts = self.folder / "hosts"
        hosts.write_text("".join(f"{address} {name}\n" for address, name in addresses.items()))
        output_of("mount", "--bind", hosts, "/etc/hosts")
        output_of("hostname", "login")
        output_of("ip", "link", "add", "switch", "type", "bridge")
        output_of("ip", "addr", "add", "10.77.0.254/24", "dev", "switch")
        output_of("ip", "link", "set", "switch", "up")

    def _address(self, name: str) -> str:
        return f"10.77.0.{int(name[1:]) + 1}"

    def _daemon(self, stack: ExitStack, *command: str) -> None:
        log = stack.enter_context((self.folder / f"{command[0]}.out").open("wb"))
        process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)

    def switch_on(self, name: str) -> None:
        """Start a node, which registers with slurmctld."""
        command = ("unshare", *_NAMESPACES, "bash", "-euc", _NODE, "node", name, self._address(name))
        with (self.folder / f"{name}.out").open("ab") as log:
            node = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        self._nodes[name] = node
        init: list[str] = []

        def has_init() -> bool:
            init[:] = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
            return bool(init)

        wait_until(f"{name} has a first process", has_init)
        output_of("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", init[0])
        output_of("ip", "link", "set", name, "master", "switch", "up")

    def switch_off(self, name: str) -> None:
        """End a node as a loss of power does: nothing that its processes would have said reaches the others."""
        output_of("ip", "link", "set", name, "down")
        node = self._nodes.pop(name)
        node.kill()  # takes its child, the init of the node, and that all others
        node.wait()
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)  # it goes with the node

    def _end(self) -> None:
        for name in list(self._nodes):
            self.switch_off(name)

    def node_states(self) -> set[str]:
        """Return the states of the nodes, such as ``idle``; none while slurmctld does not answer."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%t"], capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
        return set(done.stdout.split())

    def processes(self, node: str, text: str) -> list[int]:
        """Return the processes that are tasks of steps on a node, and have ``text`` in their command line."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                variables = (place / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended meanwhile
                continue
            is_task = f"SLURMD_NODENAME={node}".encode() in variables and b"SLURM_STEP_ID=0" in variables
            if is_task and text in words and "srun" not in words:
                found.append(int(place.name))
        return found

    def submit(self, script: str, *arguments: str, **variables: str) -> str:
        """Submit a batch script of deploy/slurm, with environment variables, and return the number of its job."""
        command = ["sbatch", "--parsable", f"--chdir={self.folder}", "--output=%x-%j.out"]
        return output_of(*command, SCRIPTS / script, *arguments, **variables)

    def cancel_all(self) -> None:
        """Cancel what a failed test has left, and wait until it is gone."""
        output_of("scancel", "--quiet", "--full", "--user=root")
        wait_until("no job is left", lambda: not output_of("squeue", "--noheader"))

    def preempt(self, *nodes: str) -> str:
        """Have a job of higher priority take these nodes; return its number."""
        options = ("--partition=urgent", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}")
        command = ["sbatch", "--parsable", f"--chdir={self.folder}", "--output=urgent-%j.out", *options]
        return output_of(*command, "--wrap", "true")


def job_field(job: str, field: str) -> str:
    """Return what Slurm knows of a job: JobState, Restarts, Requeue, NodeList ..."""
    found = re.search(rf"\b{field}=(\S*)", output_of("scontrol", "-o", "show", "job", job))
    assert found is not None, field
    return found[1]


def restarts(job: str) -> int:
    """Return how often a job has begun again."""
    return int(job_field(job, "Restarts"))


def wait_for_end(job: str) -> None:
    """Wait until a job is complete. Raises AssertionError: it ends otherwise, or not in time."""
    ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
    wait_until(f"job {job} has ended", lambda: job_field(job, "JobState") in ends)
    assert job_field(job, "JobState") == "COMPLETED", output_of("scontrol", "show", "job", job)


def events(run: Path, journal: str, name: str) -> list[dict[str, Any]]:
    """Return the events of a name in a journal of a run directory."""
    path = run / "history" / f"{journal}.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line.get("event") == name]
