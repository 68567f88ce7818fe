"""What deploy/helm/gradbus renders, run without a cluster.

Each process has the arguments, variables, configuration and secrets of a pod; only hosts, ports and folders are those
of this machine. Secrets lie as the kubelet lays them out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ports import kept_ports
from rendered import CHART, NAMESPACE, RELEASE, SECRETS, Object, configuration, container, named, objects, secret_files

BIN = Path(os.environ.get("BIN", ".venv/bin")).resolve()
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(400)


class Cluster:
    """Pods of one release as processes of this machine, with a folder for what a cluster keeps."""

    def __init__(self, folder: Path, found: list[Object], port: int, pages: Iterator[int]) -> None:
        self._folder = folder
        self._found = found
        self._port = port
        self._pages = pages
        self._source = folder / "source"
        self.pods: list[Pod] = []
        self._source.mkdir()
        for command in (["new", "job.key"], ["tls", "localhost"], ["tls", "--client", "member"]):
            subprocess.run([BIN / "gradbus", "keys", *command], cwd=self._source, check=True, capture_output=True)

    def start(self, kind: str, name: str, index: int | None = None) -> Pod:
        """Start a pod of a workload; again, where its former process has ended."""
        workload = named(self._found, kind, name)
        one = container(workload)
        place = self._folder / f"{name}-{len(self.pods)}"
        place.mkdir()
        self._mount_secrets(workload, place / "secrets")
        state = self._folder / (f"{RELEASE}-shared" if kind == "Job" else f"{name}-state")
        state.mkdir(exist_ok=True)
        file, text = configuration(self._found, workload)
        page = next(self._pages)
        places = [
            (SECRETS, str(place / "secrets")), ("/var/lib/gradbus", str(state)), ("0.0.0.0", "127.0.0.1"),
            (": 9100", f": {page}"), (":8443", f":{self._port}"), (".svc:443", f".svc:{self._port}"),
            (f"{RELEASE}-relay.{NAMESPACE}.svc", "localhost"), (f"{RELEASE}-controller.{NAMESPACE}.svc", "localhost"),
        ]  # fmt: skip
        for old, new in places:
            text = text.replace(old, new)
        assert ".svc" not in text
        (place / file).write_text(text)
        words = [
            word.replace("/etc/gradbus", str(place)).replace("/var/lib/gradbus", str(state)) for word in one["args"]
        ]
        environment = {"PATH": f"{BIN}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        for variable in one.get("env", []):
            value = variable.get("value")
            if value is None:
                assert "job-completion-index" in variable["valueFrom"]["fieldRef"]["fieldPath"]
                value = str(index)
            environment[variable["name"]] = value.replace(SECRETS, str(place / "secrets")).replace("/data", str(state))
        environment["HOME"] = str(state)
        pod = Pod(words, environment, place, page)
        self.pods.append(pod)
        return pod

    def _mount_secrets(self, workload: Object, folder: Path) -> None:
        """Lay the secrets out as the kubelet does: files of the group, mode 0440, behind two links."""
        data = folder / "..2026_01_01"
        data.mkdir(parents=True)
        folder.joinpath("..data").symlink_to(data.name)
        for path, (secret, key) in secret_files(workload).items():
            stem = {"gradbus-tls": "localhost", "gradbus-member": "client-member"}.get(secret)
            made = {
                "job.key": "job.key", "ca.crt": "tls/ca.pem",
                "tls.crt": f"tls/{stem}.pem", "tls.key": f"tls/{stem}.key",
            }  # fmt: skip
            (data / path).write_bytes((self._source / made[key]).read_bytes())
            (data / path).chmod(0o440)
            (folder / path).symlink_to(f"..data/{path}")


class Pod:
    """One process of a rendered pod, with what it has written."""

    def __init__(self, words: list[str], environment: dict[str, str], place: Path, page: int) -> None:
        self._place = place
        self._page = page
        self._command = words
        with open(place / "log", "wb") as log:
            self.process = subprocess.Popen(
                [BIN / "gradbus", *words], env=environment, cwd=place, stdout=log, stderr=subprocess.STDOUT
            )

    def events(self, name: str) -> list[Object]:
        """Return the events of its log that have this name."""
        lines = (self._place / "log").read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [one for one in found if one["event"] == name]

    def ended(self, signal_number: int | None = None) -> int:
        """Return its exit code, once it has ended by itself or after a signal."""
        if signal_number is not None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout=LIMIT_S)

    def answers(self, path: str) -> bool:
        """Whether a probe of this page succeeds."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._page}{path}", timeout=5) as answer:
                return bool(200 <= answer.status < 400)
        except OSError:
            return False

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until something is so, while this process runs."""
        end_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert self.process.poll() is None, f"it has ended before {what}: {self.text}"
            assert time.monotonic() < end_s, f"there was no {what}: {self.text}"
            time.sleep(0.1)

    @property
    def text(self) -> str:
        """Return the end of its log."""
        return f"{' '.join(map(str, self._command))}: " + (self._place / "log").read_text(errors="replace")[-3000:]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []
    with kept_ports(12) as (port, *pages):

        def make(values: str, *options: str) -> Cluster:
            made.append(Cluster(tmp_path, objects(CHART / "ci" / f"{values}.yaml", *options), port, iter(pages)))
            return made[-1]

        yield make
        for pod in (pod for one in made for pod in one.pods):
            pod.process.kill()
            pod.process.wait()


def test_a_controller_that_listens_trains_with_its_clients_and_answers_its_probes(
    cluster: Callable[..., Cluster],
) -> None:
    pods = cluster("federated")
    controller = pods.start("StatefulSet", f"{RELEASE}-controller")
    clients = [pods.start("Deployment", f"{RELEASE}-client-site-{number}") for number in (1, 2)]
    for pod in (controller, *clients):
        pod.until(lambda pod=pod: pod.answers("/metrics"), "page of metrics")
    for pod in (controller, *clients):
        assert pod.ended() == 0, pod.text
    assert len(controller.events("round done")) == 3


def test_members_with_certificates_train_over_the_relay_and_a_controller_that_is_killed_continues(
    cluster: Callable[..., Cluster],
) -> None:
    pods = cluster("relay", "--set", "controller.settings.federated.rounds=100000")
    relay = pods.start("Deployment", f"{RELEASE}-relay")
    relay.until(lambda: relay.answers("/ready") and relay.answers("/live"), "page that says it is ready")
    controller = pods.start("StatefulSet", f"{RELEASE}-controller")
    clients = [pods.start("Deployment", f"{RELEASE}-client-site-{number}") for number in (1, 2)]
    controller.until(lambda: len(controller.events("round done")) >= 2, "second round")
    assert {one["node"] for one in relay.events("session joined")} == {"member"}
    controller.ended(signal.SIGKILL)
    again = pods.start("StatefulSet", f"{RELEASE}-controller")
    again.until(lambda: bool(again.events("round done")), "round after the restart")
    assert again.events("round done")[0]["round"] >= 2
    assert [pod.process.poll() for pod in clients] == [None, None]
    assert [pod.ended(signal.SIGTERM) for pod in (again, *clients, relay)] == [143, 143, 143, 0]


def test_ranks_of_the_job_go_on_without_one_that_is_lost_and_take_it_back_also_rank_0(
    cluster: Callable[..., Cluster],
) -> None:
    pods = cluster("ranks", "--set", "ranks.settings.parallel.epochs=100000")
    relay = pods.start("Deployment", f"{RELEASE}-relay")
    relay.until(lambda: relay.answers("/ready"), "page that says it is ready")
    ranks = [pods.start("Job", f"{RELEASE}-ranks", index) for index in range(3)]
    watched = ranks[1]

    def await_world(expected: int) -> None:
        def world() -> int:
            return next((one["world"] for one in reversed(watched.events("generation begins"))), 0)

        watched.until(lambda: world() == expected, f"generation of {expected} ranks")

    await_world(3)
    watched.until(lambda: bool(watched.events("epoch done")), "epoch")
    assert ranks[0].ended(signal.SIGKILL) == -signal.SIGKILL
    await_world(2)
    ranks[0] = pods.start("Job", f"{RELEASE}-ranks", 0)
    await_world(3)
    assert ranks[2].ended(signal.SIGINT) == 130  # what the pod's preStop hook sends
    await_world(2)
    ranks[2] = pods.start("Job", f"{RELEASE}-ranks", 2)
    await_world(3)
