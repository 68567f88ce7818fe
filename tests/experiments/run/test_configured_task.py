"""A task from settings has what the task itself has, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradbus.experiments.files import ControllerFile, TaskSettings
from gradbus.experiments.run import federated
from gradbus.experiments.run.configured_task import ConfiguredTask
from gradbus.experiments.rundir.directory import ControllerDirectory
from gradbus.models import NoopTask
from gradbus.runtime.errors import ConfigError


def noop() -> NoopTask:
    return NoopTask(3)


def test_methods_that_a_task_need_not_have_are_there_where_it_has_them() -> None:
    own = ConfiguredTask(TaskSettings(task=f"{__name__}:noop"))
    ours: Any = ConfiguredTask(TaskSettings(data="glyphs", data_options={"train": 40}, validation_share=0.5))
    for name in ("evaluate_local", "local_loss"):
        assert not hasattr(own, name)
        assert hasattr(ours, name)
    model = ours.build_model()
    assert ours.evaluate_local(model, client_id=0).num_samples == 20
    assert ours.local_loss(model, client_id=0) > 0.0


@pytest.mark.parametrize("evaluation", [{"every": 1}, {"cross_site": True}])
def test_evaluations_on_samples_that_nobody_holds_out_are_refused_before_data_are_loaded(
    evaluation: dict[str, Any], tmp_path: Path
) -> None:
    file = ControllerFile(federated={"evaluation": evaluation})  # type: ignore[arg-type]
    with ControllerDirectory(tmp_path) as run, pytest.raises(ConfigError, match=r"task\.validation_share is 0"):
        federated.checked_config(file, run)
