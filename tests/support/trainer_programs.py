"""Running a program of scenes in the environment of ``make setup-integrations``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from ports import kept_ports

Found = Callable[[str], dict[str, Any]]

ENDS_S = 220.0  # on a busy machine


def played(root: Path, program: str, folder: Path) -> Found:
    """Run all scenes of a program, which loads torch and a library once. Returns what each has found, by its name.
    Skips the test where the libraries are not set up."""
    python = root / ".venv-integrations" / "bin" / "python"
    if not (python.parents[1] / ".set-up").exists():
        pytest.skip("Lightning and transformers are not set up: make setup-integrations")
    command = [str(python), str(root / "tests" / "support" / f"{program}.py"), str(folder)]
    with kept_ports(2) as ports:
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "SCENE_DOMAIN": str(new_domain()), "SCENE_PORTS": ",".join(map(str, ports)),
        }  # fmt: skip
        ended = subprocess.run(
            command, cwd=folder.parent, env=environment, timeout=ENDS_S, capture_output=True, text=True, check=False
        )

    def found(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        assert path.exists(), ended.stderr[-4000:]
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert "error" not in told, told["error"]
        return told

    return found
