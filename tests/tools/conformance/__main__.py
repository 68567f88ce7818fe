"""PyTorch's own tests of torch.distributed, over gloo and over dds: dds must pass what gloo passes.

``make conformance`` or ``python -m conformance``; with ``make conformance TRANSPORT=zenoh`` dds's data passes a relay.
The exit code is 1 if dds misses a test that gloo passes on the CPU, 2 if nothing could be compared. The tests come with
the torch wheel and need the package expecttest.
Most of them need a GPU or NCCL besides, and are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance.suite import Result, Run, run
from gradbus.experiments.bench.relay import TlsFolder, relay_process
from gradbus.experiments.bench.results import machine
from gradbus.runtime.needs import install_line

REFERENCE, OURS = "gloo", "dds"
_IMPORT_S = 120.0

Results = dict[str, dict[str, Result]]  # by backend and test


def measure(spec: Run, console: Console) -> Results:
    """Run the tests over both backends.

    Raises:
        RuntimeError: the processes that run them are gone, or say nothing any more.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(spec, (REFERENCE, OURS), theirs))
    process.start()
    theirs.close()
    found: list[Result] = []
    try:
        while True:
            if not ours.poll(spec.limit_s + _IMPORT_S):
                raise RuntimeError(f"no test has ended for {spec.limit_s + _IMPORT_S:g} s")
            result = ours.recv()
            if result is None:
                return best(found)
            found.append(result)
            if result.outcome == "failed":
                console.print(f"{result.backend} as {result.name}: {result.test} failed: {result.why}", markup=False)
    except EOFError:
        raise RuntimeError(f"the tests have ended too early; {spec.logs} tells more") from None
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def relayed(folder: Path) -> Iterator[None]:
    """Have processes that are started meanwhile dial a relay of loopback, with TLS."""
    files = TlsFolder(folder.resolve())
    with relay_process(files) as (_, port):
        settings = {"GRADBUS_BUS__CONNECT": json.dumps(files.link(port).connect), "GRADBUS_BUS__TLS_CA": str(files.ca)}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in settings:
                del os.environ[name]


def best(results: Iterable[Result]) -> Results:
    """One result for each backend and test: under the first name that the test wants."""
    found: Results = {REFERENCE: {}, OURS: {}}
    for result in results:
        before = found[result.backend].get(result.test)
        if before is None or before.outcome == "left out":
            found[result.backend][result.test] = result
    return found


def passed(results: Mapping[str, Result]) -> set[str]:
    """The tests that passed."""
    return {test for test, result in results.items() if result.outcome == "passed"}


def show(results: Results, world: int, console: Console) -> None:
    """Print the table, and what differs."""
    table = Table(title=f"PyTorch's own tests, {world} ranks", title_justify="left")
    for column in ("backend", "passed", "failed", "skipped", "seconds"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for backend, tests in results.items():
        count = Counter(result.outcome for result in tests.values())
        seconds = sum(result.seconds for result in tests.values())
        skipped = count["skipped"] + count["left out"]
        table.add_row(backend, str(count["passed"]), str(count["failed"]), str(skipped), f"{seconds:.0f}")
    console.print(table)
    for backend, other in ((REFERENCE, OURS), (OURS, REFERENCE)):
        for test in sorted(passed(results[backend]) - passed(results[other])):
            why = results[other][test]
            console.print(f"only {backend} passes {test}; {other}: {why.outcome}: {why.why}", markup=False)


def main(arguments: list[str] | None = None) -> int:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=3, help="number of ranks; some tests name rank 2 (default: 3)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only tests such as test_ddp_*")
    parser.add_argument("--limit", type=int, default=120, metavar="SECONDS", help="for one test (default: 120)")
    parser.add_argument(
        "--transport", choices=("dds", "zenoh"), default="dds", help="what carries dds's data; zenoh: over a relay"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/conformance"), help="folder for results and logs")
    chosen = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    if importlib.util.find_spec("expecttest") is None:
        console.print(
            f"PyTorch's tests need expecttest, which is not installed: make setup, or {install_line('expecttest')}"
        )
        return 2
    chosen.out.mkdir(parents=True, exist_ok=True)
    for stale in chosen.out.glob("*.log"):
        stale.unlink()
    spec = Run(chosen.world, tuple(chosen.only), chosen.limit, chosen.out.resolve())
    try:
        with relayed(chosen.out / "tls") if chosen.transport == "zenoh" else contextlib.nullcontext():
            results = measure(spec, console)
    except RuntimeError as error:
        console.print(f"nothing to compare: {error}", markup=False)
        return 2
    show(results, chosen.world, console)
    rows = [asdict(result) for tests in results.values() for result in tests.values()]
    body = {"world": chosen.world, "transport": chosen.transport, "machine": machine(), "results": rows}
    (chosen.out / "results.json").write_text(json.dumps(body, indent=1), encoding="utf-8")
    expected = passed(results[REFERENCE])
    missed = expected - passed(results[OURS])
    if not expected:
        console.print(f"nothing to compare: {REFERENCE} passes no test of {', '.join(chosen.only) or 'all'}")
        return 2
    verdict = f"{OURS} misses {len(missed)} of" if missed else f"{OURS} passes all of"
    console.print(f"{verdict} the {len(expected)} tests that {REFERENCE} passes; logs and results in {chosen.out}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
