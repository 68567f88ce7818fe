"""deploy/compose.yaml under podman: rounds between containers with networks of their own, and what ends some."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from podman_commands import DEADLINE_S, await_healthy, await_line, count_lines, healthy, inspected, podman

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
Compose = Callable[..., None]
MISSED = "client lost|client disconnected"  # whether the transport or the link of a client tells of its end first

pytestmark = pytest.mark.timeout(900)


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
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
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
    compose("up", "-d", "--no-deps", "controller")
    await_line(name("controller"), "client joined", "site-1")
    compose(
        "up", "-d", "--no-deps", "client-2"
    )  # which is not started again here: a busy machine may take longer than it waits
    await_line(name("controller"), "round done")
    await_healthy(name("client-1"))
    await_healthy(name("controller"))


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


@pytest.mark.skipif(not Path("/usr/bin/prometheus").exists(), reason="there is no prometheus (Debian: apt-get install)")
def test_prometheus_reads_the_numbers_of_the_controller_and_of_both_clients(compose: Compose) -> None:
    compose("up", "-d", "--no-deps", "prometheus")
    url = "http://127.0.0.1:9090/api/v1/query?query=sum(up)"
    ask = f"import urllib.request as u; print(u.urlopen('{url}').read().decode())"
    deadline_s, up = time.monotonic() + DEADLINE_S, "0"
    while up != "3" and time.monotonic() < deadline_s:
        time.sleep(1.0)  # it has no event that a scrape is over
        done = podman("exec", name("prometheus"), "python3", "-c", ask, check=False)
        found = json.loads(done.stdout)["data"]["result"] if done.returncode == 0 else []
        up = found[0]["value"][1] if found else "0"
    assert up == "3", podman("logs", "--tail", "20", name("prometheus")).stderr


def test_a_client_that_is_killed_is_missed_by_name_and_started_again_by_its_restart_policy(compose: Compose) -> None:
    before = inspected(name("client-1"))
    await_line(name("controller"), "final-ready=0/2", nth=1 + count_lines(name("controller"), "final-ready=0/2"))
    os.kill(before["State"]["Pid"], signal.SIGKILL)
    await_line(name("controller"), MISSED, "site-1")
    await_line(name("controller"), "client joined", "site-1", nth=2)
    assert inspected(name("client-1"))["RestartCount"] == before["RestartCount"] + 1


def test_a_client_that_needs_more_memory_than_its_limit_ends_with_137_and_the_controller_names_it(
    compose: Compose,
) -> None:
    """The kernel takes the client, not the program beside it in the container that asks for the memory."""
    pid = inspected(name("client-2"))["State"]["Pid"]
    await_line(name("controller"), "final-ready=0/2", nth=1 + count_lines(name("controller"), "final-ready=0/2"))
    Path("/proc", str(pid), "oom_score_adj").write_text("1000", encoding="ascii")
    podman("exec", name("client-2"), "python3", "-c", "b'x' * (3 << 30)", check=False)
    assert podman("wait", name("client-2")).stdout.strip() == "137"
    await_line(name("controller"), MISSED, "site-2")


def test_term_ends_clients_and_controller_with_the_code_of_a_clean_end(compose: Compose) -> None:
    compose("stop", "-t", "45", "client-1", "controller")
    for service in ("client-1", "controller"):
        assert inspected(name(service))["State"]["ExitCode"] == 143, podman("logs", "--tail", "5", name(service)).stderr
