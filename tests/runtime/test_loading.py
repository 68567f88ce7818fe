"""Importing takes seconds: where it is done while an event loop runs, and what is left of it after ``preload``."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import threading
from typing import Any

import pytest

import gradbus
from gradbus import loading
from gradbus.runtime.bus.bus import connect as connect_loaded
from gradbus.runtime.bus.transport_factory import network_config
from gradbus.runtime.network.network_config import NetworkConfig

# A host with a client, its controller, and both ranks of a data-parallel run. It notes who imports what meanwhile.
HOST = """
import asyncio, json, sys, threading
import gradbus

preloads, domain = sys.argv[1] == "preload", int(sys.argv[2])

def make_task():
    import torch
    from gradbus import models

    torch.set_num_threads(1)
    images, labels = torch.ones(32, 1, 28, 28), torch.ones(32, dtype=torch.int64)
    data = models.Dataset("ones", images, labels)
    return models.ClassificationTask(models.mnist_mlp, models.DataSplit(data, data))

if preloads:
    gradbus.preload()
    task = make_task()

imported = {"loop": [], "threads": []}

class Watch:
    def find_spec(self, name, path=None, target=None):
        of_loop = threading.current_thread() is threading.main_thread()
        imported["loop" if of_loop else "threads"].append(name)

async def rank(number):
    async with gradbus.connect("ranks", domain=domain) as bus:
        async with gradbus.join_group(bus, rank=number, world=2, timeout_s=60) as group:
            rules = gradbus.DataParallelConfig(epochs=1, max_steps=2, timeouts={"join_s": 60})
            async for _ in gradbus.Worker(group, task, rules).epochs():
                pass

async def client():
    async with gradbus.connect("rounds", domain=domain) as bus:
        await gradbus.Client(bus, task, client_id=0).run()

async def main():
    global task
    sys.meta_path.insert(0, Watch())
    async with gradbus.connect("rounds", domain=domain) as bus:
        if not preloads:
            task = await asyncio.to_thread(make_task)
        rules = gradbus.FederatedConfig(rounds=2, clients={"num": 1}, training={"epochs": 1})
        async with asyncio.TaskGroup() as group:
            group.create_task(gradbus.Controller(bus, task, rules).run())
            group.create_task(client())
            group.create_task(rank(0))
            group.create_task(rank(1))

asyncio.run(main())
json.dump(imported, sys.stdout)
"""


def child(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


# What the names themselves need: a few files without packages of others.
LIGHT = {
    "gradbus.connecting", "gradbus.loading", "gradbus.runtime", "gradbus.runtime.misuse", "gradbus.runtime.errors",
    "gradbus.runtime.nearest", "concurrent.futures.thread", "queue", "_queue", "gc",
}  # fmt: skip


@pytest.mark.slow
def test_connect_imports_on_a_thread_and_a_run_imports_nothing_on_the_event_loop(domain: int) -> None:
    ended = child(HOST, "connect", str(domain))
    assert (ended.returncode, ended.stderr) == (0, "")
    imported = json.loads(ended.stdout)
    assert set(imported["loop"]) - LIGHT == set()
    assert {"torch", "gradbus.actors.federated.client.client", "gradbus.actors.federated.controller.controller"} <= {
        *imported["threads"]
    }


@pytest.mark.slow
def test_after_preload_a_run_imports_nothing_at_all(domain: int) -> None:
    """Its end is quiet, too: objects that were frozen are let go, or libraries would report them as leaks."""
    ended = child(HOST, "preload", str(domain))
    assert (ended.returncode, ended.stderr) == (0, "")
    imported = json.loads(ended.stdout)
    assert imported["loop"] == []
    assert [name for name in imported["threads"] if name.startswith(("gradbus", "torch"))] == []


def test_a_program_that_only_sends_and_receives_needs_no_torch(domain: int) -> None:
    program = """
import asyncio, sys, gradbus
async def main():
    async with gradbus.connect("messages", domain=int(sys.argv[1]), load_actors=False):
        print("torch" in sys.modules)
asyncio.run(main())
"""
    assert child(program, str(domain)).stdout == "False\n"


def test_the_settings_of_security_load_nothing_of_a_transport() -> None:
    program = "import sys, gradbus.runtime.security; print([one for one in sys.modules if 'runtime.transport' in one])"
    assert child(program).stdout == "[]\n"


def test_what_is_known_before_a_bus_is_open_needs_no_library_of_a_transport() -> None:
    """Settings are checked before a second of imports, and the doctor runs where a package is missing."""
    program = """
import sys
sys.modules["cyclonedds"] = sys.modules["torch"] = None
import gradbus
from gradbus.commands.buses import check, examination_of, peer_names_of, reach_of
from gradbus.commands.doctor.report import examine
from gradbus.runtime.config.bus import BusSettings
gradbus.NetworkConfig(peers=("192.0.2.1",))
settings = BusSettings(security="none", insecure=True)
check(settings)
print(reach_of(settings).meeting_place, examination_of(settings).ports, peer_names_of(settings).names)
"""
    assert child(program).stdout == "DDS domain 0 7410-7649 ()\n"


def test_settings_choose_the_transport_whatever_is_installed() -> None:
    """Neither library is imported before one is chosen, and a missing one never makes a bus use the other."""
    program = """
import asyncio, sys, gradbus
sys.modules["zenoh"] = sys.modules["cyclonedds"] = None
from gradbus.commands.buses import check, place_of
from gradbus.runtime.config.bus import BusSettings
links = BusSettings(connect=("tcp/127.0.0.1:7447",), security="none")
for settings in (BusSettings(security="none"), links):
    check(settings)
    print(place_of(settings))
async def main():
    async with gradbus.connect("missing", connect=["tcp/127.0.0.1:7447"], security="none", load_actors=False):
        pass
try:
    asyncio.run(main())
except ImportError as error:
    print(error)
"""
    first, second, error = child(program).stdout.splitlines()
    assert (first, second) == ("DDS domain 0 on lo", "Zenoh on tcp/127.0.0.1:7447")
    assert error.startswith("gradbus: the package eclipse-zenoh is not installed here. Install it: ")
    assert error.endswith("Or leave bus.connect and bus.listen out, on all members of the job: then the bus uses DDS")


def test_a_package_that_is_missing_is_an_error_of_connect_with_its_name() -> None:
    program = """
import asyncio, sys, gradbus
sys.modules["cyclonedds"] = None
async def main():
    async with gradbus.connect("missing"):
        pass
asyncio.run(main())
"""
    ended = child(program)
    assert ended.stderr.splitlines()[-1].startswith(
        "ImportError: gradbus: the package cyclonedds is not installed here"
    )


def test_preload_freezes_what_is_loaded_unless_it_is_asked_not_to() -> None:
    program = """
import gc, gradbus
gradbus.preload()
frozen = gc.get_freeze_count()
gc.unfreeze()
gradbus.preload(freeze=False)
print(frozen, gc.get_freeze_count())
"""
    frozen, left = map(int, child(program).stdout.split())
    assert frozen > 100_000 > left


def test_connect_takes_what_the_bus_and_its_network_take() -> None:
    """Its arguments are those of three functions, one for what is loaded, one for the bus, and one for its network."""
    taken, of_bus, of_network = (
        inspect.signature(one).parameters for one in (gradbus.connect, connect_loaded, network_config)
    )
    assert set(taken) == {"load_actors", *of_bus, *of_network}
    for name, one in [*of_bus.items(), *of_network.items()]:
        if name != "network":
            assert taken[name].default == one.default, name
    assert str(taken["network"].annotation) == str(of_network["network"].annotation)


def test_each_argument_about_the_network_arrives_in_its_settings() -> None:
    given = network_config("network", interface="eth7", peers=["192.0.2.1"], lease_s=3.0, shared_memory=False)
    assert given == NetworkConfig(
        profile="network", interface="eth7", peers=("192.0.2.1",), lease_s=3.0, shared_memory=False
    )
    assert network_config(given, interface="eth8") is given
    assert network_config() == NetworkConfig()


def test_a_connect_that_is_cancelled_while_it_loads_leaves_the_loading_to_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end, loaded = threading.Event(), threading.Event(), set[Any]()
    monkeypatch.setattr(loading, "_loaded", loaded)

    def part() -> None:
        begun.set()
        assert may_end.wait(30)
        loaded.add(part)

    async def scenario() -> None:
        first = asyncio.create_task(loading.load_on_thread(part))
        await asyncio.to_thread(begun.wait, 30)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(loading.load_on_thread(part))
        may_end.set()
        await second
        assert loaded == {part}

    asyncio.run(scenario())
