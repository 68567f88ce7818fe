"""The networks of the experiments. Initial values and the masks of dropout come from given generators: equal seeds
give equal bits.

PyTorch's layers draw their initial values from the global generator. So they are made bare, and :func:`init_parameters`
fills them. (``skip_init`` of PyTorch does the same, and imports sympy, which takes more than a second.)
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from .seeds import seeded_generator


class BareConv2d(nn.Conv2d):
    """``nn.Conv2d`` with parameters of undefined value."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


class BareLinear(nn.Linear):
    """``nn.Linear`` with parameters of undefined value."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


def init_parameters(model: nn.Module, generator: torch.Generator) -> None:
    """Overwrite weights and biases of all ``Conv2d`` and ``Linear`` layers, in module order.

    The distribution is PyTorch's: uniform in +-1 / sqrt(fan_in), for weights and biases alike.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)


class SeededDropout(nn.Module):
    """``nn.Dropout`` whose masks are a function of the last :meth:`reseed`, not of the generator that threads share.

    Args:
        p: share of entries set to zero, in [0, 1); the others are scaled by 1 / (1 - p).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout p must be in [0, 1), got {p}")
        self.p = p
        self._seed = 0
        self._generator: torch.Generator | None = None  # made in forward, which knows the device

    def reseed(self, seed: int) -> None:
        """Start the sequence of masks anew."""
        self._seed, self._generator = seed, None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self._generator is None or self._generator.device != x.device:
            self._generator = torch.Generator(x.device).manual_seed(self._seed)
        keep = torch.empty_like(x).bernoulli_(1 - self.p, generator=self._generator)
        return x * keep.div_(1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def reseed_dropout(model: nn.Module, generator: torch.Generator) -> None:
    """Give every :class:`SeededDropout` in ``model`` a new seed, drawn from ``generator`` in module order."""
    for module in model.modules():
        if isinstance(module, SeededDropout):
            module.reseed(int(torch.randint(2**62, (), generator=generator)))


def mnist_cnn(seed: int = 0, *, dropout: bool = False) -> nn.Module:
    """Two 3x3 convolutions, max-pool, two linear layers: 1,199,882 parameters, 4.8 MB in float32.

    Input float32 (B, 1, 28, 28), output logits float32 (B, 10). Equal seeds give bit-equal parameters.

    ``dropout``: 0.25 after the pool and 0.5 after the first linear layer. Off by default: over ten federated rounds it
    slowed learning and gained nothing (98.4 % with, 98.5 % without).
    """
    layers: dict[str, nn.Module] = {
        "conv1": BareConv2d(1, 32, kernel_size=3),
        "relu1": nn.ReLU(),
        "conv2": BareConv2d(32, 64, kernel_size=3),
        "relu2": nn.ReLU(),
        "pool": nn.MaxPool2d(2),
        "dropout1": SeededDropout(0.25 if dropout else 0.0),
        "flatten": nn.Flatten(),
        "fc1": BareLinear(64 * 12 * 12, 128),
        "relu3": nn.ReLU(),
        "dropout2": SeededDropout(0.5 if dropout else 0.0),
        "fc2": BareLinear(128, 10),
    }
    model = nn.Sequential(OrderedDict(layers))
    init_parameters(model, seeded_generator("mnist_cnn", seed))
    return model


def mnist_linear(seed: int = 0) -> nn.Module:
    """784-10, logistic regression: 7,850 parameters, few enough for noise, whose norm grows with the root of them.

    Input float32 (B, 1, 28, 28) or (B, 784), output logits float32 (B, 10). Equal seeds give bit-equal parameters.
    """
    model = nn.Sequential(OrderedDict[str, nn.Module]({"flatten": nn.Flatten(), "fc": BareLinear(28 * 28, 10)}))
    init_parameters(model, seeded_generator("mnist_linear", seed))
    return model


def mnist_mlp(seed: int = 0, *, hidden: int = 512) -> nn.Module:
    """784-``hidden``-10 with one ReLU: 407,050 parameters at ``hidden=512``, nearly all of them in one matrix.

    Input float32 (B, 1, 28, 28) or (B, 784), output logits float32 (B, 10). Equal seeds give bit-equal parameters.
    """
    layers: dict[str, nn.Module] = {
        "flatten": nn.Flatten(),
        "fc1": BareLinear(28 * 28, hidden),
        "relu": nn.ReLU(),
        "fc2": BareLinear(hidden, 10),
    }
    model = nn.Sequential(OrderedDict(layers))
    init_parameters(model, seeded_generator("mnist_mlp", seed))
    return model
