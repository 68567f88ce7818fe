"""Uses the installed wheels as a newcomer does: `make smoke` runs it in a fresh environment, from an empty folder.

Its argument says what is installed: core, core-on-dds, gradbus, or core-again, after gradbus was removed.
"""

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_path("purelib")).resolve()
COMMAND = Path(sysconfig.get_path("scripts"), "gradbus")
PACKAGES = ("actors", "codecs", "commands", "models", "runtime")
LARGE = ("torch", "torchvision", "cyclonedds", "matplotlib")
DEMO = ["demo", "--data", "glyphs", "--rounds", "2", "--samples", "300", "--no-live"]
DEMO_TIMEOUT_S = 240
SUMMARY = "runs/*/summary.json"  # below the folder that the demo was started from


def files_of(distribution: str) -> list[str]:
    return [str(file) for file in importlib.metadata.files(distribution) or []]


def check_files() -> None:
    core, rest = files_of("gradbus-core"), files_of("gradbus")
    files = [*core, *rest]
    assert core, "the wheel of gradbus-core recorded no files"
    assert rest, "the wheel of gradbus recorded no files"
    assert not set(core) & set(rest), f"both wheels hold {set(core) & set(rest)}"
    missing = [name for name in files if not SITE.joinpath(name).exists()]
    assert not missing, f"one wheel has removed files of the other: {missing}"
    ours = ("gradbus/", "gradbus-", "gradbus_core-")
    strangers = [name for name in files if not name.startswith(ours) and not name.endswith("/gradbus")]
    assert not strangers, f"the wheels hold more than gradbus: {strangers}"
    private = [name for name in files if "/_" in name.replace("/__", "/") or "/tests/" in name or "/test_" in name]
    assert not private, f"the wheels hold tests, or folders that are mapped to another name: {private}"
    tools = [name for name in files if name.split("/")[-2] in ("tools", "soak", "fuzz", "conformance")]
    assert not tools, f"the wheels hold programs of tests/tools: {tools}"
    experiments = [name for name in files if name.startswith("gradbus/experiments")]
    assert not experiments, f"the wheels hold what belongs to a checkout: {experiments}"
    for package in PACKAGES:
        assert f"gradbus/{package}/__init__.py" in files, f"gradbus.{package} is missing"
        for source in (ROOT / package).rglob("*.py"):
            name = f"gradbus/{source.relative_to(ROOT)}".replace("/runtime/_front/", "/").replace(
                "/runtime/_torch/", "/torch/"
            )
            assert name in files, f"{name} is in no wheel"


def check_files_of_core() -> None:
    files = files_of("gradbus-core")
    missing = [name for name in files if not SITE.joinpath(name).exists()]
    assert files, "the wheel of gradbus-core recorded no files"
    assert not missing, f"files of gradbus-core are missing: {missing}"
    assert importlib.util.find_spec("gradbus.models") is None, "there is more than gradbus-core"


def check_dependencies() -> None:
    borrowed = SITE.joinpath("dependencies.pth").exists()  # those of an environment that has everything
    assert borrowed or importlib.util.find_spec("torch") is None, "gradbus-core has installed torch"


def check_closures() -> None:
    """What a relay, a Flower node, the doctor and the observer of a job load."""
    modules = (
        "runtime.bus.bus", "runtime.security.sealed", "runtime.security.identity.membership", "commands.cli.main",
        "commands.run.status", "commands.run.flower", "commands.doctor.report", "actors.flower.hub",
        "actors.flower.node", "commands.relay.process",
    )  # fmt: skip
    names = ", ".join(f"gradbus.{name}" for name in modules)
    code = f"import sys, {names}; print([name for name in {LARGE} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "[]\n", f"they load {done.stdout}"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``gradbus`` in a folder and a home of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [COMMAND, *words],
            cwd=folder,
            env=os.environ | {"HOME": folder, "COLUMNS": "200"},
            timeout=120,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


def check_commands_of_core() -> None:
    for words in (["--version"], *([name, "--help"] for name in ("keys", "status", "doctor", "flower", "relay"))):
        done = run(*words)
        assert done.returncode == 0, f"gradbus {' '.join(words)}: {done.stdout}"
    made, shown = run("keys", "new", "job.key"), run("keys", "show")
    assert "a new job key" in made.stdout, made.stdout
    assert "key of this user" in shown.stdout, shown.stdout


def check_what_core_does_not_have() -> None:
    done = run("demo")
    told = "gradbus demo: this needs the package gradbus; only gradbus-core is installed here. Install it "
    assert done.returncode == 14, done.stdout
    assert done.stdout.startswith(told), done.stdout
    assert done.stdout.count("\n") == 1, done.stdout


def check_doctor() -> None:
    """It measures two processes on a bus."""
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    assert f"gradbus-core {importlib.metadata.version('gradbus-core')}" in done.stdout, done.stdout
    assert "round trip" in done.stdout, done.stdout


def check_import() -> None:
    import codecs as standard_codecs

    import gradbus
    import gradbus.codecs

    for module in (gradbus, gradbus.codecs):
        check_place(module)
    assert standard_codecs.lookup("utf-8").name == "utf-8"
    version = importlib.metadata.version("gradbus")
    assert gradbus.__version__ == version == importlib.metadata.version("gradbus-core")
    print(f"gradbus {version} from {SITE}")


def check_import_of_core() -> None:
    import gradbus
    import gradbus.runtime.logs

    for module in (gradbus, gradbus.runtime.logs):
        check_place(module)
    assert gradbus.__version__ == importlib.metadata.version("gradbus-core")


def check_place(module: ModuleType) -> None:
    file = Path(str(module.__file__)).resolve()
    assert file.is_relative_to(SITE), f"{module.__name__} comes from {file}, not from {SITE}"


def check_data() -> None:
    assert importlib.resources.files("gradbus").joinpath("py.typed").is_file()
    assert "ClientUpdate" in importlib.resources.files("gradbus.runtime").joinpath("gradbus.idl").read_text()
    templates = [item.name for item in (importlib.resources.files("gradbus.commands.report") / "templates").iterdir()]
    assert "report.css" in templates, templates
    traces = [item.name for item in (importlib.resources.files("gradbus.commands.simulate") / "traces").iterdir()]
    assert {"resnet50.json", "vgg19.json"} <= set(traces), traces


def check_moved_names() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = importlib.import_module("gradbus.experiments.files")
    assert old is importlib.import_module("gradbus.commands.files")
    assert [str(one.message) for one in caught if "has moved to gradbus.commands.files" in str(one.message)], caught
    for name in ("bench", "examples.embed_aiohttp", "simulate.claims", "simulate.lockstep"):
        said = ""
        try:
            importlib.import_module(f"gradbus.experiments.{name}")
        except ImportError as error:
            said = str(error)
        assert "is not part of an installed gradbus" in said, f"gradbus.experiments.{name}: {said or 'it is there'}"


def check_codecs() -> None:
    import torch

    import gradbus.codecs

    vector = torch.linspace(-1, 1, 1000)
    for name, error in {"fp32": 0.0, "q8": 0.01}.items():
        payload = gradbus.codecs.get(name).encode(vector)
        decoded = gradbus.codecs.decode(payload, expected_dim=1000)
        assert (decoded.vector - vector).abs().max().item() <= error, name


def check_command_line() -> None:
    subprocess.run([COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL, timeout=60)
    subprocess.run([sys.executable, "-m", "gradbus", "--help"], check=True, stdout=subprocess.DEVNULL, timeout=60)


def check_demo() -> None:
    caches = {"XDG_CACHE_HOME": ".cache", "XDG_CONFIG_HOME": ".config"}  # of fonts and the like stay where they are
    kept = {name: os.environ.get(name, str(Path.home() / there)) for name, there in caches.items()}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [COMMAND, *DEMO],
            cwd=folder,
            env=os.environ | kept | {"HOME": folder},
            timeout=DEMO_TIMEOUT_S,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f"gradbus {' '.join(DEMO)} ended with {done.returncode}:\n{done.stdout}"
        assert Path(folder, ".config", "gradbus", "user.key").is_file(), (
            "the demo was not sealed with a key of the user"
        )
        summaries = sorted(Path(folder).glob(SUMMARY))
        assert len(summaries) == 1, f"no {SUMMARY} in {sorted(Path(folder).rglob('*'))}; the demo said:\n{done.stdout}"
        summary = json.loads(summaries[0].read_text(encoding="utf-8"))
        assert (summary["outcome"], summary["rounds"]) == ("done", 2), summary
        print(f"demo: accuracy {summary['accuracy']:.3f} after {summary['rounds']} rounds")


CORE = (
    check_files_of_core,
    check_import_of_core,
    check_closures,
    check_commands_of_core,
    check_what_core_does_not_have,
)
PARTS = {
    "core": (check_dependencies, *CORE),
    "core-on-dds": (check_dependencies, check_doctor),
    "gradbus": (
        check_files,
        check_import,
        check_data,
        check_moved_names,
        check_codecs,
        check_command_line,
        check_demo,
    ),
    "core-again": CORE,
}


if __name__ == "__main__":
    for check in PARTS[sys.argv[1]]:
        check()
        print(f"{check.__name__}: ok", flush=True)
