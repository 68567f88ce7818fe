"""What reads a run directory opens files with runtime/foreign_files.py: no pipe holds it up, no link leads out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READERS = (
    "commands/rundir", "commands/history", "commands/report", "commands/dashboard",
    "commands/cli/inspection.py", "runtime/checkpoint.py", "runtime/profiling", "runtime/testing/journal.py",
    "actors/federated", "actors/data_parallel", "actors/parameter_server",
)  # fmt: skip
"""Folders and files whose code reads what lies in a run directory."""
OPENING = {
    "open", "fdopen", "read_text", "read_bytes", "load_file", "safe_open", "fromfile", "memmap", "iterdir", "glob",
    "rglob", "scandir", "listdir",
}  # fmt: skip
"""Last names of calls that open a file or list a folder, whatever their object is."""
LOADING = {"np.load", "numpy.load", "torch.load", "os.walk", "pickle.load"}
"""Whole names of others."""
ALLOWED = {
    "commands/dashboard/connections.py table.open": "a table of the kernel",
    "commands/dashboard/runs.py os.scandir": "the folder of runs itself, which the user names; it is bounded there",
    "commands/dashboard/server.py (folder / name).read_text": "a file of the package",
    "commands/dashboard/server.py self._runs.open": "not a file",
    "commands/report/page.py (files('gradbus.commands.report') / 'templates' / 'report.css').read_text": (
        "a file of the package"
    ),
    "commands/report/page.py file.read_text": "a file of the package",
    "commands/report/scalars.py self._tracker.open": "not a file",
    "commands/rundir/directory.py os.fdopen": "a descriptor of open_to_append",
    "commands/rundir/directory.py temporary.open": "a new file, whose name clear_way has freed",
    "commands/rundir/versions.py open": "a table of the kernel",
    "runtime/checkpoint.py load_file": "the descriptor of a file that open_inside has opened",
    "runtime/checkpoint.py os.open": "a file that was just written, to sync it",
    "runtime/checkpoint.py path.open": "a file that was just written, to hash it",
    "runtime/profiling/summary.py os.fdopen": "a descriptor of open_to_append",
    "actors/federated/client/script_client.py self._handover.open": "not a file",
    "actors/federated/client/client_state.py self._store.directory.glob": "its own folders, to remove old ones",
}
"""File and call, with the reason why it may stay. This list may only shrink."""


def calls_in(path: Path) -> list[str]:
    """The calls in a file that may open something, as ``FILE CALL``."""
    name = path.relative_to(ROOT).as_posix()
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] in OPENING or called in LOADING:
                found.append(f"{name} {called}")
    return found


def readers() -> list[Path]:
    """The files that READERS names."""
    places = [ROOT / place for place in READERS]
    return [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]


def test_files_of_runs_are_opened_by_one_function() -> None:
    found = {call for file in readers() for call in calls_in(file)}
    assert sorted(found - ALLOWED.keys()) == [], "use open_inside, text_inside, lines_inside or names_inside"
    assert sorted(ALLOWED.keys() - found) == [], "it is gone: remove it from the list"


@pytest.mark.parametrize(
    "source",
    ["open('x')", "path.read_text()", "os.listdir(x)", "np.load(x)", "torch.load(x)", "safe_open(x)", "p.glob('*')"],
)
def test_a_call_past_it_is_found(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "file.py").write_text(source)
    assert len(calls_in(tmp_path / "file.py")) == 1
