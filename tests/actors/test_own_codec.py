"""A codec of the user's: a file that no file of ours names, and rounds over real DDS with it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from doc_pages import fenced_blocks, python_blocks
from torch import nn
from trees import DIM, UnequalTask, rules, site_of, tree

import gradbus
from gradbus.actors.federated.chosen_codecs import codec_of, make_codecs, own_codecs, read_codecs
from gradbus.actors.federated.controller.combinations import check_combination
from gradbus.models import NoopTask
from gradbus.models.task import EvalResult, TrainResult
from gradbus.runtime.choices import CODECS
from gradbus.runtime.errors import ConfigError, JoinRefused, RunAborted, TrainingFailed
from gradbus.runtime.wire.control import Welcome
from gradbus.testing import check_codec

WIDTH = 500
TERNARY, COARSE = "gradbus.experiments.examples.custom_codec:Ternary", "coarse:Coarse"
PAGE = Path(__file__).parents[2] / "docs/own-codec.md"
_jobs = itertools.count()


@pytest.fixture(autouse=True)
def users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's file, in a folder that Python imports from."""
    (tmp_path / "coarse.py").write_text(python_blocks(PAGE.read_text(encoding="utf-8"))[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("coarse", None)


class Steps:
    """Weights that take a step of the learning rate towards a target in each round."""

    def __init__(self, target: float = 1.0) -> None:
        self.target = target

    def build_model(self) -> nn.Module:
        model = nn.Linear(WIDTH, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    @torch.no_grad()
    def train(self, model: Any, *, lr: float, **_: Any) -> TrainResult:
        model.weight += lr * (self.target - model.weight)
        return TrainResult(1, 0.0)

    def evaluate(self, model: Any) -> EvalResult:
        return EvalResult(None, 0.0, 1)


def run(config: gradbus.FederatedConfig, *allowed: str) -> tuple[torch.Tensor, list[gradbus.RoundReport]]:
    """A whole run of two clients, which allow these codecs."""
    job, domain = f"own-codec-{os.getpid()}-{next(_jobs)}", new_domain()
    client_config = gradbus.ClientConfig(codecs=allowed)

    async def one(client_id: int) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, Steps(1.0 + client_id), client_id=client_id, config=client_config).run()

    async def main() -> tuple[torch.Tensor, list[gradbus.RoundReport]]:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            controller = gradbus.Controller(bus, Steps(), config)
            for client_id in range(2):
                group.create_task(one(client_id))
            reports = [report async for report in controller.rounds()]
        return controller.weights.clone(), reports

    return asyncio.run(main())


def config_with(codec: dict[str, Any] | str, **others: Any) -> gradbus.FederatedConfig:
    return gradbus.FederatedConfig(rounds=2, clients={"num": 2, "min": 2}, training={"lr": 0.5}, codec=codec, **others)


def test_rounds_go_through_a_coarse_with_its_two_options() -> None:
    found, reports = run(config_with({"name": COARSE, "step": 0.125, "wide": True}), COARSE)
    # Steps of an eighth lose nothing here: from 0 half of the way to 1 and to 2, and from 0.75 once more.
    torch.testing.assert_close(found, torch.full((WIDTH,), 1.125), rtol=0, atol=1e-6)
    assert [report.clients for report in reports] == [(0, 1), (0, 1)]
    assert [report.bytes_up for report in reports] == [2 * (16 + 5 + 2 * WIDTH)] * 2


def test_the_codec_of_the_page_keeps_the_rules() -> None:
    check_codec(COARSE, step=0.01, wide=True)
    check_codec(COARSE)


def test_the_configurations_of_the_page_fit_together() -> None:
    controller, client = (json.loads(block) for block in fenced_blocks(PAGE.read_text(encoding="utf-8"), "json"))
    config = gradbus.FederatedConfig(**controller["federated"])
    check_combination(config)
    welcome = Welcome(0, 1, 7, 1, config.codec.name, CODECS.to_json(config.codec), 1, 0.5)
    read_codecs(welcome, gradbus.ClientConfig(**client["client"]).codecs, "client.codecs")


def test_what_it_rounds_off_is_sent_later() -> None:
    found, _ = run(config_with({"name": COARSE, "step": 0.3}).replaced("rounds", 12), COARSE)
    assert float((found - 1.5).abs().max()) < 0.16  # within half a step of the mean of the targets


def test_models_and_updates_may_both_be_in_codecs_of_the_users() -> None:
    config = config_with({"name": COARSE, "step": 0.125}, downlink_codec={"name": TERNARY, "threshold": 0.0})
    found, reports = run(config, COARSE, TERNARY)
    torch.testing.assert_close(found, torch.full((WIDTH,), 1.125), rtol=0, atol=1e-6)
    assert not any(report.dropped for report in reports)


def test_a_client_that_does_not_allow_the_codec_imports_nothing_and_says_what_to_set() -> None:
    sys.modules.pop("coarse", None)
    welcome = Welcome(0, 1, 7, 1, COARSE, "{}", 1, 0.5)
    text = r"chose the codec 'coarse:Coarse', which is not allowed here: client.codecs is \['a:B'\]"
    with pytest.raises(ConfigError, match=text):
        read_codecs(welcome, ("a:B",), "client.codecs")
    with pytest.raises(ConfigError, match="not allowed"):
        codec_of(welcome)
    for other in ({"section_codec": COARSE}, {"downlink_codec": COARSE}):
        with pytest.raises(ConfigError, match="not allowed"):
            read_codecs(Welcome(0, 1, 7, 1, "fp32", "{}", 1, 0.5, **other), (), "client.codecs")
    assert "coarse" not in sys.modules


def test_a_run_ends_for_a_client_that_does_not_allow_the_codec() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(config_with(COARSE).replaced("clients.start_timeout_s", 5.0))
    assert caught.group_contains(JoinRefused, match="add it to client.codecs")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ('{"stepp": 1}', "stepp: .*did you mean 'step'.*. Use one version of its file on all nodes"),
        ('{"step": -1}', "step"),
        ('{"step": 1e999}', "step"),
        ("{", "cannot be used here"),
        ("[1]", "expected an object"),
        ("[" * 3000, "cannot be used here"),
        ('{"step": [' + "1," * 300 + "1]}", "at most 256"),
    ],
)
def test_options_that_a_controller_sends_are_bounded_and_checked(options: str, text: str) -> None:
    welcome = Welcome(0, 1, 7, 1, COARSE, options, 1, 0.5)
    with pytest.raises(ConfigError, match=text):
        codec_of(welcome, allowed=[COARSE])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"codec": {"name": COARSE, "step": 0}}, "federated.codec.step"),
        ({"codec": {"name": COARSE, "level": 3}}, "'coarse:Coarse' has version, step, wide"),
        ({"codec": "coarse:struct"}, "is a module, expected a class"),
        ({"codec": "coarse:Annotated"}, "is no codec: inherit from gradbus.codecs.CustomCodec"),
        ({"codec": "coarse:Coars"}, "did you mean 'Coarse'"),
        ({"downlink_codec": "no_such_module:Codec"}, "there is no module 'no_such_module'"),
        ({"codec": COARSE, "training": {"from_round": {2: {"density": 0.5}}}}, "has no such option"),
    ],
)
def test_a_controller_refuses_a_codec_that_cannot_be_made_before_it_starts(settings: dict[str, Any], text: str) -> None:
    config = gradbus.FederatedConfig(**settings)  # to read settings imports nothing

    async def main() -> None:
        async with gradbus.connect(job="refused", domain=new_domain()) as bus:
            gradbus.Controller(bus, Steps(), config)

    with pytest.raises(ConfigError, match=text):
        asyncio.run(main())


def test_a_codec_of_models_that_no_client_would_take_is_refused_before_the_run() -> None:
    (Path(sys.path[0]) / "long_codec.py").write_text(
        "from coarse import Coarse\n\n\nclass Long(Coarse):\n    name, magic = 'long', b'LON1'\n\n"
        "    def max_body_bytes(self, dim):\n        return 9 * dim + 4096\n",
        encoding="utf-8",
    )
    with pytest.raises(ExceptionGroup) as caught:
        run(config_with("fp32", downlink_codec="long_codec:Long"), "long_codec:Long")
    assert caught.group_contains(ConfigError, match="may take 8,612 bytes in long, and clients take at most 8,096")


def test_codecs_whose_messages_cannot_be_told_apart_are_refused_on_both_sides() -> None:
    """One would be read as the other, to wrong values."""
    (Path(sys.path[0]) / "like_coarse.py").write_text(
        "from coarse import Coarse\n\n\nclass Like(Coarse):\n    name = 'like'\n\n"
        "    @classmethod\n    def decode_body(cls, body, dim):\n        return 2 * super().decode_body(body, dim)\n",
        encoding="utf-8",
    )
    text = r"{} coarse:Coarse, like_coarse:Like: messages of codecs Coarse and Like both begin with b'COA1'"
    with pytest.raises(ConfigError, match=text.format("client.codecs")):
        own_codecs((COARSE, "like_coarse:Like"), "client.codecs")
    assert len(own_codecs((COARSE, COARSE, "fp32"))) == 1
    with pytest.raises(ConfigError, match=text.format("federated.codec")):
        make_codecs(config_with(COARSE, downlink_codec="like_coarse:Like"))


BROKEN = """
from coarse import Coarse

class Broken(Coarse):
    name, magic = "broken", b"BRO1"

    def encode_body(self, vector):
        raise RuntimeError("no table for these values")
"""


@pytest.mark.parametrize(
    ("setting", "of_controller", "of_clients"),
    [("codec", TrainingFailed, TrainingFailed), ("downlink_codec", ConfigError, RunAborted)],
)
def test_a_codec_that_raises_is_named_with_its_line_at_the_controller_and_at_every_client(
    setting: str, of_controller: type[Exception], of_clients: type[Exception]
) -> None:
    """That of the models can only be mended on the controller: clients need not wait for it."""
    (Path(sys.path[0]) / "broken_codec.py").write_text(BROKEN, encoding="utf-8")
    config = config_with(**{"codec": "fp32", setting: "broken_codec:Broken"}, round={"max_attempts": 1})
    job, domain = f"own-codec-{os.getpid()}-{next(_jobs)}", new_domain()

    async def end_of(make: Callable[[gradbus.Bus], Any]) -> Any:
        async with gradbus.connect(job=job, domain=domain) as bus:
            try:
                return await make(bus).run()
            except Exception as error:
                return error

    async def main() -> list[Any]:
        client = gradbus.ClientConfig(codecs=("broken_codec:Broken",), controller_timeout_s=60.0)
        async with asyncio.timeout(50):
            return await asyncio.gather(
                end_of(lambda bus: gradbus.Controller(bus, Steps(), config)),
                *(end_of(lambda bus, i=i: gradbus.Client(bus, Steps(), client_id=i, config=client)) for i in range(2)),
            )

    ends = asyncio.run(main())
    assert [type(end) for end in ends] == [of_controller, of_clients, of_clients]
    for end in ends:
        assert re.search(r"RuntimeError: no table for these values, at .*broken_codec.py:8 in encode_body", str(end))


def test_a_client_names_a_wrong_entry_of_its_own_setting() -> None:
    async def main() -> None:
        async with gradbus.connect(job="wrong", domain=new_domain()) as bus:
            config = gradbus.ClientConfig(codecs=("coarse:Coars",))
            await gradbus.Client(bus, Steps(), client_id=0, config=config).run()

    with pytest.raises(ConfigError, match=r"^client.codecs 'coarse:Coars': .* did you mean 'Coarse'"):
        asyncio.run(main())


def test_a_name_among_the_options_names_nothing() -> None:
    welcome = Welcome(0, 1, 7, 1, COARSE, '{"name": "os:system", "step": 0.5}', 1, 0.5)
    codec = codec_of(welcome, allowed=[COARSE])
    assert (codec.name, codec.options.step) == ("coarse", 0.5)  # type: ignore[attr-defined]


def test_all_options_travel_with_their_defaults() -> None:
    config = gradbus.FederatedConfig(codec={"name": COARSE, "wide": True})
    text = CODECS.to_json(config.codec)
    assert text == '{"version":2,"step":0.01,"wide":true}'
    assert codec_of(Welcome(0, 1, 7, 1, COARSE, text, 1, 0.5), allowed=[COARSE]) == CODECS.make(config.codec)


def tree_run(*allowed_at_the_site: str) -> list[gradbus.RoundReport]:
    """A Controller above a site with two clients, which allow the codec."""

    async def main() -> list[gradbus.RoundReport]:
        codec = {"name": COARSE, "step": 0.001, "wide": True}
        async with tree() as here, asyncio.TaskGroup() as group:
            above, over, local, theirs = [await here.bus(level) for level in ("top", "top", "site", "site")]
            group.create_task(site_of(over, local, 0, rules(2), codecs=allowed_at_the_site).run())
            for client_id in range(2):
                config = gradbus.ClientConfig(codecs=(COARSE,))
                client = gradbus.Client(theirs, UnequalTask(), client_id=client_id, config=config)
                group.create_task(client.run())
            return await gradbus.Controller(above, NoopTask(DIM), rules(1, sites=True, rounds=2, codec=codec)).run()

    return asyncio.run(main())


def test_clients_below_a_site_use_the_codec_of_the_top_level() -> None:
    assert [report.num_samples for report in tree_run(COARSE)] == [3 + 5] * 2


def test_a_site_that_does_not_allow_the_codec_says_what_to_set() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        tree_run()
    assert caught.group_contains(JoinRefused, match="add it to upstream.codecs")
