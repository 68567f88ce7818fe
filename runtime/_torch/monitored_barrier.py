"""A barrier that names the ranks that do not come: all report to rank 0, which sends them the outcome."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from gradbus.torch.point_to_point import Messages
from gradbus.torch.work import DdsWork

_HERE, _VERDICT = -1, -2  # tags; torch's are not negative
_ALL_CAME, _SOME_MISSING = 1, 0
_SLACK_S = 1.0  # how much longer than rank 0 the others wait, which else could give up just before it tells them


def monitored_barrier(messages: Messages, rank: int, world: int, timeout_s: float, wait_all_ranks: bool) -> None:
    """Wait for all ranks of a group.

    Args:
        wait_all_ranks: wait for all until the deadline, and name all that are missing; else the first.

    Raises:
        RuntimeError: ranks did not come in time. The words are gloo's: torch's users look for them.
    """
    if timeout_s <= 0:
        raise RuntimeError(f"[Rank {rank}]: Rank {rank} timed out in monitoredBarrier after 0 ms.")
    if rank == 0:
        _collect(messages, world, timeout_s, wait_all_ranks)
    else:
        _report(messages, rank, timeout_s)


def _collect(messages: Messages, world: int, timeout_s: float, wait_all_ranks: bool) -> None:
    until_s = time.monotonic() + timeout_s
    others = range(1, world)
    reports = {other: messages.receive(torch.empty(1, dtype=torch.uint8), other, _HERE, timeout_s) for other in others}
    missing: list[int] = []
    for other, report in reports.items():
        if not missing or wait_all_ranks:
            missing += [other] * (not _came(report, until_s))
    verdict = torch.tensor([_SOME_MISSING if missing else _ALL_CAME], dtype=torch.uint8)
    for other, report in reports.items():
        if report.is_success():
            messages.send(verdict, other, _VERDICT, timeout_s)
        else:
            report.expire()
    if missing:
        who = f"{'Ranks' if wait_all_ranks else 'Rank'} {', '.join(map(str, missing))}"
        raise RuntimeError(f"[Rank 0]: {who} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms")


def _came(report: DdsWork, until_s: float) -> bool:
    try:
        return report.wait(timedelta(seconds=max(0.001, until_s - time.monotonic())))
    except RuntimeError:
        return False


def _report(messages: Messages, rank: int, timeout_s: float) -> None:
    verdict = torch.empty(1, dtype=torch.uint8)
    try:
        messages.send(torch.zeros(1, dtype=torch.uint8), 0, _HERE, timeout_s).wait()
        messages.receive(verdict, 0, _VERDICT, timeout_s + _SLACK_S).wait()
        why = "" if int(verdict) == _ALL_CAME else "some ranks did not come"
    except RuntimeError as error:
        why = str(error)
    if why:
        raise RuntimeError(
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0. Please check rank 0 logs for faulty rank. ({why})"
        )
