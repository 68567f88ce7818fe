"""An actor that is given another kind of thing than it expects says so where it is constructed, with what to write."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ddp_scene import make_task
from dds_domains import new_domain
from torch import nn

import gradbus
from gradbus.actors.federated.site.site import Site
from gradbus.actors.parameter_server.server import ParameterServer
from gradbus.actors.parameter_server.worker import ParameterServerWorker
from gradbus.models import NoopTask
from gradbus.runtime.config.federated import UpstreamConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.errors import ConfigError

_jobs = itertools.count()
RULES = gradbus.FederatedConfig(rounds=1)
STEPS = gradbus.DataParallelConfig(epochs=1)
ELASTIC = gradbus.DataParallelConfig(epochs=1, elastic={"min_world": 1})
UPSTREAM = UpstreamConfig(site=0, alone=False)
SERVERS = ParameterServerSettings()

# What is given, by the names of a good bus, a closed bus, a good group, a group that was left, and a place of a rank.
Make = Callable[[SimpleNamespace], Any]
OPEN_BUS = r"Give the bus of 'async with gradbus\.connect\(\.\.\.\) as bus:', and keep the order of the arguments"
OPEN_GROUP = r"Give the group of 'async with gradbus\.join_group\(bus, rank=\.\.\., world=\.\.\.\) as group:'"

WRONG: dict[str, tuple[Make, str]] = {
    "a module as the bus of a client": (
        lambda it: gradbus.Client(gradbus, NoopTask(5), client_id=0),
        rf"^Client\(bus, task, \.\.\.\): bus: expected a Bus, got the module gradbus\. {OPEN_BUS}$",
    ),
    "a client with swapped arguments": (
        lambda it: gradbus.Client(NoopTask(5), it.bus, client_id=0), f"bus: expected a Bus, got a NoopTask. {OPEN_BUS}",
    ),
    "the name of a job as a bus": (
        lambda it: gradbus.Client("mnist", NoopTask(5), client_id=0), "bus: expected a Bus, got the text 'mnist'",
    ),
    "connect that was not entered": (
        lambda it: gradbus.Client(gradbus.connect(), NoopTask(5), client_id=0),
        r"expected a Bus, got gradbus\.connect\(\.\.\.\), which has not been entered",
    ),
    "a closed bus of a client": (
        lambda it: gradbus.Client(it.closed, NoopTask(5), client_id=0),
        r"bus: expected an open bus, got one that is closed: .* Construct and run it inside of such a block",
    ),
    "a closed bus of a controller": (
        lambda it: gradbus.Controller(it.closed, NoopTask(5), RULES),
        r"Controller\(bus, task, config\): bus: expected an open bus",
    ),
    "the class of a task": (
        lambda it: gradbus.Client(it.bus, NoopTask, client_id=0),
        r"task: expected an object, got the class NoopTask\. Write NoopTask\(\.\.\.\)$",
    ),
    "a model as a task": (
        lambda it: gradbus.Client(it.bus, nn.Linear(2, 2), client_id=0),
        "task: expected an object with the methods build_model, prepare, train, got a Linear, which lacks build_model, "
        r"prepare\. Give a task, as gradbus\.actors\.FederatedTask describes it",
    ),
    "a function as a task": (
        lambda it: gradbus.Controller(it.bus, make_task, RULES), "got the function make_task, which lacks build_model",
    ),
    "a task for ranks as that of a client": (
        lambda it: gradbus.Client(it.bus, SimpleNamespace(build_model=nn.Module, loss=len), client_id=0),
        "got a SimpleNamespace, which lacks prepare, train",
    ),
    "a controller with swapped arguments": (
        lambda it: gradbus.Controller(it.bus, RULES, NoopTask(5)),
        r"config: expected a FederatedConfig, got a NoopTask\. Write gradbus\.FederatedConfig\(rounds=10",
    ),
    "settings of ranks for a controller": (
        lambda it: gradbus.Controller(it.bus, NoopTask(5), STEPS), "a FederatedConfig, got a DataParallelConfig",
    ),
    "a controller without settings": (
        lambda it: gradbus.Controller(it.bus, NoopTask(5), None), "a FederatedConfig, got None",
    ),
    "the name of a strategy": (
        lambda it: gradbus.Controller(it.bus, NoopTask(5), RULES, strategy="median"),
        "strategy: expected a Strategy, got the text 'median'. Write its name in the settings",
    ),
    "a site whose second bus is a task": (
        lambda it: Site(it.bus, NoopTask(5), it.bus, gradbus.FederatedConfig(), UPSTREAM),
        r"Site\(above, bus, task, config, upstream\): bus: expected a Bus, got a NoopTask",
    ),
    "a site with swapped settings": (
        lambda it: Site(it.bus, it.bus, NoopTask(5), UPSTREAM, RULES), "config: expected a FederatedConfig, got a Upst",
    ),
    "the bus as the group of a worker": (
        lambda it: gradbus.Worker(it.bus, make_task(), STEPS),
        rf"^Worker\(group, task, config\): group: expected a Group, got a Bus\. {OPEN_GROUP}",
    ),
    "a group that was left": (
        lambda it: gradbus.Worker(it.left, make_task(), STEPS),
        "expected a group that this rank is in, got group 'gone'",
    ),
    "a worker with swapped arguments": (
        lambda it: gradbus.Worker(it.group, STEPS, make_task()),
        r"config: expected a DataParallelConfig, got a \w+\. Write gradbus\.DataParallelConfig\(epochs=10",
    ),
    "a task of clients for a worker": (
        lambda it: gradbus.Worker(it.group, SimpleNamespace(build_model=nn.Module), STEPS),
        "got a SimpleNamespace, which lacks prepare_shard, num_batches, batches, loss, evaluate_shard",
    ),
    "the group as the place of an elastic worker": (
        lambda it: gradbus.ElasticWorker(it.group, make_task(), ELASTIC),
        r"place: expected an ElasticPlace, got a Group\. Write gradbus\.ElasticPlace\(bus=bus, number=0, founders=3\)",
    ),
    "a place on a closed bus": (
        lambda it: gradbus.ElasticWorker(gradbus.ElasticPlace(bus=it.closed, number=0), make_task(), ELASTIC),
        r"place\.bus: expected an open bus",
    ),
    "no settings of an elastic worker": (
        lambda it: gradbus.ElasticWorker(it.place, make_task(), None), "expected a DataParallelConfig, got None",
    ),
    "a server without its group": (
        lambda it: ParameterServer(it.bus, make_task(), STEPS, SERVERS),
        r"ParameterServer\(network, task, config, settings\): network: expected a Group, got a Bus",
    ),
    "a worker of servers without their group": (
        lambda it: ParameterServerWorker(it.group, make_task(), it.group, STEPS, SERVERS),
        r"network: expected a Group, got a \w+",
    ),
}  # fmt: skip


async def made(make: Make) -> None:
    place: dict[str, Any] = {"job": f"wrong-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
    async with gradbus.connect(**place) as closed:
        pass
    async with gradbus.connect(**place) as bus, gradbus.join_group(bus, rank=0, world=1) as group:
        async with gradbus.join_group(bus, rank=0, world=1, name="gone") as left:
            pass
        seat = gradbus.ElasticPlace(bus=bus, number=0, founders=1)
        make(SimpleNamespace(bus=bus, closed=closed, group=group, left=left, place=seat))


@pytest.mark.parametrize("what", WRONG)
def test_another_kind_of_thing_is_refused_at_construction_with_what_to_write(what: str) -> None:
    make, text = WRONG[what]
    with pytest.raises(ConfigError, match=text):
        asyncio.run(made(make))


ALONE = UpstreamConfig(site=0, alone=True)


def test_what_never_evaluates_needs_no_evaluate(tmp_path: Path) -> None:
    task: Any = SimpleNamespace(build_model=lambda: nn.Linear(2, 2))
    personal = gradbus.FederatedConfig(rounds=1, share={"exclude": ["bias"]})
    saves: dict[str, Any] = {"checkpoint": {"dir": tmp_path}}

    def make(it: SimpleNamespace) -> None:
        gradbus.Controller(it.bus, task, personal)._prepare()  # noqa: SLF001 - which knows the model
        Site(it.bus, it.bus, task, gradbus.FederatedConfig(), UPSTREAM)
        Site(it.bus, it.bus, task, gradbus.FederatedConfig(eval_every=0, **saves), ALONE)
        with pytest.raises(ConfigError, match=r"^Site\(above, .* lacks evaluate\..*; or set federated\.eval_every"):
            Site(it.bus, it.bus, task, gradbus.FederatedConfig(**saves), ALONE)

    asyncio.run(made(make))


def test_patterns_that_leave_the_model_whole_are_seen_once_there_is_a_model() -> None:
    task: Any = SimpleNamespace(build_model=lambda: nn.BatchNorm1d(2))
    counted = gradbus.FederatedConfig(rounds=1, share={"exclude": ["num_batches_tracked"]})

    def make(it: SimpleNamespace) -> None:
        controller = gradbus.Controller(it.bus, task, counted)
        with pytest.raises(ConfigError, match=r"^Controller\(bus, task, config\): task: .* which lacks evaluate"):
            controller._prepare()  # noqa: SLF001 - which knows the model

    asyncio.run(made(make))


def test_a_class_whose_methods_are_static_is_a_task() -> None:
    class Static:
        @staticmethod
        def build_model() -> nn.Module:
            return nn.Linear(2, 2)

        @classmethod
        def evaluate(cls, model: nn.Module) -> None:
            return None

    def make(it: SimpleNamespace) -> None:
        task: Any = Static
        gradbus.Controller(it.bus, task, RULES)
        with pytest.raises(ConfigError, match="got the class Static, which lacks prepare, train"):
            gradbus.Client(it.bus, task, client_id=0)

    asyncio.run(made(make))


def test_a_controller_that_does_not_evaluate_needs_no_evaluate() -> None:
    task = SimpleNamespace(build_model=lambda: nn.Linear(2, 2))

    def make(it: SimpleNamespace) -> None:
        gradbus.Controller(it.bus, task, gradbus.FederatedConfig(rounds=1, eval_every=0))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"which lacks evaluate.*; or set federated\.eval_every to 0$"):
            gradbus.Controller(it.bus, task, RULES)  # type: ignore[arg-type]

    asyncio.run(made(make))


def test_a_worker_that_lacks_only_its_evaluation_learns_how_to_do_without() -> None:
    methods = ("build_model", "prepare_shard", "num_batches", "batches", "loss")
    task: Any = SimpleNamespace(**dict.fromkeys(methods, print))

    def make(it: SimpleNamespace) -> None:
        gradbus.Worker(it.group, task, gradbus.DataParallelConfig(epochs=1, eval_every_epochs=0))
        text = r"which lacks evaluate_shard\..*; or set parallel\.eval_every_epochs to 0$"
        with pytest.raises(ConfigError, match=text):
            gradbus.Worker(it.group, task, STEPS)

    asyncio.run(made(make))


def test_a_closed_bus_is_seen_by_its_property() -> None:
    async def main() -> list[bool]:
        async with gradbus.connect(f"wrong-{os.getpid()}", domain=new_domain()) as bus:
            before = bus.is_closed
        return [before, bus.is_closed]

    assert asyncio.run(main()) == [False, True]
