"""What a controller says first, for people: whom its run trusts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gradbus.commands.files import ClientFile, ControllerFile
from gradbus.commands.run.federated import run_client, run_controller
from gradbus.commands.rundir.directory import ControllerDirectory

pytestmark = pytest.mark.slow
TASK = {"task": "golden_task:GoldenTask", "threads": 1}


@pytest.mark.parametrize(
    ("trust", "line"),
    [
        ("cooperative", "job trusted: trust is cooperative, so what clients announce is believed"),
        (
            "adversarial",
            "job trusted: trust is adversarial, so weights and norms of updates are bounded by what is typical",
        ),
    ],
)
def test_the_first_line_says_whom_the_run_trusts(trust: str, line: str, domain: int, tmp_path: Path) -> None:
    bus, said = {"job": "trusted", "domain": domain}, []
    rules = {"rounds": 1, "clients": {"num": 2, "min": 2}, "limits": {"trust": trust}}
    controller = ControllerFile.model_validate({"bus": bus, "task": TASK, "federated": rules})
    client = ClientFile.model_validate({"bus": bus, "task": TASK})

    async def main() -> None:
        with ControllerDirectory(tmp_path / "run") as run:
            async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
                group.create_task(run_controller(controller, run, say=said.append))
                for client_id in range(2):
                    group.create_task(run_client(client, client_id))

    with capture_logs() as logged:
        asyncio.run(main())
    assert said[0] == line
    (event,) = (entry for entry in logged if "trust" in entry)
    assert (event["event"], event["job"], event["trust"]) == ("run starts", "trusted", trust)
