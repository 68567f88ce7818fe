"""What tests of your own classes use: ``from gradbus.testing import check_codec``."""

from __future__ import annotations

from gradbus.runtime.testing.codec_conformance import check_codec

__all__ = ["check_codec"]
