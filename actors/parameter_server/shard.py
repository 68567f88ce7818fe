"""The part of the weights that a server holds, and what changes it: sums of gradients, and an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.actors.data_parallel.optimization import RunOptimizer, is_made_by_task
from gradbus.actors.parameter_server.assignment import TensorPart
from gradbus.actors.parameter_server.messages import largest, split
from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Place, make_algorithm
from gradbus.runtime.checkpoint import Checkpoint, tensor_of
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CollectiveError, ConfigError

WEIGHTS = "weights/"  # before the names of tensors in a checkpoint
_OWN = "own/"


def state_bytes_of(model: nn.Module) -> int:
    """Return the bytes of the tensors that go beside the weights: buffers, and parameters that are not trained."""
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    return frozen + sum(buffer.nbytes for buffer in model.buffers())


def check_config(config: DataParallelConfig) -> None:
    """Refuse what ranks without a server do. Raises ConfigError: with the setting."""
    if config.algorithm.name != "dense":
        raise ConfigError(
            f"parallel.algorithm is {config.algorithm.name!r}, but with parameter servers workers push whole "
            f"gradients: set it to dense, or parameter_server.servers to 0"
        )
    if config.delay_steps or config.predicts_weights:
        raise ConfigError(
            "parallel.delay_steps and predicts_weights are for ranks without a parameter server; with one, "
            "parameter_server.mode=asynchronous computes while gradients travel"
        )


class Shard:
    """The pieces of one server. All methods are for one thread, off the event loop.

    Attributes:
        pieces: what it holds, in the order of messages. nbytes: their size. optimizer: changes them; it clips
            nothing, as no server sees all of a gradient. max_message_bytes: of the largest request or answer.
    """

    def __init__(self, config: DataParallelConfig, task: Any, model: nn.Module, pieces: Sequence[TensorPart]) -> None:
        """Make the optimizer: one of the configuration over these pieces alone, or the task's over its model.

        Args:
            model: as the task makes it. With an optimizer of the task, what this server does not hold is emptied.

        Raises:
            ConfigError: a setting is not for parameter servers, or an optimizer of the task meets a tensor that is cut.
        """
        self.pieces = tuple(pieces)
        self.nbytes = sum(piece.nbytes for piece in self.pieces)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        dense = make_algorithm("dense", Place(0, 1), {})
        if is_made_by_task(config, task):
            self.optimizer = RunOptimizer(config, task, model, trained, dense, clips=False)
            if cut := [piece.name for piece in self.pieces if not piece.is_whole]:
                raise ConfigError(
                    f"the task makes the optimizer, for whole tensors, but {cut[0]} is cut: leave "
                    f"parameter_server.cut_bytes out, or name an optimizer of the configuration"
                )
            self._parameters = {piece.name: trained[piece.tensor] for piece in self.pieces}
            for name in trained.keys() - self._parameters.keys():
                trained[name].data = trained[name].data.new_empty(
                    0
                )  # it never has a gradient, so no optimizer steps it
            for parameter in self._parameters.values():
                parameter.data = parameter.data.cpu()
        else:
            # The optimizer of the whole model, to be dropped: what it refuses, each server refuses with the same error.
            RunOptimizer(config, task, model, trained, dense, clips=False)
            self._parameters = {
                piece.name: nn.Parameter(_as_held(piece, trained[piece.tensor].detach())) for piece in self.pieces
            }
            holder = nn.ParameterList(self._parameters.values())
            self.optimizer = RunOptimizer(config, task, holder, self._parameters, dense, clips=False)
        self.max_message_bytes = largest(self.nbytes, state_bytes_of(model))

    def check(self, rank: int, packed: Tensor) -> None:
        """Whether this is a gradient for these pieces, and finite. Raises CollectiveError: it names the worker."""
        try:
            parts = split(packed, self.pieces)
        except CollectiveError as error:
            raise CollectiveError(f"the push of worker {rank}: {error}") from None
        if not are_finite([part for part in parts if part.is_floating_point()]):
            raise CollectiveError(f"worker {rank} announced a finite gradient, but pushed NaN or infinity")

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor], count: int, *, step: int, epoch: int) -> None:
        """Step the optimizer by the sum of gradients over ``count``.

        They are added in the order given, and the sum is multiplied by 1 / count once, as an all-reduce without servers
        does; float16 and bfloat16 are added in float32.

        Args:
            gradients: packed, as :meth:`check` has found right; the first one's memory is reused.
        """
        columns = zip(*(split(packed, self.pieces) for packed in gradients), strict=True)
        for parameter, parts in zip(self._parameters.values(), columns, strict=True):
            total = parts[0].float() if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0]
            for part in parts[1:]:
                total += part
            if count > 1:
                total *= 1.0 / count
            parameter.grad = total.to(parameter.dtype).reshape(parameter.shape)
        self.optimizer.step(step, epoch)
        for parameter in self._parameters.values():
            parameter.grad = None

    def weights(self) -> list[Tensor]:
        """The weights as they are, not copied."""
        return [parameter.detach() for parameter in self._parameters.values()]

    def is_finite(self) -> bool:
        """Whether all of the weights are."""
        return are_finite([tensor for tensor in self.weights() if tensor.is_floating_point()])

    @torch.no_grad()
    def load(self, packed: Tensor) -> None:
        """Take these weights. Raises CollectiveError: they have another size."""
        for parameter, part in zip(self._parameters.values(), split(packed, self.pieces), strict=True):
            parameter.copy_(part.reshape(parameter.shape))

    def tensors(self) -> dict[str, Tensor]:
        """Weights and the state of the optimizer by name, for a checkpoint, not copied."""
        weights = {f"{WEIGHTS}{name}": parameter.detach() for name, parameter in self._parameters.items()}
        return weights | {f"{_OWN}{name}": tensor for name, tensor in self.optimizer.tensors().items()}

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """The inverse. Raises CheckpointError: it does not fit; ConfigError: it is of another optimizer."""
        own = {name.removeprefix(_OWN): t for name, t in checkpoint.tensors.items() if name.startswith(_OWN)}
        for name, parameter in self._parameters.items():
            saved = tensor_of(checkpoint, WEIGHTS + name, dtype=parameter.dtype)
            if saved.shape == (parameter.numel(),):  # versions before held all of them flat
                saved = saved.view(parameter.shape)
                self._shape_state(own, name, parameter)
            elif saved.shape != parameter.shape:
                tensor_of(checkpoint, WEIGHTS + name, parameter.shape, parameter.dtype)  # says what is wrong
            parameter.copy_(saved)
        self.optimizer.load(own)

    def _shape_state(self, own: dict[str, Tensor], name: str, parameter: Tensor) -> None:
        """Give what the optimizer has of each entry of a parameter the parameter's shape."""
        if isinstance(self.optimizer.optimizer, torch.optim.Adafactor):
            return  # of a flat tensor it had other sums: load() refuses them
        for key, tensor in own.items():
            kind, _, rest = key.partition("/")
            if kind == "optimizer" and rest.partition("/")[2] == name and tensor.shape == (parameter.numel(),):
                own[key] = tensor.view(parameter.shape)


def _as_held(piece: TensorPart, tensor: Tensor) -> Tensor:
    """A copy on the CPU: of a whole tensor in its shape, as optimizers may look at it; of a part flat."""
    part = piece.of(tensor).cpu().clone()
    return part.view(piece.shape) if piece.is_whole else part
