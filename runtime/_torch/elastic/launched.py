"""How this process was started, as the environment says it: with members that come and go, or with fixed ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from gradbus.runtime.collectives.generations import ElasticLimits
from gradbus.runtime.config.data_parallel import ElasticSettings
from gradbus.runtime.config.settings import Duration, Settings, load_settings
from gradbus.runtime.errors import ConfigError

_PREFIX = "GRADBUS_ELASTIC__"


class ScriptElasticSettings(ElasticSettings):
    """Settings of an elastic script, each as ``GRADBUS_ELASTIC__MIN_WORLD=1`` and so on in the environment."""

    join: bool = False
    """This process joins a run that goes on, with a RANK that no running process has."""
    collective_s: Annotated[Duration, Field(gt=0)] = 300.0
    """Deadline of a collective, in seconds: a rank that does not make it is left out of the next generation."""


class _Environment(Settings):
    elastic: ScriptElasticSettings = Field(default_factory=ScriptElasticSettings)


@dataclass(frozen=True, slots=True)
class MemberPlace:
    """A process whose ranks come and go.

    Attributes:
        number: of this process, which no other running one has. founders: processes that begin together; 0: it joins.
    """

    number: int
    founders: int
    limits: ElasticLimits


def member_place(environment: Mapping[str, str] = os.environ) -> MemberPlace | None:
    """Return the place of this process in an elastic run; None: ranks are fixed as long as the process lives.

    Raises:
        ConfigError: the environment does not fit together.
    """
    settings = load_settings(
        _Environment, environment={name: text for name, text in environment.items() if name.startswith(_PREFIX)}
    ).elastic
    if not settings.is_on:
        return None
    if "TORCHELASTIC_RUN_ID" in environment:
        raise ConfigError(
            f"{_PREFIX}MIN_WORLD is set, and torchrun has started this process, which starts all ranks again when one "
            f"has died. Start the script with 'gradbus run --elastic MIN:MAX -- train.py', or unset the variable"
        )
    number, world = (_whole(environment, name) for name in ("RANK", "WORLD_SIZE"))
    limits = ElasticLimits(
        min_world=settings.min_world,
        max_world=settings.max_world,
        wait_s=settings.wait_s,
        collective_s=settings.collective_s,
        last_call_s=float("inf") if settings.last_call_s is None else settings.last_call_s,
    )
    return MemberPlace(number, 0 if settings.join else world, limits)


def _whole(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ConfigError(
            f"an elastic script needs {name} in the environment, a whole number, got {text!r}: start it with "
            f"'gradbus run --elastic MIN:MAX -- train.py', which sets it, or set it for each process"
        )
    return int(text)
