"""``init_method="dds://domain/job"``: what it takes, what it says to what it does not take, and whole jobs with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from patience import soonest
from stores import finished, new_job
from torch_node import SOON_S, SceneRanks, play

from gradbus.torch import register
from gradbus.torch.register import register_scheme
from gradbus.torch.store import link as store_link
from gradbus.torch.store.address import Address, parse


def test_an_address_says_domain_job_rank_and_world_size() -> None:
    assert parse("dds://0/job1?rank=0&world_size=2") == Address(0, "job1", 0, 2)
    assert parse("dds://232/a.b-c_d?world_size=8&rank=7") == Address(232, "a.b-c_d", 7, 8)


WRONG = {
    "dds://": "the DDS domain is ''",
    "dds:///job": "the DDS domain is ''",
    "dds://x/job?rank=0&world_size=2": "the DDS domain is 'x', expected a number from 0 to 232",
    "dds://233/job?rank=0&world_size=2": "domain 233: expected 0 to 232",
    "dds://-1/job?rank=0&world_size=2": "the DDS domain is '-1'",
    "dds://host:4/job?rank=0&world_size=2": "the DDS domain is 'host:4'",
    "dds://0": "job name ''",
    "dds://0/": "job name '': expected 1 to 64 of",
    "dds://0/a/b?rank=0&world_size=2": "job name 'a/b'",
    "dds://0/*?rank=0&world_size=2": "job name '*'",
    "dds://0/" + "j" * 65 + "?rank=0&world_size=2": "job name 'jj",
    "dds://0/job": "rank is missing: give rank= to init_process_group",
    "dds://0/job?world_size=2": "rank is missing",
    "dds://0/job?rank=0": "world_size is missing: give world_size= to init_process_group",
    "dds://0/job?rank=0&world_size=-1": "world_size is missing",
    "dds://0/job?rank=x&world_size=2": "rank is 'x', expected a number",
    "dds://0/job?rank=&world_size=2": "rank is '', expected a number",
    "dds://0/job?rank=2&world_size=2": "rank is 2, expected 0 to 1 with world_size 2",
    "dds://0/job?rank=-2&world_size=2": "rank is '-2', expected a number",
    "dds://0/job?rank=0&world_size=0": "world_size is 0, expected 1 to",
    "dds://0/job?rank=0&world_size=99999999": "world_size is 99999999, expected 1 to",
    "dds://0/job?rank=0&world_size=2&colour=red": "'colour=red' is not expected here",
    "dds://0/job?rank=0&rank=1&world_size=2": "'rank=1' is not expected here, or twice",
    "dds://0/job?rank=0&world_size=2#there": "nothing is known of '#there'",
}


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_address_is_a_value_error_that_says_what_to_write(url: str) -> None:
    register()
    with pytest.raises(ValueError, match="Write dds://DOMAIN/JOB with rank= and world_size=") as raised:
        next(iter(dist.rendezvous(url)))
    assert WRONG[url] in str(raised.value)
    assert repr(url) in str(raised.value)


def test_torch_names_rank_and_world_size_that_are_missing_too() -> None:
    register()
    with pytest.raises(ValueError, match="rank is missing"):
        dist.init_process_group("gloo", init_method="dds://0/job")
    with pytest.raises(ValueError, match="world_size is missing"):
        dist.init_process_group("gloo", init_method="dds://0/job", rank=0)
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        dist.init_process_group("gloo", init_method="dds://0/job", rank=2, world_size=2)
    assert not dist.is_initialized()


def test_a_rank_alone_and_the_same_address_twice_in_one_process() -> None:
    register()
    domain, job = new_job()
    url = f"dds://{domain}/{job}?rank=0&world_size=1"
    (first, *_), (second, *_) = (next(iter(dist.rendezvous(url))) for _ in range(2))
    first.set("k", "v")
    assert second.get("k") == b"v"
    with pytest.raises(ValueError, match="is open in this process with world_size 1, now 2"):
        next(iter(dist.rendezvous(url.replace("size=1", "size=2"))))
    first.close()
    assert second.get("k") == b"v"
    second.close()
    finished(second)
    (third, *_) = next(iter(dist.rendezvous(url)))
    assert not third.check(["k"])  # a new store
    third.close()
    finished(third)


def test_the_timeout_of_the_process_group_is_that_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_link, "GRACE_S", 20.0)  # a loop that stands still has the last word all the same
    register()
    domain, job = new_job()
    url = f"dds://{domain}/{job}?rank=0&world_size=2"
    dds_store: Any = next(iter(dist.rendezvous(url, timeout=timedelta(seconds=0.3))))[0]
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 300ms, keys: k; ranks \[1\] of 2 have not"):
        dds_store.get("k")
    dds_store.close()
    finished(dds_store)


def test_the_scheme_may_be_registered_twice() -> None:
    register_scheme()
    register_scheme()


@pytest.mark.slow
def test_the_scheme_is_known_once_the_package_is_imported() -> None:
    """Before torch or after it; and torch says what is missing."""
    domain, job = new_job()
    meets = f"dist.init_process_group('gloo', init_method='dds://{domain}/{job}', rank=0, world_size=1)"
    ends = "dist.barrier(); dist.destroy_process_group(); print('done')"
    late = f"""
import torch.distributed as dist
try:
    {meets}
except RuntimeError as error:
    print(error)
import gradbus.torch
{meets}; {ends}
"""
    early = f"import gradbus.torch, torch.distributed as dist\n{meets}; {ends}"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    for program, said in ((late, ["No rendezvous handler for dds://", "done"]), (early, ["done"])):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


@pytest.mark.slow
def test_whole_jobs_of_both_backends_begin_and_end_with_it() -> None:
    for rank, result in enumerate(play("rendezvous_scenes", "whole_lives", just_end=True)):
        each = [[3.0, ["0", "1"]], 200_000]
        assert result["dds"] == result["gloo"] == each * 2
        assert result["threads"] == []
        if rank:
            assert (result["last words"], result["sum"]) == (b"1", 2)


@pytest.mark.slow
def test_a_store_that_a_script_still_holds_is_not_used_again_by_the_next_group() -> None:
    each = [3.0, ["0", "1"]]
    for result in play("rendezvous_scenes", "one_rank_keeps_the_store"):
        assert result == [each, each, each, each, 2]


@pytest.mark.slow
def test_a_store_that_waits_for_a_lost_farewell_does_not_keep_the_next_one_from_its_ranks() -> None:
    each = [3.0, ["0", "1"]]
    for result in play("rendezvous_scenes", "farewells_are_lost"):
        assert result == [each, each, each]


@pytest.mark.slow
def test_when_rank_0_is_killed_all_others_are_told_soon_and_any_other_rank_is_not_missed() -> None:
    assert soonest(one_after_the_other_dies, SOON_S) < SOON_S


def one_after_the_other_dies() -> float:
    """Seconds from the death of rank 0 until rank 1 knows."""
    with SceneRanks("rendezvous_scenes", "one_after_the_other_dies", world=3, dying=[0, 2]) as ranks:
        first, second, third = ranks.nodes
        assert third.wait() == -signal.SIGKILL
        second.wait_for("waits")
        first.wait_for("waits")
        killed = first.process.pid
        first.signal(signal.SIGKILL)
        killed_s = time.monotonic()
        failed = second.wait_for("failed as it should")
        result = ranks.value(second.wait_for("done"))
        assert second.wait() == 0
    assert result["sum"] in (1, 2)
    assert f"(process {killed}) is gone" in result["text"]
    assert "rank 1: rank 0 on" in result["text"]
    assert "is gone" in result["next"]
    return float(failed["at_s"]) - killed_s
