"""Which bus ``gradbus status`` listens on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from gradbus.runtime.config.federated import BusSettings, Settings, load_settings
from gradbus.runtime.errors import ConfigError


class BusFile(Settings):
    """The part of any configuration that says how to reach the others; the rest is somebody else's."""

    model_config = ConfigDict(extra="ignore")

    bus: BusSettings = BusSettings()


def settings_of(config: Path | None, options: Mapping[str, Any]) -> BusSettings:
    """From, weak to strong, a configuration file, the environment, and options of the command. A key without a word of
    the level is that of the job.

    Raises:
        ConfigError: something is wrong with them, or no job is named.
    """
    overrides = [f"bus.{key}={json.dumps(value)}" for key, value in options.items()]
    settings = load_settings(BusFile, config, overrides=overrides).bus
    if "key_file" in options and settings.security in ("none", "user"):
        settings = settings.model_copy(update={"security": "psk"})
    if config is None and "job" not in options and "job" not in settings.model_fields_set:
        raise ConfigError("which job? Name it, as in: gradbus status mnist, or give its configuration with --config")
    return settings
