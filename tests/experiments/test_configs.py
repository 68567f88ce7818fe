"""Configuration files: the examples, and what a wrong one is told."""

from pathlib import Path

import pytest

from gradbus.actors.federated.controller.combinations import check_combination
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.files import AggregatorFile, ClientFile, ControllerFile, WorkerFile, load
from gradbus.runtime.algorithms.base import Place, make_algorithm
from gradbus.runtime.config.bus import user_name
from gradbus.runtime.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "experiments" / "configs"
# Those of ranks: see parallel_pieces.
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.json") if path.name.startswith(("controller", "client")))


WAYS = ("", ".lora", ".non-iid", ".private", ".secure", ".two-machines")
SIZES = {".lora.": 824_064, ".private.": 7_850}


def kind_of(name: str) -> type[ControllerFile] | type[ClientFile]:
    return ControllerFile if name.startswith("controller") else ClientFile


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_loads_and_names_a_task_that_can_be_made(name: str, configs: Path) -> None:
    file = load(kind_of(name), configs / name)
    task = ConfiguredTask(file.task)
    size = next((size for way, size in SIZES.items() if way in name), 1_199_882)
    assert sum(parameter.numel() for parameter in task.build_model().parameters()) == size


def test_there_is_an_example_for_each_codec_and_each_way_of_running() -> None:
    codecs = {f"controller.{codec}.conf.json" for codec in ("q8", "s4", "sq8")}
    pairs = {f"{side}{way}.conf.json" for side in ("controller", "client") for way in WAYS}
    assert set(EXAMPLES) == codecs | pairs


def test_the_private_example_has_the_budget_and_the_noise_that_are_documented(configs: Path) -> None:
    rules = load(ControllerFile, configs / "controller.private.conf.json").federated
    assert (rules.privacy.name, rules.privacy.options["epsilon"], rules.clients.num) == ("central", 8.0, 100)
    check_combination(rules)


def test_the_example_of_an_aggregator_serves_the_job_of_the_workers_beside_it(configs: Path) -> None:
    aggregator = load(AggregatorFile, configs / "aggregator.conf.json")
    workers = load(WorkerFile, configs / "ddp-aggregator.conf.json")
    assert aggregator.bus.job == workers.bus.job
    assert workers.world == aggregator.aggregator.world  # or make run-ddp asks for it
    assert workers.parallel.algorithm.options["route"] == "ra-ina"
    with pytest.raises(ConfigError, match="gradbus aggregator"):
        load(WorkerFile, configs / "aggregator.conf.json")


@pytest.mark.parametrize("name", ["tree", "chain"])
def test_the_examples_of_several_aggregators_have_as_many_as_their_workers_expect(name: str, configs: Path) -> None:
    nodes = [
        load(AggregatorFile, configs / f"aggregator.{name}.conf.json", overrides=[f"aggregator.node={node}"])
        for node in range(2)
    ]
    workers = load(WorkerFile, configs / f"ddp-aggregator.{name}.conf.json")
    place = Place(0, nodes[0].aggregator.world)
    algorithm = make_algorithm("fixed-point", place, workers.parallel.algorithm.options)
    assert algorithm.in_network is not None
    assert [node.aggregator.nodes for node in nodes] == [algorithm.in_network.topology.num_nodes] * 2
    assert {node.bus.job for node in nodes} == {workers.bus.job}
    assert {node.aggregator.world for node in nodes} == {workers.world}
    with pytest.raises(ConfigError, match=r"node: expected 0 to \d, as nodes is \d, got 7"):
        load(AggregatorFile, configs / f"aggregator.{name}.conf.json", overrides=["aggregator.node=7"])


def test_the_example_of_adapters_shares_these_alone(configs: Path) -> None:
    file = load(ControllerFile, configs / "controller.lora.conf.json")
    model = FlatModel(ConfiguredTask(file.task).build_model(), Sharing.of(file.federated))
    assert {name.rpartition(".")[2] for name, _, _ in model.table} == {"lora_a", "lora_b"}
    assert model.dim / (model.dim + model.frozen_dim) < 0.02
    assert model.personal == []


@pytest.mark.parametrize("way", WAYS)
def test_controller_and_client_of_an_example_agree(way: str, configs: Path) -> None:
    controller = load(ControllerFile, configs / f"controller{way}.conf.json")
    client = load(ClientFile, configs / f"client{way}.conf.json")
    assert controller.bus == client.bus
    for key in ("model", "data", "partition", "seed", "task", "task_options"):
        assert getattr(controller.task, key) == getattr(client.task, key)


def test_the_reference_run_is_the_one_that_is_documented(configs: Path) -> None:
    controller = load(ControllerFile, configs / "controller.conf.json")
    client = load(ClientFile, configs / "client.conf.json")
    rules = controller.federated
    assert (rules.rounds, rules.clients.num, rules.codec.name) == (10, 2, "fp32")
    assert (rules.training.subset_size, rules.training.lr) == (6000, 0.01)
    assert (client.task.batch_size, client.task.momentum, controller.bus.job) == (64, 0.9, f"mnist-{user_name()}")


def test_options_of_the_command_win_over_the_environment_and_that_over_the_file(
    configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADBUS_FEDERATED__ROUNDS", "3")
    monkeypatch.setenv("GRADBUS_FEDERATED__TRAINING__LR", "0.5")
    file = load(ControllerFile, configs / "controller.conf.json", overrides=["federated.rounds=4"])
    assert (file.federated.rounds, file.federated.training.lr) == (4, 0.5)


def test_one_environment_serves_controller_and_clients(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADBUS_FEDERATED__ROUNDS", "3")
    monkeypatch.setenv("GRADBUS_BUS__JOB", "both")
    assert load(ClientFile, configs / "client.conf.json").bus.job == "both"


def test_an_unknown_section_in_the_environment_is_an_error(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADBUS_FEDERATE__ROUNDS", "3")
    with pytest.raises(ConfigError, match="did you mean 'federated'"):
        load(ControllerFile, configs / "controller.conf.json")


def test_a_data_root_that_looks_like_a_number_stays_a_path(configs: Path) -> None:
    assert load(ClientFile, configs / "client.conf.json", data_root=Path("2024")).task.data_root == Path("2024")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task.model=gradbus.models:mnist_cn", "did you mean 'mnist_cnn'"),
        ("task.model=gradbus.modls:mnist_cnn", "no module 'gradbus.modls'"),
        ("task.model=mnist_cnn", "expected package.module:attribute"),
        ("task.data=mnits", "expected auto, mnist, glyphs or package.module:attribute"),
        ("task.partition=dirichlett", "did you mean 'dirichlet'"),
        ("task.task=gradbus.models:mnist_cnn", "has no build_model, prepare, evaluate"),
        ("task.model=broken:net", "importing 'broken' failed: ZeroDivisionError"),
    ],
)
def test_a_wrong_name_is_an_error_that_names_the_nearest(
    override: str, said: str, configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=said):
        ConfiguredTask(load(ClientFile, configs / "client.conf.json", overrides=[override]).task)


def test_options_that_a_function_does_not_take_are_an_error(configs: Path) -> None:
    overrides = ["task.data=glyphs", 'task.data_options={"trian": 5}']
    task = ConfiguredTask(load(ClientFile, configs / "client.conf.json", overrides=overrides).task)
    with pytest.raises(ConfigError, match="trian"):
        task.load()
