"""Federated learning with Lightning's Trainer: ``from gradbus.lightning import FederatedCallback``."""

from __future__ import annotations

from gradbus.runtime.needs import explain

try:
    from gradbus.actors.trainers.lightning_callback import LightningCallback as FederatedCallback
except Exception as error:
    if text := explain(error):
        raise ImportError(f"gradbus.lightning: {text}", name=getattr(error, "name", None)) from None
    raise

__all__ = ["FederatedCallback"]
