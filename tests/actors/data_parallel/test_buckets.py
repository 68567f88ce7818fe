"""Buckets: which parameter is in which, when one is launched, and what happens to gradients that do not come."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbus.actors.data_parallel.buckets import GradientBuckets, assign_buckets
from gradbus.runtime.algorithms.base import TensorBucket

KIB = 1024


def tensors(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.empty(size, dtype=dtype) for size in sizes]


def test_buckets_are_filled_from_the_last_parameter_and_the_first_one_is_small() -> None:
    parameters = tensors(100, 100, 100, 100, 100, 100)  # 400 bytes each
    assert assign_buckets(parameters, bucket_bytes=800, first_bucket_bytes=400) == [[5], [4, 3], [2, 1], [0]]
    assert assign_buckets(parameters, bucket_bytes=800) == [[5, 4], [3, 2], [1, 0]]
    assert assign_buckets(parameters, bucket_bytes=1 << 20) == [[5, 4, 3, 2, 1, 0]]
    assert assign_buckets([], bucket_bytes=1) == []


def test_a_bucket_is_closed_as_soon_as_it_holds_its_limit() -> None:
    # The reference network: the large matrix is there early, and must not wait for the convolutions.
    cnn = tensors(288, 32, 18432, 64, 1179648, 128, 1280, 10)
    assert assign_buckets(cnn, bucket_bytes=25 << 20, first_bucket_bytes=1 << 20) == [[7, 6, 5, 4], [3, 2, 1, 0]]


def test_an_oversized_parameter_has_a_bucket_of_its_own_and_none_is_empty() -> None:
    sizes = [10, 1000, 10, 1000, 1000, 10]
    assert assign_buckets(tensors(*sizes), bucket_bytes=400) == [[5], [4], [3], [2], [1], [0]]
    assert assign_buckets(tensors(1000), bucket_bytes=1) == [[0]]


def test_each_dtype_has_buckets_of_its_own() -> None:
    parameters = [*tensors(10), *tensors(10, dtype=torch.float64), *tensors(10), *tensors(10, dtype=torch.float64)]
    assert assign_buckets(parameters, bucket_bytes=1 << 20) == [[3, 1], [2, 0]]


@pytest.mark.parametrize("limits", [{"bucket_bytes": 0}, {"bucket_bytes": 1, "first_bucket_bytes": 0}])
def test_limits_below_one_byte_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be >= 1 byte"):
        assign_buckets(tensors(1), **limits)


class Scene:
    """A small network whose buckets, one per layer, tell when they are launched."""

    def __init__(self, *, bucket_bytes: int = 1, frozen: str = "") -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not frozen or not name.startswith(frozen))
        named = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        self.launched: list[int] = []
        self.seen: dict[int, Tensor] = {}
        self.assignment = assign_buckets(self.parameters, bucket_bytes=bucket_bytes)
        self.buckets = GradientBuckets(named, assignment=self.assignment, sets=2)

    def begin(self, number: int = 0) -> list[TensorBucket]:
        return self.buckets.begin(number, self.launch)

    def launch(self, bucket: TensorBucket) -> None:
        self.launched.append(bucket.index)
        self.seen[bucket.index] = bucket.flat.clone()

    def backward(self, seed: int = 0, *, layers: int = 3) -> None:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        torch.autograd.backward(self.net[:layers](x).square().sum())

    def gradients(self, *seeds: int, layers: int = 3) -> list[Tensor]:
        """What plain autograd gives."""
        plain = Scene()
        for seed in seeds:
            plain.backward(seed, layers=layers)
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.net.parameters()]


def test_gradients_are_views_into_the_bucket_and_launched_in_the_order_they_come() -> None:
    scene = Scene()
    for _ in range(2):
        buckets = scene.begin()
        assert [bucket.index for bucket in buckets] == list(range(6))
        scene.launched.clear()
        scene.buckets.enable_overlap()
        scene.backward()
        assert sorted(scene.launched) == list(range(6))
        assert {0, 1} == set(scene.launched[:2])  # the last layer first
        scene.buckets.flush()
        assert len(scene.launched) == 6
        for parameter, expected in zip(scene.parameters, scene.gradients(0), strict=True):
            assert torch.equal(parameter.grad, expected)  # type: ignore[arg-type]
        for bucket, (at,) in zip(buckets, scene.assignment, strict=True):
            parameter = scene.parameters[at]
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == bucket.flat.data_ptr()
            assert list(bucket.tensors) == [list(dict(scene.net.named_parameters()))[at]]
            assert torch.equal(scene.seen[bucket.index], bucket.flat)


def test_what_is_written_into_a_bucket_is_the_gradient() -> None:
    scene = Scene(bucket_bytes=1 << 20)
    (bucket,) = scene.begin()
    scene.backward()
    scene.buckets.flush()
    bucket.flat.fill_(3.0)
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in scene.parameters)  # type: ignore[arg-type]


def test_one_set_of_memory_is_filled_while_the_other_one_keeps_the_gradients_of_the_step_before() -> None:
    scene = Scene(bucket_bytes=1 << 20)
    (before,) = scene.begin(0)
    scene.backward(1)
    scene.buckets.flush()
    kept = before.flat.clone()
    (now,) = scene.begin(1)
    scene.backward(2)
    scene.buckets.flush()
    assert torch.equal(before.flat, kept)
    assert not torch.equal(now.flat, kept)
    for number, seed in ((0, 1), (1, 2)):
        scene.buckets.use(number)
        for parameter, expected in zip(scene.parameters, scene.gradients(seed), strict=True):
            assert torch.equal(parameter.grad, expected)  # type: ignore[arg-type]


def test_only_the_last_batch_of_a_step_launches() -> None:
    scene = Scene(bucket_bytes=1 << 20)
    scene.begin()
    scene.backward(1)
    assert scene.launched == []
    scene.buckets.enable_overlap()
    scene.backward(2)
    assert scene.launched == [0]
    for parameter, expected in zip(scene.parameters, scene.gradients(1, 2), strict=True):
        assert torch.allclose(parameter.grad, expected)  # type: ignore[arg-type]


def test_without_arming_nothing_is_launched_before_the_end() -> None:
    scene = Scene()
    scene.begin()
    scene.backward()
    assert scene.launched == []
    scene.buckets.flush()
    assert scene.launched == list(range(6))


def test_parameters_that_get_no_gradient_are_sent_as_zeros_at_the_end() -> None:
    scene = Scene()
    scene.begin()
    scene.backward()  # leaves gradients behind that must not be sent again
    scene.buckets.flush()
    scene.launched.clear()
    scene.begin()
    scene.buckets.enable_overlap()
    scene.backward(layers=1)
    assert sorted(scene.launched) == [4, 5]
    scene.buckets.flush()
    assert sorted(scene.launched) == list(range(6))
    for parameter, expected in zip(scene.parameters, scene.gradients(0, layers=1), strict=True):
        assert torch.equal(parameter.grad, expected)  # type: ignore[arg-type]


def test_frozen_parameters_are_left_out() -> None:
    scene = Scene(frozen="0.")
    scene.begin()
    scene.buckets.enable_overlap()
    scene.backward()
    assert sorted(scene.launched) == list(range(4))
    assert scene.net[0].weight.grad is None


def test_a_gradient_that_was_put_elsewhere_comes_home() -> None:
    scene = Scene(bucket_bytes=1 << 20)
    scene.begin()
    for parameter in scene.parameters:
        parameter.grad = None  # as zero_grad(set_to_none=True) in a task's own loss
    scene.backward()
    scene.parameters[0].grad = None
    scene.buckets.flush()
    expected = scene.gradients(0)
    expected[0].zero_()
    assert torch.equal(scene.seen[0], torch.cat([g.reshape(-1) for g in reversed(expected)]))
    assert scene.parameters[1].grad is not None
    (bucket,) = scene.begin()
    assert not bucket.flat.any()


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            raise RuntimeError("the user's own mistake")

    scene = Scene()
    scene.begin()
    scene.buckets.enable_overlap()
    middle = Fails.apply(scene.net[:2](torch.ones(1, 4)))
    with pytest.raises(RuntimeError, match="own mistake"):
        torch.autograd.backward(scene.net[2](middle).sum())
    assert len(scene.launched) == 2
    scene.launched.clear()
    scene.begin()
    scene.buckets.enable_overlap()
    scene.backward()
    scene.buckets.flush()
    assert len(scene.launched) == 6
    assert torch.equal(scene.parameters[0].grad, scene.gradients(0)[0])  # type: ignore[arg-type]


def test_a_second_gradient_after_the_launch_is_an_error_and_not_lost() -> None:
    scene = Scene()
    scene.begin()
    scene.buckets.enable_overlap()
    scene.backward()
    with pytest.raises(RuntimeError, match="after its bucket was sent"):
        scene.backward()


def test_after_closing_gradients_go_their_own_way() -> None:
    scene = Scene()
    scene.begin()
    scene.buckets.enable_overlap()
    scene.buckets.close()
    scene.backward()
    assert scene.launched == []
