"""The perceptron of the data-parallel experiments."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from .init import BareLinear, init_parameters
from .seeds import seeded_generator


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
