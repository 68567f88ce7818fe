"""What a selector of clients of your own inherits and is given: ``from gradbus.selectors import Selector``."""

from __future__ import annotations

from gradbus.actors.federated.controller.selectors.base import ClientFacts, Draw, Selector, SelectorOptions

__all__ = ["ClientFacts", "Draw", "Selector", "SelectorOptions"]
