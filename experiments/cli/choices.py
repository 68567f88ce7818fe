"""Options of the command line that take one of a few words.

Each table is defined where the words are used. These modules load torch or pydantic, which ``--help`` and completion
must not wait for: so the words stand here once more, and tests/experiments/test_command_line.py compares the two.
"""

from __future__ import annotations

from enum import StrEnum


class CodecChoice(StrEnum):
    """Codecs, as in ``gradbus.codecs.ALL``."""

    FP32 = "fp32"
    Q8 = "q8"
    S4 = "s4"
    SQ8 = "sq8"


class NetworkChoice(StrEnum):
    """Network profiles, as ``bus.network`` has them."""

    LOOPBACK = "loopback"
    NETWORK = "network"


class FileFormat(StrEnum):
    """Formats of an exported model, as in ``experiments/rundir/export.py``."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


class FileKind(StrEnum):
    """Commands that read a configuration, as in ``experiments/settings_reference.py``."""

    CONTROLLER = "controller"
    CLIENT = "client"
    WORKER = "worker"


class LoopName(StrEnum):
    """Event loops."""

    UVLOOP = "uvloop"
    ASYNCIO = "asyncio"


class LogStyle(StrEnum):
    """Styles of log lines, as in ``gradbus.runtime.logs.configure``."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least important level that gets a log line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


# Options that take other texts besides, such as package.module:attribute.
DATA_HELP = "mnist, glyphs, auto, or package.module:attribute."
PARTITION_HELP = "iid, dirichlet:ALPHA, shards, by_label, or JSON."
ROLE_HELP = "client, observer, controller or worker; see docs/security.md."
