"""Which server holds which tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradbus.actors.parameter_server.assignment import assign
from gradbus.runtime.errors import ConfigError


def tensors(*sizes: int) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.zeros(size) for number, size in enumerate(sizes)}


def test_the_largest_is_dealt_first_each_to_the_server_that_has_least() -> None:
    dealt = assign(tensors(3, 9, 4, 8, 2), 2)
    assert [{piece.name for piece in own} for own in dealt] == [{"t1", "t0", "t4"}, {"t3", "t2"}]


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    servers=st.integers(1, 5),
    cut_bytes=st.none() | st.integers(64, 2000),
)
def test_every_entry_has_one_server_and_none_has_much_more_than_the_others(
    sizes: list[int], servers: int, cut_bytes: int | None
) -> None:
    parameters = tensors(*sizes)
    pieces = sum(max(1, min(size, -(-4 * size // cut_bytes))) if cut_bytes else 1 for size in sizes)
    if servers > pieces:
        with pytest.raises(ConfigError, match=f"servers is {servers}, but the model has {pieces}"):
            assign(parameters, servers, cut_bytes)
        return
    dealt = assign(parameters, servers, cut_bytes)
    found = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    for own in dealt:
        assert own, "no server is idle"
        for piece in own:
            piece.of(found[piece.tensor]).add_(1)
            assert cut_bytes is None or piece.nbytes <= cut_bytes + 4
    assert all(bool((tensor == 1).all()) for tensor in found.values())
    held = [sum(piece.nbytes for piece in own) for own in dealt]
    largest = max(piece.nbytes for own in dealt for piece in own)
    assert max(held) - min(held) <= largest


def test_pieces_lie_at_multiples_of_their_entries_in_a_message() -> None:
    parameters = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(1, dtype=torch.float64), **tensors(5)}
    (own,) = assign(parameters, 1)
    at = 0
    for piece in own:
        assert at % piece.dtype.itemsize == 0
        at += piece.nbytes
