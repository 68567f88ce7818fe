"""The process of one target: ``fuzz`` it for some seconds, or ``measure`` the memory that a corpus takes.

It imports nothing of gradbus before libFuzzer can watch it.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.target import Target

# Packages of parsers and their callees. Watching a module makes its import ten times as slow.
_WATCHED = (
    "gradbus.codecs", "gradbus.commands.files", "gradbus.commands.history.reader",
    "gradbus.commands.rundir.reading", "gradbus.models.mnist_files", "gradbus.runtime.checkpoint",
    "gradbus.runtime.collectives.data_movement", "gradbus.runtime.collectives.engine",
    "gradbus.runtime.collectives.objects",
    "gradbus.runtime.collectives.tensors", "gradbus.runtime.config", "gradbus.runtime.transport.sample_layout",
    "gradbus.runtime.transport.channels", "gradbus.runtime.json_text", "gradbus.runtime.profiling.summary",
    "gradbus.runtime.security", "gradbus.runtime.shm", "gradbus.runtime.wire", "gradbus.runtime.algorithms.parts",
    "gradbus.torch.store.messages",
)  # fmt: skip
_SLACK_BYTES = 1 << 30  # libFuzzer's own tables and corpus, and memory that allocators keep
_INPUT_S = 20  # that one input may take, on a busy machine
MOST_MEASURED = 4000


def target_of(name: str) -> Target:
    """Import the target, and silence the log: parsers log what they refuse, and there will be millions of that."""
    catalogue = import_module("fuzz.catalogue")
    import_module("gradbus.runtime.logs").configure(level="critical", style="json")
    target: Target = catalogue.BROKEN if name == "broken" else catalogue.TARGETS[name]
    return target


def _unwatched(package: str) -> Iterator[str]:
    """All modules of gradbus but the watched ones: the hook takes whole packages, without single modules."""
    found = find_spec(package)
    for module in iter_modules(found.submodule_search_locations if found else None):
        name = f"{package}.{module.name}"
        if not name.startswith(_WATCHED):
            yield name
            if module.ispkg:
                yield from _unwatched(name)


def fuzz(name: str, corpus: Path, crashes: Path, seconds: int) -> None:
    """Never returns. libFuzzer writes its figures to stderr, and the input that broke the parser into ``crashes``."""
    import atheris

    others = list(_unwatched("gradbus"))
    with atheris.instrument_imports(["gradbus", "fuzz", "tomllib"], others, enable_loader_override=False):
        target = target_of(name)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    # An allocation beyond twice the stated memory is a MemoryError, and so a crash.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + 2 * target.limit_bytes + _SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    arguments = [
        sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-max_len={target.max_len}", f"-timeout={_INPUT_S}",
        f"-artifact_prefix={crashes}/", "-rss_limit_mb=0", "-print_final_stats=1", "-verbosity=0", "-len_control=20",
    ]  # fmt: skip
    atheris.Setup(arguments, target.read)
    atheris.Fuzz()


def measure(name: str, corpus: Path) -> None:
    """Print as JSON the most memory that an input of a corpus takes: of too many inputs, only the longest ones."""
    from fuzz.target import peaks, remove_folder, resident_peaks

    target = target_of(name)
    files = sorted(corpus.iterdir(), key=lambda path: path.stat().st_size)[-MOST_MEASURED:]

    def most(measured: Callable[[Target, Iterator[bytes]], Iterator[int]]) -> tuple[int, str]:
        found = zip(measured(target, (path.read_bytes() for path in files)), map(str, files), strict=True)
        return max(found, default=(0, ""))

    try:
        (resident_bytes, swollen), (peak_bytes, worst) = most(resident_peaks), most(peaks)
    finally:
        remove_folder()
    facts = {"peak_bytes": peak_bytes, "worst": worst, "resident_bytes": resident_bytes, "swollen": swollen}
    print(json.dumps(facts))


def main(action: str, name: str, corpus: str, *rest: str) -> None:
    """As ``python -m fuzz.child fuzz|measure TARGET CORPUS [CRASHES SECONDS]``."""
    if action == "fuzz":
        crashes, seconds = rest
        fuzz(name, Path(corpus), Path(crashes), int(seconds))
    else:
        measure(name, Path(corpus))


if __name__ == "__main__":
    main(*sys.argv[1:])
