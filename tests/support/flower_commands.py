"""Commands of ``gradbus`` beside each other, for an environment that has flwr and torch: ``PYTHON flower_commands.py
JSON``, lists of arguments. They are forked from this process, which has loaded what each of them would take seconds to
load. Ends with the worst of their exit codes."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys

from gradbus.commands.cli.main import main

for _name in ("apps", "hub", "node"):
    importlib.import_module(f"gradbus.actors.flower.{_name}")
importlib.import_module("torch._dynamo")  # the first optimizer of a process loads it


def run(arguments: list[str]) -> None:
    sys.argv = ["gradbus", *arguments]
    main()


if __name__ == "__main__":
    CONTEXT = multiprocessing.get_context("fork")
    COMMANDS = [CONTEXT.Process(target=run, args=[arguments]) for arguments in json.loads(sys.argv[1])]
    for COMMAND in COMMANDS:
        COMMAND.start()
    for COMMAND in COMMANDS:
        COMMAND.join()
    sys.exit(max(abs(COMMAND.exitcode or 0) for COMMAND in COMMANDS))
