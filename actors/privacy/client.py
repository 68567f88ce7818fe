"""What a client does for differential privacy before anything of its update leaves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.aggregation.partial_sum import FRACTION_BITS
from gradbus.actors.privacy.discrete_gaussian import discrete_gaussian
from gradbus.actors.privacy.mechanisms import WITHIN, CentralPrivacy, LocalPrivacy, grid_sigma
from gradbus.runtime.errors import ConfigError

_PREFIX = "privacy."
# A client scales an update to this much below the bound, so that it is within it after it was rounded to float32.
_BELOW = 1 - 2.0**-20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPrivacy:
    """Holds what the controller asks of this client's updates.

    Attributes:
        clip_norm: largest L2 norm; with ``adaptive`` the one that comes behind the model holds.
        noise_multiplier: of the noise that this client adds itself; 0: none, the controller adds it.
    """

    clip_norm: float
    noise_multiplier: float = 0.0
    adaptive: bool = False

    @property
    def is_local(self) -> bool:
        """Whether nothing but the update and its noise may leave this client."""
        return self.noise_multiplier > 0

    def protected(self, change: Tensor, broadcast: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The update as it may leave this client, and the metrics to announce with it.

        Args:
            change: float32, shape (D,): what training has changed. broadcast: what came behind the model.

        Returns:
            Float32, shape (D,). A change that is not finite comes back as it is.

        Raises:
            ConfigError: the bound did not come behind the model.
        """
        bound = self.clip_norm
        if self.adaptive:
            if broadcast.shape != (1,):
                raise ConfigError(
                    f"{broadcast.numel():,} values came behind the model: expected one, the bound of the updates"
                )
            bound = float(broadcast[0])
        norm = float(torch.linalg.vector_norm(change, dtype=torch.float64))
        if not math.isfinite(norm):
            return change, {}
        facts = {WITHIN: float(norm <= bound)} if self.adaptive else {}
        if norm > bound * _BELOW:
            change = (change.double() * (bound * _BELOW / norm)).float()
        return (_noised(change, bound, self.noise_multiplier) if self.is_local else change), facts


def _noised(change: Tensor, bound: float, noise_multiplier: float) -> Tensor:
    """The change with noise on the grid of 2^-30, where any two changes are at most twice the bound apart."""
    sigma = grid_sigma(noise_multiplier, 2 * bound, change.numel(), roundings=2)
    grid = change.double().mul_(2.0**FRACTION_BITS).round_().long()
    grid += torch.from_numpy(discrete_gaussian(change.numel(), sigma))
    return grid.double().mul_(2.0**-FRACTION_BITS).float()


def without_privacy(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is sent to a client beside the options of privacy."""
    return {key: value for key, value in sent.items() if not key.startswith(_PREFIX)}


def privacy_of(sent: Mapping[str, Any], *, least_noise: float = 0.0) -> ClientPrivacy | None:
    """Return what the controller asks of this client's updates; None: nothing.

    Args:
        sent: the options of its Welcome, as of :meth:`.Strategy.terms`. least_noise: multiplier of the noise that this
            client insists on.

    Raises:
        ConfigError: they cannot be understood, or it is less noise than this client insists on.
    """
    asked = {key.removeprefix(_PREFIX): value for key, value in sent.items() if key.startswith(_PREFIX)}
    found = _parsed(asked) if asked else None
    noise = 0.0 if found is None else found.noise_multiplier
    if noise < least_noise:
        raise ConfigError(
            f"the controller asks this client for noise of {noise:g} times the sensitivity, and client.least_noise is "
            f"{least_noise:g}: nothing is sent. Set federated.privacy on the controller to local, with as much noise"
        )
    return found


def _parsed(asked: Mapping[str, Any]) -> ClientPrivacy:
    expected = {
        CentralPrivacy.choice: {"name", "clip_norm", "adaptive"},
        LocalPrivacy.choice: {"name", "clip_norm", "noise_multiplier"},
    }
    name, numbers = asked.get("name"), [asked.get("clip_norm"), asked.get("noise_multiplier", 1.0)]
    positive = all(isinstance(one, int | float) and 0 < one < math.inf for one in numbers)
    if not isinstance(name, str) or set(asked) != expected.get(name) or not positive:
        raise ConfigError(
            f"the controller asks for privacy {str(name)[:100]!r} with the options {', '.join(asked)[:200]}: expected "
            f"{' or '.join(expected)}, with positive numbers. Use the same version of gradbus on both"
        )
    noise = float(asked.get("noise_multiplier", 0.0))
    return ClientPrivacy(
        clip_norm=float(asked["clip_norm"]), noise_multiplier=noise, adaptive=asked.get("adaptive") is True
    )
