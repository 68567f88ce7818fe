"""The rules of a site: which of them the level above decides, and which a site may have of its own."""

from __future__ import annotations

from typing import Any

from gradbus.actors.federated.model.sharing import REST, Sharing
from gradbus.runtime.choices import SELECTORS
from gradbus.runtime.config.federated import FederatedConfig, UpstreamConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import Welcome

FROM_ABOVE = {"rounds", "seed", "training", "codec", "exchange", "share", "buffers", "early_stop", "callbacks"}
"""The settings that at a site are those of the level above."""
ENDLESS = 1_000_000  # rounds: the level above ends the run

log = get_logger("site")


def site_config(config: FederatedConfig, upstream: UpstreamConfig, welcome: Welcome) -> FederatedConfig:
    """The rules of a site, with what the level above decides.

    Raises:
        ConfigError: a round of the site could end too late for that level.
    """
    own, share = config.round.timeout_s, upstream.deadline_share
    due_s = welcome.round_s * share
    if welcome.round_s and "timeout_s" in config.round.model_fields_set:
        if own > due_s:
            raise ConfigError(
                f"federated.round.timeout_s is {own:g} s, and a round of the level above ends after "
                f"{welcome.round_s:g} s, of which this site may take {share:g} (upstream.deadline_share): set at "
                f"most {due_s:g} s, or leave it out"
            )
        due_s = own
    due_s = due_s or own
    log.info("round deadlines", above_s=welcome.round_s, here_s=due_s)
    config = config.replaced("round.timeout_s", due_s).replaced("rounds", ENDLESS)
    sharing = Sharing.of_welcome(welcome)
    config = config.replaced("exchange", sharing.exchange).replaced("share", sharing.settings())
    # Where this site masks, only buffers for which the level above has named a rule are shown to it.
    masks = config.secure_aggregation.enabled
    return config.replaced(
        "buffers", {pattern: rule for pattern, rule in sharing.buffers if pattern != REST or not masks}
    )


def not_its_own(config: FederatedConfig) -> dict[str, Any]:
    """What of a site's settings the level above decides, as ``exclude`` of a pydantic model: the rest, written down, is
    a configuration that a site starts with."""
    of_round = {"timeout_s"} - config.round.model_fields_set
    return {**dict.fromkeys(FROM_ABOVE, True), "round": of_round}


def check_site(config: FederatedConfig, upstream: UpstreamConfig) -> None:
    """Raises ConfigError: these rules are not for a site."""
    if upstream.site is None:
        raise ConfigError("upstream.site is missing: each site of a level has a number of its own")
    if given := sorted(config.model_fields_set & FROM_ABOVE):
        raise ConfigError(
            f"federated.{', federated.'.join(given)}: at a site, the level above decides this. Set it at the top "
            f"level, and leave it out here"
        )
    if config.mode != "synchronous":
        raise ConfigError(
            f"federated.mode is {config.mode}: the sum of a site is of one round of the level above, and updates from "
            f"older models cannot be in it. Leave it out here"
        )
    if config.strategy.name != "fedavg" or config.strategy.options:
        raise ConfigError(
            f"federated.strategy is {config.strategy.name}: a site adds up exact sums, and the strategy is that of the "
            f"top level. One that needs single updates, such as a median, cannot be had of sums. Leave it out here"
        )
    if config.privacy.name != "none":
        raise ConfigError(
            f"federated.privacy is {config.privacy.name}: a site sends sums, and in those of several sites single "
            f"clients cannot be bounded. Leave it out here, and at the top level let the clients take part themselves"
        )
    if config.downlink_codec.name != "fp32":
        raise ConfigError(
            f"federated.downlink_codec is {config.downlink_codec.name}: a site passes models on unchanged. Set it at "
            f"the level above, or leave it out here"
        )
    if config.selection != SELECTORS.default:
        raise ConfigError(
            f"federated.selection ({config.selection.name}): the rounds of a site are those of the level above, and "
            f"all of its clients take part. Leave it out here"
        )
    if config.evaluation.is_on:
        raise ConfigError(
            "federated.evaluation: the rounds of a site are those of the level above, whose deadline leaves no time to "
            "evaluate. Leave it out in trees; the Controller of the top level evaluates on its own data (eval_every)"
        )
    if config.checkpoint.keep_best is not None:
        raise ConfigError(
            "federated.checkpoint.keep_best: the models of a site are those of the level above. Set it at the top level"
        )
    if config.history.payloads:
        raise ConfigError("federated.history.payloads: the rounds of a site cannot be computed again from its updates")
    if upstream.alone and config.checkpoint.dir is None:
        raise ConfigError("upstream.alone needs federated.checkpoint.dir, where the rounds alone are kept")
