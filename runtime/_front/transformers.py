"""Federated learning with Hugging Face's Trainer: ``from gradbus.transformers import FederatedCallback``."""

from __future__ import annotations

from gradbus.runtime.needs import explain

try:
    from gradbus.actors.trainers.transformers_callback import TransformersCallback as FederatedCallback
except Exception as error:
    if text := explain(error):
        raise ImportError(f"gradbus.transformers: {text}", name=getattr(error, "name", None)) from None
    raise

__all__ = ["FederatedCallback"]
