import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradbus.models import SeededDropout, mnist_cnn, mnist_linear, mnist_mlp, reseed_dropout, seeded_generator

NETWORKS = pytest.mark.parametrize("make", [mnist_cnn, mnist_linear, mnist_mlp])


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(("make", "count"), [(mnist_cnn, 1_199_882), (mnist_linear, 7_850), (mnist_mlp, 407_050)])
def test_the_number_of_parameters_is_exact(make: Callable[..., nn.Module], count: int) -> None:
    assert flat(make()).numel() == count


@NETWORKS
def test_equal_seeds_give_equal_bits_and_other_seeds_other_parameters(make: Callable[..., nn.Module]) -> None:
    torch.rand(3)  # the state of the global generator must not matter
    assert torch.equal(flat(make(seed=7)), flat(make(seed=7)))
    assert not torch.equal(flat(make(seed=7)), flat(make(seed=8)))


@NETWORKS
def test_building_leaves_the_global_generator_alone(make: Callable[..., nn.Module]) -> None:
    before = torch.random.get_rng_state()
    make(seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_networks_built_in_several_threads_at_once_are_equal() -> None:
    built: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: built.append(flat(mnist_mlp(seed=1)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 4
    assert all(torch.equal(built[0], other) for other in built[1:])


@NETWORKS
def test_initial_parameters_have_the_spread_of_pytorchs_own(make: Callable[..., nn.Module]) -> None:
    for module in make().modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = module.weight[0].numel() ** -0.5
            assert 0.95 * bound < module.weight.abs().max() <= bound
            assert 0.5 * bound < module.bias.abs().max() <= bound
            assert abs(module.weight.mean()) < 0.1 * bound


@NETWORKS
def test_a_batch_of_images_gives_ten_logits_each(make: Callable[..., nn.Module]) -> None:
    assert make()(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_dropout_changes_neither_parameters_nor_their_names() -> None:
    plain, dropping = mnist_cnn().state_dict(), mnist_cnn(dropout=True).state_dict()
    assert list(plain) == list(dropping)
    assert all(torch.equal(plain[name], dropping[name]) for name in plain)


def test_dropout_masks_repeat_after_a_reseed_and_differ_within_a_run() -> None:
    layer, x = SeededDropout(0.5), torch.ones(1000)
    layer.reseed(1)
    first, second = layer(x), layer(x)
    layer.reseed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    layer = SeededDropout(0.25)
    y = layer(torch.ones(100_000))
    assert (y == 0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert y.mean() == pytest.approx(1, abs=0.01)


def test_dropout_does_nothing_in_evaluation() -> None:
    x = torch.ones(10)
    assert torch.equal(SeededDropout(0.5).eval()(x), x)


def test_a_network_with_used_dropout_can_be_copied() -> None:
    model, x = mnist_cnn(dropout=True), torch.ones(1, 1, 28, 28)
    reseed_dropout(model, seeded_generator("test", 0))
    model(x)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        reseed_dropout(each, seeded_generator("test", 1))
    assert torch.equal(copied(x), model(x))


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_dropout_refuses_a_share_out_of_range(p: float) -> None:
    with pytest.raises(ValueError, match="dropout p"):
        SeededDropout(p)
