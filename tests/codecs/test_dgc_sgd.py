"""The whole step of several ranks against ``torch.optim.SGD``, and replicas against each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbus import codecs
from gradbus.models import mnist_mlp

pytestmark = pytest.mark.usefixtures("one_thread")


class Rank:
    """One replica with all that belongs to it."""

    def __init__(self, model: nn.Module, config: codecs.DgcConfig, **options: Any) -> None:
        self.model, self.config = model, config
        self.layout = codecs.DgcLayout.of(model.named_parameters(), min_numel=config.min_numel)
        self.state = codecs.DgcState.zeros(self.layout)
        self.dense = codecs.DenseMomentum.zeros(self.layout)
        self.optimizer = codecs.DgcSgd(
            model.parameters(), momentum=config.momentum, nesterov=config.nesterov, **options
        )

    def send(self, x: Tensor, y: Tensor, density: float | None = None) -> bytes:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        grads = [p.grad for p in self.model.parameters()]
        payload, self.state = codecs.dgc_step(grads, self.state, self.config, density=density)
        return payload

    def receive(self, payloads: list[bytes]) -> None:
        mean = codecs.combine_dgc(payloads, self.layout)
        self.dense = codecs.dense_momentum_step(mean, self.dense, self.config)
        mean.write_to(self.model.parameters())
        self.optimizer.step()

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def small_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


def shards(step: int, world: int, features: int = 12, classes: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(world, 8, features, generator=generator)
    y = torch.randint(classes, (world, 8), generator=generator)
    return list(zip(x, y, strict=True))


@pytest.mark.parametrize(
    ("momentum", "nesterov", "weight_decay"),
    [(0.0, False, 0.01), (0.9, False, 0.0), (0.9, False, 0.01), (0.9, True, 0.01)],
)
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("min_numel", [0, 10**6])
def test_at_density_1_it_is_sgd_on_the_mean_of_the_shards(
    world: int, momentum: float, nesterov: bool, weight_decay: float, min_numel: int
) -> None:
    """With everything compressed but the biases, and with everything dense."""
    config = codecs.DgcConfig(density=1.0, momentum=momentum, nesterov=nesterov, min_numel=min_numel)
    ranks = [Rank(small_model(), config, lr=0.05, weight_decay=weight_decay) for _ in range(world)]
    alone = small_model()
    sgd = torch.optim.SGD(alone.parameters(), 0.05, momentum, weight_decay=weight_decay, nesterov=nesterov)
    for step in range(50):
        batches = shards(step, world)
        sgd.zero_grad()
        for x, y in batches:
            (nn.functional.cross_entropy(alone(x), y) / world).backward()
        sgd.step()
        payloads = [rank.send(*batch) for rank, batch in zip(ranks, batches, strict=True)]
        for rank in ranks:
            rank.receive(payloads)
    for rank in ranks:
        assert (rank.weights() - nn.utils.parameters_to_vector(alone.parameters()).detach()).abs().max() <= 1e-6


def test_biases_have_momentum_at_any_density() -> None:
    """The mean alone would be SGD without momentum for all dense tensors."""
    config = codecs.DgcConfig(density=0.01)
    layout = codecs.DgcLayout.of([("b", torch.zeros(3))])
    state, dense = codecs.DgcState.zeros(layout), codecs.DenseMomentum.zeros(layout)
    seen = []
    for _ in range(3):
        payload, state = codecs.dgc_step([torch.ones(3)], state, config)
        mean = codecs.combine_dgc([payload, payload], layout)
        dense = codecs.dense_momentum_step(mean, dense, config)
        seen.append(float(mean.flat[0]))
    assert seen == pytest.approx([1.0, 1.9, 2.71])


def test_a_skipped_step_leaves_dense_momentum_alone() -> None:
    config = codecs.DgcConfig()
    layout = codecs.DgcLayout.of([("b", torch.zeros(3))])
    dense = codecs.DenseMomentum(layout, torch.ones(3))
    payload, _ = codecs.dgc_step([torch.full((3,), float("nan"))], codecs.DgcState.zeros(layout), config)
    dense = codecs.dense_momentum_step(codecs.combine_dgc([payload], layout), dense, config)
    assert (dense.M == 1).all()


def test_dense_momentum_is_saved_and_refused_for_another_model() -> None:
    layout = codecs.DgcLayout.of([("b", torch.zeros(3))])
    saved = codecs.DenseMomentum(layout, torch.arange(3.0)).state_dict()
    assert codecs.DenseMomentum.zeros(layout).load_state_dict(saved).M.tolist() == [0, 1, 2]
    other = codecs.DenseMomentum.zeros(codecs.DgcLayout.of([("c", torch.zeros(3))]))
    with pytest.raises(ValueError, match="differ"):
        other.load_state_dict(saved)
    mean = codecs.DgcMean(layout, torch.zeros(3), ())
    with pytest.raises(ValueError, match="different layouts"):
        codecs.dense_momentum_step(mean, other, codecs.DgcConfig())


def parameter(value: float, gradient: float) -> nn.Parameter:
    p = nn.Parameter(torch.tensor([value]))
    p.grad = torch.tensor([gradient])
    return p


def test_weight_decay_moves_the_parameters_by_exactly_its_term() -> None:
    p = parameter(1.0, 0.0)
    codecs.DgcSgd([p], lr=1.0, momentum=0.9, weight_decay=1e-4).step()
    assert 1.0 - p.item() == pytest.approx(1e-4, rel=1e-3)  # not 1.8e-4, as with the buffer added to itself
    p = parameter(1.0, 0.5)
    codecs.DgcSgd([p], lr=0.1, momentum=0.9, weight_decay=0.01).step()
    assert p.item() == pytest.approx(1.0 - 0.1 * 0.51)


def test_the_gradient_gets_no_second_momentum() -> None:
    p = parameter(0.0, 1.0)
    optimizer = codecs.DgcSgd([p], lr=1.0, momentum=0.9)
    for _ in range(3):
        optimizer.step()
    assert p.item() == -3.0
    assert not optimizer.state_dict()["state"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_weight_decay_alone_is_that_of_torch(nesterov: bool) -> None:
    ours, torchs = parameter(1.0, 0.0), parameter(1.0, 0.0)
    mine = codecs.DgcSgd([ours], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
    theirs = torch.optim.SGD([torchs], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
    for _ in range(20):
        mine.step()
        theirs.step()
        assert ours.item() == pytest.approx(torchs.item(), abs=1e-6)


def test_dampening_acts_from_the_second_step_on_and_on_weight_decay_alone() -> None:
    p = parameter(1.0, 0.0)
    optimizer = codecs.DgcSgd([p], lr=1.0, momentum=0.5, dampening=0.5, weight_decay=0.1)
    optimizer.step()
    assert p.item() == pytest.approx(0.9)
    optimizer.step()  # w = 0.5 * 0.1 + 0.5 * 0.1 * 0.9
    assert p.item() == pytest.approx(0.9 - 0.095)


def test_the_optimizer_reads_gradients_only_and_skips_parameters_without_one() -> None:
    p, silent = parameter(1.0, 0.5), nn.Parameter(torch.ones(2))
    optimizer = codecs.DgcSgd([{"params": [p]}, {"params": [silent], "lr": 1.0}], lr=0.1, weight_decay=0.1)
    assert p.grad is not None
    assert optimizer.step(lambda: 4.5) == 4.5
    assert p.grad.item() == 0.5
    assert silent.tolist() == [1.0, 1.0]


def test_a_saved_optimizer_goes_on_bit_equal() -> None:
    p = parameter(1.0, 0.3)
    optimizer = codecs.DgcSgd([p], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.step()
    q = parameter(p.item(), 0.3)
    restored = codecs.DgcSgd([q], lr=7.0)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        optimizer.step()
        restored.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize(
    "bad",
    [{"lr": -1}, {"lr": 1, "momentum": 1}, {"lr": 1, "nesterov": True, "momentum": 0}, {"lr": 1, "weight_decay": -1}],
)
def test_a_bad_option_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="DgcSgd"):
        codecs.DgcSgd([nn.Parameter(torch.ones(1))], **bad)


def test_replicas_of_four_ranks_stay_bit_equal() -> None:
    """Through a warm-up, a rank with NaN in one step and a rank that goes on from a saved state."""
    config = codecs.DgcConfig(value_dtype="fp16", clip_norm=5.0, world=4)
    ranks = [Rank(mnist_mlp(hidden=128), config, lr=0.05, weight_decay=1e-4) for _ in range(4)]
    assert torch.equal(ranks[0].weights(), ranks[3].weights())
    for step in range(20):
        density = codecs.warmup_density(step // 3)
        batches = shards(step, 4, features=784, classes=10)
        if step == 7:
            batches[2][0][0, 0] = float("nan")
        payloads = [rank.send(x, y, density) for rank, (x, y) in zip(ranks, batches, strict=True)]
        if step == 7:
            assert codecs.combine_dgc(payloads, ranks[0].layout).skipped_by == (2,)
            for rank, payload in zip(ranks, payloads, strict=True):
                rank.state = codecs.undo_step(payload, rank.state)
            continue
        for rank in ranks:
            rank.receive(payloads)
        if step == 12:
            saved = copy.deepcopy(ranks[1].state.state_dict())
            ranks[1].state = codecs.DgcState.zeros(ranks[1].layout).load_state_dict(saved)
        bits = [rank.weights().view(torch.int32) for rank in ranks]
        assert all(torch.equal(bits[0], other) for other in bits[1:])
    assert not torch.equal(
        ranks[0].weights(), nn.utils.parameters_to_vector(mnist_mlp(hidden=128).parameters()).detach()
    )


def test_one_entry_in_a_hundred_is_enough_to_learn_from() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(10, 784, generator=generator)
    ranks = [Rank(mnist_mlp(hidden=32), codecs.DgcConfig(density=0.01), lr=0.1) for _ in range(2)]

    def batch(size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 784, generator=generator)
        return x, (x @ truth.t()).argmax(1)

    def loss() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(ranks[0].model(held_out[0]), held_out[1]))

    held_out = batch(500)
    at_the_start = loss()
    for _ in range(120):
        payloads = [rank.send(*batch(64)) for rank in ranks]
        for rank in ranks:
            rank.receive(payloads)
    assert loss() < 0.75 * at_the_start
