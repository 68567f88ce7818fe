"""Which strategy the configuration names, and the limits in front of it."""

from __future__ import annotations

from gradbus.actors.aggregation.clipping import Limited
from gradbus.actors.aggregation.robust import CoordinateMedian, Krum, MultiKrum, TrimmedMean
from gradbus.actors.aggregation.sample_cap import SampleCap
from gradbus.actors.aggregation.strategy import FedAdam, FedAvg, FedAvgM, Strategy
from gradbus.runtime.config.federated import FederatedConfig


def make_strategy(config: FederatedConfig, dim: int) -> Strategy:
    """The strategy that the configuration names."""
    f, budget_bytes = config.byzantine, config.robust_budget_bytes
    match config.strategy:
        case "fedavg":
            return FedAvg(dim)
        case "fedavgm":
            return FedAvgM(dim, lr=config.server_lr, momentum=config.server_momentum)
        case "fedadam":
            return FedAdam(
                dim, lr=config.server_lr, beta1=config.server_momentum, beta2=config.server_beta2, tau=config.server_tau
            )
        case "median":
            return CoordinateMedian(dim, byzantine=f, budget_bytes=budget_bytes)
        case "trimmed_mean":
            return TrimmedMean(dim, byzantine=f, budget_bytes=budget_bytes)
        case "krum":
            return Krum(dim, byzantine=f, budget_bytes=budget_bytes)
        case "multi_krum":
            return MultiKrum(dim, byzantine=f, keep=config.krum_keep, budget_bytes=budget_bytes)


def within_limits(strategy: Strategy, config: FederatedConfig) -> Strategy:
    """The strategy, behind the limits that the configuration sets, if it sets any. A cap on samples that goes by the
    median is the intake's business: see :func:`sample_cap`."""
    fixed = None if config.cap_samples == "median" else config.cap_samples
    if config.clip_norm is None and fixed is None:
        return strategy
    return Limited(strategy, clip_norm=config.clip_norm, cap_samples=fixed)


def sample_cap(strategy: Strategy, config: FederatedConfig) -> SampleCap:
    """The cap on samples that goes by the median, where it is set and the strategy weighs samples at all."""
    by_median = config.cap_samples == "median" and strategy.weighs_samples
    return SampleCap(config.cap_times_median if by_median else None)
