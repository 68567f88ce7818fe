from typing import Any

import pytest

from gradbus.runtime.config.data_parallel import PER_RANK_SETTINGS, DataParallelConfig
from gradbus.runtime.config.federated import check_settings
from gradbus.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "kept"),
    [("paper", "paper"), ("none", "none"), (0, 0), (3, 3), ([0.25, 1], (0.25, 1.0)), ((0.1,), (0.1,)), ([], ())],
)
def test_a_warmup_is_a_name_a_number_of_epochs_or_a_list(given: Any, kept: Any) -> None:
    assert check_settings(DataParallelConfig, {"warmup": given}, where="settings").warmup == kept


@pytest.mark.parametrize(
    ("values", "text"),
    [
        *(
            ({"warmup": value}, "expected 'paper', 'none', a number of epochs, or a list of densities in (0, 1]")
            for value in ("papr", [2.0], [0.0], [True], True, -1, 1.5, {"epochs": 3})
        ),
        ({"lr": 0}, "lr: input should be greater than 0, got 0"),
        ({"nesterov": True, "momentum": 0}, "nesterov=true needs momentum > 0"),
        ({"bucket_byte": 5}, "did you mean 'bucket_bytes'?"),
        ({"keep_checkpoints": 0}, "keep_checkpoints"),
        ({"max_steps": 0}, "max_steps"),
        ({"density": 0}, "density"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(DataParallelConfig, values, where="settings")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_do_not_compare_settings_that_may_differ(tmp_path: Any) -> None:
    fields = set(DataParallelConfig.model_fields)
    assert fields > PER_RANK_SETTINGS
    mine = DataParallelConfig(state_dir=tmp_path / "a", report_every_steps=5, warmup=[0.5])
    theirs = DataParallelConfig(state_dir=tmp_path / "b", collective_timeout_s=5, warmup=[0.5])
    assert mine.shared() == theirs.shared()
    assert mine.shared().keys() == (fields - PER_RANK_SETTINGS) | {"state_dir"}
    assert mine.shared() != DataParallelConfig(warmup=[0.5]).shared()  # one with a state directory, one without
