"""What is saved of a rank's training, and what a rank that joins gets of it, besides the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from gradbus.actors.data_parallel.algorithm import AlgorithmLabel
from gradbus.actors.data_parallel.optimization import RunOptimizer
from gradbus.actors.data_parallel.replicas import model_tensors
from gradbus.actors.data_parallel.state import restore_model, tensors_below
from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Algorithm, bucket_of
from gradbus.runtime.algorithms.live_weights import write_weights
from gradbus.runtime.checkpoint import Checkpoint, restore_random_numbers
from gradbus.runtime.errors import CheckpointError


class TrainingState:
    """The tensors of a run on one rank: those of the model, the optimizer and the algorithm. Every method is for the
    compute thread."""

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, Tensor],
        optimizer: RunOptimizer,
        algorithm: Algorithm,
        label: AlgorithmLabel,
    ) -> None:
        """``trained``: the parameters that are trained, by name. ``label``: of the algorithm, for errors."""
        self._model = model
        self._trained = trained
        self._optimizer = optimizer
        self._algorithm = algorithm
        self._label = label
        self._finite_names = [f"parameter/{name}" for name in trained] + [
            f"buffer/{name}"
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and are_finite([buffer])
        ]

    def has_stayed_finite(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether all that was finite in the model at the start is so in these tensors of it, by name."""
        return are_finite([tensors[name] for name in self._finite_names])

    def own(self) -> dict[str, Tensor]:
        """Return what is this rank's alone, by name, not copied: with replicas that differ also model and optimizer."""
        state = _named("algorithm/", self._algorithm.own_state())
        if not self._algorithm.equal_replicas:
            state |= model_tensors(self._model) | self._optimizer.tensors()
        return state

    def shared(self) -> dict[str, Tensor]:
        """Return what is equal on all ranks beside the model, by name, not copied."""
        state = _named("algorithm/", self._algorithm.shared_state())
        if self._algorithm.equal_replicas:
            state |= self._optimizer.tensors()
        return state

    def load_shared(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`shared`. Raises CheckpointError: it does not fit."""
        if self._algorithm.equal_replicas:
            self._optimizer.load(tensors)
        self._load(self._algorithm.own_state(), tensors_below("algorithm/", tensors))

    def of_joiner(self) -> dict[str, Tensor]:
        """Return what a rank that joins gets beside the model, by name, not copied: also where replicas differ."""
        return _named("algorithm/", self._algorithm.shared_state()) | self._optimizer.tensors()

    def load_joiner(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`of_joiner`. Raises CheckpointError: it does not fit."""
        self._optimizer.load(tensors)
        self.load_algorithm(tensors)

    def load_algorithm(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the algorithm's part of the state that a joiner receives, and, where it says so, weights that follow."""
        self._load({}, tensors_below("algorithm/", tensors))
        if self._algorithm.scope == "weights":
            write_weights(self._trained, self._algorithm.weights_of_joiner(bucket_of(self._trained).flat))

    def restore(self, checkpoint: Checkpoint, rank: int) -> None:
        """Restore what this rank has saved: rank 0 the model and what is equal on all ranks, every rank its own, and
        the state of torch's random numbers.

        Raises:
            CheckpointError: something does not fit.
        """
        own = tensors_below("own/", checkpoint.tensors)
        try:
            self._load(tensors_below("algorithm/", own), self._algorithm.shared_state())
            if not self._algorithm.equal_replicas:
                restore_model(self._model, checkpoint, "own/")
                self._optimizer.load(own)
            elif rank == 0:
                restore_model(self._model, checkpoint)
            if rank == 0:
                self.load_shared(tensors_below("shared/", checkpoint.tensors))
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint of step {checkpoint.round_id}: {error}. If the model is the same, it is damaged: restore "
                f"it from a backup, or choose another checkpoint.dir"
            ) from None
        restore_random_numbers(checkpoint)

    def _load(self, own: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        try:
            self._algorithm.load_state(own, shared)
        except ValueError as error:
            raise CheckpointError(f"state of {self._label.name}: {error}") from None


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
