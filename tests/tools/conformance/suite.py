"""Runs PyTorch's own tests of torch.distributed, which come with the torch wheel, over one backend after the other.

Some tests are wanted for one name only: which are skipped is decided, by a backend's name, when they are imported. So
they are imported once with the backend's own name; what is left out then is run with the backend posing as "gloo", and
then as "mpi", whose tests cover what gloo lacks. Each rank of each test is a process of its own, forked from one that
has imported the tests and has neither threads nor process groups.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped", "left out"]

NAMES = ("gloo", "mpi")  # that tests know and skip others for
TESTS = "torch.testing._internal.distributed.distributed_test"
_IMPORTED_ONCE = ("torch.testing._internal.common_distributed", "gradbus.torch.process_group")  # for all processes
_SMALL = "Skipped due to small world size."  # what few ranks are told, unless they are those of "mpi"
_FEATURES = ("ddp", "subgroup", "plugin")  # of a backend, for which tests look in a list of names

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Run:
    """What is to be run.

    Attributes:
        world: number of ranks. only: patterns of test names; none: all. limit_s: for one test. logs: folder for what
            the processes say.
    """

    world: int
    only: tuple[str, ...]
    limit_s: int
    logs: Path


@dataclass(frozen=True, slots=True)
class Result:
    """Of one test.

    Attributes:
        name: that the backend had. outcome: "left out": it does not want a backend of this name. why: the error, or
            the reason for skipping.
    """

    backend: str
    name: str
    test: str
    outcome: Outcome
    seconds: float
    why: str


def run(spec: Run, backends: Sequence[str], results: Connection) -> None:
    """Run all, and send a :class:`Result` for each test and name, then None. Entry of a process."""
    environment = {
        "WORLD_SIZE": str(spec.world), "MASTER_ADDR": "127.0.0.1", "BACKEND": backends[0],
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(spec.limit_s), "TEMP_DIR": tempfile.gettempdir(),
    }  # fmt: skip
    os.environ.update(environment)
    os.environ.setdefault(
        "GRADBUS_BUS__LEASE_S", "10"
    )  # no test kills a rank, and each starts processes: they may stall
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="gradbus-conformance-") as folder:
        tempfile.tempdir = folder  # the tests leave files behind
        with _into(spec.logs / "import.log"):
            for module in _IMPORTED_ONCE:
                importlib.import_module(module)
        skipped: dict[str, Result] = {}  # by test; what lacks a GPU lacks it with every backend
        for backend in backends:
            tests: list[str] | None = None
            for name in dict.fromkeys((backend, *NAMES)):
                tests = _in_process(spec, backend, name, tests, skipped, results)
    results.send(None)


def _in_process(
    spec: Run, backend: str, name: str, tests: list[str] | None, skipped: dict[str, Result], results: Connection
) -> list[str]:
    """One pass, in a process that imports the tests with this name. Returns the tests that it left out."""
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_pass, args=(spec, backend, name, tests, skipped, theirs))
    process.start()
    theirs.close()
    left_out = []
    with ours, contextlib.suppress(EOFError):
        while (result := ours.recv()) is not None:
            results.send(result)
            if result.outcome == "left out":
                left_out.append(result.test)
            elif result.outcome == "skipped":
                skipped[result.test] = result
    process.join()
    return left_out


def _pass(
    spec: Run, backend: str, name: str, tests: list[str] | None, skipped: dict[str, Result], results: Connection
) -> None:
    os.environ["BACKEND"] = name
    with _into(spec.logs / f"{backend}-as-{name}.log"):
        suite = _suite(backend, name)
        for test in unittest.TestLoader().getTestCaseNames(suite) if tests is None else tests:
            if spec.only and not any(fnmatch.fnmatch(test, pattern) for pattern in spec.only):
                continue
            if test in skipped:
                results.send(Result(backend, name, test, "skipped", 0.0, skipped[test].why))
            else:
                suite(test).run(_Report(backend, name, results))
    results.send(None)


def _suite(backend: str, name: str) -> Any:
    """The class of all tests, for a backend under a name."""
    common = importlib.import_module("torch.testing._internal.common_distributed")
    for feature in _FEATURES:
        common.DistTestCases.backend_feature[feature].add(name)
    tests = importlib.import_module(TESTS)
    if name != backend:  # and of those whose C++ feeds the profiler
        tests.PROFILING_SUPPORTED_BACKENDS.clear()
        tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()

    def set_up(self: Any) -> None:
        tests.TestDistBackend.setUp(self)
        self._start_processes(_fork.Process)

    def run_rank(cls: Any, *arguments: Any, **options: Any) -> None:
        """In the process of a rank."""
        import torch

        torch.set_num_threads(1)
        if name != backend:
            _pose(backend, name, tests)
        tests.TestDistBackend._run.__func__(cls, *arguments, **options)  # noqa: SLF001 - it is replaced, as below

    bases = (tests.TestDistBackend, tests.DistributedTest._DistTestBase)  # noqa: SLF001 - as torch's own suites
    return type("Suite", bases, {"setUp": set_up, "_run": classmethod(run_rank)})


def _pose(backend: str, name: str, tests: Any) -> None:
    """Have the tests of a name run over a backend."""
    known: Any = importlib.import_module("torch.distributed").Backend
    if name == known.MPI:  # torch itself does not treat that as it does others; here the name decides what is skipped
        tests.BACKEND = backend
    else:
        known._ensure_backend_registered(backend)  # noqa: SLF001 - torch's public calls give a backend one name
        known._plugins[name.upper()] = known._plugins[backend.upper()]  # noqa: SLF001 - likewise
        known.backend_type_map[name] = known.backend_type_map[backend]


_ErrorOf = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


class _Report(unittest.TestResult):
    """Sends how a test ended."""

    def __init__(self, backend: str, name: str, results: Connection) -> None:
        super().__init__()
        self._backend = backend
        self._name = name
        self._results = results
        self._began_s = time.monotonic()

    def _say(self, test: unittest.TestCase, outcome: Outcome, why: str = "") -> None:
        seconds = time.monotonic() - self._began_s
        method = test.id().rpartition(".")[2]
        self._results.send(Result(self._backend, self._name, method, outcome, round(seconds, 2), why[:400]))

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 (unittest's name)
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 (unittest's name)
        method = getattr(test, test.id().rpartition(".")[2])
        by_name = getattr(method, "__unittest_skip__", False) or reason == _SMALL
        self._say(test, "left out" if by_name else "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: _ErrorOf) -> None:  # noqa: N802 (unittest's name)
        text = "".join(traceback.format_exception(err[1]))
        print(text, file=sys.stderr, flush=True)
        self._say(test, "failed", _reason(text))

    addError = addFailure  # noqa: N815 (unittest's name)


def _reason(text: str) -> str:
    """The line of a traceback, or of several, that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].rpartition(".")[2].endswith(("Error", "Exception"))]
    return lines[-1] if lines[-1].startswith("Expected exit code") else (errors or lines)[-1]


@contextlib.contextmanager
def _into(log: Path) -> Iterator[None]:
    """Let everything that is written to stdout and stderr, by C++ too, go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with log.open("ab") as file:
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield
        finally:
            for number, former in enumerate(saved, 1):
                os.dup2(former, number)
                os.close(former)
