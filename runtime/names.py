"""Names of nodes and clients: plain ASCII that is the same in files, logs, tables, labels and on the wire."""

from __future__ import annotations

import re

from gradbus.runtime.errors import ConfigError

MAX_NAME_CHARS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_name(text: str) -> bool:
    """Return whether a text is a valid name."""
    return _NAME.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return the name of a node or a client. Raises ConfigError: it is invalid. TypeError: it is no text."""
    if not isinstance(name, str):
        raise TypeError(f"a name is a text, got {name!r:.80} ({type(name).__name__}): write it as in name='site-1'")
    if not is_name(name):
        # In ASCII, as other scripts have letters that look the same.
        length = f" ({len(name):,} characters)" if len(name) > MAX_NAME_CHARS else ""
        raise ConfigError(
            f"name {name[:80]!a}{length}: expected 1 to 64 of A-Z a-z 0-9 . _ -, starting with a letter or digit"
        )
    return name


def name_or_empty(name: str) -> str:
    """Return a valid name, or the empty text, which stands for none. Raises ValueError: it is neither."""
    if name and not is_name(name):
        raise ValueError("expected a name: 1 to 64 of A-Z a-z 0-9 . _ -, starting with a letter or digit")
    return name
