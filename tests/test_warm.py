"""The server that tests fork their processes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm

import gradbus


@pytest.mark.slow
def test_a_forked_process_has_loaded_everything_and_runs_nothing(root: Path) -> None:
    actors = {getattr(gradbus.actors, name).__module__ for name in gradbus.actors.__all__}
    opened = {"gradbus.runtime.transport.dds.participant", "gradbus.runtime.algorithms.dgc"}  # by each that opens a bus
    modules = {"warm_modules", "federation_node", "torch_node", "torch._dynamo", "_pytest.config", *actors, *opened}
    process, _, events = warm.fork_that_tells(warm.look, {"modules": modules})
    (told,) = events
    process.join(10.0)
    assert told["has"] == sorted(modules)  # a module that cannot be imported is passed over without a word
    assert (told["server_threads"], told["threads"]) == (1, 1)  # a lock that another one held would never be free again
    assert str(root / "tests") not in told["path"]  # else commands that are started would find helpers there
