"""Ranks of torch.distributed for tests: real processes, ended by their ids. See :mod:`federation`.

They meet in a store of the test's own process, as they would in that of torchrun, and find DDS through the environment.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend_support import require_torch_backend
from patience import PATIENT_S
from ranks import Ranks

SCENES = Path(__file__).resolve().parents[1] / "torch_backend"
LEASE_S = PATIENT_S  # of a rank that does not die: a machine that stands still for seconds is no death
DYING_LEASE_S = 4.0  # of one that does, and may well stand still before that
# From a death until all others know: the lease, a second, and a machine that does other things, too.
SOON_S = DYING_LEASE_S + 1.0 + 1.5
Say = Callable[..., None]


class RankLocation:
    """What a scene gets: which rank it is, and how to make and destroy the process group.

    Attributes:
        rank, world, backend: of this process. options: what the test gave; ``environments``: of each rank;
            ``dying``: ranks that will be killed.
    """

    def __init__(self, spec: dict[str, Any], say: Say) -> None:
        self.rank: int = spec["rank"]
        self.world: int = spec["world"]
        self.backend: str = spec["backend"]
        self.options: dict[str, Any] = spec["options"]
        self.say = say
        self.port: int = spec["port"]

    def start(self, *, prefix: str = "", timeout_s: float = 30.0, **options: Any) -> None:
        """Make the process group. ``prefix``: of the store, for a group after one that has failed."""
        store: Any = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=30))
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(prefix, store) if prefix else store,
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=timeout_s),
            **options,
        )

    @property
    def store(self) -> Any:
        """The store of the process group."""
        return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it


class SceneRanks(Ranks):
    """The ranks of one scene: a function of a file in tests/torch_backend, ``scene(place)``, in each process. The test
    is skipped if torch is too old for gradbus.torch."""

    def __init__(self, file: str, scene: str, world: int = 2, backend: str = "dds", **options: Any) -> None:
        require_torch_backend()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        super().__init__(run_forked, world, file=file, scene=scene, backend=backend, options=options, port=port)
        self.start_all()

    def results(self, timeout_s: float = 60.0) -> list[Any]:
        """What the scene returned on each rank: tensors, numbers, text, lists and dicts of them."""
        found = [self.value(node.wait_for("done", timeout_s)) for node in self.nodes]
        for node in self.nodes:
            assert node.wait(30.0) == 0
        return found

    @staticmethod
    def value(event: dict[str, Any]) -> Any:
        """What the scene returned, from the event "done"."""
        return torch.load(io.BytesIO(event["value"]), weights_only=True)


def play(
    file: str, scene: str, world: int = 2, backend: str = "dds", *, timeout_s: float = 60.0, **options: Any
) -> list[Any]:
    """Run a scene to its end. Returns what it returned, rank by rank."""
    with SceneRanks(file, scene, world, backend, **options) as ranks:
        return ranks.results(timeout_s)


def run_forked(spec: dict[str, Any], pipe: Any) -> None:
    """Entry of a forked process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["GRADBUS_BUS__DOMAIN"] = str(spec["place"]["domain"])
    dies = spec["rank"] in spec["options"].get("dying", ())
    os.environ["GRADBUS_BUS__LEASE_S"] = str(DYING_LEASE_S if dies else LEASE_S)
    os.environ.update(spec["options"].get("environments", {spec["rank"]: {}})[spec["rank"]])
    torch.set_num_threads(1)

    def say(event: str, **facts: Any) -> None:
        pipe.send({"event": event, "at_s": time.monotonic(), **facts})

    try:
        value = _scene(spec["file"], spec["scene"])(RankLocation(spec, say))
        if spec["backend"] == "gloo":
            dist.barrier()
        elif dist.is_initialized() and not spec["options"].get("just_end"):
            dist.destroy_process_group()
    except Exception:
        say("failed", text=traceback.format_exc())
        sys.exit(1)
    saved = io.BytesIO()
    torch.save(value, saved)
    say("done", value=saved.getvalue())
    if spec["backend"] == "gloo":
        # Destroying gloo after a hook that calls collectives ends a process now and then: "Resource deadlock avoided".
        os._exit(0)


def _scene(file: str, name: str) -> Callable[[RankLocation], Any]:
    found = importlib.util.spec_from_file_location(file, SCENES / f"{file}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[file] = module  # what is pickled finds its classes there
    found.loader.exec_module(module)
    scene: Callable[[RankLocation], Any] = getattr(module, name)
    return scene
