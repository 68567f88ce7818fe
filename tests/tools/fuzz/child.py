"""The process of one target: ``fuzz`` it for some seconds, or ``measure`` the memory that a corpus takes.

It reads arguments from the command line alone, and imports nothing of ours before libFuzzer can watch it.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.target import Target

# Parsers, and what they call. To watch a module makes its import ten times as slow.
_WATCHED = (
    "gradbus.codecs", "gradbus.experiments.files", "gradbus.experiments.history.reader",
    "gradbus.experiments.rundir.reading",
    "gradbus.models.idx", "gradbus.runtime.wire.assembler", "gradbus.runtime.wire.control_codec",
    "gradbus.runtime.checkpoint",
    "gradbus.runtime.collectives.engine", "gradbus.runtime.collectives.objects",
    "gradbus.runtime.collectives.streams", "gradbus.runtime.collectives.tensors", "gradbus.runtime.wire.control",
    "gradbus.runtime.wire.frames", "gradbus.runtime.dds.idl_types", "gradbus.runtime.json_text",
    "gradbus.runtime.wire.bounded_msgpack",
    "gradbus.runtime.profiling.summary", "gradbus.runtime.shm.shared_payload", "gradbus.runtime.security",
    "gradbus.runtime.config.federated", "gradbus.runtime.shm.segment", "gradbus.runtime.dds.topics",
    "gradbus.torch.hooks_wire", "gradbus.torch.store_messages", "tomllib",
)  # fmt: skip
_SLACK_BYTES = 1 << 30  # libFuzzer's own tables and corpus, and what allocators keep
_INPUT_S = 20  # that one input may take, on a busy machine
MOST_MEASURED = 4000


def target_of(name: str) -> Target:
    """Imports its module."""
    catalogue = import_module("fuzz.catalogue")
    target: Target = catalogue.BROKEN if name == "broken" else catalogue.TARGETS[name]
    return target


def _unwatched(package: str) -> Iterator[str]:
    """Our modules but those that are parsers: the hook takes whole packages, without single modules."""
    found = find_spec(package)
    for module in iter_modules(found.submodule_search_locations if found else None):
        name = f"{package}.{module.name}"
        if name.startswith(_WATCHED):
            continue
        yield name
        if module.ispkg:
            yield from _unwatched(name)


def quiet() -> None:
    """What parsers log is expected, and there will be millions of it."""
    import_module("gradbus.runtime.logs").configure(level="critical", style="json")


def fuzz(name: str, corpus: Path, crashes: Path, seconds: int) -> None:
    """Never returns. libFuzzer writes its figures to stderr, and the input that broke it into ``crashes``."""
    import atheris

    others = list(_unwatched("gradbus"))
    with atheris.instrument_imports(["gradbus", "fuzz", "tomllib"], others, enable_loader_override=False):
        target = target_of(name)
    quiet()
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    _limit_memory(2 * target.limit_bytes + _SLACK_BYTES)
    arguments = [
        sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-max_len={target.max_len}", f"-timeout={_INPUT_S}",
        f"-artifact_prefix={crashes}/", "-rss_limit_mb=0", "-print_final_stats=1", "-verbosity=0",
        "-len_control=20",
    ]  # fmt: skip
    atheris.Setup(arguments, target.read)
    atheris.Fuzz()


def _limit_memory(more_bytes: int) -> None:
    """An allocation beyond what is there now and ``more_bytes`` is a MemoryError, and so a crash."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def measure(name: str, corpus: Path) -> None:
    """Say as JSON how much memory the inputs of a corpus take at most: of too many, the longest ones."""
    from fuzz.target import peaks, remove_folder, resident_peaks

    target = target_of(name)
    quiet()
    files = sorted(corpus.iterdir(), key=lambda path: path.stat().st_size)[-MOST_MEASURED:]
    try:
        resident = list(resident_peaks(target, (path.read_bytes() for path in files)))
        found = list(peaks(target, (path.read_bytes() for path in files)))
    finally:
        remove_folder()
    worst = max(range(len(found)), key=found.__getitem__, default=None)
    swollen = max(range(len(resident)), key=resident.__getitem__, default=None)
    print(
        json.dumps(
            {
                "inputs": len(found),
                "peak_bytes": found[worst] if worst is not None else 0,
                "worst": str(files[worst]) if worst is not None else "",
                "resident_bytes": resident[swollen] if swollen is not None else 0,
                "swollen": str(files[swollen]) if swollen is not None else "",
                "limit_bytes": target.limit_bytes,
            }
        )
    )


def main(what: str, name: str, corpus: str, *rest: str) -> None:
    """As ``python -m fuzz.child WHAT TARGET CORPUS [CRASHES SECONDS]``."""
    if what == "fuzz":
        crashes, seconds = rest
        fuzz(name, Path(corpus), Path(crashes), int(seconds))
    else:
        measure(name, Path(corpus))


if __name__ == "__main__":
    main(*sys.argv[1:])
