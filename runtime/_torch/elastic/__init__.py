"""Training that goes on while ranks die and join, in a script of one's own.

    import gradbus.torch.elastic as elastic

    state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @elastic.run
    def train(state):
        ddp = DistributedDataParallel(state.model)
        while state.epoch < 10:
            ...
            state.commit()

    train(state)

The names are those of Horovod Elastic. ``run`` makes the process group, calls the function, and calls it again in a new
process group each time the members change, with the newest committed state on all of them. See docs/elastic.md.
"""

from __future__ import annotations

from typing import NoReturn

from gradbus.torch.elastic.sampler import ElasticSampler
from gradbus.torch.elastic.state import MembersChanged, TorchState
from gradbus.torch.elastic.training import generation, leave, run

_STATE = "TorchState(model=..., optimizer=..., any_name=value), which holds plain values, too"
_HANDLED = "TorchState, whose parts are all objects with state_dict and load_state_dict"
_KERAS = "TorchState: gradbus trains models of torch only"
_COMMITS = "state.commit() in the training loop, every so many batches"
REPLACEMENTS = {
    "CommitStateCallback": _COMMITS,
    "ElasticRayExecutor": "gradbus run --elastic MIN:MAX -- train.py",
    "ElasticSettings": "the options of gradbus run --elastic MIN:MAX",
    "HorovodInternalError": "torch.distributed.DistBackendError, which run handles",
    "HostsUpdatedInterrupt": "MembersChanged, which run handles",
    "KerasState": _KERAS,
    "ModelStateHandler": _HANDLED,
    "ObjectState": _STATE,
    "OptimizerStateHandler": _HANDLED,
    "SamplerStateHandler": _HANDLED,
    "State": _STATE,
    "StateHandler": _HANDLED,
    "TensorFlowKerasState": _KERAS,
    "TensorFlowState": _KERAS,
    "UpdateBatchStateCallback": _COMMITS,
    "UpdateEpochStateCallback": _COMMITS,
    "WorkerNotificationManager": "state.check_host_updates()",
    "init": "run, which makes the process group",
    "notification_manager": "state.check_host_updates()",
    "run_fn": "run",
}
"""By the names of Horovod Elastic that this package does not have: what to use instead."""

__all__ = ["ElasticSampler", "MembersChanged", "TorchState", "generation", "leave", "run"]


def __getattr__(name: str) -> NoReturn:
    if name in REPLACEMENTS:
        raise AttributeError(f"gradbus.torch.elastic has no {name!r} of Horovod's: use {REPLACEMENTS[name]}")
    raise AttributeError(f"module 'gradbus.torch.elastic' has no attribute {name!r}")
