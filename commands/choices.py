"""Values of the options that take one of a few.

Each table is defined where the values are used, in modules that load torch or pydantic, which ``--help`` and completion
must not wait for: so they stand here once more, and tests/commands/test_command_line.py compares the two.
"""

from __future__ import annotations

from typing import Literal

CodecName = Literal["fp32", "loco", "q2", "q4", "q8", "s4", "sq8"]
Network = Literal["loopback", "network"]
FileFormat = Literal["safetensors", "torch"]
FileKind = Literal["controller", "client", "worker", "aggregator", "relay"]
BindMode = Literal["auto", "cores", "network", "none"]
LoopName = Literal["uvloop", "asyncio"]
LogStyle = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Options that take other texts besides, such as package.module:attribute.
DATA_HELP = "mnist, glyphs, auto, or package.module:attribute."
PARTITION_HELP = "iid, dirichlet:ALPHA, quantity:ALPHA, shards, by_label, feature, natural, or JSON."
ROLE_HELP = "client, observer, controller or worker; see docs/security.md."
