"""``gradbus flower run`` and ``gradbus flower node``: Flower apps as they are, in the environment that has Flower."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gradbus.commands.cli.main import app as command_line

pytestmark = pytest.mark.slow

ENDS_S = 100.0
APPS = Path(__file__).parents[2] / "flower_apps"


FLOWERS = {"1.42": ".venv-flower", "1.41": ".venv-flower-1.41"}


@pytest.fixture(params=FLOWERS)
def flower(root: Path, request: pytest.FixtureRequest) -> Path:
    """The folder of programs of each environment with Flower."""
    folder = root / FLOWERS[request.param]
    if not list(folder.glob(".set-up*")):
        pytest.skip(f"Flower {request.param} is not set up: make setup-flower FLOWER={request.param}")
    return folder / "bin"


@pytest.fixture
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A copy of an app, of which no run changes a byte."""
    copy = shutil.copytree(APPS / request.param, tmp_path / request.param, ignore=shutil.ignore_patterns("__pycache__"))
    before = _contents(copy)
    yield copy
    assert _contents(copy) == before != {}


def _contents(app: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in app.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.fixture
def without_torch(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with which no program can load torch."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('a program without a need for torch loads it')")
    return folder


def run_app(flower: Path, app: Path, domain: int, *options: str, path: str = "", forked: Path | None = None) -> str:
    """Run an app with two nodes. What its ServerApp printed. ``path``: the PYTHONPATH; ``forked``: flower_commands.py,
    to fork all processes from one that has loaded torch."""
    environment = {
        **os.environ,
        "GRADBUS_BUS__DOMAIN": str(domain),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    arguments = [
        ["flower", "run", str(app), *options],
        *(["flower", "node", str(app), "--partition", str(one), "--of", "2"] for one in range(2)),
    ]
    if forked:
        commands = [[str(flower / "python"), str(forked), json.dumps(arguments)]]
    else:
        commands = [[str(flower / "gradbus"), *some] for some in arguments]
    running = [
        subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in commands
    ]
    try:
        ended = [process.communicate(timeout=ENDS_S) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), ended
    return ended[0][0]


def accuracies(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^accuracy ([\d.]+)$", output, re.MULTILINE)]


def test_the_environment_has_the_version_that_it_is_for(flower: Path) -> None:
    asked = [str(flower / "python"), "-c", "import importlib.metadata; print(importlib.metadata.version('flwr'))"]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=ENDS_S).stdout
    assert FLOWERS[printed.rpartition(".")[0]] == flower.parent.name


def expected_accuracies(app: Path) -> list[float]:
    """Accuracies of the app of ``client_fn`` and NumPy: what federated averaging is."""
    spec = importlib.util.spec_from_file_location("numpyapp_task", app / "numpyapp" / "task.py")
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    data = [task.load_data(partition, 2) for partition in range(2)]
    weights, expected = np.zeros(task.DIM + 1), []
    for _ in range(2):
        weights = np.mean([task.train(weights, *one, 0.25) for one in data], axis=0)
        expected.append(np.mean([task.test(weights, *one)[1] for one in data]))
    return expected


# Each version has the app of client_fn and one of messages: these differ in their content, not in what Flower does.
@pytest.mark.parametrize(
    ("flower", "app"),
    [("1.42", "numpy-app"), ("1.42", "torch-app"), ("1.41", "numpy-app"), ("1.41", "sklearn-app")],
    indirect=True,
)
def test_an_app_trains_with_no_byte_of_it_changed_and_torch_is_loaded_for_its_own_sake_alone(
    flower: Path, app: Path, domain: int, without_torch: Path, root: Path
) -> None:
    is_numpy = app.name == "numpy-app"
    needs_torch = app.name == "torch-app"
    config = "num-server-rounds=2" + " learning-rate=0.25" * is_numpy
    path = "" if needs_torch else str(without_torch)
    forked = root / "tests" / "support" / "flower_commands.py" if needs_torch else None
    printed = run_app(flower, app, domain, "--run-config", config, path=path, forked=forked)
    assert "done: messages down" in printed
    found = accuracies(printed)
    assert len(found) == 2
    assert min(found) > 0.8
    if is_numpy:
        assert found == pytest.approx(expected_accuracies(app), abs=1e-6)


def start(flower: Path, domain: int, *commands: list[str]) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [str(flower / "gradbus"), "flower", *one],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for one in commands
    ]


def ends(running: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each process."""
    try:
        texts = [process.communicate(timeout=ENDS_S) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(running, texts, strict=True)]


@pytest.mark.parametrize(("flower", "app"), [("1.42", "path-app"), ("1.41", "path-app")], indirect=True)
def test_apps_read_the_node_config_and_their_nodes_need_no_partition(
    flower: Path, app: Path, domain: int, tmp_path: Path
) -> None:
    """And each line of the log is JSON, those of Flower's own logger too."""
    files = [tmp_path / "three lines", tmp_path / "two"]
    for file, lines in zip(files, ("1\n2\n3\n", "1\n2\n"), strict=True):
        file.write_text(lines)
    node = ["node", str(app)]
    setting = f"flower.node_config={json.dumps({'dataset-path': str(files[1]), 'unused': 1})}"
    server, first, second = ends(
        start(
            flower,
            domain,
            ["run", str(app)],
            [*node, "--node-config", f"dataset-path='{files[0]}' unused=true"],
            [*node, "--set", setting, "--name", "robot-1"],
        )
    )
    assert (server[0], first[0], second[0]) == (0, 0, 0), (server, first, second)
    assert "lines 5 of 2 nodes" in server[1]
    assert re.search(r"^done: messages down .* up .*; 2 replies$", server[1], re.MULTILINE)
    events = [json.loads(line) for line in server[2].splitlines()]
    assert "2 replies" in [event["event"] for event in events if event["source"] == "flwr"]
    named = [json.loads(line) for line in second[2].splitlines()]
    assert "robot-1" in [event.get("name") for event in named]


@pytest.mark.parametrize(("flower", "app"), [("1.42", "path-app")], indirect=True)
def test_a_run_in_which_no_reply_was_good_has_failed_everywhere(flower: Path, app: Path, domain: int) -> None:
    ended = ends(start(flower, domain, ["run", str(app)], *(["node", str(app)] for _ in range(2))))
    assert [one[0] for one in ended] == [13, 13, 13], ended
    assert "done" not in ended[0][1]
    last = ended[0][2].splitlines()[-1]
    assert "in 1 of 1 rounds of messages no reply was good" in last
    assert "the node config has no 'dataset-path': start this node with --node-config dataset-path=..." in last
    assert "2 replies, 2 of them errors (2 CLIENT_APP_RAISED_EXCEPTION)" in last


@pytest.mark.parametrize(("flower", "app"), [("1.42", "path-app")], indirect=True)
def test_a_call_that_outlives_the_run_is_named_and_left(flower: Path, app: Path, domain: int, tmp_path: Path) -> None:
    """The ServerApp ends while its nodes are inside calls of five minutes."""
    (tmp_path / "file").write_text("1\n")
    options = ["--run-config", "num-nodes=1 push-at-the-end=true"]
    node = ["node", str(app), "--node-config", f"dataset-path='{tmp_path / 'file'}'"]
    server, first = ends(start(flower, domain, ["run", str(app), *options], node))
    assert (server[0], first[0]) == (0, 0), (server, first)
    events = [json.loads(line) for line in server[2].splitlines()]
    assert "no reply" not in [event["event"] for event in events]
    assert [e["messages"] for e in events if e["event"] == "messages without a reply at the end of the run"] == [1]
    assert "the run has ended while a message is answered" in first[2]
    assert "1 messages answered" in first[1]


def test_payloads_grid_and_refusals_with_flower(flower: Path, root: Path, domain: int) -> None:
    script = root / "tests" / "support" / "flower_checks.py"
    command = [str(flower / "python"), str(script), str(domain)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert ended.stdout.strip().endswith("ok"), ended.stderr[-4000:]


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="flwr is installed here")
def test_without_flower_the_error_names_the_extra() -> None:
    ended = CliRunner().invoke(command_line, ["flower", "run", str(APPS / "numpy-app")])
    assert ended.exit_code == 2
    extras = "with the extra gradbus[flower], or gradbus-core[flower] for an app without torch"
    assert f"{extras}: in a checkout, make setup-flower" in " ".join(ended.output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["node", "--partition", "2", "--of", "2"], "partitions count from 0, so give one of 0 to 1"),
        (["node", "--partition", "1"], "--partition needs --of: give both, or neither"),
        (["node", "--name", "a b"], "name 'a b': expected 1 to 64 of"),
        (["run", "--set", "flower.max_byte=5"], "max_bytes"),
    ],
)
def test_wrong_options_are_refused_at_the_start(arguments: list[str], said: str) -> None:
    ended = CliRunner().invoke(command_line, ["flower", arguments[0], str(APPS / "numpy-app"), *arguments[1:]])
    assert ended.exit_code == 2
    assert said in ended.output
