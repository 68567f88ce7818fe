"""The images without torch: size, user, contents, health check, and a relay that runs with no rights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from podman_commands import await_healthy, await_line, inspected, podman

LOCKED_DOWN = ("--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges")
IMAGES = {"relay": 400, "flower-node": 450}  # MB
RELAY = "test-relay"

pytestmark = pytest.mark.timeout(900)


def python(image: str, program: str) -> str:
    """Run a program in an image, with neither rights nor a network. Returns what it prints."""
    command = ("run", "--rm", "--network", "none", *LOCKED_DOWN, "--entrypoint", "/opt/gradbus/bin/python")
    return podman(*command, f"localhost/gradbus-{image}", "-c", program).stdout.strip()


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_keeps_to_its_size_and_its_user_has_a_health_check_and_labels(image: str) -> None:
    found = inspected(f"localhost/gradbus-{image}", "image")
    assert found["Size"] <= IMAGES[image] * 1e6, f"{found['Size'] / 1e6:.0f} MB"
    assert found["Config"]["User"] == "10001:10001"
    assert found["HealthCheck" if "HealthCheck" in found else "Healthcheck"]["Test"][0] == "CMD"
    assert found["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_bytecode_but_neither_torch_nor_an_installer(image: str) -> None:
    program = (
        "import gradbus, importlib.util, shutil; from pathlib import Path;"
        "absent = [n for n in ('torch', 'pip', 'setuptools') if importlib.util.find_spec(n)];"
        "print(absent, shutil.which('uv'), Path(gradbus.__cached__).is_file())"
    )
    assert python(image, program) == "[] None True"


@pytest.mark.parametrize("image", IMAGES)
def test_the_bill_of_materials_names_every_package_of_the_image(image: str) -> None:
    program = (
        "import importlib.metadata as m, subprocess; from pathlib import Path;"
        "q = subprocess.run(['dpkg-query', '-W', '-f', '${Package} ${Version}\\n'], capture_output=True, text=True);"
        "found = {f'{d.name.lower().replace(chr(95), chr(45))} {d.version}' for d in m.distributions(path=["
        "str(p) for p in Path('/opt/gradbus').glob('lib/python3*/site-packages')])};"
        "print(*sorted(found | set(q.stdout.splitlines())), sep='\\n')"
    )
    installed = python(image, program).splitlines()
    listed = json.loads(python(image, "print(open('/usr/share/gradbus-sbom.json').read())"))
    assert {f"{one['name']} {one['version']}" for one in listed["components"]} == set(installed)
    assert {"gradbus-core", "eclipse-zenoh", "libc6"} <= {one["name"] for one in listed["components"]}


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[str]:
    """A relay that runs read-only and without capabilities, with a certificate that its image has made."""
    os.chown(tmp_path, 10001, 10001)
    image, files = "localhost/gradbus-relay", f"{tmp_path}:/secrets"
    podman("run", "--rm", "--network", "none", *LOCKED_DOWN, "-v", files, "-w", "/secrets", image, "keys", "tls", RELAY)
    key = tmp_path / "tls" / f"{RELAY}.key"
    assert (key.stat().st_mode & 0o777, key.stat().st_uid) == (0o600, 10001)
    certificate = ("-e", f"GRADBUS_RELAY__TLS_CERTIFICATE=/secrets/tls/{RELAY}.pem")
    private = ("-e", f"GRADBUS_RELAY__TLS_KEY=/secrets/tls/{RELAY}.key")
    podman("run", "-d", "--name", RELAY, *LOCKED_DOWN, "-v", f"{files}:ro", *certificate, *private, image)
    yield RELAY
    podman("rm", "-f", RELAY, check=False)


def test_a_relay_runs_without_rights_reports_that_it_is_healthy_and_ends_with_0_after_term(relay: str) -> None:
    await_line(relay, "relay listens")
    await_healthy(relay)
    podman("stop", "--time", "30", relay)
    assert inspected(relay)["State"]["ExitCode"] == 0
