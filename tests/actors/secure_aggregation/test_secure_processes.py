"""Secure aggregation in real processes, some of which are killed: what is left has the bits of the plain sums."""

from __future__ import annotations

import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from federation import NOBODY_DIES_S, Federation

from gradbus import codecs
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.models import NoopTask

pytestmark = [pytest.mark.slow, pytest.mark.faults]

DIM = 20_000
NEVER = "/nonexistent/gate"
SECURE: dict[str, Any] = {"clients__min": 2, "secure_aggregation__enabled": True}


def plain_checksums(rounds: list[list[int]]) -> list[int]:
    """Checksums of the weights after each round, with the updates of these clients, added one by one."""
    task, weights, strategy, found = NoopTask(DIM, delta="seeded"), torch.zeros(DIM), FedAvg(DIM), []
    for round_id, clients in enumerate(rounds, 1):
        base = weights.clone()
        strategy.begin(round_id, base)
        for client_id in clients:
            model = task.build_model()
            model.vector.data.copy_(base)
            task.train(
                model,
                client_id=client_id,
                round_id=round_id,
                epochs=1,
                lr=0.01,
                seed=0,
                subset_size=0,
                should_stop=lambda: False,
            )
            sent = codecs.get("fp32").encode(model.vector.detach() - base)
            strategy.add(Update(codecs.parse(sent, expected_dim=DIM)), Facts(client_id=client_id, num_samples=1))
        strategy.finish(weights)
        found.append(zlib.crc32(weights.numpy().data))
    return found


def test_a_controller_killed_with_the_sum_in_its_hands_comes_to_the_same_bits_with_new_keys(tmp_path: Path) -> None:
    with Federation(domain=new_domain(), dim=DIM, silence_s=NOBODY_DIES_S) as federation:
        rules = {**SECURE, "rounds": 2, "clients__num": 3, "clients__min": 3, "checkpoint__dir": str(tmp_path)}
        first = federation.controller(**rules, fail_at="after_aggregate_before_commit:2")
        clients = [federation.client(number, client={"least_members": 3}) for number in range(3)]
        assert first.wait(60.0) == -signal.SIGKILL
        controller = federation.controller(**rules)
        done = controller.wait_for("done", timeout_s=60.0)
        assert [node.wait() for node in (controller, *clients)] == [0] * 4
    assert [report["weights_crc32"] for report in done["reports"]] == plain_checksums([[0, 1, 2]] * 2)
