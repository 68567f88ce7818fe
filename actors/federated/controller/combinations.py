"""Which choices of a federated run work together: decided from its settings alone, before there are data or a model.

``gradbus matrix`` prints what is decided here for every pair of choices.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace
from typing import Any

from gradbus.actors.aggregation.bounded_strategy import bounded
from gradbus.actors.aggregation.clipping import within_limits
from gradbus.actors.aggregation.grid_steps import MASKED_CODECS, on_common_grid
from gradbus.actors.aggregation.strategies import Strategy, summing_strategies
from gradbus.actors.federated.chosen_codecs import RunCodecs, make_codecs
from gradbus.actors.federated.controller.asynchronous import check_asynchronous
from gradbus.actors.federated.controller.clients import MAX_MEMBERS as MAX_CLIENTS
from gradbus.actors.federated.controller.selection import check_selection
from gradbus.actors.federated.controller.selectors.base import Selector, make_selector
from gradbus.actors.privacy.mechanisms import with_privacy
from gradbus.actors.secure_aggregation.keys import MAX_MEMBERS, MIN_MEMBERS
from gradbus.runtime.choices import CLIENT_RULES, CLIENT_SCHEDULES, STRATEGIES
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedChoices:
    """The settings of a run, checked, and what they name. A Controller that gets them checks and makes nothing of this
    again.

    Attributes:
        codecs, selector: that the settings name.
        fits_strategy: whether the strategy was found to work with all other choices.
    """

    config: FederatedConfig
    codecs: RunCodecs
    selector: Selector
    fits_strategy: bool = False
    # Made for that, without a model. It holds the state of a run, so one run alone takes it.
    _made: list[Strategy] = field(default_factory=list)

    def take_strategy(self, dim: int) -> Strategy:
        """Return the strategy that the settings name, without limits and privacy: for one run, which lays it out.

        Args:
            dim: elements of its model, for a strategy that is not made yet.

        Raises:
            ConfigError: one of the user's own cannot be made.
        """
        return self._made.pop() if self._made else STRATEGIES.make(self.config.strategy, dim)


def check_choices(config: FederatedConfig) -> CheckedChoices:
    """Check what is configured by name, before anything starts. Built-in names were checked when settings were read.

    Raises:
        ConfigError: there is none of that name, or its options are wrong.
    """
    STRATEGIES.check_own(config.strategy)
    codecs = make_codecs(config)
    CLIENT_RULES.check_own(config.training.rule)
    CLIENT_SCHEDULES.check_own(config.training.schedule)
    selector = make_selector(config.selection)
    check_selection(config, selector)
    _check_evaluation(config)
    _check_modes(config)
    return CheckedChoices(config=config, codecs=codecs, selector=selector)


def _check_modes(config: FederatedConfig) -> None:
    """Raises ConfigError: small values are looked for of a metric of which large ones are good. Not when settings are
    read: earlier versions have written "min" down where nothing was set."""
    stop, best = config.early_stop, config.checkpoint
    for key, metric, mode in (
        ("early_stop.mode", stop.metric if stop.patience is not None else None, stop.mode),
        ("checkpoint.best_mode", best.keep_best, best.best_mode),
    ):
        if metric is not None and mode == "min" and config.mode_of(metric, None) == "max":
            raise ConfigError(
                f"federated.{key} is min, and evaluation.maximize says that large values of {metric} are good: leave "
                f"{key} out, or the metric out of evaluation.maximize"
            )


def _check_evaluation(config: FederatedConfig) -> None:
    """Raises ConfigError: the clients of such a run cannot evaluate its models."""
    if not config.evaluation.is_on:
        return
    if config.clients.kind == "sites":
        raise ConfigError(
            "federated.evaluation: with federated.clients.kind=sites this Controller reaches no client: sites forward "
            "sums of updates only. Leave it out in trees; this Controller evaluates on its own data (eval_every)"
        )
    if config.mode == "asynchronous":
        raise ConfigError(
            "federated.evaluation: with federated.mode=asynchronous clients train without a pause, and there is no "
            "model that all of them hold. Use mode=synchronous; this Controller evaluates on its own data (eval_every)"
        )
    if config.privacy.name != "none":
        raise ConfigError(
            f"federated.evaluation: metrics and models of single clients get no noise, which would undo what "
            f"federated.privacy={config.privacy.name} protects. Leave one of them out; the Controller evaluates on its "
            f"own data (eval_every)"
        )


def check_combination(config: FederatedConfig) -> CheckedChoices:
    """As :func:`check_choices`, and refuse choices that do not work together.

    A strategy of the user's own is not made for this: it may need the size of its model. The controller makes it. A
    built-in one is made here, once, and learns the size when it is laid out.

    Raises:
        ConfigError: they do not; it says why, and what to choose.
    """
    choices = check_choices(config)
    if ":" in config.strategy.name:
        return choices
    base = STRATEGIES.make(config.strategy, 1)
    strategy = make_strategy(config, 1, base)
    strategy.lay_out([[1]])
    check_strategy(choices, strategy)
    return replace(choices, fits_strategy=True, _made=[base])


def make_strategy(config: FederatedConfig, dim: int, given: Strategy | None = None) -> Strategy:
    """The strategy of a run, behind its limits and its privacy. ``given``: without these; None: it is made as well."""
    strategy: Strategy = given or STRATEGIES.make(config.strategy, dim)
    if config.secure_aggregation.enabled:
        strategy = on_common_grid(strategy, config, dim)
    if config.limits.limits_single_updates:
        strategy = within_limits(strategy, config)
    if config.privacy.name != "none":
        strategy = with_privacy(strategy, config)
    return bounded(strategy, config) if config.limits.is_adversarial else strategy


def check_strategy(choices: CheckedChoices, strategy: Strategy) -> None:
    """Raises ConfigError: the strategy, as of :func:`make_strategy`, cannot work with the other settings, or with a
    model of this size."""
    strategy.check(choices.config)
    if not choices.fits_strategy:
        _check_with_others(choices, strategy)


def _check_with_others(choices: CheckedChoices, strategy: Strategy) -> None:
    """Raises ConfigError: the strategy cannot work with the other settings, whatever the model."""
    config = choices.config
    _check_rule(config, strategy)
    if config.mode == "asynchronous":
        check_asynchronous(config, strategy)
    _check_trust(config)
    if config.secure_aggregation.enabled:
        _check_masked(config, strategy, choices.selector)
    if config.clients.kind == "sites" and not strategy.adds_sums:
        raise ConfigError(
            f"federated.strategy: {config.strategy.name} needs the updates of single clients, and sites send their "
            f"sums alone. Use {summing_strategies()}, or let the clients take part themselves"
        )


LEAST_BUFFER = 3  # updates of which one liar is not the median


def _check_trust(config: FederatedConfig) -> None:
    """Raises ConfigError: no update can be bounded by what is typical of all."""
    if not config.limits.is_adversarial:
        return
    refusals = {
        "secure_aggregation: the controller sees the sum of all updates, and neither the norm nor the weight of one. "
        "Leave one of them out; or, with trust = cooperative, set limits.cap_samples, and privacy.name = central, "
        "whose clients clip their updates themselves, and let in only clients with a key of their own":
        config.secure_aggregation.enabled,
        "clients.kind = sites: this Controller sees the sums of sites, and no update of a client. Set limits.trust = "
        "adversarial at the sites, for their clients": config.clients.kind == "sites",
        f"asynchronous.buffer is {config.asynchronous.buffer}: of fewer than {LEAST_BUFFER} updates one liar is the "
        f"median. Set it to {LEAST_BUFFER} or more": config.mode == "asynchronous"
        and config.asynchronous.buffer < LEAST_BUFFER,
    }  # fmt: skip
    for reason, holds in refusals.items():
        if holds:
            raise ConfigError(f"federated.limits.trust = adversarial with {reason}")


def _check_masked(config: FederatedConfig, strategy: Strategy, selector: Selector) -> None:
    """Raises ConfigError: with secure aggregation the Controller knows too little for this run, or cannot mask it."""
    what, asked = "federated.secure_aggregation", _asked(config, selector, config.clients.num or 0)
    settings, timeout_s = config.secure_aggregation, config.round.timeout_s
    refusals = {
        "mode = asynchronous: what is masked with others counts with them, and there no clients share a round. Use "
        "mode = synchronous": config.mode == "asynchronous",
        "clients.kind = sites: what a site sends is a sum already. Set it at the sites, for their clients":
        config.clients.kind == "sites",
        f"strategy {config.strategy.name} needs the updates of single clients, and the controller knows their sum "
        f"alone. Use {summing_strategies()}": not strategy.adds_sums
        or bool(strategy.sections),
        f"codec {config.codec.name}: its scales are of each update by itself, and masks cancel only where all clients "
        f"round to the same ones. Use fp32, or q8, s4 or sq8, which have a common scale and common positions here":
        config.codec.name not in MASKED_CODECS,
        f"codec {config.codec.name} of version 1: what is masked is a difference, in a format of its own. Leave "
        f"codec.version out": config.codec.name != "fp32" and config.codec.options.get("version", 2) == 1,
        "training.from_round has a density, and all updates of a run share positions here. Leave it out":
        bool(config.training.given_from("density")),
        "limits.clip_norm limits a single update, and the controller sees none. Leave it out, or use privacy.name = "
        "central, whose clients clip their updates themselves": config.limits.clip_norm is not None,
        "evaluation.cross_site shows the models of single clients. Leave it out": config.evaluation.cross_site,
        "history.payloads: no round can be computed again from masked updates. Leave it out": config.history.payloads,
        f"clients.min is {config.clients.min}: the sum of one update is that update. Set it to {MIN_MEMBERS} or "
        f"more": config.clients.min < MIN_MEMBERS,
        f"round.timeout_s is {timeout_s:g}: keys and shares alone may take keys_timeout_s + shares_timeout_s = "
        f"{settings.exchange_s:g} s, as long as that where a client hangs. Raise round.timeout_s, or lower these":
        timeout_s <= settings.exchange_s,
        f"{asked} clients in a round: at most {MAX_MEMBERS} can mask for each other. Ask fewer, with selection.count":
        asked > MAX_MEMBERS,
    }  # fmt: skip
    for reason, holds in refusals.items():
        if holds:
            raise ConfigError(f"{what}: {reason}")


def _asked(config: FederatedConfig, selector: Selector, count: int) -> int:
    """Return how many of so many clients a round asks."""
    return selector.asked(count, selector.wanted(count, config.clients.min))


def most_clients(choices: CheckedChoices) -> int:
    """Clients that may be in a run at once. With secure aggregation a round can ask no more than can mask for each
    other."""
    config, selector = choices.config, choices.selector
    if not config.secure_aggregation.enabled:
        return MAX_CLIENTS
    counts = range(1, MAX_CLIENTS + 1)
    return bisect.bisect_right(counts, MAX_MEMBERS, key=lambda count: _asked(config, selector, count))


def fitting_rules(strategy: Strategy) -> list[str]:
    """Names of the built-in training rules that make what a strategy takes."""
    return [name for name, rule in CLIENT_RULES.table.items() if _fits(rule, strategy)]


def _fits(rule: Any, strategy: Strategy) -> bool:
    return rule.sections == tuple(strategy.sections) and set(strategy.metrics) <= set(rule.metrics)


def _check_rule(config: FederatedConfig, strategy: Strategy) -> None:
    """Raises ConfigError: the training rule does not make what the strategy takes, or that cannot be sent."""
    chosen = config.training.rule.name
    if not _fits(CLIENT_RULES.find(chosen), strategy):
        fitting = ", ".join(fitting_rules(strategy))
        needs = ", ".join([*strategy.sections, *strategy.metrics]) or "updates of the model alone"
        raise ConfigError(
            f"federated.training.rule is {chosen!r}, and federated.strategy {strategy.name} needs {needs}: set the "
            f"rule to {fitting or 'one of your own that makes these'}, or use another strategy"
        )
    if config.section_codec.name != "fp32" and not strategy.sections:
        raise ConfigError(
            f"federated.section_codec is {config.section_codec.name}, and updates for strategy {strategy.name} hold "
            f"the model alone, whose codec is federated.codec. Leave section_codec out"
        )
    if strategy.broadcast() is not None and config.downlink_codec.name != "fp32":
        raise ConfigError(
            f"federated.downlink_codec is {config.downlink_codec.name}, and strategy {strategy.name} sends more "
            f"than the model, which may not be rounded: set it to fp32"
        )
    if config.clients.kind == "sites" and config.training.has_terms:
        raise ConfigError("federated.training.from_round: sites pass on epochs, subset_size, lr and seed alone")
