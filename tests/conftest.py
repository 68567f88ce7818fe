"""What holds for every test. Helpers that a test imports live beside it."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import dds_domains
import memory_maps
import pure
import pytest
import turns
from dds_domains import new_domain
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from gradbus.commands.lab.namespaces import Host

# The key of the user, with which all tests protect what they send, is made in a home of their own. What other programs
# keep in the true one, such as compiled fonts and browsers, takes them long to make again.
for _variable, _folder in {"XDG_CACHE_HOME": ".cache", "XDG_CONFIG_HOME": ".config"}.items():
    os.environ.setdefault(_variable, str(Path.home() / _folder))
_HOME = tempfile.TemporaryDirectory(prefix="gradbus-tests-home-")
os.environ["HOME"] = _HOME.name
for _variable in ("GRADBUS_KEY", "GRADBUS_KEY_FILE"):
    os.environ.pop(_variable, None)

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib: figures are drawn without a screen

# Before anything imports torch. Its threads wait for each other in loops, as if each had a core of its own: where two
# workers and their processes share two cores, much of these is spent so. What is computed is the same, bit by bit.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same examples each time (new ones are `make fuzz`'s), and a machine that stands still may make them slow.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# Hundreds of processes are started here. Each that may not keep what it has compiled takes 2 s longer, for torch alone.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts this in the background has it ignore Ctrl-C, and with it what is started here to be stopped by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_undo = pytest.MonkeyPatch.undo


def _undo_keeping(patch: pytest.MonkeyPatch) -> None:
    """Undo, and only then let go of what was in place meanwhile.

    Python 3.11 and 3.12 forget what they know of a class (its version tag) only after a value of it is replaced. Where
    the former value goes with that, and something of its closure ends in Python code, a thread that calls the method
    just then calls what is half gone: a segmentation fault. Python 3.13 has this mended.
    """
    in_place = [vars(owner).get(name) for owner, name, _ in patch._setattr if isinstance(owner, type)]  # noqa: SLF001 - no other list of them
    _undo(patch)
    del in_place


pytest.MonkeyPatch.undo = _undo_keeping  # type: ignore[method-assign]


def pytest_unconfigure() -> None:
    if turns.of_this_worker is not None:
        turns.of_this_worker.close()
    if _crash_report is not None:
        faulthandler.disable()
        _crash_report.close()
    _HOME.cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: nearly all that is made lives until the end, and is walked over again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first: with two workers, the quick ones that are left fill the last minute of both.
    Nightly tests are left out, unless they are asked for by their marker or by name."""
    if "nightly" not in config.getoption("markexpr") and not any("::" in argument for argument in config.args):
        config.hook.pytest_deselected(items=[item for item in items if "nightly" in item.keywords])
        items[:] = [item for item in items if "nightly" not in item.keywords]
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)  # nobody calls it without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have workers beyond the second run quick tests beside the slow ones of the first two."""
    from spread import FromBothEnds

    return FromBothEnds(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have the server that processes are forked from load what it needs while the first tests run."""
    if "warm" in sys.modules and any("slow" in item.keywords for item in session.items):
        sys.modules["warm"].start()
    # Nearly a million objects of modules and tests that live until the end: to walk over them takes a second, so it is
    # not done here either. What garbage there is among them stays, too.
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries complain at the end of what was never freed


MANY_OBJECTS = 200_000  # of those that a file of tests has left; to walk over them takes 0.2 s each time


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Leave out of the collection of garbage what the tests of a file have loaded: it stays, as the tests do.

    A module such as ``torch._dynamo`` brings a million objects. A test that collects garbage then took 2 s each time.
    """
    yield
    if nextitem is not None and nextitem.path != item.path and len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _logging_of_its_own() -> Iterator[None]:
    """What a test, or a command that it runs here, sets up for logging ends with it: others capture what is logged."""
    yield
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        structlog.reset_defaults()


_crash_report: TextIO | None = None  # of a worker: where its threads stood
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["GRADBUS_TESTS_TURNS"] = _HOME.name  # for the workers, if this process starts some
elif _folder := os.environ.pop("GRADBUS_TESTS_TURNS", ""):
    turns.of_this_worker = turns.Turns(Path(_folder))
    _crash_report = Path(_folder, f"crash-{os.environ['PYTEST_XDIST_WORKER']}").open("w")  # noqa: SIM115 - kept to the end


@pytest.hookimpl(trylast=True)  # pytest's own has it written to the terminal, in the midst of the dots
def pytest_configure() -> None:
    if _crash_report is not None:
        faulthandler.enable(_crash_report)


_crashed_workers: list[str] = []


@pytest.hookimpl(optionalhook=True)  # nobody calls it without pytest-xdist
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note that a worker has crashed; at its regular end there is no error."""
    if error:
        _crashed_workers.append(node.gateway.id)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have a run in which a worker has crashed end otherwise than one with failed tests: no busy machine does that, so
    `make test PART=again` must not pass over it."""
    if _crashed_workers:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show at the end where a worker has crashed."""
    for report in sorted(Path(_HOME.name).glob("crash-*")):
        if text := report.read_text():
            terminalreporter.section(report.name)
            terminalreporter.write(text)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time of a test begins to count
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Have each test wait while another one measures."""
    if (own := turns.of_this_worker) is None:
        return (yield)
    own.enter()
    try:
        return (yield)
    finally:
        own.leave()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Have a test of tests/pure.txt fail if it is not pure."""
    yield from _guarded(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """The same, after its fixtures."""
    yield from _guarded(item)


def _guarded(item: pytest.Item) -> Generator[None, None, None]:
    if not pure.is_listed(item.path):
        return (yield)
    guard = pure.Guard()
    guard.bar()
    try:
        yield
    finally:
        guard.lift()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a test that failed what its processes wrote."""
    report = yield
    if "warm" in sys.modules and (written := sys.modules["warm"].output()) and report.failed:
        report.sections.append((f"Processes, until the end of {report.when}", written))
    return report


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    """No test leaves another number of torch threads behind: the last bits of what others compute depend on it."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if before is not None:
        sys.modules["torch"].set_num_threads(before)


@pytest.fixture(autouse=True)
def no_open_domain_is_left() -> Iterator[None]:
    """Each test closes the DDS domains that it has opened. A later test that gets one of them would be refused it, or
    meet participants that it knows nothing of."""
    before = dds_domains.open_ones()
    yield
    if left := dds_domains.left_open(before):
        pytest.fail(f"DDS domains are still open {dds_domains.CLOSING_S:g} s after the end: {sorted(left)}")


@pytest.fixture
def one_thread() -> None:
    """torch has one thread: more give sums of floats other bits, and wait for each other on a busy machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def domain() -> int:
    """A DDS domain for this test."""
    return new_domain()


@pytest.fixture
def lone_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller in this process begins at once: it does not look for another one of its job for 0.25 s."""
    if liveness := sys.modules.get("gradbus.actors.federated.controller.liveness"):
        monkeypatch.setattr(liveness, "LISTEN_S", 0.01)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """The test leaves no shared memory mapped or open."""
    with memory_maps.nothing_more_at_the_end():
        yield


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines, made of network namespaces; where none can be made the test is skipped."""
    from gradbus.commands.lab.namespaces import NoNamespaces, two_hosts

    try:
        with two_hosts() as pair:
            yield pair
    except NoNamespaces as error:
        pytest.skip(str(error))
