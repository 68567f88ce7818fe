"""Mechanisms of differential privacy in front of a strategy: who adds noise, how much, and when the budget is spent.

What is protected is all that one client sends in a run: the models that a run publishes tell little about whether its
updates were those or zeros (zero-out adjacency: Kairouz et al., Practical and Private (Deep) Learning without Sampling
or Shuffling, ICML 2021, Definition 2.1). Who took part is no secret. docs/privacy.md tells what that means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradbus.actors.aggregation.clipping import norm_of
from gradbus.actors.aggregation.partial_sum import FRACTION_BITS, PartialSum
from gradbus.actors.aggregation.strategies import Strategy, WrappedStrategy, summing_strategies
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.privacy.accountant import Ledger, noise_for
from gradbus.actors.privacy.discrete_gaussian import MAX_SIGMA, discrete_gaussian, keystream
from gradbus.runtime.choices import CLIENT_RULES, CODECS, PRIVACY, SELECTORS, Options
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.config.settings import Positive
from gradbus.runtime.errors import CheckpointError, ConfigError

LEDGER, CLIP_NORM = "privacy_ledger", "privacy_clip_norm"  # tensors of a checkpoint
WITHIN = "privacy.within"  # the metric of an update: 1 if its norm was within the bound before it was clipped, else 0
_LEAST_CLIP = 1e-6
_SUM_BITS = 16  # of the count of updates within the bound: units of 2^-16


def grid_sigma(noise_multiplier: float, distance: float, dim: int, *, roundings: int = 1) -> int:
    """The standard deviation of noise on a sum of integers, in units of 2^-30, rounded up.

    Args:
        noise_multiplier: the multiple of the sensitivity. distance: how far two sums may be apart, in L2 norm, before
            each value is rounded to the grid, which adds up to ``sqrt(dim) / 2`` for each of the ``roundings``.

    Raises:
        ConfigError: it is beyond what can be sampled.
    """
    # A norm in float64 of so many values may be too small by this share.
    apart = distance * (1 + dim * 2.0**-52) * 2.0**FRACTION_BITS + roundings * math.sqrt(dim) / 2
    sigma = math.ceil(noise_multiplier * apart * (1 + 2.0**-50))
    if sigma > MAX_SIGMA:
        raise ConfigError(
            f"federated.privacy: noise of {noise_multiplier:g} times {distance:g} is beyond "
            f"{MAX_SIGMA / 2.0**FRACTION_BITS:g}, the largest there is. Lower clip_norm or noise_multiplier"
        )
    return sigma


class PrivacyOptions(Options):
    """Options that all mechanisms have."""

    clip_norm: Positive = 1.0
    """L2 norm to which a client scales down a larger update. The noise is in proportion to it."""
    noise_multiplier: Annotated[float, Field(ge=0.01, le=1e6)] | None = None
    """Standard deviation of the noise in each value, as a multiple of what one client can change. null: the least with
    which all rounds stay within `epsilon`."""
    epsilon: Positive | None = None
    """Budget: the run ends before the round that would exceed it. null: none."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Delta of the guarantee; much less than one over the number of clients."""

    @model_validator(mode="after")
    def _says_how_much(self) -> PrivacyOptions:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError("expected noise_multiplier, epsilon, or both: how much noise there has to be")
        return self


class NoPrivacy:
    """No noise."""

    choice = "none"


class _Private(WrappedStrategy):
    """Holds what the mechanisms have in common: the ledger, and what they cannot work with."""

    def __init__(self, inner: Strategy, config: FederatedConfig, options: Mapping[str, Any]) -> None:
        """Raises ConfigError: the budget does not suffice for a single round, or there is no accountant."""
        super().__init__(inner)
        self._ledger = Ledger(options["delta"])
        self.epsilon_budget = options["epsilon"]
        self._clip_norm: float = options["clip_norm"]
        given = options["noise_multiplier"]
        self._noise: float = given or noise_for(self.epsilon_budget or math.inf, self._ledger.delta, config.rounds)
        self._shapes: Sequence[Sequence[int]] = ()
        self._dim = 0
        self._base: Tensor | None = None
        if (reason := self.end_reason()) and not self._ledger.rounds:
            raise ConfigError(f"federated.privacy: {reason}. Allow more, or add more noise")

    @property
    def epsilon(self) -> float:  # type: ignore[override]
        return self._ledger.epsilon()

    def end_reason(self) -> str:
        if self.epsilon_budget is None or (after := self._ledger.epsilon_with(self._noise)) <= self.epsilon_budget:
            return self._inner.end_reason()
        return (
            f"the privacy budget is spent: epsilon is {self.epsilon:.4g} after {self._ledger.rounds} rounds, one more "
            f"would make it {after:.4g}, and {self.epsilon_budget:g} is allowed"
        )

    def lay_out(self, shapes: Sequence[Sequence[int]]) -> None:
        self._dim = sum(math.prod(shape) for shape in shapes)
        super().lay_out(shapes)

    def check(self, config: FederatedConfig) -> None:
        if config.mode == "asynchronous":
            raise ConfigError(
                "federated.privacy: in asynchronous rounds a client may count several times in a model, and their "
                "number is not known beforehand. Use mode = synchronous"
            )
        if config.clients.kind == "sites":
            raise ConfigError(
                "federated.privacy: sites send sums, in which the updates of single clients cannot be bounded. Let the "
                "clients take part themselves"
            )
        if self.sections:
            raise ConfigError(
                f"federated.privacy: strategy {self.name} takes {', '.join(self.sections)} beside the model, which no "
                f"noise is added to. Use another strategy, such as fedavg"
            )
        super().check(config)

    def begin(self, round_id: int, base: Tensor) -> None:
        self._base = base
        super().begin(round_id, base)

    def finish(self, weights: Tensor) -> None:
        super().finish(weights)
        self._ledger.spend(self._noise)

    def undone(self, rounds: int) -> None:
        """Their models have gone out, and another release follows for each: both are spent."""
        for _ in range(rounds):
            self._ledger.spend(self._noise)
        super().undone(rounds)

    def _norm(self, update: Update) -> float:
        assert self._base is not None, "begin() comes first"
        return norm_of(update.model, self._base)

    def state(self) -> Mapping[str, Tensor]:
        return {**super().state(), LEDGER: self._ledger.state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        if LEDGER not in state:
            raise CheckpointError(
                "the checkpoint was made without federated.privacy: its models have no noise, and no later round can "
                "give them some. Start afresh in another state directory"
            )
        super().load_state(state)
        self._ledger.load_state(state[LEDGER])


class CentralOptions(PrivacyOptions):
    """Options of noise at the controller."""

    target_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the updates that are to be within the bound: it follows them from round to round, and `clip_norm` is the
    first one. null: the bound stays."""
    clip_lr: Positive = 0.2
    """How fast the bound follows them, with `target_quantile`."""
    count_noise: Positive | None = None
    """Standard deviation of the noise on the number of updates within the bound, with `target_quantile`. null: a
    twentieth of `clients.num`, and at least `noise_multiplier`."""


class CentralPrivacy(_Private):
    """The clients clip, and the controller adds noise to the exact sum of their updates.

    McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018 (arXiv:1710.06963), with
    ``target_quantile`` the adaptive bound of Andrew et al., Differentially Private Learning with Adaptive Clipping,
    NeurIPS 2021 (arXiv:1905.03871), Algorithm 1. Differs from the papers: all clients that take part are accounted for
    in every round; the noise is an integer, added to the exact sum of integers before that becomes floating point.
    """

    choice = "central"
    Options = CentralOptions

    def __init__(self, inner: Strategy, config: FederatedConfig, **options: Any) -> None:
        super().__init__(inner, config, options)
        self.weighs_samples = False
        self._target: float | None = options["target_quantile"]
        self._clip_lr: float = options["clip_lr"]
        self._of_values = self._noise
        self._count_noise = 0.0
        self._within = self._count = 0
        if self._target is not None:
            self._count_noise = options["count_noise"] or max((config.clients.num or 0) / 20, self._noise)
            # Both together are one release of the whole multiplier: Andrew et al., Theorem 1.
            rest = self._noise**-2 - (2 * self._count_noise) ** -2
            if rest <= 0:
                raise ConfigError(
                    f"federated.privacy.count_noise is {self._count_noise:g}: expected more than half of the noise "
                    f"multiplier, {self._noise:g}, or nothing of the budget is left for the updates"
                )
            self._of_values = rest**-0.5
        self._hold(self._clip_norm)

    def _hold(self, clip_norm: float) -> None:
        """Set the bound to a float32, as the clients get it."""
        self._bound = torch.tensor([clip_norm], dtype=torch.float32)
        self._clip_norm = float(self._bound)

    def _sigma(self) -> int:
        return grid_sigma(self._of_values, self._clip_norm, self._dim)

    def check(self, config: FederatedConfig) -> None:
        if not self.adds_sums and not self.sections:
            raise ConfigError(
                f"federated.privacy: strategy {self.name} is no mean of the updates, so how far one client moves the "
                f"model is not known. Use {summing_strategies()}"
            )
        codec = CODECS.make(config.codec)
        if not codec.lossless or codec.version != 2:
            raise ConfigError(
                f"federated.codec is {codec.name} of version {codec.version}: what its residual or its rounding adds "
                f"may exceed privacy.clip_norm, by which an update is refused. Use fp32 of version 2, or "
                f"privacy.name = local"
            )
        if config.limits.clip_norm is not None:
            raise ConfigError("federated.limits.clip_norm: privacy.clip_norm is the bound here. Leave the other out")
        if SELECTORS.find(config.selection.name).reads_updates:
            raise ConfigError(
                f"federated.selection is {config.selection.name}, which chooses by the samples or losses of the "
                f"clients: their data would change who takes part, and so the models, without noise. Use uniform or "
                f"round_robin, or a selector of your own with reads_updates = False"
            )
        super().check(config)
        if config.history.payloads:
            raise ConfigError(
                "federated.history.payloads: the journal would keep all updates without noise, and no round could be "
                "computed again from them. Leave it out with federated.privacy"
            )
        self._sigma()

    def terms(self) -> Mapping[str, Any]:
        return {
            **super().terms(),
            "privacy.name": self.choice,
            "privacy.clip_norm": self._clip_norm,
            "privacy.adaptive": self._target is not None,
        }

    def broadcast(self) -> Tensor | None:
        return None if self._target is None else self._bound

    def begin(self, round_id: int, base: Tensor) -> None:
        self._within = self._count = 0
        super().begin(round_id, base)

    def weights(self, facts: Facts) -> tuple[float, ...]:
        return ()  # see add()

    def add(self, update: Update, facts: Facts) -> None:
        norm = self._norm(update)
        if not norm <= self._clip_norm:
            raise ValueError(f"update of norm {norm:.9g}: its client had to clip it to {self._clip_norm:.9g}")
        within = facts.metrics.get(WITHIN) if self._target is not None else 0
        if within not in (0, 1):
            raise ValueError(f"metric {WITHIN} is {within}: expected 0 or 1, whether its norm was within the bound")
        # Equal weights: with samples as weights, one client could change the sum by as many times the bound.
        super().add(update, Facts(client_id=facts.client_id, num_samples=1, round_id=facts.round_id))
        self._within += int(within)
        self._count += 1

    def add_masked(self, partial: PartialSum, facts: Sequence[Facts]) -> None:
        """The clients have clipped their updates, which nobody can check: see docs/secure-aggregation.md."""
        super().add_masked(partial, facts)
        if self._target is not None:
            self._within += sum(one.metrics.get(WITHIN) == 1 for one in facts)
        self._count += len(facts)

    def finish(self, weights: Tensor) -> None:
        stream, sigma = keystream(), self._sigma()
        self.add_noise(lambda size: torch.from_numpy(discrete_gaussian(size, sigma, stream)))
        super().finish(weights)
        if self._target is None:
            return
        # Of 1/2 for each within and -1/2 for each beyond, in units of 2^-16: sensitivity 1/2, whatever the client says.
        sigma = math.ceil(self._count_noise * 2**_SUM_BITS)
        noise = int(discrete_gaussian(1, sigma, stream)[0])
        halves = (2 * self._within - self._count) * 2 ** (_SUM_BITS - 1) + noise
        share = halves / 2**_SUM_BITS / self._count + 0.5
        most = (MAX_SIGMA / 2.0**FRACTION_BITS / self._of_values) / 2
        moved = self._clip_norm * math.exp(max(-50.0, min(50.0, -self._clip_lr * (share - self._target))))
        self._hold(min(max(moved, _LEAST_CLIP), most))

    def state(self) -> Mapping[str, Tensor]:
        return super().state() if self._target is None else {**super().state(), CLIP_NORM: self._bound}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        bound = state.get(CLIP_NORM)
        if self._target is not None and bound is not None:
            if bound.shape != (1,) or not 0 < float(bound) < math.inf:
                raise CheckpointError(f"the checkpoint's {CLIP_NORM} is damaged: expected one positive number")
            self._hold(float(bound))


class LocalPrivacy(_Private):
    """Each client clips its update and adds noise to it, so that nobody else has to be trusted.

    Differs from the central one in what is protected: any two updates of a client are hard to tell apart, in the
    messages as well, so the noise is for twice the bound.
    """

    choice = "local"
    Options = PrivacyOptions

    def __init__(self, inner: Strategy, config: FederatedConfig, **options: Any) -> None:
        super().__init__(inner, config, options)
        self._most = math.inf

    def check(self, config: FederatedConfig) -> None:
        super().check(config)
        rule = CLIENT_RULES.find(config.training.rule.name)
        if sent := (*rule.sections, *rule.metrics):
            raise ConfigError(
                f"federated.training.rule is {config.training.rule.name}, which sends {', '.join(sent)} without noise. "
                f"Use a rule that sends the model alone, such as plain or fedprox"
            )
        if self.uses_steps:
            raise ConfigError(
                f"federated.privacy: strategy {self.name} needs the number of steps of each client, which tells how "
                f"much data it has, and is not sent with privacy.name = local. Use another strategy"
            )
        sigma = grid_sigma(self._noise, 2 * self._clip_norm, self._dim, roundings=2) / 2.0**FRACTION_BITS
        if CODECS.make(config.codec).lossless:  # the residual of another one makes updates longer
            self._most = self._clip_norm + sigma * (math.sqrt(self._dim) + 8)  # exceeded with less than e^-32

    def terms(self) -> Mapping[str, Any]:
        return {
            **super().terms(),
            "privacy.name": self.choice,
            "privacy.clip_norm": self._clip_norm,
            "privacy.noise_multiplier": self._noise,
        }

    def add(self, update: Update, facts: Facts) -> None:
        if self._most < math.inf and not (norm := self._norm(update)) <= self._most:
            raise ValueError(f"update of norm {norm:.4g}: with its noise at most {self._most:.4g} is to be expected")
        super().add(update, facts)


def with_privacy(strategy: Strategy, config: FederatedConfig) -> Strategy:
    """The strategy behind the mechanism that is configured. Raises ConfigError: it cannot work."""
    if config.privacy.name == NoPrivacy.choice:
        return strategy
    private: Strategy = PRIVACY.make(config.privacy, strategy, config)
    return private
