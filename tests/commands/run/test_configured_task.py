"""A task from settings has what the task itself has, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.files import ControllerFile, TaskSettings
from gradbus.commands.run import federated
from gradbus.commands.rundir.directory import ControllerDirectory
from gradbus.models import NoopTask
from gradbus.runtime.errors import ConfigError


def noop() -> NoopTask:
    return NoopTask(3)


class Narrow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2)


def no_module() -> Any:
    return nn.Linear(2, 2).state_dict()


def a_class() -> Any:
    return Narrow


class Empty(NoopTask):
    def build_model(self) -> Any:
        return None


def empty() -> Empty:
    return Empty(3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": f"{__name__}:no_module"}, f"task: the model function {__name__}.no_module has returned OrderedDict"),
        ({"model": f"{__name__}:a_class"}, f"task: the model function {__name__}.a_class has returned the class Narr"),
        ({"model": "builtins:dict"}, "task: the model function builtins.dict has returned dict"),
        ({"task": f"{__name__}:empty"}, "build_model of Empty (test_configured_task.py:"),
    ],
)
def test_a_model_that_is_no_module_is_an_error_of_the_settings(
    settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    task = ConfiguredTask(TaskSettings(**{"data": "glyphs", **settings}))
    with pytest.raises(ConfigError) as caught:
        task.build_model()
    assert str(caught.value).startswith(said)
    assert "expected a torch.nn.Module. Return the module itself" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (f"{__name__}:Narrow", {}, "missing a required argument: 'width'"),
        ("gradbus.models:mnist_mlp", {"widht": 3}, "got an unexpected keyword argument 'widht'"),
    ],
)
def test_options_that_the_model_does_not_take_are_an_error_before_anything_is_loaded(
    model: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ConfiguredTask(TaskSettings(data="glyphs", model=model, model_options=options))
    assert str(caught.value).startswith(f"task.model {model!r}: it takes (")
    assert f"with task.model_options {options}: {said}" in str(caught.value)


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
        federated.checked_choices(file, run)
