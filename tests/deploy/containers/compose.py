"""deploy/compose.yaml under podman: rounds between containers with networks of their own, and what ends some."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from podman_commands import await_line, healthy, inspected, podman

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
Compose = Callable[..., None]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """podman-compose on a copy of deploy/ whose secrets an image of it has made. Everything is removed at the end."""
    folder = tmp_path_factory.mktemp("deploy")
    shutil.copy(ROOT / "deploy" / "compose.yaml", folder)
    shutil.copytree(ROOT / "deploy" / "compose", folder / "compose")
    secrets = folder / "secrets"
    secrets.mkdir(mode=0o700)
    os.chown(secrets, 10001, 10001)
    for command in (("keys", "new", "job.key"), ("keys", "tls", "controller")):
        make = ("run", "--rm", "--network", "none", "-v", f"{secrets}:/secrets", "-w", "/secrets")
        podman(*make, "localhost/gradbus-relay", *command)
    packages = next((ROOT / ".venv" / "lib").glob("python3*")) / "site-packages"
    environment = {**os.environ, "CHECKOUT": str(ROOT), "PACKAGES": str(packages.resolve())}
    files = ("-f", str(folder / "compose.yaml"), "-f", str(HERE / "override.yaml"))

    def run(*arguments: str) -> None:
        done = subprocess.run(
            ["podman-compose", "-p", "gradbus", *files, *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"

    yield run
    run("down", "-v", "-t", "10")


def name(service: str) -> str:
    return f"gradbus_{service}_1"


def test_a_client_waits_for_its_controller_and_turns_from_failing_to_healthy_when_a_round_runs(
    compose: Compose,
) -> None:
    compose("up", "-d", "--no-deps", "client-1")
    assert not healthy(name("client-1"))
    compose("up", "-d", "--no-deps", "controller", "client-2")
    await_line(name("controller"), "round done")
    assert healthy(name("client-1"))
    assert healthy(name("controller"))


def test_members_have_a_read_only_root_no_capabilities_and_a_key_that_others_cannot_read(compose: Compose) -> None:
    program = (
        "import os; key = os.stat('/run/secrets/job.key');"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'));"
        "print(os.getuid(), oct(key.st_mode & 0o777), key.st_uid, int(status['CapEff'], 16), int(status['NoNewPrivs']),"
        " os.statvfs('/').f_flag & os.ST_RDONLY)"
    )
    for service in ("controller", "client-1", "client-2"):
        found = podman("exec", name(service), "python3", "-c", program).stdout
        assert found.split() == ["10001", "0o600", "10001", "0", "1", "1"], service


def test_clients_have_no_network_in_common_but_that_of_prometheus(compose: Compose) -> None:
    networks = [set(inspected(name(client))["NetworkSettings"]["Networks"]) for client in ("client-1", "client-2")]
    assert networks[0] & networks[1] == {"gradbus_monitoring"}
