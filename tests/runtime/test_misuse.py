"""What a program does wrong with the API is told in a sentence that says what to do."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from forked_commands import Forked

import gradbus
from gradbus.runtime.bus.transport_factory import check_job
from gradbus.runtime.config import bus as bus_settings
from gradbus.runtime.config.bus import BusSettings, default_job, user_name, with_user
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.misuse import WrongKeyword, awaited

DO = r"write 'async with gradbus\.connect\(\.\.\.\) as bus:' in an async function, and use bus inside of it"


def test_connect_with_with_alone_says_how_it_is_entered() -> None:
    with (
        pytest.raises(TypeError, match=rf"gradbus\.connect\(\.\.\.\) .*'with' alone: {DO}; start that with asyncio"),
        gradbus.connect(),  # type: ignore[attr-defined]
    ):
        pass
    with (
        pytest.raises(TypeError, match=r"write 'async with gradbus\.join_group\(\.\.\.\) as group:'"),
        gradbus.join_group(None, rank=0, world=1),  # type: ignore[attr-defined, arg-type]
    ):
        pass


def test_connect_that_is_awaited_or_used_as_a_bus_says_how_it_is_entered() -> None:
    async def waits() -> None:
        await gradbus.connect()  # type: ignore[misc]

    async def uses() -> None:
        gradbus.connect().subscribe()  # type: ignore[attr-defined]

    async def passes_on() -> None:
        async with gradbus.join_group(gradbus.connect(), rank=0, world=1):  # type: ignore[arg-type]
            pass

    with pytest.raises(TypeError, match=rf"is entered and not awaited: {DO}"):
        asyncio.run(waits())
    with pytest.raises(AttributeError, match=rf"has no 'subscribe', for it has not been entered: {DO}"):
        asyncio.run(uses())
    with pytest.raises(AttributeError, match=rf"for it has not been entered: {DO}"):
        asyncio.run(passes_on())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: gradbus.connect(domian=3), r"gradbus\.connect\(\) has no keyword 'domian': did you mean 'domain'\?"),
        (
            lambda: gradbus.connect(zzz=3),
            "has no keyword 'zzz': it takes connect, domain, fast, faults, interface, job",
        ),
        (lambda: gradbus.join_group(None, rank=0, wrld=1), "has no keyword 'wrld': did you mean 'world'"),
        (lambda: FederatedConfig(rouds=3), r"FederatedConfig: unknown key 'rouds', did you mean 'rounds'\?"),
        (lambda: gradbus.DataParallelConfig(epoch=3), "unknown key 'epoch', did you mean 'epochs'"),
        (lambda: gradbus.ClientConfig(7), r"ClientConfig takes keywords alone, as in ClientConfig\(state_dir=\.\.\.\)"),
    ],
)
def test_a_wrong_keyword_is_named_with_the_nearest_right_one(call: Any, sentence: str) -> None:
    with pytest.raises(WrongKeyword, match=sentence) as caught:
        call()
    assert isinstance(caught.value, TypeError)


def test_a_wrong_value_of_settings_in_a_program_is_told_as_that_of_a_file() -> None:
    with pytest.raises(
        ConfigError, match=r"^FederatedConfig: rounds: input should be greater than or equal to 1, got 0$"
    ):
        FederatedConfig(rounds=0)


def test_a_run_that_nobody_awaits_says_so_and_one_that_is_awaited_does_not() -> None:
    class Client:
        @awaited("client.run()")
        async def run(self, value: int) -> int:
            await asyncio.sleep(0)
            return value

    for actor in (gradbus.Client, gradbus.Controller, gradbus.Worker):
        assert hasattr(actor.run, "__wrapped__")
    sentence = r"client\.run\(\) was called and not awaited.*write 'await client\.run\(\)'"
    with pytest.warns(RuntimeWarning, match=sentence):
        Client().run(1)

    async def main() -> list[int]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(Client().run(2))
        return [await Client().run(1), await task, await asyncio.wait_for(Client().run(3), 5)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(main()) == [1, 2, 3]
        assert asyncio.run(Client().run(4)) == 4
        gc.collect()


PROGRAM = """
import asyncio, sys, torch, gradbus
async def main():
    async with gradbus.connect(job=sys.argv[1], domain=int(sys.argv[2])) as bus:
        async with gradbus.join_group(bus, rank=int(sys.argv[3]), world=2, timeout_s=30) as group:
            x = torch.ones(4)
            if sys.argv[3] == "0":
                group.all_reduce("forgotten", x, out=x)
                await group.send("go on", b"", to=1)
            else:
                await group.recv("go on", source=0)
                await group.all_reduce("forgotten", x, out=x)
            await group.barrier("end")
            print(x.tolist())
asyncio.run(main())
"""


def test_a_collective_that_nobody_awaits_warns_at_the_line_of_the_call_and_goes_on(tmp_path: Path) -> None:
    place = [f"misuse-{os.getpid()}", str(new_domain())]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = [Forked([*place, rank], tmp_path, os.environ, program=program) for rank in ("0", "1")]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [out for out, _ in outputs] == ["[2.0, 2.0, 2.0, 2.0]\n"] * 2, outputs
    (warning,) = [line for line in outputs[0][1].splitlines() if "RuntimeWarning" in line]
    assert warning.startswith(f"{program}:8: RuntimeWarning: collective 'forgotten' was started and its handle dropped")
    assert "Write 'await' before the call" in warning
    assert "RuntimeWarning" not in outputs[1][1]


def test_two_users_with_defaults_have_jobs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for number, name in ((1, "ada"), (2, "grace hopper")):
        with monkeypatch.context() as patch:
            import pwd

            entry = pwd.struct_passwd((name, "x", number, number, "", "/", "/bin/sh"))
            patch.setattr(pwd, "getpwuid", lambda uid, entry=entry: entry)
            user_name.cache_clear()
            names.append((default_job(), with_user("mnist-{user}"), BusSettings().job))
    user_name.cache_clear()
    assert names == [
        ("default-ada", "mnist-ada", "default-ada"),
        ("default-grace-hopper", "mnist-grace-hopper", "default-grace-hopper"),
    ]
    for one in names:
        for job in one:
            check_job(job, 0)
    assert bus_settings.default_job() == BusSettings().job
