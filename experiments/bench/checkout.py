"""An earlier commit beside the code that is here: both measured by turns, with the packages of this environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gradbus.experiments.bench.results import Results
from gradbus.experiments.bench.timing import in_turns
from gradbus.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
_LAYERS = ("actors", "codecs", "commands", "experiments", "models", "runtime")


def check_out(commit: str) -> Path:
    """A folder that has this commit as the package ``gradbus``, for PYTHONPATH. It is kept for the next time.

    Raises:
        ConfigError: this is no checkout of git, or has no such commit.
    """
    sha = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", cwd=ROOT)
    clone = ROOT / "build" / "against" / sha[:12]
    package = clone / "build" / "tree" / "gradbus"
    if not package.exists():
        shutil.rmtree(clone, ignore_errors=True)  # what an interrupted run has left
        clone.parent.mkdir(parents=True, exist_ok=True)
        _git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(clone), cwd=ROOT)
        _git("checkout", "--quiet", "--detach", sha, cwd=clone)
        package.mkdir(parents=True)
        # As the packages are mapped when they are installed: pyproject.toml.
        links = {name: clone / name for name in _LAYERS if (clone / name).exists()} | {
            "torch": clone / "runtime" / "_torch"
        }
        links |= {path.name: path for path in (clone / "runtime" / "_front").iterdir()}
        for name, target in links.items():
            (package / name).symlink_to(target)
    return package.parent


def _git(*words: str, cwd: Path) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        raise ConfigError(f"--compare: neither a file of results nor a commit of {ROOT}: {reason}") from None
    return done.stdout.strip()


def side_by_side(before: Path, words: Sequence[str], turns: int, parts: Sequence[str]) -> tuple[Results, Results]:
    """Measure these parts with both versions, by turns, in processes of their own.

    Args:
        before: of :func:`check_out`. words: of the command line, without parts and files. turns: runs of each version.

    Returns:
        The results of before and now; the samples of all turns of a part are one run.
    """
    found: dict[str, Results] = {"before": Results(), "now": Results()}
    for part in parts:
        for turn, side in enumerate(in_turns(found, turns)):
            print(f"{part}, {side}: run {turn // 2 + 1} of {turns}", file=sys.stderr, flush=True)
            run = _measured(before if side == "before" else None, [*words, "--part", part]).runs[0]
            known = found[side].run(part)
            found[side] = found[side].with_run(run if known is None else known.joined(run))
    return found["before"], found["now"]


def _measured(tree: Path | None, words: Sequence[str]) -> Results:
    environment = os.environ | ({} if tree is None else {"PYTHONPATH": str(tree)})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        command = [sys.executable, "-P", "-m", "gradbus.experiments.bench", *words, "--out", str(out)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not out.exists():
            last = " | ".join(done.stderr.strip().splitlines()[-3:])
            raise ConfigError(f"{tree or 'this version'} measured nothing: {' '.join(command)}: {last}")
        return Results.load(out)
