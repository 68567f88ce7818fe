"""torch.distributed where each node has a key of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from identities import Identities
from torch_node import SceneRanks

pytestmark = pytest.mark.slow


def environment(known: Identities, name: str) -> dict[str, str]:
    said = known.security(name)
    return {
        "GRADBUS_BUS__SECURITY": "identity",
        "GRADBUS_KEY_FILE": said["key_file"],
        "GRADBUS_BUS__CONTROLLER_KEY": said["controller_key"],
        "GRADBUS_BUS__ALLOW_FILE": said["allow_file"],
    }


def test_ranks_of_two_machines_with_a_key_each_meet_by_either_store_and_a_stranger_hears_why_he_is_kept_out(
    tmp_path: Path,
) -> None:
    known = Identities(tmp_path, clients=0)
    known.allow_rank("host-b", 2)
    known.new("stranger")
    names = ["server", "server", "host-b"]  # two of them on one machine
    environments = [environment(known, name) for name in names]
    gate = tmp_path / "gate"
    with SceneRanks("identity_scenes", "both_ways", 3, gate=str(gate), environments=environments) as ranks:
        urls = [node.wait_for("met")["url"] for node in ranks.nodes]
        others = [environment(known, "stranger")]
        with SceneRanks("identity_scenes", "stranger", 1, url=urls[0], environments=others) as strangers:
            (told,) = strangers.results()
        gate.touch()
        found = ranks.results()
    assert "stranger is not on the allow list of the controller" in told
    assert found == [[6.0, 6.0, 6.0, 6.0], [6.0, 6.0, 12.0, 6.0], [6.0, 6.0, 12.0, 6.0]]
