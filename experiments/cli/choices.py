"""Options of the command line that take one of a few words. Importing this costs nothing."""

from __future__ import annotations

from enum import StrEnum


class CodecChoice(StrEnum):
    """How vectors become bytes; see docs/codecs.md."""

    FP32 = "fp32"
    Q8 = "q8"
    S4 = "s4"
    SQ8 = "sq8"


class NetworkChoice(StrEnum):
    """Network profiles; see gradbus.runtime.dds.network."""

    LOOPBACK = "loopback"
    NETWORK = "network"


class FileFormat(StrEnum):
    """Of a model that is exported."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


class LoopName(StrEnum):
    """Which event loop runs a command."""

    UVLOOP = "uvloop"
    ASYNCIO = "asyncio"


class LogStyle(StrEnum):
    """How log lines look."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """What is worth a log line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
