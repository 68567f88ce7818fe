"""The benchmark of federated rounds behind NAT: the forwarder that it measures against, its figures, and a tiny run."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from pathlib import Path

import pytest
from ports import free_port

from gradbus.commands.lab.namespaces import NoNamespaces
from gradbus.experiments.bench import reach
from gradbus.experiments.bench.forwarder import PIECE_BYTES, ForwardedRounds, control_forwarded, forward, join_forwarded
from gradbus.experiments.bench.reach import CELLS, ReachLaunch, ReachRoundEnd, figures_of, launch_of
from gradbus.experiments.bench.relay import TlsFolder

CELL = CELLS["reach-8-lossy"]


async def forwarded(plan: ForwardedRounds) -> list[int]:
    """Run forwarder, controller and clients in this process. Return what was noted."""
    numbers = itertools.count(1)
    async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
        forwarder = group.create_task(forward(plan))
        controller = group.create_task(control_forwarded(plan, lambda: next(numbers)))
        for number in range(plan.clients):
            group.create_task(join_forwarded(plan, number))
    assert forwarder.result()
    return controller.result()


@pytest.mark.parametrize("num_bytes", [1, PIECE_BYTES, 3 * PIECE_BYTES + 1])
def test_a_forwarder_carries_all_bytes_of_each_round_to_and_from_each_client(tmp_path: Path, num_bytes: int) -> None:
    plan = ForwardedRounds(TlsFolder(tmp_path), free_port(), clients=3, num_bytes=num_bytes, rounds=2)
    assert asyncio.run(forwarded(plan)) == [1, 2]


def test_a_client_is_told_that_the_controller_of_a_forwarder_ended_early(tmp_path: Path) -> None:
    plan = ForwardedRounds(TlsFolder(tmp_path), free_port(), clients=1, num_bytes=10, rounds=1)

    async def end_early() -> None:
        stream = await plan.dial(0)
        stream.writer.close()

    async def run() -> None:
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
            group.create_task(forward(plan))
            group.create_task(end_early())
            group.create_task(join_forwarded(plan, 0))

    with pytest.raises(ExceptionGroup) as found:
        asyncio.run(run())
    assert [str(one) for one in found.value.exceptions] == ["the other end ended with 10 of 10 bytes missing"]


def test_the_first_round_warms_up_and_does_not_count() -> None:
    assert launch_of(
        [ReachRoundEnd(5.0, 10_000_000), ReachRoundEnd(7.0, 11_000_000), ReachRoundEnd(8.0, 14_000_000)]
    ) == ReachLaunch([2.0, 1.0], [1.0, 3.0])


def test_rounds_below_nine_tenths_of_the_forwarder_and_rounds_slower_than_flower_fall_short() -> None:
    def taken(relay_s: float, flower_s: float) -> dict[str, list[ReachLaunch]]:
        return {
            "relay": [ReachLaunch([relay_s], [1.0])],
            "forwarder": [ReachLaunch([9.0], [1.0], "bbr")],
            "SuperLink": [ReachLaunch([flower_s], [])],
        }

    for relay_s, flower_s, is_short in ((9.9, 10.0, [False, False]), (10.1, 9.9, [True, True])):
        by_forwarder, sent, by_flower = figures_of(CELL, taken(relay_s, flower_s), "carried by the kernel")
        assert [by_forwarder.falls_short, by_flower.falls_short] == is_short
        assert not sent.asked
    assert by_forwarder.note == "6.14 s by the rate of the relay's link; bbr; carried by the kernel"


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(240)
def test_a_tiny_run_has_rounds_of_hosts_that_can_only_dial_out() -> None:
    chosen = argparse.Namespace(effort="tiny", launches=1, without_flower=True)
    try:
        by_forwarder, sent = reach.measure_cell(CELL, chosen)
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert by_forwarder.against is not None
    assert sent.against is not None
    # How much of so small a round leaves before the last one has ended varies; four ways of 25 ms take their time.
    assert min(*sent.samples, *sent.against.samples) > reach.TINY_BYTES / 1e6
    assert min(*by_forwarder.samples, *by_forwarder.against.samples) > 4 * reach.DELAY_S
