"""Uses the installed wheel as a newcomer does: `make smoke` runs it in a fresh environment, from an empty folder."""

import importlib
import importlib.metadata
import importlib.resources
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_path("purelib")).resolve()
COMMAND = Path(sysconfig.get_path("scripts"), "gradbus")
PACKAGES = ("actors", "codecs", "commands", "models", "runtime")
DEMO = ["demo", "--data", "glyphs", "--rounds", "2", "--samples", "300", "--no-live"]
DEMO_TIMEOUT_S = 240
SUMMARY = "runs/*/summary.json"  # below the folder that the demo was started from


def check_files() -> None:
    files = [str(file) for file in importlib.metadata.files("gradbus") or []]
    strangers = [
        name for name in files if not name.startswith(("gradbus/", "gradbus-")) and not name.endswith("/gradbus")
    ]
    assert files, "the wheel recorded no files"
    assert not strangers, f"the wheel holds more than gradbus: {strangers}"
    private = [name for name in files if "/_" in name.replace("/__", "/") or "/tests/" in name or "/test_" in name]
    assert not private, f"the wheel holds tests, or folders that are mapped to another name: {private}"
    tools = [name for name in files if name.split("/")[-2] in ("tools", "soak", "fuzz", "conformance")]
    assert not tools, f"the wheel holds programs of tests/tools: {tools}"
    experiments = [name for name in files if name.startswith("gradbus/experiments")]
    assert not experiments, f"the wheel holds what belongs to a checkout: {experiments}"
    for package in PACKAGES:
        assert f"gradbus/{package}/__init__.py" in files, f"gradbus.{package} is missing"
        for source in (ROOT / package).rglob("*.py"):
            name = f"gradbus/{source.relative_to(ROOT)}".replace("/runtime/_front/", "/").replace(
                "/runtime/_torch/", "/torch/"
            )
            assert name in files, f"{name} is missing from the wheel"


def check_import() -> None:
    import codecs as standard_codecs

    import gradbus
    import gradbus.codecs

    for module in (gradbus, gradbus.codecs):
        file = Path(str(module.__file__)).resolve()
        assert file.is_relative_to(SITE), f"{module.__name__} comes from {file}, not from {SITE}"
    assert standard_codecs.lookup("utf-8").name == "utf-8"
    version = importlib.metadata.version("gradbus")
    assert getattr(gradbus, "__version__", version) == version
    print(f"gradbus {version} from {SITE}")


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
    for name in ("bench", "examples.embed_aiohttp", "simulate.claims"):
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


if __name__ == "__main__":
    for check in (
        check_files,
        check_import,
        check_data,
        check_moved_names,
        check_codecs,
        check_command_line,
        check_demo,
    ):
        check()
        print(f"{check.__name__}: ok", flush=True)
