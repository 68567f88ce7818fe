"""What a client's training rule of your own inherits and is given: ``from gradbus.rules import ClientRule``."""

from __future__ import annotations

from gradbus.actors.federated.client.rules.base import ClientRule, PersonalTraining, RoundEnd, RoundStart
from gradbus.runtime.choices import Options

__all__ = ["ClientRule", "Options", "PersonalTraining", "RoundEnd", "RoundStart"]
