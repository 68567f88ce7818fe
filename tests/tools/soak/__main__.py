"""``python -m soak --minutes 30``, or ``make soak MINUTES=30``; over a relay: ``make soak TRANSPORT=zenoh``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from gradbus.commands.lab.namespaces import Host, NoNamespaces, two_hosts
from soak.nemesis import Nemesis
from soak.processes import SoakProcesses, make_processes
from soak.summary import page, summarise

_TICK_S = 0.25
_SAMPLE_S = 1.0
_START_S = 180.0
_MINUTES_FOR_LONG = 8.0
_CALM_S = 15.0  # at the end, without faults


def _wait_for_rounds(processes: SoakProcesses) -> None:
    """Until all runs well: from then on things break. Raises RuntimeError: it does not come to that."""
    rounds = processes.path / "federated" / "rounds.jsonl"
    steps = processes.path / "parallel" / "history" / "rank-0.jsonl"
    until_s = time.monotonic() + _START_S
    while not (
        rounds.exists() and rounds.read_text().count("\n") >= 3 and steps.exists() and steps.stat().st_size > 500
    ):
        if time.monotonic() > until_s:
            raise RuntimeError(f"no round or no step within {_START_S:g} s: look at the logs in {processes.path}")
        processes.keep_running()
        time.sleep(_TICK_S)


def main() -> int:
    """Run, check, and say what came of it. 0: all well."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("dds", "zenoh"), default="dds", help="zenoh: everybody dials a relay")
    parser.add_argument("--out", type=Path, default=None, help="a folder; by default runs/soak-TIME")
    options = parser.parse_args()
    out: Path = options.out or Path("runs", f"soak-{time.strftime('%Y%m%d-%H%M%S')}")
    out = out.absolute()
    out.mkdir(parents=True)
    with ExitStack() as stack:
        hosts: tuple[Host, Host] | None = None
        try:
            hosts = stack.enter_context(two_hosts())
        except NoNamespaces as error:
            print(f"without partitions: {error}")
        processes = make_processes(
            out, clients=options.clients, ranks=options.ranks, hosts=hosts, transport=options.transport
        )
        (out / "nemesis.jsonl").touch()
        sampled_s = 0.0
        try:
            _wait_for_rounds(processes)
            nemesis = Nemesis(
                processes,
                seed=options.seed,
                far=hosts[1] if hosts else None,
                log=out / "nemesis.jsonl",
                with_long=options.minutes >= _MINUTES_FOR_LONG,
                is_calm=processes.is_calm,
            )
            end_s = time.monotonic() + 60.0 * options.minutes
            while (now_s := time.monotonic()) < end_s:
                processes.keep_running()
                if now_s < end_s - _CALM_S:
                    nemesis.turn()
                else:
                    nemesis.rest()
                if now_s - sampled_s >= _SAMPLE_S:
                    processes.sample()
                    sampled_s = now_s
                time.sleep(_TICK_S)
        finally:
            processes.end()
    summary = summarise(out, minutes=options.minutes, seed=options.seed)
    text = page(summary)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (out / "summary.txt").write_text(text, encoding="utf-8")
    print(text + f"\n{out / 'summary.json'}")
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
