"""What a lossy codec owes: the right one for each round, whoever goes back or dies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.runtime.errors import CheckpointError

RUN = 0xABC


def owed(value: float) -> dict[str, Tensor]:
    return {"residual": torch.full((3,), value)}


def value_of(kept: Mapping[str, Tensor]) -> float | None:
    return float(kept["residual"][0]) if kept else None


def started(directory: Path | None, run_id: int = RUN) -> ClientStateStore:
    residuals = ClientStateStore(directory, 7)
    residuals.start_run(run_id)
    return residuals


def test_nothing_is_owed_before_the_first_update_counts() -> None:
    assert not started(None).before(1)


def test_a_round_starts_with_what_is_owed_after_the_last_accepted_one() -> None:
    residuals = started(None)
    residuals.keep(1, owed(1.0))
    assert value_of(residuals.before(2)) == 1.0
    residuals.keep(4, owed(4.0))  # rounds 2 and 3 went by without it
    assert value_of(residuals.before(5)) == 4.0
    assert value_of(residuals.before(9)) == 4.0


def test_a_round_that_is_done_again_starts_with_the_same_residual_again() -> None:
    residuals = started(None)
    for round_id in (1, 2, 3):
        residuals.keep(round_id, owed(float(round_id)))
    assert value_of(residuals.before(3)) == 2.0
    residuals.keep(3, owed(33.0))
    assert value_of(residuals.before(3)) == 2.0
    assert value_of(residuals.before(4)) == 33.0


def test_what_was_owed_after_rounds_that_are_undone_is_forgotten() -> None:
    residuals = started(None)
    for round_id in (1, 2, 3):
        residuals.keep(round_id, owed(float(round_id)))
    residuals.keep(2, owed(22.0))  # the controller went back by more than one
    assert value_of(residuals.before(4)) == 22.0


def test_another_run_owes_nothing() -> None:
    residuals = started(None)
    residuals.keep(1, owed(1.0))
    residuals.start_run(RUN)
    assert value_of(residuals.before(2)) == 1.0
    residuals.start_run(RUN + 1)
    assert not residuals.before(2)


def test_only_a_few_are_kept() -> None:
    residuals = started(None)
    for round_id in range(1, 50):
        residuals.keep(round_id, owed(float(round_id)))
    assert value_of(residuals.before(49)) == 48.0
    assert value_of(residuals.before(48)) == 47.0
    assert not residuals.before(40)


def test_a_restarted_client_goes_on_with_what_it_owed(tmp_path: Path) -> None:
    first = started(tmp_path)
    for round_id in (1, 2, 3, 4):
        first.keep(round_id, owed(float(round_id)))
    first.close()
    second = started(tmp_path)
    assert [value_of(second.before(round_id)) for round_id in (3, 4, 5)] == [2.0, 3.0, 4.0]
    second.close()


def test_a_restarted_client_owes_nothing_of_another_run(tmp_path: Path) -> None:
    first = started(tmp_path)
    first.keep(1, owed(1.0))
    first.close()
    second = started(tmp_path, RUN + 1)
    assert not second.before(2)
    second.keep(1, owed(11.0))
    second.close()
    third = started(tmp_path, RUN + 1)
    assert value_of(third.before(2)) == 11.0
    third.close()


@pytest.mark.parametrize("back_to", [4, 3, 1])
def test_after_a_restart_nothing_is_owed_for_rounds_that_were_undone(tmp_path: Path, back_to: int) -> None:
    first = started(tmp_path)
    for round_id in (1, 2, 3, 4, 5):
        first.keep(round_id, owed(float(round_id)))
    first.keep(back_to, owed(99.0))
    expected = [value_of(first.before(round_id)) for round_id in (back_to, back_to + 1, 9)]
    first.close()
    second = started(tmp_path)
    assert [value_of(second.before(round_id)) for round_id in (back_to, back_to + 1, 9)] == expected
    assert expected[1:] == [99.0, 99.0]
    second.close()


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_of_a_damaged_file_the_older_one_counts(tmp_path: Path, suffix: str) -> None:
    first = started(tmp_path)
    for round_id in (1, 2, 3):
        first.keep(round_id, owed(float(round_id)))
    first.close()
    damaged = max((tmp_path / "client-7").glob(f"*.{suffix}"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    second = started(tmp_path)
    assert value_of(second.before(4)) == 2.0
    second.keep(3, owed(33.0))
    second.close()
    third = started(tmp_path)
    assert value_of(third.before(4)) == 33.0
    third.close()


def test_the_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    residual = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    first = started(tmp_path)
    first.keep(1, {"residual": residual})
    first.close()
    second = started(tmp_path)
    kept = second.before(2)["residual"]
    assert torch.equal(kept, residual)
    second.close()


def test_clients_share_a_directory_but_not_their_residuals(tmp_path: Path) -> None:
    one, other = ClientStateStore(tmp_path, 1), ClientStateStore(tmp_path, 2)
    for residuals in (one, other):
        residuals.start_run(RUN)
    one.keep(1, owed(1.0))
    assert not other.before(2)
    one.close()
    other.close()


def test_two_processes_do_not_share_a_client(tmp_path: Path) -> None:
    first = started(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "client-7"))):
        ClientStateStore(tmp_path, 7)
    first.close()
    ClientStateStore(tmp_path, 7).close()
