"""The files that an update enters at its client and at its controller, as docs/architecture.md says: a plain run enters
nothing of what it has not chosen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import walks
from dds_domains import new_domain

pytestmark = pytest.mark.slow

# What may happen beside an update on a busy machine: heartbeats come and go, the next model arrives, a peer is found.
BESIDE = {
    "actors/federated/client/client_models.py",
    "actors/federated/client/global_model.py",
    "actors/federated/client_names.py",
    "actors/federated/controller/clients.py",
    "actors/federated/controller/dispatch.py",
    "actors/federated/controller/joining.py",
    "actors/federated/controller/liveness.py",
    "actors/federated/controller/naming.py",
    "actors/federated/controller/run_membership.py",
    "runtime/bus/liveness.py",
    "runtime/bus/receiver.py",
    "runtime/names.py",
    "runtime/security/encryption.py",
    "runtime/security/membership.py",
    "runtime/security/peers.py",
    "runtime/transport/access_policy.py",
    "runtime/transport/dds/discovery.py",
    "runtime/transport/dds/foreign_readers.py",
    "runtime/transport/dds/log_sink.py",
    "runtime/transport/wrappers.py",
    "runtime/wire/assembler.py",
    "runtime/wire/id_ranges.py",
}
# Each belongs to something that the settings of the walk leave out.
LEFT_OUT = {
    "actors/aggregation/bounded_strategy.py",
    "actors/aggregation/bounds.py",
    "actors/aggregation/clipping.py",
    "actors/aggregation/merged_buffers.py",
    "actors/aggregation/orders.py",
    "actors/aggregation/packet_sum.py",
    "actors/aggregation/partial_sum.py",
    "actors/aggregation/sum_summary.py",
    "actors/federated/client/evaluation_answers.py",
    "actors/federated/client/failures.py",
    "actors/federated/client/kept_optimizer.py",
    "actors/federated/client/packets_out.py",
    "actors/federated/client/pacing.py",
    "actors/federated/client/rules/base.py",
    "actors/federated/client/unsent_residuals.py",
    "actors/federated/controller/asynchronous.py",
    "actors/federated/controller/held_updates.py",
    "actors/federated/controller/packets_in.py",
    "actors/federated/controller/participation.py",
    "actors/federated/task_results.py",
    "codecs/feedback.py",
    "runtime/fast_paths.py",
    "runtime/forks.py",
    "runtime/testing/failpoints.py",
    "runtime/transport/peer_processes.py",
}


@pytest.fixture(scope="module")
def section(root: Path) -> str:
    """What the page says of an update."""
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page.split("## A ClientUpdate, from training to the mean")[1].split("\n## ")[0]


@pytest.mark.parametrize("side", ["client", "controller"])
def test_a_plain_update_enters_no_more_files_than_the_page_says_and_none_of_what_is_not_chosen(
    section: str, root: Path, side: str
) -> None:
    assert sorted(name for name in BESIDE | LEFT_OUT if not (root / name).exists()) == []
    said = re.search(r"(\d+) files at the client and (\d+) at the controller", section)
    assert said is not None
    found = walks.WALKS[side](new_domain())
    assert len(found) == walks.ROUNDS - 1
    entered = [set(walk.files) for walk in found]
    assert set.intersection(*entered) & LEFT_OUT == set()  # on a busy machine a heartbeat may fall into one of them
    assert not [name for name in set.union(*entered) if name.startswith(("actors/privacy/", "actors/secure_"))]
    most = {"client": int(said[1]), "controller": int(said[2])}[side]
    assert min(len(files - BESIDE) for files in entered) <= most
