"""What a client makes of packets: what it refuses to send, and the sum where the update has to be one piece."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbus import codecs
from gradbus.actors.aggregation.packet_sum import MAX_PACKETS, max_packet_bytes, max_update_bytes, sum_packets
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.packets_out import PacketRoute
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.task_results import NonFiniteResult, NothingToTrain
from gradbus.models.task import TrainResult
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.wire.control import PacketRequest, Receipt, UploadRequest, Welcome
from gradbus.runtime.wire.messages import Identity, TrainCmd

DIM = 64
RUN = 7


def vector_of(seed: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


def mixed(*names: str) -> list[bytes]:
    return [codecs.get(name, version=2).encode(vector_of(seed)) for seed, name in enumerate(names)]


class Sending:
    """A task whose training is this function of the round's packets."""

    def __init__(self, send: Callable[[Any], TrainResult]) -> None:
        self.send = send

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: nn.Module, *, round: Any, **_: Any) -> TrainResult:
        return self.send(round)


class Client:
    """A client that trains, with or without a way out for packets before the last."""

    def __init__(self, send: Callable[[Any], TrainResult], codec: str = "fp32", *, streams: bool = False) -> None:
        self.base = vector_of(99)
        self.left: list[EncodedUpdate] = []
        self.transfers = itertools.count(2)
        self.streams = streams
        options = {"version": 2, **({"density": 0.5} if codec == "s4" else {})}
        self.welcome = Welcome(0, 1, RUN, 1, codec, json.dumps(options), 1, 0.5)
        self.kept = ClientStateStore(None, 0)
        self.training = LocalTraining(
            Sending(send),
            Identity(0, 1),
            FlatModel(nn.Linear(DIM, 1, bias=False)),  # type: ignore[arg-type]
            self.kept,
            PayloadMemory(switched_on=False),
        )

    def train(self, round_id: int = 1) -> EncodedUpdate:
        route = PacketRoute(self.transfers, self.left.append) if self.streams else None
        inputs = RoundInputs(
            welcome=self.welcome,
            command=TrainCmd(round_id, 0, 1, 0.1, 0),
            base=self.base,
            route=None if route is None else lambda: route,
        )
        return self.training.train(inputs, 1, lambda: False)


def send_all(packets: Sequence[bytes]) -> Callable[[Any], TrainResult]:
    def send(round_: Any) -> TrainResult:
        for number, packet in enumerate(packets, start=1):
            round_.send(packet, num_samples=number)
        return TrainResult(50, 0.25, {"lines": 3.0})

    return send


def test_packets_leave_with_their_numbers_and_the_last_one_with_the_figures_of_the_training() -> None:
    packets = mixed("s4", "q8", "fp32")
    client = Client(send_all(packets), streams=True)
    last = client.train()
    sent = [*client.left, last]
    assert [one.payload for one in sent] == packets
    requests = [one.request for one in sent]
    assert all(isinstance(request, PacketRequest) for request in requests)
    assert [(one.transfer, one.update, one.packet, one.last) for one in requests] == [  # type: ignore[attr-defined]
        (1, 1, 1, False),
        (2, 1, 2, False),
        (3, 1, 3, True),
    ]
    assert [one.key.transfer for one in sent] == [1, 2, 3]
    assert [request.total_bytes for request in requests] == [len(packet) for packet in packets]
    assert (last.request.num_samples, last.request.loss, last.request.metrics) == (3, 0.25, {"lines": 3.0})
    total = codecs.decode(sum_packets(packets, dim=DIM), expected_dim=DIM).vector
    assert last.request.update_norm == pytest.approx(float(total.norm()), rel=1e-6)


@pytest.mark.parametrize("how", ["send", "result", "pairs"])
def test_the_number_of_samples_is_that_of_the_last_packet(how: str) -> None:
    packets = mixed("s4", "s4")
    results: dict[str, Callable[[Any], TrainResult]] = {
        "send": send_all(packets),
        "result": lambda _: TrainResult.packets(iter(packets), num_samples=2),
        "pairs": lambda _: TrainResult.packets(zip(packets, (1, 2), strict=True)),
    }
    for streams in (False, True):
        assert Client(results[how], streams=streams).train().request.num_samples == 2


def test_where_nothing_leaves_early_the_update_is_the_sum_in_one_piece() -> None:
    packets = mixed("s4", "q8", "sq8")
    update = Client(send_all(packets)).train()
    assert type(update.request) is UploadRequest
    assert bytes(update.payload) == bytes(sum_packets(packets, dim=DIM))


def test_the_sum_of_weights_is_taken_as_a_difference_to_the_base_before_it_is_encoded() -> None:
    weights = vector_of(5)
    client = Client(send_all([codecs.get("fp32", version=1).encode(weights)]))
    decoded = codecs.decode(client.train().payload, expected_dim=DIM)
    assert decoded.is_delta
    assert torch.equal(decoded.vector, weights - client.base)


def test_in_one_piece_what_the_codec_leaves_out_is_kept_and_in_packets_it_stays_as_it_was() -> None:
    packet = codecs.get("fp32").encode(vector_of(1))
    client = Client(send_all([packet]), "s4")
    first = client.train(1)
    client.training.on_receipt(first, Receipt(0, 1, RUN, 1, 1, True, ""))
    sent = codecs.decode(first.payload, expected_dim=DIM).vector
    assert torch.equal(first.state["residual"], vector_of(1) - sent)
    client.streams = True
    second = client.train(2)
    assert torch.equal(second.state["residual"], first.state["residual"])
    assert second.payload == packet


def test_what_no_controller_takes_is_an_error_of_the_training_that_sends_it() -> None:
    dense, longest = codecs.get("fp32").encode(vector_of(1)), max_packet_bytes(DIM)
    full = codecs.get("s4", version=1, density=1.0).encode(vector_of(1))
    count = max_update_bytes(DIM) // len(full)
    wrong: list[tuple[list[bytes], str]] = [
        ([dense, b"nonsense"], "packet 2 is no message of a codec for 64 values"),
        ([codecs.get("fp32").encode(torch.zeros(DIM + 1))], "packet 1 is no message"),
        ([bytes(longest + 1)], f"at most {longest} in one"),
        ([full] * (count + 1), f"{max_update_bytes(DIM)} in all"),
        ([codecs.get("s4", density=0.02).encode(vector_of(1))] * (MAX_PACKETS + 1), "at most 256"),
    ]
    for packets, text in wrong:
        with pytest.raises(ValueError, match=text):
            Client(send_all(packets), streams=True).train()


def test_a_sum_that_is_not_finite_is_a_training_that_has_diverged() -> None:
    packet = codecs.get("fp32").encode(torch.full((DIM,), 3e38))
    for streams in (False, True):
        with pytest.raises(NonFiniteResult, match="the sum of the packets is not finite"):
            Client(send_all([packet, packet]), streams=streams).train()


def test_a_result_without_a_packet_is_an_error_and_nothing_to_train_is_not() -> None:
    with pytest.raises(ValueError, match="without a packet"):
        Client(lambda _: TrainResult.packets([], num_samples=1)).train()
    with pytest.raises(NothingToTrain):
        Client(lambda _: TrainResult.nothing()).train()


def test_a_task_that_takes_the_round_and_sends_nothing_is_trained_as_any_other() -> None:
    client = Client(lambda _: TrainResult(1, 0.5), streams=True)
    update = client.train()
    assert type(update.request) is UploadRequest
    assert client.left == []
