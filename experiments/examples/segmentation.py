"""Segmentation of synthetic shapes with a small U-Net: intersection over union in place of an accuracy.

Discs and squares on a noisy ground; a client sees mostly one of them. As ``segmentation.json``:

    {"task": {"task": "gradbus.experiments.examples.segmentation:Segmentation"},
     "federated": {"rounds": 10, "training": {"epochs": 1, "lr": 0.05}, "evaluation": {"every": 2},
                   "early_stop": {"patience": 3, "metric": "iou", "mode": "max"}}}

and ``gradbus virtual segmentation.json --clients 4``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gradbus.models import EvalResult, TrainResult, local_sgd, seeded_generator, seeded_global_generator

SIDE = 24  # pixels


def shapes(number: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images and masks of a client, float32, shape (samples, 1, SIDE, SIDE) each. -1: of nobody, with as many discs as
    squares."""
    generator = seeded_generator("shapes", seed, number)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(samples, 1, 1, generator=generator)

    discs = uniform(0.0, 1.0) < (0.5 if number < 0 else (0.8, 0.2)[number % 2])
    x, y, radius = uniform(6, SIDE - 6), uniform(6, SIDE - 6), uniform(3, 6)
    down, right = torch.arange(SIDE)[:, None].float(), torch.arange(SIDE)[None, :].float()
    dx, dy = (right - x).abs(), (down - y).abs()
    masks = torch.where(discs, dx**2 + dy**2 < radius**2, torch.maximum(dx, dy) < radius).float().unsqueeze(1)
    return masks + 0.5 * torch.randn(masks.shape, generator=generator), masks


class UNet(nn.Module):
    """Two levels, with the upper one's features beside those that come back up (Ronneberger et al., U-Net, 2015)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.top = _convolutions(1, width)
        self.bottom = nn.Sequential(nn.MaxPool2d(2), _convolutions(width, 2 * width))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Sequential(_convolutions(2 * width, width), nn.Conv2d(width, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Logits for images, shape (B, 1, H, W) both; H and W are even."""
        top = self.top(images)
        return self.out(torch.cat([top, self.up(self.bottom(top))], dim=1))  # type: ignore[no-any-return]


def _convolutions(inputs: int, outputs: int) -> nn.Module:
    # A group norm has no running statistics: nothing of single clients is averaged but weights.
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(1, outputs), nn.ReLU())


class Segmentation:
    """The task. Each client trains on the first three quarters of its images, and evaluates on the rest."""

    def __init__(self, samples: int = 64, seed: int = 0) -> None:
        """``samples``: of each client."""
        self.samples, self.seed = samples, seed
        self._train = 3 * samples // 4
        self._images: dict[int, tuple[Tensor, Tensor]] = {}

    def build_model(self) -> nn.Module:
        """A U-Net with the same initial weights at every call."""
        with seeded_global_generator(self.seed):
            return UNet()

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Draw the images of this client."""
        self._of(client_id)

    def _of(self, number: int) -> tuple[Tensor, Tensor]:
        if number not in self._images:
            self._images[number] = shapes(number, self.samples, self.seed)
        return self._images[number]

    def train(self, model: nn.Module, *, client_id: int, **command: Any) -> TrainResult:
        """Train on the images of this client."""
        images, masks = self._of(client_id)

        def loss_of(picked: Tensor) -> Tensor:
            return binary_cross_entropy_with_logits(model(images[picked]), masks[picked])

        return local_sgd(model, torch.arange(self._train), loss_of, client_id=client_id, batch_size=8, **command)

    def evaluate(self, model: nn.Module) -> EvalResult:
        """On images that are nobody's."""
        return measured(model, *self._of(-1))

    def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult:
        """On the images that this client does not train on."""
        images, masks = self._of(client_id)
        return measured(model, images[self._train :], masks[self._train :])


@torch.no_grad()
def measured(model: nn.Module, images: Tensor, masks: Tensor) -> EvalResult:
    """Mean loss over pixels, and the mean over images of intersection over union."""
    model.eval()
    logits = model(images)
    said, true = logits > 0, masks > 0
    both, either = ((found.flatten(1).sum(1)).double() for found in (said & true, said | true))
    iou = float((both / either.clamp(min=1)).mean())
    return EvalResult(None, float(binary_cross_entropy_with_logits(logits, masks)), len(images), {"iou": iou})
