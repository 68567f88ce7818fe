"""The two ways to exchange gradients, without a network: what they send, keep, save, and refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exchange_scene import Calls, Scene, network

from gradbus import codecs
from gradbus.actors.data_parallel.exchanges.base import OwnState
from gradbus.actors.data_parallel.exchanges.dgc import DgcExchange, DgcExchangeOptions, warmup_schedule
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError, CollectiveError


def test_a_bucket_is_averaged_in_place_over_the_ranks_that_have_data() -> None:
    scene = Scene(world=4, exchange__bucket_bytes=1, exchange__route="ring", timeouts__collective_s=7)
    scene.send(active=3)
    assert sorted(name for name, _, _ in scene.group.sent) == [f"grad/{index}" for index in range(4)]
    for _, flat, options in scene.group.sent:
        assert options.pop("out") is flat
        assert options == {"op": "mean", "divisor": 3, "algorithm": "ring", "round_id": 0, "timeout_s": 7.0}


def test_without_overlap_nothing_is_sent_before_the_end_of_the_backward_pass() -> None:
    orders = []
    for overlap in (True, False):
        scene = Scene(exchange__bucket_bytes=1, exchange__overlap=overlap)
        during: list[int] = []
        scene.net[0].weight.register_hook(lambda _, s=scene, d=during: d.append(len(s.group.sent)))
        scene.send()
        orders.append(during)
    assert orders[0][0] >= 2  # of four: those of the last layer
    assert orders[1] == [0]


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_the_dense_mean_is_clipped_as_pytorch_would(limit: float) -> None:
    scene, plain = Scene(optimizer__clip_norm=limit, optimizer__momentum=0.0), Scene(optimizer__momentum=0.0)
    scene.step()
    plain.send()
    torch.nn.utils.clip_grad_norm_(plain.net.parameters(), limit)
    plain.exchange.apply()
    assert torch.allclose(scene.parameters, plain.parameters, atol=1e-8)


@pytest.mark.parametrize(
    ("warmup", "schedule"),
    [
        ("paper", codecs.PAPER_WARMUP),
        ("none", ()),
        (0, ()),
        (2, codecs.geometric_warmup(2, density=0.01)),
        ([0.5, 0.1], (0.5, 0.1)),
    ],
)
def test_the_warmup_is_a_list_of_densities(warmup: Any, schedule: tuple[float, ...]) -> None:
    config = DataParallelConfig(exchange={"name": "dgc", "density": 0.01, "warmup": warmup})
    options = DgcExchangeOptions(**config.exchange.options)
    assert warmup_schedule(options) == schedule
    exchange = DgcExchange(config, Calls(), dict(network().named_parameters()), **config.exchange.options)  # type: ignore[arg-type]
    for epoch in range(5):
        exchange.start_epoch(epoch)
        assert exchange.density == max(0.01, schedule[epoch] if epoch < len(schedule) else 0.01)


def test_with_dgc_a_step_is_one_message() -> None:
    scene = Scene(exchange="dgc", exchange__density=0.05, timeouts__collective_s=7)
    for step in range(3):
        scene.step()
        assert scene.group.sent[step][0] == "dgc"
        assert scene.group.sent[step][2] == {"round_id": step, "timeout_s": 7.0}


def test_a_rank_without_data_sends_what_it_owes_and_goes_on_owing_the_rest() -> None:
    scene = Scene(exchange="dgc", exchange__density=0.05, exchange__warmup="none", optimizer__momentum=0.0)
    scene.step()
    owed = scene.exchange.own_state().tensors["dgc/V"].clone()
    scene.send(has_data=False)
    layout = codecs.DgcLayout.of(scene.net.named_parameters())
    sent = codecs.decode_dgc(scene.group.sent[-1][1], layout)
    assert sent.indices is not None
    assert torch.equal(sent.values, owed[sent.indices])
    assert sent.values.abs().min() > 0
    assert not sent.dense.any()


def test_where_only_some_have_data_their_gradients_weigh_more_and_what_is_owed_does_not() -> None:
    whole, some = (
        Scene(world=4, exchange="dgc", exchange__density=1.0, exchange__warmup="none", optimizer__momentum=0.0)
        for _ in range(2)
    )
    whole.send(active=4)
    some.send(active=2)
    layout = codecs.DgcLayout.of(whole.net.named_parameters())
    means = [codecs.combine_dgc([scene.group.sent[-1][1]], layout).flat for scene in (whole, some)]
    assert torch.equal(means[1], 2 * means[0])
    some.send(active=2, has_data=False)
    assert not codecs.combine_dgc([some.group.sent[-1][1]], layout).flat.any()


def test_a_step_with_nan_changes_nothing_and_what_was_sent_is_owed_again() -> None:
    scene = Scene(exchange="dgc", exchange__density=0.05, exchange__warmup="none")
    assert scene.step() is None
    before = scene.parameters
    owed = scene.exchange.own_state().tensors["dgc/V"].clone()
    assert scene.step(factor=float("nan")) == (0,)
    assert torch.equal(scene.parameters, before)
    assert torch.equal(scene.exchange.own_state().tensors["dgc/V"], owed)
    assert scene.step() is None
    assert not torch.equal(scene.parameters, before)
    scene.send()  # this rank has finite numbers, another one has not
    owed = scene.exchange.own_state().tensors["dgc/V"].clone()
    layout = codecs.DgcLayout.of(scene.net.named_parameters())
    nan = [torch.full_like(p, float("nan")) for p in scene.net.parameters()]
    bad, _ = codecs.dgc_step(nan, codecs.DgcState.zeros(layout), codecs.DgcConfig())
    assert scene.exchange.decode([[scene.group.sent[-1][1], bad]]) == (1,)
    sent = codecs.decode_dgc(scene.group.sent[-1][1], layout)
    assert sent.indices is not None
    owed[sent.indices] += sent.values
    assert torch.equal(scene.exchange.own_state().tensors["dgc/V"], owed)


def test_a_message_that_cannot_be_read_names_its_rank() -> None:
    scene = Scene(exchange="dgc")
    scene.send()
    with pytest.raises(CollectiveError, match="step 0: rank 1 of 2: DGC"):
        scene.exchange.decode([[scene.group.sent[-1][1], b"DG\x00\x01 and nothing more"]])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer__momentum": 0.0},
        {"exchange": "dgc"},
        {"exchange": "dgc", "optimizer__weight_decay": 1e-2, "optimizer__nesterov": True},
    ],
    ids=str,
)
def test_a_saved_state_goes_on_with_the_same_bits(settings: dict[str, Any]) -> None:
    one, other = Scene(**settings), Scene(**settings)
    for _ in range(4):
        one.step()
    other.net.load_state_dict(one.net.state_dict())
    shared = {name: tensor.clone() for name, tensor in one.exchange.shared_state().items()}
    own = one.exchange.own_state()
    other.step()  # and whatever was there before is gone
    other.done = one.done
    other.net.load_state_dict(one.net.state_dict())
    other.exchange.load_shared_state(shared)
    other.exchange.load_own_state(OwnState({n: t.clone() for n, t in own.tensors.items()}, dict(own.meta)))
    for _ in range(3):
        one.step()
        other.step()
    assert torch.equal(one.parameters, other.parameters)


def test_a_state_of_another_model_is_refused() -> None:
    dense, dgc = Scene(), Scene(exchange="dgc")
    with pytest.raises(CheckpointError, match=r"momentum_buffer of 'other' is \(3,\) of torch.float32, here None"):
        dense.exchange.load_shared_state({"optimizer/momentum_buffer/other": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"is \(3,\) .*, here \(40, 6\)"):
        dense.exchange.load_shared_state({"optimizer/momentum_buffer/0.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match="momentum of the dense tensors"):
        dgc.exchange.load_shared_state({"dgc/M": torch.ones(3)})
    own = dgc.exchange.own_state()
    with pytest.raises(CheckpointError, match="what this rank owes"):
        dgc.exchange.load_own_state(OwnState(own.tensors, {**own.meta, "layout": "0" * 16}))
    with pytest.raises(CheckpointError, match="what this rank owes"):
        dgc.exchange.load_own_state(OwnState({}, own.meta))


def test_after_closing_nothing_is_sent_any_more() -> None:
    scene = Scene(exchange__bucket_bytes=1)
    scene.exchange.begin(0, 1)
    scene.exchange.enable_overlap()
    scene.exchange.close()
    torch.autograd.backward(scene.net(torch.ones(2, 6)).sum())
    assert scene.group.sent == []
