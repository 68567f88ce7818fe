"""The choices of the command line are those of the program, and a shell can complete them."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from gradbus import codecs
from gradbus.commands import choices
from gradbus.commands.rundir.export import Format
from gradbus.models import partition
from gradbus.models.data_sets import SourceName
from gradbus.runtime import logs
from gradbus.runtime.choices import CODECS
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.security.identity.allow_list import ROLES

LEVELS = [name.lower() for name in logging.getLevelNamesMapping()]


@pytest.mark.parametrize(
    ("words", "table"),
    [
        (choices.CodecName, codecs.ALL),
        (choices.CodecName, CODECS.table),
        (choices.Network, get_args(BusSettings.model_fields["network"].annotation)),
        (choices.FileFormat, get_args(Format)),
        (choices.LogStyle, get_args(get_type_hints(logs.configure)["style"])),
    ],
)
def test_the_words_that_an_option_takes_are_those_of_the_table_that_defines_them(
    words: Any, table: Iterable[str]
) -> None:
    assert list(get_args(words)) == list(table)


def test_log_levels_are_levels_of_logging() -> None:
    assert set(get_args(choices.LogLevel)) <= set(LEVELS)
    assert inspect.signature(logs.configure).parameters["level"].default in get_args(choices.LogLevel)


@pytest.mark.parametrize(
    ("text", "table"),
    [
        (choices.DATA_HELP, get_args(SourceName)),
        (choices.PARTITION_HELP, partition.KINDS),
        (choices.ROLE_HELP, ROLES),
    ],
)
def test_the_help_of_an_option_names_all_that_its_table_has(text: str, table: Iterable[str]) -> None:
    named = re.findall(r"\w+", re.split(r",? or JSON|, or package|;", text)[0])
    assert sorted(set(named) - {"or", "ALPHA"}) == sorted(table)


def shell(line: str, *, shell: str = "complete_bash", **more: str) -> subprocess.CompletedProcess[str]:
    """What ``gradbus`` answers a shell in which this line is being typed."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)} if line else {}
    environment = {**os.environ, "_GRADBUS_COMPLETE": shell, **words, **more}
    return subprocess.run(
        [Path(sys.executable).parent / "gradbus"], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gradbus wo", ["worker"]),
        ("gradbus keys a", ["allow"]),
        ("gradbus demo --codec s", ["s4", "sq8"]),
        ("gradbus doctor --net", ["--network"]),
    ],
)
def test_a_shell_completes_commands_options_and_their_values(line: str, expected: list[str]) -> None:
    assert shell(line).stdout.split() == expected


def test_the_script_for_a_shell_asks_gradbus() -> None:
    script = shell("", shell="source_bash").stdout
    assert "_GRADBUS_COMPLETE=complete_bash" in script
    assert script.rstrip().endswith(" gradbus")


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["no-such-command"], 2)])
def test_a_command_ends_without_the_teardown_and_with_its_code_output_and_exit_functions(
    arguments: list[str], code: int
) -> None:
    program = (
        "import atexit, sys, threading, time\n"
        "from gradbus.__main__ import main\n"
        "class Torn:\n"
        "    def __del__(self): print('torn down')\n"
        "sys.torn = [Torn()]; sys.torn.append(sys.torn)\n"
        "atexit.register(print, 'exit function')\n"
        "threading.Thread(target=lambda: (time.sleep(1.5), print('thread'))).start()\n"
        f"sys.argv = ['gradbus', *{arguments}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stdout.endswith("thread\nexit function\n")  # a pipe, which is not written to line by line
    assert ("gradbus" in done.stdout) == (code == 0)
