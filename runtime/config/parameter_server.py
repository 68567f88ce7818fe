"""Settings of a run with parameter servers, equal on all servers and workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gradbus.runtime.config.settings import Settings

MAX_SERVERS = 256


class ParameterServerSettings(Settings):
    """Parameter servers: processes that hold the weights, each a part of them, and change them by the gradients that
    the workers send (docs/parameter-server.md). The optimizer is at the servers."""

    servers: Annotated[int, Field(ge=0, le=MAX_SERVERS)] = 0
    """Number of parameter servers. 0: none, the ranks exchange what they have learnt with each other."""
    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """When gradients change the weights. `synchronous`: a step is the mean of the gradients of all workers.
    `asynchronous`: each gradient on its arrival, times one over the number of workers."""
    staleness: Annotated[int, Field(ge=0, le=1_000_000)] = 4
    """Number of steps that an asynchronous worker may be ahead of the slowest one (stale synchronous parallel). 0: all
    wait for each other after every step."""
    cut_bytes: Annotated[int, Field(ge=64)] | None = None
    """Size, in bytes, above which a tensor is cut into parts that may lie on several servers. It is for optimizers that
    treat each entry by itself, as sgd and adamw do. null: tensors stay whole."""
    min_workers: Annotated[int, Field(ge=1)] = 1
    """Number of workers without which a run ends, where it goes on without those that are lost."""
    on_lost_worker: Literal["end", "continue"] | None = None
    """What becomes of the run when a worker is lost: `end`, naming it, or `continue` with the others, whose data are
    then all that is trained on. null: `end` in synchronous mode, `continue` in asynchronous mode."""

    def workers_needed(self, workers: int) -> int:
        """Return the number of workers, of so many at the start, without which the run ends."""
        goes_on = (self.on_lost_worker or ("continue" if self.mode == "asynchronous" else "end")) == "continue"
        return self.min_workers if goes_on else workers
