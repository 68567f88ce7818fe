"""What holds for every test. Helpers that a test imports live beside it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import memory_maps
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from gradbus.experiments.namespaces import Host

# The key of the user, with which all tests protect what they send, is made in a home of their own. What other programs
# keep in the true one, such as compiled fonts and browsers, takes them long to make again.
for _variable, _folder in {"XDG_CACHE_HOME": ".cache", "XDG_CONFIG_HOME": ".config"}.items():
    os.environ.setdefault(_variable, str(Path.home() / _folder))
_HOME = tempfile.TemporaryDirectory(prefix="gradbus-tests-home-")
os.environ["HOME"] = _HOME.name
for _variable in ("GRADBUS_KEY", "GRADBUS_KEY_FILE"):
    os.environ.pop(_variable, None)

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib: figures are drawn without a screen

# The same examples each time (new ones are `make fuzz`'s), and a machine that stands still may make them slow.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# Hundreds of processes are started here. Each that may not keep what it has compiled takes 2 s longer, for torch alone.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts this in the background has it ignore Ctrl-C, and with it what is started here to be stopped by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have the server that processes are forked from load what it needs while the first tests run."""
    if "warm" in sys.modules and any("slow" in item.keywords for item in session.items):
        sys.modules["warm"].start()


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


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """The test leaves no shared memory mapped or open."""
    with memory_maps.nothing_more_at_the_end():
        yield


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines, made of network namespaces; where none can be made the test is skipped."""
    from gradbus.experiments.namespaces import NoNamespaces, two_hosts

    try:
        with two_hosts() as pair:
            yield pair
    except NoNamespaces as error:
        pytest.skip(str(error))
