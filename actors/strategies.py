"""Which strategy the configuration names, and the limits in front of it."""

from __future__ import annotations

from gradbus.actors.limits import Limited
from gradbus.actors.robust import CoordinateMedian, Krum, MultiKrum, TrimmedMean
from gradbus.actors.strategy import FedAdam, FedAvg, FedAvgM, Strategy
from gradbus.runtime.settings import FederatedConfig


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
    """The strategy, behind the limits that the configuration sets, if it sets any."""
    if config.clip_norm is None and config.cap_samples is None:
        return strategy
    return Limited(strategy, clip_norm=config.clip_norm, cap_samples=config.cap_samples)
