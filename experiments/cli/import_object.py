"""The import path of the commands, for a user's own code that a configuration names."""

from __future__ import annotations

import os
import sys


def add_current_directory_to_path() -> None:
    """Put the current directory on the import path, behind everything that is installed.

    Never in front, where ``python -m`` puts it: a folder ``codecs`` or ``models`` in it would hide modules that others
    mean.
    """
    here = os.getcwd()
    sys.path[:] = [entry for entry in sys.path if entry not in ("", here)] + [here]
