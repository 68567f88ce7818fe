"""Servers and workers that do not fit together say so, with both values, before anything is trained."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch
from ddp_scene import NotFinite, data, make_task, new_place, small_mlp
from server_scene import serve
from torch import nn

import gradbus
from gradbus.actors.parameter_server import agreement
from gradbus.actors.parameter_server.messages import REQUEST, Flag, Message, encode
from gradbus.actors.parameter_server.worker import ParameterServerWorker
from gradbus.runtime.collectives import Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.errors import CollectiveError, ConfigError, PeerLost


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize(
    ("at_servers", "text"),
    [
        ({"mode": "asynchronous"}, "parameter_server.mode is 'synchronous', but rank 2 has 'asynchronous'"),
        ({"staleness": 7}, "parameter_server.staleness is 4, but rank 2 has 7"),
        ({"cut_bytes": 100}, "parameter_server.cut_bytes is None, but rank 2 has 100"),
        ({"parallel": {"optimizer__lr": 0.5}}, "optimizer.lr is 0.05, but rank 2 has 0.5"),
        ({"task": make_task(wide)}, r"the model of rank 2 differs .* \(32, 784\).* where they have .* \(24, 784\)"),
    ],
)
def test_what_differs_is_named_with_both_values(at_servers: dict[str, Any], text: str) -> None:
    ends = serve(make_task(), servers=1, at_servers=at_servers)
    for end in (*ends.workers, *ends.servers):
        assert isinstance(end.error, ConfigError)
        with pytest.raises(ConfigError, match=text):
            raise end.error


def test_another_version_of_the_protocol_is_named() -> None:
    place = new_place()
    settings, config = ParameterServerSettings(servers=1), DataParallelConfig()

    async def one(rank: int) -> None:
        async with (
            gradbus.connect(**place) as bus,
            gradbus.join_group(bus, rank=rank, world=3, name=agreement.NETWORK) as network,
        ):
            own = agreement.Introduction(optimizer="SGD", layout=[], protocol=2 if rank == 2 else 1)
            await agreement.agree(network, agreement.Roles(2, 1), own, config, settings)

    async def all_three() -> list[BaseException | None]:
        return await asyncio.gather(*(one(rank) for rank in range(3)), return_exceptions=True)

    for error in asyncio.run(all_three()):
        assert isinstance(error, ConfigError)
        assert "version of the protocol is 1, but rank 2 has 2" in str(error)


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ({"staleness": -1}, {"servers": -1}, {"min_workers": 0}, {"cut_bytes": 1}, {"mode": "half"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ParameterServerSettings(**wrong)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"servers": 9}, "servers is 9, but the model has 4 tensors"),
        ({"servers": 1, "parallel": {"algorithm": "dgc"}}, "algorithm is 'dgc', but with parameter servers"),
        ({"servers": 1, "parallel": {"delay_steps": 1}}, "delay_steps and predicts_weights are for ranks without"),
    ],
)
def test_what_a_parameter_server_cannot_do_is_refused(settings: dict[str, Any], text: str) -> None:
    ends = serve(make_task(functools.partial(wide)), **settings)
    for end in (*ends.workers, *ends.servers):
        assert isinstance(end.error, ConfigError)
        assert text in str(end.error)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("push", 7, Flag.HAS_GRADIENT), "bytes of 4 tensors, got 0"),
        (Message("save", 3), "worker 0 sent save at step 3, expected step 7"),
        (Message("meet", 0, meta={"name": 7}), "name=7, expected str"),
        (Message("push", 0, Flag.HAS_GRADIENT, packed=torch.zeros(3, dtype=torch.uint8)), "got 3"),
        (b"none of ours", "expected a message of at least 64 bytes"),
        (torch.zeros(1 << 25, dtype=torch.uint8), "are accepted"),
    ],
    ids=["no gradient", "another step", "no name", "wrong size", "bytes", "too large"],
)
def test_what_no_worker_sends_ends_the_run_and_names_who_sent_it(message: Any, text: str) -> None:
    async def play(network: Group, worker: ParameterServerWorker) -> None:
        async for _ in worker.epochs():
            if network.rank == 0:
                payload = encode(message) if isinstance(message, Message) else message
                await network.send(REQUEST, payload, to=2, timeout_s=5)
                await network.recv(REQUEST, source=2, timeout_s=5)

    ends = serve(make_task(), servers=1, play=play, parallel={"epochs": 2, "max_steps": 20})
    assert isinstance(ends.servers[0].error, CollectiveError)
    assert isinstance(ends.workers[1].error, PeerLost)
    assert text in str(ends.servers[0].error)


def test_a_gradient_that_is_said_to_be_finite_and_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbus.actors.parameter_server.worker.gradients_are_finite", lambda gradients: True)
    ends = serve(make_task(), NotFinite(small_mlp, data(), batch_size=16), servers=1)
    assert "worker 1 announced a finite gradient, but pushed NaN" in str(ends.servers[0].error)
