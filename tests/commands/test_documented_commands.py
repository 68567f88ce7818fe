"""The commands of README and docs, each in the folder of a clone and with no variable but those of a fresh shell.

What ``make`` would run is asked of it, and run by a process that has torch loaded; only runs are shorter, and their
data a few images. A table says of every other command which test runs it, or why none does.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from dds_domains import new_domain
from forked_commands import Forked
from fresh_shells import Clone, command_lines, write_mnist

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
_PATH = "/usr/local/bin:/usr/bin:/bin"
SHORT = {
    "controller": ["--no-live", "--set", "federated.rounds=1", "--set", "federated.training.subset_size=32"],
    "worker": ["--no-live", "--set", "parallel.epochs=1"],
}

HERE = (
    "make run-controller", "make run-client ID=?", "make run-ddp WORLD=2 RANK=0", "* export *", "gradbus report *",
    "gradbus keys *", "*gradbus keys new job.key", "gradbus doctor --key-file job.key", "gradbus doctor",
    "* -m gradbus.commands.report.profile_table *",
)  # fmt: skip
ELSEWHERE = {
    "tests/deploy/containers/compose.py": (
        "mkdir -m 700 deploy/secrets", "sudo chown *", "sudo podman run *", "sudo podman-compose *",
    ),
    "tests/deploy/containers.sh": ("podman build * --target relay *",),
    "tests/deploy/slurm/batch_jobs.py": ("sbatch *", "export GRADBUS_BUS__CONNECT=*"),
    "tests/deploy/mpi.sh": ("mpirun *",),
    "tests/commands/test_several_machines.py": (
        "cp *", "scp *", "*gradbus doctor --network network *", ".venv/bin/gradbus controller *",
        ".venv/bin/gradbus client *", ".venv/bin/gradbus worker ddp.json *", "export GRADBUS_BUS__SECURITY=psk *",
        "export GRADBUS_BUS__NETWORK=network *", "torchrun --nnodes 2 *",
    ),
    "tests/commands/test_tutorials.py": (
        "gradbus controller controller.json", "gradbus controller controller.json --run-dir *",
        "gradbus client client.json*", "gradbus run -n 2 *",
    ),
    "tests/commands/test_over_links.py": ("gradbus doctor --config *",),
    "tests/commands/run/test_worker_command.py": (
        "make run-ddp", ".venv/bin/torchrun --standalone *", "torchrun --standalone *", "gradbus worker my.json *",
    ),
    "tests/commands/run/test_parameter_server.py": (
        "gradbus run experiments/configs/parameter-server.conf.json", "gradbus parameter-server *",
        "gradbus worker experiments/configs/parameter-server.conf.json *", "export TF_CONFIG=*",
        "gradbus worker my.json",
    ),
    "tests/commands/run/test_flower.py": (".venv-flower/bin/gradbus flower *",),
    "tests/commands/run/test_tree_commands.py": (
        "gradbus controller experiments/configs/tree-*", "gradbus client experiments/configs/tree-client.conf.json *",
    ),
    "tests/commands/run/test_secure_commands.py": (
        "gradbus controller experiments/configs/controller.secure.conf.json",
        "gradbus client experiments/configs/client.secure.conf.json *",
    ),
    "tests/commands/run/test_virtual_commands.py": (
        "gradbus virtual *", "gradbus host *", "gradbus controller experiments/configs/controller.conf.json --set *",
    ),
    "tests/commands/run/test_personal_commands.py": (
        "gradbus controller experiments/configs/controller.lora.conf.json",
        "gradbus client experiments/configs/client.lora.conf.json *",
    ),
    "tests/commands/run/test_private_commands.py": (
        "make run-controller CONFIG=experiments/configs/controller.private.conf.json",
    ),
    "tests/commands/run/test_data_inspect.py": ("gradbus data inspect *",),
    "tests/commands/report/test_metrics_server.py": ("gradbus * --metrics-port *",),
    "tests/commands/report/test_trackers.py": ("gradbus * --mlflow *", "gradbus * --wandb *"),
    "tests/commands/report/test_scalars.py": ("gradbus controller controller.conf.json --tensorboard *",),
    "tests/commands/run/test_status.py": ("gradbus status *",),
    "tests/commands/dashboard/test_dashboard.py": ("gradbus dashboard*",),
    "tests/commands/simulate/test_steps.py": ("gradbus simulate *", "make simulate *"),
    "tests/experiments/test_communication_table.py": ("python -m gradbus.experiments.studies.communication_table *",),
    "tests/commands/test_matrix.py": ("gradbus matrix *",),
    "tests/commands/test_lab.py": ("gradbus lab *",),
    "tests/commands/service/test_units.py": ("gradbus service install *",),
    "tests/commands/relay/test_relay.py": ("gradbus relay *",),
    "tests/commands/test_history.py": ("gradbus check *",),
    "tests/commands/test_settings_reference.py": ("gradbus config *",),
    "tests/experiments/examples/test_embedding_program.py": ("python -m gradbus.experiments.examples.embed_aiohttp *",),
    "tests/experiments/examples/test_robot_fleet.py": ("python -m gradbus.experiments.examples.robot_fleet*",),
    "tests/experiments/examples/test_ray_clients.py": ("python -m gradbus.experiments.examples.ray_clients *",),
    "tests/experiments/examples/test_control_loop.py": ("python -m gradbus.experiments.examples.control_loop *",),
    "tests/torch_backend/test_elastic_script.py": (
        ". .venv/bin/activate", "gradbus run --elastic 2:4 -- train.py", "torchrun --nnodes=2:4 *", "python train.py",
    ),
    "tests/simulation/test_program.py": ("make simulate-faults *",),
    "tests/experiments/examples/test_integrations.py": (".venv-integrations/bin/torchrun *",),
    "tests/actors/trainers/test_lightning_callback.py": (
        "PYTHONPATH=. gradbus controller controller.json", "python cells.py *",
    ),
    "tests/commands/test_flows.py": ("make demo", "GRADBUS_FAIL_AT=*"),
    "tests/runtime/testing/test_faults.py": ("GRADBUS_BUS__FAULTS=*",),
    "tests/torch_backend/test_identity.py": ("export GRADBUS_BUS__SECURITY=identity *", "export GRADBUS_KEY_FILE=*"),
    "tests/runtime/security/test_joining_model.py": ("proverif *",),
}  # fmt: skip
NOT_RUN = {
    "minutes, or what it writes is a part of the repository": (
        "make bench*", "make figures*", "make fuzz*", "make nightly*", "make soak *", "make check", "make test",
        "python -m timeit *", "python -m gradbus.commands.simulate.trace *",
    ),
    "the same with a setting more, which is parsed": (
        "gradbus controller my.json --set *", "gradbus controller controller.json --set *",
    ),
    "it installs, as .ci/run does": (
        "make setup*", "make wheel", "pip install *dist/*", ".venv/bin/pip install *dist/*", "python3 -m venv .venv",
    ),
    "it fetches torch for minutes": ("podman build * --target full *",),
    "it needs another machine": ("ssh -L *", ".venv/bin/gradbus flower node *", "--set bus.job=boards *"),
    "it changes the machine, or shows what DDS does": (
        "systemctl daemon-reload *", "printf 'net.core.*", "export CYCLONEDDS_URI=*"),
}  # fmt: skip


def documented(root: Path, *pages: str) -> dict[str, str]:
    """Every command of README and docs, without its comment, and its page. ``pages``: of these alone."""
    found = {}
    for page in (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))):
        begun = ""
        for line in command_lines(page.read_text(encoding="utf-8")) if not pages or page.name in pages else ():
            begun += line.partition("  #")[0].strip()
            if begun.count('"') % 2 == 0:  # else what it is given goes on in the next line
                found[begun] = page.name
                begun = ""
    return found


def test_of_every_documented_command_it_is_known_which_test_runs_it(root: Path) -> None:
    patterns = [*HERE, *(one for table in (ELSEWHERE, NOT_RUN) for known in table.values() for one in known)]
    commands = documented(root)
    assert len(commands) > 50
    assert [line for line in commands if not any(fnmatch.fnmatch(line, one) for one in patterns)] == []
    assert [one for one in patterns if not any(fnmatch.fnmatch(line, one) for line in commands)] == []
    for name in ELSEWHERE:
        assert (root / name).is_file(), name


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    write_mnist(tmp_path / "data")
    with Clone(tmp_path / "gradbus") as made:
        yield made


class Shell:
    """Runs documented commands at the root of a clone."""

    def __init__(self, clone: Clone) -> None:
        self._folder = clone.folder
        self._variables = {
            "PATH": _PATH, "HOME": os.environ["HOME"], "GRADBUS_DATA": str(clone.folder.parent / "data"),
            "GRADBUS_BUS__DOMAIN": str(new_domain()), "COLUMNS": "120",
        }  # fmt: skip

    def start(self, line: str) -> Forked:
        """A command that is one of gradbus, or becomes one by ``make``."""
        if line.startswith("make "):
            line = self._said_by(["make", "-n", *shlex.split(line)[1:]]).splitlines()[-1]
        words = shlex.split(self._said_by(["bash", "-c", f"printf '%s ' {line}"]))
        assert words.pop(0) in (".venv/bin/gradbus", "gradbus"), line
        return Forked([*words, *SHORT.get(words[0], [])], self._folder, self._variables)

    def run(self, *lines: str) -> list[str]:
        """Commands that run at a time. Returns what each wrote, when all have ended well."""
        texts = []
        for line, process in [(line, self.start(line)) for line in lines]:
            out, errors = process.communicate(timeout=120.0)
            assert process.returncode == 0, f"$ {line}\nexit code {process.returncode}\n{out}{errors}"
            texts.append(out)
        return texts

    def _said_by(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self._folder, env=self._variables, capture_output=True, text=True, timeout=30, check=True
        )
        return done.stdout.strip()


def test_the_commands_of_the_readme_for_one_machine(root: Path, clone: Clone) -> None:
    shell = Shell(clone)
    lines = list(documented(root, "README.md"))
    told, *_ = shell.run(*[line for line in lines if line.startswith(("make run-controller", "make run-client"))])
    assert "done: 1 rounds" in told
    (export,) = [line for line in lines if " export " in line]
    (folder,) = (clone.folder / "runs").iterdir()
    assert "model.load_state_dict" in shell.run(export)[0]
    assert (folder / "model.safetensors").is_file()
    page = (root / "docs" / "report.md").read_text(encoding="utf-8")
    report, compare = command_lines(page)
    shell.run(
        f"make report RUN={folder}",
        *[re.sub(r"runs/<[\w>-]+<?\w*>?", str(folder), line.partition("  #")[0]) for line in (report, compare)],
    )

    (rank_0,) = [line for line in lines if line.endswith("RANK=0")]
    told, _ = shell.run(rank_0, rank_0.replace("RANK=0", "RANK=1"))
    assert "done: 1 epochs" in told
    (table,) = command_lines((root / "docs" / "profile.md").read_text(encoding="utf-8"))
    (folder,) = (path for path in (clone.folder / "runs").iterdir() if path != folder)
    assert "step" in clone.run(re.sub(r"runs/\S+", str(folder), table))


def test_the_commands_for_keys_and_the_doctor(root: Path, clone: Clone) -> None:
    shell = Shell(clone)
    keys: dict[str, str] = {}
    lines = list(documented(root, "security.md"))
    for line in [line for line in lines if line.startswith("gradbus keys ")]:
        name = line.split()[3]
        if " allow " in line:
            line = re.sub(r"ed25519:\S+", keys[name], line)
        (told,) = shell.run(line)
        if " --identity " in line:
            keys[line.split()[4]] = re.findall(r"ed25519:\w+", told)[0]
    assert (clone.folder / "job.key").stat().st_mode & 0o777 == 0o600
    doctors = [shell.start(line) for line in ("gradbus doctor --key-file job.key", "gradbus doctor")]
    told, _ = (doctor.communicate(timeout=120.0)[0] for doctor in doctors)
    assert {doctor.returncode for doctor in doctors} <= {0, 8}  # 8: it finds that a busy machine is not well
    assert re.search(r"security +psk, key \w+: works", told), told
