"""How ranks find their group in a store: whichever store it is, a rank that is late is waited for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch_node import play

from gradbus.runtime.bus.transport_factory import reach_of
from gradbus.runtime.errors import BarrierTimeout, ConfigError
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.torch import formation
from gradbus.torch.formation import RankLocations, Rendezvous, agreed_name

REACH = reach_of(0, NetworkConfig())


def file_store(folder: Path) -> Store:
    return dist.FileStore(str(folder / "store"), 2)


def hash_store(_: Path) -> Store:
    return dist.HashStore()


def tcp_store(_: Path) -> Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


STORES: dict[str, Callable[[Path], Store]] = {"file": file_store, "hash": hash_store, "tcp": tcp_store}


@pytest.fixture(params=[*STORES, *(f"prefix of {name}" for name in STORES)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """One of each kind."""
    monkeypatch.setattr(formation, "EVERY_S", 0.2)
    made = STORES[request.param.rpartition(" ")[2]](tmp_path)
    return dist.PrefixStore("group", made) if request.param.startswith("prefix") else made


def rendezvous(store: Store, rank: int, timeout_s: float) -> Rendezvous:
    return Rendezvous(store, rank, 2, "world", timeout_s, rank)


def test_a_rank_0_that_comes_after_others_have_waited_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    class Waits:
        """In place of the log of the rank that waits: after its second look rank 0 comes."""

        looks = 0

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def look(self, missing: list[int], **_: Any) -> None:
            assert missing == [0]
            self.looks += 1
            if self.looks == 2:
                found.append(agreed_name(rendezvous(store, 0, 60.0)))

    monkeypatch.setattr(formation, "WaitLog", Waits)
    assert agreed_name(rendezvous(store, 1, 60.0), REACH) == found[0]


def test_a_rank_0_that_never_comes_is_named_after_the_timeout(store: Store) -> None:
    with pytest.raises(BarrierTimeout, match=r"process group 'world', rank 1: 1 of 2 ready after 0.3 s, missing \[0\]"):
        agreed_name(rendezvous(store, 1, 0.3), REACH)


def test_ranks_in_two_domains_are_an_error_that_names_both_and_the_setting() -> None:
    store = dist.HashStore()
    RankLocations(rendezvous(store, 0, 60.0), "g", reach_of(3, NetworkConfig()))
    other = RankLocations(rendezvous(store, 1, 60.0), "g", REACH)
    with pytest.raises(ConfigError) as caught:
        other.check()
    text = str(caught.value)
    assert text.startswith("process group 'world': ranks [0] cannot be met. Rank 0 is on ")
    assert ", its bus on lo in DDS domain 3; rank 1 is on " in text
    assert text.endswith(", its bus on lo in DDS domain 0. Set the same GRADBUS_BUS__DOMAIN on all")


def test_ranks_that_can_meet_are_waited_for() -> None:
    store = dist.HashStore()
    RankLocations(rendezvous(store, 0, 60.0), "g", REACH)
    RankLocations(rendezvous(store, 1, 60.0), "g", REACH).check()


def test_a_store_that_does_not_work_is_an_error_at_once_and_its_own() -> None:
    class Broken(dist.HashStore):
        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        agreed_name(rendezvous(Broken(), 1, 60.0), REACH)


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["late_in_each_store", "late_at_each_step"])
def test_ranks_that_are_late_are_waited_for_in_each_store_and_at_each_step(scene: str, tmp_path: Path) -> None:
    results = play("formation_scenes", scene, folder=str(tmp_path), timeout_s=150.0)
    assert results[0].keys() == results[1].keys()
    for result in results:
        assert len(result) >= 6
        assert set(result.values()) == {3.0}, result


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_starts_12_s_late_is_waited_for_in_a_file(tmp_path: Path) -> None:
    """As long as it really takes: longer than the 10 s after which a rank logs that it waits."""
    assert play("formation_scenes", "late_for_real", folder=str(tmp_path), timeout_s=100.0) == [3.0, 3.0]
