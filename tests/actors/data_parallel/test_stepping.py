"""What a step sends, without a network, and what comes of the mean gradient."""

from __future__ import annotations

import pytest
import torch
from training_scene import Scene

from gradbus.actors.data_parallel.mean_loss import summed
from gradbus.runtime.errors import CheckpointError


def test_a_bucket_is_averaged_in_place_over_the_ranks_that_have_data() -> None:
    scene = Scene(world=4, bucket_bytes=1, algorithm__route="shards", timeouts__collective_s=7)
    scene.send(active=3)
    assert sorted(name for name, _, _ in scene.group.sent) == [f"grad/{index}/mean" for index in range(4)]
    for _, flat, options in scene.group.sent:
        assert options.pop("out") is flat
        assert options == {"op": "mean", "divisor": 3, "algorithm": "shards", "round_id": 0, "timeout_s": 7.0}


def test_without_overlap_nothing_is_sent_before_the_end_of_the_backward_pass() -> None:
    orders = []
    for overlap in (True, False):
        scene = Scene(bucket_bytes=1, overlap=overlap)
        during: list[int] = []
        scene.net[0].weight.register_hook(lambda _, s=scene, d=during: d.append(len(s.group.sent)))
        scene.send()
        orders.append(during)
    assert orders[0][0] >= 2  # of four: those of the last layer
    assert orders[1] == [0]


def test_an_algorithm_that_needs_all_gradients_sends_one_message_at_the_end() -> None:
    scene = Scene(algorithm="dgc", algorithm__density=0.05, timeouts__collective_s=7)
    during: list[int] = []
    scene.net[0].weight.register_hook(lambda _: during.append(len(scene.group.sent)))
    for step in range(3):
        scene.send()
        assert scene.group.sent[step][0] == "grad/0/dgc"
        assert scene.group.sent[step][2] == {"round_id": step, "timeout_s": 7.0}
    assert during == [0, 1, 2]


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_the_dense_mean_is_clipped_as_pytorch_would(limit: float) -> None:
    scene, plain = Scene(optimizer__clip_norm=limit, optimizer__momentum=0.0), Scene(optimizer__momentum=0.0)
    scene.step()
    plain.send()
    torch.nn.utils.clip_grad_norm_(plain.net.parameters(), limit)
    plain.training.optimizer.step(0, 0)
    assert torch.allclose(scene.parameters, plain.parameters, atol=1e-8)


def test_a_state_of_another_model_is_refused() -> None:
    training = Scene().training
    with pytest.raises(CheckpointError, match=r"momentum_buffer of 'other' is \(3,\) of torch.float32, here None"):
        training.state.load_shared({"optimizer/momentum_buffer/other": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"is \(3,\) .*, here \(40, 6\)"):
        training.state.load_shared({"optimizer/momentum_buffer/0.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"state of dgc: .*M/"):
        Scene(algorithm="dgc").training.state.load_shared({"algorithm/M/0.bias": torch.ones(3)})


def test_after_closing_nothing_is_sent_any_more() -> None:
    scene = Scene(bucket_bytes=1)
    scene.send()
    scene.group.sent.clear()
    scene.training.close()
    torch.autograd.backward(scene.net(torch.ones(2, 6)).sum())
    assert scene.group.sent == []


def test_a_program_that_is_started_after_its_exchange_was_cancelled_sends_nothing() -> None:
    scene = Scene()
    exchange = scene.exchange(0)
    exchange.cancel()
    exchange.start("late", summed(torch.zeros(3)))
    assert (scene.group.sent, exchange.goes_on) == ([], False)
