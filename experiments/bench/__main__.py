"""All benchmarks: ``make bench``, ``make bench PART=federated``, or ``python -m gradbus.experiments.bench [NAME]``.

Real processes over real DDS on the loopback interface. Ratios are taken in one run, block by block in turns, so that a
machine that is slow or busy is slow and busy for both sides. Exit code 1: a part failed, a figure falls short of what
is asked, or with --compare a ratio got worse than the earlier one by more than the spread of both, and did so again
when its part was measured once more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from gradbus.commands.exit_codes import exit_code_of
from gradbus.experiments.bench import (
    aggregation,
    attacks,
    bus,
    codecs,
    collectives,
    compression,
    control_path,
    data_parallel,
    document,
    elastic,
    embedded_client,
    federated,
    flower,
    growth,
    ladder,
    local,
    loop,
    parameter_server,
    privacy,
    reach,
    relay,
    relay_sessions,
    scale,
    sealing,
)
from gradbus.experiments.bench.command import BASELINE, Benchmark, Part, add_effort, parse, run
from gradbus.experiments.bench.results import Results
from gradbus.runtime.errors import GradbusError

DOCS = Path("docs/benchmarks.md")
DOCS_RESULTS = Path("docs/benchmarks.json")
DOCS_PLOT = Path("docs/images/growth.png")

PARTS = {
    "bus": Part(bus.measure, "Bus", 30, 20),
    "codecs": Part(codecs.measure, "Codecs", 30, 5),
    "collectives": Part(collectives.measure, "Collectives", 1200, 60),
    "federated": Part(federated.measure, "Federated rounds", 300, 30),
    "parallel": Part(data_parallel.measure, "Data-parallel steps", 120, 30),
}
SCALE = {
    "clients": Part(scale.measure_clients, "Growth with the clients", 90, 40),
    "ranks": Part(scale.measure_ranks, "Growth with the ranks", 60, 20),
    "payload": Part(scale.measure_payload, "Growth with the payload", 140, 20),
}
FEDERATED = (
    "secure",
    "secure-accuracy",
    "asynchronous",
    "selection",
    "personal",
    "virtual",
    "early-stop",
    "drift",
)
DOCUMENTED: Mapping[str, Mapping[str, str]] = {
    "suite": {name: part.about for name, part in (PARTS | SCALE).items()},
    "compression": {name: part.about for name, part in compression.BENCHMARK.parts.items()},
    "privacy": {name: part.about for name, part in privacy.BENCHMARK.measured().items()},
    "federated": {name: f"Federated: {federated.BENCHMARK.parts[name].about}" for name in FEDERATED},
    "flower": {name: part.about for name, part in flower.BENCHMARK.parts.items()},
    "reach": {name: part.about for name, part in reach.BENCHMARK.parts.items()},
    "bus": {"bus-relay": bus.BENCHMARK.parts["bus-relay"].about},
    "sessions": {name: part.about for name, part in relay_sessions.BENCHMARK.parts.items()},
}
"""By benchmark, the titles of the parts whose tables are in the document, when they have been measured for it."""
TITLES = {name: title for titles in DOCUMENTED.values() for name, title in titles.items()}


def _options(parser: argparse.ArgumentParser) -> None:
    add_effort(parser, "fewer sizes and blocks: under 3 minutes")
    parser.add_argument("--scale", action="store_true", help="cost as work grows, with the exponent and a plot of each")
    _document_option(parser)
    parser.add_argument("--write-baseline", action="store_true", help="make this the baseline that comes with the code")


def _document_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write-docs", action="store_true", help=f"rewrite the tables in {DOCS}, and {DOCS_RESULTS}")


def _with_document(benchmark: Benchmark) -> Benchmark:
    """A benchmark whose tables are in the document."""

    def options(parser: argparse.ArgumentParser) -> None:
        benchmark.options(parser)
        _document_option(parser)

    return benchmark._replace(options=options)


BENCHMARKS = {
    "suite": Benchmark(__doc__ or "", PARTS | SCALE, _options, list(PARTS)),
    "federated": _with_document(federated.BENCHMARK),
    "ddp": data_parallel.BENCHMARK,
    "collectives": collectives.BENCHMARK,
    "aggregation": aggregation.BENCHMARK,
    "attacks": attacks.BENCHMARK,
    "bus": _with_document(bus.BENCHMARK),
    "client": embedded_client.BENCHMARK,
    "codecs": codecs.BENCHMARK,
    "control": control_path.BENCHMARK,
    "elastic": elastic.BENCHMARK,
    "flower": _with_document(flower.BENCHMARK),
    "ladder": ladder.BENCHMARK,
    "local": local.BENCHMARK,
    "loop": loop.BENCHMARK,
    "parameter-server": parameter_server.BENCHMARK,
    "reach": _with_document(reach.BENCHMARK),
    "relay": relay.BENCHMARK,
    "sealing": sealing.BENCHMARK,
    "sessions": _with_document(relay_sessions.BENCHMARK),
    "compression": _with_document(compression.BENCHMARK),
    "privacy": _with_document(privacy.BENCHMARK),
}
KNOWN = (
    f"The benchmarks: {', '.join(sorted(BENCHMARKS))}; for make bench, PART may also be quick, scale, renew, profile "
    f"or pauses"
)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for. The exit code is that of ``gradbus``'s commands."""
    words = sys.argv[1:] if arguments is None else arguments
    name, options = ("suite", words) if not words or words[0].startswith("-") else (words[0], words[1:])
    if name not in BENCHMARKS:
        print(f"bench: there is no benchmark {name!r}. {KNOWN}", file=sys.stderr)
        return 2
    chosen, rest = parse(name, BENCHMARKS[name], options)
    torch.set_num_threads(1)
    try:
        if name != "suite":
            code, measured = run(BENCHMARKS[name], chosen, [name, *rest])
            if getattr(chosen, "write_docs", False):
                _write_docs(measured, DOCUMENTED[name])
            return code
        chosen.part = chosen.part or (list(SCALE) if chosen.scale else None)
        code, measured = run(BENCHMARKS[name], chosen, rest)
        _publish(chosen, measured)
        return code
    except GradbusError as error:
        print(f"bench: {error}", file=sys.stderr)
        return int(exit_code_of(error))


def _write_docs(measured: Results, titles: Mapping[str, str]) -> Results:
    """Put new runs into the document and the file of its results, and return all that these have.

    Args:
        titles: of the benchmark's parts that have a table. Another one may have the name of another benchmark's part.
    """
    known = Results.load(DOCS_RESULTS) if DOCS_RESULTS.exists() else Results()
    for one in measured.runs:
        if one.part in titles:
            known = known.with_run(one)
        else:
            print(f"not in {DOCS}, which has no table of it: {one.part}", file=sys.stderr)
    document.write(DOCS, known, TITLES)
    known.save(DOCS_RESULTS)
    return known


def _publish(chosen: argparse.Namespace, measured: Results) -> None:
    """Write the documents, the baseline and the plot that were asked for."""
    known = _write_docs(measured, TITLES) if chosen.write_docs else measured
    if chosen.write_baseline:
        measured.save(BASELINE)
    plot = DOCS_PLOT if chosen.write_docs else chosen.out.with_suffix(".png")
    if growth.draw(plot, known):
        print(f"drawn: {plot}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
