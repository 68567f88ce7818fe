"""Whether this torch can have gradbus.torch. Every test that needs it asks here, and is skipped on an older torch."""

from __future__ import annotations

import importlib

import pytest


def _reason_against() -> str:
    try:
        importlib.import_module("gradbus.torch")
    except ImportError as error:
        return str(error)
    return ""


WHY_NOT = _reason_against()  # empty: it can
HAS_TORCH_BACKEND = not WHY_NOT
needs_torch_backend = pytest.mark.skipif(not HAS_TORCH_BACKEND, reason=WHY_NOT)


def require_torch_backend() -> None:
    """Skip the running test where this torch cannot have the backend."""
    if not HAS_TORCH_BACKEND:
        pytest.skip(WHY_NOT)
