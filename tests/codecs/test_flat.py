"""Tensors to one vector and back."""

from __future__ import annotations

import pytest
import torch

from gradbus import codecs


def test_flatten_and_unflatten_are_inverse_and_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2, bias=False))
    parameters = list(model.parameters())
    storages = [parameter.data_ptr() for parameter in parameters]
    flat = codecs.flatten(parameters)
    assert flat.shape == (codecs.flat_size(parameters),) == (24,)
    assert not flat.requires_grad
    codecs.unflatten_into(flat * 2, parameters)
    assert torch.equal(codecs.flatten(parameters), flat * 2)
    assert [parameter.data_ptr() for parameter in parameters] == storages


def test_flatten_is_row_major_in_the_order_given() -> None:
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert codecs.flatten([matrix.t(), torch.tensor(5.0)]).tolist() == [1, 3, 2, 4, 5]


def test_other_float_types_keep_their_type() -> None:
    half = torch.ones(3, dtype=torch.float16)
    codecs.unflatten_into(codecs.flatten([half]) * 0.5, [half])
    assert half.dtype == torch.float16
    assert half.tolist() == [0.5] * 3


def test_no_tensors_make_an_empty_vector() -> None:
    assert codecs.flatten([]).shape == (0,)
    codecs.unflatten_into(torch.empty(0), [])


def test_a_vector_of_another_size_writes_nothing() -> None:
    target = torch.zeros(3)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        codecs.unflatten_into(torch.ones(4), [target])
    assert target.tolist() == [0, 0, 0]


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor 1 must be of floating point"):
        codecs.flatten([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    with pytest.raises(ValueError, match="tensor 0 must be of floating point"):
        codecs.unflatten_into(torch.ones(1), [torch.ones(1, dtype=torch.int64)])
