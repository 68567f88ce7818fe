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

from gradbus.torch.elastic.sampler import ElasticSampler
from gradbus.torch.elastic.state import MembersChanged, TorchState
from gradbus.torch.elastic.training import generation, leave, run

__all__ = ["ElasticSampler", "MembersChanged", "TorchState", "generation", "leave", "run"]
